//! Updates: the gradient is measured, the learning rate and the clip factor are applied, and
//! masters and states move to their next version, in memory or in the staging slot that has them.

use l2l_actors::Operation;
use l2l_actors::schedule::BlockId;
use l2l_actors::work::{GradientAt, MasterAt, Work};

use super::HostLanes;
use crate::config::NonFinite;
use crate::eps::StoredMasters;
use crate::models::Tensor;
use crate::optimizers::{BlockUpdate, Update};
use crate::worker::clipping::Factors;
use crate::worker::step::StepState;

/// One block's gradient, and the factors of its update.
struct Applied<'a> {
    block: BlockId,
    gradient: &'a [f32],
    factors: &'a Factors<'a>,
    learning_rate: f64,
    /// For each expert of the block's layer, whether the update leaves it alone.
    idle: &'a [bool],
}

impl HostLanes {
    /// Moves a block to its next version, and returns its gradient's sum of squares. If the run is
    /// to stop at a sum that is not finite, the block stays as it is.
    pub(super) fn update(&self, operation: &Operation) -> f64 {
        let &Work::Update { block, version, master, gradient, norm } = operation.work() else {
            unreachable!("{} is no update", operation.work())
        };
        let shared = &*self.shared;
        if shared.skips_update(norm) {
            shared.eps.carry(block, version);
            return 0.0;
        }
        self.wait_until_saved(operation, block);
        let state = shared.state(operation);
        let sums = shared.clipping.has_groups().then(|| self.group_sums(&state));
        let factors = shared.clipping.factors(norm, sums, state.input.loss_scale);
        let host = shared.memory.lease();
        let trained = shared.own_trained_len(block);
        // A staged block has its masters, its states, and behind them a gradient that waited on
        // file.
        let mut staged = match master {
            MasterAt::Slot(slot) => shared.file().split(block, host.state_slot(slot)),
            MasterAt::Memory => vec![&mut [][..]],
        };
        let behind = staged.pop().expect("the rest of the slot is there, if only empty");
        let region;
        let gradient = match (gradient, master) {
            (GradientAt::Landing(slot), _) => &*host.landing(slot, trained),
            (GradientAt::Region, MasterAt::Slot(_)) => &behind[..trained],
            (GradientAt::Region, MasterAt::Memory) => {
                region = shared.eps.memory().region(block);
                &region[..]
            }
        };
        let squares = self.measure(block, gradient);
        if squares.sum.is_finite() || shared.non_finite != NonFinite::Stop {
            let learning_rate = state.learning_rate(version);
            let idle = &self.idle_experts(operation, &state, block);
            let applied = Applied { block, gradient, factors: &factors, learning_rate, idle };
            let copy = |to: &mut [f32], from: &[f32]| shared.threads.copy(to, from);
            if let Some((masters, behind)) = staged.split_first_mut() {
                let states = shared.file().keep_older(block, masters, behind, copy);
                let masters = shared.eps.whole(block, masters);
                self.apply(&applied, masters, states, shared.file().updates_of(block));
            } else {
                shared.eps.memory().update(block, version, copy, |masters, states, updates| {
                    self.apply(&applied, masters, states, updates);
                });
            }
        }
        self.record_squares(operation, block, squares)
    }

    /// Applies the update rule to masters and states that have had `step` updates.
    fn apply(
        &self,
        applied: &Applied<'_>,
        masters: StoredMasters<'_>,
        states: &mut [&mut [f32]],
        step: u64,
    ) {
        let &Applied { block, gradient, factors, learning_rate, idle } = applied;
        let shared = &*self.shared;
        let level = shared.threads.level;
        let seed = shared.seed;
        let update = Update { step, block_updates: step, learning_rate, scale: 1.0, level, seed };
        let block = BlockUpdate {
            tensors: shared.eps.tensors(block).trained(),
            masters: shared.eps.masters(block, masters),
            states,
            layout: shared.eps.own_states(block),
            gradient,
            idle,
            room: &mut self.unpacked.lock().expect("nothing panics inside"),
        };
        let scale = |tensor: &Tensor| factors.of(tensor);
        shared.threads.install(|| block.run(&*self.rule, update, &scale));
    }

    /// For each expert of a block's layer, whether no row of the step chose it. Empty: an update
    /// changes all tensors of the block.
    fn idle_experts(&self, operation: &Operation, state: &StepState, block: BlockId) -> Vec<bool> {
        let shared = &*self.shared;
        let mut trained = shared.eps.tensors(block).trained().iter();
        let Some(layer) = operation.layer() else { return Vec::new() };
        if trained.all(|tensor| tensor.kept_with.is_none()) {
            return Vec::new();
        }
        let desk = state.routers.lock().expect("nothing panics inside");
        let Some(counts) = desk.counts(layer) else { return Vec::new() };
        let per_token = shared.model.shape.experts.map_or(0, |experts| experts.per_token);
        let choices = (per_token * state.rows_of_step()) as u64;
        let known: u64 = counts.iter().sum();
        assert_eq!(known, choices, "{block} is updated behind all measures of its step");
        counts.iter().map(|count| *count == 0).collect()
    }

    /// The sum of squares of each parameter group's gradients, once all blocks are measured.
    fn group_sums<'s>(&self, state: &'s StepState) -> &'s [f64] {
        state.group_sums.get_or_init(|| {
            let squares = state.squares.lock().expect("nothing panics inside");
            let mut sums = self.shared.clipping.no_sums();
            for (block, chunks) in &*squares {
                let tensors = self.shared.eps.tensors(*block).trained();
                self.shared.clipping.add(&mut sums, tensors, chunks);
            }
            sums
        })
    }
}
