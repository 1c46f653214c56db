//! Models in transformers' format: reads and writes directories of `config.json`,
//! `model.safetensors`, tokenizers and chat templates.

mod adapter_config;
mod adapters;
mod average;
#[cfg(feature = "tokenizers")]
mod caught;
#[cfg(feature = "tokenizers")]
mod chat;
#[cfg(feature = "tokenizers")]
mod chat_source;
#[cfg(feature = "tokenizers")]
mod clock;
mod companions;
mod config;
mod dense;
mod export;
mod found;
mod fused;
mod json;
mod merge;
#[cfg(feature = "tokenizers")]
mod metered;
#[cfg(feature = "tokenizers")]
mod metered_calls;
mod mxfp4;
mod names;
#[cfg(not(feature = "tokenizers"))]
mod no_tokenizer;
mod pattern;
mod prompts;
#[cfg(feature = "tokenizers")]
mod python_text;
mod quantised;
mod record_value;
mod sealed;
mod sentence;
mod shards;
#[cfg(feature = "tokenizers")]
mod template_text;
mod tensor_files;
mod text;
mod tied;
#[cfg(feature = "tokenizers")]
mod tokenizer;
#[cfg(feature = "tokenizers")]
mod tokenizer_json;
#[cfg(feature = "tokenizers")]
mod tokenizer_settings;
mod weight_file;
mod weights;

pub(crate) use adapters::{
    SavedAdapters, adapters_head, base_of, has_adapters, read_lora, refused_adapters,
    saved_tensors, write_adapter_config,
};
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
pub(crate) use prompts::{Prompts, read_prompts};
pub use record_value::RecordValue;
pub(crate) use sealed::{OLDER, RECORD, STATES, Sealed, check_seal, file_digests, hex, seal};
pub(crate) use sentence::{OfSentences, sentence_modules, write_sentence_modules};
pub(crate) use tensor_files::{Before, TensorFiles, cut_into_files, save, shard_bytes};
pub(crate) use text::list_of;
pub use text::{Encoded, Message, RenderedChat};
pub(crate) use tied::{has_own_head, keeps_tied};
#[cfg(feature = "tokenizers")]
pub use tokenizer::Tokenizer;
pub(crate) use weights::{
    Load, check_format, load, load_adapters, load_older, load_own_adapters, load_states,
    load_trained, tensor,
};
