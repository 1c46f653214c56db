//! Checks of a shape's heads: whether they fit the hidden size, and whether a block can be cut into
//! slices of heads and channels.

use crate::config::Config;
use crate::error::Error;
use crate::kernels::{HEAD_LIMIT, PAIRS, QkNorm};
use crate::models::{Model, NormPlaces, Shape, Training};

/// Refuses heads of any block that do not fit the hidden size, or key-value heads that do not fit
/// the heads.
pub(super) fn check_heads(shape: &Shape) -> Result<(), Error> {
    let of_windows = Shape { rotary: shape.window_rotary.or(shape.rotary), ..*shape };
    check_heads_of(&of_windows)?;
    check_heads_of(&shape.with_global_heads())
}

fn check_heads_of(shape: &Shape) -> Result<(), Error> {
    let Shape { hidden, heads, head_size, kv_heads, names, .. } = *shape;
    // In a family whose config.json has no head size, the heads share the channels evenly.
    let is_even = head_size.checked_mul(heads) == Some(hidden) || names.has_head_size();
    if !is_even || head_size > HEAD_LIMIT || head_size == 0 {
        let problem = format_args!(
            "is {hidden}, model.heads {heads}: hidden must be a multiple of heads, and at most \
             {HEAD_LIMIT} times heads"
        );
        return Err(Error::config("model.hidden", problem));
    }
    if kv_heads == 0 || heads % kv_heads != 0 || (kv_heads != heads && !names.has_kv_heads()) {
        let problem = format_args!(
            "is {kv_heads}, model.heads {heads}: heads must be a multiple of it, and equal to it \
             in a family without grouped-query attention"
        );
        return Err(Error::config("model.kv_heads", problem));
    }
    if shape.rotary.is_some() && head_size % 2 != 0 {
        let problem = format_args!(
            "of {head_size} channels cannot be rotated in pairs: the head size must be even"
        );
        return Err(Error::config("model.heads", problem));
    }
    if shape.rotary.is_some_and(|rotary| rotary.pairs(head_size) > PAIRS) {
        let problem = format_args!(
            "of {head_size} channels rotate as a whole: of a head, at most {} channels rotate",
            2 * PAIRS
        );
        return Err(Error::config("model.heads", problem));
    }
    Ok(())
}

/// The most slices of a block.
const MOST_SLICES: usize = 64;

/// Refuses slices that the blocks of a shape cannot be cut into.
pub(super) fn check_slices(shape: &Shape) -> Result<(), Error> {
    let Shape { slices, heads, kv_heads, intermediate, names, .. } = *shape;
    if slices == 1 {
        return Ok(());
    }
    let of_norms = match shape.norms {
        NormPlaces::BehindSums => Some("norms behind the sums of its blocks"),
        NormPlaces::Around | NormPlaces::Behind => Some("norms of the outputs of its branches"),
        NormPlaces::Before
        | NormPlaces::BeforeButFirst
        | NormPlaces::BeforeBoth
        | NormPlaces::BeforeEach => None,
    };
    let whole = of_norms
        .or(shape.experts.map(|_| "experts"))
        .or(shape.linear.map(|_| "linear attention"))
        .or(shape.output_gates.then_some("gates of attention's output"))
        .or((shape.qk_norm == Some(QkNorm::Joint)).then_some("a norm over all heads of queries"));
    if let Some(what) = whole {
        let problem = format_args!(
            "is {slices}, and blocks of the family {} are not cut into slices: the model has \
             {what}. Set it to 1",
            names.family
        );
        return Err(Error::config("parallel.slices", problem));
    }
    let sizes = [
        ("heads", heads),
        ("heads of keys and values", kv_heads),
        ("channels of the feed-forward", intermediate),
    ];
    let Some((name, size)) = sizes.into_iter().find(|(_, size)| size % slices != 0) else {
        return Ok(());
    };
    let divides = |slices: &usize| sizes.iter().all(|(_, size)| size % slices == 0);
    let good: Vec<String> =
        (1..=MOST_SLICES).filter(divides).map(|slices| slices.to_string()).collect();
    let problem = format_args!(
        "is {slices}, and a block has {size} {name}: set a number that divides them ({})",
        good.join(", ")
    );
    Err(Error::config("parallel.slices", problem))
}

/// Refuses pieces that the blocks of a shape cannot be visited in.
pub(super) fn check_pieces(shape: &Shape) -> Result<(), Error> {
    if shape.pieces == 1 || !shape.norms.are_beside() {
        return Ok(());
    }
    let problem = format_args!(
        "is {}, and blocks of the family {} are not visited in pieces: their feed-forward stands \
         beside attention, and not behind it. Set it to 1",
        shape.pieces, shape.names.family
    );
    Err(Error::config("parallel.tensor", problem))
}

/// Refuses pieces of a model whose parts devices cannot be sent.
pub(super) fn check_portions(config: &Config, model: &Model) -> Result<(), Error> {
    if !model.has_portions() {
        return Ok(());
    }
    if let Some(name) = model.badly_cut() {
        let problem = format_args!("do not have all of {name} once: correct `Layer::portions`");
        return Err(Error::argument(format_args!("the portions of a block {problem}")));
    }
    config.check_whole_gradients()?;
    match model.cut_in_byte() {
        None => Ok(()),
        Some(name) => {
            let problem = format_args!(
                "is {}, and with parallel.slices = {} a slice of {name} has an odd number of rows \
                 or columns: numbers of 4 bits are sent by twos. Set other parallel.slices, \
                 train.base = \"int8\", or it to 1",
                model.shape.pieces, model.shape.slices
            );
            Err(Error::config("parallel.tensor", problem))
        }
    }
}

/// Refuses dropout of the inputs of adapters whose input channels are cut: the mask of a slice
/// would have to be a part of the whole mask.
pub(super) fn check_sliced_adapters(shape: &Shape, training: &Training) -> Result<(), Error> {
    let Some(lora) = training.lora.as_ref().filter(|lora| lora.dropout > 0.0) else {
        return Ok(());
    };
    let mut outputs = (0..shape.layers).flat_map(|layer| shape.residual_outputs(layer));
    match outputs.find(|module| shape.slices > 1 && lora.targets(module)) {
        None => Ok(()),
        Some(module) => {
            let problem = format_args!(
                "is {}, and with parallel.slices = {} the input of {module} is cut: set it to 0, \
                 leave such modules out of train.lora.targets, or set parallel.slices = 1",
                lora.dropout, shape.slices
            );
            Err(Error::config("train.lora.dropout", problem))
        }
    }
}
