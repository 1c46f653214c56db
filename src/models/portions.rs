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
use super::layer::Tensor;
use super::model::Model;
use super::training::Training;
use crate::tensor::{Dtype, Quantisation, View};

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
}

/// Rows of floats that lie in a portion and in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortionRows {
    /// The first float of the first row, in the portion and in the block.
    pub(crate) at: [usize; 2],
    /// Floats from a row to the next one, in each.
    pub(crate) pitch: [usize; 2],
    /// The number of rows, and the floats of each.
    pub(crate) rows: usize,
    pub(crate) len: usize,
}

impl PortionRows {
    /// Each row by itself: its place in the portion, and in the block.
    pub(crate) fn each(self) -> impl Iterator<Item = [Range<usize>; 2]> {
        let PortionRows { at, pitch, rows, len } = self;
        (0..rows).map(move |row| {
            [0, 1].map(|side| {
                let from = at[side] + row * pitch[side];
                from..from + len
            })
        })
    }
}

impl PortionTensors {
    fn new(
        block: &BlockTensors,
        portion: LayerPortion,
        is_first: bool,
        training: &Training,
    ) -> PortionTensors {
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
        PortionTensors {
            tensors: tensors.with_base(training.base, training.dtype),
            portion,
            is_first,
        }
    }

    /// A portion of a block whose tensors are all trained.
    pub(super) fn of(block: &BlockTensors, portion: LayerPortion) -> PortionTensors {
        PortionTensors::new(block, portion, true, &Training::default())
    }

    /// The rows of the portion in what is sent of the block to a device of this dtype.
    pub(crate) fn published(&self, block: &BlockTensors, dtype: Dtype) -> Vec<PortionRows> {
        let [own, whole] = [&self.tensors, block].map(|tensors| {
            let slot = View::floats(0, tensors.published_len(dtype));
            tensors.weights(slot, dtype).into_iter().map(stored).collect::<Vec<_>>()
        });
        self.rows(&own, &whole, |_| true)
    }

    /// The rows of the gradients that the portion computes in that of the block.
    pub(crate) fn gradients(&self, block: &BlockTensors) -> Vec<PortionRows> {
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
    ) -> Vec<PortionRows> {
        let mut all = Vec::new();
        let parts = own.iter().zip(&self.portion.parts);
        for (&own, (index, part)) in parts.filter(|(_, (_, part))| is_meant(part)) {
            let (Some(own), Some(whole)) = (own, whole[*index]) else { continue };
            let floats = |elements: usize| elements * own.dtype.size() / Dtype::F32.size();
            let [to, from] = [own.at, whole.at].map(floats);
            let mut add = |at, pitch, rows, len| all.push(PortionRows { at, pitch, rows, len });
            let mut before = 0;
            match part {
                Part::Alone | Part::Shared => {
                    let len = own.dtype.floats(own.len());
                    add([to, from], [len; 2], 1, len);
                }
                Part::Rows(ranges) => {
                    for range in ranges {
                        let first = floats(range.start * whole.columns);
                        let len = floats(range.len() * whole.columns);
                        add([to + before, from + first], [len; 2], 1, len);
                        before += len;
                    }
                }
                Part::Columns(ranges) => {
                    for range in ranges {
                        let [first, len] = [range.start, range.len()].map(floats);
                        let pitch = [own.columns, whole.columns].map(floats);
                        add([to + before, from + first], pitch, own.rows, len);
                        before += len;
                    }
                }
            }
        }
        all
    }

    /// True if all parts begin and end at whole floats in the copy that a device of this dtype
    /// gets.
    fn is_of_floats(&self, block: &BlockTensors, dtype: Dtype) -> bool {
        let whole: Vec<_> = block.weights(View::floats(0, block.published_len(dtype)), dtype);
        let whole: Vec<_> = whole.into_iter().map(stored).collect();
        self.portion.parts.iter().all(|(index, part)| {
            let Some(view) = whole[*index] else { return false };
            let in_floats = Dtype::F32.size() / view.dtype.size();
            let is_even = |elements: usize| elements.is_multiple_of(in_floats);
            let are_even = |ranges: &[Range<usize>], each: usize| {
                ranges.iter().all(|range| is_even(range.start * each) && is_even(range.end * each))
            };
            match part {
                Part::Alone | Part::Shared => true,
                Part::Rows(ranges) => are_even(ranges, view.columns),
                Part::Columns(ranges) => {
                    are_even(ranges, 1) && (view.rows == 1 || is_even(view.columns))
                }
            }
        })
    }
}

/// The elements of a weight as a slot holds them; `None` for a matrix that is quantised.
fn stored(weight: SlotWeight<'_>) -> Option<View> {
    match weight {
        SlotWeight::Ready(view) => Some(view),
        SlotWeight::Stored(stored) => {
            let [rows, columns] = stored.shape();
            let mut pieces = stored.quantised();
            let is_bf16 = |(.., kind): &(_, _, Quantisation)| *kind == Quantisation::Bf16;
            let (_, view, _) = pieces.next().filter(is_bf16)?;
            Some(view.hold(rows, columns, Dtype::Bf16))
        }
    }
}

impl Model {
    /// Lists the portions of all blocks, whose frozen tensors are stored as this says.
    pub(super) fn list_portions(&mut self, training: &Training) {
        let mut portions = Vec::new();
        portions.resize_with(self.blocks.len(), Vec::new);
        for (layer, blocks) in self.layers.iter().zip(&self.layer_blocks) {
            let Some(layer) = layer.stack() else { continue };
            for (number, id) in blocks.iter().enumerate() {
                let block = &self.blocks[id.0 as usize];
                let mut before = None;
                let portion = |portion: LayerPortion| {
                    let is_first = before.replace(portion.sum) != Some(portion.sum);
                    PortionTensors::new(block, portion, is_first, training)
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

    /// Whether devices of this dtype can be sent the portions of all blocks.
    pub(crate) fn has_portions_of_floats(&self, dtype: Dtype) -> bool {
        let blocks = self.blocks.iter().zip(&self.portions);
        blocks.into_iter().all(|(block, portions)| {
            portions.iter().all(|portion| portion.is_of_floats(block, dtype))
        })
    }
}
