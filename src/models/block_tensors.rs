//! The trained and the frozen tensors of a block, and where they lie in it.
//!
//! A block begins with its trained part. Gradients, optimizer states and gradient regions have this
//! part alone: no gradient of a frozen tensor leaves the device, and no frozen tensor is updated.
//!
//! Elements are counted as if all were f32, because a block is read and written as f32 between
//! steps. It is stored as masters, and behind them the frozen tensors of other formats. A device of
//! 16 bits gets masters of 16 bits, and the rest of each master lies at the end (see
//! [`MasterFormat`]):
//!
//! | | floats | sent |
//! |---|---|---|
//! | masters, of 32 or 16 bits | M, or M ÷ 2 | yes |
//! | frozen tensors, as they are stored | E | yes |
//! | remainders of split masters, or masters of f32 beside copies of 16 bits | M ÷ 2, or M | no |

use std::ops::Range;
use std::slice::Iter;

use super::frozen::{Base, FrozenPart, StoredMatrix, StoredWeight};
use super::layer::{Kind, Tensor, block_len, tensor_ranges, tensor_views};
use super::masters::MasterFormat;
use crate::kernels::{CopyColumns, Dequantise, Kernels};
use crate::tensor::{Dtype, Scratch, View};

/// The tensors of a block: first the trained ones, then the frozen ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockTensors {
    /// All tensors, in the order of their layer.
    tensors: Vec<Tensor>,
    is_trained: Vec<bool>,
    trained: Vec<Tensor>,
    frozen: Vec<Tensor>,
    /// The formats of the frozen tensors. Empty: they are stored as masters.
    stored: FrozenPart,
    masters: MasterFormat,
}

/// A range of a block that begins with a tensor and ends where the next one begins. Joined tensors
/// are in one range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorFloats {
    /// The index of its first tensor, in the order of the layer.
    pub(crate) tensor: usize,
    pub(crate) floats: Range<usize>,
}

/// A weight in a device's weight slot.
#[derive(Clone, Copy, Debug)]
pub enum SlotWeight<'t> {
    /// Elements of the device's dtype.
    Ready(View),
    /// A frozen weight that must be dequantised.
    Stored(StoredWeight<'t>),
}

impl SlotWeight<'_> {
    /// The place of the weight in the device's dtype: its slot, or workspace.
    pub(crate) fn place(self, scratch: &Scratch<'_>) -> View {
        match self {
            SlotWeight::Ready(view) => view,
            SlotWeight::Stored(stored) => {
                let [rows, columns] = stored.shape();
                scratch.take(rows, columns)
            }
        }
    }

    /// The weight in the device's dtype: in its slot, or dequantised to workspace.
    pub fn ready(self, kernels: &dyn Kernels, scratch: &Scratch<'_>) -> View {
        let y = self.place(scratch);
        if let SlotWeight::Stored(stored) = self {
            for StoredMatrix { rows, columns, x, quantisation, origin } in stored.quantised() {
                let y = y.row_range(rows);
                if columns.len() == y.columns {
                    kernels.dequantise(&Dequantise { y, x, quantisation, origin });
                    continue;
                }
                let some = scratch.nested().take(y.rows, columns.len());
                kernels.dequantise(&Dequantise { y: some, x, quantisation, origin });
                let columns =
                    CopyColumns { y, x: some, to: columns.start, from: 0, columns: some.columns };
                kernels.copy_columns(&columns);
            }
        }
        y
    }
}

impl From<Vec<Tensor>> for BlockTensors {
    /// All tensors are trained, but for constants.
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
    /// A layer's tensors. `trains` says which of them are trained; constants are not. Joined
    /// tensors are one matrix of a product: if one of them is trained, all are.
    pub fn new(tensors: Vec<Tensor>, trains: impl Fn(&Tensor) -> bool) -> BlockTensors {
        let of_group = |group: &[Tensor]| {
            let is_trained = group.iter().any(|one| one.kind != Kind::Buffer && trains(one));
            group.iter().map(move |_| is_trained).collect::<Vec<_>>()
        };
        let is_trained = tensors.chunk_by(|_, next| next.joined).flat_map(of_group).collect();
        BlockTensors::of_flags(tensors, is_trained)
    }

    /// Tensors, and whether each is trained: all joined ones, or none.
    pub(super) fn of_flags(tensors: Vec<Tensor>, is_trained: Vec<bool>) -> BlockTensors {
        let part = |of_trained: bool| -> Vec<Tensor> {
            let all = tensors.iter().zip(&is_trained);
            all.filter(|(_, is)| **is == of_trained).map(|(tensor, _)| tensor.clone()).collect()
        };
        let trained = part(true);
        let frozen = part(false);
        BlockTensors { tensors, is_trained, trained, frozen, ..BlockTensors::default() }
    }

