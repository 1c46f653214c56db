//! The file lane: reads and writes masters, states and gradient regions of staged blocks.

use std::sync::Arc;

use l2l_actors::work::{Stored, Work};
use l2l_actors::{BoxedError, Operation};

use super::shared::Shared;

/// The work of the file lane.
pub(super) struct FileLane {
    shared: Arc<Shared>,
}

impl FileLane {
    pub(super) fn new(shared: Arc<Shared>) -> FileLane {
        FileLane { shared }
    }

    /// Reads, writes or seals, as the operation says.
    pub(super) fn run(&self, operation: &Operation) -> Result<(), BoxedError> {
        let file = self.shared.file();
        let host = self.shared.memory.lease();
        let beat = &|| operation.still_runs();
        match *operation.work() {
            Work::Stage { block, version, stored, slot } => match stored {
                Stored::Master => {
                    file.read_parameters(block, version, host.read_slot_mut(slot), beat)?;
                }
                Stored::Gradient => file.read_region(block, host.whole_landing(slot), beat)?,
                Stored::State { with_gradient } => {
                    file.read_state(block, version, host.state_slot(slot), with_gradient, beat)?;
                }
            },
            Work::Store { block, version, stored, slot } => match stored {
                Stored::Gradient => file.write_region(block, host.whole_landing(slot), beat)?,
                Stored::State { .. } => {
                    file.write_state(block, version, host.state_slot(slot), beat)?;
                }
                Stored::Master => unreachable!("masters are written with their states"),
            },
            Work::Seal => file.seal(self.shared.state(operation).input.trained + 1)?,
            ref other => unreachable!("{other} is not work of the file lane"),
        }
        Ok(())
    }
}
