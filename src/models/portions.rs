//! Portions of blocks: what the pieces of a layer need on their devices.
//!
//! A layer that is larger than a device says how its block is cut
//! ([`Layer::portions`](super::Layer::portions)), and each of its steps needs one portion of it. A
//! portion has parts of the block's tensors, one behind the other. Where each part lies in the
//! block follows from this list: the upload of a portion takes its rows from there, and the merge
//! of its gradient puts them back. The block itself stays whole on the host.

use std::collections::BTreeMap;
use std::ops::Range;

use l2l_actors::schedule::{BlockId, Cut, Portion};

use super::block_tensors::{BlockTensors, SlotWeight};
use super::frozen::CutFrozen;
use super::layer::Tensor;
use super::model::Model;
use crate::tensor::{ByteRows, Dtype, Quantisation, View};

/// A part of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// These rows, one range behind the other.
    Rows(Vec<Range<usize>>),
    /// These columns, one range behind the other.
    Columns(Vec<Range<usize>>),
    /// All of it. Where several portions of a sum have it, the first computes its gradient.
    Alone,
    /// All of it, as every slice. Its gradient is the sum of the slices' gradients, which the first
    /// portion of a sum has.
    Shared,
}

impl Part {
    /// The rows or columns that no other portion has.
    fn ranges(&self) -> &[Range<usize>] {
        match self {
            Part::Rows(ranges) | Part::Columns(ranges) => ranges,
            Part::Alone | Part::Shared => &[],
        }
    }

    /// True for a part that no other portion has.
    fn is_exclusive(&self) -> bool {
        matches!(self, Part::Rows(_) | Part::Columns(_))
    }

    /// The rows and columns of the part of a tensor.
    pub(super) fn size_of(&self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        let count = |ranges: &[Range<usize>]| ranges.iter().map(Range::len).sum();
        match self {
            Part::Rows(ranges) => [count(ranges), columns],
            Part::Columns(ranges) => [rows, count(ranges)],
            Part::Alone | Part::Shared => [rows, columns],
        }
    }
}

/// True if these parts of a tensor are all of it, and none of it twice but what all slices have.
fn are_whole(parts: &[&Part], [rows, columns]: [usize; 2]) -> bool {
    let tiles = |mut ranges: Vec<&Range<usize>>, all: usize| {
        ranges.sort_by_key(|range| range.start);
        let end = ranges.into_iter().try_fold(0, |end, range| {
            (range.start == end && range.end >= end).then_some(range.end)
        });
        end == Some(all)
    };
    let count = |is: fn(&Part) -> bool| parts.iter().filter(|part| is(part)).count();
    let all = parts.len();
    let ranges = || parts.iter().flat_map(|part| part.ranges()).collect();
    if all > 0 && count(|part| matches!(part, Part::Rows(_))) == all {
        tiles(ranges(), rows)
    } else if all > 0 && count(|part| matches!(part, Part::Columns(_))) == all {
        tiles(ranges(), columns)
    } else {
        all > 0 && count(Part::is_exclusive) == 0
    }
}

/// A portion of a layer's block, as the layer declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPortion {
    /// The number of the sum that the portion is a part of, from 0. Portions of one sum follow each
    /// other.
    pub sum: u16,
    /// What it has, in its order: the index of each weight among those that the layer gets of the
    /// block, and the part of it.
    pub parts: Vec<(usize, Part)>,
}

/// The tensors of a portion, and where each lies in the block.
#[derive(Clone, Debug)]
pub(crate) struct PortionTensors {
    /// The tensors, as those of a block.
    pub(crate) tensors: BlockTensors,
    portion: LayerPortion,
    /// True for the first portion of a sum. The others have room for gradients of what all of them
    /// have, and leave it as it is.
    is_first: bool,
    /// Bytes of quantised matrices, from the begin of the frozen part as it is stored.
    quantised: Vec<ByteRows>,
    /// The first quantised matrix that would be cut inside of a byte.
    in_byte: Option<String>,
}

impl PortionTensors {
    fn new(block: &BlockTensors, portion: LayerPortion, is_first: bool) -> PortionTensors {
        let weights: Vec<(&Tensor, bool, [usize; 2])> = block.joined().collect();
        let tensor = |(index, part): &(usize, Part)| {
            let (tensor, is_trained, size) = weights[*index];
            let [rows, columns] = part.size_of(size);
            let is_vector = tensor.shape.len() == 1;
            let shape = if is_vector { vec![columns] } else { vec![rows, columns] };
            (Tensor { shape, joined: false, ..tensor.clone() }, is_trained)
        };
        let (tensors, is_trained): (Vec<Tensor>, Vec<bool>) =
            portion.parts.iter().map(tensor).unzip();
        let tensors = BlockTensors::of_flags(tensors, is_trained).with_masters(block.masters());
        let cut = cut_frozen(block, &tensors, &portion);
        let CutFrozen { stored, rows: quantised, in_byte } = cut;
        let tensors = tensors.with_stored(stored);
        PortionTensors { tensors, portion, is_first, quantised, in_byte }
    }

