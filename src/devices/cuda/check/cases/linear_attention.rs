//! Cases of linear attention, and of gates of attention's output.

use super::{Cases, Layout};
use crate::kernels::{
    Carried, CarriedGradients, DeltaRule, DeltaRuleBackward, GatedNorm, GatedNormBackward,
    HeadDecay, JoinGates, LinearHeads, LinearShape, ShortConvolution, ShortConvolutionBackward,
    SigmoidGate, SigmoidGateBackward, SplitGates,
};
use crate::tensor::View;

/// Heads that share keys, in one block of channels; and many channels, in two.
const HEADS: [LinearHeads; 2] = [
    LinearHeads { key_heads: 2, value_heads: 4, key_size: 7, value_size: 5, taps: 4 },
    LinearHeads { key_heads: 1, value_heads: 1, key_size: 130, value_size: 34, taps: 2 },
];

impl Layout {
    /// What passes along the sequences.
    fn passed(&mut self, shape: &LinearShape<'_>) -> View {
        self.floats([shape.batch.sequences(), shape.heads.carried()], 0.0)
    }

    fn decay(&mut self, heads: usize) -> HeadDecay {
        HeadDecay { log: self.input([1, heads]), bias: self.input([1, heads]) }
    }

    fn forward(&mut self, shape: &LinearShape<'_>) -> Carried {
        Carried { before: Some(self.passed(shape)), behind: Some(self.passed(shape)) }
    }

    fn gradients(&mut self, shape: &LinearShape<'_>) -> CarriedGradients {
        CarriedGradients {
            before: Some(self.passed(shape)),
            dbefore: Some(self.passed(shape)),
            // Only chunks have later rows.
            dbehind: shape.batch.chunk().map(|_| self.passed(shape)),
        }
    }
}

impl<'c> Cases<'c> {
    pub(in super::super) fn of_linear_attention(&mut self) {
        for heads in HEADS {
            let shape = LinearShape { batch: self.batch, heads };
            self.of_convolutions(shape);
            self.of_rules(shape);
            self.of_gated_norms(shape);
        }
        self.of_output_gates();
    }

    fn of_convolutions(&mut self, shape: LinearShape<'c>) {
        let LinearShape { batch, heads } = shape;
        let r = batch.rows();
        case!(self.short_convolution, |p| ShortConvolution {
            y: p.output([r, heads.mixed()]),
            projected: p.input([r, heads.projected()]),
            w: p.input([heads.mixed(), heads.taps]),
            shape,
            carried: p.forward(&shape),
        });
        for accumulate in [false, true] {
            case!(self.short_convolution_backward, |p, scratch| ShortConvolutionBackward {
                dprojected: p.input([r, heads.projected()]),
                dw: p.gradient([heads.mixed(), heads.taps], accumulate),
                dy: p.input([r, heads.mixed()]),
                projected: p.input([r, heads.projected()]),
                w: p.input([heads.mixed(), heads.taps]),
                shape,
                carried: p.gradients(&shape),
                accumulate,
            });
        }
    }

    fn of_rules(&mut self, shape: LinearShape<'c>) {
        let LinearShape { batch, heads } = shape;
        let r = batch.rows();
        let h = heads.value_heads;
        case!(self.delta_rule, |p, scratch| DeltaRule {
            y: p.output([r, heads.values()]),
            x: p.input([r, heads.mixed()]),
            projected: p.input([r, heads.projected()]),
            decay: p.decay(h),
            shape,
            carried: p.forward(&shape),
        });
        for accumulate in [false, true] {
            case!(self.delta_rule_backward, |p, scratch| DeltaRuleBackward {
                dx: p.output([r, heads.mixed()]),
                dprojected: p.input([r, heads.projected()]),
                ddecay: HeadDecay {
                    log: p.gradient([1, h], accumulate),
                    bias: p.gradient([1, h], accumulate),
                },
                dy: p.input([r, heads.values()]),
                x: p.input([r, heads.mixed()]),
                projected: p.input([r, heads.projected()]),
                decay: p.decay(h),
                shape,
                carried: p.gradients(&shape),
                accumulate,
            });
        }
    }

    fn of_gated_norms(&mut self, shape: LinearShape<'c>) {
        let heads = shape.heads;
        let r = shape.batch.rows();
        let epsilon = 1e-3;
        case!(self.gated_norm, |p| GatedNorm {
            y: p.output([r, heads.values()]),
            x: p.input([r, heads.values()]),
            projected: p.input([r, heads.projected()]),
            gamma: p.about([1, heads.value_size], 1.0),
            epsilon,
            shape,
        });
        for accumulate in [false, true] {
            case!(self.gated_norm_backward, |p, scratch| GatedNormBackward {
                dx: p.output([r, heads.values()]),
                dprojected: p.input([r, heads.projected()]),
                dgamma: p.gradient([1, heads.value_size], accumulate),
                dy: p.input([r, heads.values()]),
                x: p.input([r, heads.values()]),
                projected: p.input([r, heads.projected()]),
                gamma: p.about([1, heads.value_size], 1.0),
                epsilon,
                shape,
                accumulate,
            });
        }
    }

    fn of_output_gates(&mut self) {
        let shape = self.attention([3, 1, 6]);
        let r = shape.rows();
        let width = shape.width();
        let all = shape.qkv_width() + width;
        case!(self.split_gates, |p| SplitGates {
            qkv: p.output([r, shape.qkv_width()]),
            gates: p.output([r, width]),
            x: p.input([r, all]),
            shape,
        });
        case!(self.join_gates, |p| JoinGates {
            y: p.output([r, all]),
            qkv: p.input([r, shape.qkv_width()]),
            gates: p.input([r, width]),
            shape,
        });
        case!(self.sigmoid_gate, |p| SigmoidGate {
            y: p.output([r, width]),
            x: p.input([r, width]),
            gates: p.input([r, width]),
        });
        case!(self.sigmoid_gate_backward, |p| SigmoidGateBackward {
            dx: p.output([r, width]),
            dgates: p.output([r, width]),
            dy: p.input([r, width]),
            x: p.input([r, width]),
            gates: p.input([r, width]),
        });
    }
}
