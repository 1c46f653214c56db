//! The two schedules: relay (layer-major) and resident (micro-batch-major).
//!
//! Both lay out the same legs, one per layer and phase, and differ in nothing but the loop order:
//! that is why their results can be compared bit for bit. The relay runs all micro-batches
//! through a leg before the next (Pudipeddi et al. 2020, algorithm 3); the resident schedule runs
//! one micro-batch through all legs before the next, as ordinary gradient accumulation does.
//!
//! A frozen step is one where nothing below it needs a gradient: backward legs stop at the lowest
//! layer with something to train, and a step with everything frozen is an evaluation.
//!
//! The last tile of the head has one visit in a step that trains: its forward completes the
//! statistics that its backward needs, so one visit does both and computes logits once. The loss
//! follows it.

use std::ops::Range;

use super::model::{LayerKind, RingLayer, RingModel, Selection};
use super::{
    BlockId, Boundary, BoundaryId, LayerId, MicroBatch, Needs, Phase, Place, Ranks, Refusal, Role,
    Schedule, Visit, VisitKind,
};

/// Layer-major: all micro-batches through a layer, group by group, then the next layer.
///
/// # Errors
/// The selection names an unknown layer or block, or its layers stand in an impossible order.
pub fn relay(model: &RingModel, selection: &Selection) -> Result<Schedule, Refusal> {
    let (mut schedule, legs) = legs(model, selection)?;
    let groups = &schedule.groups;
    let by_group = |leg: Visit| -> Vec<Visit> {
        let of_group = |group: &Range<MicroBatch>| leg.of_micro_batches(group.clone());
        if leg.on_device() { groups.iter().map(of_group).collect() } else { vec![leg] }
    };
    schedule.visits = legs.forward.into_iter().chain(legs.backward).flat_map(by_group).collect();
    Ok(schedule)
}

/// Micro-batch-major: one micro-batch through all layers and back, then the next.
///
/// # Errors
/// As [`relay`].
pub fn resident(model: &RingModel, selection: &Selection) -> Result<Schedule, Refusal> {
    let (mut schedule, legs) = legs(model, selection)?;
    let is = |kind| move |visit: &Visit| visit.kind == kind;
    let (gather, forward): (Vec<_>, Vec<_>) =
        legs.forward.into_iter().partition(is(VisitKind::Gather));
    let (scatter, backward): (Vec<_>, Vec<_>) =
        legs.backward.into_iter().partition(is(VisitKind::Scatter));
    let round: Vec<Visit> = forward.into_iter().chain(backward).collect();
    schedule.visits = gather;
    for m in 0..schedule.micro_batches.len() as MicroBatch {
        schedule.visits.extend(round.iter().map(|visit| visit.of_micro_batches(m..m + 1)));
    }
    schedule.visits.extend(scatter);
    Ok(schedule)
}

/// One visit per layer and phase, each over all micro-batches, and the loss's.
pub(super) struct Legs {
    pub(super) forward: Vec<Visit>,
    pub(super) backward: Vec<Visit>,
}

pub(super) fn legs(model: &RingModel, selection: &Selection) -> Result<(Schedule, Legs), Refusal> {
    let mut layout = Layout::new(model, selection)?;
    let (forward, statistics) = layout.forward();
    let backward = layout.backward(statistics);
    Ok((layout.schedule, Legs { forward, backward }))
}

type Chained<'m> = (LayerId, &'m RingLayer);

/// Hands out boundaries and visits while the legs are laid.
struct Layout<'m> {
    model: &'m RingModel,
    schedule: Schedule,
    embedding: Option<Chained<'m>>,
    /// The layers that a device visits.
    chain: Vec<Chained<'m>>,
    /// Where the chain's tiles begin.
    first_tile: usize,
    /// Where in the chain the backward pass ends; none: nothing trains.
    lowest: Option<usize>,
    /// Whether the backward pass reaches the embedding.
    scatters: bool,
    /// False: layers save activations.
    recompute: bool,
    /// Input and saved activations of each layer of the chain, for its backward.
    met: Vec<(Option<BoundaryId>, Option<BoundaryId>)>,
}

