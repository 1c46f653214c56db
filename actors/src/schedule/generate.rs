//! The two schedules: relay (layer-major) and resident (micro-batch-major).
//!
//! Both lay out the same legs, one for each declared step and phase, and differ in nothing but the
//! loop order: that is why their results can be compared bit for bit. The relay runs all
//! micro-batches through a leg before the next (Pudipeddi et al. 2020, algorithm 3); the resident
//! schedule runs one micro-batch through all legs before the next, as ordinary gradient
//! accumulation does.
//!
//! The generator walks the steps that layers declare, connects what one writes with what others
//! read, and reverses each connection for the backward pass. It stops at the lowest step with a
//! block to train: a step of the ring with everything frozen is an evaluation.
//!
//! The last tile of the head has one visit in a step that trains: its forward completes the
//! statistics that its backward needs, so one visit does both and computes logits once. The loss
//! follows it.
//!
//! An objective is a loss of whole records. It stands between forward and backward, and writes the
//! statistics again with the weight of each row, so then the last tile has two visits as well. Of a
//! model without a head it reads the last hidden states, and writes their gradient.
//!
//! What layers measure in a step that trains is read by one visit of the host behind the last of
//! them. It writes the answers that backward visits read.

use std::collections::BTreeMap;

use super::chain::{Chained, chain_of};
use super::model::{Input, Question, RingModel, RingObjective, Selection};
use super::reference::{Reference, beside};
use super::stay::stay;
use super::{
    Boundary, BoundaryId, LayerId, MicroBatch, Phase, Place, Ranks, Refusal, Role, Schedule, Visit,
    VisitKind, rounds, runs,
};

/// Layer-major: all micro-batches through a layer, group by group, then the next layer. Layers that
/// the selection calls light go in rounds with a neighbour.
///
/// # Errors
/// The selection names an unknown layer or block, or its layers stand in an impossible order.
pub fn relay(model: &RingModel, selection: &Selection) -> Result<Schedule, Refusal> {
    let (mut schedule, legs) = legs(model, selection)?;
    let of_pass = |pass: &Vec<Visit>| rounds::of_pass(&schedule, pass, &selection.light);
    let visits = [legs.forward, legs.backward].iter().flat_map(of_pass).collect::<Vec<_>>();
    schedule.visits = visits.into_iter().flat_map(|leg| runs::with_keys(&schedule, leg)).collect();
    Ok(schedule)
}

/// Micro-batch-major: one micro-batch through all layers and back, then the next.
///
/// # Errors
/// As [`relay`].
pub fn resident(model: &RingModel, selection: &Selection) -> Result<Schedule, Refusal> {
    runs::refuse(selection, "the resident order")?;
    let (mut schedule, legs) = legs(model, selection)?;
    let is_of_step = |leg: &Visit| leg.kind.is_of_step();
    if schedule.micro_batches.len() > 1 && legs.forward.iter().any(is_of_step) {
        return Err(Refusal::of(format!("the resident order cannot run: {WHOLE_STEP}")));
    }
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

/// Why a schedule cannot have answers of the whole step.
pub(super) const WHOLE_STEP: &str = "\
     the host answers what layers measured, or computes an objective, when it has that of the \
     whole step, and here a micro-batch begins its backward pass before another has ended its \
     forward pass: let it answer for each micro-batch";

/// One visit for each declared step and phase, each over all micro-batches, and the loss's.
pub(super) struct Legs {
    pub(super) forward: Vec<Visit>,
    /// The reference's, until they stand in the forward pass.
    pub(super) reference: Vec<Visit>,
    pub(super) backward: Vec<Visit>,
}

pub(super) fn legs(model: &RingModel, selection: &Selection) -> Result<(Schedule, Legs), Refusal> {
    let mut wiring = Wiring::new(model, selection)?;
    let forward = wiring.forward()?;
    let reference = wiring.reference_visits();
    let backward = wiring.backward()?;
    let mut legs = Legs { forward, reference, backward };
    stay(&mut wiring.schedule, &mut legs);
    legs.forward = beside(legs.forward, std::mem::take(&mut legs.reference));
    Ok((wiring.schedule, legs))
}

/// The boundaries that the forward visit of a step read, wrote and saved.
#[derive(Default)]
struct Met {
    reads: Vec<BoundaryId>,
    writes: Vec<BoundaryId>,
    saved: Option<BoundaryId>,
    measured: Option<BoundaryId>,
    /// The host's answer to what was measured, which the backward visit reads.
    answer: Option<BoundaryId>,
    /// The boundary by which rows choose parts of the step's blocks.
    choice: Option<BoundaryId>,
    /// What the reference's visit reads and writes, if there is one.
    of_reference: Option<[Vec<BoundaryId>; 2]>,
}

/// Connects steps by boundaries while the legs are laid.
struct Wiring<'m> {
    schedule: Schedule,
    /// The steps of all selected layers, in forward order.
    chain: Vec<Chained<'m>>,
    /// As in the model.
    answers_step: bool,
    objective: Option<RingObjective>,
    /// The objective's reference, if this step computes it.
    reference: Option<Reference>,
    /// As in the selection.
    waits_for_choice: bool,
    /// The place in the chain where the backward pass ends; `None`: nothing trains.
    lowest: Option<usize>,
    /// The boundaries of each step of the chain.
    met: Vec<Met>,
    /// The boundary of each role that was written last.
    latest: BTreeMap<Role, BoundaryId>,
    /// For each boundary, the step of the chain that writes it.
    writers: Vec<usize>,
    /// For each boundary, the sum of its gradient so far.
    gradients: BTreeMap<BoundaryId, BoundaryId>,
}

