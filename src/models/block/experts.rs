//! The experts of a block on one chunk, forward and backward: each row chooses some of them, and
//! their weighted outputs are added in the order of the experts, in floats. So the result does not
//! depend on the blocks in which experts lie, nor on the visits that run them.

use std::iter;
use std::ops::Range;

use super::TransformerBlock;
use super::backward::{Buffers, ChunkGradients};
use super::chunk::ChunkPass;
use super::products::{MlpPart, MlpPass, Products, Weighted};
use super::tensors::{ExpertWeights, Mlp, Product, SharedExpert};
use crate::kernels::{
    BatchView, Cast, Clear, CombineRows, Dispatch, GateRows, GateRowsBackward, GatherRows, Kernels,
    Linear, LinearBackward, Residual, Route, RouteBackward, RowWeights,
};
use crate::models::block_tensors::SlotWeight;
use crate::models::norms::Affine;
use crate::models::shape::Experts;
use crate::tensor::{Scratch, View};

/// What the experts of a chunk begin with.
pub(super) struct Opened {
    /// The sum of the experts' outputs so far: that of the shared expert, or 0. Floats. (R, C).
    pub(super) sum: View,
    /// The experts of each row, and their weights. (R, 2 k).
    pub(super) chosen: View,
}

/// What the experts of a chunk end with.
pub(super) struct Closed {
    /// The chunk's output. (R, C).
    pub(super) y: View,
    /// The residual stream behind attention. (R, C).
    pub(super) attention_sum: View,
    /// The sum of all experts' outputs. Floats. (R, C).
    pub(super) sum: View,
    /// Workspace. (R, C).
    pub(super) buffer: View,
}

/// What the router computes of a chunk.
struct Choice {
    /// (R, E).
    logits: View,
    /// (R, 2 k).
    chosen: View,
}

/// Runs the experts of a block on the rows of a chunk that chose them.
///
/// Legend: R rows, E experts, k choices of a row, S = R k assignments.
pub(super) struct ExpertPass<'a> {
    products: &'a Products<'a>,
    /// The experts' input. (R, C).
    x: View,
    /// The experts of each row, and their weights. (R, 2 k).
    chosen: View,
    /// The row of each assignment, sorted by expert. (1, S).
    rows: View,
    /// The place of each assignment among the choices of all rows. (1, S).
    places: View,
    /// The rows of each expert. (E).
    counts: Vec<usize>,
    /// The experts before their activation function, sorted by expert, if they are saved.
    /// (S, 2 I).
    up: Option<View>,
}

/// The assignments of experts that follow each other.
#[derive(Clone, Copy)]
struct Assigned {
    /// Where they begin among all assignments.
    first: usize,
    /// N.
    count: usize,
    /// (1, N).
    rows: View,
    weights: RowWeights,
}

/// Experts that follow each other and run at once, so that a device computes their products side by
/// side. Together they have at most R rows: more than one of them need no more workspace than one
/// that all rows chose.
struct Run {
    /// The index of the first among the experts that were asked for.
    first: usize,
    /// The rows of each among those of the run.
    rows: Vec<Range<usize>>,
}

impl Run {
    /// The experts' numbers. `first` is that of the first one that was asked for.
    fn numbers(&self, first: usize) -> Range<usize> {
        let begin = first + self.first;
        begin..begin + self.rows.len()
    }

    /// The number of its rows.
    fn end(&self) -> usize {
        self.rows.last().map_or(0, |rows| rows.end)
    }

    /// The indices and rows of the experts that have rows.
    fn filled(&self) -> impl Iterator<Item = (usize, &Range<usize>)> {
        (self.first..).zip(&self.rows).filter(|(_, rows)| !rows.is_empty())
    }
}

/// The backward of some experts that follow each other.
pub(super) struct ExpertGradients<'a> {
    /// The number of the first.
    pub(super) first: usize,
    pub(super) w: &'a [Mlp<SlotWeight<'a>>],
    pub(super) d: &'a [Mlp<Option<View>>],
    /// True to add to the gradients of their tensors; false to overwrite them.
    pub(super) accumulate: bool,
    pub(super) passed: PassedDown,
}

