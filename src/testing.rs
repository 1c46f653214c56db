//! Checks for a layer of your own: that its backward is the gradient of its forward; and for a loss
//! and an objective.

mod objectives;

use std::ops::Range;

pub use objectives::check_objective;

use crate::devices::cpu::CpuKernels;
use crate::kernels::{BatchMetadata, BatchView, DropoutKey, Loss, Rows};
use crate::models::{
    Backward, ChunkMemory, Cuts, Forward, Init, Keys, Layer, PortViews, Save, Shape, SlotWeight,
    Tensor, Turn, Walk, block_len, chunk_state_len, tensor_ranges, tensor_views,
};
use crate::random;
use crate::simd::Level;
use crate::tensor::{Arena, Dtype, Scratch, View};

/// The difference that a check found.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{what}: backward gives {backward}, differences of forward give {forward}")]
pub struct Mismatch {
    /// The tensor of the gradient.
    pub what: String,
    /// The directional derivative by the backward pass.
    pub backward: f64,
    /// The directional derivative by central differences.
    pub forward: f64,
}

/// The most positions of a chunk: the least that `step.chunk_positions` may be.
const CHUNK: usize = Shape::CHUNK_TILE;

/// Uniform in [−1, 1).
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let next = |_| (random::next(&mut state) >> 40) as f32 / (1_u64 << 23) as f32 - 1.0;
    (0..len).map(next).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// The views of a check, side by side in one arena.
struct Bench<'l> {
    layer: &'l dyn Layer,
    starts: Vec<usize>,
    kinds: Vec<u8>,
    memory: Arena,
    weights: View,
    gradient: View,
    x: View,
    y: View,
    dy: View,
    dx: View,
    saved: View,
    chunk_state: View,
    workspace: View,
}

impl<'l> Bench<'l> {
    fn new(layer: &'l dyn Layer, channels: usize, rows: Rows) -> Bench<'l> {
        // The last of several sequences is shorter.
        let mut starts = rows.starts();
        if rows.sequences > 1 {
            starts[rows.sequences] -= rows.positions / 2;
        }
        let count = starts[rows.sequences];
        let mut end = 0;
        let mut place = |len: usize| {
            let view = View::floats(end, len);
            end += len.next_multiple_of(16);
            view
        };
        let block = block_len(&layer.tensors());
        let hidden = count * channels;
        let weights = place(block);
        let gradient = place(block);
        let [x, y, dy, dx] = [hidden; 4].map(|len| place(len).with_columns(channels));
        // All sequences may be cut into as many chunks as the longest.
        let most = if layer.cuts(0) == Cuts::Never { rows.positions } else { CHUNK };
        let chunks = (0..rows.positions).step_by(most).map(|at| most.min(rows.positions - at));
        let saved = chunks.map(|rows| layer.saved_len(rows, Save::All, Dtype::F32)).sum::<usize>();
        let saved = place(saved * rows.sequences);
        let lengths = [rows.positions, CHUNK];
        let chunk_state = place(chunk_state_len(layer, lengths, true, Dtype::F32));
        let at = end;
        let kinds = (0..count).map(|row| (row % 2) as u8).collect();
        let empty = Arena::new(0).expect("nothing is little");
        let workspace = View::floats(at, usize::MAX / 4);
        let mut bench = Bench {
            layer,
            starts,
            kinds,
            memory: empty,
            weights,
            gradient,
            x,
            y,
            dy,
            dx,
            saved,
            chunk_state,
            workspace,
        };
        // The same walk without memory measures the workspace.
        let needs = bench.forward(None, None).max(bench.backward(None, None, false));
        bench.workspace = View::floats(at, needs);
        bench.memory = Arena::new(at + needs).expect("memory for a check");
        bench
    }

    fn batch(&self) -> BatchView<'_> {
        let metadata = BatchMetadata {
            starts: &self.starts,
            kinds: &self.kinds,
            documents: &[],
            cached: &[],
            dropout_key: Some(DropoutKey { seed: 7, step: 3, first_sequence: 2 }),
        };
        metadata.view()
    }

