//! The shape of the model that a config names.

use super::Config;
use crate::devices::cpu::HEAD_LIMIT;
use crate::error::Error;
use crate::hf;
use crate::models::{Dropouts, Gelu, Shape};

/// The shape of the model a config names.
///
/// # Errors
/// The preset or path is unknown, or sizes contradict each other.
pub fn shape_of(config: &Config) -> Result<Shape, Error> {
    let model = &config.model;
    let mut shape = match (&model.path, model.preset.as_deref().unwrap_or("gpt-small")) {
        (Some(path), _) => hf::read_shape(path)?,
        (None, "gpt-small") => Shape {
            layers: 6,
            hidden: 256,
            heads: 8,
            intermediate: 1024,
            vocabulary: 256,
            positions: 256,
            gelu: Gelu::Tanh,
            layer_norm_epsilon: 1e-5,
            dropout: Dropouts::default(),
            tied: true,
            initializer_range: 0.02,
        },
        (None, other) => {
            let problem = format_args!("is {other:?}: \"gpt-small\" is what there is");
            return Err(Error::config("model.preset", problem));
        }
    };
    let overrides = [
        (&mut shape.layers, model.layers),
        (&mut shape.hidden, model.hidden),
        (&mut shape.heads, model.heads),
        (
            &mut shape.intermediate,
            model.intermediate.or(model.hidden.map(|hidden| hidden.saturating_mul(4))),
        ),
        (&mut shape.vocabulary, model.vocabulary),
        (&mut shape.positions, model.positions),
    ];
    for (size, given) in overrides {
        match given {
            Some(_) if model.path.is_some() => {
                return Err(Error::refused(
                    "model.path has its own sizes: leave out layers, hidden, heads, intermediate, vocabulary and positions",
                ));
            }
            Some(given) => *size = given,
            None => {}
        }
    }
    if let Some(p) = model.dropout {
        shape.dropout = Dropouts { embedding: p, attention: p, residual: p };
    }
    check_shape(&shape)?;
    Ok(shape)
}

fn check_shape(shape: &Shape) -> Result<(), Error> {
    let Shape { layers, hidden, heads, intermediate, vocabulary, positions, .. } = *shape;
    let limit = |size: usize, most: usize| (1..=most).contains(&size);
    let sizes = [
        ("layers", layers, 100_000),
        ("hidden", hidden, 1 << 20),
        ("heads", heads, 1 << 11),
        ("intermediate", intermediate, 1 << 22),
        ("vocabulary", vocabulary, 1 << 24),
        ("positions", positions, 1 << 20),
    ];
    for (name, size, most) in sizes {
        if !limit(size, most) {
            let problem = format_args!("is {size}: it must be 1 to {most}");
            return Err(Error::config(&format!("model.{name}"), problem));
        }
    }
    if hidden % heads != 0 || hidden / heads > HEAD_LIMIT {
        let problem = format_args!(
            "is {hidden}, model.heads {heads}: hidden must be a multiple of heads, and at most \
             {HEAD_LIMIT} times as much"
        );
        return Err(Error::config("model.hidden", problem));
    }
    if !(shape.layer_norm_epsilon.is_finite() && shape.layer_norm_epsilon > 0.0) {
        return Err(Error::refused("the model's layer_norm_epsilon must be above 0"));
    }
    let Dropouts { embedding, attention, residual } = shape.dropout;
    if [embedding, attention, residual].iter().any(|p| !(0.0..1.0).contains(p)) {
        return Err(Error::refused("the model's dropout must be in [0, 1)"));
    }
    Ok(())
}
