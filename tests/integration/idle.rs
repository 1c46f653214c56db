//! Experts without rows: they cross no link, and nothing reads their slots. In builds with debug
//! assertions such a slot holds NaN, so that all tests of results see a kernel that reads it.

use l2l::config::{
    ChannelsConfig, CompressionKind, Dtype, GradientDtype, MasterDtype, ScheduleKind, StashDtype,
    StashPlace,
};
use l2l::data::Batches;
use l2l::models::Base;
use l2l::plan::LinkBytes;
use l2l::{Config, Trainer};

use crate::balanced::Routers;
use crate::exact::{Case, SMALL, Ways, baseline, config, planned, run};
use crate::trained::Trained;

/// Bytes of an expert in f32: three matrices of 14 × 24.
const EXPERT: u64 = 3 * 14 * 24 * 4;

/// A bundle a visit, in one slot: each block is uploaded once a pass.
fn apart() -> Ways {
    Ways {
        kind: ScheduleKind::Relay,
        channels: ChannelsConfig { weights: 1, ..baseline().channels },
        place: StashPlace::Host,
        recompute: true.into(),
        bundles: Some(1),
        ..baseline()
    }
}

/// Sequences of 7 tokens, each of which chooses one of 16 experts.
fn case(batch: usize) -> Case {
    Case { layers: 2, batch, experts: Some([16, 1]), dropout: 0.0, ..SMALL.clone() }
}

/// The experts of all layers that had no row, of three steps, and the bytes of the run.
async fn idle(config: Config) -> (u64, LinkBytes) {
    let mut batches = Batches::open(&config).expect("random data");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let mut idle = 0;
    for _ in 0..3 {
        let batch = batches.next().await.expect("random data");
        trainer.step(batch).await.expect("nothing fails here");
        let layers = trainer.watch().view(1).routers;
        assert_eq!(layers.len(), 2);
        idle += layers.iter().map(|layer| layer.idle as u64).sum::<u64>();
    }
    let summary = trainer.stop().await.expect("nothing fails here");
    (idle, summary.links[0])
}

/// The plan counts all experts. Of few rows, the forward pass waits for their choice. Of more rows
/// it does not, and the backward pass knows which experts are idle.
#[tokio::test]
async fn bytes_are_the_plans_less_those_of_idle_experts() {
    for (batch, cut_uploads) in [(1, 2), (4, 2), (5, 1)] {
        let config = config(&case(batch), &apart());
        let all = planned(&config, 3)[0];
        let (idle, moved) = idle(config).await;
        assert!(idle > 0, "{batch} sequences leave no expert idle");
        let expected = LinkBytes {
            upload: all.upload - cut_uploads * idle * EXPERT,
            download: all.download - idle * EXPERT,
            peers: 0,
        };
        assert_eq!(moved, expected, "{batch} sequences");
    }
}

/// Weights and gradients of every layout, eager and deferred updates, groups, file, link.
#[test]
fn idle_experts_change_no_bits() {
    let plain = || case(2);
    let encoded = |gradient, kind| (StashDtype::F32, gradient, kind);
    let adapters = |base, precision| {
        let trained = Trained::Adapters;
        Case { trained, base, precision, ..plain() }
    };
    let halves = |masters| (Dtype::Bf16, masters);
    let cases = [
        plain(),
        Case { clip: true, ..plain() },
        Case { batch: 6, groups: 3, ..plain() },
        Case { routers: Routers::Kept, ..plain() },
        Case { routers: Routers::Kept, batch: 6, groups: 3, clip: true, ..plain() },
        Case { gpt_oss: true, experts: Some([9, 2]), ..plain() },
        Case { precision: halves(MasterDtype::Split), ..plain() },
        Case { precision: halves(MasterDtype::Bf16), batch: 7, ..plain() },
        Case { encodings: encoded(GradientDtype::Bf16, CompressionKind::None), ..plain() },
        Case { encodings: encoded(GradientDtype::F32, CompressionKind::PowerSgd), ..plain() },
        adapters(Base::AsIs, SMALL.precision),
        adapters(Base::Bf16, SMALL.precision),
        adapters(Base::Int8, halves(MasterDtype::Split)),
        adapters(Base::Nf4, halves(MasterDtype::F32)),
    ];
    for case in cases {
        let expected = run(config(&case, &baseline()), 3);
        let ways = [apart(), Ways { on_file: true, ..apart() }, Ways { link: true, ..apart() }];
        for ways in ways {
            let ways = Ways { channels: ChannelsConfig { weights: 3, ..ways.channels }, ..ways };
            let config = config(&case, &ways);
            let all = planned(&config, 3)[0].upload;
            let (bits, summary) = run(config, 3);
            assert_eq!(bits, expected.0, "{case:?} {ways:?}");
            assert_eq!(summary.weights_digest, expected.1.weights_digest, "{case:?} {ways:?}");
            assert!(summary.links[0].upload < all, "{case:?} {ways:?}");
        }
    }
}

/// The loss of an evaluation of 7 rows, and the bytes that it uploads.
async fn evaluated(config: &Config) -> (u64, u64) {
    let mut batches = Batches::open(config).expect("random data");
    let batch = batches.next().await.expect("random data");
    let mut uploaded = [0, 0];
    let mut loss = 0;
    for (evaluations, uploaded) in uploaded.iter_mut().enumerate() {
        let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
        trainer.step(batch.clone()).await.expect("nothing fails here");
        for _ in 0..evaluations {
            let evaluation = trainer.evaluate([Ok(batch.clone())]).await;
            loss = evaluation.expect("nothing fails here").loss.to_bits();
        }
        *uploaded = trainer.stop().await.expect("nothing fails here").bytes_uploaded;
    }
    let [without, with] = uploaded;
    (loss, with - without)
}

#[tokio::test]
async fn an_evaluation_of_few_rows_uploads_few_experts() {
    let together = Ways { bundles: None, ..apart() };
    let (expected, all) = evaluated(&config(&case(1), &together)).await;
    let (loss, some) = evaluated(&config(&case(1), &apart())).await;
    assert_eq!(loss, expected);
    let idle = 2 * (16 - 7);
    assert!(some + idle * EXPERT <= all, "{some} of {all}");
}
