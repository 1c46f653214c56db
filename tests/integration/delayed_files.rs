//! `schedule.delay = 1` with the model on file: a run goes on from its file, and from checkpoints
//! of either tier, as the unbroken one; the file is as large as the plan says; refusals.
//! (`delayed` and `delayed_ranks` compare the bits of both tiers.)

use std::fs;
use std::path::Path;

use l2l::config::{ChannelsConfig, Dtype, EpsTier, MasterDtype, OptimizerKind};
use l2l::{Config, Plan, Trainer, model_of, shape_of};

use crate::delayed::delayed;
use crate::exact::{self, Case, SMALL, Ways, baseline};
use crate::optimizers::{bytes_of, steps};
use crate::rank_files::copy;
use crate::ranks::{Task, on_ranks};
use crate::trained::Trained;
use crate::whole;

fn on_file(config: &Config, folder: &Path) -> Config {
    let mut config = config.clone();
    (config.eps.tier, config.eps.path) = (EpsTier::File, Some(folder.into()));
    config
}

/// Everything and adapters, in f32 and in 16 bits, clipped or not, and a delay that begins later.
fn some() -> Vec<(Case, Option<u64>)> {
    let split = (Dtype::Bf16, MasterDtype::Split);
    let copied = (Dtype::Bf16, MasterDtype::F32);
    let tiles = Case { tied_tiles: true, precision: copied, ..SMALL.clone() };
    let mut some = vec![
        (SMALL.clone(), None),
        (Case { clip: true, precision: split, rule: OptimizerKind::Muon, ..SMALL.clone() }, None),
        (Case { trained: Trained::ALL[1], precision: split, ..SMALL.clone() }, Some(2)),
    ];
    some.extend(whole().then_some((tiles, None))); // of a large vocabulary
    some
}

/// A run that ends and goes on from its file, again and again, after each step; its checkpoints are
/// those of a run in memory, and a run in memory goes on from them, and one on file from those.
#[test]
fn a_run_goes_on_from_its_file_at_any_step() {
    const STEPS: usize = 6;
    for (nth, (case, after)) in some().into_iter().enumerate() {
        let folder = tempfile::tempdir().expect("a place for files");
        let at = |name: &str| folder.path().join(name);
        let memory = delayed(&case, &baseline(), after);
        let file = on_file(&memory, &at("eps"));
        let of =
            |config: &Config, steps| Task { evaluates: true, ..Task::new(config.clone(), steps) };
        let (bits, unbroken) = of(&memory, STEPS).run(None).expect("a case of ours");
        let check = |task: Task| {
            let from = task.from;
            let steps = task.steps;
            let (found, summary) = task.run(None).expect("a case of ours");
            // An evaluation has seen the batches since the run began.
            let of_steps =
                |bits: &[[u64; 3]]| bits.iter().map(|it| [it[0], it[1]]).collect::<Vec<_>>();
            assert_eq!(of_steps(&found), of_steps(&bits[from..from + steps]), "{nth} {from}");
            if from + steps == STEPS {
                assert_eq!(summary.weights_digest, unbroken.weights_digest, "{nth} {from}");
            }
        };
        check(Task { leaves: Some(at("memory")), ..of(&memory, 3) });
        for from in 0..STEPS {
            let leaves = (from == 2).then(|| at("file"));
            check(Task { from, resumes_file: from > 0, leaves, ..of(&file, 1) });
        }
        for entry in fs::read_dir(at("memory")).expect("it was written").flatten() {
            let name = entry.file_name().into_string().expect("a name of ours");
            if name.ends_with(".safetensors") {
                let [one, other] = ["memory", "file"].map(|of| bytes_of(&at(of), &name));
                assert!(one == other, "{nth}: {name}");
            }
        }
        let resumes = |name: &str| Some(at(name));
        check(Task { from: 3, resumes: resumes("file"), ..of(&memory, 3) });
        let again = on_file(&memory, &at("again"));
        check(Task { from: 3, resumes: resumes("memory"), ..of(&again, 1) });
        check(Task { from: 4, resumes_file: true, ..of(&again, 2) });
    }
}