impl<'m> Wiring<'m> {
    fn new(model: &'m RingModel, selection: &Selection) -> Result<Wiring<'m>, Refusal> {
        let chain = chain_of(model, selection)?;
        let blocks = model.blocks_of(selection)?;
        let trains = |chained: &Chained<'_>| {
            chained.step.needs.iter().any(|id| !blocks[id.0 as usize].frozen)
        };
        let lowest = chain.iter().position(trains);
        let Selection { micro_batches, runs, groups, .. } = selection;
        let count = micro_batches.len() as MicroBatch;
        runs::check_order(runs, count)?;
        let schedule = Schedule {
            trains: blocks.iter().any(|block| !block.frozen),
            blocks,
            cuts: model.cuts.clone(),
            boundaries: Vec::new(),
            positions: model.positions,
            micro_batches: micro_batches.clone(),
            runs: runs.clone(),
            last_chunk: selection.last_chunk.unwrap_or(model.positions),
            groups: groups.clone(),
            in_batches: false,
            lag: 0,
            shards: 1,
            ranks: Ranks::ONE,
            visits: Vec::new(),
        };
        let met = chain.iter().map(|_| Met::default()).collect();
        let RingModel { answers_step, objective, .. } = *model;
        let first = objective.and_then(|objective| objective.reference);
        let reference = first.map(|layer| Reference::of(&chain, layer)).transpose()?;
        let waits_for_choice = selection.waits_for_choice;
        Ok(Wiring {
            schedule,
            chain,
            answers_step,
            objective,
            reference,
            waits_for_choice,
            lowest,
            met,
            latest: BTreeMap::new(),
            writers: Vec::new(),
            gradients: BTreeMap::new(),
        })
    }

    /// A new boundary, which the step `at` writes.
    fn open(&mut self, at: usize, boundary: Boundary) -> BoundaryId {
        self.schedule.boundaries.push(boundary);
        self.writers.push(at);
        BoundaryId(self.schedule.boundaries.len() as u32 - 1)
    }

    fn write(&mut self, at: usize) -> Vec<BoundaryId> {
        let writes = self.chain[at].step.writes.iter();
        writes
            .map(|&boundary| {
                let id = self.open(at, boundary);
                self.latest.insert(boundary.role, id);
                id
            })
            .collect()
    }

