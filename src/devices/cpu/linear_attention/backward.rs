//! The backward of the delta rule. A task has one head of values of one sequence.
//!
//! It needs the state before each position, last position first. A first pass keeps the states
//! before each few positions; from these it computes the states of the positions between again.

use std::ops::Range;

use rayon::prelude::*;

use super::super::activation::sigmoid;
use super::super::math::dot;
use super::super::views::{Call, ComputeIn};
use super::{CHANNELS, Factors, Head, Inputs, inverse_length, left_before, rows_before, take};
use crate::kernels::{DeltaRuleBackward, LinearHeads};
use crate::simd::Level;

/// Positions between two states that the first pass keeps.
const POSITIONS: usize = 32;

/// The gradients of a head on the rows of a sequence.
struct Gradients<'g> {
    /// Of queries and keys, as the state sees them. (T, D_k).
    q: &'g mut [f32],
    k: &'g mut [f32],
    /// (T, D_v).
    v: &'g mut [f32],
    /// Of the logits of β, and of a. (T).
    beta: &'g mut [f32],
    step: &'g mut [f32],
}

/// Memory of a task.
struct Memory<'m> {
    /// The state before every [`POSITIONS`]-th position. (T ÷ 32, channels, D_k).
    kept: &'m mut [f32],
    /// The state before each position of a piece. (32, channels, D_k).
    states: &'m mut [f32],
    /// δ and v − α S k of each position of a piece. (32, channels).
    deltas: &'m mut [f32],
    errors: &'m mut [f32],
    /// The gradient of the state. (channels, D_k).
    dstate: &'m mut [f32],
    q: &'m mut [f32],
    k: &'m mut [f32],
}

struct Task<'t> {
    head: Head<'t>,
    /// The rows of the sequence. (T, H D_v).
    dy: &'t [f32],
    d: Gradients<'t>,
    memory: Memory<'t>,
    /// The state in front of the rows; `None`: there are no earlier rows. (D_v, D_k).
    before: Option<&'t [f32]>,
    /// The gradient of the state behind the rows; `None`: there are no later rows. (D_v, D_k).
    dbehind: Option<&'t [f32]>,
    /// The place for the gradient of `before`, if it has one. (D_v, D_k).
    dbefore: &'t mut [f32],
    /// The gradients of ln A and of the bias.
    sums: &'t mut [f32],
}

/// Numbers of a head's gradients on one position.
fn gradients(heads: LinearHeads) -> usize {
    2 * heads.key_size + heads.value_size + 2
}

/// Channels that a task computes at once.
fn channels(heads: LinearHeads) -> usize {
    CHANNELS.min(heads.value_size)
}

/// Floats of a task's memory.
fn memory(heads: LinearHeads, positions: usize) -> usize {
    let state = channels(heads) * heads.key_size;
    let kept = positions.div_ceil(POSITIONS) * state;
    kept + POSITIONS * (state + 2 * channels(heads)) + state + 2 * heads.key_size
}

impl<'t> Gradients<'t> {
    fn take(mut floats: &'t mut [f32], heads: LinearHeads) -> Gradients<'t> {
        let positions = floats.len() / gradients(heads);
        let all = &mut floats;
        Gradients {
            q: take(all, positions * heads.key_size),
            k: take(all, positions * heads.key_size),
            v: take(all, positions * heads.value_size),
            beta: take(all, positions),
            step: take(all, positions),
        }
    }
}

impl<'t> Memory<'t> {
    fn take(all: &mut &'t mut [f32], heads: LinearHeads, positions: usize) -> Memory<'t> {
        let state = channels(heads) * heads.key_size;
        Memory {
            kept: take(all, positions.div_ceil(POSITIONS) * state),
            states: take(all, POSITIONS * state),
            deltas: take(all, POSITIONS * channels(heads)),
            errors: take(all, POSITIONS * channels(heads)),
            dstate: take(all, state),
            q: take(all, heads.key_size),
            k: take(all, heads.key_size),
        }
    }
}

/// The state before a position, from that before the last one.
#[derive(Clone, Copy)]
struct Update<'u> {
    k: &'u [f32],
    v: &'u [f32],
    alpha: f32,
    beta: f32,
}

impl Update<'_> {
    /// Replaces the states of some channels. `each` gets δ and v − α S k of each channel.
    #[inline(always)]
    fn apply(&self, state: &mut [f32], mut each: impl FnMut(usize, [f32; 2])) {
        let Update { k, v, alpha, beta } = *self;
        for (channel, (state, v)) in state.chunks_exact_mut(k.len()).zip(v).enumerate() {
            let error = v - alpha * dot(state, k);
            let delta = beta * error;
            state.iter_mut().zip(k).for_each(|(s, k)| *s = alpha * *s + delta * k);
            each(channel, [delta, error]);
        }
    }
}

