//! The objective of a step: what it measures, its loss, and the weights of rows or the gradient of
//! hidden states.

use std::ops::Range;
use std::sync::MutexGuard;

use l2l_actors::BoxedError;
use l2l_actors::schedule::{BoundaryId, MicroBatch, Role};

use super::HostLanes;
use super::visit::HostVisit;
use crate::config::NonFinite;
use crate::error::NotFinite;
use crate::kernels::STATISTICS;
use crate::models::Head;
use crate::objectives::{Measures, Objective};
use crate::plan::Purpose;
use crate::worker::Dealt;
use crate::worker::objective::{Embeds, Given, HiddenRows, ObjectiveDesk};
use crate::worker::step::StepState;

/// The rows of a sequence in a unit.
struct SequenceRows {
    /// The place of the sequence on the desk.
    place: usize,
    /// Tokens of the whole sequence.
    length: usize,
    /// Its rows among those of the unit.
    rows: Range<usize>,
    /// The place of the first of them in the sequence.
    first: usize,
    /// Labelled tokens of the sequence before these rows.
    token: usize,
    /// Tokens at the start of the sequence that its embedding leaves out.
    skipped: usize,
}

impl SequenceRows {
    fn hidden(&self) -> HiddenRows {
        let SequenceRows { place: sequence, length: of, first, skipped, .. } = *self;
        HiddenRows { sequence, first, of, skipped }
    }
}

impl HostLanes {
    fn objective(&self) -> Option<&dyn Objective> {
        self.shared.model.objective.as_deref()
    }

    /// What is measured of each sequence: without an objective, its log-probability.
    fn measured(&self) -> Measures {
        self.objective().map_or(Measures::LogProbabilities, Objective::measures)
    }

    /// Sequences of a record.
    fn each(&self) -> usize {
        self.objective().map_or(1, Objective::sequences)
    }

    /// How the model makes embeddings, if it does.
    fn embeds(&self) -> Option<Embeds> {
        match self.shared.model.shape.head {
            Head::Embedding { pooling, normalise, .. } => Some(Embeds { pooling, normalise }),
            _ => None,
        }
    }

    /// The desk of the step, with room for its sequences.
    fn desk<'a>(&self, at: &'a HostVisit<'_>) -> MutexGuard<'a, ObjectiveDesk> {
        let mut desk = at.state.objective.lock().expect("nothing panics inside");
        let own = own_places(&at.state);
        let all = at.state.shared().map_or(own.end, |all| all.starts.len() - 1);
        desk.open(all, own, self.each());
        desk
    }

    /// Takes the log-probabilities of a unit's sequences, or their embeddings.
    pub(super) fn measure_records(&self, at: &HostVisit<'_>, m: MicroBatch) {
        if let Some(how) = self.embeds() {
            return self.pool(at, m, how);
        }
        let [policy, reference] = statistics(at);
        let policy = policy.map(|id| at.stashed(id, m)).expect("an objective reads statistics");
        let reference = reference.map(|id| at.stashed(id, m));
        let measures = self.measured();
        let mut desk = self.desk(at);
        for SequenceRows { place, rows, .. } in sequences(at, m) {
            let floats = floats_of(rows, STATISTICS);
            desk.measure(place, &policy[floats.clone()], measures);
            if let Some(reference) = reference {
                desk.measure_reference(place, &reference[floats]);
            }
        }
    }

    /// Pools the hidden states of a unit's sequences.
    fn pool(&self, at: &HostVisit<'_>, m: MicroBatch, how: Embeds) {
        let boundary = at.schedule().with_role(&at.visit.reads, Role::Hidden);
        let boundary = boundary.expect("an objective on embeddings reads hidden states");
        let packing = self.shared.packing(at.schedule().boundary(boundary));
        let width = packing.columns;
        let stashed = at.stashed(boundary, m);
        let mut desk = self.desk(at);
        let rows = at.state.range(m).rows.len();
        let hidden = packing.widened(stashed, rows);
        for sequence in sequences(at, m) {
            let at = sequence.hidden();
            desk.pool(at, how, &hidden[floats_of(sequence.rows, width)], width);
        }
    }

    /// Writes the gradient of a unit's hidden states.
    fn unpool(&self, at: &HostVisit<'_>, m: MicroBatch, how: Embeds) {
        let [gradient] = at.visit.writes[..] else { unreachable!("it writes one gradient") };
        let width = at.schedule().boundary(gradient).width();
        let to = at.stashed_mut(gradient, m);
        let desk = at.state.objective.lock().expect("nothing panics inside");
        let scale = at.state.batch_of(m).scale;
        for sequence in sequences(at, m) {
            let at = sequence.hidden();
            desk.unpool(at, how, scale, &mut to[floats_of(sequence.rows, width)]);
        }
    }

