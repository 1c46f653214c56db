//! Kernels that are not built in: their text for a GPU.

use super::driver::Argument;
use super::kernels::On;
use super::launches::long;
use crate::kernels::Custom;

impl On<'_> {
    pub(super) fn custom(&self, op: &Custom<'_>) {
        let places: Vec<_> = op.writes.iter().chain(op.reads).map(|view| self.at(*view)).collect();
        let count = op.writes[0].len();
        let elements = long(count);
        let mut arguments: Vec<&dyn Argument> = Vec::new();
        arguments.extend(places.iter().map(|place| place as &dyn Argument));
        arguments.push(&elements);
        arguments.extend(op.numbers.iter().map(|number| number as &dyn Argument));
        self.queue.each(op.kernel.name, count, 1, &arguments);
    }
}