impl Task<'_> {
    #[inline(always)]
    fn run(mut self) {
        let size = self.head.heads.value_size;
        self.d.q.fill(0.0);
        self.d.k.fill(0.0);
        self.d.beta.fill(0.0);
        self.d.step.fill(0.0);
        for first in (0..size).step_by(CHANNELS) {
            let channels = first..size.min(first + CHANNELS);
            self.keep_states(channels.clone());
            let of_state = channels.start * self.head.heads.key_size..;
            let len = self.state(&channels);
            match self.dbehind {
                Some(d) => self.memory.dstate[..len].copy_from_slice(&d[of_state.clone()][..len]),
                None => self.memory.dstate.fill(0.0),
            }
            let positions = self.head.positions();
            for piece in (0..positions).step_by(POSITIONS).rev() {
                let piece = piece..positions.min(piece + POSITIONS);
                self.states_of(piece.clone(), channels.clone());
                for at in piece.clone().rev() {
                    self.position(at, at - piece.start, channels.clone());
                }
            }
            if !self.dbefore.is_empty() {
                self.dbefore[of_state][..len].copy_from_slice(&self.memory.dstate[..len]);
            }
        }
        self.of_factors();
    }

    /// The floats of a state with these channels.
    fn state(&self, channels: &Range<usize>) -> usize {
        channels.len() * self.head.heads.key_size
    }

    /// Keeps the states before each few positions.
    #[inline(always)]
    fn keep_states(&mut self, channels: Range<usize>) {
        let len = self.state(&channels);
        let Memory { ref mut kept, ref mut dstate, ref mut q, ref mut k, .. } = self.memory;
        let state = &mut dstate[..len];
        if let Some(before) = self.before {
            let first = channels.start * self.head.heads.key_size;
            state.copy_from_slice(&before[first..][..len]);
        }
        for at in 0..self.head.positions() {
            if self.head.before[at] == 0 {
                state.fill(0.0);
            }
            if at % POSITIONS == 0 {
                kept[at / POSITIONS * len..][..len].copy_from_slice(state);
            }
            self.head.query_and_key(at, [q, k]);
            let Factors { alpha, beta, .. } = self.head.factors(at);
            let v = &self.head.values(at)[channels.clone()];
            Update { k, v, alpha, beta }.apply(state, |_, _| {});
        }
    }

    /// The states before all positions of a piece, and what these add to them.
    #[inline(always)]
    fn states_of(&mut self, piece: Range<usize>, channels: Range<usize>) {
        let len = self.state(&channels);
        let count = channels.len();
        let head = self.head;
        let Memory { kept, states, deltas, errors, q, k, .. } = &mut self.memory;
        states[..len].copy_from_slice(&kept[piece.start / POSITIONS * len..][..len]);
        for at in piece.clone() {
            let nth = at - piece.start;
            let (before, next) = states[nth * len..].split_at_mut(len);
            if head.before[at] == 0 {
                before.fill(0.0);
            }
            head.query_and_key(at, [q, k]);
            let Factors { alpha, beta, .. } = head.factors(at);
            let v = &head.values(at)[channels.clone()];
            let mut note = |channel: usize, [delta, error]: [f32; 2]| {
                deltas[nth * count + channel] = delta;
                errors[nth * count + channel] = error;
            };
            let update = Update { k, v, alpha, beta };
            if at + 1 < piece.end {
                next[..len].copy_from_slice(before);
                update.apply(&mut next[..len], note);
                continue;
            }
            for (channel, (state, v)) in before.chunks_exact(k.len()).zip(v).enumerate() {
                let error = v - alpha * dot(state, k);
                note(channel, [beta * error, error]);
            }
        }
    }

    /// The gradients of a position, and of the state before it.
    #[inline(always)]
    fn position(&mut self, at: usize, nth: usize, channels: Range<usize>) {
        let LinearHeads { key_size: size, value_size, .. } = self.head.heads;
        let len = self.state(&channels);
        let count = channels.len();
        let head = self.head;
        let Memory { states, deltas, errors, dstate, q, k, .. } = &mut self.memory;
        let Factors { alpha, beta, .. } = head.factors(at);
        head.query_and_key(at, [q, k]);
        let first = head.number * value_size + channels.start;
        let dy = &self.dy[at * head.heads.values() + first..][..count];
        let dv = &mut self.d.v[at * value_size..][channels];
        let dq = &mut self.d.q[at * size..][..size];
        let dk = &mut self.d.k[at * size..][..size];
        let rows = states[nth * len..][..len].chunks_exact(size).zip(dstate.chunks_exact_mut(size));
        let mut along_key = 0.0;
        let mut dalpha = 0.0;
        let mut dbeta = 0.0;
        for (channel, (state, dstate)) in rows.enumerate() {
            let dy = dy[channel];
            let delta = deltas[nth * count + channel];
            dstate.iter_mut().zip(&**q).for_each(|(ds, q)| *ds += dy * q);
            let ddelta = dot(dstate, k);
            dbeta += ddelta * errors[nth * count + channel];
            dv[channel] = beta * ddelta;
            let dread = -beta * ddelta;
            let of_query = dy * alpha;
            let of_key = dread * alpha;
            for ((dq, dk), (s, ds)) in dq.iter_mut().zip(&mut *dk).zip(state.iter().zip(&*dstate)) {
                *dq += of_query * s;
                *dk += of_key * s + delta * ds;
            }
            along_key += dy * delta;
            dstate.iter_mut().zip(&**k).for_each(|(ds, k)| *ds += dread * k);
            dalpha += dot(dstate, state);
            dstate.iter_mut().for_each(|ds| *ds *= alpha);
        }
        dq.iter_mut().zip(&**k).for_each(|(dq, k)| *dq += along_key * k);
        self.d.beta[at] += dbeta;
        self.d.step[at] += dalpha;
        if head.before[at] == 0 {
            dstate.fill(0.0);
        }
    }

    /// From the gradients of α and β to those of what they are computed from.
    #[inline(always)]
    fn of_factors(&mut self) {
        self.sums.fill(0.0);
        for at in 0..self.head.positions() {
            let Factors { alpha, beta, step, softplus } = self.head.factors(at);
            self.d.beta[at] *= beta * (1.0 - beta);
            let dg = self.d.step[at] * alpha;
            let dstep = -dg * self.head.rate * sigmoid(step);
            self.d.step[at] = dstep;
            self.sums[0] -= dg * self.head.rate * softplus;
            self.sums[1] += dstep;
        }
    }
}