    /// The walk over the rows, in chunks as short as they can be.
    fn walk(&self) -> Walk<'_> {
        Walk::new(&self.batch(), self.layer.cuts(0), self.layer.window(), CHUNK)
    }

    fn saved(
        &self,
        walk: &Walk<'_>,
        chunk: &BatchView<'_>,
        keeps: Option<Save>,
    ) -> Option<(Save, View)> {
        let save = keeps.filter(|_| !self.saved.is_empty())?;
        let len = |rows| self.layer.saved_len(rows, save, Dtype::F32);
        let place = walk.saved(chunk, len);
        Some((save, place.map_or(self.saved, |place| self.saved.part(place))))
    }

    /// The layer's weights, and those that it dequantises by itself.
    fn weights(&self) -> (Vec<View>, Vec<SlotWeight<'static>>) {
        let mut weights = tensor_views(&self.layer.tensors(), self.weights);
        let stored = weights.split_off(weights.len() - self.layer.stored_weights(0));
        (weights, stored.into_iter().map(SlotWeight::Ready).collect())
    }

    fn forward(&self, memory: Option<&Arena>, keeps: Option<Save>) -> usize {
        let kernels = CpuKernels::new(memory, Level::best());
        let scratch = Scratch::new(self.workspace, Dtype::F32);
        let (weights, stored) = self.weights();
        let walk = self.walk();
        for chunk in walk.forward() {
            let pass = Forward {
                batch: chunk,
                step: 0,
                weights: &weights,
                stored: &stored,
                x: chunk.rows_of(self.x),
                y: chunk.rows_of(self.y),
                ports: PortViews::NONE,
                saved: self.saved(&walk, &chunk, keeps),
                kv_cache: None,
                chunk_state: ChunkMemory { memory: self.chunk_state, before: walk.before() },
                scratch: &scratch.nested(),
            };
            self.layer.forward(&kernels, &pass);
        }
        scratch.peak()
    }

    fn backward(&self, memory: Option<&Arena>, keeps: Option<Save>, mut accumulate: bool) -> usize {
        let kernels = CpuKernels::new(memory, Level::best());
        let scratch = Scratch::new(self.workspace, Dtype::F32);
        let tensors = self.layer.tensors();
        let gradients = tensor_views(&tensors, self.gradient).into_iter().map(Some);
        let gradients: Vec<Option<View>> = gradients.collect();
        let (weights, stored) = self.weights();
        let weights = &weights;
        let stored = &stored;
        let walk = self.walk();
        for (turn, batch) in walk.backward() {
            let saved = self.saved(&walk, &batch, keeps);
            let x = batch.rows_of(self.x);
            let chunk_state = ChunkMemory { memory: self.chunk_state, before: walk.before() };
            let scratch = &scratch.nested();
            if turn == Turn::Keys {
                let pass = Keys {
                    batch,
                    step: 0,
                    weights,
                    stored,
                    x,
                    ports: PortViews::NONE,
                    saved,
                    chunk_state,
                    scratch,
                };
                self.layer.keys(&kernels, &pass);
                continue;
            }
            let pass = Backward {
                batch,
                step: 0,
                ports: PortViews::NONE,
                weights,
                stored,
                gradients: &gradients,
                accumulate,
                x,
                saved,
                dy: batch.rows_of(self.dy),
                dx: Some(batch.rows_of(self.dx)),
                chunk_state,
                scratch,
            };
            self.layer.backward(&kernels, &pass);
            accumulate = true;
        }
        scratch.peak()
    }

    /// dy · y for these weights and inputs.
    fn value(&mut self, weights: &[f32], x: &[f32]) -> f64 {
        self.memory.fill(self.weights, weights);
        self.memory.fill(self.x, x);
        self.forward(Some(&self.memory), None);
        let dy = self.memory.values(self.dy).to_vec();
        dot(self.memory.values(self.y), &dy)
    }
}

/// The inputs of a check, and the gradients of a backward that recomputes all activations.
struct Reference {
    tensors: Vec<Tensor>,
    weights: Vec<f32>,
    x: Vec<f32>,
    dy: Vec<f32>,
    dx: Vec<f32>,
    gradient: Vec<f32>,
}

impl Reference {
    fn new(bench: &mut Bench<'_>) -> Reference {
        let tensors = bench.layer.tensors();
        let mut weights = vec![0.0; bench.weights.len()];
        for (index, (tensor, range)) in tensors.iter().zip(tensor_ranges(&tensors)).enumerate() {
            let center = if tensor.init == Init::Ones { 1.0 } else { 0.0 };
            let noise = noise(100 + index as u64, range.len());
            for (weight, noise) in weights[range].iter_mut().zip(noise) {
                *weight = center + 0.3 * noise;
            }
        }
        let x = noise(1, bench.x.len());
        let dy = noise(2, bench.dy.len());
        bench.memory.fill(bench.weights, &weights);
        bench.memory.fill(bench.x, &x);
        bench.memory.fill(bench.dy, &dy);
        bench.memory.fill(bench.gradient, &vec![f32::NAN; bench.gradient.len()]);
        bench.backward(Some(&bench.memory), None, false);
        let dx = bench.memory.values(bench.dx).to_vec();
        let gradient = bench.memory.values(bench.gradient).to_vec();
        Reference { tensors, weights, x, dy, dx, gradient }
    }

    /// The name of each tensor, and where it is in the block.
    fn tensors(&self) -> impl Iterator<Item = (&str, Range<usize>)> {
        let names = self.tensors.iter().map(|tensor| tensor.name.as_str());
        names.zip(tensor_ranges(&self.tensors))
    }

