//! How the masters of a block are stored on the host, and in which dtype they are sent to a device.

use crate::tensor::Dtype;

/// How masters are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MasterFormat {
    /// As f32, for a device of f32.
    #[default]
    F32,
    /// As f32 in two halves: a bf16, which is sent to the device, and the remaining bits
    /// ([`SplitMasters`](crate::optimizers::SplitMasters)). 4 bytes a parameter.
    Split,
    /// As f32, and beside it a copy in this dtype of 16 bits, which is sent to the device. 6 bytes a
    /// parameter.
    Copied(Dtype),
    /// As bf16 alone, which is sent to the device. An update rounds at random, so that changes too
    /// small for a bf16 are not lost on average. 2 bytes a parameter.
    Rounded,
}

impl MasterFormat {
    pub(crate) fn sent(self) -> Dtype {
        match self {
            MasterFormat::F32 => Dtype::F32,
            MasterFormat::Split | MasterFormat::Rounded => Dtype::Bf16,
            MasterFormat::Copied(dtype) => dtype,
        }
    }

    /// Floats of `masters` that stay on the host.
    pub(crate) fn kept_floats(self, masters: usize) -> usize {
        match self {
            MasterFormat::F32 | MasterFormat::Rounded => 0,
            MasterFormat::Split => masters - Dtype::Bf16.floats(masters),
            MasterFormat::Copied(_) => masters,
        }
    }
}