/// The gradients of a row, from those of its heads.
struct Row<'r> {
    heads: LinearHeads,
    /// The row of queries, keys and values.
    x: &'r [f32],
    /// The gradients of the heads on the sequence.
    of_heads: &'r [f32],
    at: usize,
    positions: usize,
}

impl Row<'_> {
    /// The gradients of a head of values, one behind the other.
    fn of_head(&self, number: usize) -> &[f32] {
        let len = self.positions * gradients(self.heads);
        &self.of_heads[number * len..][..len]
    }

    /// Writes the gradients of the row's channels, and of its columns of β and a.
    #[inline(always)]
    fn write(&self, dx: &mut [f32], dfactors: &mut [f32]) {
        let heads = self.heads;
        let LinearHeads { key_heads, value_heads, key_size: size, value_size, .. } = heads;
        let keys = self.positions * size;
        let (dqk, dvalues) = dx.split_at_mut(2 * heads.keys());
        let scale = 1.0 / (size as f32).sqrt();
        for (number, d) in dqk.chunks_exact_mut(size).enumerate() {
            let key_head = number % key_heads;
            let is_key = number / key_heads;
            d.fill(0.0);
            let serves = value_heads / key_heads;
            for head in key_head * serves..(key_head + 1) * serves {
                let from = &self.of_head(head)[is_key * keys + self.at * size..][..size];
                d.iter_mut().zip(from).for_each(|(d, from)| *d += from);
            }
            let x = &self.x[number * size..][..size];
            let factor = inverse_length(x);
            let along = dot(d, x) * factor * factor;
            let scale = if is_key == 1 { factor } else { scale * factor };
            d.iter_mut().zip(x).for_each(|(d, x)| *d = scale * (*d - x * along));
        }
        for (head, dv) in dvalues.chunks_exact_mut(value_size).enumerate() {
            let from = &self.of_head(head)[2 * keys + self.at * value_size..][..value_size];
            dv.copy_from_slice(from);
            let of_factors = &self.of_head(head)[2 * keys + self.positions * value_size..];
            dfactors[head] = of_factors[self.at];
            dfactors[value_heads + head] = of_factors[self.positions + self.at];
        }
    }
}