    /// The boundaries that the step reads, connected to the steps that wrote them.
    fn read(&mut self, at: usize) -> Result<Vec<BoundaryId>, Refusal> {
        let Chained { layer, step, .. } = self.chain[at];
        step.reads
            .iter()
            .map(|&Input { boundary, .. }| {
                let role = boundary.role;
                if role.comes_from_host() {
                    return self.bring(layer, boundary);
                }
                let missing = || {
                    let reason = format!("{layer} reads {role}, which no step before it writes");
                    Refusal::of(reason)
                };
                let &id = self.latest.get(&role).ok_or_else(missing)?;
                let written = self.schedule.boundary(id);
                if *written != boundary {
                    let writer = self.chain[self.writers[id.0 as usize]].layer;
                    let reason = format!(
                        "{layer} reads {role} as {boundary}, and {writer} writes it as {written}"
                    );
                    return Err(Refusal::of(reason));
                }
                Ok(id)
            })
            .collect()
    }

    /// The boundary by which rows choose parts of the step's blocks: an earlier step of the layer
    /// writes it.
    fn choice(&self, at: usize) -> Result<Option<BoundaryId>, Refusal> {
        let Chained { layer, step, .. } = self.chain[at];
        let Some(role) = step.chosen_by else { return Ok(None) };
        let of_layer = |id: &BoundaryId| self.chain[self.writers[id.0 as usize]].layer == layer;
        let written = self.latest.get(&role).copied().filter(of_layer);
        let missing = || {
            let reason = format!(
                "{layer} has blocks that are chosen by {role}, which no earlier step of it writes"
            );
            Refusal::of(reason)
        };
        written.map(Some).ok_or_else(missing)
    }

    /// True if it is known in this phase what rows chose. The forward pass has to wait for it. The
    /// reference's rows choose for themselves, so an upload that serves it, too, is of all parts.
    fn knows_choice(&self, phase: Phase) -> bool {
        phase == Phase::Backward || phase == Phase::Forward && self.waits_for_choice
    }

    /// Connects the reference's visit of a step, whose own visit is connected.
    fn meet_reference(&mut self, at: usize) {
        let step = self.chain[at].step;
        let Some(mut reference) = self.reference.take_if(|reference| reference.visits(at)) else {
            return;
        };
        let reads = reference.reads(step, &self.met[at].reads);
        let written = step.writes.iter().filter(|boundary| !boundary.role.goes_to_host());
        let written = written.map(|&boundary| {
            let id = self.open(at, boundary);
            reference.writes(boundary.role, id);
            id
        });
        self.met[at].of_reference = Some([reads, written.collect()]);
        self.reference = Some(reference);
    }

    /// The visits of the reference.
    fn reference_visits(&self) -> Vec<Visit> {
        let of_step = |(at, met): (usize, &Met)| {
            let [reads, writes] = met.of_reference.clone()?;
            Some(self.visit(at, Phase::Reference, reads, writes))
        };
        self.met.iter().enumerate().filter_map(of_step).collect()
    }

    /// A boundary that the host brings: the gather writes it.
    fn bring(&mut self, layer: LayerId, boundary: Boundary) -> Result<BoundaryId, Refusal> {
        if self.chain[0].step.kind != VisitKind::Gather {
            let reason = format!("{layer} reads {}, and no gather brings it", boundary.role);
            return Err(Refusal::of(reason));
        }
        let id = self.open(0, boundary);
        self.met[0].writes.push(id);
        Ok(id)
    }

    /// A visit of all micro-batches to a step.
    fn visit(
        &self,
        at: usize,
        phase: Phase,
        reads: Vec<BoundaryId>,
        writes: Vec<BoundaryId>,
    ) -> Visit {
        let Chained { layer, index, step } = self.chain[at];
        let kind = match (step.kind, phase) {
            (VisitKind::Gather, Phase::Backward) => VisitKind::Scatter,
            (kind, _) => kind,
        };
        Visit {
            kind,
            layer,
            step: index,
            phase,
            place: if kind.on_device() { Place::Device(0) } else { Place::Host },
            micro_batches: 0..self.schedule.micro_batches.len() as MicroBatch,
            reach: if kind.on_device() { step.reach } else { 0 },
            blocks: step.needs.clone(),
            cut: step.cut,
            ahead: 0,
            chosen_by: self.met[at].choice.filter(|_| self.knows_choice(phase)),
            reads,
            writes,
            keeps: Vec::new(),
            kept: Vec::new(),
            copies: Vec::new(),
        }
    }