    /// A portion of a block whose tensors are all trained.
    pub(super) fn of(block: &BlockTensors, portion: LayerPortion) -> PortionTensors {
        PortionTensors::new(block, portion, true)
    }

    /// The rows of the portion in what is sent of the block to a device of this dtype.
    pub(crate) fn published(&self, block: &BlockTensors, dtype: Dtype) -> Vec<ByteRows> {
        let [own, whole] = [&self.tensors, block].map(|tensors| {
            let slot = View::floats(0, tensors.published_len(dtype));
            tensors.weights(slot, dtype).into_iter().map(stored).collect::<Vec<_>>()
        });
        let mut rows = self.rows(&own, &whole, |_| true);
        let behind = [&self.tensors, block]
            .map(|tensors| dtype.floats(tensors.masters_len()) * size_of::<f32>());
        rows.extend(self.quantised.iter().map(|rows| rows.behind(behind)));
        rows
    }

    /// The rows of the gradients that the portion computes in that of the block.
    pub(crate) fn gradients(&self, block: &BlockTensors) -> Vec<ByteRows> {
        let [own, whole] = [&self.tensors, block]
            .map(|tensors| tensors.gradients(Some(View::floats(0, tensors.trained_len()))));
        self.rows(&own, &whole, |part| self.is_first || part.is_exclusive())
    }

    /// The rows of these parts whose views are there, in the portion and in the block.
    fn rows(
        &self,
        own: &[Option<View>],
        whole: &[Option<View>],
        is_meant: impl Fn(&Part) -> bool,
    ) -> Vec<ByteRows> {
        let mut all = Vec::new();
        let parts = own.iter().zip(&self.portion.parts);
        for (&own, (index, part)) in parts.filter(|(_, (_, part))| is_meant(part)) {
            let (Some(own), Some(whole)) = (own, whole[*index]) else { continue };
            let bytes = |elements: usize| elements * own.dtype.size();
            let [to, from] = [own.at, whole.at].map(bytes);
            let mut before = 0;
            match part {
                Part::Alone | Part::Shared => {
                    all.push(ByteRows::one([to, from], bytes(own.len())));
                }
                Part::Rows(ranges) => {
                    for range in ranges {
                        let first = bytes(range.start * whole.columns);
                        let len = bytes(range.len() * whole.columns);
                        all.push(ByteRows::one([to + before, from + first], len));
                        before += len;
                    }
                }
                Part::Columns(ranges) => {
                    for range in ranges {
                        let [first, len] = [range.start, range.len()].map(bytes);
                        let pitch = [own.columns, whole.columns].map(bytes);
                        let at = [to + before, from + first];
                        all.push(ByteRows { at, pitch, rows: own.rows, len });
                        before += len;
                    }
                }
            }
        }
        all
    }
}

/// The frozen part of a portion, cut from that of its block. It is empty if frozen tensors are
/// stored as masters.
fn cut_frozen(block: &BlockTensors, tensors: &BlockTensors, portion: &LayerPortion) -> CutFrozen {
    if block.stored().len() == 0 {
        return CutFrozen::default();
    }
    let is_trained: Vec<bool> = block.joined().map(|(_, is_trained, _)| is_trained).collect();
    let parts = portion.parts.iter().zip(tensors.ranges());
    let frozen = parts.filter(|((index, _), _)| !is_trained[*index]);
    block.stored().cut(frozen.map(|((index, part), (_, elements))| {
        let number = is_trained[..*index].iter().filter(|is| !**is).count();
        (number, elements, part)
    }))
}

/// The elements of a weight as a slot holds them; `None` for a matrix that is quantised.
fn stored(weight: SlotWeight<'_>) -> Option<View> {
    match weight {
        SlotWeight::Ready(view) => Some(view),
        SlotWeight::Stored(stored) => {
            let [rows, columns] = stored.shape();
            let mut matrices = stored.quantised();
            let first = matrices.next().filter(|one| one.quantisation == Quantisation::Bf16)?;
            Some(first.x.hold(rows, columns, Dtype::Bf16))
        }
    }
}

