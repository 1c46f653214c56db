//! The plan is what is allocated and what is used, term by term, for shapes and settings of all
//! kinds.

use l2l::config::{ChannelsConfig, EpsTier, Recompute, ScheduleKind, StashDtype, StashPlace};
use l2l::data::Batches;
use l2l::models::{Model, Tensor};
use l2l::optimizers::{Masters, Update, UpdateRule};
use l2l::plan::{Keeping, RankShare};
use l2l::telemetry::{Forecast, Hiding, Rates, Slice, WorkKind};
use l2l::{Config, Plan, Trainer, model_of, shape_of};
use proptest::prelude::*;

/// With `recompute = "auto"`: sets a ceiling of device memory. It leaves this share of the room in
/// which all layers keep their activations: 0 is the least with which the config runs.
pub(crate) fn limit(config: &mut Config, room: f64) {
    if config.schedule.recompute != Recompute::AUTO {
        return;
    }
    let bytes = |memory: &str| {
        let mut config = config.clone();
        config.device.memory = memory.parse().expect("a size");
        let model = model_of(&config, shape_of(&config).expect("a shape of ours"));
        let model = model.expect("a model of ours");
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
        plan.device_bytes()
    };
    let least = bytes("auto");
    let most = bytes("1TiB");
    let ceiling = least + (most.saturating_sub(least) as f64 * room) as u64;
    config.device.memory = ceiling.to_string().parse().expect("a size");
}

/// Shapes and settings of all kinds.
fn any_config() -> impl Strategy<Value = Config> {
    let shape = (1..=5_usize, 1..=3_usize, 1..=5_usize, 2..=40_usize, 1..=600_usize);
    let step = (1..=7_usize, 1..=4_usize, prop::bool::ANY, prop::bool::ANY);
    let ways = vec![true.into(), false.into(), Recompute::ATTENTION, Recompute::AUTO];
    let recompute = prop::sample::select(ways);
    let ways = (recompute, prop::bool::ANY, prop::bool::ANY, prop::bool::weighted(0.3));
    let channels = (1..=4_u32, 1..=3_u32, 1..=3_u32, 1..=5_u32);
    (shape, step, ways, channels).prop_map(|(shape, step, ways, channels)| {
        let (layers, heads, size, positions, vocabulary) = shape;
        let (batch, micro_batch, clip, resident) = step;
        let (recompute, on_device, packed, on_file) = ways;
        let mut config = Config::default();
        config.data.train = "random".into();
        config.model.layers = Some(layers);
        config.model.hidden = Some(heads * 8 * size);
        config.model.heads = Some(heads);
        config.model.vocabulary = Some(vocabulary + 1);
        config.model.positions = Some(positions);
        config.step.batch = batch;
        config.step.micro_batch = micro_batch;
        config.optimizer.clip_norm = clip.then_some(0.5);
        config.device.threads = Some(1);
        if resident {
            config.schedule.kind = ScheduleKind::Resident;
        }
        config.schedule.recompute = recompute;
        config.stash.place = if on_device { StashPlace::Device } else { StashPlace::Host };
        config.stash.dtype = if packed { StashDtype::Bf16 } else { StashDtype::F32 };
        config.eps.tier = if on_file { EpsTier::File } else { EpsTier::Memory };
        let (weights, gradients, reduced, stash) = channels;
        config.channels = ChannelsConfig { weights, gradients, reduced, stash };
        limit(&mut config, f64::from(stash - 1) / 4.0);
        config
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if crate::whole() { 300 } else { 40 })
    })]

    /// The most that is used of each term is what was planned for it; boundaries in flight may be
    /// fewer. (The plan itself asserts that it is what is allocated.)
    #[test]
    fn the_high_water_mark_is_the_plan(mut config in any_config()) {
        let folder = tempfile::tempdir().expect("a place for files");
        config.eps.path = Some(folder.path().into());
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let mut batches = Batches::open(&config).expect("random data");
            let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
            for _ in 0..2 {
                let batch = batches.next().await.expect("random data");
                trainer.step(batch).await.expect("nothing fails here");
            }
            for (used, planned) in trainer.device_peak().iter().zip(&trainer.plan().device) {
                let in_flight = ["inputs", "outputs", "gradients"].contains(&used.name);
                assert!(used.bytes <= planned.bytes, "{used} of {planned}: {config:?}");
                assert!(in_flight || used == planned, "{used} of {planned}: {config:?}");
            }
            let planned = trainer.plan().file_bytes();
            trainer.stop().await.expect("nothing fails here");
            if config.eps.tier == EpsTier::File {
                let file = std::fs::metadata(folder.path().join("blocks")).expect("it is there");
                assert_eq!(file.len(), planned);
            }
        });
    }
}

