//! Which tensors of a block are trained, and where all of them lie in it.
//!
//! Gradients, optimizer states and gradient regions have the trained part alone, which begins a
//! block. So they are shorter than the block, and nothing of a frozen tensor leaves the device or
//! is updated.

use std::ops::Range;
use std::slice::Iter;

use super::layer::{Tensor, block_len, tensor_ranges, tensor_views};
use crate::tensor::View;

/// The tensors of a block: those that are trained lie first in it, then those that are frozen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockTensors {
    /// All, in the order of their layer.
    tensors: Vec<Tensor>,
    /// For each: whether it is trained.
    is_trained: Vec<bool>,
    trained: Vec<Tensor>,
    frozen: Vec<Tensor>,
}

impl From<Vec<Tensor>> for BlockTensors {
    /// All are trained.
    fn from(tensors: Vec<Tensor>) -> BlockTensors {
        BlockTensors::new(tensors, |_| true)
    }
}

impl<'a> IntoIterator for &'a BlockTensors {
    type Item = &'a Tensor;
    type IntoIter = Iter<'a, Tensor>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl BlockTensors {
    /// A layer's tensors, of which some are trained. Joined tensors are one matrix of a product:
    /// if one of them is trained, all are.
    pub fn new(tensors: Vec<Tensor>, trains: impl Fn(&Tensor) -> bool) -> BlockTensors {
        let mut all = BlockTensors::default();
        for group in tensors.chunk_by(|_, next| next.joined) {
            let is_trained = group.iter().any(&trains);
            all.is_trained.extend(group.iter().map(|_| is_trained));
            let part = if is_trained { &mut all.trained } else { &mut all.frozen };
            part.extend_from_slice(group);
        }
        BlockTensors { tensors, ..all }
    }

    /// The same tensors, of which others are trained.
    pub fn with_trained(&self, trains: impl Fn(&Tensor) -> bool) -> BlockTensors {
        BlockTensors::new(self.tensors.clone(), trains)
    }

    /// All, in the order of their layer.
    pub fn iter(&self) -> Iter<'_, Tensor> {
        self.tensors.iter()
    }

    /// Those that are trained. They lie where [`tensor_ranges`] says.
    pub fn trained(&self) -> &[Tensor] {
        &self.trained
    }

    /// Those that are frozen. They lie where [`tensor_ranges`] says, behind the trained part.
    pub fn frozen(&self) -> &[Tensor] {
        &self.frozen
    }

    /// All, in the order of their layer, and where each lies in the block.
    pub fn ranges(&self) -> impl Iterator<Item = (&Tensor, Range<usize>)> {
        let behind = self.trained_len();
        let mut trained = tensor_ranges(&self.trained);
        let frozen = tensor_ranges(&self.frozen);
        let mut frozen = frozen.map(move |range| range.start + behind..range.end + behind);
        self.iter().zip(&self.is_trained).map(move |(tensor, &is_trained)| {
            let range = if is_trained { trained.next() } else { frozen.next() };
            (tensor, range.expect("a tensor is in one of the two parts"))
        })
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
        self.tensors.is_empty()
    }

    /// Views of the tensors, in the order of their layer. Joined tensors are one view.
    pub fn views(&self, block: View) -> Vec<View> {
        let (trained, len) = (self.trained_len(), self.len());
        let mut trained_views = tensor_views(&self.trained, block.part(0..trained)).into_iter();
        let mut frozen_views = tensor_views(&self.frozen, block.part(trained..len)).into_iter();
        let view = |is_trained| if is_trained { trained_views.next() } else { frozen_views.next() };
        self.groups().filter_map(view).collect()
    }

    /// Views of the tensors' gradients, in the order of their layer: none of a frozen tensor, and
    /// none at all where the block has no `gradient`.
    pub fn gradients(&self, gradient: Option<View>) -> Vec<Option<View>> {
        let mut views = match gradient {
            Some(gradient) => tensor_views(&self.trained, gradient).into_iter(),
            None => Vec::new().into_iter(),
        };
        self.groups().map(|is_trained| if is_trained { views.next() } else { None }).collect()
    }

    /// For each group of joined tensors, in the order of their layer: whether it is trained.
    fn groups(&self) -> impl Iterator<Item = bool> {
        let first = self.tensors.iter().zip(&self.is_trained).enumerate();
        let first = first.filter(|(at, (tensor, _))| *at == 0 || !tensor.joined);
        first.map(|(_, (_, is_trained))| *is_trained)
    }

    /// The tensors of a part of the block, in a block of their own. The part begins and ends where
    /// chunks of tensors do.
    pub(crate) fn part(&self, part: Range<usize>) -> BlockTensors {
        let cut = |tensors: &[Tensor], behind: usize| {
            let mut cut: Vec<Tensor> = Vec::new();
            for (tensor, range) in tensors.iter().zip(tensor_ranges(tensors)) {
                let start = (range.start + behind).max(part.start);
                let end = (range.end + behind).min(part.end);
                if start < end {
                    let joined = tensor.joined && !cut.is_empty();
                    cut.push(Tensor { shape: vec![end - start], joined, ..tensor.clone() });
                }
            }
            cut
        };
        let (trained, frozen) = (cut(&self.trained, 0), cut(&self.frozen, self.trained_len()));
        let is_trained = [vec![true; trained.len()], vec![false; frozen.len()]].concat();
        let tensors = [trained.clone(), frozen.clone()].concat();
        BlockTensors { tensors, is_trained, trained, frozen }
    }
}
