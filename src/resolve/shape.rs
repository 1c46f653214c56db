//! The shape of the model that a config names: a preset or a directory, with the config's sizes.

use super::head::head;
use super::head_counts::{check_heads, check_pieces, check_slices};
use crate::config::{Config, DepthConfig, ExpertsConfig, ModelConfig, NewLayers};
use crate::error::Error;
use crate::hf;
use crate::models::{Balance, Dropouts, Experts, Shape, families};

/// The shape of the model that a config names.
///
/// # Errors
/// The preset or path is unknown, the sizes contradict each other, or the device has no kernels for
/// them.
pub fn shape_of(config: &Config) -> Result<Shape, Error> {
    let shape = resolve(config).map_err(|error| match (error, &config.model.path) {
        // The config did not set this key, so the value comes from the model's own config.json.
        (Error::Config { key, problem }, Some(path)) if !is_set(config, &key) => {
            let file = path.join("config.json");
            Error::bad_model(file.display(), format_args!("{key} {problem}"))
        }
        (error, _) => error,
    })?;
    Ok(shape)
}

/// The shape of a config's model with `model.max_layers` layers.
///
/// # Errors
/// As [`shape_of`]; or the model has more layers than that, or the layers that `depth` adds do not
/// fit it.
pub fn largest_shape_of(config: &Config) -> Result<Shape, Error> {
    let shape = shape_of(config)?;
    let layers = config.model.max_layers.unwrap_or(shape.layers);
    if layers < shape.layers {
        let problem = format_args!("is {layers}, and the model has {} layers", shape.layers);
        return Err(Error::config("model.max_layers", problem));
    }
    if layers > MOST_LAYERS {
        let problem = format_args!("is {layers}: it must be 1 to {MOST_LAYERS}");
        return Err(Error::config("model.max_layers", problem));
    }
    let kinds = [
        shape.experts.map(|_| "experts"),
        shape.linear.map(|_| "linear attention"),
        shape.global_heads.map(|_| "heads of two sizes"),
        shape.block_inputs.map(|_| "inputs of each block"),
        shape.shared_kv.map(|_| "keys and values of other blocks"),
    ];
    let kind = kinds.into_iter().flatten().next();
    if let Some(kind) = kind.filter(|_| layers > shape.layers) {
        let problem = format_args!(
            "is {layers}, and the model has {} layers: layers are not added to a model with \
             {kind}. Leave it out",
            shape.layers
        );
        return Err(Error::config("model.max_layers", problem));
    }
    let DepthConfig { drop, stack_at, new_layers, .. } = &config.depth;
    if *drop > 0.0 && (shape.block_inputs.is_some() || shape.shared_kv.is_some()) {
        let problem = format_args!(
            "is {drop}, and no block of this model can be left out: it has inputs of each block, \
             or keys and values of other blocks. Set it to 0"
        );
        return Err(Error::config("depth.drop", problem));
    }
    if !stack_at.is_empty() && layers == shape.layers {
        let problem = format_args!("has no effect: the model has model.max_layers = {layers}");
        return Err(Error::config("depth.stack_at", problem));
    }
    if *new_layers == NewLayers::ZeroResidual && shape.norms.are_behind_sums() {
        let problem = "is \"zero-residual\", but such a layer would change the hidden states that \
                       pass it: this model has norms behind the residual branches. Use \"copy\"";
        return Err(Error::config("depth.new_layers", problem));
    }
    Ok(Shape { layers, ..shape })
}

/// Whether a config sets this key of section `model`.
fn is_set(config: &Config, key: &str) -> bool {
    let all = serde_json::to_value(&config.model).expect("a config is plain data");
    key.strip_prefix("model.").is_some_and(|key| !all[key].is_null())
}

/// The shape of the preset or directory that the config names, with the head of its adapters.
fn named(config: &Config) -> Result<Shape, Error> {
    let model = &config.model;
    let adapters = config.train.adapters();
    let preset = model.preset.as_deref().unwrap_or("gpt-small");
    let mut shape = match &model.path {
        Some(path) if !path.exists() => {
            let given = path.display().to_string();
            if let Some(adapters) = adapters.filter(|one| hf::base_of(one).as_ref() == Some(path)) {
                let what = format_args!(
                    "base_model_name_or_path is {given:?}, and there is no such directory: set \
                     model.path to the directory of that model"
                );
                return Err(Error::bad_model(adapters.display(), what));
            }
            let problem = format_args!(
                "is {given:?}: there is no such directory (models are read from directories; \
                 nothing is downloaded)"
            );
            return Err(Error::config("model.path", problem));
        }
        Some(path) => {
            let shape = hf::read_shape(path)?;
            let has_own_head = !model.random_weights && hf::has_own_head(path, &shape);
            Shape { tied: shape.tied && !has_own_head, ..shape }
        }
        None => families::preset(preset).ok_or_else(|| {
            let known = families::PRESETS.join(", ");
            Error::config("model.preset", format_args!("is {preset:?}: known presets are {known}"))
        })?,
    };
    if let Some(adapters) = adapters {
        shape.head = hf::adapters_head(adapters, &shape)?;
    }
    Ok(shape)
}

