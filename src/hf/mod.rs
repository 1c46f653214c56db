//! Models in transformers' format: `config.json`, `model.safetensors`, tokenizers and chat
//! templates, read from a directory and written to one.

mod adapters;
mod average;
#[cfg(feature = "tokenizers")]
mod caught;
#[cfg(feature = "tokenizers")]
mod chat;
mod companions;
mod config;
mod export;
mod merge;
#[cfg(feature = "tokenizers")]
mod metered;
#[cfg(feature = "tokenizers")]
mod metered_calls;
mod names;
#[cfg(not(feature = "tokenizers"))]
mod no_tokenizer;
mod sealed;
mod shape;
mod shards;
#[cfg(feature = "tokenizers")]
mod template_text;
mod tensor_files;
mod text;
#[cfg(feature = "tokenizers")]
mod tokenizer;
#[cfg(feature = "tokenizers")]
mod tokenizer_json;
mod weights;

pub(crate) use adapters::{base_of, has_adapters, write_adapter_config};
pub use adapters::{model_of, training_of};
#[cfg(feature = "tokenizers")]
pub use chat::Template;
pub(crate) use companions::copy_companions;
pub use config::{ends, labels};
pub(crate) use config::{
    label_names, mark_byte_tokens, read_config, read_shape, reads_bytes, set_label_names,
    write_config,
};
pub use export::{ExportOptions, export};
#[cfg(not(feature = "tokenizers"))]
pub use no_tokenizer::{Template, Tokenizer};
pub(crate) use sealed::{RECORD, STATES, Sealed, check_seal, check_seals, file_digests, seal};
pub use shape::{largest_shape_of, shape_of};
pub(crate) use tensor_files::{Before, TensorFiles, save};
pub use text::{Encoded, Message, RenderedChat};
#[cfg(feature = "tokenizers")]
pub use tokenizer::Tokenizer;
pub(crate) use weights::{Load, load, load_adapters, load_states, load_trained, tensor};
