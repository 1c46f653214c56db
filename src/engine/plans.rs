//! A cache of step plans: a run alternates between few shapes of steps, and plans each once.

use std::sync::Arc;

use l2l_actors::schedule::StepPlan;

use crate::error::Error;
use crate::models::LayerSelection;
use crate::plan::{StepShape, Units};
use crate::stash::StashLayout;

/// The most plans that are kept. Training, validation and a sample have one shape each, and the
/// last batch of a file has another.
const KEPT: usize = 8;

/// A step's plan and the places of its boundaries in the stash.
#[derive(Clone)]
pub(super) struct Planned {
    pub(super) plan: Arc<StepPlan>,
    pub(super) stash: Arc<StashLayout>,
}

/// The steps that a plan can be used for.
#[derive(Clone, PartialEq)]
struct Key {
    shape: StepShape,
    units: Arc<Units>,
    layers: LayerSelection,
}

/// The plans of the last steps, the latest at the end.
#[derive(Default)]
pub(super) struct StepPlans {
    recent: Vec<(Key, Planned)>,
}

impl StepPlans {
    /// The plan of a step of this shape, with these units and layers. `make` makes it if it is not
    /// kept.
    ///
    /// # Errors
    /// `make` failed.
    pub(super) fn of(
        &mut self,
        shape: StepShape,
        units: &Arc<Units>,
        layers: &LayerSelection,
        make: impl FnOnce() -> Result<Planned, Error>,
    ) -> Result<Planned, Error> {
        let key = Key { shape, units: units.clone(), layers: layers.clone() };
        let planned = match self.recent.iter().position(|(of, _)| *of == key) {
            Some(at) => self.recent.remove(at).1,
            None => make()?,
        };
        if self.recent.len() == KEPT {
            self.recent.remove(0);
        }
        self.recent.push((key, planned.clone()));
        Ok(planned)
    }
}
