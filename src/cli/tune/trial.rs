//! The settings that `l2l tune` varies, and the comparison of their trials.

use l2l::config::{Deal, ParallelConfig, ScheduleKind, StashPlace, StepConfig, Transfer};
use l2l::models::Shape;
use l2l::plan::Term;
use l2l::{Bottleneck, Config};
use serde_json::json;

/// The settings that are tuned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Settings {
    pub(super) micro_batch: usize,
    /// The most positions of a chunk.
    pub(super) chunk: usize,
    pub(super) place: StashPlace,
    /// Weights, gradients, reduced, stash.
    pub(super) depths: [u32; 4],
    /// The way in which several devices share a step.
    pub(super) layout: Layout,
}

/// The way in which devices share a step. It does not change the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::cli) struct Layout {
    pub(super) kind: ScheduleKind,
    pub(super) deal: Deal,
    pub(super) transfer: Transfer,
}

impl Layout {
    fn of(config: &Config) -> Layout {
        let ParallelConfig { deal, transfer, .. } = config.parallel;
        Layout { kind: config.schedule.kind, deal, transfer }
    }

    /// The layouts to try with a config, its own first. A config with keys that belong to one
    /// layout (a file, chunks, weights) keeps its layout.
    pub(in crate::cli) fn all(config: &Config) -> Vec<Layout> {
        let own = Layout::of(config);
        let is_bound = own.kind == ScheduleKind::File
            || own.kind.of_windows().is_some()
            || config.schedule.chunks.is_some()
            || config.parallel.weights.is_some();
        let mut all = vec![own];
        if config.devices() > 1 && !is_bound {
            let of = |kind, deal| Layout { kind, deal, transfer: Transfer::Whole };
            let by_sequences = of(ScheduleKind::Relay, Deal::Sequences);
            let others = [
                of(ScheduleKind::Relay, Deal::Layers),
                by_sequences,
                Layout { transfer: Transfer::Sharded, ..by_sequences },
                of(ScheduleKind::Gpipe, Deal::Layers),
                of(ScheduleKind::OneForwardOneBackward, Deal::Layers),
                of(ScheduleKind::Interleaved, Deal::Layers),
            ];
            all.extend(others.into_iter().filter(|&layout| layout != own));
        }
        all
    }

    /// Sets a config's layout.
    pub(in crate::cli) fn set(self, config: &mut Config) {
        (config.schedule.kind, config.parallel.deal) = (self.kind, self.deal);
        config.parallel.transfer = self.transfer;
    }

    /// The values of `schedule.kind`, `parallel.deal` and `parallel.transfer`, as the config has
    /// them.
    pub(super) fn names(&self) -> [String; 3] {
        let Layout { kind, deal, transfer } = self;
        [json!(kind), json!(deal), json!(transfer)]
            .map(|value| value.as_str().expect("the value of a key is text").to_string())
    }
}

/// The trials of one candidate.
pub(super) struct Trial {
    pub(super) settings: Settings,
    /// Seconds of a step by simulation, in the first round.
    pub(super) predicted: Option<f64>,
    pub(super) device_bytes: u64,
    /// The plan's terms that grow with depth: the bytes that each further layer adds.
    pub(super) growth: Vec<Term>,
    /// Seconds of a step in each round.
    pub(super) seconds: Vec<f64>,
    pub(super) bottleneck: Bottleneck,
    /// The share of a step in which the device waited.
    pub(super) exposed: f64,
}

impl Settings {
    pub(super) fn of(config: &Config) -> Settings {
        // Where nothing is copied, "auto" is "host".
        let place = match config.stash.place {
            StashPlace::Auto if !config.has_link() => StashPlace::Host,
            place => place,
        };
        let depths = &config.channels;
        let depths = [depths.weights, depths.gradients, depths.reduced, depths.stash];
        let layout = Layout::of(config);
        let StepConfig { micro_batch, chunk_positions: chunk, .. } = config.step;
        Settings { micro_batch, chunk, place, depths, layout }
    }

