//! Updates: the gradient is measured, the learning rate and the clip factor are applied, masters
//! and states move to their next version, in memory or in the staging slot that they were read to.

use std::time::Instant;

use l2l_actors::schedule::{BlockId, Version};
use l2l_actors::work::{GradientAt, MasterAt};

use super::clipping::Factors;
use super::host_side::{HostSide, Squares};
use super::memory::HostLease;
use super::throttle;
use crate::config::NonFinite;
use crate::models::Tensor;
use crate::optimizers::{BlockUpdate, Update};

impl HostSide {
    /// Moves a block to its next version; its gradient's sum of squares.
    ///
    /// # Errors
    /// That sum, when it is not finite; then nothing was done.
    pub(super) fn update(
        &self,
        host: &HostLease<'_>,
        block: BlockId,
        version: Version,
        (master, gradient): (MasterAt, GradientAt),
        factors: &Factors<'_>,
        learning_rate: f64,
    ) -> Result<Squares, Squares> {
        let begin = Instant::now();
        let trained = self.trained_len(block);
        // Of a staged block: masters, states, and behind them the gradient if it waited on file.
        let mut parts = match master {
            MasterAt::Slot(slot) => self.file().split(block, host.state_slot(slot)),
            MasterAt::Memory => vec![&mut [][..]],
        };
        let behind = parts.pop().expect("what follows the parts");
        let region;
        let gradient = match (gradient, master) {
            (GradientAt::Landing(slot), _) => &*host.landing(slot, trained),
            (GradientAt::Region, MasterAt::Slot(_)) => &behind[..trained],
            (GradientAt::Region, MasterAt::Memory) => {
                region = self.eps.memory().region(block);
                &region[..]
            }
        };
        let squares = self.measure(block, gradient);
        if !squares.sum.is_finite() && self.non_finite == NonFinite::Stop {
            return Err(squares);
        }
        let scale = 1.0;
        let level = self.level;
        let seed = self.seed;
        let update =
            |updates| (Update { step: updates, learning_rate, scale, level, seed }, factors);
        if let Some((masters, states)) = parts.split_first_mut() {
            let update = update(self.file().updates_of(block));
            self.apply(block, masters, states, gradient, update);
        } else {
            let mut lease = self.eps.memory().write(block, version);
            let lease = &mut *lease;
            let update = update(lease.updates);
            let mut states: Vec<&mut [f32]> =
                lease.states.iter_mut().map(Vec::as_mut_slice).collect();
            self.apply(block, &mut lease.parameters, &mut states, gradient, update);
            lease.version = version + 1;
            lease.updates += 1;
        }
        throttle(begin, size_of_val(gradient) as u64, self.update_rate);
        Ok(squares)
    }

    fn apply(
        &self,
        block: BlockId,
        masters: &mut [f32],
        states: &mut [&mut [f32]],
        gradient: &[f32],
        (update, factors): (Update, &Factors<'_>),
    ) {
        let block = BlockUpdate {
            tensors: self.eps.tensors(block).trained(),
            masters: self.eps.masters(block, masters),
            states,
            layout: self.eps.own_states(block),
            gradient,
            room: &mut self.unpacked.lock().expect("nothing panics inside"),
        };
        let scale = |tensor: &Tensor| factors.of(tensor);
        self.threads.install(|| block.run(&*self.rule, update, &scale));
    }
}
