//! Models, rings and steps that the tests share.
#![allow(dead_code, unreachable_pub, reason = "each test takes what it needs")]

pub mod rehearsal;
pub mod times;

use std::collections::BTreeMap;
use std::time::Duration;

use l2l_actors::ports::Ports;
use l2l_actors::schedule::{
    ALL_CHUNKS, Block, BlockId, Boundary, Capacities, Cut, Input, LayerId, Pools, Question,
    RingLayer, RingModel, RingObjective, RingStep, Role, Schedule, Selection, VisitKind,
    deal_groups, relay,
};
use l2l_actors::{Relay, Resolved, RingConfig, RingError};

/// A boundary of 100 bytes for each sequence.
pub fn boundary(role: Role) -> Boundary {
    Boundary::of_sequences(role, 25, 4)
}

/// A layer of one step.
pub fn layer(kind: VisitKind, needs: Vec<BlockId>, reads: &[Input], writes: &[Role]) -> RingLayer {
    let writes = writes.iter().copied().map(boundary).collect();
    let reads = reads.to_vec();
    let cut = None;
    let chosen_by = None;
    let saves = None;
    let keeps = false;
    let reach = 0;
    let asks = None;
    let step = RingStep { kind, needs, cut, chosen_by, reads, writes, saves, keeps, reach, asks };
    RingLayer { steps: vec![step] }
}

/// An input whose gradient has this role.
pub fn input(role: Role, gradient: Role) -> Input {
    Input::new(boundary(role), Some(boundary(gradient)))
}

/// The statistics, which have no gradient.
pub fn statistics() -> Input {
    Input::new(boundary(Role::Statistics), None)
}

/// A model of `layers` stack layers and `tiles` head tiles behind an embedding; the head's tiles
/// are the embedding's rows when tied. Without tiles the last layer of the stack writes the
/// statistics that the loss is taken from. Nothing is saved.
pub fn model(layers: u32, tiles: u32, tied: bool) -> RingModel {
    let block = |index: u32| {
        let bytes = 1000 + u64::from(index);
        Block {
            weight_bytes: bytes,
            gradient_bytes: 2 * bytes,
            download_bytes: 2 * bytes,
            reduce_scatter_bytes: 2 * bytes,
            encoded: false,
            master_bytes: 3 * bytes,
            state_bytes: 4 * bytes,
            older_bytes: 0,
            region_bytes: 2 * bytes,
            staged: false,
            frozen: false,
        }
    };
    let vocabulary = tiles.max(1);
    let rows: Vec<BlockId> = (0..vocabulary).map(BlockId).collect();
    let head = if tied { 0 } else { vocabulary + layers };
    let hidden = input(Role::Hidden, Role::HiddenGradient);
    let of_head = [input(Role::Hidden, Role::HeadGradient), statistics()];
    let mut all = vec![layer(VisitKind::Gather, rows, &[], &[Role::Hidden, Role::Statistics])];
    all.extend((0..layers).map(|number| {
        let needs = vec![BlockId(vocabulary + number)];
        if tiles == 0 && number + 1 == layers {
            layer(VisitKind::Layer, needs, &[hidden, statistics()], &[Role::Statistics])
        } else {
            layer(VisitKind::Layer, needs, &[hidden], &[Role::Hidden])
        }
    }));
    all.extend((0..tiles).map(|tile| {
        layer(VisitKind::Tile, vec![BlockId(head + tile)], &of_head, &[Role::Statistics])
    }));
    let blocks = vocabulary + layers + if tied { 0 } else { tiles };
    let blocks = (0..blocks).map(block).collect();
    let cuts = BTreeMap::new();
    let layers = all;
    RingModel { blocks, cuts, layers, positions: 1, answers_step: false, objective: None }
}

/// The same model, whose stack layers save activations where `saves` of their number.
pub fn saving(mut model: RingModel, saves: impl Fn(usize) -> bool) -> RingModel {
    for (number, layer) in model.layers.iter_mut().enumerate() {
        for step in layer.steps.iter_mut().filter(|step| step.kind == VisitKind::Layer) {
            step.saves = saves(number).then(|| boundary(Role::SavedActivations));
        }
    }
    model
}

/// What the host does with what layers measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// Layers measure nothing.
    Nothing,
    /// The host reads it.
    Read,
    /// It answers each micro-batch.
    MicroBatch,
    /// It answers when it has that of the whole step.
    Step,
}

