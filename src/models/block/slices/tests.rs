//! What a slice has, and that it is computed by itself.

use std::ops::Range;

use super::*;
use crate::devices::cpu::CpuKernels;
use crate::kernels::{AttentionShape, BatchMetadata, DropoutKey};
use crate::models::block::tensors::{FeedForward, Tensors};
use crate::models::families;
use crate::models::layer::{block_len, tensor_views};
use crate::models::portions::Part;
use crate::models::shape::Shape;
use crate::simd::Level;
use crate::tensor::{Arena, Dtype};

const ROWS: usize = 5;

fn shape(kind: &str) -> Shape {
    let config = serde_json::json!({
        "model_type": kind, "num_hidden_layers": 1, "hidden_size": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "intermediate_size": 20, "vocab_size": 10, "max_position_embeddings": 9,
        "attention_dropout": 0.4, "attention_bias": true, "mlp_bias": true,
    });
    Shape { slices: 2, ..families::read(&config).expect("a config of ours") }
}

fn one(range: Range<usize>) -> Vec<Range<usize>> {
    Vec::from([range])
}

fn parts(block: &TransformerBlock, slice: usize) -> (Vec<Part>, Vec<Part>) {
    let tensors = block.tensors();
    let groups: Vec<usize> = (0..tensors.iter().filter(|tensor| !tensor.joined).count()).collect();
    let whole: Tensors<usize, usize> = block.sorted(&groups, &[]);
    let mut of_attention = Vec::new();
    let _: Tensors<(), ()> =
        block.attention_of(slice, &whole, &mut |_, part| of_attention.push(part));
    let FeedForward::Dense(mlp) = &whole.feed_forward else { unreachable!("it is dense") };
    let mut of_mlp = Vec::new();
    block.mlp_of(slice, mlp, &mut |_, part| of_mlp.push(part));
    (of_attention, of_mlp)
}

/// Queries, keys and values are three ranges, gate and up projection two, and never one. The first
/// slice alone has the biases of what is summed.
#[test]
fn a_slice_has_its_heads_and_channels() {
    let block = TransformerBlock::new(2, 0, shape("llama"));
    let rows = |ranges: &[Range<usize>]| Part::Rows(ranges.to_vec());
    let columns = |ranges: &[Range<usize>]| Part::Columns(ranges.to_vec());
    let qkv = [12..24, 30..36, 42..48];
    let [norm1, norm2] = [Part::Alone, Part::Alone];
    let own = [norm1, norm2, rows(&qkv), columns(&qkv), columns(&one(12..24))];
    let (of_attention, of_mlp) = parts(&block, 1);
    assert_eq!(of_attention, own);
    let up = [10..20, 30..40];
    assert_eq!(of_mlp, [rows(&up), columns(&up), columns(&one(10..20))]);
    let (of_attention, of_mlp) = parts(&block, 0);
    assert_eq!(of_attention.last(), Some(&Part::Alone));
    assert_eq!(of_mlp.last(), Some(&Part::Alone));
}

/// A GPT-2's weights are (inputs, outputs): columns and rows change places.
#[test]
fn transposed_weights_are_cut_the_other_way() {
    let shape = Shape { slices: 2, ..families::gpt2([1, 24, 4, 20, 10, 9]) };
    let block = TransformerBlock::new(2, 0, shape);
    let (of_attention, of_mlp) = parts(&block, 1);
    let qkv = vec![12..24, 36..48, 60..72];
    assert_eq!(of_attention[4], Part::Columns(qkv.clone()));
    assert_eq!(of_attention[5], Part::Columns(qkv), "the bias");
    assert_eq!(of_attention[6], Part::Rows(one(12..24)));
    assert_eq!(of_attention.len(), 7, "the bias of the output is the first slice's");
    assert_eq!(of_mlp[2], Part::Rows(one(10..20)));
}

