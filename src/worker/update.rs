//! Updates: the gradient is measured, the learning rate and the clip factor are applied, masters
//! and states move to their next version, in memory or in the staging slot that they were read to.

use std::time::Instant;

use l2l_actors::schedule::{BlockId, Version};
use l2l_actors::work::{GradientAt, MasterAt};

use super::host_side::{HostSide, Squares};
use super::memory::HostLease;
use super::take_as_long;
use crate::models::Tensor;
use crate::optimizers::{SplitMasters, Update};

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
        norm: Option<f64>,
        learning_rate: f64,
    ) -> Result<Squares, Squares> {
        let begin = Instant::now();
        let tensors = self.eps.tensors(block).trained();
        let (len, trained) = (self.block_len(block), self.trained_len(block));
        // Of a staged block: masters, states, and the gradient if it waited on file.
        let mut parts: Vec<&mut [f32]> = match master {
            MasterAt::Slot(slot) => {
                let parts = host.state_slot(slot).chunks_mut(self.file_part).enumerate();
                parts.map(|(at, part)| &mut part[..if at == 0 { len } else { trained }]).collect()
            }
            MasterAt::Memory => Vec::new(),
        };
        let (region, waited);
        let gradient = match (gradient, master) {
            (GradientAt::Landing(slot), _) => &*host.landing(slot, trained),
            (GradientAt::Region, MasterAt::Slot(_)) => {
                waited = parts.pop().expect("a slot has a part for what waited");
                &*waited
            }
            (GradientAt::Region, MasterAt::Memory) => {
                region = self.eps.memory().region(block);
                &region[..]
            }
        };
        let squares = self.measure(block, gradient);
        if !squares.sum.is_finite() {
            return Err(squares);
        }
        let (scale, level) = (self.clip_factor(norm), self.level);
        let update = |updates| Update { step: updates, learning_rate, scale, level };
        if let Some((masters, states)) = parts.split_first_mut() {
            let update = update(self.file().updates_of(block));
            let states = &mut states[..self.eps.states()];
            self.apply(tensors, masters, states, gradient, update);
        } else {
            let mut lease = self.eps.memory().write(block, version);
            let lease = &mut *lease;
            let update = update(lease.updates);
            let mut states: Vec<&mut [f32]> =
                lease.states.iter_mut().map(Vec::as_mut_slice).collect();
            self.apply(tensors, &mut lease.parameters, &mut states, gradient, update);
            lease.version = version + 1;
            lease.updates += 1;
        }
        take_as_long(begin, size_of_val(gradient) as u64, self.update_rate);
        Ok(squares)
    }

    /// What gradients are multiplied by, as PyTorch's `clip_grad_norm_` does.
    fn clip_factor(&self, norm: Option<f64>) -> f32 {
        match (norm, self.clip_norm) {
            (Some(norm), Some(clip)) => (clip / (norm + 1e-6)).min(1.0) as f32,
            _ => 1.0,
        }
    }

    fn apply(
        &self,
        tensors: &[Tensor],
        masters: &mut [f32],
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let rule = &self.rule;
        self.threads.install(|| {
            if self.eps.split {
                let unpacked = &mut self.unpacked.lock().expect("nothing panics inside");
                let masters = &mut SplitMasters::of(masters).first(gradient.len());
                rule.apply_split(tensors, masters, states, gradient, update, unpacked);
            } else {
                rule.apply(tensors, &mut masters[..gradient.len()], states, gradient, update);
            }
        });
    }
}