/// The same model, whose layers measure something where `measures` of their number.
pub fn measuring(
    mut model: RingModel,
    answers: Answers,
    measures: impl Fn(usize) -> bool,
) -> RingModel {
    let answer = matches!(answers, Answers::MicroBatch | Answers::Step);
    let answer = answer.then(|| boundary(Role::Balance));
    let question = Question { measured: boundary(Role::Routing), answer };
    for (number, layer) in model.layers.iter_mut().enumerate() {
        for step in layer.steps.iter_mut().filter(|step| step.kind == VisitKind::Layer) {
            let is_measured = answers != Answers::Nothing && measures(number);
            step.asks = is_measured.then_some(question);
        }
    }
    RingModel { answers_step: answers == Answers::Step, ..model }
}

/// The same model, whose loss is an objective: of the whole step, or of micro-batches.
pub fn aiming(model: RingModel, of_step: bool) -> RingModel {
    let objective = RingObjective { of_step, gradient: None, reference: None };
    RingModel { objective: Some(objective), ..model }
}

/// The same model, whose objective has a reference that differs from this layer on.
pub fn referring(mut model: RingModel, layer: u32) -> RingModel {
    let objective = model.objective.as_mut().expect("a model with an objective");
    objective.reference = Some(LayerId(layer));
    model
}

/// A model without a head, whose objective reads the last hidden states.
pub fn headless(layers: u32, of_step: bool) -> RingModel {
    let mut all = model(layers, 1, true);
    all.layers.pop();
    for step in all.layers.iter_mut().flat_map(|layer| &mut layer.steps) {
        step.writes.retain(|written| written.role == Role::Hidden);
    }
    let gradient = Some(boundary(Role::HeadGradient));
    let objective = RingObjective { of_step, gradient, reference: None };
    RingModel { objective: Some(objective), ..all }
}

/// The same model, whose layers keep on the device what they save where `keeps` of their number.
pub fn keeping(mut model: RingModel, keeps: impl Fn(usize) -> bool) -> RingModel {
    for (number, layer) in model.layers.iter_mut().enumerate() {
        layer.steps.iter_mut().for_each(|step| step.keeps = keeps(number));
    }
    model
}

/// The same model, whose stack layers leave keys for later chunks where `attends` of their number.
pub fn attending(model: RingModel, attends: impl Fn(usize) -> bool) -> RingModel {
    reaching(model, |number| if attends(number) { ALL_CHUNKS } else { 0 })
}

/// The same model, whose stack layers attend to as many chunks before their own as `reach` says of
/// their number.
pub fn reaching(mut model: RingModel, reach: impl Fn(usize) -> u32) -> RingModel {
    for (number, layer) in model.layers.iter_mut().enumerate() {
        let first = &mut layer.steps[0];
        first.reach = if first.kind == VisitKind::Layer { reach(number) } else { 0 };
    }
    model
}

/// The same model, in which stack layers of some numbers have a step for their block, whose rows
/// choose parts of two further blocks, each of a step of its own.
pub fn choosing(mut model: RingModel, chooses: impl Fn(usize) -> bool) -> RingModel {
    let own = |number| input(Role::Own(number), Role::OwnGradient(number));
    let sum = Input { once: true, ..own(2) };
    for (number, layer) in model.layers.iter_mut().enumerate() {
        let [first] = &mut layer.steps[..] else { panic!("a layer of one step") };
        if first.kind != VisitKind::Layer || !chooses(number) {
            continue;
        }
        let block = model.blocks[first.needs[0].0 as usize];
        let parts = [(); 2].map(|()| {
            model.blocks.push(block);
            RingStep {
                needs: vec![BlockId(model.blocks.len() as u32 - 1)],
                chosen_by: Some(Role::Own(1)),
                reads: vec![own(0), own(1), sum],
                writes: vec![boundary(Role::Own(2))],
                saves: None,
                asks: None,
                ..first.clone()
            }
        });
        let writes = [0, 1, 2].map(|number| boundary(Role::Own(number))).to_vec();
        let writes = std::mem::replace(&mut first.writes, writes);
        let others = first.reads.split_off(1);
        layer.steps.extend(parts);
        let last = &mut layer.steps[2];
        last.writes = writes;
        last.reads.extend(others);
    }
    model
}

