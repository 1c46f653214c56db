//! Reads and writes rotary positions, by the rules of transformers 5: from its own keys
//! (`rope_parameters`) and from those of version 4 (`rope_theta`, `rope_scaling`,
//! `partial_rotary_factor`).

use serde_json::{Value, json};

use super::read::{Keys, above_zero, flag, given, number, size, size_or_none, wrong};
use crate::kernels::{LongRope, PAIRS, Rotary, RotaryScaling, Yarn};
use crate::models::Shape;

/// Keys of the scaling of one kind of layers, and where they stand.
struct Scaling<'k> {
    /// The whole `config.json`.
    all: &'k Keys,
    own: &'k Keys,
    /// True when kinds of layers have keys of their own.
    by_layer: bool,
}

/// Reads the rotary positions of a family whose layers all have the same.
pub(super) fn rotary(keys: &Keys, default_theta: f32) -> Result<Rotary, String> {
    let object = |key: &str| {
        let object = |value| Value::as_object(value).ok_or_else(|| wrong(key, value, "an object"));
        given(keys, key).map(object).transpose()
    };
    let parameters = object("rope_parameters")?;
    // `rope_scaling` wins where both are given, as in transformers: users add it by hand.
    let scaling = object("rope_scaling")?.filter(|scaling| !scaling.is_empty());
    let none = Keys::new();
    let own = scaling.or(parameters).unwrap_or(&none);
    if let Some((kind, _)) = own.iter().find(|(_, value)| value.is_object()) {
        return Err(format!(
            "rope_parameters has {kind:?}: only layers of gemma3_text, gemma4_text and olmo3 \
             have rotary positions by their kind. Give one set of keys, without {kind:?}"
        ));
    }
    let theta = number(keys, "rope_theta", default_theta)?;
    read_scaling(&Scaling { all: keys, own, by_layer: false }, theta)
}

/// The keys of rotary positions by kind of layer, and of the layers without a window.
pub(super) const ROPE: [&str; 2] = ["rope_parameters", "rope_scaling"];

/// Reads the rotary positions of layers without a window and of those with one. `thetas`: their
/// bases, if no key gives them.
pub(super) fn rotary_by_kind(keys: &Keys, thetas: [f32; 2]) -> Result<[Rotary; 2], String> {
    let object = |keys: &Keys, key: &str| {
        let object = |value: &Value| {
            value.as_object().cloned().ok_or_else(|| wrong(key, value, "an object"))
        };
        given(keys, key).map_or_else(|| Ok(Keys::new()), object)
    };
    let [parameters, scaling] = ROPE.map(|key| object(keys, key));
    let both = parameters?;
    if let Some((key, _)) = both.iter().find(|(_, value)| !value.is_object() && !value.is_null()) {
        return Err(format!(
            "rope_parameters has {key:?}: it must have two objects, full_attention and \
             sliding_attention, with such keys"
        ));
    }
    let mut full = object(&both, "full_attention")?;
    full.extend(scaling?);
    let slides = object(&both, "sliding_attention")?;
    let theta = number(keys, "rope_theta", thetas[0])?;
    let read = |own: &Keys, theta| read_scaling(&Scaling { all: keys, own, by_layer: true }, theta);
    Ok([read(&full, theta)?, read(&slides, thetas[1])?])
}

/// Writes the keys that [`rotary_by_kind`] reads.
pub(super) fn write_rotary_by_kind(shape: &Shape, config: &mut Value) {
    config["rope_parameters"] = json!({
        "full_attention": shape.rotary.as_ref().map(rotary_keys),
        "sliding_attention": shape.window_rotary.as_ref().map(rotary_keys),
    });
}

