//! What layers ask for, as launches: resolves views to addresses, hands out scratch.

use super::cross_entropy::{Labelled, Rescore, chunk_of, stride_of};
use super::driver::{Address, Argument, Driver, Place};
use super::launches::{self as with, NEIGHBOURS, PART, Queue, int, long, parts_of};
use super::linear::Table;
use super::notes::Notes;
use crate::kernels::{
    Activation, Apart, Attention, ClassLoss, CustomKernel, Dropout, Kernels, Linear, Loss, Norm,
    Places, Rotary, Rows, Scores,
};
use crate::tensor::{Dtype, Scratch, View};

/// Kernels on a device's memory; without a device, only what they would take of the workspace.
pub(crate) struct CudaKernels<'a> {
    on: Option<On<'a>>,
}

/// A device, for one operation.
pub(super) struct On<'a> {
    pub(super) queue: Queue<'a>,
    memory: Address,
    pub(super) notes: Notes,
}

impl On<'_> {
    pub(super) fn at(&self, view: View) -> Place {
        Place { at: self.memory, dtype: view.dtype }.behind(view.at)
    }

    pub(super) fn maybe(&self, view: Option<View>) -> Place {
        view.map_or(Place::NULL, |view| self.at(view))
    }

    /// One way or the other, with blocks for so many rows.
    fn first_rows(
        &self,
        kernel: &'static str,
        [to, from]: [View; 2],
        rows: Rows,
        channels: usize,
        blocks: usize,
    ) {
        let [sequences, positions, c] = [rows.sequences, rows.positions, channels].map(int);
        let (to, from) = (self.at(to), self.at(from));
        let arguments: [&dyn Argument; 5] = [&to, &from, &sequences, &positions, &c];
        self.queue.columns(kernel, [blocks, 1], channels, &arguments);
    }

    pub(super) fn copy(&self, to: View, from: View) {
        self.queue.copy(self.at(to), self.at(from), to.len());
    }
}

impl<'a> CudaKernels<'a> {
    /// On a driver's device.
    pub(super) fn on(
        driver: &'a dyn Driver,
        memory: Address,
        notes: Notes,
        workspace: Address,
    ) -> CudaKernels<'a> {
        CudaKernels { on: Some(On { queue: Queue::new(driver, workspace), memory, notes }) }
    }

    /// On none, to plan.
    pub(crate) fn to_plan() -> CudaKernels<'static> {
        CudaKernels { on: None }
    }

    /// How it went.
    pub(super) fn end(self) -> Result<(), l2l_actors::ports::Trouble> {
        self.on.map_or(Ok(()), |on| on.queue.end())
    }
}