/// The plan says how many tokens a step needs to hide transfers. In virtual time kernels hardly
/// wait with so many tokens, and do wait with a quarter of them.
#[test]
fn transfers_hide_where_the_plan_says() {
    for (link, clip, tier, ranks) in [
        (1e9, None, EpsTier::Memory, 1),
        (4e9, Some(1.0), EpsTier::Memory, 1),
        (16e9, None, EpsTier::File, 1),
        (16e9, Some(1.0), EpsTier::Memory, 4),
        (16e9, None, EpsTier::File, 2),
    ] {
        let mut config = Config::default();
        config.data.train = "random".into();
        config.model.layers = Some(12);
        config.model.hidden = Some(512);
        config.model.heads = Some(8);
        config.model.positions = Some(64);
        (config.eps.tier, config.eps.path) = (tier, Some("unused".into()));
        config.optimizer.clip_norm = clip;
        let exposed = |batch: usize| {
            let mut config = config.clone();
            (config.step.batch, config.parallel.groups) = (batch * ranks as usize, ranks);
            let model = Model::new(shape_of(&config).expect("a shape of ours"));
            let rates = Rates::of(&config, &model, 2e12, link, 50e9);
            let rates = rates.with_disk(4e9).with_fabric(2e9);
            let share = RankShare { rank: 0, ranks };
            let plan = Plan::of_rank(&config, &model, &config.update_rule(), share);
            let plan = plan.expect("a plan of ours");
            let hiding = Hiding::of(&config, &model, &plan, &rates, clip.is_some());
            let hiding = hiding.expect("a schedule of ours");
            assert!(ranks < 4 || hiding.lane == "fetch", "{hiding:?}");
            let forecast = Forecast::of_plan(&config, &model, &plan, &rates);
            let forecast = forecast.expect("a step of ours");
            // Waits at layers are all but those behind the last visit of a step.
            let waits: Vec<f64> = forecast.waits.iter().map(|wait| wait.seconds).collect();
            assert!(waits.is_sorted_by(|a, b| a >= b), "the longest first");
            let [at_layers, exposed] = [waits.iter().sum(), forecast.exposed_seconds()];
            assert!(at_layers > 0.0 && at_layers < 1.001 * exposed, "{at_layers} of {exposed}");
            (hiding.tokens.expect("it hides"), forecast.exposed_seconds() / forecast.seconds)
        };
        let (tokens, _) = exposed(4);
        let sequences = tokens.div_ceil(64) as usize;
        let less = exposed((sequences / 4).max(1)).1;
        let more = exposed(2 * sequences).1;
        assert!(more < 0.15 && less > 0.3, "{tokens} tokens: waits {less:.2} and {more:.2}");
    }
    let mut config = Config::default();
    config.data.train = "random".into();
    let model = Model::new(shape_of(&config).expect("a shape of ours"));
    let rates = Rates::of(&config, &model, 1e15, 1e9, 50e9);
    let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
    let hiding = Hiding::of(&config, &model, &plan, &rates, false).expect("a schedule of ours");
    assert_eq!(hiding.tokens, None, "it never hides");
}

/// A layer in pieces moves its weights and its gradient once, and so does what the host does with
/// its blocks, however many pieces it has.
#[test]
fn pieces_hide_where_layers_do() {
    for (lane, link, host) in [("upload", 1e9, 50e9), ("update", 50e9, 1e9)] {
        let tokens = |tensor: u32| {
            let mut config = Config::default();
            config.data.train = "random".into();
            (config.model.layers, config.model.hidden) = (Some(12), Some(512));
            (config.model.heads, config.model.positions) = (Some(8), Some(64));
            (config.parallel.slices, config.parallel.tensor) = (4, tensor);
            let model = Model::new(shape_of(&config).expect("a shape of ours"));
            let rates = Rates::of(&config, &model, 1e10, link, host);
            let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
            let hiding = Hiding::of(&config, &model, &plan, &rates, false);
            let hiding = hiding.expect("a schedule of ours");
            assert_eq!(hiding.lane, lane, "{tensor} pieces: {hiding:?}");
            hiding.tokens.expect("it hides") as f64
        };
        let ratio = tokens(4) / tokens(1);
        assert!((0.9..1.2).contains(&ratio), "{lane}: {ratio}");
    }
}

