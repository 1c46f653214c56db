//! The file lane: masters, states and gradient regions of staged blocks.

use std::time::Instant;

use l2l_actors::work::{Stored, Work};
use l2l_actors::{BoxedError, Operation};

use super::{Worker, throttle};

impl Worker {
    /// Reads or writes what the operation says.
    pub(super) fn on_file(&self, operation: &Operation) -> Result<(), BoxedError> {
        let begin = Instant::now();
        let file = self.host.file();
        let host = self.memory.lease();
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
            Work::Seal => file.seal(self.steps.of(operation.step().number).trained + 1)?,
            ref other => unreachable!("{other} is not of the lane of files"),
        }
        let bytes = operation.work().bytes(&operation.step().plan.schedule);
        throttle(begin, bytes, self.host.disk_rate);
        Ok(())
    }
}
