//! How the masters of a block are stored on the host, and what of them a device is sent.

use crate::tensor::Dtype;

/// How masters are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MasterFormat {
    /// As f32, which a device of f32 is sent.
    #[default]
    F32,
    /// As f32 in two halves: a bf16, which a device is sent, and the bits that it leaves
    /// ([`SplitMasters`](crate::optimizers::SplitMasters)). 4 bytes a parameter.
    Split,
    /// As f32, and beside it rounded to this dtype of 16 bits, which a device is sent. 6 bytes a
    /// parameter.
    Copied(Dtype),
    /// As bf16 alone, which a device is sent. What an update leaves is rounded at random, so that
    /// changes too small for a bf16 are not lost on average. 2 bytes a parameter.
    Rounded,
}

impl MasterFormat {
    /// The dtype of what a device is sent.
    pub(crate) fn sent(self) -> Dtype {
        match self {
            MasterFormat::F32 => Dtype::F32,
            MasterFormat::Split | MasterFormat::Rounded => Dtype::Bf16,
            MasterFormat::Copied(dtype) => dtype,
        }
    }

    /// Floats behind what a device is sent, of so many masters.
    pub(crate) fn kept_floats(self, masters: usize) -> usize {
        match self {
            MasterFormat::F32 | MasterFormat::Rounded => 0,
            MasterFormat::Split => masters - Dtype::Bf16.floats(masters),
            MasterFormat::Copied(_) => masters,
        }
    }
}
