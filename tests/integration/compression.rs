//! Compression: of the stash, of gradients on their way to the host and to other ranks. Beside the
//! random cases of `exact.rs` and `ranks.rs`, which draw them all: what they save, what resumes,
//! what is refused.

use l2l::config::{
    CompressionKind, Dtype, EpsTier, GradientDtype, LoraConfig, NonFinite, Recompute, StashDtype,
    StashPlace,
};
use l2l::models::Model;
use l2l::plan::{FabricBytes, RankShare};
use l2l::{Config, Plan, shape_of};
use proptest::prelude::*;

use crate::balanced::Routers;
use crate::exact::{self, Case, SMALL, baseline, run};
use crate::pytorch::case;
use crate::ranks::{Task, check_resumed, on_ranks, refused, relay};
use crate::trained::Trained;

/// What boundaries are in the stash; gradients on their way to the host; and what they become.
pub(crate) type Encodings = (StashDtype, GradientDtype, CompressionKind);

/// What a case changes of a config.
type Change<'c> = &'c dyn Fn(&mut Config);

const KINDS: [CompressionKind; 3] =
    [CompressionKind::Int8, CompressionKind::TopK, CompressionKind::PowerSgd];

/// Any encodings, every second time without compression.
pub(crate) fn encodings() -> impl Strategy<Value = Encodings> {
    let stashes = prop::sample::select(vec![StashDtype::F32, StashDtype::Bf16, StashDtype::Int8]);
    let gradients = prop::sample::select(vec![GradientDtype::F32, GradientDtype::Bf16]);
    let kinds = prop::option::of(prop::sample::select(KINDS.to_vec()));
    let kinds = kinds.prop_map(|kind| kind.unwrap_or(CompressionKind::None));
    (stashes, gradients, kinds)
}

/// The nearest case that can be run: a step of f16 may be skipped, and PowerSGD is for matrices.
pub(crate) fn possible(mut case: Case) -> Case {
    let can_have_factors = match case.trained {
        Trained::Biases | Trained::Last => false,
        Trained::Upper => case.layers > 1,
        // The adapters of the first block's attention have rank 2: factors of 2 would be larger.
        Trained::AdaptersAndNorms => case.experts.is_none() || case.layers > 1,
        _ => true,
    };
    let kind = &mut case.encodings.2;
    if case.precision.0 == Dtype::F16 {
        *kind = CompressionKind::None;
    } else if *kind == CompressionKind::PowerSgd && !can_have_factors {
        *kind = CompressionKind::Int8;
    }
    if *kind != CompressionKind::None && case.routers == Routers::Kept {
        case.routers = Routers::Plain;
    }
    case
}

/// A relay of eight sequences in groups, with compression.
fn compressed(kind: CompressionKind, groups: u32) -> Config {
    let mut config = relay(groups, 1);
    config.compression.kind = kind;
    (config.compression.rank, config.compression.density) = (2, 0.1);
    config
}

/// What a rank sends is the plan's for every kind, and less than without.
#[test]
fn ranks_send_the_plans_bytes() {
    const STEPS: u64 = 2;
    for ranks in [2, 4] {
        let sent = |kind| -> Vec<[u64; 2]> {
            let task = |_| Task::new(compressed(kind, ranks), STEPS as usize);
            on_ranks(ranks, task).into_iter().map(|(_, sent)| [sent[1], sent[2]]).collect()
        };
        let exact = sent(CompressionKind::None);
        for kind in KINDS {
            let config = compressed(kind, ranks);
            let model = Model::new(shape_of(&config).expect("a shape of ours"));
            for ((rank, found), exact) in (0..ranks).zip(sent(kind)).zip(&exact) {
                let share = RankShare { rank, ranks };
                let plan = Plan::of_rank(&config, &model, &config.update_rule(), share);
                let FabricBytes { blocks, gradients } =
                    plan.expect("a plan of ours").traffic.fabric_bytes;
                let rows = u64::from(8 / ranks * 7 * 24 * 4 * (ranks - 1));
                assert_eq!(found, [STEPS * blocks, STEPS * (gradients + rows)], "{kind:?}");
                assert!(found[1] < exact[1], "{kind:?}: {found:?} of {exact:?}");
            }
        }
    }
}

/// A run that resumes, on as many processes or on one, has the errors of one that did not stop.
#[test]
fn a_resumed_run_has_its_errors() {
    for kind in KINDS {
        check_resumed(&compressed(kind, 2), &[2, 1, 2], |_| ());
    }
}

