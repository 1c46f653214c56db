//! Experts without rows: zero gradients under every rule and compression, steps of few rows, and
//! all rows on one expert.

use std::collections::BTreeMap;

use l2l::config::{CompressionKind, OptimizerKind, ScheduleKind};
use l2l::data::{Batch, Predicts, Sequence};
use l2l::telemetry::samples;
use l2l::{Config, Trainer};

use crate::exact::{Case, SMALL, Ways, baseline, config};

/// Trains steps on the same batch. Gives the digest of the weights, and the metrics after the last
/// step: there is one layer with experts.
async fn train(
    config: Config,
    texts: &[Vec<u32>],
    steps: usize,
) -> (String, BTreeMap<String, f64>) {
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let sequences: Vec<Sequence> = texts.iter().cloned().map(Sequence::plain).collect();
    for step in 0..steps {
        let report = trainer.step(Batch::of(&sequences, Predicts::Next)).await;
        let report = report.expect("nothing fails here");
        assert!(report.loss.is_finite() && report.grad_norm.is_finite(), "{step}: {report:?}");
    }
    let mut told = BTreeMap::new();
    samples(&trainer.watch().view(0), |metric, _, value| {
        told.insert(metric.name.to_string(), value);
    });
    (trainer.digest().await.expect("nothing fails here"), told)
}

/// Nine experts, of which each of two tokens chooses one.
fn few_rows() -> Case {
    Case {
        layers: 1,
        batch: 1,
        micro_batch: 1,
        dropout: 0.0,
        tied_tiles: false,
        experts: Some([9, 1]),
        ..SMALL.clone()
    }
}

/// A gradient that is zero leaves weights finite. The fourth step would have found others.
#[tokio::test]
async fn every_rule_and_compression_takes_idle_experts() {
    let compressions = [
        CompressionKind::None,
        CompressionKind::Int8,
        CompressionKind::TopK,
        CompressionKind::PowerSgd,
    ];
    for rule in OptimizerKind::ALL {
        for kind in compressions {
            let case = Case { rule, ..few_rows() };
            let mut config = config(&case, &baseline());
            config.compression.kind = kind;
            let (_, told) = train(config, &[vec![3, 5, 8]], 4).await;
            assert!(told["l2l_idle_experts"] >= 6.0, "{rule:?} {kind:?}: {told:?}");
        }
    }
}

/// The same bits in every schedule, together and apart, where an expert has a row at most.
#[tokio::test]
async fn steps_of_few_rows_have_the_same_bits_in_every_schedule() {
    let one = vec![vec![7, 9]];
    let several = vec![vec![7, 9], vec![4, 2], vec![9, 9], vec![1, 50]];
    for (texts, per_token) in [(&one, 1), (&one, 9), (&several, 2)] {
        let experts = Some([9, per_token]);
        let case = Case { experts, batch: texts.len(), ..few_rows() };
        let (expected, _) = train(config(&case, &baseline()), texts, 2).await;
        let kinds = [ScheduleKind::Relay, ScheduleKind::Gpipe];
        for (kind, bundles) in kinds.into_iter().flat_map(|kind| [(kind, None), (kind, Some(1))]) {
            let ways = Ways { kind, bundles, recompute: true.into(), ..baseline() }.for_case(&case);
            let (found, _) = train(config(&case, &ways), texts, 2).await;
            assert_eq!(found, expected, "{per_token} {kind:?} {bundles:?}");
        }
    }
}

/// Rows of one token alone are equal in every layer, so all choose the same expert.
#[tokio::test]
async fn one_expert_may_have_all_rows() {
    let texts = vec![vec![6; 7]; 4];
    let case = Case { batch: 4, micro_batch: 2, ..few_rows() };
    let (expected, told) = train(config(&case, &baseline()), &texts, 1).await;
    assert_eq!(told["l2l_expert_load_max_ratio"], 9.0, "{told:?}");
    assert_eq!(told["l2l_idle_experts"], 8.0);
    let ways = Ways { kind: ScheduleKind::Relay, bundles: Some(1), ..baseline() };
    assert_eq!(train(config(&case, &ways), &texts, 1).await.0, expected);
}
