//! The input of the generators: a model without tensors, and the selection that one step visits.
//!
//! A layer declares its steps: what each needs, reads and writes. Generators, rules, plan and lanes
//! follow from that alone.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Block, BlockId, Boundary, Cut, LayerId, MicroBatch, Refusal, Role, VisitKind};

/// A model without tensors: its layers and blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingModel {
    /// All blocks.
    pub blocks: Vec<Block>,
    /// The portions of blocks that are cut: see [`Portion`](super::Portion).
    pub cuts: BTreeMap<BlockId, Vec<Cut>>,
    /// All layers, in forward order.
    pub layers: Vec<RingLayer>,
    /// Tokens of the longest sequence: slots have room for as many.
    pub positions: u32,
    /// True if the host answers what layers measure when it has that of the whole step; false if it
    /// answers for each micro-batch by itself.
    pub answers_step: bool,
    /// The step's objective; `None`: the loss is a sum over micro-batches.
    pub objective: Option<RingObjective>,
}

/// An objective, as the generators see it: a loss of whole records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingObjective {
    /// True if a record's loss needs what is measured of the whole step; false if each micro-batch
    /// has whole records, and that is enough.
    pub of_step: bool,
    /// The gradient of the last hidden states, if the objective reads those; `None`: it reads
    /// complete statistics, and writes them with the weight of each row.
    pub gradient: Option<Boundary>,
    /// The layer from which on the objective's reference computes something else than the model.
    /// From there each step has a second forward visit, directly behind the first, and the
    /// objective reads what both leave. `None`: the step computes no reference.
    pub reference: Option<LayerId>,
}

impl RingModel {
    /// The blocks, of which a step freezes some.
    pub(super) fn blocks_of(&self, selection: &Selection) -> Result<Vec<Block>, Refusal> {
        let mut blocks = self.blocks.clone();
        for id in &selection.frozen {
            let unknown = || Refusal::of(format!("frozen {id} is not in the model"));
            blocks.get_mut(id.0 as usize).ok_or_else(unknown)?.frozen = true;
        }
        Ok(blocks)
    }

    /// A model without a head, for simulations: an embedding with the first block, then a layer
    /// for each further block, of which the last takes the loss. `bytes`: of hidden states, for
    /// each sequence.
    pub fn stack(blocks: Vec<Block>, bytes: u64) -> RingModel {
        let of_sequences = |role| Boundary::of_sequences(role, bytes as usize, 1);
        let hidden = of_sequences(Role::Hidden);
        let statistics = of_sequences(Role::Statistics);
        let gradient = Some(of_sequences(Role::HiddenGradient));
        let x = Input::new(hidden, gradient);
        let known = Input::new(statistics, None);
        let last = blocks.len() - 1;
        let layers = (0..blocks.len()).map(|number| {
            let (kind, reads, writes) = match number {
                0 => (VisitKind::Gather, Vec::new(), vec![hidden, statistics]),
                _ if number == last => (VisitKind::Layer, vec![x, known], vec![statistics]),
                _ => (VisitKind::Layer, vec![x], vec![hidden]),
            };
            let needs = vec![BlockId(number as u32)];
            let saves = None;
            let cut = None;
            let chosen_by = None;
            let keeps = false;
            let reach = 0;
            let asks = None;
            let step =
                RingStep { kind, needs, cut, chosen_by, reads, writes, saves, keeps, reach, asks };
            RingLayer { steps: vec![step] }
        });
        let layers = layers.collect();
        let cuts = BTreeMap::new();
        RingModel { blocks, cuts, layers, positions: 1, answers_step: false, objective: None }
    }
}

/// One layer of a model, as the generators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingLayer {
    /// The layer's visits in the forward pass, in order. The backward pass has them in reverse.
    pub steps: Vec<RingStep>,
}

impl RingLayer {
    /// The blocks that its steps need, each once, in the order of the forward pass.
    pub fn blocks(&self) -> Vec<BlockId> {
        let mut blocks = Vec::new();
        for &id in self.steps.iter().flat_map(|step| &step.needs) {
            if !blocks.contains(&id) {
                blocks.push(id);
            }
        }
        blocks
    }

    /// True for a layer that a device visits.
    pub fn on_device(&self) -> bool {
        self.steps.iter().any(|step| step.kind.on_device())
    }
}

