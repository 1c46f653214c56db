//! Models as transformers writes them: `config.json` and `model.safetensors`.

mod config;
mod weights;

pub(crate) use config::{read_config, read_shape, write_config};
pub(crate) use weights::{load, load_states, save, save_states, tensor};