    pub(super) fn on(&self, config: &Config) -> Config {
        let mut config = config.clone();
        config.step.micro_batch = self.micro_batch;
        config.step.chunk_positions = self.chunk;
        config.stash.place = self.place;
        self.layout.set(&mut config);
        let channels = &mut config.channels;
        [channels.weights, channels.gradients, channels.reduced, channels.stash] = self.depths;
        config
    }

    /// The tuned keys with their values.
    fn keys(&self) -> [Key; 10] {
        let [weights, gradients, reduced, stash] = self.depths.map(i64::from);
        let [kind, deal, transfer] = self.layout.names();
        let key = |section, name, value| Key { section, name, value };
        [
            key("step", "micro_batch", (self.micro_batch as i64).into()),
            key("step", "chunk_positions", (self.chunk as i64).into()),
            key("stash", "place", self.place_key().into()),
            key("channels", "weights", weights.into()),
            key("channels", "gradients", gradients.into()),
            key("channels", "reduced", reduced.into()),
            key("channels", "stash", stash.into()),
            key("schedule", "kind", kind.into()),
            key("parallel", "deal", deal.into()),
            key("parallel", "transfer", transfer.into()),
        ]
    }

    /// The keys in which these settings differ from others.
    pub(super) fn changes(&self, from: &Settings) -> impl Iterator<Item = Key> {
        let both = self.keys().into_iter().zip(from.keys());
        let changed = both.filter(|(to, from)| to.value.to_string() != from.value.to_string());
        changed.map(|(to, _)| to)
    }

    fn place_key(&self) -> &'static str {
        match self.place {
            StashPlace::Auto => "auto",
            StashPlace::Device => "device",
            StashPlace::Host => "host",
        }
    }

    fn place_name(&self) -> &'static str {
        if self.place == StashPlace::Device { "device" } else { "host" }
    }
}

/// A key of the config and its value.
pub(super) struct Key {
    pub(super) section: &'static str,
    pub(super) name: &'static str,
    pub(super) value: toml_edit::Value,
}

impl std::fmt::Display for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [weights, gradients, reduced, stash] = self.depths;
        write!(
            f,
            "weights {weights}, gradients {gradients}, reduced {reduced}, stash {stash} on the {}, \
             micro-batch {}",
            self.place_name(),
            self.micro_batch
        )?;
        if self.chunk != Shape::CHUNK_POSITIONS {
            write!(f, ", chunks of {}", self.chunk)?;
        }
        match (self.layout.kind, self.layout.deal) {
            (ScheduleKind::Relay, Deal::Layers) => Ok(()),
            _ => write!(f, ", {}", self.layout),
        }
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.names()[0])?;
        match (self.kind, self.deal, self.transfer) {
            (ScheduleKind::Relay, Deal::Layers, _) => f.write_str(", layers dealt"),
            (_, Deal::Layers, _) => Ok(()),
            (_, Deal::Sequences, Transfer::Sharded) => {
                f.write_str(", sequences dealt, blocks in shards")
            }
            (_, Deal::Sequences, _) => f.write_str(", sequences dealt"),
        }
    }
}

impl Trial {
    pub(super) fn median(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    }

    /// Bytes of the device that each further layer of the model adds.
    pub(super) fn device_bytes_a_layer(&self) -> u64 {
        self.growth.iter().map(|term| term.bytes).sum()
    }

    /// Half the distance between the slowest and the fastest round.
    pub(super) fn spread(&self) -> f64 {
        let most = self.seconds.iter().copied().fold(f64::MIN, f64::max);
        let least = self.seconds.iter().copied().fold(f64::MAX, f64::min);
        (most - least) / 2.0
    }

    /// True if it is not slower than another by more than rounds differ.
    pub(super) fn is_as_fast_as(&self, other: &Trial) -> bool {
        let noise = self.spread().max(other.spread()).max(0.01 * other.median());
        self.median() - other.median() <= noise
    }
}

/// Device memory that grows with depth must make steps at least this much faster to be worth it,
/// because layer-to-layer training is there to avoid it.
pub(super) const WORTH_GROWTH: f64 = 0.05;

/// The trials that were chosen, by index.
#[derive(Debug, PartialEq)]
pub(super) struct Choice {
    pub(super) best: usize,
    /// A trial that was faster, but by too little for memory that grows with depth.
    pub(super) passed_over: Option<usize>,
}

