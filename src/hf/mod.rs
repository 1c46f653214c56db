//! Models as transformers writes them: `config.json` and `model.safetensors`.

mod carry;
mod config;
mod export;
mod weights;

pub(crate) use carry::carry;
pub(crate) use config::{read_config, read_shape, write_config};
pub use export::export;
pub(crate) use weights::{load, load_states, save, save_states, tensor};
