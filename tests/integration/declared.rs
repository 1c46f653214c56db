//! Layers that declare several blocks, several steps, boundaries of their own, or activations that
//! every second layer saves: each trains to the bits of the plain layer, wherever it runs.

use std::path::Path;
use std::sync::Arc;
use std::thread;

use l2l::actors::schedule::{Boundary, Role};
use l2l::config::{Deal, EpsTier, Recompute, ScheduleKind, Transfer};
use l2l::data::Batches;
use l2l::fabric::{self, Fabric};
use l2l::kernels::{
    Activate, ActivateBackward, Activation, Cast, Kernels, Linear, LinearBackward, Residual,
};
use l2l::models::{
    Backward, Cuts, Final, Forward, Init, Kind, Layer, LayerStep, Model, Save, Shape, Stem,
    StepContext, Tensor,
};
use l2l::tensor::{Dtype, View};
use l2l::{Config, Trainer, shape_of};

/// How a layer is declared. What it computes is the same.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Declared {
    /// One block, one step, nothing saved.
    Plain,
    /// Three blocks.
    Blocks,
    /// A step before the activation function, and one behind it.
    Steps,
    /// Each even layer leaves the sum on the residual stream to the layer above it.
    HandedUp,
    /// Every second layer saves what its activation function reads.
    Saves,
}

/// y = x + gelu(x a + b) c + d.
struct Bottleneck {
    number: usize,
    declared: Declared,
}

const C: usize = 16;
const N: usize = 6;
const LAYERS: usize = 4;

/// Positions of a sequence that is computed in chunks of 128.
const LONG: usize = 300;

/// The numbers of boundaries that only these layers know.
const NARROW: u16 = 3;
const ADDED: u16 = 8;

impl Bottleneck {
    fn leaves_sum(&self) -> bool {
        self.declared == Declared::HandedUp && self.number.is_multiple_of(2)
    }

    fn takes_sum(&self) -> bool {
        self.declared == Declared::HandedUp && !self.number.is_multiple_of(2)
    }

    fn saves(&self) -> bool {
        self.declared == Declared::Saves && self.number.is_multiple_of(2)
    }
}

/// Copies a tensor.
fn copy(k: &dyn Kernels, y: View, x: View) {
    k.cast(&Cast { y, x });
}

fn add(k: &dyn Kernels, y: View, a: View, x: View) {
    k.residual(&Residual { y, a, x, dropout: None });
}

fn linear(k: &dyn Kernels, y: View, x: View, w: View, bias: View) {
    k.linear(&Linear { y, x, w, bias: Some(bias), transposed: false });
}

impl Layer for Bottleneck {
    fn tensors(&self) -> Vec<Tensor> {
        // Random values follow from a tensor's place among the blocks: only the very first is
        // drawn.
        let drawn = if self.number == 0 { Init::Normal(0.1) } else { Init::Ones };
        let tensor = |name: &str, shape: &[usize], kind, init| Tensor {
            name: format!("layers.{}.{name}", self.number),
            shape: shape.to_vec(),
            kind,
            init,
            joined: false,
            stacked: false,
            kept_with: None,
        };
        vec![
            tensor("a", &[C, N], Kind::Weight, drawn),
            tensor("b", &[N], Kind::Bias, Init::Zeros),
            tensor("c", &[N, C], Kind::Weight, Init::Ones),
            tensor("d", &[C], Kind::Bias, Init::Zeros),
        ]
    }

    /// The first layer does not say that its positions are computed by themselves.
    fn cuts(&self, _step: usize) -> Cuts {
        if self.number == 0 { Cuts::Never } else { Cuts::ByPosition }
    }

    fn blocks(&self) -> Vec<usize> {
        if self.declared == Declared::Blocks { vec![2, 1, 1] } else { vec![4] }
    }