impl Kernels for CudaKernels<'_> {
    fn linear(&self, y: View, x: View, w: View, b: Option<View>, size: Linear) {
        let Some(on) = &self.on else { return };
        on.linear(y, x, w, b, size);
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
        let parts = scratch.take_floats(db.map_or(0, |_| parts_of(size.rows) * size.outputs));
        let Some(on) = &self.on else { return };
        on.linear_backward([dx, dw], [dy, x, w], size, accumulate);
        if let Some(db) = db {
            let dy = Table::of(dy, size.outputs);
            on.sum_columns(db, dy, [size.rows, size.outputs], parts, accumulate);
        }
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
        let Some(on) = &self.on else { return };
        let (y, s, x) = (on.at(y), on.at(statistics), on.at(x));
        let (gamma, beta, (rows, channels, rms)) =
            (on.at(gamma), on.maybe(beta), with::norm(&size));
        let arguments: [&dyn Argument; 9] =
            [&y, &s, &x, &gamma, &beta, &rows, &channels, &size.epsilon, &rms];
        on.queue.rows("norm_forward", size.rows, size.channels, &arguments);
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
        let (count, c) = (parts_of(size.rows), size.channels);
        let scratch = scratch.nested();
        let parts = scratch.take_floats(count * 2 * c);
        let Some(on) = &self.on else { return };
        let (parts, dy, x, s) = (on.at(parts), on.at(dy), on.at(x), on.at(statistics));
        let ((rows, channels, rms), part) = (with::norm(&size), int(PART));
        let arguments: [&dyn Argument; 7] = [&parts, &dy, &x, &s, &rows, &channels, &part];
        on.queue.columns("norm_parts", [count, 1], c, &arguments);
        on.queue.fold(on.at(dgamma), parts, [count, 2 * c, c], accumulate);
        if let Some(dbeta) = dbeta {
            let betas = parts.behind(c);
            on.queue.fold(on.at(dbeta), betas, [count, 2 * c, c], accumulate);
        }
        let (dx, residual, gamma) = (on.at(dx), on.maybe(residual), on.at(gamma));
        let arguments: [&dyn Argument; 9] =
            [&dx, &residual, &dy, &x, &s, &gamma, &rows, &channels, &rms];
        on.queue.rows("norm_backward", size.rows, c, &arguments);
    }

    fn activate(&self, y: View, x: View, form: Activation) {
        let Some(on) = &self.on else { return };
        let arguments: [&dyn Argument; 4] =
            [&on.at(y), &on.at(x), &long(x.len()), &with::form(form)];
        on.queue.each("activate", x.len(), NEIGHBOURS, &arguments);
    }

    fn activate_backward(&self, dx: View, x: View, form: Activation) {
        let Some(on) = &self.on else { return };
        let arguments: [&dyn Argument; 4] =
            [&on.at(dx), &on.at(x), &long(x.len()), &with::form(form)];
        on.queue.each("activate_backward", x.len(), NEIGHBOURS, &arguments);
    }

    fn gate(&self, y: View, x: View, channels: usize, form: Activation) {
        let Some(on) = &self.on else { return };
        let rows = y.len() / channels;
        let arguments: [&dyn Argument; 5] =
            [&on.at(y), &on.at(x), &int(rows), &int(channels), &with::form(form)];
        on.queue.columns("gate", [rows, 1], channels, &arguments);
    }

    fn gate_backward(&self, dx: View, dy: View, x: View, channels: usize, form: Activation) {
        let Some(on) = &self.on else { return };
        let rows = dy.len() / channels;
        let (dx, dy, x) = (on.at(dx), on.at(dy), on.at(x));
        let arguments: [&dyn Argument; 6] =
            [&dx, &dy, &x, &int(rows), &int(channels), &with::form(form)];
        on.queue.columns("gate_backward", [rows, 1], channels, &arguments);
    }

    fn rotate(&self, qkv: View, rotary: &Rotary, size: Attention<'_>, back: bool) {
        let Some(on) = &self.on else { return };
        let frequencies = with::frequencies(rotary, size.head_size);
        let (documents, pasts) = (on.notes.documents(size.documents), on.notes.pasts(size.past));
        let (qkv, sizes, back) = (on.at(qkv), with::attention(&size), i32::from(back));
        let arguments: [&dyn Argument; 6] = [&qkv, &frequencies, &documents, &pasts, &sizes, &back];
        on.queue.launch("rotate", [size.rows.count(), 1, 1], [256, 1, 1], 0, &arguments);
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
        let Some(on) = &self.on else { return };
        let (y, s, x) = (on.at(y), on.at(statistics), on.at(x));
        let ([q, k], rows) = (gamma.map(|gamma| on.at(gamma)), int(size.rows.count()));
        let sizes = with::attention(&size);
        let arguments: [&dyn Argument; 8] = [&y, &s, &x, &q, &k, &rows, &epsilon, &sizes];
        let heads = size.rows.count() * (size.heads + 2 * size.kv_heads);
        on.queue.launch("head_norm", [heads.div_ceil(8), 1, 1], [256, 1, 1], 0, &arguments);
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
        let (rows, d) = (size.rows.count(), size.head_size);
        let count = parts_of(rows);
        let scratch = scratch.nested();
        let parts = scratch.take_floats(count * 2 * d);
        let Some(on) = &self.on else { return };
        let (parts, dx, x, s) = (on.at(parts), on.at(dx), on.at(x), on.at(statistics));
        let (r, part, sizes) = (int(rows), int(PART), with::attention(&size));
        let arguments: [&dyn Argument; 7] = [&parts, &dx, &x, &s, &r, &part, &sizes];
        on.queue.launch("head_norm_parts", [count, 2, 1], [256, 1, 1], 0, &arguments);
        for (dgamma, at) in dgamma.into_iter().zip([0, d]) {
            let parts = parts.behind(at);
            on.queue.fold(on.at(dgamma), parts, [count, 2 * d, d], accumulate);
        }
        let [q, k] = gamma.map(|gamma| on.at(gamma));
        let arguments: [&dyn Argument; 7] = [&dx, &x, &s, &q, &k, &r, &sizes];
        let blocks = (rows * (size.heads + size.kv_heads)).div_ceil(8);
        on.queue.launch("head_norm_backward", [blocks, 1, 1], [256, 1, 1], 0, &arguments);
    }

    fn attention(&self, y: View, lse: View, qkv: View, kv: Option<View>, size: Attention<'_>) {
        let Some(on) = &self.on else { return };
        on.attention(y, lse, qkv, kv, &size);
    }

    fn remember(&self, y: View, qkv: View, size: Attention<'_>) {
        let Some(on) = &self.on else { return };
        on.move_keys("remember", y, qkv, &size);
    }

    fn recall(&self, qkv: View, kv: View, size: Attention<'_>) {
        let Some(on) = &self.on else { return };
        on.move_keys("recall", qkv, kv, &size);
    }

    fn attention_to_past(&self, y: View, qkv: View, past: View, size: Attention<'_>) {
        let Some(on) = &self.on else { return };
        on.attention_to_past(y, qkv, past, &size);
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
        let delta = scratch.take_floats(size.rows.count() * size.heads);
        let Some(on) = &self.on else { return };
        on.attention_backward([dqkv, delta], [dy, y, lse, qkv], apart, &size);
    }

    fn residual(&self, y: View, a: View, x: View, rows: Rows, dropout: Option<Dropout>) {
        let Some(on) = &self.on else { return };
        on.queue.drop([on.at(y), on.at(x), on.at(a)], rows, y.len() / rows.count(), dropout);
    }

    fn dropped(&self, y: View, x: View, rows: Rows, dropout: Option<Dropout>) {
        let Some(on) = &self.on else { return };
        if dropout.is_some() {
            on.queue.drop([on.at(y), on.at(x), Place::NULL], rows, y.len() / rows.count(), dropout);
        } else if y != x {
            on.copy(y, x);
        }
    }

    fn cast(&self, y: View, x: View) {
        let Some(on) = &self.on else { return };
        let kernel = match (y.dtype, x.dtype) {
            (to, from) if to == from => return on.copy(y, x),
            (Dtype::F32, _) => "to_floats",
            _ => "from_floats",
        };
        on.queue.each(kernel, x.len(), NEIGHBOURS, &[&on.at(y), &on.at(x), &long(x.len())]);
    }

    fn first_rows(&self, y: View, x: View, rows: Rows) {
        let Some(on) = &self.on else { return };
        on.first_rows("first_rows", [y, x], rows, y.len() / rows.sequences, rows.sequences);
    }

    fn first_rows_backward(&self, dx: View, dy: View, rows: Rows) {
        let Some(on) = &self.on else { return };
        let channels = dy.len() / rows.sequences;
        on.first_rows("first_rows_backward", [dx, dy], rows, channels, rows.count());
    }

    fn class_loss(&self, out: View, statistics: View, scores: View, size: ClassLoss) {
        let Some(on) = &self.on else { return };
        on.copy(out, statistics);
        let (out, scores) = (on.at(out), on.at(scores));
        let [sequences, positions, labels] =
            [size.rows.sequences, size.rows.positions, size.labels].map(int);
        let is_value = i32::from(size.is_value);
        let arguments: [&dyn Argument; 6] =
            [&out, &scores, &sequences, &positions, &labels, &is_value];
        on.queue.launch("class_loss", [size.rows.sequences, 1, 1], [32, 1, 1], 0, &arguments);
    }

    fn class_loss_backward(
        &self,
        dscores: View,
        scores: View,
        statistics: View,
        scale: f32,
        size: ClassLoss,
    ) {
        let Some(on) = &self.on else { return };
        let (d, scores, s) = (on.at(dscores), on.at(scores), on.at(statistics));
        let [sequences, positions, labels] =
            [size.rows.sequences, size.rows.positions, size.labels].map(int);
        let is_value = i32::from(size.is_value);
        let arguments: [&dyn Argument; 8] =
            [&d, &scores, &s, &scale, &sequences, &positions, &labels, &is_value];
        let grid = [size.rows.sequences, 1, 1];
        on.queue.launch("class_loss_backward", grid, [32, 1, 1], 0, &arguments);
    }

    fn own(&self, kernel: &CustomKernel, writes: &[View], reads: &[View], numbers: &[f32]) {
        let Some(on) = &self.on else { return };
        let places: Vec<_> = writes.iter().chain(reads).map(|view| on.at(*view)).collect();
        let count = writes[0].len();
        let elements = long(count);
        let mut arguments: Vec<&dyn Argument> = Vec::new();
        arguments.extend(places.iter().map(|place| place as &dyn Argument));
        arguments.push(&elements);
        arguments.extend(numbers.iter().map(|number| number as &dyn Argument));
        on.queue.each(kernel.name, count, 1, &arguments);
    }

    fn clear(&self, y: View) {
        let Some(on) = &self.on else { return };
        on.clear(y);
    }

    fn add_types(&self, y: View, w: View, kinds: &[u8]) {
        let Some(on) = &self.on else { return };
        let (rows, channels) = (kinds.len(), y.len() / kinds.len());
        let (y, w, kinds) = (on.at(y), on.at(w), on.notes.kinds(kinds));
        let arguments: [&dyn Argument; 5] = [&y, &w, &kinds, &int(rows), &int(channels)];
        on.queue.columns("add_kinds", [rows, 1], channels, &arguments);
    }

    fn add_types_backward(
        &self,
        dw: View,
        dy: View,
        kinds: &[u8],
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        let (rows, c) = (kinds.len(), dy.len() / kinds.len());
        let (count, chunks) = (dw.len() / c, parts_of(rows));
        let scratch = scratch.nested();
        let parts = scratch.take_floats(chunks * dw.len());
        let Some(on) = &self.on else { return };
        let (parts, dy, kinds) = (on.at(parts), on.at(dy), on.notes.kinds(kinds));
        let [r, channels, kinds_there, part] = [rows, c, count, PART].map(int);
        let arguments: [&dyn Argument; 7] =
            [&parts, &dy, &kinds, &r, &channels, &kinds_there, &part];
        on.queue.columns("kind_parts", [chunks, count], c, &arguments);
        on.queue.fold(on.at(dw), parts, [chunks, dw.len(), dw.len()], accumulate);
    }

    fn add_positions(&self, y: View, x: View, w: View, places: Places<'_>) {
        let Some(on) = &self.on else { return };
        let Rows { sequences, positions } = places.rows;
        let channels = y.len() / places.rows.count();
        let (y, x, w) = (on.at(y), on.at(x), on.at(w));
        let (documents, pasts) =
            (on.notes.documents(places.documents), on.notes.pasts(places.past));
        let past = places.past.first().copied().unwrap_or(0);
        let [past, b, t, c] = [past, sequences, positions, channels].map(int);
        let arguments: [&dyn Argument; 9] = [&y, &x, &w, &documents, &pasts, &past, &b, &t, &c];
        on.queue.columns("add_positions", [places.rows.count(), 1], channels, &arguments);
    }

    fn add_positions_backward(&self, dw: View, dy: View, places: Places<'_>, accumulate: bool) {
        let Some(on) = &self.on else { return };
        let Rows { sequences, positions } = places.rows;
        let channels = dy.len() / places.rows.count();
        let table = dw.len() / channels;
        let (dw, dy, documents) = (on.at(dw), on.at(dy), on.notes.documents(places.documents));
        let past = places.past.first().copied().unwrap_or(0);
        let [past, b, t, c, rows] = [past, sequences, positions, channels, table].map(int);
        let accumulate = i32::from(accumulate);
        let arguments: [&dyn Argument; 9] =
            [&dw, &dy, &documents, &past, &b, &t, &c, &rows, &accumulate];
        on.queue.columns("add_positions_backward", [table, 1], channels, &arguments);
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
        let labelled = labelled(&scratch.nested(), &size);
        let Some(on) = &self.on else { return };
        on.score(out, [statistics, h, w], bias, &labelled, &size);
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
        let told = y.len() / size.tile;
        let scratch = scratch.nested();
        let (places, gathered) = (scratch.take_floats(told), scratch.take(told * size.channels));
        let Some(on) = &self.on else { return };
        on.logits([y, places, gathered], [statistics, h, w], bias, &size);
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
        _loss: &dyn Loss,
        scale: f32,
        size: Scores,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        let (scratch, chunk) = (scratch.nested(), chunk_of(size.rows));
        let labelled = labelled(&scratch, &size);
        let d = scratch.take(chunk * stride_of(&size));
        let dh_of_rows = scratch.take_floats(chunk * size.channels);
        let parts = scratch.take_floats(dbias.map_or(0, |_| parts_of(chunk) * size.tile));
        let Some(on) = &self.on else { return };
        on.score_backward(
            &Rescore { dh, dw, dbias, before, statistics, h, w, bias },
            &labelled,
            [d, dh_of_rows, parts],
            scale,
            &size,
            accumulate,
        );
    }
}

/// Room for what a tile does to labelled rows.
fn labelled(scratch: &Scratch<'_>, size: &Scores) -> Labelled {
    let chunk = chunk_of(size.rows);
    Labelled {
        places: scratch.take_floats(chunk),
        h: scratch.take(chunk * size.channels),
        logits: scratch.take_floats(chunk * stride_of(size)),
    }
}