impl<'m> Layout<'m> {
    fn new(model: &'m RingModel, selection: &Selection) -> Result<Layout<'m>, Refusal> {
        let mut named = model.layers.iter().flat_map(|layer| &layer.blocks);
        if let Some(id) = named.find(|id| id.0 as usize >= model.blocks.len()) {
            return Err(Refusal::of(format!("{id} of a layer is not in the model")));
        }
        let (embedding, chain, first_tile) = chain_of(model, selection)?;
        let mut blocks = model.blocks.clone();
        for id in &selection.frozen {
            let block = blocks.get_mut(id.0 as usize);
            let unknown = || Refusal::of(format!("frozen {id} is not in the model"));
            block.ok_or_else(unknown)?.frozen = true;
        }
        let trains =
            |(_, layer): &Chained<'_>| layer.blocks.iter().any(|id| !blocks[id.0 as usize].frozen);
        let scatters = embedding.as_ref().is_some_and(trains);
        let lowest = if scatters { Some(0) } else { chain.iter().position(trains) };
        let (boundaries, visits) = (Vec::new(), Vec::new());
        let micro_batches = selection.micro_batches.clone();
        let groups = groups(micro_batches.len() as MicroBatch, selection.groups);
        let schedule = Schedule {
            blocks,
            boundaries,
            micro_batches,
            groups,
            shards: 1,
            ranks: Ranks::ONE,
            visits,
        };
        let (recompute, met) = (selection.recompute, Vec::new());
        Ok(Layout {
            model,
            schedule,
            embedding,
            chain,
            first_tile,
            lowest,
            scatters,
            recompute,
            met,
        })
    }

    fn boundary(&mut self, boundary: Boundary) -> Option<BoundaryId> {
        self.schedule.boundaries.push(boundary);
        Some(BoundaryId(self.schedule.boundaries.len() as u32 - 1))
    }

    /// A visit of all micro-batches, of what is there of these boundaries.
    fn visit(
        &self,
        kind: VisitKind,
        (layer, phase): (LayerId, Phase),
        blocks: &[BlockId],
        reads: &[Option<BoundaryId>],
        writes: &[Option<BoundaryId>],
    ) -> Visit {
        Visit {
            kind,
            layer,
            phase,
            place: if kind.on_device() { Place::Device(0) } else { Place::Host },
            micro_batches: 0..self.schedule.micro_batches.len() as MicroBatch,
            needs: Needs::Known(blocks.to_vec()),
            reads: reads.iter().flatten().copied().collect(),
            writes: writes.iter().flatten().copied().collect(),
        }
    }

    /// What a device does at this place of the chain.
    fn kind(&self, at: usize) -> VisitKind {
        if at >= self.first_tile { VisitKind::Tile } else { VisitKind::Layer }
    }

    /// True where the chain computes what the loss is taken from: at its tiles, else at its end.
    fn ends_in_loss(&self, at: usize) -> bool {
        at >= self.first_tile || at == self.chain.len() - 1
    }

    /// True for the last tile of a step that trains: its backward visit is its forward as well.
    fn is_visited_once(&self, at: usize) -> bool {
        self.lowest.is_some() && at >= self.first_tile && at == self.chain.len() - 1
    }

    /// The visit that takes the loss of complete statistics.
    fn loss(&self, statistics: Option<BoundaryId>) -> Visit {
        let (last, _) = self.chain[self.chain.len() - 1];
        self.visit(VisitKind::Loss, (last, Phase::Forward), &[], &[statistics], &[])
    }

    /// All forward visits, and the statistics that they end with.
    fn forward(&mut self) -> (Vec<Visit>, Option<BoundaryId>) {
        let mut visits = Vec::new();
        let (mut x, mut statistics) = (None, None);
        if let Some((id, layer)) = self.embedding {
            x = self.boundary(self.model.hidden);
            statistics = self.boundary(self.model.statistics);
            let (at, writes) = ((id, Phase::Forward), [x, statistics]);
            visits.push(self.visit(VisitKind::Gather, at, &layer.blocks, &[], &writes));
        }
        for (at, (id, layer)) in self.chain.clone().into_iter().enumerate() {
            let is_trained = self.lowest.is_some_and(|lowest| at >= lowest);
            let saved = if is_trained && !self.recompute && layer.saves {
                self.boundary(self.model.saved_activations)
            } else {
                None
            };
            self.met.push((x, saved));
            if self.is_visited_once(at) {
                return (visits, statistics);
            }
            let (kind, at_layer) = (self.kind(at), (id, Phase::Forward));
            if self.ends_in_loss(at) {
                let out = self.boundary(self.model.statistics);
                let (reads, writes) = ([x, statistics], [out, saved]);
                visits.push(self.visit(kind, at_layer, &layer.blocks, &reads, &writes));
                statistics = out;
            } else {
                let out = self.boundary(self.model.hidden);
                visits.push(self.visit(kind, at_layer, &layer.blocks, &[x], &[out, saved]));
                x = out;
            }
        }
        visits.push(self.loss(statistics));
        (visits, statistics)
    }

    /// All backward visits: the gradient that comes down into each layer, and the one it hands on.
    fn backward(&mut self, mut statistics: Option<BoundaryId>) -> Vec<Visit> {
        let mut visits = Vec::new();
        let Some(lowest) = self.lowest else { return visits };
        let mut dx = None;
        for (at, (id, layer)) in self.chain.clone().into_iter().enumerate().skip(lowest).rev() {
            let down = if at > lowest || self.scatters {
                let is_tile = at >= self.first_tile;
                let of_hidden = Boundary { role: Role::HiddenGradient, ..self.model.hidden };
                self.boundary(if is_tile { self.model.head_gradient } else { of_hidden })
            } else {
                None
            };
            let (x, saved) = self.met[at];
            let known = statistics.filter(|_| self.ends_in_loss(at));
            let once = self.is_visited_once(at);
            let completed = if once { self.boundary(self.model.statistics) } else { None };
            let (kind, at_layer) = (self.kind(at), (id, Phase::Backward));
            let (reads, writes) = ([x, saved, known, dx], [completed, down]);
            visits.push(self.visit(kind, at_layer, &layer.blocks, &reads, &writes));
            if once {
                statistics = completed;
                visits.push(self.loss(statistics));
            }
            dx = down;
        }
        if let Some((id, layer)) = self.embedding.filter(|_| self.scatters) {
            let at = (id, Phase::Backward);
            visits.push(self.visit(VisitKind::Scatter, at, &layer.blocks, &[dx], &[]));
        }
        visits
    }
}

/// Splits the selected layers into embedding and device chain; says where its tiles begin.
fn chain_of<'m>(
    model: &'m RingModel,
    selection: &Selection,
) -> Result<(Option<Chained<'m>>, Vec<Chained<'m>>, usize), Refusal> {
    let mut chain = Vec::with_capacity(selection.layers.len());
    for &id in &selection.layers {
        let layer = model.layers.get(id.0 as usize);
        chain.push((id, layer.ok_or_else(|| Refusal::of(format!("{id} is not in the model")))?));
    }
    let starts = chain.first().is_some_and(|(_, layer)| layer.kind == LayerKind::Embedding);
    let embedding = starts.then(|| chain.remove(0));
    let first_tile = chain.iter().take_while(|(_, layer)| layer.kind == LayerKind::Stack).count();
    let is_tile = |(_, layer): &Chained<'_>| layer.kind == LayerKind::Tile;
    if !chain[first_tile..].iter().all(is_tile) || first_tile == 0 {
        return Err(Refusal::of(
            "layers must be an embedding (or none), then at least one stack layer, then tiles",
        ));
    }
    Ok((embedding, chain, first_tile))
}

/// So many groups of micro-batches, as equal as can be; none is empty.
fn groups(micro_batches: MicroBatch, count: u32) -> Vec<Range<MicroBatch>> {
    let count = u64::from(count.clamp(1, micro_batches.max(1)));
    let begin = |group: u64| (u64::from(micro_batches) * group / count) as MicroBatch;
    (0..count).map(|group| begin(group)..begin(group + 1)).collect()
}
