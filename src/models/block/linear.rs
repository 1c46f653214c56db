//! Linear attention in place of a block's attention: its tensors, forward and backward; and the
//! gates of attention's output, which both have.

use super::TransformerBlock;
use super::backward::ChunkGradients;
use super::chunk::ChunkPass;
use super::tensors::Modules;
use crate::kernels::{
    Cast, ColumnGroups, DeltaRule, DeltaRuleBackward, GatedNorm, GatedNormBackward, HeadDecay,
    JoinGates, LinearHeads, LinearShape, QkNorm, ShortConvolution, ShortConvolutionBackward,
    SigmoidGate, SigmoidGateBackward,
};
use crate::models::families::LinearNames;
use crate::models::layer::{Init, Kind, Tensor};
use crate::models::norms::or_scratch;
use crate::models::shape::Shape;
use crate::tensor::{Scratch, View};

/// The tensors of linear attention beside its products, or their gradients.
#[derive(Clone, Copy)]
pub(super) struct LinearTensors<V> {
    /// Weights of the convolution. (M, taps).
    convolution: V,
    decay: HeadDecay<V>,
    /// Scales of the norm. (1, D_v).
    norm: V,
}

impl<V> LinearTensors<V> {
    /// The tensors in the order of [`TransformerBlock::linear_tensors`].
    pub(super) fn next(mut view: impl FnMut() -> V) -> LinearTensors<V> {
        let convolution = view();
        let decay = HeadDecay { log: view(), bias: view() };
        LinearTensors { convolution, decay, norm: view() }
    }
}

/// The backward of linear attention.
pub(super) struct LinearPass<'a> {
    pub(super) w: &'a LinearTensors<View>,
    pub(super) d: &'a LinearTensors<Option<View>>,
    pub(super) heads: LinearHeads,
    /// The gradient of the input of its last product. (R, H D_v).
    pub(super) dy: View,
}

/// Channels of a block's attention.
pub(super) struct Widths {
    /// Its projection, where that is not saved as it is: it has gates, or lies head by head. Of
    /// queries alone: these as they are rotated.
    pub(super) projected: usize,
    /// What is saved of the projection, but for gates: all of it, or queries, keys and values.
    pub(super) qkv: usize,
    /// Gates of the output, if they are saved beside these.
    pub(super) gates: usize,
    /// What attention or the delta rule reads of the projection, if that is not the projection.
    pub(super) rotated: usize,
    /// Its output.
    pub(super) output: usize,
    /// Statistics of a row: log-sum-exps.
    pub(super) statistics: usize,
}

impl TransformerBlock {
    /// The sizes of linear attention, if the block has it.
    pub(super) fn linear(&self) -> Option<LinearHeads> {
        self.shape.linear_of(self.number)
    }

    /// The norms of queries and keys, if they have any.
    pub(super) fn qk_norm(&self) -> Option<QkNorm> {
        self.shape.qk_norm.filter(|_| self.linear().is_none())
    }

    /// The statistics of a row's norm of queries and keys; 0 if there is none.
    pub(super) fn head_statistics(&self) -> usize {
        self.qk_norm().map_or(0, |norm| self.projected_shape().head_statistics(norm))
    }

    /// Whether the block's products have biases, in the order of the shape.
    pub(super) fn biases(&self) -> [bool; 3] {
        let [qkv, output, feed_forward] = self.shape.biases;
        match self.linear() {
            Some(_) => [false, false, feed_forward],
            None => [qkv, output, feed_forward],
        }
    }

    /// How the columns of the projection lie in groups, if they do.
    pub(super) fn column_groups(&self) -> Option<ColumnGroups> {
        let Shape { names, heads, head_size, qkv_by_head, .. } = self.shape;
        match self.linear() {
            Some(heads) => {
                names.linear.is_by_head().then(|| ColumnGroups::of_linear_attention(heads))
            }
            None => qkv_by_head.then(|| ColumnGroups::of_heads(heads, head_size)),
        }
    }

