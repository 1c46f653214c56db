//! What the ring costs: time per visit and per operation, against messages over the bare channel.
//!
//! `cargo bench -p l2l-actors`. The lanes do nothing and finish each operation as soon as it may
//! run, on one thread, so that all that is measured is actors, messages, pools and fences. Each
//! figure is the median of rounds in one process; the ratio is taken in the same round.

use std::hint::black_box;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use l2l_actors::fence::Done;
use l2l_actors::ports::{Lanes, Ports};
use l2l_actors::schedule::{Block, Capacities, Pools, RingModel, Schedule, Selection, relay};
use l2l_actors::threads::{LaneWork, ThreadLanes};
use l2l_actors::{BoxedError, Operation, Relay, RingConfig, Step};

const LAYERS: u32 = 96;
const MICRO_BATCHES: u32 = 4;
const ROUNDS: usize = 15;
const STEPS: usize = 5;

fn schedule() -> Schedule {
    let block = Block {
        weight_bytes: 1,
        gradient_bytes: 1,
        download_bytes: 1,
        reduce_scatter_bytes: 1,
        encoded: false,
        master_bytes: 1,
        state_bytes: 2,
        older_bytes: 0,
        region_bytes: 1,
        staged: false,
        frozen: false,
    };
    let model = RingModel::stack(vec![block; LAYERS as usize + 1], 4);
    let selection = Selection::all(&model, vec![1; MICRO_BATCHES as usize]);
    relay(&model, &selection).expect("a model with an embedding and a stack")
}

/// Lanes in which every operation ends when it is queued: all it waits for has ended before.
struct Instantly {
    origin: Instant,
    operations: Mutex<u64>,
}

#[async_trait]
impl Lanes for Instantly {
    fn queue(&self, operation: Operation) {
        *self.operations.lock().expect("nothing panics inside") += 1;
        let now = self.now();
        operation.finish(Ok(Done { begin: now, end: now, value: 1.0 }));
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn close(&self) {}

    async fn closed(&self) {}
}

impl Ports for Instantly {
    type Batch = ();

    fn begin(&self, _step: &Arc<Step>, _batch: ()) {}
}

/// Threads that do nothing.
struct Idle;

impl LaneWork for Idle {
    type Batch = ();

    fn begin(&self, _step: &Arc<Step>, _batch: (), _now: Duration) {}

    fn perform(&self, operation: &Operation) -> Result<f64, BoxedError> {
        black_box(operation);
        Ok(1.0)
    }
}

/// Time of one step.
async fn step_time<P: Ports<Batch = ()>>(ports: Arc<P>, schedule: &Schedule) -> Duration {
    let config = RingConfig {
        pools: Pools::of(schedule, &Capacities::default()),
        blocks: schedule.blocks.len() as u32,
        max_layers: LAYERS,
        max_micro_batches: MICRO_BATCHES,
        deferred: false,
        trained: 0,
        delay_from: None,
        watchdog: None,
        inject: None,
    };
    let mut relay = Relay::start(config, ports).expect("threads");
    let plan = relay.plan(schedule.clone()).expect("pools were made for it");
    relay.step(plan.clone(), ()).await.expect("nothing fails here"); // warm
    let begin = Instant::now();
    for _ in 0..STEPS {
        relay.step(plan.clone(), ()).await.expect("nothing fails here");
    }
    relay.settle().await.expect("nothing fails here");
    let time = begin.elapsed() / STEPS as u32;
    relay.stop().await.expect("nothing fails here");
    time
}

/// Time of one message through a flume channel between two tasks.
async fn message_time() -> Duration {
    const MESSAGES: u32 = 20_000;
    let (sender, receiver) = flume::bounded::<u64>(4);
    let begin = Instant::now();
    let sending = tokio::spawn(async move {
        for message in 0..u64::from(MESSAGES) {
            sender.send_async(message).await.expect("somebody receives");
        }
    });
    while let Ok(message) = receiver.recv_async().await {
        black_box(message);
    }
    sending.await.expect("no panic");
    begin.elapsed() / MESSAGES
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    if std::env::args().any(|argument| argument == "--test") {
        return; // cargo test builds benches; it has no use for their figures
    }
    let schedule = schedule();
    let visits = schedule.visits.iter().filter(|visit| visit.on_device()).count() as f64;
    for (name, threads) in [("current-thread", 0), ("multi-thread, 2 workers", 2)] {
        let mut builder = match threads {
            0 => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        let runtime = builder.worker_threads(threads.max(1)).build().expect("a runtime");
        let mut bare = vec![];
        let mut on_threads = vec![];
        let mut messages = vec![];
        let mut ratios = vec![];
        let mut operations = 0.0;
        let pools = Pools::of(&schedule, &Capacities::default());
        for _ in 0..ROUNDS {
            let micros = |time: Duration| time.as_secs_f64() * 1e6;
            let lanes = Instantly { origin: Instant::now(), operations: Mutex::new(0) };
            let lanes = Arc::new(lanes);
            let visit = micros(runtime.block_on(step_time(lanes.clone(), &schedule))) / visits;
            let count = *lanes.operations.lock().expect("nothing panics inside");
            operations = count as f64 / (STEPS + 1) as f64 / visits;
            let message = micros(runtime.block_on(message_time()));
            let lanes = Arc::new(ThreadLanes::start(Idle, &pools, None).expect("threads"));
            on_threads.push(micros(runtime.block_on(step_time(lanes, &schedule))) / visits);
            bare.push(visit);
            messages.push(message);
            ratios.push(visit / message);
        }
        let visit = median(bare);
        println!("{name}: {LAYERS} layers, {MICRO_BATCHES} micro-batches, median of {ROUNDS}");
        println!("  a visit ({operations:.1} operations), lanes that cost nothing: {visit:.1} µs");
        println!("  visits a second: {:.0}", 1e6 / visit);
        println!("  a visit on six threads that do nothing: {:.1} µs", median(on_threads));
        println!("  a message over the bare channel: {:.2} µs", median(messages));
        println!("  visit / message: {:.0}", median(ratios));
    }
}
