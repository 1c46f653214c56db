//! Sizes and dtypes that a plan refuses.

use l2l_actors::schedule::{BlockId, Encoding};

use super::spec::PlanSpec;
use super::step::is_of_step;
use super::{Purpose, StepShape};
use crate::compression::{self, Compression};
use crate::config::{Config, Deal, DeviceKind, ReferenceKind, ScheduleKind, StashDtype};
use crate::error::Error;
use crate::kernels::ProblemType;
use crate::models::{Balance, BalanceOf, BlockTensors, Head, Model, Shape};
use crate::objectives::{MOST_METRICS, Measures, Scope};
use crate::tensor::{Dtype, Packing};

impl PlanSpec<'_> {
    /// Refuses a rank at which no matrix is compressed.
    pub(super) fn check_rank(&self) -> Result<(), Error> {
        let Some(Compression::PowerSgd { rank }) = self.settings.compression() else {
            return Ok(());
        };
        let blocks = (0..self.model.blocks.len() as u32).map(BlockId);
        let trained = blocks.flat_map(|id| self.model.computed_gradient(id));
        let most = trained.filter_map(compression::matrix_of);
        let most = most.map(|(rows, columns)| compression::largest_rank(rows, columns)).max();
        let most = most.unwrap_or(0);
        if rank <= most {
            return Ok(());
        }
        let problem = match most {
            0 => format!("is {rank}, and no matrix is trained: set compression.kind = \"int8\""),
            _ => format!(
                "is {rank}, and factors of more than {most} columns are larger than every matrix \
                 that is trained: set at most {most}"
            ),
        };
        Err(Error::config("compression.rank", problem))
    }

    /// Refuses losses and limits of routers that this schedule, or these sequences, cannot have.
    pub(super) fn check_routers(&self) -> Result<(), Error> {
        let Some(experts) = self.model.shape.experts.filter(|_| self.settings.trains) else {
            return Ok(());
        };
        let kind = self.settings.config.schedule.kind;
        let is_whole = matches!(kind, ScheduleKind::Relay | ScheduleKind::Gpipe);
        if experts.balance.is_of_step() && !is_whole {
            return Err(Error::config(
                "experts.balance_over",
                "is \"step\", and with this schedule.kind backward passes begin before all \
                 forward passes of the step have ended: set \"micro-batch\", or schedule.kind = \
                 \"relay\"",
            ));
        }
        let longest = self.steps[0].positions;
        let most = self.model.shape.chunk_positions;
        if experts.balance.drops() && longest > most {
            let key = match experts.balance.capacity_millionths {
                Some(_) => "experts.capacity_factor",
                None => "experts.second_at_random",
            };
            let problem = format_args!(
                "needs whole sequences, and those of {longest} positions are cut into chunks of \
                 {most}: set step.chunk_positions to at least {longest}, or leave it out"
            );
            return Err(Error::config(key, problem));
        }
        Ok(())
    }

    /// Refuses an objective that this model, this schedule or these processes cannot have.
    pub(super) fn check_objective(&self) -> Result<(), Error> {
        let Some(objective) = &self.model.objective else {
            if self.model.shape.embeds() && self.settings.trains {
                let problem = "is \"sentence-embedding\", whose texts have no labels: set \
                               objective.kind = \"contrastive\"";
                return Err(Error::config("model.task", problem));
            }
            return Ok(());
        };
        let name = objective.name();
        let each = objective.sequences();
        let refuse = |what: &str| Err(Error::argument(format_args!("objective {name}: {what}")));
        if each == 0 {
            return refuse("a record has at least one sequence");
        }
        if objective.metric_names().len() > MOST_METRICS {
            return refuse(&format!("it has more than {MOST_METRICS} metrics"));
        }
        if let Some(what) = misfit_of_head(objective.measures(), self.model.shape.head) {
            return refuse(what);
        }
        if !self.model.loss.is_cross_entropy() {
            return refuse("the model has a loss of its own as well: leave one of them out");
        }
        if self.model.label_smoothing > 0.0 {
            return refuse("it reads the labels as they are: leave train.label_smoothing out");
        }
        let config = &self.settings.config;
        let is_whole = matches!(config.schedule.kind, ScheduleKind::Relay | ScheduleKind::Gpipe);
        let is_of_step = is_of_step(config, &**objective);
        let why = match objective.scope() {
            Scope::Step => "its loss is of the whole step".to_string(),
            Scope::Record => format!(
                "a record has {each} sequences and step.micro_batch is {}, which is no multiple",
                config.step.micro_batch
            ),
        };
        if is_of_step && self.settings.trains && !is_whole {
            return refuse(&format!(
                "{why}, and with this schedule.kind backward passes begin before all forward \
                 passes of the step have ended: set schedule.kind = \"relay\""
            ));
        }
        Ok(())
    }

    /// Refuses a reference in the step where the base without adapters is not the model as the run
    /// begins.
    pub(super) fn check_reference(&self) -> Result<(), Error> {
        let config = &self.settings.config;
        let is_in_step = config.objective.reference == Some(ReferenceKind::InStep);
        let has_loss =
            |step: &StepShape| matches!(step.purpose, Purpose::Train | Purpose::Evaluate);
        if !is_in_step || !self.steps.iter().any(has_loss) {
            return Ok(());
        }
        let lora = config.train.lora.as_ref();
        let why: String = if lora.is_none() || self.model.first_adapted().is_none() {
            "the model has no adapters, without which it would be the reference: set train.lora"
                .into()
        } else if !self.settings.trains {
            return Ok(());
        } else if lora.is_some_and(|lora| lora.path.is_some()) {
            "the reference would lack the adapters of train.lora.path: leave that out".into()
        } else if let Some(name) = self.model.trained_beside_adapters() {
            format!(
                "{name} is trained beside the adapters, and the reference would change with it: \
                     leave it out of train.only"
            )
        } else if config.train.neftune_alpha > 0.0 {
            "the reference would have the noise of train.neftune_alpha: leave that out".into()
        } else {
            return Ok(());
        };
        let problem = format_args!("is \"in-step\", and {why}, or set \"before\"");
        Err(Error::config("objective.reference", problem))
    }

    /// Refuses to leave idle experts alone where that is not built.
    pub(super) fn check_idle_experts(&self) -> Result<(), Error> {
        let mut trained = self.model.blocks.iter().flat_map(BlockTensors::trained);
        if !self.settings.trains || trained.all(|tensor| tensor.kept_with.is_none()) {
            return Ok(());
        }
        let balance = self.model.shape.experts.map_or_else(Balance::default, |one| one.balance);
        let Balance { of, second_at_random, .. } = balance;
        let why = if self.share.ranks > 1 {
            "each of several processes counts its own tokens: start one process"
        } else if self.settings.compression().is_some() {
            "an expert without tokens has a compressed gradient: what compression kept of earlier \
             ones. Leave out compression.kind"
        } else if of == BalanceOf::FirstChoice {
            "with experts.balance_of = \"first-choice\" a step counts first choices alone: set \
             \"each-layer\""
        } else if second_at_random {
            "with experts.second_at_random a step does not count the choices that are left: set it \
             to false"
        } else {
            return Ok(());
        };
        let problem = format_args!("is \"keep\", and {why}, or set experts.idle = \"update\"");
        Err(Error::config("experts.idle", problem))
    }

    /// Refuses a dtype or an encoding of the stash that does not fit the model's widths.
    pub(super) fn check_dtype(&self) -> Result<(), Error> {
        let Shape { hidden, embedding_channels, .. } = self.model.shape;
        self.check_width(hidden)?;
        embedding_channels.map_or(Ok(()), |width| self.check_width(width))
    }

    fn check_width(&self, width: usize) -> Result<(), Error> {
        let dtype = self.settings.config.device.dtype;
        if dtype != Dtype::F32 && !width.is_multiple_of(2) {
            let problem =
                format_args!("is {dtype}, and the model's width of {width} is odd: set \"f32\"");
            return Err(Error::config("device.dtype", problem));
        }
        let block = self.settings.config.stash.block_size as usize;
        if self.settings.config.stash.dtype == StashDtype::Int8 && !width.is_multiple_of(block) {
            let nearest = (1..=width.min(block)).rev().find(|&block| width.is_multiple_of(block));
            let problem = format_args!(
                "is {block}, which does not divide the model's width of {width}: set {}",
                nearest.unwrap_or(1)
            );
            return Err(Error::config("stash.block_size", problem));
        }
        let encoding = |block: usize| Encoding::Int8 { block: block as u32 };
        let is_smaller = |block: usize| {
            let packing = Packing { dtype, encoding: encoding(block), columns: width };
            packing.floats(1) < dtype.floats(width)
        };
        if self.settings.config.stash.dtype == StashDtype::Int8 && !is_smaller(block) {
            let least = (block..=width).find(|&b| width.is_multiple_of(b) && is_smaller(b));
            let remedy = least.map_or("leave out stash.dtype".into(), |b| format!("set {b}"));
            let problem = format_args!(
                "is {block}, with whose scales int8 is not smaller than {dtype}: {remedy}"
            );
            return Err(Error::config("stash.block_size", problem));
        }
        Ok(())
    }
}

