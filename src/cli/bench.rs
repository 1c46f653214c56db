//! `l2l bench`: runs a few steps of a config, and reports their speed beside the machine's limits.

use l2l::config::DeviceKind;
use l2l::data::{Batches, Dataset};
use l2l::devices::{KernelRate, KernelTime, ProductTable, ProductTime, Rate};
use l2l::telemetry::EventLog;
use l2l::{Config, Error, StepReport, Summary, Trainer, devices, machine, optimizers, shape_of};
use serde_json::{Value, json};

use super::progress::Screen;
use super::runtime::Runtime;
use super::{BenchArguments, Exit, output};

/// Steps of a bench whose config names no number; the first is not counted.
const STEPS: u64 = 6;

pub(super) fn bench(arguments: &BenchArguments) -> Result<Exit, Error> {
    let &BenchArguments { ref common, without_copies, kernels, products, digest, ref rates } =
        arguments;
    let (mut config, layers) = common.read()?;
    // The built-in config names steps for training, and not for a bench.
    if !["step.steps", "step.epochs"].into_iter().any(|key| layers.is_given(key)) {
        config.step.steps = Some(STEPS * u64::from(config.window()));
    }
    (config.checkpoint, config.validation) = Default::default();
    // The files of a run's events are the run's.
    (config.log.file, config.log.tensorboard) = Default::default();
    if let Some(file) = rates {
        let fitted = super::rates::fit(&config, file);
        return fitted.map(|()| Exit::Well).map_err(|error| layers.locate(error));
    }
    let run = || {
        if products {
            check_products(&config)?;
        }
        let product = devices::device_flops_per_second(&config)?;
        let (mut train, _) = Dataset::open(&config, &shape_of(&config)?)?;
        train.refer_to_nothing();
        let steps = config.steps(train.len())?;
        Batches::check(&config, &train, steps)?;
        let mut log = EventLog::open(&config.log)?;
        let mut screen = Screen::new(config.log.format, 0, steps, 0);
        let mut reports = Vec::new();
        let show = |report: &StepReport| {
            report_event(&mut log, &screen, &report.event());
            screen.step(report);
            reports.push(*report);
        };
        let is_gpu = config.device.kind == DeviceKind::Cuda;
        let times_kernels = kernels && is_gpu;
        let times_products = products;
        let how = How { steps, without_copies, times_kernels, times_products, digests: digest };
        let Steps { summary, digest, times, tables } =
            Runtime::new()?.block_on(all_steps(&config, train, how, show))?;
        let more = speeds(&reports, product);
        if times_kernels {
            show_times(&times, &mut log, &screen);
        } else if kernels {
            show_kernels(&config, &mut log, &screen)?;
        }
        tables.iter().for_each(|table| show_products(table, &mut log, &screen));
        let link = config.device.link.as_deref();
        let mut event = summary.event(digest.as_deref(), link);
        more.iter().for_each(|(name, value)| event[name] = json!(value));
        report_event(&mut log, &screen, &event);
        screen.summary(&summary, digest.as_deref(), link, &more);
        Ok(Exit::Well)
    };
    run().map_err(|error| layers.locate(error))
}

fn report_event(log: &mut EventLog, screen: &Screen, event: &Value) {
    log.write(event).into_iter().for_each(output::lose);
    screen.event(event);
}

/// Reports the speed of the CPU's kernels beside its matrix product and its memory.
fn show_kernels(config: &Config, log: &mut EventLog, screen: &Screen) -> Result<(), Error> {
    let threads = config.device.threads.unwrap_or_else(machine::cores);
    let stream = optimizers::stream_bytes_per_second(threads)?;
    let product = devices::product_flops_per_second(threads)?;
    let update = Rate::Bytes(optimizers::update_bytes_per_second(threads, false)?);
    let mut rates = vec![KernelRate { kernel: "adamw", rate: update }];
    rates.extend(devices::kernel_rates(threads)?);
    for KernelRate { kernel, rate } in rates {
        let (of, unit, rate, limit) = match rate {
            Rate::Bytes(rate) => ("memory", "bytes_per_second", rate, stream),
            Rate::Flops(rate) => ("product", "flops_per_second", rate, product),
            Rate::OfProducts { flops, products } => {
                ("products alone", "flops_per_second", flops, products)
            }
        };
        let share = rate / limit;
        let mut event = json!({ "event": "kernel", "kernel": kernel, "of": of, "share": share });
        event[unit] = json!(rate);
        report_event(log, screen, &event);
        let rate = rate / 1e9;
        screen
            .say(format_args!("{kernel:<26} {rate:>16.1} G/s, {share:.2} of the rate of the {of}"));
    }
    Ok(())
}