/// The outputs of one slice, when the weights of the other one are `others`.
fn partial_sums(slice: usize, others: f32) -> [Vec<f32>; 2] {
    let block = TransformerBlock::new(2, 0, shape("qwen3"));
    let tensors = block.tensors();
    let weights = View::floats(0, block_len(&tensors));
    let mut memory = Arena::new(1 << 16).expect("little");
    let noise = |at: usize| (at as f32 * 0.37).sin();
    let values: Vec<f32> = (0..weights.len()).map(noise).collect();
    memory.fill(weights, &values);
    let views = tensor_views(&tensors, weights);
    let whole: Weights<'_> = block.sorted(&views, &[]);
    let mut own = vec![true; weights.len()];
    let mut mark = |view: View, part: Part| {
        for at in 0..view.len() {
            let [row, column] = [at / view.columns, at % view.columns];
            let is_other = match &part {
                Part::Rows(ranges) => ranges.iter().any(|range| range.contains(&row)),
                Part::Columns(ranges) => ranges.iter().any(|range| range.contains(&column)),
                Part::Alone | Part::Shared => false,
            };
            own[view.at + at] &= !is_other;
        }
    };
    let FeedForward::Dense(mlp) = &whole.feed_forward else { unreachable!("it is dense") };
    let _: Tensors<(), ()> = block.attention_of(1 - slice, &whole, &mut mark);
    block.mlp_of(1 - slice, mlp, &mut mark);
    assert!(own.iter().any(|own| !own) && own.iter().any(|own| *own));
    let values: Vec<f32> =
        values.iter().zip(own).map(|(x, own)| if own { *x } else { others }).collect();
    memory.fill(weights, &values);
    let x = View::floats(weights.len(), ROWS * 24).with_columns(24);
    memory.fill(x, &(0..x.len()).map(noise).collect::<Vec<_>>());
    let [attention, feed] = [0, 1].map(|nth| View { at: x.at + (1 + nth) * x.len(), ..x });
    let rest = feed.at + feed.len();
    let starts = [0, ROWS];
    let dropout_key = Some(DropoutKey { seed: 3, step: 1, first_sequence: 0 });
    let batch = BatchMetadata { dropout_key, ..BatchMetadata::plain(&starts) };
    {
        let kernels = CpuKernels::new(Some(&memory), Level::best());
        let scratch = Scratch::new(View::floats(rest, (1 << 16) - rest), Dtype::F32);
        let inputs = ChunkInputs::without_kv(&whole, batch.view(), x, None);
        let nothing = ChunkMemory { memory: View::floats(0, 0), before: 0 };
        let kv = SlicedKv { kv_cache: None, chunk_state: nothing, begin: |state, _| state };
        let pass = block.sliced_pass(&kernels, &inputs, &kv, &scratch);
        let input = pass.whole.attention_input();
        pass.attend(slice..slice + 1, attention, input, &scratch);
        pass.feed(slice..slice + 1, feed, &scratch);
    }
    [attention, feed].map(|view| memory.values(view).to_vec())
}

/// The partial sums of a slice depend on nothing of the other slices.
#[test]
fn a_slice_is_computed_by_itself() {
    for slice in [0, 1] {
        let found = partial_sums(slice, 0.0);
        assert_eq!(found, partial_sums(slice, 7.0));
        assert!(found.iter().flatten().all(|x| x.is_finite() && *x != 0.0));
    }
    assert_ne!(partial_sums(0, 0.0), partial_sums(1, 0.0));
}

/// A head of a slice drops what it drops in the whole block.
#[test]
fn a_slice_has_the_masks_of_its_heads() {
    let starts = [0, ROWS];
    let dropout_key = Some(DropoutKey { seed: 3, step: 1, first_sequence: 0 });
    let batch = BatchMetadata { dropout_key, ..BatchMetadata::plain(&starts) };
    let block = TransformerBlock::new(2, 0, shape("llama"));
    let of = |block: &TransformerBlock| {
        let AttentionShape { dropout, heads, .. } = block.attention(&batch.view());
        (dropout.expect("there is some").first_position, heads)
    };
    assert_eq!(of(&block), (0, 4));
    assert_eq!(of(&block.slice(0)), (0, 2));
    assert_eq!(of(&block.slice(1)), (2 << 20, 2));
}
