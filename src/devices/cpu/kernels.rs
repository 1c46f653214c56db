//! The kernels on views of the arena: resolves views, hands out scratch, and says who may write.

use super::{attention, cross_entropy, dropout, embedding, gelu, layer_norm, linear, sampling};
use crate::arena::Arena;
use crate::models::{
    Attention, Dropout, Gelu, Kernels, Linear, Loss, Norm, Rows, STATISTICS, Sampling, Scores,
    Scratch, View,
};
use crate::simd::Level;

/// Kernels on a device's memory; without memory, only what they would take of the workspace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuKernels<'a> {
    pub(crate) memory: Option<&'a Arena>,
    pub(crate) level: Level,
}

/// Views resolved for one call.
struct Call<'a, const N: usize> {
    memory: &'a Arena,
    writes: [View; N],
}

impl<'a> CpuKernels<'a> {
    /// Begins a call that writes these views and reads others.
    fn call<const N: usize>(&self, writes: [View; N], reads: &[View]) -> Option<Call<'a, N>> {
        let apart = |a: &View, b: &View| a.at + a.len <= b.at || b.at + b.len <= a.at;
        for (index, write) in writes.iter().enumerate() {
            for other in writes[index + 1..].iter().chain(reads) {
                assert!(apart(write, other), "{write:?} is written, {other:?} is in use");
            }
        }
        self.memory.map(|memory| Call { memory, writes })
    }
}

impl<'a, const N: usize> Call<'a, N> {
    fn read(&self, view: View) -> &'a [f32] {
        // SAFETY: `call` has seen that no view this call writes overlaps it, and the ring that no
        // other operation writes it.
        unsafe { self.memory.read(view) }
    }

    fn write(&self) -> [&'a mut [f32]; N] {
        // SAFETY: `call` has seen that the views do not overlap each other or one that is read,
        // and the ring gives them to no other operation.
        self.writes.map(|view| unsafe { self.memory.write(view) })
    }
}