fn read_scaling(keys: &Scaling<'_>, theta: f32) -> Result<Rotary, String> {
    let Scaling { all, own, .. } = *keys;
    let theta = number(own, "rope_theta", theta)?;
    let part = given(own, PART).or_else(|| given(all, PART));
    let part = part.map_or(Ok(1.0), |part| {
        let in_range = part.as_f64().filter(|part| *part > 0.0 && *part <= 1.0);
        in_range.ok_or_else(|| wrong(PART, part, "above 0 and at most 1"))
    })?;
    let kind = given(own, "rope_type").or_else(|| given(own, "type"));
    let kind = kind.map_or(Ok("default"), |kind| {
        kind.as_str().ok_or_else(|| wrong("rope_type", kind, "a name"))
    })?;
    let scaling = match kind {
        "default" => RotaryScaling::None,
        "linear" => RotaryScaling::Linear(keys.at_least("factor", 1.0)?),
        "dynamic" => {
            let positions = size(all, "max_position_embeddings")?;
            RotaryScaling::Dynamic { factor: keys.at_least("factor", 1.0)?, positions }
        }
        "llama3" => keys.llama3()?,
        "proportional" => {
            let factor = above_zero(own, "factor")?.unwrap_or(1.0);
            RotaryScaling::Proportional(factor)
        }
        "yarn" => RotaryScaling::Yarn(keys.yarn()?),
        "longrope" => RotaryScaling::LongRope(keys.longrope()?),
        other => {
            return Err(format!(
                "rope_type is {other:?}: known are default, linear, dynamic, proportional, yarn, \
                 longrope, llama3"
            ));
        }
    };
    let least = if kind == "yarn" { 1.0 } else { 0.0 };
    if theta <= least {
        return Err(format!("rope_theta is {theta}: it must be above {least}"));
    }
    Ok(Rotary { part, scaling, ..Rotary::new(theta) })
}

const PART: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";

impl Scaling<'_> {
    fn at_least(&self, key: &str, least: f32) -> Result<f32, String> {
        let value = number(self.own, key, f32::NAN)?;
        if value >= least {
            Ok(value)
        } else {
            Err(format!("{key} must be given, at least {least}"))
        }
    }

    /// The positions that the model was first trained with. As in transformers, the key wins that
    /// stands beside the sizes of the model, where Phi-3 has it.
    fn trained_positions(&self) -> Result<usize, String> {
        let beside = if self.by_layer { None } else { size_or_none(self.all, ORIGINAL)? };
        let trained = beside.map_or_else(|| size_or_none(self.own, ORIGINAL), |one| Ok(Some(one)));
        let positions = match trained? {
            Some(positions) => positions,
            None => size(self.all, "max_position_embeddings")?,
        };
        if positions == 0 {
            Err(format!("{ORIGINAL} is 0: it must be at least 1"))
        } else {
            Ok(positions)
        }
    }

    /// `factor`, or how many times more positions the model has than it was first trained with.
    fn factor(&self, trained: usize) -> Result<f32, String> {
        if given(self.own, "factor").is_some() {
            return self.at_least("factor", 1.0);
        }
        let positions = size(self.all, "max_position_embeddings")?;
        if positions <= trained {
            return Err(format!(
                "factor must be given, at least 1, or {ORIGINAL} below max_position_embeddings"
            ));
        }
        Ok((positions as f64 / trained as f64) as f32)
    }

    fn llama3(&self) -> Result<RotaryScaling, String> {
        let low = self.at_least("low_freq_factor", 1e-6)?;
        let high = self.at_least("high_freq_factor", 1e-6)?;
        if high <= low {
            return Err(format!("high_freq_factor is {high}: it must be above low_freq_factor"));
        }
        let positions = self.trained_positions()?;
        let factor = self.at_least("factor", 1.0)?;
        Ok(RotaryScaling::Llama3 { factor, low, high, positions })
    }

    fn yarn(&self) -> Result<Yarn, String> {
        let positions = self.trained_positions()?;
        let factor = self.factor(positions)?;
        // 0 means the default, as in transformers.
        let turns = |key, default| {
            number(self.own, key, default).map(|turns| if turns == 0.0 { default } else { turns })
        };
        let beta_fast = turns("beta_fast", 32.0)?;
        let beta_slow = turns("beta_slow", 1.0)?;
        if beta_slow <= 0.0 || beta_fast < beta_slow {
            return Err(format!(
                "beta_slow is {beta_slow}, beta_fast {beta_fast}: both must be above 0, and \
                 beta_fast not below beta_slow"
            ));
        }
        let truncate = flag(self.own, "truncate", true)?;
        if self.by_layer && !truncate {
            return Err(
                "truncate is false: transformers 5 does not read it by kind of layer, and \
                        rounds. Leave it out"
                    .into(),
            );
        }
        let attention_factor = match above_zero(self.own, "attention_factor")? {
            Some(factor) => factor,
            None => self.yarn_attention(factor)?,
        };
        Ok(Yarn { factor, attention_factor, beta_fast, beta_slow, truncate, positions })
    }

    /// The attention factor that follows from the factor (Peng et al. 2023, equation 22), or from
    /// DeepSeek's `mscale` and `mscale_all_dim` if both are given.
    fn yarn_attention(&self, factor: f32) -> Result<f32, String> {
        let scale = |m: f32| yarn_attention(factor, m);
        let m = number(self.own, "mscale", 0.0)?;
        let of_all = number(self.own, "mscale_all_dim", 0.0)?;
        let is_given = m != 0.0 && of_all != 0.0;
        Ok(if is_given { scale(m) / scale(of_all) } else { scale(1.0) } as f32)
    }

    fn longrope(&self) -> Result<LongRope, String> {
        let positions = self.trained_positions()?;
        let attention_factor = match above_zero(self.own, "attention_factor")? {
            Some(factor) => factor,
            // A model that is not stretched needs no factor.
            None if given(self.own, "factor").is_none()
                && size(self.all, "max_position_embeddings")? <= positions =>
            {
                1.0
            }
            None => longrope_attention(self.factor(positions)?, positions),
        };
        if !attention_factor.is_finite() {
            return Err(format!("{ORIGINAL} is {positions}: it must be at least 2"));
        }
        let [short, long] = [self.divisors("short_factor")?, self.divisors("long_factor")?];
        Ok(LongRope { short, long, attention_factor, positions })
    }

    /// A list of divisors, and zeros behind it.
    fn divisors(&self, key: &str) -> Result<[f32; PAIRS], String> {
        let Some(value) = given(self.own, key) else { return Err(format!("{key} is missing")) };
        let must = || wrong(key, value, "a list of numbers above 0");
        let list = value.as_array().filter(|list| list.len() <= PAIRS).ok_or_else(must)?;
        let mut divisors = [0.0; PAIRS];
        for (to, divisor) in divisors.iter_mut().zip(list) {
            let divisor = divisor.as_f64().map(|divisor| divisor as f32);
            *to = divisor.filter(|one| one.is_finite() && *one > 0.0).ok_or_else(must)?;
        }
        Ok(divisors)
    }
}

