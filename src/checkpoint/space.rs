//! The disk space of a run's checkpoints: the kept ones, the best one, and the one that is being
//! written before it replaces another.

use std::fs::{self, Metadata};
use std::path::Path;

use super::Keeper;
use crate::config::{ByteSize, Config};
use crate::hf;
use crate::machine;
use crate::models::{BlockTensors, Model, Tensor};
use crate::optimizers::{StateLayout, UpdateRule};
use crate::plan::DiskNeed;

/// The size of a run's checkpoints, and the most that exist at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes of one checkpoint, or a little more, because blocks are counted with the EPS's
    /// padding.
    pub each: u64,
    /// The most checkpoints that exist at once.
    pub count: u64,
    /// Bytes of the largest file of a checkpoint, or a little less: headers are not counted.
    pub largest_file: u64,
}

/// Bytes of the largest file: of the optimizer's states, which are in one file, or of weights.
fn largest_file(config: &Config, model: &Model, layout: &StateLayout) -> u64 {
    const FLOAT: usize = size_of::<f32>();
    let blocks = || model.blocks.iter();
    let of_block = |(nth, block): (usize, &BlockTensors)| {
        let states = (0..block.trained().len()).flat_map(|at| layout.of(nth).of_tensor(at));
        states.map(|(_, range)| range.len()).sum::<usize>()
    };
    let states = FLOAT * blocks().enumerate().map(of_block).sum::<usize>();
    let all = |tensors: fn(&BlockTensors) -> &[Tensor]| -> Vec<usize> {
        blocks().flat_map(tensors).map(|tensor| FLOAT * tensor.len()).collect()
    };
    let trained = all(BlockTensors::trained);
    let weights = match config.train.lora {
        Some(_) => trained.iter().sum(),
        None => {
            let most = hf::shard_bytes(config.checkpoint.shard_size.bytes());
            let files = |sizes: &[usize]| {
                let files = hf::cut_into_files(sizes, most).into_iter();
                files.map(|file| sizes[file].iter().sum::<usize>()).max()
            };
            files(&trained).max(files(&all(BlockTensors::frozen))).unwrap_or(0)
        }
    };
    states.max(weights) as u64
}

impl Space {
    /// The space of a run's checkpoints; `None` if `checkpoint.directory` is not set.
    pub fn of(config: &Config, model: &Model, rule: &dyn UpdateRule) -> Option<Space> {
        config.checkpoint.directory.as_ref()?;
        let all = if config.train.lora.is_some() {
            model.blocks.iter().map(BlockTensors::trained_len).sum::<usize>()
        } else {
            model.blocks.iter().map(BlockTensors::len).sum()
        };
        let layout = StateLayout::new(rule, &model.blocks);
        let states = (0..model.blocks.len()).flat_map(|block| layout.of(block).lens());
        let errors = config.compression().map_or(0, |kind| {
            let kept = |block: u32| {
                let tensors = model.computed_gradient(l2l_actors::schedule::BlockId(block));
                kind.kept(tensors, 0).iter().map(|run| run.len).sum::<usize>()
            };
            let of_group: usize = (0..model.blocks.len() as u32).map(kept).sum();
            of_group * config.parallel.groups as usize
        });
        let trained = model.blocks.iter().map(BlockTensors::trained_len);
        let older = config.schedule.delay().map_or(0, |_| trained.sum());
        let floats = all + states.sum::<usize>() + errors + older;
        let every = config.checkpoint.every_steps;
        let written = match (every, config.step.steps) {
            (None, _) => 1,
            (Some(every), Some(steps)) => steps.div_ceil(every),
            (Some(_), None) => u64::MAX, // The run's length is in epochs.
        };
        let kept = (config.checkpoint.keep as u64).min(written);
        let best = u64::from(config.validation.every_steps.is_some());
        let replaced = u64::from(written > kept || best > 0);
        let count = kept.saturating_add(best + replaced);
        let largest_file = largest_file(config, model, &layout);
        Some(Space { each: (floats * size_of::<f32>()) as u64, count, largest_file })
    }

    /// Bytes of all checkpoints.
    pub fn bytes(&self) -> u64 {
        self.each.saturating_mul(self.count)
    }

    /// The room that they need in a directory. New ones replace those that are there already, after
    /// the first new one was written beside them.
    pub fn need(&self, directory: &Path) -> DiskNeed {
        let there = Keeper::peek(directory).newest_first().unwrap_or_default();
        let files: Vec<Metadata> = there.iter().flat_map(|(_, at)| files_of(at)).collect();
        let replaced = machine::bytes_freed(&files);
        DiskNeed {
            key: "checkpoint.directory",
            place: directory.into(),
            bytes: self.bytes().max(replaced.saturating_add(self.each)),
            replaced,
            term: "checkpoints",
            purpose: format!(
                "up to {} checkpoints of {}, with the one that is being written",
                self.count,
                ByteSize::from(self.each),
            ),
            remedy: "set a smaller checkpoint.keep",
            largest_file: self.largest_file,
        }
    }
}

/// The files of a checkpoint.
fn files_of(directory: &Path) -> Vec<Metadata> {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).filter(Metadata::is_file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::families;

    #[test]
    fn the_space_has_room_for_what_is_kept_and_what_is_written() {
        let model = Model::new(families::gpt2([2, 16, 2, 24, 50, 9]));
        let mut config = Config::default();
        assert_eq!(Space::of(&config, &model, &config.update_rule()), None);
        config.checkpoint.directory = Some("here".into());
        config.step.steps = Some(10);
        let of = |config: &Config| {
            Space::of(config, &model, &config.update_rule()).expect("there is a directory")
        };
        let masters_and_moments = 3 * 4 * model.parameters() as u64;
        let Space { each, count, largest_file } = of(&config);
        assert_eq!(largest_file, 2 * 4 * model.parameters() as u64, "AdamW's two moments");
        assert!((masters_and_moments..masters_and_moments * 101 / 100).contains(&each), "{each}");
        assert_eq!(count, 1);
        config.checkpoint.every_steps = Some(4);
        assert_eq!(of(&config).count, 3); // of steps 4, 8 and 10, two are kept
        config.validation.every_steps = Some(2);
        assert_eq!(of(&config).count, 4);
    }

    /// A file counts once, and only if no other name keeps it. One checkpoint is written before an
    /// old one is removed.
    #[test]
    fn what_is_replaced_is_what_a_removal_frees() {
        let folder = tempfile::tempdir().expect("a place for files");
        let checkpoint = |name: &str| {
            let at = folder.path().join(name);
            fs::create_dir(&at).expect("a folder of ours");
            fs::write(at.join(crate::hf::RECORD), vec![1; 8192]).expect("a folder of ours");
            at.join(crate::hf::RECORD)
        };
        let space = Space { each: 100_000, count: 1, largest_file: 0 };
        assert_eq!(space.need(&folder.path().join("not/yet")).replaced, 0);
        let one = checkpoint("step-00000001");
        let DiskNeed { bytes, replaced, .. } = space.need(folder.path());
        assert!(replaced >= 8192, "{replaced}");
        assert_eq!(bytes, replaced + 100_000);
        let other = checkpoint("best-00000001");
        fs::remove_file(&other).expect("it is ours");
        fs::hard_link(&one, &other).expect("this file system has links");
        assert_eq!(space.need(folder.path()).replaced, replaced, "one file of two names");
        fs::hard_link(&one, folder.path().join("kept")).expect("this file system has links");
        assert_eq!(space.need(folder.path()).replaced, 0, "somebody else keeps it");
    }
}
