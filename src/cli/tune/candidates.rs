//! The settings that `l2l tune` tries besides the user's own: the best by simulation.

use l2l::config::{Deal, ScheduleKind, StashPlace};
use l2l::models::{Model, Shape};
use l2l::telemetry::{Forecast, Rates};
use l2l::{Config, Plan, model_of};

use super::growth;
use super::trial::{Layout, Settings};

/// Depths (weights, gradients, reduced, stash) that are large enough for any run, and smaller ones
/// to try.
const GENEROUS: [u32; 4] = [3, 3, 4, 16];
const SMALLER: [&[u32]; 4] = [&[1, 2], &[1, 2], &[1, 2], &[1, 2, 4, 8]];

/// Simulated times that differ by less than this factor count as equal.
const EQUAL: f64 = 1.01;

/// Candidates that are tried, besides the user's own settings.
const CANDIDATES: usize = 4;

/// Chunks of a longest sequence, for each device. Devices that share one sequence wait for each
/// other less with more chunks, and each chunk costs operations of its own.
const CHUNKS_A_DEVICE: [usize; 3] = [1, 2, 4];

/// The best settings by simulation, with their predicted times. For each micro-batch, chunk, layout
/// and place they have the smallest depths that are as fast as generous ones and fit the ceiling.
/// The data's longest sequence has `longest` positions.
pub(super) fn candidates(
    config: &Config,
    model: &Model,
    rates: &Rates,
    own: Settings,
    longest: usize,
) -> Vec<(Settings, f64)> {
    let mut found: Vec<Candidate> = Vec::new();
    let on_host = if config.has_link() { StashPlace::Auto } else { StashPlace::Host };
    for Ways { chunk, sizes, layouts } in ways(config, model, own, longest) {
        // A model's shape has the length of its chunks.
        let shape = Shape { chunk_positions: chunk, ..model.shape };
        let Ok(cut) = model_of(&Settings { chunk, ..own }.on(config), shape) else { continue };
        let simulation = Simulation { config, model: &cut, rates };
        for &micro_batch in &sizes {
            for &layout in &layouts {
                for place in [on_host, StashPlace::Device] {
                    let start = Settings { micro_batch, chunk, layout, place, ..own };
                    let best = simulation.best_depths(start);
                    found.extend(best.filter(|best| best.settings != own));
                }
            }
        }
    }
    let by_time = |a: &Candidate, b: &Candidate| a.seconds.total_cmp(&b.seconds);
    found.sort_by(|a, b| by_time(a, b).then(a.device_bytes.cmp(&b.device_bytes)));
    // If the memory of all candidates grows with depth, one whose memory does not is tried, too.
    let grows = |of: &&Candidate| !growth::of(config, model, of.settings).is_empty();
    if found.iter().take(CANDIDATES).all(|one| grows(&one)) {
        let constant = found.iter().skip(CANDIDATES).find(|one| !grows(one));
        if let Some(&constant) = constant {
            found[CANDIDATES - 1] = constant;
        }
    }
    found.truncate(CANDIDATES);
    found.into_iter().map(|Candidate { settings, seconds, .. }| (settings, seconds)).collect()
}

/// What is tried with one length of chunks: each micro-batch in each layout.
struct Ways {
    chunk: usize,
    sizes: Vec<usize>,
    layouts: Vec<Layout>,
}

/// The lengths of chunks to try, the user's own first.
fn ways(config: &Config, model: &Model, own: Settings, longest: usize) -> Vec<Ways> {
    let mut sizes = vec![own.micro_batch, own.micro_batch / 2, own.micro_batch * 2];
    sizes.retain(|&size| (1..=config.sequences()).contains(&size));
    let layouts = Layout::all(config);
    // A layout that deals sequences, or takes them whole, gains nothing by chunks.
    let is_dealt =
        |layout: &&Layout| layout.kind == ScheduleKind::Relay && layout.deal == Deal::Layers;
    let dealt: Vec<Layout> = layouts.iter().filter(is_dealt).copied().collect();
    let others = chunks(config, model, own, longest).into_iter().map(|chunk| {
        let sizes = vec![own.micro_batch];
        Ways { chunk, sizes, layouts: dealt.clone() }
    });
    [Ways { chunk: own.chunk, sizes, layouts }].into_iter().chain(others).collect()
}

/// Other lengths of chunks that give several devices more to share, or less to begin.
fn chunks(config: &Config, model: &Model, own: Settings, longest: usize) -> Vec<usize> {
    let devices = config.devices() as usize;
    // Micro-batches of short sequences keep the devices busy already.
    let is_fed = config.sequences().div_ceil(own.micro_batch) >= 4 * devices;
    if devices == 1 || !model.can_be_cut() || is_fed && longest <= own.chunk {
        return Vec::new();
    }
    let of_each = |count: &usize| {
        let chunk = longest.div_ceil(count * devices).next_multiple_of(Shape::CHUNK_TILE);
        Some(chunk).filter(|&chunk| chunk < longest && chunk != own.chunk)
    };
    let mut chunks: Vec<usize> = CHUNKS_A_DEVICE.iter().filter_map(of_each).collect();
    chunks.dedup();
    chunks
}

/// Settings that are worth a trial.
#[derive(Clone, Copy)]
struct Candidate {
    settings: Settings,
    seconds: f64,
    device_bytes: u64,
}

/// Steps of a model in virtual time.
struct Simulation<'s> {
    config: &'s Config,
    model: &'s Model,
    rates: &'s Rates,
}