    /// The visit that takes the loss from complete statistics, or from hidden states. It also waits
    /// for what goes to the host. An objective writes what the backward pass begins with.
    fn loss(&mut self) -> Result<Visit, Refusal> {
        let gradient = self.objective.and_then(|objective| objective.gradient);
        let role = if gradient.is_some() { Role::Hidden } else { Role::Statistics };
        let known = self.latest.get(&role).copied();
        let missing =
            || Refusal::of(format!("no layer writes {role}, from which the loss is taken"));
        let known = known.ok_or_else(missing)?;
        let mut reads = vec![known];
        reads.extend(self.reference.as_ref().and_then(|reference| reference.last(role)));
        let boundaries = self.schedule.boundaries.iter().zip(0..);
        let for_host = boundaries.filter(|(boundary, _)| boundary.role.goes_to_host());
        reads.extend(for_host.map(|(_, id)| BoundaryId(id)));
        let at = self.chain.len() - 1;
        let mut writes = Vec::new();
        if self.objective.is_some() && self.lowest.is_some() {
            let written = self.open(at, gradient.unwrap_or(*self.schedule.boundary(known)));
            match gradient {
                Some(_) => self.gradients.insert(known, written),
                None => self.latest.insert(role, written),
            };
            writes.push(written);
        }
        let of_objective = |RingObjective { of_step, .. }| VisitKind::Objective { of_step };
        let kind = self.objective.map_or(VisitKind::Loss, of_objective);
        Ok(on_host(kind, self.visit(at, Phase::Forward, reads, writes)))
    }

    /// The visit that reads what the layers measured, and the place behind which it stands in the
    /// chain: the last step of the last of these layers. `None`: nothing is measured.
    fn balance(&mut self) -> Option<(usize, Visit)> {
        let measures = |at: &usize| self.met[*at].measured.is_some();
        let measuring: Vec<usize> = (0..self.chain.len()).filter(measures).collect();
        let layer = self.chain[*measuring.last()?].layer;
        let last = self.chain.iter().rposition(|chained| chained.layer == layer)?;
        let reads = measuring.iter().filter_map(|&at| self.met[at].measured).collect();
        let mut writes = Vec::new();
        let lowest = self.lowest;
        for at in measuring.into_iter().filter(|at| Some(*at) >= lowest) {
            let answer = self.chain[at].step.asks.and_then(|question| question.answer);
            self.met[at].answer = answer.map(|boundary| self.open(last, boundary));
            writes.extend(self.met[at].answer);
        }
        let of_step = self.answers_step && !writes.is_empty();
        let kind = VisitKind::Balance { of_step };
        let visit = self.visit(last, Phase::Forward, reads, writes);
        Some((last, on_host(kind, visit)))
    }

    /// True for the last tile of a step that trains: its backward visit is its forward as well. It
    /// is not if an objective stands between them.
    fn is_visited_once(&self, at: usize) -> bool {
        let is_last = at == self.chain.len() - 1 && self.objective.is_none();
        self.lowest.is_some() && is_last && self.chain[at].step.kind == VisitKind::Tile
    }

    /// True where the backward pass needs the gradient of a boundary: its writer has a visit there.
    fn needs_gradient(&self, id: BoundaryId) -> bool {
        self.lowest.is_some_and(|lowest| self.writers[id.0 as usize] >= lowest)
    }

    fn forward(&mut self) -> Result<Vec<Visit>, Refusal> {
        for at in 0..self.chain.len() {
            self.met[at].reads = self.read(at)?;
            self.met[at].choice = self.choice(at)?;
            if !self.is_visited_once(at) {
                self.met[at].writes = self.write(at);
                if self.lowest.is_some_and(|lowest| at >= lowest) {
                    let saves = self.chain[at].step.saves;
                    self.met[at].saved = saves.map(|boundary| self.open(at, boundary));
                }
                let asks = self.chain[at].step.asks.filter(|_| self.lowest.is_some());
                let open = |Question { measured, .. }| self.open(at, measured);
                self.met[at].measured = asks.map(open);
                self.meet_reference(at);
            }
        }
        let mut balance = self.balance();
        let mut visits = Vec::new();
        for (at, met) in self.met.iter().enumerate() {
            if self.is_visited_once(at) {
                return Ok(visits);
            }
            let mut visit = self.visit(at, Phase::Forward, met.reads.clone(), met.writes.clone());
            let keeps = self.chain[at].step.keeps;
            if keeps { &mut visit.keeps } else { &mut visit.writes }.extend(met.saved);
            visit.writes.extend(met.measured);
            visits.push(visit);
            visits.extend(balance.take_if(|(last, _)| *last == at).map(|(_, visit)| visit));
        }
        visits.push(self.loss()?);
        Ok(visits)
    }

