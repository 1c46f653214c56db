//! The lane of files: blocks, states and gradient regions of an EPS that is on a disk.

use std::time::Instant;

use l2l_actors::ports::{Operation, Trouble, Work};

use super::{Worker, take_as_long};

impl Worker {
    /// Reads or writes what the operation says.
    pub(super) fn on_file(&self, operation: &Operation) -> Result<(), Trouble> {
        let (begin, file) = (Instant::now(), self.host.file());
        let host = self.memory.lease(self.device.device());
        let beat = &|| operation.still_runs();
        let part = self.host.file_part;
        match *operation.work() {
            Work::ReadBlock { block, version, reads } => {
                file.read_parameters(block, version, host.read_slot_mut(reads), beat)?;
            }
            Work::ReadRegion { block, reduced } => {
                file.read_region(block, host.whole_landing(reduced), beat)?;
            }
            Work::WriteRegion { block, reduced } => {
                file.write_region(block, host.whole_landing(reduced), beat)?;
            }
            Work::ReadState { block, version, states, region } => {
                file.read_state(block, version, host.state_slot(states), part, region, beat)?;
            }
            Work::WriteState { block, version, states } => {
                file.write_state(block, version, host.state_slot(states), part, beat)?;
            }
            Work::Seal => file.seal(self.steps.of(operation.step().number).trained + 1)?,
            ref other => unreachable!("{other} is not of the lane of files"),
        }
        let bytes = operation.work().bytes(&operation.step().plan);
        take_as_long(begin, bytes, self.host.disk_rate);
        Ok(())
    }
}
