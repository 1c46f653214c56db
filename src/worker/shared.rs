//! Data that lanes of several kinds read: the model, its plan and parameters, and the steps that
//! run. Each kind of lane has its other data for itself.

use std::sync::{Arc, RwLock};

use l2l_actors::Operation;
use l2l_actors::schedule::{BlockId, Boundary, Portion};

use super::clipping::Clipping;
use super::host_threads::HostThreads;
use super::memory::Memory;
use super::step::{StepState, Steps};
use crate::config::NonFinite;
use crate::eps::{Eps, FileTier};
use crate::models::Model;
use crate::plan::Plan;
use crate::tensor::Packing;

/// Data of all lanes.
pub(super) struct Shared {
    pub(super) model: Arc<Model>,
    pub(super) plan: Arc<Plan>,
    pub(super) eps: Eps,
    pub(super) memory: Memory,
    pub(super) steps: Steps,
    pub(super) threads: HostThreads,
    pub(super) clipping: Clipping,
    pub(super) non_finite: NonFinite,
    /// The seed of the run, for dropout, noise, rounding and PowerSGD.
    pub(super) seed: u64,
    /// The rows of the embedding's gradient of a whole batch. The exchange lane receives them from
    /// other ranks, and the host lane adds them up.
    pub(super) embedding_rows: RwLock<Vec<f32>>,
}

impl Shared {
    /// The state of an operation's step.
    pub(super) fn state(&self, operation: &Operation) -> Arc<StepState> {
        self.steps.of(operation.step().number)
    }

    /// Floats of a portion that a device receives.
    pub(super) fn published_len(&self, portion: Portion) -> usize {
        self.model.tensors_of(portion).published_len(self.plan.dtype())
    }

    /// Elements of a portion's gradient.
    pub(super) fn trained_len(&self, portion: Portion) -> usize {
        self.model.tensors_of(portion).trained_len()
    }

    /// Elements of the gradient of this rank's part of a block.
    pub(super) fn own_trained_len(&self, block: BlockId) -> usize {
        self.eps.tensors(block).trained_len()
    }

    /// The EPS's file.
    pub(super) fn file(&self) -> &FileTier {
        self.eps.file().expect("the plan has blocks on file")
    }

    /// How the stash packs a boundary of hidden states or their gradients. Others are plain.
    pub(super) fn packing(&self, boundary: &Boundary) -> Packing {
        let encoding = boundary.encoding;
        Packing { dtype: self.plan.dtype(), encoding, columns: boundary.width() }
    }

    /// True if a gradient of this norm leaves the model as it is.
    pub(super) fn skips_update(&self, norm: Option<f64>) -> bool {
        self.non_finite == NonFinite::Skip && norm.is_some_and(|norm| !norm.is_finite())
    }
}