/// The shape of the preset or directory, with the config's sizes.
fn resolve(config: &Config) -> Result<Shape, Error> {
    let model = &config.model;
    let mut shape = named(config)?;
    let heads_before = shape.heads;
    if model.path.is_some() && model.kv_heads.is_some() {
        return Err(Error::config(
            "model.kv_heads",
            "is set together with model.path, which has its own: leave it out",
        ));
    }
    set_experts(model, &mut shape)?;
    let of_hidden = model.hidden.map(|hidden| hidden.saturating_mul(4));
    let intermediate = model.intermediate.or(of_hidden).filter(|_| has_dense_block(&shape));
    let overrides = [
        (&mut shape.layers, model.layers),
        (&mut shape.hidden, model.hidden),
        (&mut shape.heads, model.heads),
        (&mut shape.intermediate, intermediate),
        (&mut shape.vocabulary, model.vocabulary),
        (&mut shape.positions, model.positions),
    ];
    for (size, given) in overrides {
        match given {
            Some(_) if model.path.is_some() => {
                return Err(Error::config(
                    "model.path",
                    "has its own sizes: leave out layers, hidden, heads, kv_heads, intermediate, \
                     vocabulary and positions",
                ));
            }
            Some(given) => *size = given,
            None => {}
        }
    }
    // The head size follows from the sizes above. If each head had its own key-value head, it still
    // has.
    if model.hidden.is_some() || model.heads.is_some() {
        shape.head_size = shape.hidden / shape.heads.max(1);
    }
    let kv_heads = model.kv_heads.or(model.heads.filter(|_| shape.kv_heads == heads_before));
    shape.kv_heads = kv_heads.unwrap_or(shape.kv_heads);
    shape.chunk_positions = config.step.chunk_positions;
    shape.slices = config.parallel.slices as usize;
    shape.pieces = config.parallel.tensor as usize;
    // Noise would enter the comparison of two answers.
    let is_quiet = config.objective.compares_answers();
    if let Some(p) = model.dropout.or(is_quiet.then_some(0.0)) {
        shape.dropout =
            Dropouts { embedding: p, attention: p, projection: p, feed_forward: p, classifier: p };
    }
    shape.head = head(config, &shape)?;
    set_balance(&config.experts, &mut shape)?;
    match &mut shape.experts {
        Some(experts) => experts.bundles = config.schedule.bundles,
        None if config.schedule.bundles.is_some() => {
            let problem = "is set, and the model has no experts: leave it out";
            return Err(Error::config("schedule.bundles", problem));
        }
        None => {}
    }
    check_shape(&shape)?;
    Ok(shape)
}

/// Whether a block of a model has a feed-forward without experts.
fn has_dense_block(shape: &Shape) -> bool {
    shape.experts.is_none_or(|Experts { every, from, .. }| every > 1 || from > 0)
}

/// Gives the experts of a preset the config's sizes.
///
/// # Errors
/// The model is a directory's, or it has no experts, or all of its blocks have.
fn set_experts(model: &ModelConfig, shape: &mut Shape) -> Result<(), Error> {
    let given = [
        ("model.experts", model.experts),
        ("model.experts_per_token", model.experts_per_token),
        ("model.expert_intermediate", model.expert_intermediate),
    ];
    let first = given.iter().find(|(_, size)| size.is_some());
    let Some(experts) = &mut shape.experts else {
        return first.map_or(Ok(()), |(key, _)| {
            let problem = "is set, and the model has no experts: leave it out, or set \
                           model.preset = \"moe-small\", or another with experts";
            Err(Error::config(key, problem))
        });
    };
    if let Some((key, _)) = first.filter(|_| model.path.is_some()) {
        let problem = "is set together with model.path, which has its own: leave it out";
        return Err(Error::config(key, problem));
    }
    let sizes = [&mut experts.count, &mut experts.per_token, &mut experts.intermediate];
    for (size, (_, given)) in sizes.into_iter().zip(given) {
        *size = given.unwrap_or(*size);
    }
    if model.intermediate.is_some() && model.path.is_none() && !has_dense_block(shape) {
        let problem = "is set, and all blocks of this model have experts: set \
                       model.expert_intermediate";
        return Err(Error::config("model.intermediate", problem));
    }
    Ok(())
}