/// Why an objective that reads this cannot have this head, if it cannot.
fn misfit_of_head(reads: Measures, head: Head) -> Option<&'static str> {
    let one_score = Head::Classes { labels: 1, problem: ProblemType::Regression };
    match reads {
        Measures::Embeddings if !matches!(head, Head::Embedding { .. }) => Some(
            "it reads embeddings, and this model predicts something: set model.task = \
             \"sentence-embedding\"",
        ),
        Measures::Scores if head != one_score => Some(
            "it reads one score of each sequence, and this model predicts something else: set \
             model.task = \"sequence-classification\" and model.labels = 1",
        ),
        Measures::LogProbabilities | Measures::Tokens if head != Head::Tokens => Some(
            "it reads log-probabilities of next tokens, and this model predicts something else: \
             set model.task = \"causal-lm\"",
        ),
        _ => None,
    }
}

/// Refuses what a window of batches cannot have.
fn check_stages(config: &Config, model: &Model, ranks: u32) -> Result<(), Error> {
    let Some(kind) = config.schedule.kind.of_windows() else { return Ok(()) };
    let layers = model.layers.len() - 1;
    let stages = config.schedule.stages.unwrap_or(1);
    if stages as usize > layers {
        let problem = format_args!(
            "is {stages}, and the model has {layers} layers for devices: set at most {layers}"
        );
        return Err(Error::config("schedule.stages", problem));
    }
    let is_tied = model.shape.tied && model.shape.scores_vocabulary();
    let trains_table = !model.computed_gradient(BlockId(0)).is_empty();
    let tied = "tied embeddings that train, which two stages would update";
    let refused = [
        (model.shape.experts.is_some(), "experts"),
        (is_tied && trains_table, tied),
        (model.objective.is_some(), "an objective"),
        (ranks > 1, "several processes"),
    ];
    match refused.into_iter().find(|(is, _)| *is) {
        Some((_, what)) => {
            let problem = format_args!("is \"{kind}\", which cannot have {what}: set \"1f1b\"");
            Err(Error::config("schedule.kind", problem))
        }
        None => Ok(()),
    }
}

