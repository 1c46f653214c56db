//! The kernels on views of the arena: resolves views, hands out scratch, and says who may write.

use super::{
    activation, attention, classes, cross_entropy, dropout, embedding, head_norm, linear, norm,
    past, rotary,
};
use crate::kernels::{
    Activation, Apart, Attention, ClassLoss, CustomKernel, Dropout, Kernels, Linear, Loss, Norm,
    Places, Rotary, Rows, STATISTICS, Scores,
};
use crate::simd::Level;
use crate::tensor::Arena;
use crate::tensor::{Scratch, View};

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
        for (index, write) in writes.iter().enumerate() {
            for other in writes[index + 1..].iter().chain(reads) {
                assert!(are_apart(write, other), "{write:?} is written, {other:?} is in use");
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

fn are_apart(a: &View, b: &View) -> bool {
    a.at + a.len() <= b.at || b.at + b.len() <= a.at
}

/// A view that may not be there: one of nothing.
fn or_nothing(view: Option<View>) -> View {
    view.unwrap_or(View::floats(0, 0))
}

impl Kernels for CpuKernels<'_> {
    fn linear(&self, y: View, x: View, w: View, b: Option<View>, size: Linear) {
        let Some(call) = self.call([y], &[x, w, or_nothing(b)]) else { return };
        let [y] = call.write();
        linear::forward(y, call.read(x), call.read(w), b.map(|b| call.read(b)), &size);
    }

    fn linear_backward(
        &self,
        dx: View,
        dw: View,
        db: Option<View>,
        dy: View,
        x: View,
        w: View,
        size: Linear,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        let scratch = scratch.nested();
        let memory = scratch.take(linear::scratch(&size));
        let writes = [dx, dw, or_nothing(db), memory];
        let Some(call) = self.call(writes, &[dy, x, w]) else { return };
        let [dx, dw, db_or_nothing, memory] = call.write();
        let gradients = linear::Gradients { dx, dw, db: db.map(|_| db_or_nothing) };
        let inputs = linear::Inputs { dy: call.read(dy), x: call.read(x), w: call.read(w) };
        linear::backward(self.level, gradients, inputs, &size, accumulate, memory);
    }

    fn norm(
        &self,
        y: View,
        statistics: View,
        x: View,
        gamma: View,
        beta: Option<View>,
        size: Norm,
    ) {
        let Some(call) = self.call([y, statistics], &[x, gamma, or_nothing(beta)]) else { return };
        let [y, statistics] = call.write();
        let affine = (call.read(gamma), beta.map(|beta| call.read(beta)));
        norm::forward(self.level, y, statistics, call.read(x), affine, size);
    }

    fn norm_backward(
        &self,
        dx: View,
        dgamma: View,
        dbeta: Option<View>,
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
        let memory = scratch.take(norm::scratch(size.rows, size.channels));
        let reads = [dy, x, statistics, gamma, residual.unwrap_or(dy)];
        let writes = [dx, dgamma, or_nothing(dbeta), memory];
        let Some(call) = self.call(writes, &reads) else { return };
        let [dx, dgamma, dbeta_or_nothing, memory] = call.write();
        let inputs = norm::Inputs {
            residual: residual.map(|view| call.read(view)),
            dy: call.read(dy),
            x: call.read(x),
            statistics: call.read(statistics),
            gamma: call.read(gamma),
            rms: size.rms,
        };
        let gradients = (dgamma, dbeta.map(|_| dbeta_or_nothing));
        norm::backward(self.level, dx, gradients, inputs, accumulate, memory);
    }

    fn activate(&self, y: View, x: View, form: Activation) {
        let Some(call) = self.call([y], &[x]) else { return };
        let [y] = call.write();
        activation::forward(self.level, y, call.read(x), form);
    }

    fn activate_backward(&self, dx: View, x: View, form: Activation) {
        let Some(call) = self.call([dx], &[x]) else { return };
        let [dx] = call.write();
        activation::backward(self.level, dx, call.read(x), form);
    }

    fn gate(&self, y: View, x: View, channels: usize, form: Activation) {
        let Some(call) = self.call([y], &[x]) else { return };
        let [y] = call.write();
        activation::gate(self.level, y, call.read(x), channels, form);
    }

    fn gate_backward(&self, dx: View, dy: View, x: View, channels: usize, form: Activation) {
        let Some(call) = self.call([dx], &[dy, x]) else { return };
        let [dx] = call.write();
        activation::gate_backward(self.level, dx, call.read(dy), call.read(x), channels, form);
    }

    fn rotate(&self, qkv: View, rotary: &Rotary, size: Attention<'_>, back: bool) {
        let Some(call) = self.call([qkv], &[]) else { return };
        let [qkv] = call.write();
        rotary::rotate(self.level, qkv, rotary, &size, back);
    }

    fn head_norm(
        &self,
        y: View,
        statistics: View,
        x: View,
        gamma: [View; 2],
        epsilon: f32,
        size: Attention<'_>,
    ) {
        let Some(call) = self.call([y, statistics], &[x, gamma[0], gamma[1]]) else { return };
        let [y, statistics] = call.write();
        let gamma = gamma.map(|gamma| call.read(gamma));
        head_norm::forward(self.level, y, statistics, call.read(x), gamma, epsilon, &size);
    }

    fn head_norm_backward(
        &self,
        dx: View,
        dgamma: [View; 2],
        x: View,
        statistics: View,
        gamma: [View; 2],
        size: Attention<'_>,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        let scratch = scratch.nested();
        let memory = scratch.take(head_norm::scratch(&size));
        let (writes, reads) =
            ([dx, dgamma[0], dgamma[1], memory], [x, statistics, gamma[0], gamma[1]]);
        let Some(call) = self.call(writes, &reads) else { return };
        let [dx, dq, dk, memory] = call.write();
        let inputs = head_norm::Inputs {
            x: call.read(x),
            statistics: call.read(statistics),
            gamma: gamma.map(|gamma| call.read(gamma)),
        };
        head_norm::backward(self.level, dx, [dq, dk], inputs, &size, accumulate, memory);
    }

    fn attention(&self, y: View, lse: View, qkv: View, kv: Option<View>, size: Attention<'_>) {
        let Some(call) = self.call([y, lse], &[qkv, or_nothing(kv)]) else { return };
        let [y, lse] = call.write();
        let kv = kv.map(|kv| call.read(kv));
        attention::forward(self.level, y, lse, call.read(qkv), kv, &size);
    }

    fn remember(&self, y: View, qkv: View, size: Attention<'_>) {
        let Some(call) = self.call([y], &[qkv]) else { return };
        let [y] = call.write();
        past::remember(y, call.read(qkv), &size);
    }

    fn recall(&self, qkv: View, kv: View, size: Attention<'_>) {
        let Some(call) = self.call([qkv], &[kv]) else { return };
        let [qkv] = call.write();
        past::recall(qkv, call.read(kv), &size);
    }

    fn attention_to_past(&self, y: View, qkv: View, past: View, size: Attention<'_>) {
        let Some(call) = self.call([y], &[qkv, past]) else { return };
        let [y] = call.write();
        past::attention(self.level, y, call.read(qkv), call.read(past), &size);
    }

    fn attention_backward(
        &self,
        dqkv: View,
        dy: View,
        y: View,
        lse: View,
        qkv: View,
        apart: Option<Apart>,
        size: Attention<'_>,
        scratch: &Scratch<'_>,
    ) {
        let scratch = scratch.nested();
        let delta = scratch.take(size.rows.count() * size.heads);
        let (kv, dkv) = (apart.map(|apart| apart.kv), or_nothing(apart.map(|apart| apart.dkv)));
        let reads = [dy, y, lse, qkv, or_nothing(kv)];
        let Some(call) = self.call([dqkv, delta, dkv], &reads) else { return };
        let [dqkv, delta, dkv] = call.write();
        let dy = call.read(dy);
        attention::delta(self.level, delta, call.read(y), dy, &size);
        let (lse, qkv, kv) = (call.read(lse), call.read(qkv), kv.map(|kv| call.read(kv)));
        let dkv = apart.map(|apart| (dkv, apart.accumulate));
        let inputs = attention::Inputs { dy, lse, qkv, kv, delta };
        attention::backward(self.level, dqkv, dkv, &inputs, &size);
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

    fn cast(&self, y: View, x: View) {
        let Some(call) = self.call([y], &[x]) else { return };
        let [y] = call.write();
        y.copy_from_slice(call.read(x));
    }

    fn first_rows(&self, y: View, x: View, rows: Rows) {
        let Some(call) = self.call([y], &[x]) else { return };
        let [y] = call.write();
        classes::first_rows(y, call.read(x), rows);
    }

    fn first_rows_backward(&self, dx: View, dy: View, rows: Rows) {
        let Some(call) = self.call([dx], &[dy]) else { return };
        let [dx] = call.write();
        classes::first_rows_backward(dx, call.read(dy), rows);
    }

    fn class_loss(&self, out: View, statistics: View, scores: View, size: ClassLoss) {
        let Some(call) = self.call([out], &[statistics, scores]) else { return };
        let [out] = call.write();
        out.copy_from_slice(call.read(statistics));
        classes::forward(out, call.read(scores), &size);
    }

    fn class_loss_backward(
        &self,
        dscores: View,
        scores: View,
        statistics: View,
        scale: f32,
        size: ClassLoss,
    ) {
        let Some(call) = self.call([dscores], &[scores, statistics]) else { return };
        let [dscores] = call.write();
        classes::backward(dscores, call.read(scores), call.read(statistics), scale, &size);
    }

    fn own(&self, kernel: &CustomKernel, writes: &[View], reads: &[View], numbers: &[f32]) {
        for (index, write) in writes.iter().enumerate() {
            for other in writes[index + 1..].iter().chain(reads) {
                assert!(are_apart(write, other), "{write:?} is written, {other:?} is in use");
            }
        }
        let Some(memory) = self.memory else { return };
        // SAFETY: as in `call`.
        let (mut writes, reads): (Vec<_>, Vec<_>) = unsafe {
            (
                writes.iter().map(|view| memory.write(*view)).collect(),
                reads.iter().map(|view| memory.read(*view)).collect(),
            )
        };
        (kernel.cpu)(&mut writes, &reads, numbers);
    }

    fn clear(&self, y: View) {
        let Some(call) = self.call([y], &[]) else { return };
        let [y] = call.write();
        y.fill(0.0);
    }

    fn add_types(&self, y: View, w: View, kinds: &[u8]) {
        let Some(call) = self.call([y], &[w]) else { return };
        let [y] = call.write();
        let channels = y.len() / kinds.len();
        embedding::add_types(self.level, y, call.read(w), kinds, channels);
    }

    fn add_types_backward(
        &self,
        dw: View,
        dy: View,
        kinds: &[u8],
        accumulate: bool,
        _: &Scratch<'_>,
    ) {
        let Some(call) = self.call([dw], &[dy]) else { return };
        let [dw] = call.write();
        let channels = dy.len() / kinds.len();
        embedding::add_types_backward(self.level, dw, call.read(dy), kinds, channels, accumulate);
    }

    fn add_positions(&self, y: View, x: View, w: View, places: Places<'_>) {
        let Some(call) = self.call([y], &[x, w]) else { return };
        let [y] = call.write();
        embedding::add_positions(self.level, y, call.read(x), call.read(w), &places);
    }

    fn add_positions_backward(&self, dw: View, dy: View, places: Places<'_>, accumulate: bool) {
        let Some(call) = self.call([dw], &[dy]) else { return };
        let [dw] = call.write();
        embedding::add_positions_backward(self.level, dw, call.read(dy), &places, accumulate);
    }

    fn score(
        &self,
        out: View,
        statistics: View,
        h: View,
        w: View,
        bias: Option<View>,
        size: Scores,
        scratch: &Scratch<'_>,
    ) {
        let scratch = scratch.nested();
        let memory = scratch.take(cross_entropy::forward_scratch(&size));
        let reads = [statistics, h, w, or_nothing(bias)];
        let Some(call) = self.call([out, memory], &reads) else { return };
        let [out, memory] = call.write();
        out.copy_from_slice(call.read(statistics));
        let head = cross_entropy::Head { w: call.read(w), bias: bias.map(|bias| call.read(bias)) };
        cross_entropy::forward(self.level, out, call.read(h), head, &size, memory);
    }

    fn logits(
        &self,
        y: View,
        statistics: View,
        h: View,
        w: View,
        bias: Option<View>,
        size: Scores,
        scratch: &Scratch<'_>,
    ) {
        let scratch = scratch.nested();
        let memory = scratch.take(cross_entropy::logits_scratch(&size));
        let reads = [statistics, h, w, or_nothing(bias)];
        let Some(call) = self.call([y, memory], &reads) else { return };
        let [y, memory] = call.write();
        let head = cross_entropy::Head { w: call.read(w), bias: bias.map(|bias| call.read(bias)) };
        let (statistics, h) = (call.read(statistics), call.read(h));
        cross_entropy::logits(y, statistics, h, head, &size, memory);
    }

    fn score_backward(
        &self,
        dh: View,
        dw: View,
        dbias: Option<View>,
        before: Option<View>,
        statistics: View,
        h: View,
        w: View,
        bias: Option<View>,
        loss: &dyn Loss,
        scale: f32,
        size: Scores,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        debug_assert_eq!(statistics.len(), size.rows * STATISTICS);
        let scratch = scratch.nested();
        let memory = scratch.take(cross_entropy::backward_scratch(&size));
        let reads = [statistics, h, w, before.unwrap_or(h), or_nothing(bias)];
        let writes = [dh, dw, or_nothing(dbias), memory];
        let Some(call) = self.call(writes, &reads) else { return };
        let [dh, dw, dbias_or_nothing, memory] = call.write();
        match before {
            Some(before) => dh.copy_from_slice(call.read(before)),
            None => dh.fill(0.0),
        }
        let inputs = cross_entropy::Inputs {
            statistics: call.read(statistics),
            h: call.read(h),
            head: cross_entropy::Head { w: call.read(w), bias: bias.map(|bias| call.read(bias)) },
            loss,
            scale,
        };
        let gradients = cross_entropy::Gradients { dh, dw, dbias: dbias.map(|_| dbias_or_nothing) };
        cross_entropy::backward(self.level, gradients, inputs, &size, accumulate, memory);
    }
}