    fn steps(&self, context: &StepContext) -> Vec<LayerStep> {
        let blocks = (0..self.blocks().len()).collect();
        let mut step = LayerStep::on_hidden(context, blocks);
        if self.leaves_sum() {
            step.writes.push(context.own(ADDED, C));
        }
        if self.takes_sum() {
            step.reads.push(context.own_input(ADDED, C));
        }
        if self.saves() && context.save.is_some() {
            step.saves = Some(Boundary::of_tokens(Role::SavedActivations, N, 4));
        }
        vec![step]
    }

    fn saved_len(&self, _positions: usize, _save: Save, _dtype: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { weights, y, ports, saved, scratch, .. } = *pass;
        let longest = if self.number == 0 { LONG } else { 128 };
        assert!(pass.batch.longest() <= longest && pass.x.rows == pass.batch.rows());
        let [a, b, c, d] = weights.try_into().expect("four tensors");
        let mut x = pass.x;
        if let Some(added) = ports.read(Role::Own(ADDED)) {
            let sum = scratch.take_like(x);
            add(k, sum, x, added);
            x = sum;
        }
        let narrow = saved.map_or_else(|| scratch.take(x.rows, N), |(_, view)| view);
        let activated = scratch.take_like(narrow);
        linear(k, narrow, x, a, b);
        k.activate(&Activate { y: activated, x: narrow, activation: Activation::GeluTanh });
        match ports.written(Role::Own(ADDED)) {
            Some(added) => {
                linear(k, added, activated, c, d);
                copy(k, y, x);
            }
            None => {
                let added = scratch.take_like(y);
                linear(k, added, activated, c, d);
                add(k, y, x, added);
            }
        }
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { weights, gradients, accumulate, dy, ports, saved, scratch, .. } = *pass;
        let [a, b, c, _] = weights.try_into().expect("four tensors");
        let [da, db, dc, dd] = gradients.try_into().expect("four tensors");
        let dx = pass.dx.unwrap_or_else(|| scratch.take_like(dy));
        let mut x = pass.x;
        if let Some(added) = ports.read(Role::Own(ADDED)) {
            let sum = scratch.take_like(x);
            add(k, sum, x, added);
            x = sum;
        }
        let narrow = match saved {
            Some((_, view)) => view,
            None => {
                let narrow = scratch.take(x.rows, N);
                linear(k, narrow, x, a, b);
                narrow
            }
        };
        let activation = Activation::GeluTanh;
        let transposed = false;
        let activated = scratch.take_like(narrow);
        let dnarrow = scratch.take_like(narrow);
        let dadded = scratch.take_like(dy);
        k.activate(&Activate { y: activated, x: narrow, activation });
        let dsum = ports.read(Role::OwnGradient(ADDED)).unwrap_or(dy);
        let dw = dc;
        let dbias = dd;
        let up = LinearBackward {
            dx: dnarrow,
            dw,
            dbias,
            dy: dsum,
            x: activated,
            w: c,
            transposed,
            accumulate,
        };
        k.linear_backward(&up, scratch);
        k.activate_backward(&ActivateBackward { dx: dnarrow, x: narrow, activation });
        let dw = da;
        let dbias = db;
        let down =
            LinearBackward { dx: dadded, dw, dbias, dy: dnarrow, x, w: a, transposed, accumulate };
        k.linear_backward(&down, scratch);
        add(k, dx, dy, dadded);
        if let Some(dadded) = ports.written(Role::OwnGradient(ADDED)) {
            copy(k, dadded, dx);
        }
    }
}

/// The same layer, visited before its activation function and behind it.
struct InTwoSteps(Bottleneck);

impl Layer for InTwoSteps {
    fn tensors(&self) -> Vec<Tensor> {
        self.0.tensors()
    }

    fn cuts(&self, step: usize) -> Cuts {
        self.0.cuts(step)
    }

    fn blocks(&self) -> Vec<usize> {
        vec![2, 2]
    }

    fn steps(&self, context: &StepContext) -> Vec<LayerStep> {
        let hidden = LayerStep::on_hidden(context, vec![0]);
        let narrow = context.own(NARROW, N);
        let reads = vec![context.own_input(NARROW, N), context.hidden_input()];
        let writes = vec![context.hidden()];
        vec![
            LayerStep { writes: vec![narrow], ..hidden },
            LayerStep { reads, writes, ..LayerStep::on_hidden(context, vec![1]) },
        ]
    }