/// The attention factor of YaRN that follows from the factor, and from DeepSeek's `mscale`.
fn yarn_attention(factor: f32, m: f32) -> f64 {
    0.1 * f64::from(m) * f64::from(factor).ln() + 1.0
}

/// The attention factor of LongRoPE that follows from the factor.
fn longrope_attention(factor: f32, positions: usize) -> f32 {
    (1.0 + f64::from(factor).ln() / (positions as f64).ln()).sqrt() as f32
}

/// Refuses rotary positions that do not fit the heads of a model.
pub(super) fn check_rotary(shape: &Shape) -> Result<(), String> {
    let global = shape.with_global_heads().head_size;
    let all = [(&shape.rotary, global), (&shape.window_rotary, shape.head_size)];
    for (rotary, head_size) in all.into_iter().filter_map(|(one, size)| Some((one.as_ref()?, size)))
    {
        let part = rotary.part;
        let channels = rotary.channels(head_size);
        let family = shape.names.family;
        if part != 1.0 && !shape.names.rotates_parts() {
            return Err(format!(
                "{PART} is {part}: heads of {family} rotate as a whole, also in transformers; a \
                 part of each rotates in gemma4_text, glm, glm4, gpt_neox, phi3, qwen3_5_text, \
                 qwen3_5_moe_text and qwen3_next only"
            ));
        }
        let turned = 2 * rotary.pairs(head_size);
        if part != 1.0 && (turned == 0 || channels % 2 != 0) {
            return Err(format!(
                "{PART} is {part}: of {head_size} channels of a head that are {}, which cannot be \
                 rotated in pairs",
                if turned == 0 { 0 } else { channels }
            ));
        }
        let RotaryScaling::LongRope(LongRope { short, long, .. }) = rotary.scaling else {
            continue;
        };
        for (key, divisors) in [("short_factor", short), ("long_factor", long)] {
            let count = given_divisors(&divisors).count();
            if count != channels / 2 {
                return Err(format!(
                    "{key} has {count} numbers: it must have {}, one for each pair of the \
                     {channels} channels of a head that rotate",
                    channels / 2
                ));
            }
        }
    }
    Ok(())
}