    pub(super) fn widths(&self) -> Widths {
        let shape = &self.shape;
        let is_grouped = self.column_groups().is_some();
        if let Some(heads) = self.linear() {
            return Widths {
                projected: if is_grouped { heads.projected() } else { 0 },
                qkv: heads.projected(),
                gates: 0,
                rotated: heads.mixed(),
                output: heads.values(),
                statistics: 0,
            };
        }
        let gates = if shape.output_gates { shape.attention_width() } else { 0 };
        let reads_kv = self.reads_kv();
        let is_rearranged = is_grouped || gates > 0 || reads_kv;
        let qkv = self.projected_shape().projected_qkv();
        Widths {
            projected: if is_rearranged { qkv + gates } else { 0 },
            qkv,
            gates,
            rotated: if shape.qk_norm.is_some() || reads_kv { shape.qkv() } else { 0 },
            output: shape.attention_width(),
            statistics: shape.heads,
        }
    }

    /// The modules of the products of linear attention: its projection, and its output.
    pub(super) fn linear_attention_modules(&self, heads: LinearHeads) -> [Modules; 2] {
        let LinearNames { projection, output, .. } = self.shape.names.linear;
        let all: Vec<(&str, usize)> = match *projection {
            [wide, narrow] => {
                vec![(wide, heads.mixed() + heads.values()), (narrow, 2 * heads.value_heads)]
            }
            _ => {
                let own = [heads.mixed(), heads.value_heads, heads.value_heads, heads.values()];
                projection.iter().copied().zip(own).collect()
            }
        };
        let hidden = self.shape.hidden;
        let of_projection = self.product_of(hidden, false, false);
        let of_output = self.product_of(heads.values(), false, true);
        [
            self.product_modules(&all, None, of_projection),
            self.product_modules(&[(output, hidden)], None, of_output),
        ]
    }

    /// The tensors of linear attention beside its products.
    pub(super) fn linear_tensors(&self) -> Vec<Tensor> {
        let Some(heads) = self.linear() else { return Vec::new() };
        let LinearNames { convolution, log, bias, norm, .. } = self.shape.names.linear;
        let weight = |name| format!("{}.weight", self.name(name));
        // As PyTorch begins a convolution.
        let bound = Init::Uniform(1.0 / (heads.taps as f32).sqrt());
        let of_heads = vec![heads.value_heads];
        let taps = vec![heads.mixed(), 1, heads.taps];
        vec![
            Tensor::new(weight(convolution), taps, Kind::Table, bound),
            Tensor::new(self.name(log), of_heads.clone(), Kind::Bias, Init::LogOfUniform),
            Tensor::new(self.name(bias), of_heads, Kind::Bias, Init::Ones),
            Tensor::new(weight(norm), vec![heads.value_size], Kind::Norm, Init::Ones),
        ]
    }
}