/// One visit of a layer in the forward pass, as the layer declares it. Its backward visit follows
/// from it: it reads the boundaries that the forward visit read and saved, and the gradients of
/// those that it wrote; it writes the gradients of those that it read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingStep {
    /// The kind of the forward visit. The backward visit of a gather is a scatter.
    pub kind: VisitKind,
    /// Blocks it needs. A block that several layers need is trained by one of them at most.
    pub needs: Vec<BlockId>,
    /// The portion that it needs of each, by its index; `None`: they are not cut.
    pub cut: Option<u16>,
    /// The role of the boundary by which rows choose parts of the blocks: an earlier step of the
    /// layer writes it. What no row of a visit chose is neither uploaded nor downloaded. `None`:
    /// each row uses all of the blocks.
    pub chosen_by: Option<Role>,
    /// The inputs: of each role, the boundary that an earlier step wrote last.
    pub reads: Vec<Input>,
    /// The outputs.
    pub writes: Vec<Boundary>,
    /// Activations that its backward visit reads in place of recomputing them.
    pub saves: Option<Boundary>,
    /// True if these stay on the device: see [`Visit::keeps`](super::Visit).
    pub keeps: bool,
    /// How many chunks of a long sequence before its own a chunk attends to, by the keys and values
    /// that these leave on the device: see [`Visit::reach`](super::Visit). If it attends to any,
    /// the backward pass has visits that compute them again.
    pub reach: u32,
    /// What the forward visit measures for the host in a step that trains, and the answer.
    pub asks: Option<Question>,
}

/// What a step measures for the host, and the host's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// The boundary that the forward visit writes.
    pub measured: Boundary,
    /// The boundary that the host writes for the backward visit; `None`: the host only reads.
    pub answer: Option<Boundary>,
}

/// An input of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input {
    /// The boundary, as the step expects it: of the same sizes as the one that is written.
    pub boundary: Boundary,
    /// The gradient that the backward visit writes. Where several steps read one boundary, each
    /// adds to the gradient that the reader above it wrote. `None`: the boundary has no gradient,
    /// and the backward visit reads the last boundary of this role that the forward pass wrote.
    pub gradient: Option<Boundary>,
    /// True if the forward visit alone reads it.
    pub once: bool,
}

impl Input {
    /// A partial sum, to which the step adds. The gradient of a sum is that of all its terms: the
    /// backward visits of all its pieces read it.
    pub fn partial(boundary: Boundary) -> Input {
        Input { boundary, gradient: None, once: true }
    }

    /// An input that the backward visit reads again.
    pub fn new(boundary: Boundary, gradient: Option<Boundary>) -> Input {
        Input { boundary, gradient, once: false }
    }
}

/// The layers and blocks that one step visits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Layers in forward order: any subset, any order of the stack.
    pub layers: Vec<LayerId>,
    /// Sequences, or chunks of one, in each micro-batch.
    pub micro_batches: Vec<u32>,
    /// Micro-batches that are the chunks of one sequence: see [`Schedule::runs`](super::Schedule).
    pub runs: Vec<Range<MicroBatch>>,
    /// Tokens of the longest last chunk of a run; `None`: as many as other chunks have.
    pub last_chunk: Option<u32>,
    /// Blocks that compute no gradient this step.
    pub frozen: Vec<BlockId>,
    /// Groups of micro-batches: see [`Schedule::groups`](super::Schedule).
    pub groups: Vec<Range<MicroBatch>>,
    /// True if uploads of the forward pass wait until it is known which parts of a block rows
    /// choose. That pays where a step has so few rows that they choose few parts. The backward pass
    /// knows it without a wait.
    pub waits_for_choice: bool,
    /// Layers that compute less than the copies of their boundaries take. In the relay each goes in
    /// rounds with a layer beside it: both meet a micro-batch before the next one.
    pub light: Vec<LayerId>,
}

/// `count` groups of about as many of these ranges each: a range begins at each of `firsts`, and
/// the last one ends at `end`. No group is empty, so there are at most as many as ranges.
pub fn equal_groups(firsts: &[MicroBatch], end: MicroBatch, count: u32) -> Vec<Range<MicroBatch>> {
    let all = firsts.len() as u64;
    let count = u64::from(count).clamp(1, all.max(1));
    let first = |group: u64| firsts.get((all * group / count) as usize).copied().unwrap_or(end);
    (0..count).map(|group| first(group)..first(group + 1)).collect()
}

impl Selection {
    /// All layers, nothing frozen, in one group.
    pub fn all(model: &RingModel, micro_batches: Vec<u32>) -> Selection {
        let layers = (0..model.layers.len() as u32).map(LayerId).collect();
        let groups = std::iter::once(0..micro_batches.len() as MicroBatch).collect();
        Selection {
            layers,
            micro_batches,
            runs: Vec::new(),
            last_chunk: None,
            frozen: Vec::new(),
            groups,
            waits_for_choice: false,
            light: Vec::new(),
        }
    }

    /// Cuts the micro-batches into `count` groups that are as equal as can be. None is empty, and
    /// none cuts a run, which counts as one micro-batch.
    pub fn set_groups(&mut self, count: u32) {
        let all = self.micro_batches.len() as MicroBatch;
        let is_inside = |m: &MicroBatch| self.runs.iter().any(|run| run.start < *m && *m < run.end);
        let firsts: Vec<MicroBatch> = (0..all).filter(|m| !is_inside(m)).collect();
        self.groups = equal_groups(&firsts, all, count);
    }
}