/// What the backward of the experts hands to that of the router and of the shared expert.
#[derive(Clone, Copy)]
pub(super) struct PassedDown {
    /// The gradient of the sum of the experts' outputs. (R, C).
    pub(super) dy: View,
    /// The gradient of the experts' input. Floats, added to. (R, C).
    pub(super) dh: View,
    /// The gradient of each chosen weight. (R, k).
    pub(super) dchosen: View,
}

impl<'a> ExpertPass<'a> {
    /// Sorts the rows by expert.
    pub(super) fn new(
        products: &'a Products<'a>,
        [x, chosen]: [View; 2],
        up: Option<View>,
        scratch: &Scratch<'_>,
    ) -> ExpertPass<'a> {
        let experts = products.block.experts().expect("the block has experts").count;
        let assignments = chosen.rows * (chosen.columns / 2);
        let [rows, places] = [(); 2].map(|()| scratch.take_floats(1, assignments));
        let counts = products.k.dispatch(&Dispatch { rows, places, chosen, experts });
        ExpertPass { products, x, chosen, rows, places, counts, up }
    }

    fn of(&self, experts: Range<usize>) -> Assigned {
        let before: usize = self.counts[..experts.start].iter().sum();
        let count = self.counts[experts].iter().sum();
        // Where there is no memory, each expert counts all rows, so that workspace is measured.
        let first = before.min(self.rows.columns - count);
        let [rows, places] = [self.rows, self.places].map(|all| all.part(first..first + count));
        let weights = RowWeights { places, chosen: self.chosen };
        Assigned { first, count, rows, weights }
    }

    /// The runs of some experts, of which `first` is the number of the first.
    fn runs(&self, first: usize, experts: &[Mlp<SlotWeight<'_>>]) -> Vec<Run> {
        let mut runs = Vec::<Run>::new();
        for (at, expert) in experts.iter().enumerate() {
            let count = self.counts[first + at];
            let joins = |run: &&mut Run| {
                let are_fit = [expert, &experts[run.first]].map(Mlp::runs_beside_others);
                are_fit == [true; 2] && run.end() + count <= self.x.rows
            };
            match runs.last_mut().filter(joins) {
                Some(run) => run.rows.push(run.end()..run.end() + count),
                None => runs.push(Run { first: at, rows: iter::once(0..count).collect() }),
            }
        }
        runs
    }

    /// Adds the outputs of a run of experts to `y`, or their inputs' gradients, which have no
    /// weights. The backward adds in descending order.
    fn combine(&self, run: &Run, at: &Assigned, [y, x]: [View; 2], is_forward: bool) {
        let expert = |rows: &Range<usize>| {
            let part = |all: View| all.part(rows.clone());
            let weights = RowWeights { places: part(at.weights.places), ..at.weights };
            let weights = is_forward.then_some(weights);
            CombineRows { y, x: x.row_range(rows.clone()), rows: Some(part(at.rows)), weights }
        };
        let mut experts: Vec<CombineRows> = run.filled().map(|(_, rows)| expert(rows)).collect();
        if !is_forward {
            experts.reverse();
        }
        self.products.k.combine_experts(&experts);
    }

    /// The place of the rows of some experts before their activation function.
    fn expert_up(&self, at: Assigned, scratch: &Scratch<'_>) -> View {
        let block = self.products.block;
        let channels = block.experts().map_or(0, |experts| experts.intermediate);
        let saved = self.up.map(|all| all.row_range(at.first..at.first + at.count));
        saved.unwrap_or_else(|| scratch.take(at.count, block.shape.up_of(channels)))
    }

    /// Adds the weighted outputs of these experts to `sum`. `first` is the number of the first.
    pub(super) fn forward(
        &self,
        first: usize,
        experts: &[Mlp<SlotWeight<'_>>],
        sum: View,
        scratch: &Scratch<'_>,
    ) {
        let Products { block, k, .. } = *self.products;
        let channels = block.experts().map_or(0, |experts| experts.intermediate);
        for run in self.runs(first, experts) {
            let at = self.of(run.numbers(first));
            if at.count == 0 {
                continue;
            }
            let scratch = &scratch.nested();
            let w: Vec<_> = run.filled().map(|(at, _)| experts[at].ready(k, scratch)).collect();
            let of_each = |product: fn(&Mlp<View>) -> &Product<View>| -> Vec<_> {
                let parts = run.filled().zip(&w);
                parts.map(|((_, rows), w)| (rows.clone(), product(w))).collect()
            };
            let x = scratch.take(at.count, sum.columns);
            k.gather_rows(&GatherRows { y: x, x: self.x, rows: at.rows });
            let up = self.expert_up(at, scratch);
            self.products.linears(up, x, &of_each(|w| &w.up));
            let activated = scratch.take(at.count, channels);
            self.products.activate(activated, up);
            self.products.linears(x, activated, &of_each(|w| &w.down));
            self.combine(&run, &at, [sum, x], true);
        }
    }

    /// The gradients of these experts' tensors, and what the experts add to those of their input
    /// and weights, from the last expert to the first.
    pub(super) fn backward(&self, g: &ExpertGradients<'_>, scratch: &Scratch<'_>) {
        let idle = g.d.iter().zip(&self.counts[g.first..]).filter(|(_, count)| **count == 0);
        for gradient in idle.filter(|_| !g.accumulate).flat_map(|(d, _)| d.all()) {
            self.products.k.clear(&Clear { y: gradient });
        }
        for run in self.runs(g.first, g.w).into_iter().rev() {
            let at = self.of(run.numbers(g.first));
            if at.count > 0 {
                self.run_backward(g, &run, at, &scratch.nested());
            }
        }
    }

    /// The backward of experts that run at once and have rows.
    fn run_backward(
        &self,
        g: &ExpertGradients<'_>,
        run: &Run,
        at: Assigned,
        scratch: &Scratch<'_>,
    ) {
        let Products { block, k, .. } = *self.products;
        let ExpertGradients { accumulate, passed: PassedDown { dy, dh, dchosen }, .. } = *g;
        let Assigned { count, rows, weights, .. } = at;
        let w: Vec<_> = run.filled().map(|(at, _)| g.w[at].ready(k, scratch)).collect();
        let parts = run.filled().zip(&w);
        let parts = parts.map(|((at, rows), w)| MlpPart { rows: rows.clone(), w, d: &g.d[at] });
        let parts: &Vec<MlpPart<'_>> = &parts.collect();
        let [x, dy_rows] = [(); 2].map(|()| scratch.take(count, dh.columns));
        k.gather_rows(&GatherRows { y: x, x: self.x, rows });
        k.gather_rows(&GatherRows { y: dy_rows, x: dy, rows });
        let up = self.expert_up(at, scratch);
        if self.up.is_none() {
            let ups = parts.iter().map(|MlpPart { rows, w, .. }| (rows.clone(), &w.up));
            self.products.linears(up, x, &ups.collect::<Vec<_>>());
        }
        let channels = block.experts().map_or(0, |experts| experts.intermediate);
        let activated = scratch.take(count, channels);
        self.products.activate(activated, up);
        let weighted = Some(Weighted { weights, dchosen });
        let dx = dy_rows;
        let mlp = MlpPass { parts, x, up, activated, weighted, accumulate };
        self.products.mlp_backward(mlp, [dx, dy_rows], scratch);
        self.combine(run, &at, [dh, dx], false);
    }
}

impl TransformerBlock {
    /// The block's experts, if each has modules of its own. Only modules have adapters.
    pub(super) fn experts_apart(&self) -> Option<Experts> {
        self.experts().filter(|_| self.shape.names.stacked.is_empty())
    }

    /// The names of the experts' modules, of all experts in one list for each of the two products.
    pub(crate) fn modules_of_experts(&self) -> Vec<Vec<String>> {
        let Some(experts) = self.experts_apart() else { return Vec::new() };
        let named = |product: usize| {
            let of = |expert| self.expert_modules(experts, expert)[product].names();
            (0..experts.count).flat_map(of).collect()
        };
        vec![named(0), named(1)]
    }

    /// Adds the experts' sum to the residual stream.
    pub(super) fn close_experts(&self, k: &dyn Kernels, batch: &BatchView<'_>, closed: &Closed) {
        let Closed { y, attention_sum, sum, buffer } = *closed;
        k.cast(&Cast { y: buffer, x: sum });
        let dropout = self.feed_forward_dropout(batch);
        k.residual(&Residual { y, a: attention_sum, x: buffer, dropout });
    }
}

impl ChunkPass<'_> {
    pub(super) fn experts(&self) -> Experts {
        self.block.experts().expect("the block has experts")
    }

    /// Chooses the experts of each row.
    fn route(&self, router: Affine<View>, scratch: &Scratch<'_>) -> Choice {
        let Experts { count, per_token, normalised, .. } = self.experts();
        let r = self.batch.rows();
        let logits = scratch.take_floats(r, count);
        let chosen = scratch.take_floats(r, 2 * per_token);
        let Affine { weight: w, bias } = router;
        let route = Route { chosen, logits, h: self.hidden, w, bias, per_token, normalised };
        self.k.route(&route);
        let chosen = self.limited(chosen, logits, scratch);
        self.measure(chosen, logits, scratch);
        Choice { logits, chosen }
    }

    /// The output of the shared expert, to `y`; before the product behind it, to `activated`.
    fn shared_output(&self, shared: &SharedExpert<View>, activated: View, y: View) {
        self.products.activate(activated, self.saved.up);
        self.products.linear(y, activated, &shared.mlp.down);
    }

    /// The gate of the shared expert for each row. (R, 1).
    fn shared_gate(&self, shared: &SharedExpert<View>, scratch: &Scratch<'_>) -> View {
        let y = scratch.take(self.batch.rows(), 1);
        let x = self.hidden;
        self.k.linear(&Linear { y, x, w: shared.gate, bias: None, transposed: true });
        y
    }

    fn shared_channels(&self) -> usize {
        self.block.experts().map_or(0, |experts| experts.shared)
    }

    /// Chooses the experts of each row, and begins their sum, from their input in `hidden`.
    pub(super) fn open_experts<E>(
        &self,
        w: &ExpertWeights<View, E>,
        scratch: &Scratch<'_>,
    ) -> Opened {
        let ChunkPass { k, ref saved, hidden, .. } = *self;
        let sum = scratch.take_floats(hidden.rows, hidden.columns);
        match &w.shared {
            None => k.clear(&Clear { y: sum }),
            Some(shared) => {
                let scratch = &scratch.nested();
                self.products.linear(saved.up, hidden, &shared.mlp.up);
                let activated = scratch.take(hidden.rows, self.shared_channels());
                let x = scratch.take_like(hidden);
                self.shared_output(shared, activated, x);
                let gate = self.shared_gate(shared, scratch);
                k.gate_rows(&GateRows { y: sum, x, gate });
            }
        }
        let Choice { chosen, .. } = self.route(w.router, scratch);
        Opened { sum, chosen }
    }

    /// Computes the chunk's output, to `y`, from the experts' input in `hidden`.
    pub(super) fn experts_forward(
        &self,
        w: &ExpertWeights<View, SlotWeight<'_>>,
        y: View,
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { block, k, ref saved, hidden, ref batch, .. } = *self;
        let Opened { sum, chosen } = self.open_experts(w, scratch);
        let up = saved.experts_up;
        let pass = ExpertPass::new(&self.products, [hidden, chosen], up, scratch);
        pass.forward(0, &w.experts, sum, scratch);
        // The experts' input has no more use.
        let closed = Closed { y, attention_sum: saved.attention_sum, sum, buffer: hidden };
        block.close_experts(k, batch, &closed);
    }

    /// The gradient of the experts' input, to `dbranch`, and those of the tensors of router, shared
    /// expert and, unless their backward has passed gradients down, of the experts.
    pub(super) fn experts_backward(
        &self,
        g: &ChunkGradients<'_>,
        w: &ExpertWeights<View, SlotWeight<'_>>,
        d: &ExpertWeights<Option<View>, Option<View>>,
        Buffers { dbranch, .. }: Buffers,
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { block, k, hidden, ref saved, ref batch, .. } = *self;
        let accumulate = g.accumulate;
        let Choice { logits, chosen } = self.route(w.router, scratch);
        let passed = g.passed.unwrap_or_else(|| {
            let dropout = block.feed_forward_dropout(batch);
            let dy = self.products.dropout_backward(dbranch, g.dy, dropout);
            let dh = scratch.take_floats(hidden.rows, hidden.columns);
            let dchosen = scratch.take_floats(hidden.rows, chosen.columns / 2);
            k.clear(&Clear { y: dh });
            if self.drops() {
                k.clear(&Clear { y: dchosen });
            }
            let up = saved.experts_up;
            let pass = ExpertPass::new(&self.products, [hidden, chosen], up, scratch);
            let passed = PassedDown { dy, dh, dchosen };
            let experts =
                ExpertGradients { first: 0, w: &w.experts, d: &d.experts, accumulate, passed };
            pass.backward(&experts, scratch);
            passed
        });
        let PassedDown { dy, dh, dchosen } = passed;
        if let (Some(w), Some(d)) = (&w.shared, &d.shared) {
            self.shared_backward(g, w, d, [dh, dy], scratch);
        }
        let normalised = block.experts().is_some_and(|experts| experts.normalised);
        let op = RouteBackward {
            dh,
            dw: d.router.weight,
            dbias: d.router.bias.flatten(),
            logits,
            chosen,
            dchosen,
            h: hidden,
            w: w.router.weight,
            normalised,
            slopes: self.slopes(),
            accumulate,
        };
        k.route_backward(&op, scratch);
        k.cast(&Cast { y: dbranch, x: dh });
    }

    /// The gradients of the shared expert's tensors, and of its input, added to `dh`.
    fn shared_backward(
        &self,
        g: &ChunkGradients<'_>,
        w: &SharedExpert<View>,
        d: &SharedExpert<Option<View>>,
        [dh, dy]: [View; 2],
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { k, hidden, ref saved, .. } = *self;
        let accumulate = g.accumulate;
        let scratch = &scratch.nested();
        if g.save.is_none() {
            self.products.linear(saved.up, hidden, &w.mlp.up);
        }
        let activated = scratch.take(hidden.rows, self.shared_channels());
        let x = scratch.take_like(hidden);
        self.shared_output(w, activated, x);
        let gate = self.shared_gate(w, scratch);
        let dx = scratch.take_like(hidden);
        let dgate = scratch.take_like(gate);
        k.gate_rows_backward(&GateRowsBackward { dx, dgate, dy, x, gate });
        let up = saved.up;
        let weighted = None;
        let parts = &[MlpPart { rows: 0..hidden.rows, w: &w.mlp, d: &d.mlp }];
        let mlp = MlpPass { parts, x: hidden, up, activated, weighted, accumulate };
        self.products.mlp_backward(mlp, [dx, dx], scratch);
        // The expert's output has no more use.
        let of_gate = x;
        let op = LinearBackward {
            dx: of_gate,
            dw: d.gate,
            dbias: None,
            dy: dgate,
            x: hidden,
            w: w.gate,
            transposed: true,
            accumulate,
        };
        k.linear_backward(&op, scratch);
        k.residual(&Residual { y: dx, a: of_gate, x: dx, dropout: None });
        k.combine_rows(&CombineRows { y: dh, x: dx, rows: None, weights: None });
    }
}