    /// Compares the gradient of a tensor, or of the input, with differences along one direction.
    fn check_direction(
        &self,
        bench: &mut Bench<'_>,
        what: &str,
        tensor: Option<Range<usize>>,
        backward: &[f32],
    ) -> Result<(), Mismatch> {
        const STEP: f32 = 1e-2;
        let direction = noise(what.len() as u64 + 3, backward.len());
        let mut moved = |sign: f32| {
            let mut weights = self.weights.clone();
            let mut x = self.x.clone();
            let values = match &tensor {
                Some(range) => &mut weights[range.clone()],
                None => &mut x[..],
            };
            let steps = values.iter_mut().zip(&direction);
            steps.for_each(|(value, direction)| *value += sign * STEP * direction);
            bench.value(&weights, &x)
        };
        let forward = (moved(1.0) - moved(-1.0)) / f64::from(2.0 * STEP);
        let backward_along = dot(backward, &direction);
        // Terms cancel along a direction, so the tolerance follows from the size of all of them. A
        // difference below the rounding errors means nothing.
        let size = dot(backward, backward).sqrt();
        let sum: f64 = self.dy.iter().map(|dy| f64::from(dy.abs())).sum();
        let rounding = f64::from(f32::EPSILON) * sum;
        let allowed = (1e-2 * size.max(forward.abs())).max(rounding / f64::from(STEP));
        if (forward - backward_along).abs() <= allowed {
            Ok(())
        } else {
            Err(Mismatch { what: what.into(), backward: backward_along, forward })
        }
    }

    /// Compares the gradients by a backward with saved activations, to the bit.
    fn check_saved(&self, bench: &mut Bench<'_>, save: Save) -> Result<(), Mismatch> {
        let same = |name: &str, one: &[f32], other: &[f32]| {
            let mut pairs = one.iter().zip(other);
            let differs = pairs.find(|(one, other)| one.to_bits() != other.to_bits());
            differs.map_or(Ok(()), |(one, other)| {
                let what = format!("{name}, recomputed and saved");
                Err(Mismatch { what, backward: f64::from(*one), forward: f64::from(*other) })
            })
        };
        bench.memory.fill(bench.weights, &self.weights);
        bench.memory.fill(bench.x, &self.x);
        bench.forward(Some(&bench.memory), Some(save));
        bench.backward(Some(&bench.memory), Some(save), false);
        same("the input", &self.dx, bench.memory.values(bench.dx))?;
        let saved = bench.memory.values(bench.gradient).to_vec();
        let mut tensors = self.tensors();
        tensors
            .try_for_each(|(name, range)| same(name, &self.gradient[range.clone()], &saved[range]))
    }

    /// Compares a gradient that was added to itself with twice the gradient.
    fn check_accumulation(&self, bench: &mut Bench<'_>) -> Result<(), Mismatch> {
        bench.backward(Some(&bench.memory), Some(Save::All), true);
        let twice = bench.memory.values(bench.gradient).to_vec();
        for (name, range) in self.tensors() {
            for (once, twice) in self.gradient[range.clone()].iter().zip(&twice[range]) {
                let once = f64::from(2.0 * once);
                let twice = f64::from(*twice);
                if (once - twice).abs() > 1e-4 * once.abs().max(1e-2) {
                    let what = format!("{name}, added to itself");
                    return Err(Mismatch { what, backward: twice, forward: once });
                }
            }
        }
        Ok(())
    }
}

/// Checks that a layer's backward is the gradient of its forward: for its input and for each of its
/// tensors, along random directions, within 1 % (kernels compute in f32). `rows` are the sizes of
/// the micro-batch; the last of several sequences is shorter. Dropout is on, with the same masks in
/// all passes.
///
/// Longer sequences than 128 positions are computed in chunks, if the layer cuts them.
///
/// It also checks that the backward replaces a gradient or adds to it as `accumulate` says, and
/// that it gives the same bits whether activations were saved or are recomputed.
///
/// # Errors
/// The first check that fails.
///
/// # Panics
/// The layer takes views that do not fit.
pub fn check_gradients(layer: &dyn Layer, channels: usize, rows: Rows) -> Result<(), Mismatch> {
    let mut bench = Bench::new(layer, channels, rows);
    let reference = Reference::new(&mut bench);
    reference.check_direction(&mut bench, "the input", None, &reference.dx)?;
    for (name, range) in reference.tensors() {
        let backward = &reference.gradient[range.clone()];
        reference.check_direction(&mut bench, name, Some(range), backward)?;
    }
    for save in [Save::AllButAttention, Save::All] {
        reference.check_saved(&mut bench, save)?;
    }
    reference.check_accumulation(&mut bench)
}

/// Checks that a loss's slopes are its derivatives, at a few places.
///
/// # Errors
/// The first place where they are not.
pub fn check_loss(loss: &dyn Loss) -> Result<(), Mismatch> {
    const STEP: f32 = 1e-2;
    for (lse, target) in [(0.5_f32, -1.0_f32), (3.0, 2.5), (5.0, 0.0), (1.0, 0.99)] {
        let slopes = loss.slopes(lse, target);
        let by = |a: f32, b: f32| f64::from(loss.value(lse + a, target + b));
        let along = [(STEP, 0.0), (0.0, STEP)];
        for ((slope, (a, b)), what) in slopes.iter().zip(along).zip(["lse", "the target"]) {
            let forward = (by(a, b) - by(-a, -b)) / f64::from(2.0 * STEP);
            let backward = f64::from(*slope);
            if (forward - backward).abs() > 1e-2 * forward.abs().max(1.0) {
                let what = format!("by {what} at ({lse}, {target})");
                return Err(Mismatch { what, backward, forward });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
