//! Memory is what the plan says: on the device the same for any depth and batch, and nothing as
//! large as a tensor is allocated once the run is on its way.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use l2l::config::{Deal, EpsTier, ScheduleKind, Transfer};
use l2l::data::Batches;
use l2l::{Config, Plan, Trainer, models::Model, shape_of};

/// The least that counts as a tensor.
const TENSOR_BYTES: usize = 256 << 10;

/// Counts large allocations.
struct Counting;

static LARGE: AtomicUsize = AtomicUsize::new(0);

impl Counting {
    fn count(bytes: usize) {
        if bytes >= TENSOR_BYTES {
            LARGE.fetch_add(1, Relaxed);
        }
    }
}

// SAFETY: it counts, and leaves the rest to the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Counting::count(layout.size());
        // SAFETY: as this one was called.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Counting::count(layout.size());
        // SAFETY: as this one was called.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        Counting::count(bytes);
        // SAFETY: as this one was called.
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as this one was called.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn config(layers: usize, micro_batches: usize) -> Config {
    let mut config = Config::default();
    config.data.train = "random".into();
    config.model.layers = Some(layers);
    config.model.hidden = Some(64);
    config.model.heads = Some(4);
    config.model.vocabulary = Some(700);
    config.model.positions = Some(32);
    config.step.micro_batch = 4;
    config.step.batch = 4 * micro_batches;
    config
}

fn plan(config: &Config) -> Plan {
    let model = Model::new(shape_of(config).expect("a shape of ours"));
    Plan::new(config, &model, &config.update_rule()).expect("a plan of ours")
}

#[test]
fn device_bytes_depend_neither_on_depth_nor_on_batch() {
    let shallow = plan(&config(4, 2));
    assert!(shallow.device_bytes() > 0);
    for (layers, micro_batches) in [(64, 2), (4, 32), (64, 32)] {
        assert_eq!(plan(&config(layers, micro_batches)).device, shallow.device);
    }
}

/// A device holds as much with 1 layer as with 400, and the host no more for several devices than
/// the boundaries that these have in hand.
#[test]
fn several_devices_hold_what_one_does() {
    let of = |layers: usize, devices: u32| {
        let mut config = config(layers, 8);
        config.device.count = Some(devices);
        plan(&config)
    };
    let hidden = 4 * 8 * 32 * 64 * 4; // of all sequences
    for devices in [1, 2, 3, 4] {
        assert_eq!(of(400, devices).device, of(1, devices).device);
        assert_eq!(of(400, devices).device, of(400, 1).device);
        let more = of(400, devices).host_bytes() - of(400, 1).host_bytes();
        assert!(more <= 2 * u64::from(devices) * hidden, "{devices}: {more}");
    }
    // Each link moves its own layers.
    let one = of(64, 1);
    let four = of(64, 4);
    let up = |plan: &Plan| plan.traffic.link_bytes.iter().map(|link| link.upload).sum::<u64>();
    assert_eq!(up(&one), one.traffic.upload_bytes);
    assert_eq!(up(&four), four.traffic.upload_bytes);
    for link in &four.traffic.link_bytes {
        let up = link.upload;
        let down = link.download;
        let share = |of: u64, all: u64| 4.0 * of as f64 / all as f64;
        assert!((share(up, one.traffic.upload_bytes) - 1.0).abs() < 0.2, "{up}");
        assert!((share(down, one.traffic.download_bytes) - 1.0).abs() < 0.2, "{down}");
    }
}

/// In shards, each link moves an nth of the weights that one device's would, and devices copy the
/// rest from each other.
#[test]
fn sharded_transfer_moves_an_nth_over_each_link() {
    let of = |devices: u32, transfer| {
        let mut config = config(16, 8);
        config.device.count = Some(devices);
        (config.parallel.deal, config.parallel.groups) = (Deal::Sequences, 4);
        config.parallel.transfer = transfer;
        plan(&config)
    };
    let one = of(1, Transfer::Whole);
    let whole = of(4, Transfer::Whole);
    let sharded = of(4, Transfer::Sharded);
    assert_eq!(sharded.traffic.upload_bytes, one.traffic.upload_bytes);
    let copied: u64 = sharded.traffic.link_bytes.iter().map(|link| link.peers).sum();
    assert_eq!(sharded.traffic.upload_bytes + copied, whole.traffic.upload_bytes);
    for (link, of_whole) in sharded.traffic.link_bytes.iter().zip(&whole.traffic.link_bytes) {
        let share = |of: u64, all: u64| 4.0 * of as f64 / all as f64;
        assert!((share(link.upload, one.traffic.upload_bytes) - 1.0).abs() < 0.05, "{link:?}");
        assert!((share(link.download, one.traffic.download_bytes) - 1.0).abs() < 0.05, "{link:?}");
        assert_eq!(link.upload + link.peers, of_whole.upload, "all of every block comes");
    }
    assert_eq!(sharded.device, whole.device, "it takes no memory");
}