/// Each rank has its parts of both versions on a file of its own, and a run goes on from these:
/// also where a kill left some ranks one step ahead of the others.
#[test]
fn a_run_goes_on_from_the_files_of_its_ranks() {
    let case = Case { batch: 8, micro_batch: 2, groups: 4, ..SMALL.clone() };
    let folder = tempfile::tempdir().expect("a place for files");
    let config = delayed(&case, &baseline(), None);
    let (bits, whole) = Task::new(config.clone(), 6).run(None).expect("a case of ours");
    let run = |at: &Path, from: usize, steps: usize| {
        let config = on_file(&config, at);
        let task = Task { from, resumes_file: from > 0, ..Task::new(config, steps) };
        for (seen, _) in on_ranks(3, |_| task.clone()) {
            let (found, summary) = seen.expect("a case of ours");
            assert_eq!(found, bits[from..from + steps]);
            if from + steps == 6 {
                assert_eq!(summary.weights_digest, whole.weights_digest);
            }
        }
    };
    let [place, before, late] = ["run", "before", "late"].map(|name| folder.path().join(name));
    run(&place, 0, 3);
    copy(&place, &before);
    run(&place, 3, 1);
    // Rank 1 was killed before it sealed the last step.
    copy(&place, &late);
    copy(&before.join("rank-1"), &late.join("rank-1"));
    run(&late, 3, 3);
    run(&place, 4, 2);
}

/// The file has the trained weights of the version before in each copy, and an update writes them.
#[tokio::test]
async fn the_plan_says_what_the_file_takes() {
    for (case, _) in some() {
        let folder = tempfile::tempdir().expect("a place for files");
        let of = |delay| {
            let mut config = on_file(&delayed(&case, &baseline(), None), folder.path());
            config.schedule.delay = delay;
            config.optimizer.clip_norm = Some(1.0); // both have regions
            config
        };
        let plan = |config: &Config| {
            let model = model_of(config, shape_of(config).expect("ours")).expect("ours");
            Plan::new(config, &model, &config.update_rule()).expect("a plan of ours")
        };
        let [without, with] = [plan(&of(0)), plan(&of(1))];
        let model = model_of(&of(1), shape_of(&of(1)).expect("ours")).expect("ours");
        let trained: usize = model.blocks.iter().map(|block| block.trained_len()).sum();
        let sent = (trained * case.precision.0.size()) as u64;
        assert_eq!(with.traffic.read_bytes, without.traffic.read_bytes);
        assert_eq!(with.traffic.written_bytes, without.traffic.written_bytes + sent);
        let more = with.file_bytes() - without.file_bytes();
        let pages = 2 * 4096 * model.blocks.len() as u64;
        assert!((2 * sent..=2 * sent + pages).contains(&more), "{more} {sent}");
        let mut trainer = Trainer::start(of(1)).await.expect("a run of ours");
        steps(&mut trainer, 0, 2).await;
        trainer.stop().await.expect("nothing fails here");
        let file = fs::metadata(folder.path().join("blocks")).expect("it is there");
        assert_eq!(file.len(), with.file_bytes());
    }
}

/// A file has another layout with a delay. A checkpoint takes a run from one to the other.
#[tokio::test]
async fn a_file_of_the_other_delay_is_refused() {
    for (first, second) in [(0, 1), (1, 0)] {
        let folder = tempfile::tempdir().expect("a place for files");
        let of = |delay| {
            let config = delayed(&SMALL, &Ways { on_file: true, ..baseline() }, None);
            let mut config = on_file(&config, &folder.path().join("eps"));
            config.schedule.delay = delay;
            config
        };
        let mut trainer = Trainer::start(of(first)).await.expect("a run of ours");
        steps(&mut trainer, 0, 2).await;
        let place = folder.path().join("checkpoint");
        trainer.checkpoint(&place).await.expect("a directory of ours");
        trainer.stop().await.expect("nothing fails here");
        let refused = Trainer::builder(of(second)).resume_file().start().await;
        let refused = refused.map(drop).expect_err("another rule").to_string();
        assert!(refused.contains("schedule.delay was"), "{refused}");
        let refused = Trainer::builder(of(second)).resume_file().with_changes().start().await;
        let refused = refused.map(drop).expect_err("another layout").to_string();
        assert!(refused.contains("of another schedule.delay"), "{refused}");
        let changed = Trainer::builder(of(second)).resume(&place).with_changes().start().await;
        let mut changed = changed.expect("a change that may be");
        let says = changed.changes().join("; ");
        assert_eq!(says.contains("no older.safetensors"), second == 1, "{says}");
        steps(&mut changed, 2, 4).await;
    }
}

/// A step carries blocks of layers that it leaves out, while their last update may be on its way.
#[test]
fn layers_that_a_step_leaves_out_are_carried() {
    let case = Case { layers: 6, ..SMALL.clone() };
    let of = |ways: &Ways| {
        let mut config = delayed(&case, ways, None);
        config.depth.drop = 0.6;
        exact::run(config, 8)
    };
    let (bits, whole) = of(&baseline());
    let least = ChannelsConfig { weights: 1, gradients: 1, reduced: 1, stash: 1 };
    for channels in [baseline().channels, least] {
        let (found, summary) = of(&Ways { on_file: true, channels, ..baseline() });
        assert_eq!(found, bits);
        assert_eq!(summary.weights_digest, whole.weights_digest);
    }
}