impl ChunkPass<'_> {
    fn linear_shape(&self, heads: LinearHeads) -> LinearShape<'_> {
        LinearShape { batch: self.batch, heads }
    }

    /// What the delta rule reads, from the saved projection.
    pub(super) fn mixed_channels(&self, w: &LinearTensors<View>, heads: LinearHeads) -> View {
        let y = self.rotated;
        let projected = self.saved.qkv;
        let w = w.convolution;
        let shape = self.linear_shape(heads);
        let carried = self.carried.forward;
        self.k.short_convolution(&ShortConvolution { y, projected, w, shape, carried });
        y
    }

    /// The output of the delta rule, to `y`, from what [`mixed_channels`](Self::mixed_channels)
    /// computed.
    pub(super) fn delta_rule(
        &self,
        y: View,
        w: &LinearTensors<View>,
        heads: LinearHeads,
        scratch: &Scratch<'_>,
    ) {
        let ChunkPass { k, ref saved, rotated: x, ref carried, .. } = *self;
        let projected = saved.qkv;
        let decay = w.decay;
        let shape = self.linear_shape(heads);
        let carried_on = carried.forward;
        let op = DeltaRule { y, x, projected, decay, shape, carried: carried_on };
        k.delta_rule(&op, scratch);
        if let Some((y, x)) = carried.copy.zip(carried_on.behind) {
            k.cast(&Cast { y, x });
        }
    }

    /// The input of attention's last product: the output of attention or of the delta rule, behind
    /// its gates if it has any.
    pub(super) fn gated_output(&self) -> View {
        let ChunkPass { block, k, w, ref saved, gated: y, .. } = *self;
        let x = saved.attention_output;
        if let Some((w, heads)) = w.linear.as_ref().zip(block.linear()) {
            let projected = saved.qkv;
            let epsilon = block.shape.norm_epsilon;
            let shape = self.linear_shape(heads);
            k.gated_norm(&GatedNorm { y, x, projected, gamma: w.norm, epsilon, shape });
            return y;
        }
        let Some(gates) = saved.gates else { return x };
        k.sigmoid_gate(&SigmoidGate { y, x, gates });
        y
    }

    /// The gradients of attention's output and of its gates, from that of its last product's input.
    pub(super) fn gates_backward(&self, dy: View, scratch: &Scratch<'_>) -> [View; 2] {
        let Some(gates) = self.saved.gates else { return [dy, dy] };
        let [dx, dgates] = [(); 2].map(|()| scratch.take_like(dy));
        let x = self.saved.attention_output;
        self.k.sigmoid_gate_backward(&SigmoidGateBackward { dx, dgates, dy, x, gates });
        [dx, dgates]
    }

    /// The gradient of the projection: of queries, keys and values, with that of the gates if there
    /// are any.
    pub(super) fn join_gates(&self, qkv: View, gates: View, scratch: &Scratch<'_>) -> View {
        if self.saved.gates.is_none() {
            return qkv;
        }
        let y = scratch.take_like(self.projected);
        let shape = self.block.attention(&self.batch);
        self.k.join_gates(&JoinGates { y, qkv, gates, shape });
        y
    }

    /// The gradient of the projection of linear attention, from that of its last product's input.
    pub(super) fn linear_backward(
        &self,
        g: &ChunkGradients<'_>,
        &LinearPass { w, d, heads, dy }: &LinearPass<'_>,
        scratch: &Scratch<'_>,
    ) -> View {
        let ChunkPass { block, k, ref saved, .. } = *self;
        let shape = self.linear_shape(heads);
        let projected = saved.qkv;
        let carried = self.carried.gradients;
        let accumulate = g.accumulate;
        let dprojected = scratch.take_like(projected);
        let doutput = scratch.take_like(dy);
        let of = |d: Option<View>, w: View| or_scratch(d, w, scratch);
        let op = GatedNormBackward {
            dx: doutput,
            dprojected,
            dgamma: of(d.norm, w.norm),
            dy,
            x: saved.attention_output,
            projected,
            gamma: w.norm,
            epsilon: block.shape.norm_epsilon,
            shape,
            accumulate,
        };
        k.gated_norm_backward(&op, scratch);
        let x = self.rotated;
        let dx = scratch.take_like(x);
        let log = of(d.decay.log, w.decay.log);
        let ddecay = HeadDecay { log, bias: of(d.decay.bias, w.decay.bias) };
        let dy = doutput;
        let decay = w.decay;
        let op = DeltaRuleBackward {
            dx,
            dprojected,
            ddecay,
            dy,
            x,
            projected,
            decay,
            shape,
            carried,
            accumulate,
        };
        k.delta_rule_backward(&op, scratch);
        let op = ShortConvolutionBackward {
            dprojected,
            dw: of(d.convolution, w.convolution),
            dy: dx,
            projected,
            w: w.convolution,
            shape,
            carried,
            accumulate,
        };
        k.short_convolution_backward(&op, scratch);
        dprojected
    }
}
