//! `l2l tune`: which depths, micro-batch and place of the stash are best here.
//!
//! A first trial measures how fast each lane is; virtual time, with those rates, says which settings
//! could be better; these are tried for real, in turns with the user's own. What is better by more
//! than trials differ among themselves is kept, and of equals the one that takes less memory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use l2l::config::{ByteSize, Format, StashPlace};
use l2l::data::{Batch, Batches};
use l2l::models::Model;
use l2l::telemetry::{Forecast, Observe, Rates, Slice};
use l2l::{Bottleneck, Config, Error, Plan, StepReport, Trainer, shape_of};
use serde_json::json;
use toml_edit::{DocumentMut, Item, Table, value};

use super::plan::rates;
use super::train::runtime;
use super::{RateArguments, TuneArguments, print, say};

/// What is tuned.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Settings {
    micro_batch: usize,
    place: StashPlace,
    /// Weights, gradients, reduced, stash.
    depths: [u32; 4],
}

/// Depths that are as good as any, and what smaller ones are tried.
const GENEROUS: [u32; 4] = [3, 3, 4, 16];
const SMALLER: [&[u32]; 4] = [&[1, 2], &[1, 2], &[1, 2], &[1, 2, 4, 8]];

/// Times of virtual time that count as equal.
const EQUAL: f64 = 1.01;

/// Candidates that are tried for real, beside the user's own.
const CANDIDATES: usize = 4;

/// What trials of one candidate came to.
struct Trial {
    settings: Settings,
    predicted: f64,
    device_bytes: u64,
    /// Seconds of a step in each round.
    seconds: Vec<f64>,
    bottleneck: Bottleneck,
    exposed: f64,
}

impl Settings {
    fn of(config: &Config) -> Settings {
        let place = match config.stash.place {
            StashPlace::Device => StashPlace::Device,
            StashPlace::Auto | StashPlace::Host => StashPlace::Host,
        };
        let depths = &config.channels;
        let depths = [depths.weights, depths.gradients, depths.reduced, depths.stash];
        Settings { micro_batch: config.step.micro_batch, place, depths }
    }

    fn on(&self, config: &Config) -> Config {
        let mut config = config.clone();
        config.step.micro_batch = self.micro_batch;
        config.stash.place = self.place;
        let channels = &mut config.channels;
        [channels.weights, channels.gradients, channels.reduced, channels.stash] = self.depths;
        config
    }

    /// The keys in which these differ from others, and their values.
    fn changes(&self, from: &Settings) -> Vec<(&'static str, &'static str, toml_edit::Value)> {
        let mut changes = Vec::new();
        if self.micro_batch != from.micro_batch {
            changes.push(("step", "micro_batch", (self.micro_batch as i64).into()));
        }
        if self.place != from.place {
            let place = if self.place == StashPlace::Device { "device" } else { "host" };
            changes.push(("stash", "place", place.into()));
        }
        let names = ["weights", "gradients", "reduced", "stash"];
        for (index, name) in names.into_iter().enumerate() {
            if self.depths[index] != from.depths[index] {
                changes.push(("channels", name, i64::from(self.depths[index]).into()));
            }
        }
        changes
    }
}

impl std::fmt::Display for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [weights, gradients, reduced, stash] = self.depths;
        let place = if self.place == StashPlace::Device { "device" } else { "host" };
        write!(
            f,
            "weights {weights}, gradients {gradients}, reduced {reduced}, stash {stash} on the \
             {place}, micro-batch {}",
            self.micro_batch
        )
    }
}

impl Trial {
    fn median(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    }

    /// How far its rounds lie apart: half of it.
    fn spread(&self) -> f64 {
        let most = self.seconds.iter().copied().fold(f64::MIN, f64::max);
        let least = self.seconds.iter().copied().fold(f64::MAX, f64::min);
        (most - least) / 2.0
    }

    /// True when it is as fast as another, as far as rounds tell.
    fn is_as_fast_as(&self, other: &Trial) -> bool {
        let noise = self.spread().max(other.spread()).max(0.01 * other.median());
        self.median() - other.median() <= noise
    }
}

/// Of all that are as fast as the fastest, the one that takes the least memory; the user's own, the
/// first, before others.
fn best_of(trials: &[Trial]) -> usize {
    let fastest = trials.iter().min_by(|a, b| a.median().total_cmp(&b.median()));
    let fastest = fastest.expect("the user's own was tried");
    let equals = (0..trials.len()).filter(|&index| trials[index].is_as_fast_as(fastest));
    equals.min_by_key(|&index| (trials[index].device_bytes, index)).expect("the fastest is")
}

