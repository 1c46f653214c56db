//! A device, an EPS and a clock without tensors.
//!
//! The same actors run on lanes that only count. Each operation takes the time it is given, the
//! clock jumps from one end of an operation to the next when no actor can move, and a check
//! compares the content of every slot with what the operation asks for ([`Memory`]). The result is
//! deterministic, and comes fast enough to answer questions about machines that are not at hand.
//! [`World`] is the executor under it: it polls actors and completes operations one move at a time,
//! in time order or in any other order, which is how interleavings are explored.

mod gradients;
mod joined;
mod lanes;
mod memory;
mod sharing;
mod sums;
mod touch;
mod world;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

pub use joined::JoinedRing;
pub use lanes::VirtualLanes;
pub use memory::Memory;
pub use sharing::{Cost, Use};
pub use world::{Move, World};

use crate::config::RingConfig;
use crate::operation::Operation;
pub use crate::record::Record;
use crate::relay::Relay;

/// Runs a relay in virtual time: `main` drives it, and each operation costs what `costs` says: a
/// time, or a [`Cost`] with the resources that it shares. Returns the result of `main` and the
/// timeline.
///
/// # Errors
/// Nothing could move, and no operation was left to move the clock. The error names the tasks that
/// had not ended.
pub fn run<T: 'static, C: Into<Cost>, F: Future<Output = T> + 'static>(
    config: RingConfig,
    costs: impl FnMut(&Operation) -> C + Send + 'static,
    main: impl FnOnce(Relay<VirtualLanes>) -> F,
) -> Result<(T, Vec<Record>), Vec<String>> {
    on(VirtualLanes::new(costs), config, main)
}

/// The same without the check of memory, which takes most of the time: for schedules that are known
/// to be sound.
///
/// # Errors
/// As of [`run`].
pub fn run_unchecked<T: 'static, C: Into<Cost>, F: Future<Output = T> + 'static>(
    config: RingConfig,
    costs: impl FnMut(&Operation) -> C + Send + 'static,
    main: impl FnOnce(Relay<VirtualLanes>) -> F,
) -> Result<(T, Vec<Record>), Vec<String>> {
    on(VirtualLanes::unchecked(costs), config, main)
}

fn on<T: 'static, F: Future<Output = T> + 'static>(
    lanes: VirtualLanes,
    config: RingConfig,
    main: impl FnOnce(Relay<VirtualLanes>) -> F,
) -> Result<(T, Vec<Record>), Vec<String>> {
    let mut started = Started::new(lanes, config, main);
    started.world.run()?;
    Ok(started.result())
}

/// What drives a relay.
type Main<T> = Box<dyn FnOnce(Relay<VirtualLanes>) -> Pin<Box<dyn Future<Output = T>>>>;

/// A relay whose tasks are ready to run.
struct Started<T> {
    lanes: Arc<VirtualLanes>,
    world: World,
    /// What its `main` returned.
    returned: Arc<Mutex<Option<T>>>,
}

impl<T: 'static> Started<T> {
    fn new<F: Future<Output = T> + 'static>(
        lanes: VirtualLanes,
        config: RingConfig,
        main: impl FnOnce(Relay<VirtualLanes>) -> F,
    ) -> Started<T> {
        let lanes = Arc::new(lanes);
        let (relay, tasks) = Relay::wire(config, lanes.clone());
        let mut world = World::new(lanes.clone());
        for task in tasks {
            world.spawn(task.name.to_string(), task.future);
        }
        let returned = Arc::new(Mutex::new(None));
        let main = main(relay);
        let out = returned.clone();
        world.spawn("main".into(), async move {
            let result = main.await;
            *out.lock().expect("one task writes") = Some(result);
        });
        Started { lanes, world, returned }
    }

    /// The result of `main` and the timeline, once all tasks have ended.
    fn result(self) -> (T, Vec<Record>) {
        let returned = self.returned.lock().expect("the task has ended").take();
        (returned.expect("main has ended"), self.lanes.take_records())
    }
}