impl Model {
    /// Lists the portions of all blocks.
    pub(super) fn list_portions(&mut self) {
        let mut portions = Vec::new();
        portions.resize_with(self.blocks.len(), Vec::new);
        for (layer, blocks) in self.layers.iter().zip(&self.layer_blocks) {
            let Some(layer) = layer.stack() else { continue };
            for (number, id) in blocks.iter().enumerate() {
                let block = &self.blocks[id.0 as usize];
                let mut before = None;
                let portion = |portion: LayerPortion| {
                    let is_first = before.replace(portion.sum) != Some(portion.sum);
                    PortionTensors::new(block, portion, is_first)
                };
                portions[id.0 as usize] = layer.portions(number).into_iter().map(portion).collect();
            }
        }
        self.portions = portions;
    }

    /// The portions of a block that is cut.
    pub(crate) fn portions(&self, id: BlockId) -> &[PortionTensors] {
        &self.portions[id.0 as usize]
    }

    /// A portion of a block that is cut.
    pub(crate) fn portion(&self, Portion { block, cut }: Portion) -> &PortionTensors {
        &self.portions(block)[usize::from(cut.expect("the block is cut"))]
    }

    /// The tensors of a portion, or of a whole block.
    pub(crate) fn tensors_of(&self, Portion { block, cut }: Portion) -> &BlockTensors {
        match cut {
            None => &self.blocks[block.0 as usize],
            Some(cut) => &self.portions(block)[usize::from(cut)].tensors,
        }
    }

    /// Bytes of the largest portion on a device of this dtype, and its gradient's. `None`: layers
    /// are visited whole.
    pub fn largest_piece(&self, dtype: Dtype) -> Option<[u64; 2]> {
        let bytes = |floats: usize| (floats * size_of::<f32>()) as u64;
        let pieces = self.portions.iter().flatten().map(|portion| &portion.tensors);
        pieces.map(|one| [one.published_len(dtype), one.trained_len()].map(bytes)).max()
    }

    /// The tensors of all that a device may hold: portions, and whole blocks that are not cut.
    pub(crate) fn on_device(&self) -> impl Iterator<Item = &BlockTensors> {
        let blocks = self.blocks.iter().zip(&self.portions);
        blocks.flat_map(|(block, portions)| {
            let whole = portions.is_empty().then_some(block);
            whole.into_iter().chain(portions.iter().map(|portion| &portion.tensors))
        })
    }

    /// The number of places that devices may share: layers that are visited whole, and pieces.
    pub(crate) fn stops(&self) -> usize {
        let layers = self.layers.iter().zip(&self.layer_blocks).zip(&self.first_ports);
        let layers = layers.filter(|((layer, _), _)| layer.is_on_device());
        let stops = layers.map(|((_, blocks), steps)| {
            let are_cut = blocks.iter().any(|id| !self.portions(*id).is_empty());
            if are_cut { steps.len() } else { 1 }
        });
        stops.sum()
    }

    /// The portions of all blocks that are cut, as the ring sees them, for a device of this dtype.
    pub(super) fn cuts(&self, dtype: Dtype) -> BTreeMap<BlockId, Vec<Cut>> {
        let cut = |PortionTensors { tensors, portion, .. }: &PortionTensors| {
            let gradient_bytes = (tensors.trained_len() * size_of::<f32>()) as u64;
            Cut {
                weight_bytes: (tensors.published_len(dtype) * size_of::<f32>()) as u64,
                gradient_bytes,
                download_bytes: gradient_bytes,
                sum: portion.sum,
            }
        };
        let blocks = (0..).map(BlockId).zip(&self.portions);
        let are_cut = blocks.filter(|(_, portions)| !portions.is_empty());
        are_cut.map(|(id, portions)| (id, portions.iter().map(cut).collect())).collect()
    }

    /// The tensor of a block that its portions do not have exactly once, if there is one.
    pub(crate) fn badly_cut(&self) -> Option<&str> {
        let blocks = self.blocks.iter().zip(&self.portions);
        blocks.filter(|(_, portions)| !portions.is_empty()).find_map(|(block, portions)| {
            let parts = || portions.iter().flat_map(|one| &one.portion.parts);
            let weights: Vec<_> = block.joined().collect();
            let is_unknown = parts().any(|(index, _)| *index >= weights.len());
            let mut weights = weights.into_iter().enumerate();
            let bad = weights.find(|(index, (.., size))| {
                let own = parts().filter(|(of, _)| of == index).map(|(_, part)| part);
                is_unknown || !are_whole(&own.collect::<Vec<_>>(), *size)
            });
            bad.map(|(_, (tensor, ..))| &tensor.name[..])
        })
    }

    /// True if some block is cut.
    pub(crate) fn has_portions(&self) -> bool {
        self.portions.iter().any(|portions| !portions.is_empty())
    }

    /// The quantised matrix of which a portion would have half a byte, if there is one.
    pub(crate) fn cut_in_byte(&self) -> Option<&str> {
        self.portions.iter().flatten().find_map(|portion| portion.in_byte.as_deref())
    }
}