/// A pipeline's stash holds what is on its way: with 1F1B of no more micro-batches when a step has
/// more.
#[test]
fn one_forward_one_backward_keeps_few_micro_batches() {
    let stash = |kind, micro_batches: usize| {
        let mut config = config(24, micro_batches);
        (config.device.count, config.schedule.kind) = (Some(3), kind);
        let plan = plan(&config);
        plan.host.iter().find(|term| term.name == "stash").expect("it has one").bytes
    };
    let gpipe = |micro_batches| stash(ScheduleKind::Gpipe, micro_batches);
    let alternating = |micro_batches| stash(ScheduleKind::OneForwardOneBackward, micro_batches);
    assert!(gpipe(32) > 3 * gpipe(8));
    // What the host writes and reads, at both ends of the model, is kept of all.
    assert!(alternating(32) < 2 * alternating(8));
    assert!(4 * alternating(32) < gpipe(32));
}

/// A run on one long sequence uses the memory of its plan, which differs from that of a shorter one
/// by keys and values alone.
#[test]
fn a_long_sequence_takes_what_was_planned() {
    let whole = std::env::var("L2L_TESTS").is_ok_and(|tests| tests == "whole");
    let lengths = if whole { [512, 16_384] } else { [512, 4096] };
    let held = lengths.map(|length| {
        let mut config = config(2, 1);
        config.model.preset = Some("llama-1b".into());
        (config.model.hidden, config.model.intermediate) = (Some(16), Some(32));
        (config.model.heads, config.model.kv_heads) = (Some(1), Some(1));
        (config.model.positions, config.data.sequence_length) = (Some(length), Some(length));
        (config.step.batch, config.step.micro_batch) = (1, 1);
        config.step.chunk_positions = 128;
        config.channels.gradients = 1; // whether a second slot is taken depends on the time
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let mut batches = Batches::open(&config).expect("random data");
            let mut trainer = Trainer::start(config).await.expect("a case of ours");
            let batch = batches.next().await.expect("random data");
            let report = trainer.step(batch).await.expect("nothing fails here");
            assert!(report.loss.is_finite());
            let planned = trainer.plan().device.clone();
            assert_eq!(trainer.device_peak(), planned);
            trainer.stop().await.expect("nothing fails here");
            planned
        })
    });
    let [short, long] = held;
    for (short, long) in short.iter().zip(&long) {
        assert_eq!(short.name, long.name);
        let times = if short.name == "keys_and_values" { lengths[1] / lengths[0] } else { 1 };
        assert_eq!(short.bytes * times as u64, long.bytes, "{}", short.name);
    }
}

/// Also: not one large allocation from the third step on, in any schedule.
#[test]
fn what_is_used_is_what_was_planned_and_nothing_is_allocated() {
    for (kind, recompute, clip, tier) in [
        (ScheduleKind::Relay, true, None, EpsTier::Memory),
        (ScheduleKind::Relay, false, Some(0.5), EpsTier::Memory),
        (ScheduleKind::Resident, true, None, EpsTier::Memory),
        (ScheduleKind::Relay, true, None, EpsTier::File),
        (ScheduleKind::Relay, true, Some(0.5), EpsTier::File),
    ] {
        let folder = tempfile::tempdir().expect("a place for files");
        let mut config = config(6, 5);
        config.model.hidden = Some(128); // blocks, slots and workspace have 256 KiB and more
        config.model.vocabulary = Some(5000);
        config.schedule.kind = kind;
        config.schedule.recompute = recompute.into();
        config.optimizer.clip_norm = clip;
        (config.eps.tier, config.eps.path) = (tier, Some(folder.path().into()));
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let mut batches = Batches::open(&config).expect("random data");
            let mut trainer = Trainer::start(config).await.expect("a case of ours");
            for step in 0..5 {
                let before = LARGE.load(Relaxed);
                let batch = batches.next().await.expect("random data");
                let report = trainer.step(batch).await.expect("nothing fails here");
                let large = LARGE.load(Relaxed) - before;
                assert!(step < 2 || large == 0, "{kind:?}: {large} allocations in step {step}");
                if step == 4 {
                    for (used, planned) in trainer.device_peak().iter().zip(&trainer.plan().device)
                    {
                        // A resident walk needs what it wrote at once, so less of it is on its
                        // way than there is room for.
                        let boundaries = ["inputs", "outputs"].contains(&used.name);
                        let resident = kind == ScheduleKind::Resident && boundaries;
                        assert!(used.bytes <= planned.bytes, "{used} of {planned}");
                        assert!(resident || used == planned, "{kind:?}: {used} of {planned}");
                    }
                    let sum: u64 = trainer.device_peak().iter().map(|term| term.bytes).sum();
                    assert_eq!(report.device_peak_bytes, sum);
                }
            }
            trainer.stop().await.expect("nothing fails here");
        });
    }
}
