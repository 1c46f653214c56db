//! Forecasts of many ranks: a ring of each kind tells what a ring for every rank would.

use l2l_actors::work::WorkKind;

use super::{Forecast, Rates, Slice};
use crate::config::Config;
use crate::models::Model;
use crate::plan::{Plan, RankShare};
use crate::resolve::shape_of;

fn config(groups: u32) -> Config {
    let mut config = Config::default();
    config.model.layers = Some(2);
    config.data.sequence_length = Some(32);
    (config.step.batch, config.step.micro_batch) = (24, 2);
    config.parallel.groups = groups;
    config
}

fn forecast(config: &Config, share: RankShare, others: &[RankShare]) -> Forecast {
    let model = Model::new(shape_of(config).expect("a shape of ours"));
    let plan = Plan::of_rank(config, &model, &config.update_rule(), share).expect("a plan of ours");
    let rates = Rates::of(config, &model, 1e10, 1e9, 1e9).with_fabric(2e8);
    Forecast::of_shares(config, &model, &plan, &rates, others).expect("a schedule of ours")
}

/// To the nanosecond, with groups that divide and with groups that do not.
#[test]
fn kinds_tell_what_all_ranks_would() {
    for (ranks, groups) in [(2, 2), (2, 3), (3, 4), (5, 5), (4, 6), (6, 7), (8, 8), (8, 12)] {
        let config = config(groups);
        let own = RankShare { rank: 0, ranks };
        let kinds = own.kinds(&config, 24).expect("enough groups");
        let all: Vec<RankShare> = (1..ranks).map(|rank| RankShare { rank, ..own }).collect();
        assert!(kinds.len() < all.len() || ranks == 2, "{kinds:?}");
        let [by_kinds, by_all] = [&kinds, &all].map(|others| forecast(&config, own, others));
        assert_eq!(by_kinds.seconds, by_all.seconds, "{groups} groups on {ranks}");
        let times = |of: &Forecast| -> Vec<_> {
            of.slices.iter().map(|slice| (slice.begin, slice.end)).collect()
        };
        assert_eq!(times(&by_kinds), times(&by_all), "{groups} groups on {ranks}");
    }
}

/// The rank with more groups decides: the others wait for it in their exchanges.
#[test]
fn the_busiest_rank_decides() {
    let config = config(3);
    let own = RankShare { rank: 0, ranks: 2 };
    let busiest = own.busiest(&config, 24).expect("enough groups");
    let other = RankShare { rank: 1 - busiest.rank, ..own };
    let waits = |share: RankShare, other| {
        let found = forecast(&config, share, &[other]);
        (found.seconds, found.exposed_seconds() / found.seconds)
    };
    let (seconds, waited) = waits(busiest, other);
    let (of_other, waited_by_other) = waits(other, busiest);
    assert!((seconds / of_other - 1.0).abs() < 0.02, "{seconds} {of_other}");
    assert!(waited_by_other > waited + 0.2, "{waited} {waited_by_other}");
    assert_eq!(own.kinds(&config, 24).expect("enough groups"), [RankShare { rank: 1, ..own }]);
    let many = RankShare { rank: 0, ranks: 1000 };
    let mut config = config.clone();
    (config.step.batch, config.parallel.groups) = (4000, 1000);
    assert_eq!(many.kinds(&config, 4000).expect("enough groups"), []);
    config.parallel.groups = 1500;
    assert!(many.kinds(&config, 4000).expect("enough groups").len() <= 6);
}

/// Before the embedding's rows are scattered, a rank receives their gradients from all others,
/// whatever it computes itself.
#[test]
fn rows_of_the_embedding_cross_the_fabric() {
    for (ranks, groups) in [(2, 4), (4, 4), (2, 3), (4, 6)] {
        let config = config(groups);
        let own = RankShare { rank: 0, ranks }.busiest(&config, 24).expect("enough groups");
        let found = forecast(&config, own, &[]);
        let hidden = shape_of(&config).expect("a shape of ours").hidden;
        let most = groups.div_ceil(ranks) * 24 / groups;
        let bytes = (24 - most) as usize * 32 * hidden * size_of::<f32>();
        let of_rows = |slice: &&Slice| slice.kind == WorkKind::Exchange && slice.block.is_none();
        let mut took = found.slices.iter().filter(of_rows).map(|slice| slice.took().as_secs_f64());
        let expected = bytes as f64 / 2e8;
        assert!(took.any(|took| (took / expected - 1.0).abs() < 1e-6), "{groups} on {ranks}");
    }
}
