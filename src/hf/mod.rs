//! Models as transformers writes them: `config.json` and `model.safetensors`.

mod carry;
#[cfg(feature = "tokenizers")]
mod chat;
mod config;
mod export;
#[cfg(not(feature = "tokenizers"))]
mod no_tokenizer;
mod shape;
mod text;
#[cfg(feature = "tokenizers")]
mod tokenizer;
mod weights;

pub(crate) use carry::carry;
#[cfg(feature = "tokenizers")]
pub use chat::Template;
pub use config::{ends, labels};
pub(crate) use config::{
    label_names, let_read_bytes, name_labels, read_config, read_shape, reads_bytes, write_config,
};
pub use export::export;
#[cfg(not(feature = "tokenizers"))]
pub use no_tokenizer::{Template, Tokenizer};
pub use shape::shape_of;
pub use text::{Encoded, Message, Written};
#[cfg(feature = "tokenizers")]
pub use tokenizer::Tokenizer;
pub(crate) use weights::{load, load_states, save, save_states, tensor};
