//! The experts of a block on one chunk, forward and backward: each row chooses some of them, and
//! their weighted outputs are added in the order of the experts, in floats. So the result does not
//! depend on the blocks in which experts lie.

use super::backward::{Buffers, ChunkGradients, MlpPass, Weighted};
use super::chunk::ChunkPass;
use super::tensors::{ExpertWeights, Mlp, SharedExpert};
use crate::kernels::{
    Cast, Clear, CombineRows, Dispatch, GateRows, GateRowsBackward, GatherRows, Linear,
    LinearBackward, Residual, Route, RouteBackward, RowWeights,
};
use crate::models::block_tensors::SlotWeight;
use crate::models::norms::Affine;
use crate::models::shape::Experts;
use crate::tensor::{Scratch, View};

/// The choice of each row of a chunk.
///
/// Legend: R rows, E experts, k choices of a row, S = R k assignments.
struct Routed {
    /// The router's logits. (R, E).
    logits: View,
    /// The experts and their weights. (R, 2 k).
    chosen: View,
    /// The row of each assignment, sorted by expert. (1, S).
    rows: View,
    /// The place of each assignment among the choices of all rows. (1, S).
    places: View,
    /// The rows of each expert. (E).
    counts: Vec<usize>,
}

/// The assignments of one expert.
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

/// The gradients of one chunk's experts.
struct ExpertGradients<'a> {
    w: &'a Mlp<SlotWeight<'a>>,
    d: &'a Mlp<Option<View>>,
    /// The gradient of the sum of the experts' outputs. (R, C).
    dy: View,
    /// The gradient of the experts' input, in floats. (R, C).
    dh: View,
    /// The gradient of each chosen weight. (R, k).
    dchosen: View,
}

impl Routed {
    fn of(&self, expert: usize) -> Assigned {
        let count = self.counts[expert];
        let before: usize = self.counts[..expert].iter().sum();
        // Where there is no memory, each expert counts all rows, so that workspace is measured.
        let first = before.min(self.rows.columns - count);
        let [rows, places] = [self.rows, self.places].map(|all| all.part(first..first + count));
        let weights = RowWeights { places, chosen: self.chosen };
        Assigned { first, count, rows, weights }
    }
}

