//! Checks for a layer of your own: that its backward is the gradient of its forward.

use std::ops::Range;

use crate::devices::cpu::CpuKernels;
use crate::kernels::{BatchMetadata, BatchView, DropoutKey, Loss, Rows};
use crate::models::{
    Backward, Forward, Init, Layer, PortViews, Save, SlotWeight, Tensor, block_len, tensor_ranges,
    tensor_views,
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
        let saved = place(layer.saved_len(rows.positions, Save::All, Dtype::F32) * rows.sequences);
        let chunk_state = place(layer.chunk_state_len(rows.positions, true, Dtype::F32));
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

    fn saved(&self, keeps: Option<Save>) -> Option<(Save, View)> {
        keeps.map(|save| (save, self.saved)).filter(|(_, view)| !view.is_empty())
    }

    /// The layer's weights, and those that it dequantises by itself.
    fn weights(&self) -> (Vec<View>, Vec<SlotWeight<'static>>) {
        let mut weights = tensor_views(&self.layer.tensors(), self.weights);
        let stored = weights.split_off(weights.len() - self.layer.stored_weights(0));
        (weights, stored.into_iter().map(SlotWeight::Ready).collect())
    }

    fn forward(&self, memory: Option<&Arena>, keeps: Option<Save>) -> usize {
        let kernels = CpuKernels::new(memory, Level::best());
        let scratch = &Scratch::new(self.workspace, Dtype::F32);
        let batch = self.batch();
        let saved = self.saved(keeps);
        let (weights, stored) = self.weights();
        let pass = Forward {
            batch,
            step: 0,
            weights: &weights,
            stored: &stored,
            x: self.x,
            y: self.y,
            ports: PortViews::NONE,
            saved,
            kv_cache: None,
            chunk_state: self.chunk_state,
            scratch,
        };
        self.layer.forward(&kernels, &pass);
        scratch.peak()
    }

    fn backward(&self, memory: Option<&Arena>, keeps: Option<Save>, accumulate: bool) -> usize {
        let kernels = CpuKernels::new(memory, Level::best());
        let scratch = &Scratch::new(self.workspace, Dtype::F32);
        let tensors = self.layer.tensors();
        let gradients = tensor_views(&tensors, self.gradient).into_iter().map(Some);
        let gradients: Vec<Option<View>> = gradients.collect();
        let (weights, stored) = self.weights();
        let pass = Backward {
            batch: self.batch(),
            step: 0,
            ports: PortViews::NONE,
            weights: &weights,
            stored: &stored,
            gradients: &gradients,
            accumulate,
            x: self.x,
            saved: self.saved(keeps),
            dy: self.dy,
            dx: Some(self.dx),
            chunk_state: self.chunk_state,
            scratch,
        };
        self.layer.backward(&kernels, &pass);
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
mod tests {
    use super::*;
    use crate::kernels::{CrossEntropy, Kernels};
    use crate::models::families::{self, gpt2};
    use crate::models::{Dropouts, Model, ModelLayer, Shape, TransformerBlock};

    const ROWS: Rows = Rows { sequences: 3, positions: 7 };

    fn small() -> Shape {
        let p = 0.1;
        let dropout =
            Dropouts { embedding: p, attention: p, projection: p, feed_forward: p, classifier: p };
        Shape { dropout, ..gpt2([1, 24, 3, 40, 10, 9]) }
    }

    /// Every layer of small models of every family.
    #[test]
    fn the_layers_there_are_pass() {
        let decoder = |kind: &str, head: usize| {
            serde_json::json!({
                "model_type": kind, "num_hidden_layers": 2, "hidden_size": 20,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head,
                "intermediate_size": 28, "vocab_size": 10, "max_position_embeddings": 9,
                "sliding_window": 3, "use_sliding_window": true, "max_window_layers": 1,
                "attention_bias": true, "mlp_bias": true, "attention_dropout": 0.1,
            })
        };
        // All experts are chosen: at the edge of a choice there is no gradient.
        let experts = |kind: &str| {
            let own = serde_json::json!({
                "num_local_experts": 5, "num_experts": 5, "num_experts_per_tok": 5,
                "moe_intermediate_size": 7, "shared_expert_intermediate_size": 9,
                "sliding_window": null, "use_sliding_window": false, "attention_bias": false,
                "num_key_value_heads": 4,
            });
            let mut config = decoder(kind, 6);
            let keys = config.as_object_mut().expect("it is one");
            keys.extend(own.as_object().expect("it is one").clone());
            config
        };
        let learned = |kind: &str| {
            serde_json::json!({
                "model_type": kind, "num_hidden_layers": 1, "hidden_size": 24,
                "num_attention_heads": 3, "intermediate_size": 40, "vocab_size": 10,
                "max_position_embeddings": 9, "type_vocab_size": 2,
                "n_layers": 1, "dim": 24, "n_heads": 3, "hidden_dim": 40,
                "ffn_dim": 40, "activation_function": "gelu",
            })
        };
        let decoders = ["llama", "mistral", "qwen2", "qwen3"].map(|kind| decoder(kind, 6));
        let learned = ["bert", "distilbert", "opt", "roberta"].map(learned);
        let read = |config| families::read(&config).expect("a config of ours");
        let experts = ["gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"].map(experts);
        let shapes = decoders.into_iter().chain(experts).chain(learned);
        let shapes = shapes.map(read).chain([small()]);
        for shape in shapes {
            for layer in Model::new(shape).layers.iter().filter_map(ModelLayer::stack) {
                let checked = check_gradients(layer, shape.hidden, ROWS);
                checked.unwrap_or_else(|error| panic!("{}: {error}", shape.names.family));
            }
        }
        check_loss(&CrossEntropy).expect("a loss of ours");
    }

    /// Sequences that are walked in chunks, the last of them ragged.
    #[test]
    fn chunks_pass() {
        let decoder = |kind: &str| {
            let config = serde_json::json!({
                "model_type": kind, "num_hidden_layers": 1, "hidden_size": 6,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
                "intermediate_size": 5, "vocab_size": 10, "max_position_embeddings": 400,
                "sliding_window": 150, "attention_dropout": 0.1,
                "num_local_experts": 3, "num_experts_per_tok": 3,
            });
            families::read(&config).expect("a config of ours")
        };
        let plain = Shape { dropout: small().dropout, ..gpt2([1, 6, 2, 10, 9, 400]) };
        for (shape, sequences, chunks) in [
            (plain, 1, 1),
            (decoder("mistral"), 1, 2),
            (decoder("llama"), 2, 1),
            (decoder("mixtral"), 2, 1),
            (decoder("gpt_oss"), 1, 2),
        ] {
            let shape = Shape { chunk_positions: 128, ..shape };
            let rows = Rows { sequences, positions: chunks * 128 + 70 };
            for layer in Model::new(shape).layers.iter().filter_map(ModelLayer::stack) {
                let checked = check_gradients(layer, shape.hidden, rows);
                checked.unwrap_or_else(|error| panic!("{}: {error}", shape.names.family));
            }
        }
    }

    /// A block whose backward forgets something.
    struct Wrong(TransformerBlock, bool);

    impl Layer for Wrong {
        fn tensors(&self) -> Vec<Tensor> {
            self.0.tensors()
        }

        fn saved_len(&self, positions: usize, save: Save, dtype: Dtype) -> usize {
            self.0.saved_len(positions, save, dtype)
        }

        fn forward(&self, kernels: &dyn Kernels, pass: &Forward<'_>) {
            self.0.forward(kernels, pass);
        }

        fn backward(&self, kernels: &dyn Kernels, pass: &Backward<'_>) {
            let mut pass = Backward { ..*pass };
            if self.1 {
                pass.accumulate = false;
            } else {
                let metadata = *pass.batch.metadata();
                pass.batch = BatchMetadata { dropout_key: None, ..metadata }.view();
            }
            self.0.backward(kernels, &pass);
        }
    }

    #[test]
    fn what_is_wrong_is_found() {
        let block = || TransformerBlock::new(2, 0, small());
        let forgets = |what| check_gradients(&Wrong(block(), what), small().hidden, ROWS);
        assert!(forgets(false).is_err(), "masks");
        let error = forgets(true).expect_err("accumulation").to_string();
        assert!(error.contains("added to itself"), "{error}");

        struct Half;
        impl Loss for Half {
            fn value(&self, lse: f32, target: f32) -> f32 {
                lse - target
            }

            fn slopes(&self, _: f32, _: f32) -> [f32; 2] {
                [1.0, -0.5]
            }
        }
        assert!(check_loss(&Half).expect_err("a wrong slope").what.contains("the target"));
    }
}