    /// Changes which tensors are trained.
    pub fn with_trained(&self, trains: impl Fn(&Tensor) -> bool) -> BlockTensors {
        BlockTensors::new(self.tensors.clone(), trains).with_masters(self.masters)
    }

    /// Stores the frozen tensors in this way, for a device of this dtype.
    pub fn with_base(self, base: Base, dtype: Dtype) -> BlockTensors {
        let stored = FrozenPart::new(&self.frozen, self.trained_len(), base, dtype);
        BlockTensors { stored, ..self }
    }

    /// Stores the frozen tensors in this way.
    pub(super) fn with_stored(self, stored: FrozenPart) -> BlockTensors {
        BlockTensors { stored, ..self }
    }

    /// Stores masters in this way.
    pub(crate) fn with_masters(self, masters: MasterFormat) -> BlockTensors {
        BlockTensors { masters, ..self }
    }

    pub(crate) fn masters(&self) -> MasterFormat {
        self.masters
    }

    /// All tensors, in the order of their layer.
    pub fn iter(&self) -> Iter<'_, Tensor> {
        self.tensors.iter()
    }

    /// The trained tensors. They lie where [`tensor_ranges`] says.
    pub fn trained(&self) -> &[Tensor] {
        &self.trained
    }

    /// The frozen tensors. They lie where [`tensor_ranges`] says, behind the trained part.
    pub fn frozen(&self) -> &[Tensor] {
        &self.frozen
    }

    /// All tensors, in the order of their layer, with their ranges in the block.
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

    /// Elements of the trained part.
    pub fn trained_len(&self) -> usize {
        block_len(&self.trained)
    }

    /// Bytes of the block's gradient, in f32.
    pub fn gradient_bytes(&self) -> u64 {
        (self.trained_len() * size_of::<f32>()) as u64
    }

    /// True for a block without tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The frozen tensors that are not stored as masters.
    pub(crate) fn stored(&self) -> &FrozenPart {
        &self.stored
    }

    /// Elements that are stored as masters.
    pub(crate) fn masters_len(&self) -> usize {
        if self.stored.len() == 0 { self.len() } else { self.trained_len() }
    }

    /// Floats that the block takes on the host.
    pub(crate) fn host_len(&self) -> usize {
        let masters = self.masters_len();
        let sent = self.published_len(self.masters.sent());
        sent + self.masters.kept_floats(masters)
    }

    /// Floats that are sent to a device of this dtype.
    pub(crate) fn published_len(&self, dtype: Dtype) -> usize {
        dtype.floats(self.masters_len()) + self.stored.len()
    }

    /// The weights in a slot of a device of this dtype, in the order of their layer. Joined tensors
    /// are one weight.
    pub(crate) fn weights(&self, slot: View, dtype: Dtype) -> Vec<SlotWeight<'_>> {
        let masters = self.masters_len();
        let trained = self.trained_len();
        let published = dtype.floats(masters);
        let end = self.published_len(dtype);
        let block = slot.part(0..published).hold(1, masters, dtype);
        let mut trained_views = tensor_views(&self.trained, block.part(0..trained)).into_iter();
        let behind = block.part(trained..masters);
        let mut frozen_views = match masters > trained {
            true => tensor_views(&self.frozen, behind).into_iter(),
            false => Vec::new().into_iter(),
        };
        let mut stored = self.stored.views(slot.part(published..end));
        let weight = |is_trained| {
            let next = if is_trained { trained_views.next() } else { frozen_views.next() };
            next.map(SlotWeight::Ready).or_else(|| {
                let stored = stored.next()?;
                Some(stored.plain().map_or(SlotWeight::Stored(stored), SlotWeight::Ready))
            })
        };
        self.groups().filter_map(weight).collect()
    }

    /// The ranges of all tensors in what is sent to a device of this dtype, as they lie there.
    pub(crate) fn published_ranges(&self, dtype: Dtype) -> Vec<TensorFloats> {
        let published = dtype.floats(self.masters_len());
        let mut stored = self.stored.starts();
        let starts = self.starts().map(|(tensor, is_trained, element)| {
            let stored = if is_trained { None } else { stored.next() };
            (stored.map_or(dtype.floats(element), |start| published + start), tensor)
        });
        cut_at(starts.collect(), self.published_len(dtype))
    }

    /// The ranges of the trained tensors in the block's gradient.
    pub(crate) fn gradient_ranges(&self) -> Vec<TensorFloats> {
        let trained = self.starts().filter(|(_, is_trained, _)| *is_trained);
        cut_at(trained.map(|(tensor, _, element)| (element, tensor)).collect(), self.trained_len())
    }

    /// For each tensor that is not joined to the one before, in the order of the layer: its index,
    /// whether it is trained, and its first element in the block.
    fn starts(&self) -> impl Iterator<Item = (usize, bool, usize)> {
        let all = self.ranges().zip(&self.is_trained).enumerate();
        let first = all.filter(|(at, ((tensor, _), _))| *at == 0 || !tensor.joined);
        first.map(|(at, ((_, range), &is_trained))| (at, is_trained, range.start))
    }

    /// Views of the tensors' gradients, in the order of their layer: `None` for a frozen tensor,
    /// and for all tensors if the block has no `gradient`.
    pub fn gradients(&self, gradient: Option<View>) -> Vec<Option<View>> {
        let mut views = match gradient {
            Some(gradient) => tensor_views(&self.trained, gradient).into_iter(),
            None => Vec::new().into_iter(),
        };
        self.groups().map(|is_trained| if is_trained { views.next() } else { None }).collect()
    }

    /// For each group of joined tensors, in the order of their layer: the first tensor, whether it
    /// is trained, and the rows and columns of all.
    pub(super) fn joined(&self) -> impl Iterator<Item = (&Tensor, bool, [usize; 2])> {
        let size = |group: &[Tensor]| {
            let len = group.iter().map(Tensor::len).sum::<usize>();
            match group[0].shape[..] {
                [_] => [1, len],
                [_, ref inner @ ..] => {
                    let columns: usize = inner.iter().product();
                    [len / columns.max(1), columns]
                }
                [] => [0, 0],
            }
        };
        let groups = self.tensors.chunk_by(|_, next| next.joined);
        groups.zip(self.groups()).map(move |(group, is)| (&group[0], is, size(group)))
    }

    /// For each group of joined tensors, in the order of their layer: whether it is trained.
    fn groups(&self) -> impl Iterator<Item = bool> {
        let first = self.tensors.iter().zip(&self.is_trained).enumerate();
        let first = first.filter(|(at, (tensor, _))| *at == 0 || !tensor.joined);
        first.map(|(_, (_, is_trained))| *is_trained)
    }

    /// The tensors of a part of the block, in a block of their own, all stored as masters. The part
    /// must begin and end at chunks of tensors.
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
        let trained = cut(&self.trained, 0);
        let frozen = cut(&self.frozen, self.trained_len());
        let is_trained = [vec![true; trained.len()], vec![false; frozen.len()]].concat();
        let tensors = [trained.clone(), frozen.clone()].concat();
        let stored = FrozenPart::default();
        let masters = self.masters;
        BlockTensors { tensors, is_trained, trained, frozen, stored, masters }
    }
}