fn given_divisors(divisors: &[f32; PAIRS]) -> impl Iterator<Item = &f32> {
    divisors.iter().take_while(|divisor| **divisor > 0.0)
}

/// The keys of one kind of positions, with which [`rotary`] reads the same.
fn rotary_keys(rotary: &Rotary) -> Value {
    let mut keys = match rotary.scaling {
        RotaryScaling::None => json!({ "rope_type": "default" }),
        RotaryScaling::Linear(factor) => json!({ "rope_type": "linear", "factor": factor }),
        RotaryScaling::Proportional(1.0) => json!({ "rope_type": "proportional" }),
        RotaryScaling::Proportional(factor) => {
            json!({ "rope_type": "proportional", "factor": factor })
        }
        RotaryScaling::Dynamic { factor, .. } => {
            json!({ "rope_type": "dynamic", "factor": factor })
        }
        RotaryScaling::Llama3 { factor, low, high, positions } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            ORIGINAL: positions,
        }),
        RotaryScaling::Yarn(yarn) => {
            let mut keys = json!({
                "rope_type": "yarn",
                "factor": yarn.factor,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
                ORIGINAL: yarn.positions,
            });
            // A factor that follows is left out: transformers computes it in f64.
            if yarn.attention_factor != yarn_attention(yarn.factor, 1.0) as f32 {
                keys["attention_factor"] = yarn.attention_factor.into();
            }
            keys
        }
        RotaryScaling::LongRope(LongRope { short, long, attention_factor, positions }) => json!({
            "rope_type": "longrope",
            "short_factor": given_divisors(&short).collect::<Vec<_>>(),
            "long_factor": given_divisors(&long).collect::<Vec<_>>(),
            "attention_factor": attention_factor,
            ORIGINAL: positions,
        }),
    };
    keys["rope_theta"] = rotary.theta.into();
    if rotary.part != 1.0 {
        keys[PART] = rotary.part.into();
    }
    keys
}

/// Writes the keys that [`rotary`] reads, for older and for newer versions of transformers.
pub(super) fn write_rotary(shape: &Shape, rotary: &Rotary, config: &mut Value) {
    let parameters = rotary_keys(rotary);
    let mut scaling = parameters.clone();
    if let RotaryScaling::LongRope(LongRope { attention_factor, positions, .. }) = rotary.scaling {
        // Version 4 allows Phi-3 three keys here.
        let keys = ["short_factor", "long_factor"].map(|key| (key, parameters[key].clone()));
        scaling = Value::from_iter(keys);
        scaling["type"] = "longrope".into();
        let factor = (shape.positions as f64 / positions as f64) as f32;
        if longrope_attention(factor, positions) != attention_factor {
            scaling["attention_factor"] = attention_factor.into();
        }
        config[ORIGINAL] = positions.into();
    }
    if rotary.part != 1.0 {
        config[PART] = rotary.part.into();
    }
    let is_scaled = rotary.scaling != RotaryScaling::None;
    config["rope_theta"] = rotary.theta.into();
    config["rope_scaling"] = if is_scaled { scaling } else { Value::Null };
    config["rope_parameters"] = parameters;
}

/// Keeps how the source of a config says its rotary positions: other programs may read more of its
/// keys, or only these.
pub(super) fn keep_rotary(shape: &Shape, source: &Value, config: &mut Value) {
    let mut kept = config.clone();
    for key in ["rope_parameters", "rope_scaling"] {
        if source[key].is_object() {
            kept[key] = source[key].clone();
        }
    }
    let is_same =
        |read: &Shape| read.rotary == shape.rotary && read.window_rotary == shape.window_rotary;
    if super::read(&kept).is_ok_and(|read| is_same(&read)) {
        *config = kept;
    }
}