    fn saved_len(&self, _positions: usize, _save: Save, _dtype: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { weights, x, y, ports, scratch, .. } = *pass;
        let [w, bias] = weights.try_into().expect("two tensors");
        if pass.step == 0 {
            return linear(k, y, x, w, bias);
        }
        let activated = scratch.take_like(x);
        let added = scratch.take_like(y);
        k.activate(&Activate { y: activated, x, activation: Activation::GeluTanh });
        linear(k, added, activated, w, bias);
        add(k, y, ports.read(Role::Hidden).expect("it is declared"), added);
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { weights, gradients, accumulate, x, dy, ports, scratch, .. } = *pass;
        let [w, _] = weights.try_into().expect("two tensors");
        let [dw, dbias] = gradients.try_into().expect("two tensors");
        let transposed = false;
        if pass.step == 0 {
            let stream = ports.read(Role::HiddenGradient).expect("the step above adds to it");
            let dadded = scratch.take_like(x);
            let down = LinearBackward { dx: dadded, dw, dbias, dy, x, w, transposed, accumulate };
            k.linear_backward(&down, scratch);
            return pass.dx.into_iter().for_each(|dx| add(k, dx, stream, dadded));
        }
        let activation = Activation::GeluTanh;
        let activated = scratch.take_like(x);
        k.activate(&Activate { y: activated, x, activation });
        let dx = ports.written(Role::OwnGradient(NARROW)).expect("the step below needs it");
        let up = LinearBackward { dx, dw, dbias, dy, x: activated, w, transposed, accumulate };
        k.linear_backward(&up, scratch);
        k.activate_backward(&ActivateBackward { dx, x, activation });
        let stream = ports.written(Role::HiddenGradient).expect("the step below needs it");
        copy(k, stream, dy);
    }
}

fn model(shape: Shape, declared: Declared) -> Model {
    let layer = |number| -> Box<dyn Layer> {
        let layer = Bottleneck { number, declared };
        if declared == Declared::Steps { Box::new(InTwoSteps(layer)) } else { Box::new(layer) }
    };
    let mut stack: Vec<Box<dyn Layer>> = vec![Box::new(Stem { index: 1, shape })];
    stack.extend((0..LAYERS).map(layer));
    stack.push(Box::new(Final::new(shape)));
    Model::of(shape, stack)
}

fn base() -> Config {
    let mut config = Config::default();
    config.data.train = "random".into();
    config.model.layers = Some(LAYERS);
    config.model.hidden = Some(C);
    config.model.heads = Some(2);
    config.model.vocabulary = Some(31);
    config.model.dropout = Some(0.0);
    config.data.sequence_length = Some(7);
    config.step.batch = 4;
    config.step.micro_batch = 1;
    config.optimizer.learning_rate = 1e-3;
    config.schedule.recompute = false.into();
    config
}

/// Losses and norms of three steps, as every rank reports them.
fn train(place: &Place, declared: Declared) -> Vec<(f64, f64)> {
    let config = &place.config;
    let on_rank = |fabric: Option<Arc<dyn Fabric>>| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(train_rank(config, declared, fabric))
    };
    if place.ranks == 1 {
        return on_rank(None);
    }
    let mut reports = thread::scope(|scope| {
        let start = |fabric| scope.spawn(move || on_rank(Some(Arc::new(fabric))));
        let ranks: Vec<_> = fabric::threads(place.ranks).into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<Vec<_>>()
    });
    let first = reports.swap_remove(0);
    assert!(reports.iter().all(|other| *other == first), "ranks report the same numbers");
    first
}