/// Gives experts and routers what `[experts]` says. Where it says nothing, they keep those of the
/// preset or directory.
///
/// # Errors
/// The model has no experts, or a token has other than two choices of which one is drawn.
fn set_balance(config: &ExpertsConfig, shape: &mut Shape) -> Result<(), Error> {
    let scores_vocabulary = shape.scores_vocabulary();
    let Some(experts) = &mut shape.experts else {
        return config.first_set().map_or(Ok(()), |key| {
            let problem = "is set, and the model has no experts: leave it out";
            Err(Error::config(key, problem))
        });
    };
    let own = experts.balance;
    let second_at_random = config.second_at_random.unwrap_or(own.second_at_random);
    if second_at_random && experts.per_token != 2 {
        let problem = format_args!(
            "is for two choices a token, and this model has {}: set it to false",
            experts.per_token
        );
        return Err(Error::config("experts.second_at_random", problem));
    }
    // In transformers, models that classify have no such loss.
    let own_loss = if scores_vocabulary { own.loss } else { 0.0 };
    experts.balance = Balance {
        loss: config.balance_loss.unwrap_or(own_loss),
        of: config.balance_of.unwrap_or(own.of),
        over: config.balance_over,
        z_loss: config.z_loss.unwrap_or(own.z_loss),
        capacity_millionths: config.capacity_millionths().or(own.capacity_millionths),
        second_at_random,
    };
    experts.idle = config.idle;
    Ok(())
}

/// The most layers of a model: more than any has, and few enough to plan a step.
const MOST_LAYERS: usize = 100_000;

/// Refuses sizes that are out of range or contradict each other.
fn check_shape(shape: &Shape) -> Result<(), Error> {
    let Shape { layers, hidden, heads, intermediate, vocabulary, positions, .. } = *shape;
    let sizes = [
        ("layers", layers, MOST_LAYERS),
        ("hidden", hidden, 1 << 20),
        ("heads", heads, 1 << 11),
        ("intermediate", intermediate, 1 << 22),
        ("vocabulary", vocabulary, 1 << 24),
        (
            "positions",
            shape.learned_positions.unwrap_or(0).saturating_add(positions),
            Shape::POSITION_LIMIT,
        ),
        ("positions", positions, Shape::POSITION_LIMIT),
        ("token_types", shape.token_types.max(1), 256),
    ];
    for (name, size, most) in sizes {
        if !(1..=most).contains(&size) {
            let problem = format_args!("is {size}: it must be 1 to {most}");
            return Err(Error::config(&format!("model.{name}"), problem));
        }
    }
    check_heads(shape)?;
    check_experts(shape)?;
    check_slices(shape)?;
    check_pieces(shape)?;
    if shape.window.is_some_and(|window| window.positions == 0) {
        return Err(Error::config("model.sliding_window", "must be at least 1"));
    }
    if !(shape.norm_epsilon.is_finite() && shape.norm_epsilon > 0.0) {
        return Err(Error::config("model.norm_epsilon", "must be above 0"));
    }
    let Dropouts { embedding, attention, projection, feed_forward, classifier } = shape.dropout;
    let dropouts = [embedding, attention, projection, feed_forward, classifier];
    if dropouts.iter().any(|p| !(0.0..1.0).contains(p)) {
        return Err(Error::config("model.dropout", "must be in [0, 1)"));
    }
    Ok(())
}

/// The most experts of one block, and of all blocks together: each has tensors of its own.
const MOST_EXPERTS: [usize; 2] = [1 << 12, 1 << 18];

/// The most elements of all experts: a petabyte of floats. No sum of bytes overflows.
const MOST_ELEMENTS: usize = 1 << 48;

/// Refuses experts whose numbers are out of range or contradict each other.
fn check_experts(shape: &Shape) -> Result<(), Error> {
    let Some(experts) = shape.experts else { return Ok(()) };
    let Experts { count, per_token, intermediate, shared, .. } = experts;
    let [most, most_of_all] = MOST_EXPERTS;
    let sizes = [
        ("experts", count, most),
        ("experts_per_token", per_token, 64),
        ("expert_intermediate", intermediate, 1 << 22),
        ("shared_expert_intermediate_size", shared.max(1), 1 << 22),
    ];
    for (name, size, most) in sizes {
        if !(1..=most).contains(&size) {
            let problem = format_args!("is {size}: it must be 1 to {most}");
            return Err(Error::config(&format!("model.{name}"), problem));
        }
    }
    if per_token > count {
        let problem = format_args!("is {per_token}, and a block has {count} experts");
        return Err(Error::config("model.experts_per_token", problem));
    }
    let blocks = (0..shape.layers).filter(|block| experts.is_of(*block)).count();
    if blocks == 0 {
        let problem = format_args!(
            "is {count}, and none of the {} blocks has experts (decoder_sparse_step = {}, the \
             first {} dense): a model without experts is of another family",
            shape.layers, experts.every, experts.from
        );
        return Err(Error::config("model.experts", problem));
    }
    let all = count * blocks;
    let elements = [3, intermediate, shape.hidden].into_iter().fold(all, usize::saturating_mul);
    if all > most_of_all || elements > MOST_ELEMENTS {
        let problem = format_args!(
            "is {count}, of {intermediate} channels, in {blocks} blocks: the model must have at \
             most {most_of_all} experts, and at most {MOST_ELEMENTS} elements in them"
        );
        return Err(Error::config("model.experts", problem));
    }
    Ok(())
}