/// Refuses steps that no machine could hold. Nothing is sized before this check, so sums of sizes
/// do not overflow.
pub(super) fn check_sizes(
    config: &Config,
    model: &Model,
    StepShape { sequences, positions, .. }: StepShape,
    ranks: u32,
) -> Result<(), Error> {
    // A schedule of more visits would take gigabytes.
    const VISITS: u128 = 1 << 22;
    // 64 TiB: more than the memory of any host.
    const FLOATS: u128 = 1 << 44;
    let shape = &model.shape;
    let devices = config.devices();
    let layers = model.stops();
    let noun = if shape.pieces > 1 { "layers and pieces of layers" } else { "layers" };
    let is_dealt = config.parallel.deal == Deal::Layers;
    if is_dealt && devices as usize > layers {
        let problem = format_args!(
            "is {devices}, and the model has {layers} {noun} for devices: set at most {layers}"
        );
        let key = match config.device.kind {
            DeviceKind::Cpu => "device.count",
            DeviceKind::Cuda => "the number of device.ordinals",
        };
        return Err(Error::config(key, problem));
    }
    let stages = u64::from(devices) * u64::from(config.schedule.chunks());
    if config.schedule.kind.is_pipeline() && stages > layers as u64 {
        let problem = format_args!(
            "is {}, which with device.count makes {stages} stages, and the model has {layers} \
             {noun} for devices: set less",
            config.schedule.chunks()
        );
        return Err(Error::config("schedule.chunks", problem));
    }
    check_stages(config, model, ranks)?;
    let turns = sequences.div_ceil(config.step.micro_batch) as u128;
    let parts: usize = model.first_ports.iter().map(|steps| steps.len().max(1)).sum();
    let visits = turns.saturating_mul(parts as u128);
    if visits > VISITS {
        let is_apart = shape.experts.is_some_and(|experts| experts.bundles.is_some());
        let remedy = match (config.window(), is_apart) {
            (2.., _) => "schedule.window smaller",
            (_, true) => "step.micro_batch or schedule.bundles larger or step.batch smaller",
            (_, false) => "step.micro_batch larger or step.batch smaller",
        };
        return Err(Error::argument(format_args!(
            "a step of {turns} micro-batches over {} layers is {visits} turns of at most {VISITS}: \
             make {remedy}",
            model.layers.len()
        )));
    }
    let width = 8 * shape.hidden as u128 + 4 * shape.intermediate as u128 + shape.heads as u128;
    let rows = sequences as u128 * positions as u128;
    let of_rank = rows.div_ceil(u128::from(ranks));
    let floats = of_rank.saturating_mul(width).saturating_mul(model.layers.len() as u128);
    if floats > FLOATS {
        return Err(Error::argument(format_args!(
            "a step of {rows} positions through {} layers of width {} needs more memory than there \
             is: make {}step.batch, data.sequence_length or the model smaller",
            model.layers.len(),
            shape.hidden,
            if config.window() > 1 { "schedule.window, " } else { "" }
        )));
    }
    Ok(())
}