pub(super) fn tune(arguments: &TuneArguments) -> Result<(), Error> {
    let TuneArguments { common, to, steps, rounds } = arguments;
    let (mut config, layers) = common.read(None, None)?;
    let (text, format) = (source(common.config.as_deref())?, config.log.format);
    // What the file says by itself, whatever was set over it.
    let written = Config::parse(&text).map_or_else(|_| Settings::of(&config), |c| Settings::of(&c));
    if let Some(to) = to {
        let refused = |error| Error::Refused(format!("--to {}: {error}", to.display()));
        std::fs::OpenOptions::new().append(true).create(true).open(to).map_err(refused)?;
    }
    if *steps == 0 || *rounds == 0 {
        return Err(Error::Refused("--steps and --rounds must be at least 1".into()));
    }
    let every = config.checkpoint.every_steps;
    let directory = config.checkpoint.directory.clone();
    let saves = every.zip(directory.map(|directory| parent_of(&directory)));
    (config.checkpoint, config.validation) = Default::default();
    config.step.steps = Some(steps + 1);
    config.step.epochs = None;
    let run = || {
        let model = Model::new(shape_of(&config)?);
        let batches = runtime()?.block_on(first_batches(&config, steps + 1))?;
        let own = Settings::of(&config);
        let place = saves.as_ref().map(|(_, place)| place.as_path());
        let mut first = try_once(&config, own, &batches, place)?;
        tell(format, &first.trial, 0);
        let of_machine = RateArguments { tflops: None, link_gbps: None, host_gbps: None };
        let otherwise = rates(&config, &model, &of_machine)?;
        let plan = Plan::new(&config, &model, &config.update_rule())?;
        let rates = Rates::measured(&first.slices, &config, &plan, otherwise);
        first.trial.predicted = Forecast::of(&config, &model, &rates)?.seconds;
        let mut trials = vec![first.trial];
        for (settings, predicted) in candidates(&config, &model, &rates, own) {
            match try_once(&settings.on(&config), settings, &batches, None) {
                Ok(Tried { trial, .. }) => {
                    let trial = Trial { predicted, ..trial };
                    tell(format, &trial, 0);
                    trials.push(trial);
                }
                Err(error) => say(format_args!("left out: {settings}: {error}")),
            }
        }
        for round in 1..*rounds {
            for trial in &mut trials {
                let settings = trial.settings;
                let again = try_once(&settings.on(&config), settings, &batches, None)?.trial;
                tell(format, &again, round);
                trial.seconds.extend(again.seconds);
                (trial.bottleneck, trial.exposed) = (again.bottleneck, again.exposed);
            }
        }
        let best = best_of(&trials);
        let disk = every.zip(first.checkpoint).map(|(every, seconds)| seconds / every as f64);
        let text = tuned(&text, &written, &trials[best], &trials[0])?;
        conclude(format, &trials, best, disk, &text);
        match to {
            Some(path) => std::fs::write(path, text)
                .map_err(|error| Error::Refused(format!("--to {}: {error}", path.display()))),
            None if format == Format::Pretty => {
                print(text);
                Ok(())
            }
            None => Ok(()),
        }
    };
    run().map_err(|error| layers.locate(error))
}

/// The nearest folder above a place that is there.
fn parent_of(place: &Path) -> PathBuf {
    let found = place.ancestors().find(|folder| folder.is_dir());
    found.map_or_else(std::env::temp_dir, Path::to_path_buf)
}

fn source(path: Option<&Path>) -> Result<String, Error> {
    let Some(path) = path else { return Ok(String::new()) };
    std::fs::read_to_string(path)
        .map_err(|error| Error::Refused(format!("{}: {error}", path.display())))
}

/// The same batches for all trials.
async fn first_batches(config: &Config, count: u64) -> Result<Vec<Batch>, Error> {
    let mut batches = Batches::open(config)?; // as in training, and no more of them
    let mut taken = Vec::new();
    for _ in 0..count {
        taken.push(batches.next().await?);
    }
    Ok(taken)
}

/// Everything that a trial did.
#[derive(Default)]
struct Slices(Mutex<Vec<Slice>>);

