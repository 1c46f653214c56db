//! `l2l plan`: reports the memory and the traffic of a run before it starts.

use std::fmt::Write;

use l2l::checkpoint::Space;
use l2l::config::{DeviceConfig, DeviceKind, Format, Recompute, ScheduleKind, StashPlace};
use l2l::models::Model;
use l2l::plan::{DevicePart, FabricBytes, Keeping, LinkBytes, LongestSequence, RankShare, Term};
use l2l::telemetry::{self, Forecast};
use l2l::{Config, Error, Misfit, Plan, largest_shape_of, model_of};
use l2l_actors::schedule::BlockId;
use serde_json::{Map, Value, json};

use super::outlook::Outlook;
use super::output::{print, write_file};
use super::pieces::Pieces;
use super::{Exit, PlanArguments, longest, outlook, pieces, rates};

pub(super) fn plan(arguments: &PlanArguments) -> Result<Exit, Error> {
    let PlanArguments { common, draw: picture, trace, check, ranks, .. } = arguments;
    let PlanArguments { devices, forecast, csv, .. } = arguments;
    let given = &arguments.rates;
    let (mut config, layers) = common.read()?;
    if let Some(devices) = devices {
        set_devices(&mut config.device, devices.get());
        config.check()?;
    }
    let locate = |error| layers.locate(error);
    let model =
        largest_shape_of(&config).and_then(|shape| model_of(&config, shape)).map_err(locate)?;
    let share = RankShare { rank: 0, ranks: ranks.get() };
    let plan = Plan::of_rank(&config, &model, &config.update_rule(), share).map_err(locate)?;
    if ranks.get() > 1 && csv.is_some() {
        return Err(Error::Argument("--csv: a table is of one process, without --ranks".into()));
    }
    let fitted = arguments.fitted.as_deref();
    let asks = [*forecast, picture.is_some(), trace.is_some(), given.any(), fitted.is_some()];
    let outlook = || {
        given.check()?;
        let rates = match fitted {
            Some(file) => rates::read(file, &config, &model, &plan)?,
            None => outlook::rates(&config, &model, given)?,
        };
        let rates = match given.fabric_gbps {
            Some(rate) => rates.with_fabric(rate * 1e9),
            None => rates,
        };
        Outlook::of(&config, &model, &plan, &rates)
    };
    let found = asks.contains(&true).then(outlook).transpose();
    let found = found.map_err(locate)?;
    show(&config, &plan, &model, found.as_ref());
    if let Some(path) = csv {
        let order = plan.order(&model)?;
        write_file("--csv", path, &order.to_string())?;
    }
    if let Some(Outlook { forecast, .. }) = &found {
        let title = title(&config, &model, forecast);
        if let Some(to) = picture {
            write_file("--draw", to, &telemetry::draw(&title, &forecast.slices))?;
        }
        if let Some(to) = trace {
            write_file("--trace", to, &telemetry::timeline(&title, &forecast.slices))?;
        }
    }
    let space = space_of(&config, &plan, &model);
    let fits = misfits(&config, &plan, &model, space).is_empty();
    Ok(if *check && !fits { Exit::DoesNotFit } else { Exit::Well })
}

/// Sets the number of devices. Of several GPUs it takes the first.
fn set_devices(device: &mut DeviceConfig, count: u32) {
    match device.kind {
        DeviceKind::Cpu => device.count = Some(count),
        DeviceKind::Cuda => {
            (device.ordinal, device.ordinals) = (0, Some((0..count as usize).collect()));
        }
    }
}

/// What a picture of a step in virtual time is called.
pub(super) fn title(config: &Config, model: &Model, forecast: &Forecast) -> String {
    format!(
        "A step of {} layers, {} sequences in micro-batches of {}: {:.3} s in virtual time",
        model.layers.len(),
        config.sequences() * config.window() as usize,
        config.step.micro_batch,
        forecast.seconds
    )
}

/// The parts of the plan that do not fit, and the run's checkpoints if they do not.
fn misfits(config: &Config, plan: &Plan, model: &Model, space: Option<Space>) -> Vec<Misfit> {
    let directory = config.checkpoint.directory.as_deref();
    let checkpoints = space.zip(directory).map(|(space, at)| space.need(at));
    plan.misfits(model, &config.update_rule(), checkpoints)
}

/// The space of a run's checkpoints, if the plan is of training.
fn space_of(config: &Config, plan: &Plan, model: &Model) -> Option<Space> {
    Space::of(config, model, &config.update_rule()).filter(|_| plan.trains())
}

