//! The tensors of a block, and where they lie in it: first those that are trained, then those that
//! are frozen.
//!
//! Gradients, optimizer states and gradient regions have the trained part alone, which begins a
//! block. So they are shorter than the block, and nothing of a frozen tensor leaves the device or
//! is updated.

use std::iter::Chain;
use std::ops::Range;
use std::slice::Iter;

use super::layer::{Tensor, block_len, tensor_ranges};

/// See the [module](self).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockTensors {
    trained: Vec<Tensor>,
    frozen: Vec<Tensor>,
    /// For each tensor, in the order of its layer: whether it is trained.
    flags: Vec<bool>,
}

impl From<Vec<Tensor>> for BlockTensors {
    /// All are trained.
    fn from(tensors: Vec<Tensor>) -> BlockTensors {
        BlockTensors::new(tensors, |_| true)
    }
}

impl<'a> IntoIterator for &'a BlockTensors {
    type Item = &'a Tensor;
    type IntoIter = Chain<Iter<'a, Tensor>, Iter<'a, Tensor>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl BlockTensors {
    /// A layer's tensors, of which some are trained. Joined tensors are one matrix of a product:
    /// if one of them is trained, all are.
    pub fn new(tensors: Vec<Tensor>, is_trained: impl Fn(&Tensor) -> bool) -> BlockTensors {
        let mut all = BlockTensors::default();
        for group in tensors.chunk_by(|_, next| next.joined) {
            let trains = group.iter().any(&is_trained);
            let part = if trains { &mut all.trained } else { &mut all.frozen };
            part.extend_from_slice(group);
            all.flags.extend(group.iter().map(|_| trains));
        }
        all
    }

    /// Those that are trained. They lie where [`tensor_ranges`] says.
    pub fn trained(&self) -> &[Tensor] {
        &self.trained
    }

    /// Those that are frozen. They lie where [`tensor_ranges`] says, behind the trained part.
    pub fn frozen(&self) -> &[Tensor] {
        &self.frozen
    }

    /// All, in the order in which they lie in the block.
    pub fn iter(&self) -> Chain<Iter<'_, Tensor>, Iter<'_, Tensor>> {
        self.trained.iter().chain(&self.frozen)
    }

    /// All, and where each lies in the block.
    pub fn ranges(&self) -> impl Iterator<Item = (&Tensor, Range<usize>)> {
        let behind = self.trained_len();
        let frozen = tensor_ranges(&self.frozen);
        let frozen = frozen.map(move |range| range.start + behind..range.end + behind);
        self.iter().zip(tensor_ranges(&self.trained).chain(frozen))
    }

    /// Elements of the block.
    pub fn len(&self) -> usize {
        self.trained_len() + block_len(&self.frozen)
    }

    /// Elements of its trained part, which begins it.
    pub fn trained_len(&self) -> usize {
        block_len(&self.trained)
    }

    /// True for a block without tensors.
    pub fn is_empty(&self) -> bool {
        self.flags.is_empty()
    }

    /// The tensors of a part of the block, in a block of their own. It begins and ends where chunks
    /// of tensors do.
    pub(crate) fn part(&self, part: Range<usize>) -> BlockTensors {
        let mut cut = BlockTensors::default();
        for (at, (tensor, range)) in self.ranges().enumerate() {
            let (start, end) = (range.start.max(part.start), range.end.min(part.end));
            if start >= end {
                continue;
            }
            let trains = at < self.trained.len();
            let tensors = if trains { &mut cut.trained } else { &mut cut.frozen };
            let joined = tensor.joined && !tensors.is_empty();
            tensors.push(Tensor { shape: vec![end - start], joined, ..tensor.clone() });
            cut.flags.push(trains);
        }
        cut
    }
}
