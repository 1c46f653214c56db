//! What identifies a dataset.

use sha2::{Digest, Sha256};

use super::Dataset;
use super::dataset::Kind;
use crate::hf::hex;

impl Dataset {
    /// Identifies the data: for each source the number of sequences and a SHA-256 of its bytes, and
    /// the tokenizer. A resumed run compares it with the fingerprint in the checkpoint.
    pub fn fingerprint(&self) -> String {
        match &self.kind {
            Kind::Random { seed, .. } => {
                format!("random {}", hex(&Sha256::digest(seed.to_le_bytes())[..8]))
            }
            Kind::Sources(sources) => {
                let each = sources.iter().map(|source| {
                    let rows = source.rows();
                    let total = source.total();
                    format!("{rows} of {total} sequences of {}", source.digest)
                });
                let each = each.collect::<Vec<_>>().join(", ");
                match self.vocabulary().tokenizer() {
                    Some(tokenizer) => {
                        // The tokens depend on the date if the chat template writes it.
                        let day = tokenizer.date().map(|day| format!(", on {day}"));
                        let day = day.unwrap_or_default();
                        format!("{each}, by tokenizer {}{day}", tokenizer.digest())
                    }
                    None => each,
                }
            }
        }
    }
}