/// Shows a plan. For training it also shows the smallest device and the largest micro-batch that
/// fit and, with rates, the time of a step.
pub(super) fn show(config: &Config, plan: &Plan, model: &Model, outlook: Option<&Outlook>) {
    let rule = config.update_rule();
    let space = space_of(config, plan, model);
    let ceiling = plan.budget().filter(|_| plan.trains());
    let least = Plan::least(config, model, &rule).filter(|_| plan.trains());
    let shown = Shown {
        plan,
        names: config.device_names(),
        model,
        outlook,
        misfits: misfits(config, plan, model, space),
        space,
        bytes_of_parameter: config.device.dtype.size(),
        least: least.map(|least| least.device_bytes()),
        least_is_with: least_is_with(config),
        ceiling,
        most: ceiling.and_then(|ceiling| plan.largest_micro_batch(model, &rule, ceiling)),
        longest: plan.longest_sequence_here(model, &rule),
        keeps_none: keeps_none(config, plan),
        remark: remark(config).filter(|_| plan.trains()),
        pieces: Pieces::of(config, plan, model),
        is_whole_batch: config.schedule.kind == ScheduleKind::Pipedream,
    };
    match config.log.format {
        Format::Json => print(shown.event()),
        Format::Pretty => shown.print(),
    }
}

/// A plan and the numbers that are shown with it.
struct Shown<'p> {
    plan: &'p Plan,
    /// The names of the devices.
    names: Vec<String>,
    model: &'p Model,
    outlook: Option<&'p Outlook>,
    misfits: Vec<Misfit>,
    /// The space of its checkpoints, if it writes any.
    space: Option<Space>,
    bytes_of_parameter: usize,
    /// Bytes of the device that the smallest plan of this step needs.
    least: Option<u64>,
    /// What that plan is of.
    least_is_with: String,
    /// The device's ceiling, `device.memory`.
    ceiling: Option<u64>,
    /// The number of sequences of the largest micro-batch below the ceiling.
    most: Option<usize>,
    longest: Option<LongestSequence>,
    /// The reason why no layer keeps its activations, where a run may.
    keeps_none: Option<&'static str>,
    /// What would make the step faster.
    remark: Option<&'static str>,
    pieces: Pieces,
    /// True if a micro-batch is a whole batch.
    is_whole_batch: bool,
}

/// The settings of the smallest plan.
fn least_is_with(config: &Config) -> String {
    match config.schedule.kind {
        ScheduleKind::Relay => "a micro-batch and channels of 1".into(),
        ScheduleKind::Pipedream => "a batch and channels of 1".into(),
        ScheduleKind::DoubleBuffered => {
            let few = config.fewest_micro_batches();
            format!("step.batch = {few}, and a micro-batch and channels of 1")
        }
        _ => "schedule.kind = \"relay\", and a micro-batch and channels of 1".into(),
    }
}

/// Why a plan for GPUs has no kept layers, though nothing in the config says so.
fn keeps_none(config: &Config, plan: &Plan) -> Option<&'static str> {
    let may = config.device.kind == DeviceKind::Cuda
        && config.schedule.recompute == Recompute::AUTO
        && plan.trains()
        && plan.keeping.is_none();
    may.then_some(match plan.share().ranks {
        1 => {
            "the free memory of the GPU is not known here, so this plan has no kept layers; a run \
             fills what its GPU has free: set device.memory to plan for a size"
        }
        _ => {
            "several ranks may share a GPU, so they keep no layers: set device.memory to the \
             share of one rank"
        }
    })
}

/// What would make a step faster. While a GPU copies the inputs and outputs of a micro-batch, it
/// computes another one.
fn remark(config: &Config) -> Option<&'static str> {
    let of_group = config.sequences().div_ceil(config.parallel.groups as usize);
    let is_one = config.sequences() > 1 && of_group <= config.step.micro_batch;
    let is_copied = config.device.kind == DeviceKind::Cuda;
    if !is_copied || !is_one || config.keeps_one_micro_batch() {
        return None;
    }
    let mut other = config.clone();
    (other.schedule.kind, other.stash.place) = (ScheduleKind::Relay, StashPlace::Auto);
    match (config.schedule.kind, other.keeps_one_micro_batch()) {
        (ScheduleKind::Relay, true) => Some(
            "a layer computes one micro-batch, and waits while its inputs and outputs are copied: \
             with stash.place = \"auto\" they stay on the device, and a smaller step.micro_batch \
             hides these copies",
        ),
        (ScheduleKind::Relay, false) => Some(
            "a layer computes one micro-batch, and waits while its inputs and outputs are copied: \
             a smaller step.micro_batch hides these copies",
        ),
        (ScheduleKind::Resident, true) => Some(
            "a layer computes one micro-batch, and waits while its inputs and outputs are copied: \
             with schedule.kind = \"relay\" and stash.place = \"auto\" they stay on the device",
        ),
        (ScheduleKind::Resident, false) => Some(
            "a layer computes one micro-batch, and waits while its inputs and outputs are copied: \
             schedule.kind = \"relay\" with a smaller step.micro_batch hides these copies",
        ),
        _ => None,
    }
}