/// Chooses the trial with the least memory among those that are as fast as the fastest, and of
/// equal ones the user's own, which is the first. If its device memory grows with depth, it must be
/// faster by [`WORTH_GROWTH`] than the best trial whose memory does not.
pub(super) fn best_of(trials: &[Trial]) -> Choice {
    let best = best_among(trials, |_| true).expect("the user's own was tried");
    let grows = |trial: &Trial| trial.device_bytes_a_layer() > 0;
    let constant = best_among(trials, |trial| !grows(trial)).filter(|_| grows(&trials[best]));
    match constant {
        Some(constant) if gain(&trials[constant], &trials[best]) < WORTH_GROWTH => {
            Choice { best: constant, passed_over: Some(best) }
        }
        _ => Choice { best, passed_over: None },
    }
}

/// The part of a step's time that another setting saves.
pub(super) fn gain(before: &Trial, after: &Trial) -> f64 {
    1.0 - after.median() / before.median()
}

fn best_among(trials: &[Trial], counts: impl Fn(&Trial) -> bool) -> Option<usize> {
    let all: Vec<usize> = (0..trials.len()).filter(|&index| counts(&trials[index])).collect();
    let by_time = |a: &&usize, b: &&usize| trials[**a].median().total_cmp(&trials[**b].median());
    let fastest = &trials[*all.iter().min_by(by_time)?];
    let equals = all.into_iter().filter(|&index| trials[index].is_as_fast_as(fastest));
    equals.min_by_key(|&index| (trials[index].device_bytes, index))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(seconds: &[f64], device_bytes: u64) -> Trial {
        Trial {
            settings: Settings::of(&Config::default()),
            predicted: None,
            device_bytes,
            growth: Vec::new(),
            seconds: seconds.to_vec(),
            bottleneck: Bottleneck::Compute,
            exposed: 0.0,
        }
    }

    #[test]
    fn the_smallest_of_the_fastest_is_kept() {
        let own = || trial(&[1.0, 1.1, 0.9], 100);
        let kept = |others: Vec<Trial>| {
            best_of(&[own()].into_iter().chain(others).collect::<Vec<_>>()).best
        };
        assert_eq!(kept(vec![trial(&[0.5, 0.52, 0.51], 900)]), 1, "faster by more than noise");
        assert_eq!(kept(vec![trial(&[0.95, 1.05, 0.99], 900)]), 0, "noise is no reason");
        assert_eq!(kept(vec![trial(&[1.02, 1.05, 0.99], 50)]), 1, "as fast, and smaller");
        assert_eq!(kept(vec![trial(&[1.02, 1.05, 0.99], 100)]), 0, "as fast, and as large");
        // Each is a little slower and smaller than the one before. All are compared with the
        // fastest, so the choice does not slide to the slowest.
        let slide = (1..=5).map(|nth| trial(&[1.0 + 0.09 * f64::from(nth)], 100 - nth as u64));
        assert_eq!(kept(slide.collect()), 1);
    }

    #[test]
    fn memory_that_grows_with_depth_must_be_worth_it() {
        let grows = |seconds| {
            let growth = vec![Term { name: "stash", bytes: 10 }];
            Trial { growth, ..trial(&[seconds], 50) }
        };
        let constant = |seconds| trial(&[seconds], 100);
        let choice = |best, passed_over| Choice { best, passed_over };
        assert_eq!(best_of(&[constant(1.0), grows(0.96)]), choice(0, Some(1)));
        assert_eq!(best_of(&[constant(1.0), grows(0.94)]), choice(1, None));
        assert_eq!(best_of(&[constant(1.0), grows(1.0)]), choice(0, Some(1)), "less is no gain");
        // Another constant one is faster than the user's own, and too near to the growing one.
        assert_eq!(best_of(&[constant(1.0), grows(0.5), constant(0.51)]), choice(2, Some(1)));
        // The user's own has no advantage here. Without a constant one, the fastest wins.
        assert_eq!(best_of(&[grows(0.97), constant(1.0)]), choice(1, Some(0)));
        assert_eq!(best_of(&[grows(1.0), grows(0.9)]), choice(1, None));
    }
}