/// The host merges each portion of a gradient once, and reduces the block once more.
#[test]
fn merges_of_portions_take_as_long_as_their_bytes() {
    let mut config = Config::default();
    config.data.train = "random".into();
    (config.model.layers, config.model.heads) = (Some(1), Some(8));
    config.model.hidden = Some(64);
    config.step.micro_batch = config.step.batch;
    config.optimizer.clip_norm = Some(1.0); // updates wait, so blocks are reduced
    let mut seconds = |tensor: u32| {
        (config.parallel.slices, config.parallel.tensor) = (4, tensor);
        let model = Model::new(shape_of(&config).expect("a shape of ours"));
        let rates = Rates::of(&config, &model, 1e12, 1e9, 1e9);
        let forecast = Forecast::of(&config, &model, &rates).expect("a step of ours");
        // Behind the embedding and its positions.
        let of_block = |slice: &&Slice| slice.kind == WorkKind::Reduce && slice.layer == Some(2);
        let reduces = forecast.slices.iter().filter(of_block);
        reduces.map(|slice| slice.took().as_secs_f64()).sum::<f64>()
    };
    let ratio = seconds(4) / seconds(1);
    assert!((1.9..2.1).contains(&ratio), "{ratio}");
}

/// Layers keep activations in what the ceiling leaves, from none to all, and pass none of them over
/// the link. One more would not fit.
#[test]
fn kept_layers_fill_the_ceiling() {
    for (kind, devices) in [
        (ScheduleKind::Relay, 1),
        (ScheduleKind::Relay, 3),
        (ScheduleKind::Resident, 1),
        (ScheduleKind::Gpipe, 2),
        (ScheduleKind::OneForwardOneBackward, 3),
    ] {
        let mut config = Config::default();
        config.data.train = "random".into();
        config.model.layers = Some(7);
        config.model.hidden = Some(32);
        config.model.heads = Some(2);
        config.model.positions = Some(16);
        (config.step.batch, config.step.micro_batch) = (6, 1);
        (config.schedule.kind, config.device.count) = (kind, Some(devices));
        let of = |config: &Config| {
            let model = Model::new(shape_of(config).expect("a shape of ours"));
            Plan::new(config, &model, &config.update_rule()).expect("a plan of ours")
        };
        let unlimited = of(&config);
        assert_eq!(unlimited.keeping, None);
        config.schedule.recompute = true.into();
        let recomputing = of(&config);
        assert_eq!((&unlimited.device, &unlimited.host), (&recomputing.device, &recomputing.host));
        config.schedule.recompute = Recompute::AUTO;
        let mut before = 0;
        for room in 0..=20 {
            limit(&mut config, f64::from(room) / 20.0);
            let plan = of(&config);
            let ceiling = plan.budget().expect("it was set");
            let keeping = plan.keeping.expect("there is a ceiling");
            let Keeping { kept, of, next_bytes, .. } = keeping;
            assert!(plan.device_bytes() <= ceiling, "{kind:?} {keeping:?}");
            let more = next_bytes.map(|next| plan.device_bytes() + next);
            assert!(more.is_none_or(|more| more > ceiling), "{kind:?} {keeping:?}");
            assert!(kept >= before && (next_bytes.is_none() == (kept == of)), "{keeping:?}");
            assert!(room != 0 || kept == 0, "{kind:?} {keeping:?}");
            assert!(room != 20 || kept == of && of >= 7, "{kind:?} {keeping:?}");
            assert_eq!(plan.traffic, recomputing.traffic);
            assert_eq!(plan.host, recomputing.host);
            before = kept;
        }
        config.device.memory = (recomputing.device_bytes() - 4).to_string().parse().expect("some");
        let model = Model::new(shape_of(&config).expect("a shape of ours"));
        let plan = of(&config);
        let misfits = plan.misfits(&model, &config.update_rule(), None);
        assert!(misfits[0].to_string().contains("device.memory is"), "{misfits:?}");
    }
}