impl ComputeIn for DeltaRuleBackward<'_> {
    fn workspace(&self) -> usize {
        let batch = self.shape.batch;
        let heads = self.shape.heads;
        let of_sequence = |sequence| {
            let positions = batch.sequence(sequence).len();
            positions * gradients(heads) + memory(heads, positions) + 2
        };
        heads.value_heads * (0..batch.sequences()).map(of_sequence).sum::<usize>()
    }

    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let batch = self.shape.batch;
        let heads = self.shape.heads;
        let LinearHeads { value_heads, .. } = heads;
        let before = &rows_before(&batch);
        let [x, projected, dy] = [self.x, self.projected, self.dy].map(|view| call.read(view));
        let [log, bias] = [self.decay.log, self.decay.bias].map(|view| call.read(view));
        let inputs = Inputs { heads, x, projected, before, log, bias };
        let of_row = value_heads * gradients(heads);
        let (of_heads, mut rest) = workspace.split_at_mut(batch.rows() * of_row);
        let sums = take(&mut rest, 2 * value_heads * batch.sequences());
        let carried = self.carried;
        let [left, dbehind] = [carried.before, carried.dbehind].map(|view| call.read_if(view));
        let mut dbefore = call.write_if(carried.dbefore).unwrap_or_default();
        let has_dbefore = !dbefore.is_empty();
        let mut next = |len: usize| take(&mut dbefore, if has_dbefore { len } else { 0 });
        let of_state = heads.value_size * heads.key_size;
        let mut tasks = Vec::new();
        let mut unused = &mut *of_heads;
        let mut of_tasks = sums.chunks_exact_mut(2);
        for sequence in 0..batch.sequences() {
            let rows = batch.sequence(sequence);
            let dy = &dy[rows.start * heads.values()..rows.end * heads.values()];
            let left = left_before(&self.shape, left, sequence);
            let dbehind = dbehind.map(|d| &d[sequence * heads.carried()..][..heads.carried()]);
            next(heads.inputs());
            for number in 0..value_heads {
                let of_head = take(&mut unused, rows.len() * gradients(heads));
                let at = heads.inputs() + number * of_state;
                tasks.push(Task {
                    head: inputs.head(number, rows.clone()),
                    dy,
                    d: Gradients::take(of_head, heads),
                    memory: Memory::take(&mut rest, heads, rows.len()),
                    before: left.map(|left| &left[at..][..of_state]),
                    dbehind: dbehind.map(|d| &d[at..][..of_state]),
                    dbefore: next(of_state),
                    sums: of_tasks.next().expect("one of each task"),
                });
            }
        }
        tasks.into_par_iter().for_each(|task| {
            level.run(
                #[inline(always)]
                || task.run(),
            );
        });
        let of_heads = &*of_heads;
        let rows = call.write(self.dx).par_chunks_mut(heads.mixed()).enumerate();
        let dprojected = call.write(self.dprojected).par_chunks_mut(heads.projected());
        rows.zip(dprojected).for_each(|((row, dx), dprojected)| {
            let (sequence, at) = batch.place(row);
            let rows = batch.sequence(sequence);
            let of_heads = &of_heads[rows.start * of_row..rows.end * of_row];
            let x = &x[row * heads.mixed()..];
            let row = Row { heads, x, of_heads, at, positions: rows.len() };
            level.run(
                #[inline(always)]
                || row.write(dx, &mut dprojected[heads.mixed()..heads.remembered()]),
            );
        });
        for (which, view) in [self.ddecay.log, self.ddecay.bias].into_iter().enumerate() {
            for (head, to) in call.write(view).iter_mut().enumerate() {
                let of_sequences = sums.chunks_exact(2 * value_heads);
                let sum: f32 = of_sequences.map(|sums| sums[2 * head + which]).sum();
                *to = if self.accumulate { *to + sum } else { sum };
            }
        }
    }
}
