//! The vocabulary: turns text into tokens with the model's own tokenizer, or byte by byte.

use crate::config::Config;
use crate::error::Error;
use crate::hf::{self, Encoded, Message, RecordValue, Template, Tokenizer, list_of};
use crate::models::Shape;

/// The number of tokens of a vocabulary of bytes.
pub(super) const BYTES: usize = 256;

/// The relation of a model's tokens to text.
#[derive(Clone)]
pub enum Vocabulary {
    /// Each byte is a token.
    Bytes,
    /// The tokenizer of the model's directory.
    Words(Box<Tokenizer>),
    /// There is none, for this reason. Such a model can still train on token ids.
    Unknown(String),
}

/// The special tokens that a tokenizer puts around a text.
#[derive(Default)]
pub(super) struct SpecialTokens {
    pub(super) before: Vec<u32>,
    pub(super) after: Vec<u32>,
}

impl Vocabulary {
    /// The vocabulary of the model that a config names.
    ///
    /// # Errors
    /// The config's model cannot be read.
    pub fn of(config: &Config, shape: &Shape) -> Result<Vocabulary, Error> {
        let known = shape.vocabulary;
        let Some(path) = &config.model.path else {
            return Ok(if known >= BYTES {
                Vocabulary::Bytes
            } else {
                Vocabulary::Unknown(format!(
                    "text is read as bytes, and the model knows {known} tokens: model.vocabulary \
                     must be at least {BYTES}"
                ))
            });
        };
        Ok(match Tokenizer::open(path) {
            Ok(Some(tokenizer)) => {
                let day = config.data.date.iter();
                let mut set = day.map(|day| tokenizer.set_date(day));
                set.try_for_each(|set| set.map_err(|what| Error::config("data.date", what)))?;
                Vocabulary::Words(Box::new(tokenizer))
            }
            // Not an error yet: training on token ids needs no tokenizer.
            Err(error) => Vocabulary::Unknown(error.to_string()),
            Ok(None) if known == BYTES || hf::reads_bytes(path) => Vocabulary::Bytes,
            Ok(None) => Vocabulary::Unknown(format!(
                "text needs a tokenizer, and there is no tokenizer.json in {}",
                path.display()
            )),
        })
    }

    /// Encodes a text, or a pair of texts, with special tokens if `specials`.
    ///
    /// # Errors
    /// There is no tokenizer, or it fails; or a pair of texts is given to a vocabulary of bytes,
    /// which has no separator.
    pub fn encode(
        &self,
        text: &str,
        pair: Option<&str>,
        specials: bool,
    ) -> Result<Encoded, String> {
        match self {
            Vocabulary::Words(tokenizer) => tokenizer.encode(text, pair, specials),
            Vocabulary::Unknown(why) => Err(why.clone()),
            Vocabulary::Bytes if pair.is_some() => {
                Err("text_pair: two texts cannot be told apart when text is read as bytes".into())
            }
            Vocabulary::Bytes => Ok(Encoded {
                tokens: text.bytes().map(u32::from).collect(),
                kinds: Vec::new(),
                spans: (0..text.len()).map(|at| (at, at + 1)).collect(),
            }),
        }
    }

    /// Decodes tokens. Bytes that are not valid UTF-8 become U+FFFD. Without a tokenizer the text
    /// is the list of ids.
    pub fn decode(&self, tokens: &[u32], with_specials: bool) -> String {
        match self {
            Vocabulary::Words(tokenizer) => tokenizer.decode(tokens, with_specials),
            Vocabulary::Bytes => {
                let bytes: Vec<u8> =
                    tokens.iter().map(|&token| u8::try_from(token).unwrap_or(0xff)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Vocabulary::Unknown(_) => {
                let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
                ids.join(" ")
            }
        }
    }

    /// The token that ends a text (`eos_token`), if there is one.
    pub fn end(&self) -> Option<u32> {
        self.tokenizer().and_then(Tokenizer::end)
    }

    /// The tokenizer, if there is one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Vocabulary::Words(tokenizer) => Some(tokenizer),
            Vocabulary::Bytes | Vocabulary::Unknown(_) => None,
        }
    }

    /// A sentence about a tokenizer that has tokens beyond the model's vocabulary of `known`.
    pub fn excess(&self, known: usize) -> Option<String> {
        let largest = self.tokenizer()?.largest().filter(|&largest| largest as usize >= known)?;
        Some(format!(
            "the tokenizer has tokens up to {largest}, and the model has embeddings for {known}: \
             text with a token from {known} on cannot be used"
        ))
    }

    /// Refuses tokens that the model of `known` tokens has no embedding for.
    ///
    /// # Errors
    /// The first such token.
    pub fn check(&self, tokens: &[u32], known: usize) -> Result<(), String> {
        let unknown = tokens.iter().position(|&token| token as usize >= known);
        unknown.map_or(Ok(()), |at| {
            let problem =
                format!("token {} at {at} is outside the vocabulary of {known}", tokens[at]);
            Err(match self.tokenizer().is_some_and(|words| words.largest() >= Some(tokens[at])) {
                true => format!("{problem}: the tokenizer has it, and the model does not"),
                false => problem,
            })
        })
    }

    /// The chat template.
    ///
    /// # Errors
    /// There is none, or it cannot be parsed.
    pub fn template(&self) -> Result<&Template, String> {
        let template = self.tokenizer().map(Tokenizer::template).transpose()?.flatten();
        template.ok_or_else(|| {
            "messages: the model's directory has no chat template (chat_template.jinja, or \
             chat_template in tokenizer_config.json)"
                .into()
        })
    }

    /// Renders a chat as the prompt for the assistant's next message. `tools` describes the tools
    /// that the assistant may call, as a list or its JSON text, or is null.
    ///
    /// # Errors
    /// There is no chat template, or it fails; or `tools` is no list of objects.
    pub fn ask(&self, messages: &[Message], tools: &RecordValue) -> Result<String, String> {
        let tools = list_of(tools.clone()).map_err(|what| format!("tools: {what}"))?;
        self.template()?.ask(messages, &tools)
    }

    /// The special tokens that the tokenizer puts around a text. They are found in the encoding of
    /// a short text, because a tokenizer does not list them.
    pub(super) fn special_tokens(&self) -> Result<SpecialTokens, String> {
        let plain = self.encode("a", None, false)?.tokens;
        let wrapped = self.encode("a", None, true)?.tokens;
        let at = wrapped.windows(plain.len().max(1)).position(|window| window == plain);
        let at = at.unwrap_or(0);
        let end = (at + plain.len()).min(wrapped.len());
        Ok(SpecialTokens { before: wrapped[..at].to_vec(), after: wrapped[end..].to_vec() })
    }
}