/// The same model, whose stack layers of some numbers are in pieces: as many for a first sum, and
/// for a second. Partial sums have twice the bytes of hidden states.
pub fn in_pieces(
    mut model: RingModel,
    pieces: [u16; 2],
    is_cut: impl Fn(usize) -> bool,
) -> RingModel {
    let of_sum = |role| Boundary::of_sequences(role, 50, 4);
    for (number, layer) in model.layers.iter_mut().enumerate() {
        let [whole] = &layer.steps[..] else { continue };
        let passes_on = whole.writes.iter().all(|written| written.role == Role::Hidden);
        if whole.kind != VisitKind::Layer || !passes_on || !is_cut(number) {
            continue;
        }
        let block = model.blocks[whole.needs[0].0 as usize];
        let all = u64::from(pieces[0] + pieces[1]);
        let mut steps = Vec::new();
        let mut cuts = Vec::new();
        for (sum, count) in (0..).zip(pieces) {
            for nth in 0..count {
                let written = if nth + 1 < count { Role::Partial } else { Role::Hidden };
                let down = if nth > 0 { Role::PartialGradient } else { Role::HiddenGradient };
                let sized = |role| match role {
                    Role::Partial | Role::PartialGradient => of_sum(role),
                    role => boundary(role),
                };
                let hidden = Input::new(boundary(Role::Hidden), Some(sized(down)));
                let partial = Input::partial(of_sum(Role::Partial));
                steps.push(RingStep {
                    cut: Some(cuts.len() as u16),
                    reads: [hidden].into_iter().chain((nth > 0).then_some(partial)).collect(),
                    writes: vec![sized(written)],
                    reach: if sum == 0 { whole.reach } else { 0 },
                    asks: whole.asks.filter(|_| cuts.len() as u64 + 1 == all),
                    ..whole.clone()
                });
                cuts.push(Cut {
                    weight_bytes: block.weight_bytes / all,
                    gradient_bytes: block.gradient_bytes / all,
                    download_bytes: block.download_bytes / all,
                    sum,
                });
            }
        }
        model.cuts.insert(whole.needs[0], cuts);
        layer.steps = steps;
    }
    model
}

/// All of a model, of sequences that have so many chunks each, one chunk a micro-batch.
pub fn in_chunks(model: &RingModel, sequences: &[u32]) -> Selection {
    let mut units = 0;
    let mut runs = Vec::new();
    for &chunks in sequences {
        runs.extend((chunks > 1).then(|| units..units + chunks));
        units += chunks;
    }
    Selection { runs, ..Selection::all(model, vec![1; units as usize]) }
}

/// All of a model, in micro-batches of 2 sequences, the last of 1.
pub fn everything(model: &RingModel, micro_batches: u32) -> Selection {
    let mut sizes = vec![2; micro_batches as usize];
    sizes[micro_batches as usize - 1] = 1;
    Selection::all(model, sizes)
}

/// Stack layers `ids` of the model, with its embedding and all tiles.
pub fn some(model: &RingModel, micro_batches: u32, ids: &[u32]) -> Selection {
    let mut selection = everything(model, micro_batches);
    let is_tile = |id: &LayerId| model.layers[id.0 as usize].steps[0].kind == VisitKind::Tile;
    let ends: Vec<LayerId> = selection.layers.clone();
    selection.layers = vec![LayerId(0)];
    selection.layers.extend(ids.iter().map(|&id| LayerId(id + 1)));
    selection.layers.extend(ends.into_iter().filter(is_tile));
    selection
}

pub fn depths(weights: u32, gradients: u32, reduced: u32, stash: u32) -> Capacities {
    Capacities { weights, gradients, reduced, stash }
}

/// A ring made for exactly this schedule.
pub fn config(schedule: &Schedule, depths: &Capacities, deferred: bool) -> RingConfig {
    RingConfig {
        pools: Pools::of(schedule, depths),
        blocks: schedule.blocks.len() as u32,
        max_layers: 1000,
        max_micro_batches: 64,
        deferred,
        trained: 0,
        delay_from: None,
        watchdog: None,
        inject: None,
    }
}

/// A relay whose groups, one for each device, are dealt, and whose blocks come in shards.
pub fn sharded(model: &RingModel, micro_batches: u32, devices: u32) -> Schedule {
    let mut selection = everything(model, micro_batches);
    selection.set_groups(devices);
    let schedule = relay(model, &selection).expect("a model of ours");
    let dealt = deal_groups(schedule, &vec![1; devices as usize]);
    Schedule { shards: devices, ..dealt }
}

/// The same model with all its blocks on file.
pub fn on_file(mut model: RingModel) -> RingModel {
    model.blocks.iter_mut().for_each(|block| block.staged = true);
    model
}

/// Plans a schedule and runs it as a step.
pub async fn step_of<P: Ports>(
    relay: &mut Relay<P>,
    schedule: &Schedule,
    batch: P::Batch,
) -> Result<Resolved, RingError> {
    let plan = relay.plan(schedule.clone())?;
    relay.step(plan, batch).await
}

pub fn ticks(count: u64) -> Duration {
    Duration::from_nanos(count)
}

/// Whether the long searches run whole (`L2L_TESTS=whole`, as at night) or bounded, for a quick
/// answer.
pub fn whole() -> bool {
    match std::env::var("L2L_TESTS").as_deref() {
        Err(_) => false,
        Ok("whole") => true,
        Ok(other) => panic!("L2L_TESTS is {other:?}, and can be \"whole\""),
    }
}