    /// The loss of the records that begin in a micro-batch of the config, when the last of its
    /// units has come; 0 before.
    pub(super) fn loss_of_records(
        &self,
        at: &HostVisit<'_>,
        m: MicroBatch,
    ) -> Result<f64, BoxedError> {
        let state = &*at.state;
        let units = state.input.units.whole(m);
        let mut loss = 0.0;
        if m + 1 == units.end
            && state.input.purpose != Purpose::Measure
            && let Some(objective) = self.objective()
        {
            let Range { start: first, end } = own_places(state);
            let own = state.input.units.sequences_of(&units);
            let own = first + own.start..first + own.end;
            let given = given(state);
            let is_of_step = at.visit.kind.is_of_step();
            let all = state.shared().map_or(end, |all| all.starts.len() - 1);
            let needed = if is_of_step { 0..all } else { own.clone() };
            let mut desk = state.objective.lock().expect("nothing panics inside");
            let desk = &mut *desk;
            let named = |what| format!("objective {}: {what}", objective.name());
            let threads = &self.shared.threads;
            let computed = threads.install(|| desk.compute(objective, needed.clone(), given));
            computed.map_err(named)?;
            loss = desk.loss(own, objective.sequences());
            if !loss.is_finite() && self.shared.non_finite == NonFinite::Stop {
                let what = desk.not_finite(needed, objective.measures()).unwrap_or_default();
                return Err(NotFinite(named(format!("the loss is {loss}: {what}"))).into());
            }
        }
        if at.schedule().ranks.count > 1 {
            state.losses.lock().expect("nothing panics inside").insert(m, loss);
        }
        Ok(loss)
    }

    /// Writes a unit's statistics with the weights of its rows, or the gradient of its hidden
    /// states.
    pub(super) fn weigh(&self, at: &HostVisit<'_>, m: MicroBatch) {
        if let Some(how) = self.embeds() {
            return self.unpool(at, m, how);
        }
        let [policy, _] = statistics(at);
        let statistics = at.stashed(policy.expect("an objective reads statistics"), m);
        let [weighed] = at.visit.writes[..] else { unreachable!("an objective writes statistics") };
        let measures = self.measured();
        let weighed = at.stashed_mut(weighed, m);
        let desk = at.state.objective.lock().expect("nothing panics inside");
        for SequenceRows { place, rows, token, .. } in sequences(at, m) {
            let floats = floats_of(rows, STATISTICS);
            let from = &statistics[floats.clone()];
            let to = &mut weighed[floats];
            match measures {
                Measures::Scores => desk.weigh_score(place, from, to),
                _ => desk.weigh(place, token, from, to),
            }
        }
    }
}

/// The boundaries of complete statistics that a visit reads: of the policy, and of the reference if
/// the step computes it.
fn statistics(at: &HostVisit<'_>) -> [Option<BoundaryId>; 2] {
    let is_one = |id: &&BoundaryId| at.schedule().boundary(**id).role == Role::Statistics;
    let mut all = at.visit.reads.iter().filter(is_one).copied();
    [all.next(), all.next()]
}

/// The places of this rank's sequences on the desk.
fn own_places(state: &StepState) -> Range<usize> {
    let first = state.shared().map_or(0, |all| all.first_sequence);
    first..first + state.input.batch.sequences()
}

/// What the losses of the sequences on the desk depend on beside what was measured.
fn given(state: &StepState) -> Given<'_> {
    let batch = &state.input.batch;
    let labelled = &batch.scored;
    match state.shared() {
        Some(Dealt { tokens, starts, reference, scores, .. }) => {
            Given { reference, labelled, ids: tokens, starts, scores }
        }
        None => Given {
            reference: &batch.reference,
            labelled,
            ids: &batch.tokens,
            starts: &batch.starts,
            scores: &batch.scores,
        },
    }
}

/// The sequences of a unit, with their rows.
fn sequences<'a>(
    at: &'a HostVisit<'_>,
    m: MicroBatch,
) -> impl Iterator<Item = SequenceRows> + use<'a> {
    let batch = &at.state.input.batch;
    let before = own_places(&at.state).start;
    let mut row = 0;
    at.state.range(m).sequences.zip(at.state.positions(m)).map(move |(sequence, positions)| {
        let from = row;
        row += positions.len();
        let earlier = batch.starts[sequence]..batch.starts[sequence] + positions.start;
        let token = batch.targets[earlier].iter().filter(|target| **target >= 0).count();
        let length = batch.length(sequence);
        let place = before + sequence;
        let skipped = batch.skipped.get(sequence).map_or(0, |&tokens| tokens as usize);
        SequenceRows { place, length, rows: from..row, first: positions.start, token, skipped }
    })
}

/// The numbers of rows of this width.
fn floats_of(rows: Range<usize>, width: usize) -> Range<usize> {
    rows.start * width..rows.end * width
}