    fn backward(&mut self) -> Result<Vec<Visit>, Refusal> {
        let Some(lowest) = self.lowest else { return Ok(Vec::new()) };
        let mut visits = Vec::new();
        for at in (lowest..self.chain.len()).rev() {
            let is_once = self.is_visited_once(at);
            let reads = self.reads_of_backward(at)?;
            let mut writes = if is_once { self.write(at) } else { Vec::new() };
            let inputs = self.chain[at].step.reads.iter().zip(self.met[at].reads.clone());
            for (Input { gradient, .. }, id) in inputs {
                // Each piece of a sum adds to a gradient that the next one needs.
                let is_needed = |gradient: &Boundary| {
                    gradient.role == Role::PartialGradient || self.needs_gradient(id)
                };
                if let Some(gradient) = gradient.filter(is_needed) {
                    let sum = self.open(at, gradient);
                    self.gradients.insert(id, sum);
                    writes.push(sum);
                }
            }
            let mut visit = self.visit(at, Phase::Backward, reads, writes);
            if self.chain[at].step.keeps {
                visit.kept.extend(self.met[at].saved);
            }
            visits.push(visit);
            if is_once {
                visits.push(self.loss()?);
            }
        }
        Ok(visits)
    }

    /// The boundaries that the backward visit of a step reads from the stash: those that its
    /// forward visit read, unless it reads them once, and what it saved there; the host's answer;
    /// the roles without a gradient as the forward pass left them; the gradients of those that it
    /// wrote, and the gradients of those that it read as far as steps above have added to them.
    fn reads_of_backward(&mut self, at: usize) -> Result<Vec<BoundaryId>, Refusal> {
        let Chained { layer, step, .. } = self.chain[at];
        let met = &self.met[at];
        let inputs = || step.reads.iter().zip(&met.reads);
        let (with, without): (Vec<_>, Vec<_>) =
            inputs().partition(|(input, _)| input.gradient.is_some());
        let mut reads = Vec::new();
        if step.kind != VisitKind::Gather {
            reads.extend(with.iter().filter(|(input, _)| !input.once).map(|&(_, &id)| id));
            reads.extend(met.saved.filter(|_| !step.keeps));
            reads.extend(met.answer);
            let without = without.iter().filter(|(input, _)| !input.once);
            reads.extend(without.map(|&(input, &id)| match self.is_visited_once(at) {
                true => id,
                false => self.latest[&input.boundary.role],
            }));
        }
        let outputs = met.writes.iter().zip(&step.writes);
        let gradients = &mut self.gradients;
        let of_writes: Vec<_> = outputs.filter_map(|(id, _)| gradients.remove(id)).collect();
        let mut with_gradient = step.writes.iter().filter(|written| written.role.has_gradient());
        if of_writes.is_empty()
            && let Some(Boundary { role, .. }) = with_gradient.next()
        {
            let reason = format!(
                "{layer} is trained through {role}, and no layer above it declares the gradient \
                 of that"
            );
            return Err(Refusal::of(reason));
        }
        let partial = inputs().find(|(input, _)| input.boundary.role == Role::Partial);
        gradients.extend(partial.zip(of_writes.first()).map(|((_, &id), &sum)| (id, sum)));
        reads.extend(of_writes);
        reads.extend(with.iter().filter_map(|(_, id)| gradients.get(id)));
        Ok(reads)
    }
}

/// A visit of the host at a layer, which needs none of the layer's blocks.
fn on_host(kind: VisitKind, visit: Visit) -> Visit {
    Visit { kind, place: Place::Host, blocks: Vec::new(), cut: None, reach: 0, ..visit }
}