/// Each kind changes what is learnt, and trains nearly as well.
#[test]
fn losses_fall_nearly_as_without() {
    let last = |kind, gradient_dtype, stash| {
        let mut config = exact::config(&Case { dropout: 0.0, ..SMALL.clone() }, &baseline());
        config.data.train = "random".into();
        (config.stash.dtype, config.device.gradient_dtype) = (stash, gradient_dtype);
        (config.compression.kind, config.compression.rank) = (kind, 2);
        config.compression.density = 0.1;
        let (bits, ending) = run(config, 8);
        let losses: Vec<f64> = bits.iter().map(|(loss, _)| f64::from_bits(*loss)).collect();
        (losses, ending.weights_digest)
    };
    let f32 = StashDtype::F32;
    let int8 = StashDtype::Int8;
    let (expected, exact) = last(CompressionKind::None, GradientDtype::F32, f32);
    let others = [
        (CompressionKind::None, GradientDtype::Bf16, f32, 1e-2),
        (CompressionKind::None, GradientDtype::F32, int8, 2e-2),
        (CompressionKind::Int8, GradientDtype::F32, f32, 2e-2),
        (CompressionKind::TopK, GradientDtype::F32, f32, 2e-1),
        (CompressionKind::PowerSgd, GradientDtype::F32, f32, 2e-1),
    ];
    for (kind, gradient, stash, most) in others {
        let (losses, digest) = last(kind, gradient, stash);
        assert_ne!(digest, exact);
        let off = losses.iter().zip(&expected).map(|(loss, exact)| (loss - exact).abs());
        let off = off.fold(0.0, f64::max);
        println!("{kind:?} {gradient:?} {stash:?}: {off:.1e}");
        assert!(off < most, "{kind:?} {gradient:?} {stash:?}: {losses:?} {expected:?}");
    }
}

/// Positive numbers and their places are all that a ReLU's backward reads: with them alone in the
/// stash, an OPT is the same to the bit, whether there is room for all of them or for few, and the
/// link moves fewer bytes, as many as the plan says.
#[test]
fn packed_relus_give_the_same_bits() {
    let frozen = |config: &mut Config| config.train.frozen = vec!["fc2.weight".into()];
    let adapters = |config: &mut Config| {
        let targets = Some(vec!["q_proj".into(), "fc1".into()]);
        config.train.lora = Some(LoraConfig { targets, ..LoraConfig::default() });
    };
    let in_halves = |config: &mut Config| config.device.dtype = Dtype::Bf16;
    let changes: [(Change<'_>, bool); 4] =
        [(&|_| (), false), (&frozen, true), (&adapters, true), (&in_halves, false)];
    for recompute in [Recompute::from(false), Recompute::ATTENTION] {
        for (change, signs_alone) in changes {
            let of = |density: Option<f64>, devices: u32| {
                let (mut config, _) = case("opt");
                // All sequences have one length, so each step moves the plan's bytes.
                (config.data.train, config.data.sequence_length) = ("random".into(), Some(9));
                config.schedule.recompute = recompute;
                config.stash.place = StashPlace::Host;
                config.device.count = Some(devices);
                change(&mut config);
                config.stash.relu_density = density;
                let planned = exact::planned(&config, 4);
                let (bits, ending) = run(config, 4);
                assert_eq!(ending.summary.links, planned);
                (bits, ending.weights_digest.clone(), ending.summary.bytes_downloaded)
            };
            let all = of(None, 1);
            let packed = [of(Some(0.85), 1), of(Some(0.6), 2), of(Some(0.02), 1)];
            for packed in &packed {
                assert_eq!((&packed.0, &packed.1), (&all.0, &all.1));
            }
            let [whole, some, few] = packed.map(|packed| packed.2);
            if signs_alone {
                assert!(whole == some && some == few && few < all.2, "{few} of {}", all.2);
            } else {
                assert!(few < some && some < all.2.min(whole), "{few}, {some}, {whole}");
            }
        }
    }
}

/// What does not apply is refused, with the nearest that works.
#[test]
fn what_does_not_apply_is_refused() {
    let says = |change: &dyn Fn(&mut Config)| {
        let mut config = compressed(CompressionKind::PowerSgd, 2);
        change(&mut config);
        let task = Task::new(config, 1);
        task.run(None).expect_err("it is refused").to_string()
    };
    let cases: [(Change<'_>, &str); 11] = [
        (&|c| c.compression.rank = 20, "compression.rank is 20, and factors of more than 19 "),
        (&|c| c.compression.rank = 0, "compression.rank must be at least 1"),
        (&|c| c.compression.density = 0.7, "compression.density must be in (0, 0.5]"),
        (&|c| c.compression.block_size = 100, "a divisor of 16384 from 2 on: set 64"),
        (&|c| c.train.only = vec!["bias".into()], "no matrix is trained: set compression.kind ="),
        (
            &|c| (c.eps.tier, c.eps.path) = (EpsTier::File, Some("eps".into())),
            "eps.tier is file, and compression keeps the errors",
        ),
        (
            &|c| c.step.non_finite = NonFinite::Skip,
            "step.non_finite skips steps whose gradient is not finite",
        ),
        (&|c| c.device.dtype = Dtype::F16, "device.dtype skips steps whose gradient is not finite"),
        (
            &|c| (c.stash.dtype, c.stash.block_size) = (StashDtype::Int8, 7),
            "stash.block_size is 7, which does not divide the model's width of 24: set 6",
        ),
        (
            &|c| c.stash.relu_density = Some(0.5),
            "stash.relu_density is for feed-forwards of ReLU, and this model has \"gelu_new\"",
        ),
        (
            &|c| (c.stash.relu_density, c.schedule.recompute) = (Some(0.5), true.into()),
            "stash.relu_density has no effect while everything is recomputed",
        ),
    ];
    for (change, expected) in cases {
        let found = says(change);
        assert!(found.contains(expected), "{found}");
    }
    for says in refused(2, |_| Task::new(compressed(CompressionKind::Int8, 4), 1)) {
        assert!(says.contains("parallel.groups is 4, and with compression each of 2"), "{says}");
    }
}