impl Shown<'_> {
    fn event(&self) -> Value {
        let Shown { plan, model, misfits, .. } = self;
        let traffic = &plan.traffic;
        let (layer, parameters) = largest_layer(model);
        let bytes = (parameters * self.bytes_of_parameter) as u64;
        let terms = |terms: &[Term], total: u64| {
            let terms = terms.iter().map(|term| (term.name.to_string(), json!(term.bytes)));
            json!({ "total": total, "terms": terms.collect::<Map<String, Value>>() })
        };
        let [masters, states, waiting] = self.eps_bytes_a_parameter();
        let mut event = json!({
            "event": "plan",
            "fits": misfits.is_empty(),
            "why_not": misfits.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "parameters": model.parameters(),
            "trained_parameters": model.trained_parameters(),
            "eps_bytes_a_parameter": {
                "masters": masters, "states": states, "gradient_regions": waiting,
            },
            "devices": plan.devices(),
            "device_bytes": terms(&plan.device, plan.device_bytes()),
            "pinned_bytes": plan.pinned_bytes,
            "host_bytes": terms(&plan.host, plan.host_bytes()),
            "file_bytes": terms(&plan.file, plan.file_bytes()),
            "checkpoint_bytes": self.space.map(|space| {
                json!({ "each": space.each, "count": space.count, "total": space.bytes() })
            }),
            "upload_bytes": traffic.upload_bytes,
            "download_bytes": traffic.download_bytes,
            "links": self.links().map(|(device, link)| {
                json!({
                    "device": device, "upload_bytes": link.upload,
                    "download_bytes": link.download, "peer_bytes": link.peers,
                })
            }).collect::<Vec<_>>(),
            "parts": self.parts().map(|(device, part)| pieces::field(device, part))
                .collect::<Vec<_>>(),
            "ranks": plan.share().ranks,
            "fabric_bytes": {
                "blocks": traffic.fabric_bytes.blocks,
                "gradients": traffic.fabric_bytes.gradients,
            },
            "read_bytes": traffic.read_bytes,
            "written_bytes": traffic.written_bytes,
            "largest_layer": { "layer": layer, "parameters": parameters, "bytes": bytes },
            "smallest_device_bytes": self.least,
            "largest_micro_batch": self.most,
            "longest_sequence": self.longest.map(longest::field),
            "remark": self.remark,
            "largest_piece_bytes": self.pieces.largest.map(|[weights, _]| weights),
            "times_fewer_activation_bytes_whole": self.pieces.times_fewer,
            "kept_layers": plan.keeping.map(|Keeping { kept, of, next_bytes, ceiling }| {
                json!({
                    "count": kept, "of": of, "next_bytes": next_bytes, "ceiling_bytes": ceiling,
                })
            }),
            "no_kept_layers": self.keeps_none,
        });
        if let Some(outlook) = self.outlook {
            outlook.add_to(&mut event, self.model);
        }
        event
    }

    /// The bytes that the EPS of this process holds for each parameter of the model: masters,
    /// optimizer states, gradient regions.
    fn eps_bytes_a_parameter(&self) -> [f64; 3] {
        let parameters = self.model.parameters().max(1) as f64;
        self.plan.eps_bytes().map(|bytes| bytes as f64 / parameters)
    }

    fn print(&self) {
        self.print_bytes();
        self.print_limits();
        let ranks = self.plan.share().ranks;
        self.outlook.into_iter().for_each(|outlook| outlook.print(ranks, self.model));
        match &self.misfits[..] {
            [] => print("fits"),
            misfits => {
                misfits.iter().for_each(|misfit| print(format_args!("does not fit: {misfit}")));
            }
        }
    }

    /// Prints the bytes that the plan holds and moves.
    fn print_bytes(&self) {
        let plan = self.plan;
        number("parameters", self.model.parameters() as u64, "");
        let trained = self.model.trained_parameters();
        if trained < self.model.parameters() {
            number("trained", trained as u64, "of them");
        }
        let [masters, states, waiting] = self.eps_bytes_a_parameter();
        let place = if plan.file.is_empty() { "host" } else { "file" };
        print(format_args!(
            "bytes a parameter   {:>18.2} on the {place}: weights {masters:.2}, optimizer states \
             {states:.2}, waiting gradients {waiting:.2}",
            masters + states + waiting
        ));
        let device = match plan.devices() {
            1 => "device".to_string(),
            devices => format!("each of {devices} devices"),
        };
        for (place, terms, total) in [
            (device.as_str(), &plan.device, plan.device_bytes()),
            ("host", &plan.host, plan.host_bytes()),
            ("file", &plan.file, plan.file_bytes()),
        ] {
            if terms.is_empty() {
                continue;
            }
            number(place, total, "bytes");
            terms.iter().for_each(|term| number(&format!("  {}", term.name), term.bytes, ""));
        }
        if let Some(space) = self.space {
            number("checkpoints", space.bytes(), "bytes on disk, at most");
        }
        // Experts that have visits of their own may have no row in some of them.
        let is_most = self.model.shape.experts.is_some_and(|experts| experts.bundles.is_some());
        let of_links = if is_most { "bytes, less those of idle experts" } else { "bytes" };
        number("upload a step", plan.traffic.upload_bytes, of_links);
        number("download a step", plan.traffic.download_bytes, of_links);
        if plan.devices() > 1 {
            for (device, link) in self.links() {
                let mut others = format!("bytes up, {} down", link.download);
                if link.peers > 0 {
                    write!(others, ", {} from other devices", link.peers).expect("into a text");
                }
                number(&format!("  {device}"), link.upload, &others);
            }
            for (device, part) in self.parts() {
                let words = pieces::words_of_part(part);
                number(&format!("  part of {device}"), part.weight_bytes, &words);
            }
        }
        if plan.share().ranks > 1 {
            let FabricBytes { blocks, gradients } = plan.traffic.fabric_bytes;
            number("sent a step", blocks + gradients, "bytes to other processes");
        }
        if !plan.file.is_empty() {
            number("read a step", plan.traffic.read_bytes, "bytes");
            number("written a step", plan.traffic.written_bytes, "bytes");
        }
    }

    /// Each device's name, and the bytes that a step moves to it and from it.
    fn links(&self) -> impl Iterator<Item = (&String, &LinkBytes)> {
        self.names.iter().zip(&self.plan.traffic.link_bytes)
    }

    /// Each device's name, and what it computes.
    fn parts(&self) -> impl Iterator<Item = (&String, &DevicePart)> {
        self.names.iter().zip(&self.plan.parts)
    }

    /// Prints the numbers that decide whether it fits.
    fn print_limits(&self) {
        let (layer, parameters) = largest_layer(self.model);
        let bytes = (parameters * self.bytes_of_parameter) as u64;
        number("largest layer", bytes, &format!("bytes, {layer}"));
        if let Some([weights, gradient]) = self.pieces.largest {
            let unit = format!("bytes on a device, and {gradient} of its gradient");
            number("largest piece", weights, &unit);
        }
        if let Some(least) = self.least {
            number("least device", least, &format!("bytes, with {}", self.least_is_with));
        }
        match (self.ceiling, self.most) {
            (Some(_), Some(most)) => {
                let of = if self.is_whole_batch { " a batch" } else { "" };
                let unit = format!("sequences{of}, under device.memory");
                number("largest micro-batch", most as u64, &unit)
            }
            (Some(_), None) => print("no micro-batch fits device.memory with these channels"),
            (None, _) => {}
        }
        // Where no length fits, the last line says what is missing.
        if let Some(found) = self.longest.filter(|found| found.first_end().0 > 0) {
            let words = longest::words(found, self.plan.batch.sequences());
            number("longest sequence", found.first_end().0 as u64, &words);
        }
        if let Some(Keeping { kept, of, next_bytes, ceiling }) = self.plan.keeping {
            let next = match next_bytes {
                Some(bytes) => format!("; one more takes {bytes} bytes of the device"),
                None => String::new(),
            };
            // Without device.memory the ceiling is what a GPU has free now.
            let free = match self.ceiling {
                Some(_) => String::new(),
                None => format!(" (of {ceiling} that are free, without 1 GiB for the driver)"),
            };
            let unit = format!("of {of} layers keep activations on the device{next}{free}");
            number("kept layers", kept as u64, &unit);
        }
        self.keeps_none.into_iter().chain(self.remark).for_each(print);
        self.pieces.words().into_iter().for_each(print);
    }
}

fn number(name: &str, value: u64, unit: &str) {
    print(format_args!("{name:<20}{value:>18} {unit}"));
}

/// The layer with the most parameters, and their number.
fn largest_layer(model: &Model) -> (String, usize) {
    let parameters = |(index, blocks): (usize, &Vec<BlockId>)| {
        let lens = blocks.iter().map(|&BlockId(block)| model.blocks[block as usize].len());
        // Of the embedding the device holds one tile at a time.
        let is_whole = model.layers[index].is_on_device();
        (index, if is_whole { lens.sum() } else { lens.max().unwrap_or(0) })
    };
    let all = model.layer_blocks.iter().enumerate().map(parameters);
    let largest = all.max_by_key(|&(_, parameters)| parameters);
    let (index, parameters): (_, usize) = largest.expect("a model has layers");
    (layer_name(model, index), parameters)
}

pub(super) fn layer_name(model: &Model, index: usize) -> String {
    format!("layer {index} ({})", model.layers[index].name())
}
