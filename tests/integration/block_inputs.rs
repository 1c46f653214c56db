//! Models whose blocks have inputs of their own, and keys and values of other blocks: on ranks,
//! with a delay, and in steps that would leave some blocks out.

use l2l::Trainer;
use l2l::config::{EpsTier, ScheduleKind, StashDtype};
use l2l::data::Batches;
use l2l::models::LayerSelection;

use crate::exact::run;
use crate::pytorch::case;
use crate::ranks::{Task, on_ranks};

const NAMES: [&str; 2] = ["gemma4_text-inputs", "gemma4_text-shared"];

/// Ranks exchange the gradients of both tables' rows, however the stash packs them.
#[test]
fn ranks_share_both_tables() {
    for name in NAMES {
        for dtype in [StashDtype::F32, StashDtype::Bf16, StashDtype::Int8] {
            let (mut config, _) = case(name);
            (config.step.micro_batch, config.parallel.groups) = (3, 2);
            config.train.neftune_alpha = 5.0;
            (config.stash.dtype, config.stash.block_size) = (dtype, 16);
            let task = || Task::new(config.clone(), 2);
            let (expected, reference) = task().run(None).expect("a case of ours");
            for (seen, _) in on_ranks(2, |_| task()) {
                let (bits, summary) = seen.expect("a case of ours");
                assert_eq!(bits, expected, "{name} {dtype:?}");
                assert_eq!(summary.weights_digest, reference.weights_digest, "{name} {dtype:?}");
            }
        }
    }
}

/// With a delay, tiles of both tables are there twice.
#[test]
fn a_delay_is_the_same_in_every_place() {
    for name in NAMES {
        let (mut config, _) = case(name);
        config.schedule.delay = 1;
        let (expected, _) = run(config.clone(), 3);
        config.schedule.kind = ScheduleKind::Resident;
        config.eps.tier = EpsTier::File;
        assert_eq!(run(config, 3).0, expected, "{name}");
    }
}

/// No step leaves out a block whose keys and values others read, or which has an input.
#[tokio::test]
async fn all_blocks_stay() {
    let (mut config, _) = case(NAMES[0]);
    let mut batches = Batches::open(&config).expect("it is committed");
    let mut trainer = Trainer::start(config.clone()).await.expect("a case of ours");
    let batch = batches.next().await.expect("good data");
    let refused = trainer.step_with(batch, &LayerSelection::of([0])).await;
    let error = refused.expect_err("no layer can be left out").to_string();
    assert!(error.contains("layer 0 is selected, and the model has no layers"), "{error}");
    config.depth.drop = 0.5;
    let error = Trainer::start(config).await.map(|_| ()).expect_err("it is refused").to_string();
    assert!(error.contains("depth.drop is 0.5, and no block of this model"), "{error}");
}