impl Kernels for CpuKernels<'_> {
    fn linear(&self, y: View, x: View, w: View, b: View, size: Linear) {
        let Some(call) = self.call([y], &[x, w, b]) else { return };
        let [y] = call.write();
        let size = (size.rows, size.inputs, size.outputs);
        linear::forward(y, call.read(x), call.read(w), call.read(b), size);
    }

    fn linear_backward(
        &self,
        dx: View,
        dw: View,
        db: View,
        dy: View,
        x: View,
        w: View,
        size: Linear,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        let scratch = scratch.nested();
        let memory = scratch.take(linear::scratch(size.rows, size.inputs, size.outputs));
        let Some(call) = self.call([dx, dw, db, memory], &[dy, x, w]) else { return };
        let [dx, dw, db, memory] = call.write();
        let gradients = linear::Gradients { dx, dw, db };
        let inputs = linear::Inputs { dy: call.read(dy), x: call.read(x), w: call.read(w) };
        let size = (size.rows, size.inputs, size.outputs);
        linear::backward(self.level, gradients, inputs, size, accumulate, memory);
    }

    fn layer_norm(&self, y: View, statistics: View, x: View, gamma: View, beta: View, size: Norm) {
        let Some(call) = self.call([y, statistics], &[x, gamma, beta]) else { return };
        let [y, statistics] = call.write();
        let affine = (call.read(gamma), call.read(beta));
        layer_norm::forward(self.level, y, statistics, call.read(x), affine, size.epsilon);
    }

    fn layer_norm_backward(
        &self,
        dx: View,
        dgamma: View,
        dbeta: View,
        residual: Option<View>,
        dy: View,
        x: View,
        statistics: View,
        gamma: View,
        size: Norm,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        let scratch = scratch.nested();
        let memory = scratch.take(layer_norm::scratch(size.rows, size.channels));
        let reads = [dy, x, statistics, gamma, residual.unwrap_or(dy)];
        let Some(call) = self.call([dx, dgamma, dbeta, memory], &reads) else { return };
        let [dx, dgamma, dbeta, memory] = call.write();
        let inputs = layer_norm::Inputs {
            residual: residual.map(|view| call.read(view)),
            dy: call.read(dy),
            x: call.read(x),
            statistics: call.read(statistics),
            gamma: call.read(gamma),
        };
        layer_norm::backward(self.level, dx, (dgamma, dbeta), inputs, accumulate, memory);
    }

    fn gelu(&self, y: View, x: View, form: Gelu) {
        let Some(call) = self.call([y], &[x]) else { return };
        let [y] = call.write();
        gelu::forward(self.level, y, call.read(x), form);
    }

    fn gelu_backward(&self, dx: View, x: View, form: Gelu) {
        let Some(call) = self.call([dx], &[x]) else { return };
        let [dx] = call.write();
        gelu::backward(self.level, dx, call.read(x), form);
    }

    fn attention(&self, y: View, lse: View, qkv: View, size: Attention<'_>) {
        let Some(call) = self.call([y, lse], &[qkv]) else { return };
        let [y, lse] = call.write();
        attention::forward(self.level, y, lse, call.read(qkv), &size);
    }

    fn attention_backward(
        &self,
        dqkv: View,
        dy: View,
        y: View,
        lse: View,
        qkv: View,
        size: Attention<'_>,
        scratch: &Scratch<'_>,
    ) {
        let scratch = scratch.nested();
        let delta = scratch.take(size.rows.count() * size.heads);
        let Some(call) = self.call([dqkv, delta], &[dy, y, lse, qkv]) else { return };
        let [dqkv, delta] = call.write();
        let dy = call.read(dy);
        attention::delta(self.level, delta, call.read(y), dy, &size);
        let (lse, qkv) = (call.read(lse), call.read(qkv));
        attention::backward(self.level, dqkv, &attention::Inputs { dy, lse, qkv, delta }, &size);
    }

    fn residual(&self, y: View, a: View, x: View, rows: Rows, dropout: Option<Dropout>) {
        self.dropped(y, x, rows, dropout);
        let Some(call) = self.call([y], &[a]) else { return };
        let [y] = call.write();
        dropout::add(self.level, y, call.read(a));
    }

    fn dropped(&self, y: View, x: View, rows: Rows, dropout: Option<Dropout>) {
        if y != x {
            let Some(call) = self.call([y], &[x]) else { return };
            let [y] = call.write();
            y.copy_from_slice(call.read(x));
        }
        if let Some(dropout) = dropout {
            let Some(call) = self.call([y], &[]) else { return };
            let [y] = call.write();
            dropout::apply(self.level, y, rows, &dropout);
        }
    }

    fn add_positions(&self, y: View, x: View, w: View, rows: Rows) {
        let Some(call) = self.call([y], &[x, w]) else { return };
        let [y] = call.write();
        let width = y.len() / rows.sequences;
        embedding::add_positions(self.level, y, call.read(x), call.read(w), width);
    }

    fn add_positions_backward(&self, dw: View, dy: View, rows: Rows, accumulate: bool) {
        let Some(call) = self.call([dw], &[dy]) else { return };
        let [dw] = call.write();
        let width = dy.len / rows.sequences;
        embedding::add_positions_backward(self.level, dw, call.read(dy), width, accumulate);
    }

    fn score(
        &self,
        out: View,
        statistics: View,
        h: View,
        w: View,
        size: Scores,
        scratch: &Scratch<'_>,
    ) {
        let scratch = scratch.nested();
        let memory = scratch.take(cross_entropy::forward_scratch(&size));
        let Some(call) = self.call([out, memory], &[statistics, h, w]) else { return };
        let [out, memory] = call.write();
        out.copy_from_slice(call.read(statistics));
        cross_entropy::forward(self.level, out, call.read(h), call.read(w), &size, memory);
    }

    fn sample(
        &self,
        out: View,
        statistics: View,
        h: View,
        w: View,
        how: Sampling,
        size: Scores,
        scratch: &Scratch<'_>,
    ) {
        let scratch = scratch.nested();
        let memory = scratch.take(cross_entropy::forward_scratch(&size));
        let Some(call) = self.call([out, memory], &[statistics, h, w]) else { return };
        let [out, memory] = call.write();
        out.copy_from_slice(call.read(statistics));
        sampling::forward(out, call.read(h), call.read(w), how, &size, memory);
    }

    fn score_backward(
        &self,
        dh: View,
        dw: View,
        before: Option<View>,
        statistics: View,
        h: View,
        w: View,
        loss: &dyn Loss,
        scale: f32,
        size: Scores,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        debug_assert_eq!(statistics.len, size.rows * STATISTICS);
        let scratch = scratch.nested();
        let memory = scratch.take(cross_entropy::backward_scratch(&size));
        let reads = [statistics, h, w, before.unwrap_or(h)];
        let Some(call) = self.call([dh, dw, memory], &reads) else { return };
        let [dh, dw, memory] = call.write();
        match before {
            Some(before) => dh.copy_from_slice(call.read(before)),
            None => dh.fill(0.0),
        }
        let inputs = cross_entropy::Inputs {
            statistics: call.read(statistics),
            h: call.read(h),
            w: call.read(w),
            loss,
            scale,
        };
        cross_entropy::backward(self.level, dh, dw, inputs, &size, accumulate, memory);
    }
}