/// Reports the time of each kernel of the GPUs, and its share of all.
fn show_times(times: &[KernelTime], log: &mut EventLog, screen: &Screen) {
    let all: f64 = times.iter().map(|time| time.seconds).sum();
    for KernelTime { kernel, launches, seconds } in times {
        let share = seconds / all;
        report_event(
            log,
            screen,
            &json!({
                "event": "kernel",
                "kernel": kernel,
                "of": "device",
                "launches": launches,
                "seconds": seconds,
                "share": share,
            }),
        );
        let percent = 100.0 * share;
        screen.say(format_args!(
            "{kernel:<34} {seconds:>9.4} s, {percent:>5.1} %, {launches} launches"
        ));
    }
}

/// Refuses `--products` without a GPU, whose library has several algorithms for a product, or
/// without a place to store the choice.
fn check_products(config: &Config) -> Result<(), Error> {
    let refused =
        |key: &str, problem: &str| Err(Error::Config { key: key.into(), problem: problem.into() });
    if config.device.kind != DeviceKind::Cuda {
        return refused("device.kind", "is cpu: `--products` times algorithms of a GPU's library");
    }
    if config.device.kernel_cache.is_none() {
        let problem = "is not set: `--products` stores there which algorithms are the fastest";
        return refused("device.kernel_cache", problem);
    }
    Ok(())
}

/// Reports the times of the algorithms of each product on a GPU, and the file with the choice.
fn show_products(table: &ProductTable, log: &mut EventLog, screen: &Screen) {
    for time in &table.products {
        let ProductTime { product, algorithms, first, best } = time;
        report_event(
            log,
            screen,
            &json!({
                "event": "product",
                "product": product,
                "algorithms": algorithms,
                "first_seconds": first,
                "best_seconds": best,
            }),
        );
        let [of_first, of_best] = [first, best].map(|seconds| 1e6 * seconds);
        let share = best / first;
        screen.say(format_args!(
            "{product}: first {of_first:.1} µs, best {of_best:.1} µs ({share:.2}) of {algorithms}"
        ));
    }
    report_event(log, screen, &json!({ "event": "products", "path": table.path }));
    screen.say(format_args!(
        "The fastest are stored in {}. Runs on this GPU take them from now on. A run that you \
         resume gets other bits than it would without this file.",
        table.path.display()
    ));
}

/// The speed of the steps. The first plans schedules and touches memory for the first time, so it
/// is not counted unless it is the only one.
fn speeds(reports: &[StepReport], product: f64) -> [(&'static str, f64); 4] {
    let counted = if reports.len() > 1 { &reports[1..] } else { reports };
    let sum = |of: fn(&StepReport) -> f64| counted.iter().map(of).sum::<f64>();
    let seconds = sum(|report| report.seconds);
    [
        ("tokens_per_second", sum(|report| report.tokens as f64) / seconds),
        ("model_flops_per_second", sum(|report| report.model_flops) / seconds),
        ("matmul_flops_per_second", product),
        ("exposed_wait_fraction", sum(|report| report.exposed_wait_seconds) / seconds),
    ]
}

/// The options of a bench's steps.
#[derive(Clone, Copy)]
struct How {
    steps: u64,
    /// True to leave out copies between host and device.
    without_copies: bool,
    /// True to time each kernel of the GPUs.
    times_kernels: bool,
    /// True to time the algorithms of each product.
    times_products: bool,
    /// True to digest all weights at the end.
    digests: bool,
}

/// The results of a bench's steps.
struct Steps {
    summary: Summary,
    digest: Option<String>,
    /// The kernels' times in all steps but the first, if there are more.
    times: Vec<KernelTime>,
    /// The chosen algorithms, by GPU.
    tables: Vec<ProductTable>,
}

/// Runs training steps alone, without validation and checkpoints.
async fn all_steps(
    config: &Config,
    train: Dataset,
    How { steps, without_copies, times_kernels, times_products, digests }: How,
    mut show: impl FnMut(&StepReport),
) -> Result<Steps, Error> {
    let builder = Trainer::builder(config.clone()).steps(steps).trial();
    let builder = if without_copies { builder.without_copies() } else { builder };
    let mut trainer = builder.start().await?;
    if times_kernels {
        trainer.time_kernels();
    }
    if times_products {
        trainer.time_products();
    }
    let mut batches = Batches::start(config, train, 0)?;
    let mut times = Vec::new();
    let window = u64::from(config.window());
    for step in (0..steps).step_by(window as usize) {
        show(&trainer.step(batches.next().await?).await?);
        for warning in trainer.take_warnings() {
            super::say(format_args!("warning: {warning}"));
        }
        let of_step = trainer.take_kernel_times().await?;
        if step > 0 || steps <= window {
            times.extend(of_step);
        }
        if output::has_ended() {
            break;
        }
    }
    let tables = trainer.store_products().await?;
    let digest = if digests { Some(trainer.digest().await?) } else { None };
    let summary = trainer.stop().await?;
    Ok(Steps { summary, digest, times: KernelTime::sums(times), tables })
}