/// Workspace grows with a sequence up to the size of chunks, and no further.
#[test]
fn workspace_is_that_of_a_chunk() {
    let workspace = |positions: usize, chunk_positions: usize| {
        let mut config = Config::default();
        config.data.train = "random".into();
        (config.model.hidden, config.model.positions) = (Some(64), Some(1024));
        config.data.sequence_length = Some(positions);
        config.step.chunk_positions = chunk_positions;
        let model = Model::new(shape_of(&config).expect("a shape of ours"));
        let plan = Plan::new(&config, &model, &config.update_rule()).expect("a plan of ours");
        plan.device.iter().find(|term| term.name == "workspace").expect("it has one").bytes
    };
    assert_eq!(workspace(1024, 128), workspace(128, 8192));
    assert!(workspace(1024, 8192) > 4 * workspace(1024, 128));
    assert_eq!(workspace(1024, 1024), workspace(1024, 8192));
}

/// Plain descent: a rule without states.
struct Descent;

impl UpdateRule for Descent {
    fn states(&self) -> usize {
        0
    }

    fn apply(
        &self,
        _: &Tensor,
        masters: Masters<'_>,
        _: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let rate = update.learning_rate as f32;
        masters.join().iter_mut().zip(gradient).for_each(|(p, g)| *p -= rate * g);
    }
}

#[tokio::test]
async fn a_rule_without_states_is_the_same_on_file() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut config = Config::default();
    config.data.train = "random".into();
    config.model.layers = Some(3);
    config.model.hidden = Some(32);
    config.model.heads = Some(2);
    config.model.positions = Some(8);
    config.eps.path = Some(folder.path().into());
    let mut digests = Vec::new();
    for (tier, is_trial) in
        [(EpsTier::Memory, false), (EpsTier::File, true), (EpsTier::File, false)]
    {
        config.eps.tier = tier;
        let mut batches = Batches::open(&config).expect("random data");
        let builder = Trainer::builder(config.clone()).update_rule(Descent);
        let builder = if is_trial { builder.trial() } else { builder };
        let mut trainer = builder.start().await.expect("a case of ours");
        for _ in 0..3 {
            let batch = batches.next().await.expect("random data");
            trainer.step(batch).await.expect("nothing fails here");
        }
        digests.push(trainer.digest().await.expect("nothing fails here"));
        assert_eq!(folder.path().join("blocks").exists(), tier == EpsTier::File && !is_trial);
    }
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
}

/// Apart from their layer, experts take no device memory by their number, nor do layers; the router
/// alone grows by a row an expert. Together, all experts of a layer are there.
#[test]
fn experts_apart_take_the_memory_of_a_bundle() {
    let bytes = |experts: usize, layers: usize, bundles: Option<usize>| {
        let mut config = Config::default();
        config.model.preset = Some("moe-small".into());
        config.model.experts = Some(experts);
        config.model.layers = Some(layers);
        config.data.train = "random".into();
        config.data.sequence_length = Some(128);
        (config.step.batch, config.step.micro_batch) = (8, 2);
        config.schedule.bundles = bundles;
        let model = model_of(&config, shape_of(&config).expect("a shape of ours"));
        let model = model.expect("a model of ours");
        Plan::new(&config, &model, &config.update_rule()).expect("a plan").device_bytes()
    };
    let least = bytes(8, 2, Some(1));
    for experts in [8, 64, 256] {
        let apart = bytes(experts, 2, Some(1));
        assert_eq!(bytes(experts, 48, Some(1)), apart, "{experts} experts");
        // Logits of the two sequences, and the router's weights with their gradients, in each slot.
        let logits = 2 * 128 * (experts - 8) * 4;
        let router = 4 * (experts - 8) * 1024 * 4;
        assert!(apart <= least + (logits + router) as u64, "{experts} experts: {apart} of {least}");
    }
    assert!(bytes(256, 2, None) > 10 * bytes(256, 2, Some(1)));
}