impl Observe for Slices {
    fn heard(&self, slice: &Slice) {
        self.0.lock().expect("nothing panics inside").push(*slice);
    }
}

struct Tried {
    trial: Trial,
    slices: Vec<Slice>,
    /// Seconds that a checkpoint took.
    checkpoint: Option<f64>,
}

/// One trial: a step that does not count, and those that do.
fn try_once(
    config: &Config,
    settings: Settings,
    batches: &[Batch],
    saves: Option<&Path>,
) -> Result<Tried, Error> {
    runtime()?.block_on(async {
        let slices = Arc::new(Slices::default());
        let mut trainer = Trainer::builder(config.clone()).observe(slices.clone()).start()?;
        let device_bytes = trainer.plan().device_bytes();
        let mut reports: Vec<StepReport> = Vec::new();
        for batch in batches {
            reports.push(trainer.step(batch.clone()).await?);
        }
        let mut checkpoint = None;
        if let Some(place) = saves {
            let folder =
                tempfile::tempdir_in(place).map_err(|error| Error::Failed(error.to_string()))?;
            let begin = Instant::now();
            trainer.checkpoint(&folder.path().join("trial")).await?;
            checkpoint = Some(begin.elapsed().as_secs_f64());
        }
        trainer.stop().await?;
        let counted = &reports[1..];
        let sum = |of: fn(&StepReport) -> f64| counted.iter().map(of).sum::<f64>();
        let seconds = sum(|report| report.seconds);
        let most = |of: Bottleneck| counted.iter().filter(|one| one.bottleneck == of).count();
        let bottleneck = counted.iter().map(|report| report.bottleneck).max_by_key(|&of| most(of));
        let trial = Trial {
            settings,
            predicted: f64::NAN,
            device_bytes,
            seconds: vec![seconds / counted.len() as f64],
            bottleneck: bottleneck.expect("a trial has steps"),
            exposed: sum(|report| report.exposed_wait_seconds) / seconds,
        };
        let mut slices = std::mem::take(&mut *slices.0.lock().expect("nothing panics inside"));
        slices.retain(|slice| slice.step > 0); // the first touches memory for the first time
        Ok(Tried { trial, slices, checkpoint })
    })
}

/// Settings that virtual time thinks best, with what it predicts: for each micro-batch and place, the
/// smallest depths that are as good as generous ones, within the ceiling.
fn candidates(
    config: &Config,
    model: &Model,
    rates: &Rates,
    own: Settings,
) -> Vec<(Settings, f64)> {
    let fits = |settings: &Settings| {
        let config = settings.on(config);
        let plan = Plan::new(&config, model, &config.update_rule()).ok()?;
        plan.misfits().is_empty().then(|| plan.device_bytes())
    };
    let predict = |settings: &Settings| -> Option<f64> {
        fits(settings)?;
        Some(Forecast::of(&settings.on(config), model, rates).ok()?.seconds)
    };
    let mut sizes = vec![own.micro_batch, own.micro_batch / 2, own.micro_batch * 2];
    sizes.retain(|&size| (1..=config.step.batch).contains(&size));
    let mut found: Vec<(Settings, f64, u64)> = Vec::new();
    for micro_batch in sizes {
        for place in [StashPlace::Host, StashPlace::Device] {
            let mut at = Settings { micro_batch, place, depths: GENEROUS };
            let mut best = predict(&at);
            if best.is_none() {
                // Not all of it fits: as much as the user's own, then.
                at.depths = own.depths;
                best = predict(&at);
            }
            let Some(mut best) = best else { continue };
            let limit = best * EQUAL;
            for (index, smaller) in SMALLER.iter().enumerate() {
                for &depth in smaller.iter().filter(|&&depth| depth < at.depths[index]) {
                    let mut less = at;
                    less.depths[index] = depth;
                    if let Some(seconds) = predict(&less).filter(|&seconds| seconds <= limit) {
                        (at, best) = (less, seconds);
                        break;
                    }
                }
            }
            if at != own {
                found.extend(fits(&at).map(|bytes| (at, best, bytes)));
            }
        }
    }
    found.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.2.cmp(&b.2)));
    found.truncate(CANDIDATES);
    found.into_iter().map(|(settings, seconds, _)| (settings, seconds)).collect()
}

