//! `[compression]`: how gradients are compressed.

use serde::{Deserialize, Serialize};

use super::check::{must, refuse};
use super::{Config, Dtype, EpsTier, LossScaleKind, NonFinite, OnResume};
use crate::compression::{Compression, MOST_GROUPS};
use crate::error::Error;

/// `[compression]`
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CompressionConfig {
    /// How the gradient of each group of micro-batches (`parallel.groups`) is compressed. `none`:
    /// it is exact. `int8`: 8 bits a number and a scale for each `block_size` numbers; a number is
    /// off by at most 1/254 of the largest number of its block. `top-k`: the largest of each 16384
    /// numbers, and 0 for the others. `powersgd`: matrices as products of two factors of `rank`
    /// columns; vectors stay exact. The error of a gradient is added to the next gradient (error
    /// feedback): the host keeps 4 bytes a trained parameter for each group. Several processes
    /// exchange the compressed gradients; one process computes the same numbers, and gains nothing.
    pub kind: CompressionKind,
    /// With `powersgd`: columns of the factors. A matrix stays exact if its factors would not be
    /// smaller.
    pub rank: usize,
    /// With `top-k`: the share of the numbers that is kept, in (0, 0.5].
    pub density: f64,
    /// With `int8`: the number of numbers that share a scale, a divisor of 16384 from 2 on.
    pub block_size: usize,
}

/// How gradients are compressed.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CompressionKind {
    /// Gradients are exact.
    #[default]
    None,
    /// Gradients have 8 bits a number.
    Int8,
    /// Only the largest numbers stay.
    TopK,
    /// Matrices become low-rank factors.
    #[serde(rename = "powersgd")]
    PowerSgd,
}

impl Default for CompressionConfig {
    fn default() -> CompressionConfig {
        CompressionConfig { kind: CompressionKind::None, rank: 4, density: 0.01, block_size: 256 }
    }
}

impl CompressionConfig {
    pub(super) const ON_RESUME: OnResume = OnResume::free("").with_changes("block_size density");
}

impl Config {
    /// How gradients are compressed, if they are.
    pub fn compression(&self) -> Option<Compression> {
        let CompressionConfig { kind, rank, density, block_size } = self.compression;
        match kind {
            CompressionKind::None => None,
            CompressionKind::Int8 => Some(Compression::Int8 { block: block_size }),
            CompressionKind::TopK => Some(Compression::TopK { density }),
            CompressionKind::PowerSgd => Some(Compression::PowerSgd { rank }),
        }
    }

    pub(super) fn check_compression(&self) -> Result<(), Error> {
        let CompressionConfig { rank, density, block_size, .. } = self.compression;
        must(rank >= 1, "compression.rank", "at least 1")?;
        // Smaller blocks would have more bytes of scales than of numbers.
        const LEAST_BLOCK: usize = 2;
        must(density > 0.0 && density <= 0.5, "compression.density", "in (0, 0.5]")?;
        const CHUNK: usize = 16384;
        if block_size < LEAST_BLOCK || !CHUNK.is_multiple_of(block_size) {
            let nearest =
                (0..=CHUNK.ilog2()).map(|bits| 1 << bits).filter(|&b: &usize| b <= block_size);
            let problem = format_args!(
                "is {block_size}, and must be a divisor of 16384 from 2 on: set {}",
                nearest.max().unwrap_or(LEAST_BLOCK).max(LEAST_BLOCK)
            );
            return Err(Error::config("compression.block_size", problem));
        }
        refuse(
            self.compression().is_some() && self.parallel.groups > MOST_GROUPS,
            "parallel.groups",
            "must be at most 256 with compression, which keeps errors for each group",
        )
    }

    /// Refuses keys that a run that trains with compression cannot have.
    pub(super) fn check_compressed_training(&self) -> Result<(), Error> {
        let compresses = self.compression().is_some();
        let problem = "is file, and compression keeps the errors of gradients in memory: set \
                       \"memory\", or leave compression out";
        refuse(compresses && self.eps.tier == EpsTier::File, "eps.tier", problem)?;
        let key = match (self.device.dtype, self.loss_scale.kind) {
            (Dtype::F16, _) => "device.dtype",
            (_, LossScaleKind::Dynamic | LossScaleKind::Fixed) => "loss_scale.kind",
            _ => "step.non_finite",
        };
        refuse(
            compresses && self.non_finite() == NonFinite::Skip,
            key,
            "skips steps whose gradient is not finite, and compression would keep their errors: \
             leave compression out, or use device.dtype = \"bf16\" or \"f32\" without a loss \
             scale and step.non_finite = \"stop\"",
        )
    }
}
