//! Models of every family, in ways drawn at random: the same bits.

use l2l::config::EpsTier;
use l2l::shape_of;
use proptest::prelude::*;

use crate::exact::run;
use crate::pytorch::{self, EXPERTS, FAMILIES};
use crate::ways::{baseline, ways};
use crate::whole;

fn all() -> Vec<&'static str> {
    FAMILIES.into_iter().chain(EXPERTS).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if whole() { 500 } else { 60 })
    })]

    #[test]
    fn every_family_has_the_same_bits_in_every_way(
        name in prop::sample::select(all()),
        ways in ways(),
    ) {
        const STEPS: usize = 2;
        let (mut config, _) = pytorch::case(name);
        let shape = shape_of(&config).expect("a case of ours");
        let turns = config.step.batch.div_ceil(config.step.micro_batch) as u32;
        let has_experts = shape.experts.is_some();
        // Behind the blocks come a norm and the head.
        let ways = ways.for_sizes(shape.layers as u32 + 2, turns, 1);
        baseline().set(&mut config, has_experts);
        let (expected, reference) = run(config.clone(), STEPS);
        ways.set(&mut config, has_experts);
        config.eps.tier = if ways.on_file { EpsTier::File } else { EpsTier::Memory };
        let (bits, summary) = run(config, STEPS);
        prop_assert_eq!(bits, expected, "{}", name);
        prop_assert_eq!(summary.weights_digest, reference.weights_digest, "{}", name);
    }
}