impl Simulation<'_> {
    /// The smallest depths that are as fast as generous ones. `None`: nothing fits.
    fn best_depths(&self, own: Settings) -> Option<Candidate> {
        let mut depths = GENEROUS;
        if own.layout.kind.is_pipeline() {
            depths[0] = self.model.layers.len() as u32; // a device holds all its layers
        }
        // If generous depths do not fit, the user's own may.
        let tries = [Settings { depths, ..own }, own];
        let first = tries.into_iter().find_map(|at| Some((at, self.seconds(&at)?)));
        let (mut at, mut best) = first?;
        let limit = best * EQUAL;
        for (index, smaller) in SMALLER.iter().enumerate() {
            for &depth in smaller.iter().filter(|&&depth| depth < at.depths[index]) {
                let mut less = at;
                less.depths[index] = depth;
                if let Some(seconds) = self.seconds(&less).filter(|&seconds| seconds <= limit) {
                    (at, best) = (less, seconds);
                    break;
                }
            }
        }
        let device_bytes = self.device_bytes(&at)?;
        Some(Candidate { settings: at, seconds: best, device_bytes })
    }

    /// Seconds of a step, if the settings fit.
    fn seconds(&self, settings: &Settings) -> Option<f64> {
        self.device_bytes(settings)?;
        let forecast = Forecast::of(&settings.on(self.config), self.model, self.rates);
        Some(forecast.ok()?.seconds)
    }

    /// Bytes of a device, if the settings fit.
    fn device_bytes(&self, settings: &Settings) -> Option<u64> {
        let config = settings.on(self.config);
        config.check().ok()?;
        let plan = Plan::new(&config, self.model, &config.update_rule()).ok()?;
        let misfits = plan.misfits(self.model, &config.update_rule(), None);
        misfits.is_empty().then(|| plan.device_bytes())
    }
}

#[cfg(test)]
mod tests {
    use l2l::largest_shape_of;

    use super::*;

    fn config() -> Config {
        let mut config = Config::default();
        config.data.train = "random".into();
        config.model.layers = Some(4);
        config.model.hidden = Some(32);
        config.model.heads = Some(4);
        config.data.sequence_length = Some(16);
        (config.step.batch, config.step.micro_batch) = (4, 2);
        let channels = &mut config.channels;
        (channels.weights, channels.gradients, channels.reduced, channels.stash) = (1, 1, 1, 1);
        config
    }

    /// Whether the link, updates or kernels limit a step: the first candidate is as fast as the
    /// best of all depths.
    #[test]
    fn virtual_time_leads_to_the_best_depths() {
        let config = config();
        let own = Settings::of(&config);
        let model = Model::new(largest_shape_of(&config).expect("a shape of ours"));
        for (name, flops, link, host) in [
            ("link", 1e11, 2e7, 1e10),
            ("update", 1e11, 1e10, 1e8),
            ("compute", 1e8, 1e10, 1e10),
            ("balanced", 5e9, 2e8, 4e9),
        ] {
            let rates = Rates::of(&config, &model, flops, link, host);
            let time = |settings: &Settings| {
                let forecast = Forecast::of(&settings.on(&config), &model, &rates);
                forecast.expect("a schedule of ours").seconds
            };
            let found = candidates(&config, &model, &rates, own, 16);
            let (first, predicted) = found.first().copied().unwrap_or((own, time(&own)));
            let mut best = f64::MAX;
            for weights in 1..=3 {
                for gradients in 1..=3 {
                    for reduced in [1, 2, 4] {
                        for stash in [1, 4, 16] {
                            let depths = [weights, gradients, reduced, stash];
                            best = best.min(time(&Settings { depths, ..first }));
                        }
                    }
                }
            }
            assert!(predicted <= best * EQUAL * EQUAL, "{name}: {first}: {predicted}, not {best}");
        }
    }

    /// One long sequence keeps several devices busy in chunks, and the forecast shows it. Many
    /// short ones, and one device, have no use for other chunks.
    #[test]
    fn one_long_sequence_is_cut_for_its_devices() {
        let mut config = config();
        config.device.count = Some(4);
        config.model.layers = Some(16);
        (config.model.positions, config.data.sequence_length) = (Some(2048), Some(2048));
        (config.step.batch, config.step.micro_batch) = (1, 1);
        let own = Settings::of(&config);
        let model = Model::new(largest_shape_of(&config).expect("a shape of ours"));
        let rates = Rates::of(&config, &model, 1e9, 1e10, 1e10);
        let found = candidates(&config, &model, &rates, own, 2048);
        let (best, seconds) = found[0];
        assert_eq!((best.chunk, best.layout.kind), (128, ScheduleKind::Relay), "{best}");
        let whole = Forecast::of(&config, &model, &rates).expect("a schedule of ours").seconds;
        assert!(seconds * 3.0 < whole, "{seconds} of {whole}");
        let tried =
            |config: &Config, longest: usize| chunks(config, &model, Settings::of(config), longest);
        assert_eq!(tried(&config, 2048), [512, 256, 128]);
        assert_eq!(tried(&config, 300), [128]);
        let none: [usize; 0] = [];
        assert_eq!(tried(&config, 128), none);
        config.step.batch = 16;
        assert_eq!(tried(&config, 2048), none, "sixteen sequences for four devices");
        (config.step.batch, config.device.count) = (1, None);
        assert_eq!(tried(&config, 2048), none);
    }
}