/// Cuts `len` floats where tensors begin: each start with its tensor.
fn cut_at(mut starts: Vec<(usize, usize)>, len: usize) -> Vec<TensorFloats> {
    starts.sort_unstable();
    let ends = starts.iter().skip(1).map(|(start, _)| *start).chain([len]);
    let range = |(&(start, tensor), end)| TensorFloats { tensor, floats: start..end };
    starts.iter().zip(ends).map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::Init;

    /// Ranges of tensors cover what is sent, and gradients, each float once.
    #[test]
    fn ranges_cover_a_block() {
        let weight = |name: &str, joined| {
            let tensor = Tensor::new(name, vec![3, 5], Kind::Weight, Init::Zeros);
            Tensor { joined, ..tensor }
        };
        let expert = || [weight("gate", false), weight("up", true), weight("down", false)];
        let tensors = [expert(), expert()].concat();
        for trained in [vec![], vec!["down"], vec!["gate", "up"], vec!["gate", "up", "down"]] {
            let is_trained = |tensor: &Tensor| trained.contains(&&tensor.name[..]);
            for base in [Base::AsIs, Base::Bf16, Base::Int8, Base::Nf4] {
                for dtype in [Dtype::F32, Dtype::Bf16] {
                    let block = BlockTensors::new(tensors.clone(), is_trained);
                    let block = block.with_base(base, dtype);
                    let published = block.published_ranges(dtype);
                    let mut firsts: Vec<usize> = published.iter().map(|of| of.tensor).collect();
                    firsts.sort_unstable();
                    assert_eq!(firsts, [0, 2, 3, 5]);
                    for (ranges, len) in [
                        (published, block.published_len(dtype)),
                        (block.gradient_ranges(), block.trained_len()),
                    ] {
                        let mut end = 0;
                        for TensorFloats { floats, .. } in ranges {
                            assert_eq!(floats.start, end);
                            assert!(floats.end > end, "{floats:?}");
                            end = floats.end;
                        }
                        assert_eq!(end, len, "{trained:?} {base:?} {dtype:?}");
                    }
                }
            }
        }
    }
}
