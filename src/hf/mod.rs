//! Models as transformers writes them: `config.json` and `model.safetensors`.

mod config;
mod weights;

pub(crate) use config::read_shape;
pub(crate) use weights::{load, save};