fn tell(format: Format, trial: &Trial, round: usize) {
    let seconds = trial.seconds[0];
    if format == Format::Json {
        let [weights, gradients, reduced, stash] = trial.settings.depths;
        let predicted = trial.predicted.is_finite().then_some(trial.predicted);
        return print(json!({
            "event": "trial", "round": round, "weights": weights, "gradients": gradients,
            "reduced": reduced, "stash": stash, "micro_batch": trial.settings.micro_batch,
            "stash_on_device": trial.settings.place == StashPlace::Device,
            "step_seconds": seconds, "predicted_seconds": predicted,
            "device_bytes": trial.device_bytes, "bottleneck": trial.bottleneck.name(),
            "exposed_wait_fraction": trial.exposed,
        }));
    }
    say(format_args!(
        "round {round}: {seconds:.3} s a step, {} by {}, {}: {}",
        ByteSize::from(trial.device_bytes),
        trial.bottleneck.name(),
        match trial.predicted.is_finite() {
            true => format!("predicted {:.3}", trial.predicted),
            false => format!("exposed wait {:.0} %", 100.0 * trial.exposed),
        },
        trial.settings
    ));
}

/// What was found, and why.
fn conclude(format: Format, trials: &[Trial], best: usize, disk: Option<f64>, config: &str) {
    let (own, kept) = (&trials[0], &trials[best]);
    let step = kept.median();
    let of_disk = disk.filter(|disk| *disk > 0.1 * (step + disk));
    let of_disk = of_disk.filter(|disk| *disk > kept.exposed * step);
    let bottleneck = of_disk.map_or(own.bottleneck, |_| Bottleneck::Disk).name();
    let why = if best == 0 {
        "no other was as fast in less memory, or faster by more than rounds differ".to_string()
    } else if own.is_as_fast_as(kept) {
        format!(
            "as fast ({step:.3} s a step against {:.3}, rounds differ by {:.3} and {:.3}), and it \
             takes {} of the device against {}",
            own.median(),
            kept.spread(),
            own.spread(),
            ByteSize::from(kept.device_bytes),
            ByteSize::from(own.device_bytes)
        )
    } else {
        format!(
            "{step:.3} s a step against {:.3}, which is more than rounds differ ({:.3} and {:.3})",
            own.median(),
            kept.spread(),
            own.spread()
        )
    };
    let advice = of_disk.map(|disk| {
        format!(
            "a checkpoint costs {disk:.3} s a step: checkpoint.every_steps {} times as large would \
             make it a twentieth",
            (disk / (0.05 * step)).ceil()
        )
    });
    if format == Format::Json {
        let [weights, gradients, reduced, stash] = kept.settings.depths;
        return print(json!({
            "event": "tuned", "weights": weights, "gradients": gradients, "reduced": reduced,
            "stash": stash, "micro_batch": kept.settings.micro_batch,
            "stash_on_device": kept.settings.place == StashPlace::Device,
            "step_seconds": step, "own_step_seconds": own.median(),
            "spread_seconds": kept.spread(), "own_spread_seconds": own.spread(),
            "device_bytes": kept.device_bytes, "bottleneck": bottleneck,
            "kept_bottleneck": kept.bottleneck.name(), "disk_seconds": disk, "why": why,
            "advice": advice, "config": config,
        }));
    }
    say(format_args!("bottleneck {bottleneck}; kept {}: {why}", kept.settings));
    advice.into_iter().for_each(say);
}

/// The user's own text with what was changed.
fn tuned(text: &str, written: &Settings, kept: &Trial, first: &Trial) -> Result<String, Error> {
    let mut document: DocumentMut =
        text.parse().map_err(|error| Error::Failed(format!("the config: {error}")))?;
    for (section, key, new) in kept.settings.changes(written) {
        let section = document.entry(section).or_insert(Item::Table(Table::new()));
        match section.as_table_like_mut() {
            Some(section) => {
                let mut new = new;
                // With the blanks and the comment that the old one had.
                if let Some(old) = section.get(key).and_then(Item::as_value) {
                    *new.decor_mut() = old.decor().clone();
                }
                section.insert(key, value(new));
            }
            None => return Err(Error::Failed("the config has no such section".into())),
        }
    }
    Ok(format!(
        "# l2l tune: {:.3} s a step, {:.3} s before; {} of the device, {} before.\n{document}",
        kept.median(),
        first.median(),
        ByteSize::from(kept.device_bytes),
        ByteSize::from(first.device_bytes),
    ))
}