async fn train_rank(
    config: &Config,
    declared: Declared,
    fabric: Option<Arc<dyn Fabric>>,
) -> Vec<(f64, f64)> {
    let shape = shape_of(config).expect("a shape of ours");
    let mut batches = Batches::open(config).expect("random data");
    let mut builder = Trainer::builder(config.clone()).model(model(shape, declared));
    if let Some(fabric) = fabric {
        builder = builder.fabric(fabric);
    }
    let mut trainer = builder.start().await.expect("a model of ours");
    let mut found = Vec::new();
    for _ in 0..3 {
        let batch = batches.next().await.expect("random data");
        let report = trainer.step(batch).await.expect("a step");
        found.push((report.loss, report.grad_norm));
    }
    trainer.stop().await.expect("an end");
    found
}

/// Where a model runs.
struct Place {
    config: Config,
    ranks: u32,
}

fn places(folder: &Path) -> Vec<Place> {
    let kinds = [
        ScheduleKind::Relay,
        ScheduleKind::Resident,
        ScheduleKind::Gpipe,
        ScheduleKind::OneForwardOneBackward,
    ];
    let mut all = Vec::new();
    for kind in kinds {
        for devices in 1..=3 {
            let mut config = base();
            config.schedule.kind = kind;
            config.device.count = Some(devices);
            all.push(Place { config, ranks: 1 });
        }
    }
    let mut interleaved = base();
    interleaved.schedule.kind = ScheduleKind::Interleaved;
    interleaved.device.count = Some(2);
    all.push(Place { config: interleaved, ranks: 1 });
    for (kind, devices) in
        [(ScheduleKind::Relay, 2), (ScheduleKind::Resident, 1), (ScheduleKind::Gpipe, 2)]
    {
        let mut long = base();
        long.schedule.kind = kind;
        long.device.count = Some(devices);
        (long.model.positions, long.data.sequence_length) = (Some(LONG), Some(LONG));
        (long.step.batch, long.step.chunk_positions) = (2, 128);
        all.push(Place { config: long, ranks: 1 });
    }
    // One micro-batch stays on the device, where several steps of a layer read it.
    let mut linked = base();
    linked.device.link = Some("2GB/s".to_string());
    linked.step.micro_batch = 4;
    all.push(Place { config: linked, ranks: 1 });
    for transfer in [Transfer::Whole, Transfer::Sharded] {
        let mut config = base();
        config.device.count = Some(2);
        config.parallel.deal = Deal::Sequences;
        config.parallel.transfer = transfer;
        config.parallel.groups = 2;
        all.push(Place { config, ranks: 1 });
    }
    for ranks in 1..=2 {
        let mut in_memory = base();
        in_memory.parallel.groups = ranks;
        let mut on_file = in_memory.clone();
        on_file.eps.tier = EpsTier::File;
        on_file.eps.path = Some(folder.join(format!("eps-{ranks}")));
        let mut recomputed = in_memory.clone();
        recomputed.schedule.recompute = true.into();
        let mut kept = in_memory.clone();
        kept.schedule.recompute = Recompute::AUTO;
        kept.device.memory = "1GiB".parse().expect("a size");
        let all_of = [in_memory, on_file, recomputed, kept];
        all.extend(all_of.map(|config| Place { config, ranks }));
    }
    all
}

#[test]
fn what_layers_declare_changes_no_bit() {
    let folder = tempfile::tempdir().expect("a place for files");
    for (number, mut place) in places(folder.path()).into_iter().enumerate() {
        let mut plain: Option<Vec<(f64, f64)>> = None;
        for declared in [
            Declared::Plain,
            Declared::Blocks,
            Declared::Steps,
            Declared::HandedUp,
            Declared::Saves,
        ] {
            let path = &mut place.config.eps.path;
            *path = path.take().map(|path| path.with_extension(format!("{declared:?}")));
            let found = train(&place, declared);
            let plain = plain.get_or_insert_with(|| found.clone());
            for (ours, theirs) in found.iter().zip(plain.iter()) {
                assert_eq!(ours.0, theirs.0, "{number} {declared:?}: {found:?} {plain:?}");
                let apart = (ours.1 - theirs.1).abs();
                assert!(apart <= 1e-6 * theirs.1, "{number} {declared:?}: {found:?} {plain:?}");
            }
            assert!(found[0].0.is_finite() && found[0].0 != found[2].0, "it learns: {found:?}");
        }
    }
}