impl ChunkPass<'_> {
    fn experts(&self) -> Experts {
        self.block.experts().expect("the block has experts")
    }

    /// Chooses the experts of each row.
    fn route(&self, router: Affine<View>, scratch: &Scratch<'_>) -> Routed {
        let Experts { count, per_token, normalised, .. } = self.experts();
        let r = self.batch.rows();
        let logits = scratch.take_floats(r, count);
        let chosen = scratch.take_floats(r, 2 * per_token);
        let [rows, places] = [(); 2].map(|()| scratch.take_floats(1, r * per_token));
        let Affine { weight: w, bias } = router;
        let route = Route { chosen, logits, h: self.hidden, w, bias, per_token, normalised };
        self.k.route(&route);
        let counts = self.k.dispatch(&Dispatch { rows, places, chosen, experts: count });
        Routed { logits, chosen, rows, places, counts }
    }

    /// The place of one expert's rows before its activation function.
    fn expert_up(&self, at: Assigned, scratch: &Scratch<'_>) -> View {
        let width = self.block.shape.up_of(self.experts().intermediate);
        let range = at.first..at.first + at.count;
        let saved = self.saved.experts_up.map(|all| all.row_range(range));
        saved.unwrap_or_else(|| scratch.take(at.count, width))
    }

    /// The output of the shared expert, to `y`; before the product behind it, to `activated`.
    fn shared_output(&self, shared: &SharedExpert<View>, activated: View, y: View) {
        self.activate(activated, self.saved.up);
        self.linear(y, activated, &shared.mlp.down);
    }

    /// The gate of the shared expert for each row. (R, 1).
    fn shared_gate(&self, shared: &SharedExpert<View>, scratch: &Scratch<'_>) -> View {
        let y = scratch.take(self.batch.rows(), 1);
        let x = self.hidden;
        self.k.linear(&Linear { y, x, w: shared.gate, bias: None, transposed: true });
        y
    }

    /// Computes the chunk's output, to `y`, from the experts' input in `hidden`.
    pub(super) fn experts_forward(
        &self,
        w: &ExpertWeights<View, SlotWeight<'_>>,
        y: View,
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { block, k, ref saved, hidden, ref batch, .. } = *self;
        let channels = self.experts().intermediate;
        let sum = scratch.take_floats(hidden.rows, hidden.columns);
        match &w.shared {
            None => k.clear(&Clear { y: sum }),
            Some(shared) => {
                let scratch = &scratch.nested();
                self.linear(saved.up, hidden, &shared.mlp.up);
                let activated = scratch.take(hidden.rows, self.experts().shared);
                let x = scratch.take_like(hidden);
                self.shared_output(shared, activated, x);
                let gate = self.shared_gate(shared, scratch);
                k.gate_rows(&GateRows { y: sum, x, gate });
            }
        }
        let routed = self.route(w.router, scratch);
        for (number, expert) in w.experts.iter().enumerate() {
            let at = routed.of(number);
            if at.count == 0 {
                continue;
            }
            let scratch = &scratch.nested();
            let expert = &expert.ready(k, scratch);
            let x = scratch.take(at.count, hidden.columns);
            k.gather_rows(&GatherRows { y: x, x: hidden, rows: at.rows });
            let up = self.expert_up(at, scratch);
            self.linear(up, x, &expert.up);
            let activated = scratch.take(at.count, channels);
            self.activate(activated, up);
            self.linear(x, activated, &expert.down);
            k.combine_rows(&CombineRows { y: sum, x, rows: at.rows, weights: Some(at.weights) });
        }
        k.cast(&Cast { y: hidden, x: sum });
        let dropout = block.feed_forward_dropout(batch);
        k.residual(&Residual { y, a: saved.attention_sum, x: hidden, dropout });
    }

    /// The gradient of the experts' input, to `dbranch`, and those of the experts' tensors.
    pub(super) fn experts_backward(
        &self,
        g: &ChunkGradients<'_>,
        w: &ExpertWeights<View, SlotWeight<'_>>,
        d: &ExpertWeights<Option<View>, Option<View>>,
        Buffers { dbranch, .. }: Buffers,
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { block, k, hidden, ref batch, .. } = *self;
        let Experts { per_token, normalised, .. } = self.experts();
        let dy = self.dropout_backward(dbranch, g.dy, block.feed_forward_dropout(batch));
        let dh = scratch.take_floats(hidden.rows, hidden.columns);
        match (&w.shared, &d.shared) {
            (Some(w), Some(d)) => self.shared_backward(g, w, d, [dh, dy], scratch),
            _ => k.clear(&Clear { y: dh }),
        }
        let routed = self.route(w.router, scratch);
        let dchosen = scratch.take_floats(hidden.rows, per_token);
        for (number, (w, d)) in w.experts.iter().zip(&d.experts).enumerate().rev() {
            let of_expert = ExpertGradients { w, d, dy, dh, dchosen };
            self.expert_backward(g, &of_expert, routed.of(number), &scratch.nested());
        }
        let Routed { logits, chosen, .. } = routed;
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
            accumulate: g.accumulate,
        };
        k.route_backward(&op, scratch);
        k.cast(&Cast { y: dbranch, x: dh });
    }

    /// The gradients of one expert's tensors, and what it adds to those of its input and weights.
    fn expert_backward(
        &self,
        g: &ChunkGradients<'_>,
        expert: &ExpertGradients<'_>,
        at: Assigned,
        scratch: &Scratch<'_>,
    ) {
        let &ExpertGradients { w, d, dy, dh, dchosen } = expert;
        let ChunkPass { block, k, hidden, .. } = *self;
        let Assigned { count, rows, weights, .. } = at;
        if count == 0 {
            let gradients = d.all().filter(|_| !g.accumulate);
            gradients.for_each(|gradient| k.clear(&Clear { y: gradient }));
            return;
        }
        let w = &w.ready(k, scratch);
        let channels = block.shape.hidden;
        let [x, dy_rows] = [(); 2].map(|()| scratch.take(count, channels));
        k.gather_rows(&GatherRows { y: x, x: hidden, rows });
        k.gather_rows(&GatherRows { y: dy_rows, x: dy, rows });
        let up = self.expert_up(at, scratch);
        if g.save.is_none() {
            self.linear(up, x, &w.up);
        }
        let activated = scratch.take(count, self.experts().intermediate);
        self.activate(activated, up);
        let weighted = Some(Weighted { weights, dchosen });
        let dx = dy_rows;
        self.mlp_backward(g, MlpPass { w, d, x, up, activated, weighted }, [dx, dy_rows], scratch);
        k.combine_rows(&CombineRows { y: dh, x: dx, rows, weights: None });
    }

    /// The gradients of the shared expert's tensors, and of its input, to `dh`.
    fn shared_backward(
        &self,
        g: &ChunkGradients<'_>,
        w: &SharedExpert<View>,
        d: &SharedExpert<Option<View>>,
        [dh, dy]: [View; 2],
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { k, hidden, ref saved, .. } = *self;
        let scratch = &scratch.nested();
        if g.save.is_none() {
            self.linear(saved.up, hidden, &w.mlp.up);
        }
        let activated = scratch.take(hidden.rows, self.experts().shared);
        let x = scratch.take_like(hidden);
        self.shared_output(w, activated, x);
        let gate = self.shared_gate(w, scratch);
        let dx = scratch.take_like(hidden);
        let dgate = scratch.take_like(gate);
        k.gate_rows_backward(&GateRowsBackward { dx, dgate, dy, x, gate });
        let up = saved.up;
        let mlp = MlpPass { w: &w.mlp, d: &d.mlp, x: hidden, up, activated, weighted: None };
        self.mlp_backward(g, mlp, [dx, dx], scratch);
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
            accumulate: g.accumulate,
        };
        k.linear_backward(&op, scratch);
        k.residual(&Residual { y: dx, a: of_gate, x: dx, dropout: None });
        k.cast(&Cast { y: dh, x: dx });
    }
}
