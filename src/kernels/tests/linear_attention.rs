//! Wrong views of linear attention and of gates of attention's output.

use super::*;

const HEADS: LinearHeads =
    LinearHeads { key_heads: 1, value_heads: 3, key_size: 2, value_size: 5, taps: 4 };

fn linear() -> LinearShape<'static> {
    LinearShape { batch: batch(), heads: HEADS }
}

fn of_heads(view: fn(usize, usize) -> View) -> HeadDecay {
    HeadDecay { log: view(1, 3), bias: view(1, 3) }
}

#[test]
fn wrong_views_of_the_delta_rule_are_found() {
    let shape = linear();
    let [mixed, projected, values] =
        [HEADS.mixed(), HEADS.projected(), HEADS.values()].map(|columns| element(R, columns));
    let dprojected = projected;
    let dx = mixed;
    let w = element(HEADS.mixed(), 4);
    let dw = float(HEADS.mixed(), 4);
    let left = Some(float(3, HEADS.carried()));
    let carried = Carried { before: left, behind: left };
    let op = ShortConvolution { y: mixed, projected, w, shape, carried };
    found!(op, [y, projected, w, carried.before, carried.behind]);
    let accumulate = true;
    let dcarried = CarriedGradients { before: left, dbefore: left, dbehind: left };
    let op = ShortConvolutionBackward {
        dprojected,
        dw,
        dy: mixed,
        projected,
        w,
        shape,
        carried: dcarried,
        accumulate,
    };
    found!(op, [dprojected, dw, dy, projected, w]);
    found!(op, [carried.before, carried.dbefore, carried.dbehind]);
    let decay = of_heads(element);
    let ddecay = of_heads(float);
    let op = DeltaRule { y: values, x: mixed, projected, decay, shape, carried };
    found!(op, [y, x, projected, decay.log, decay.bias, carried.before, carried.behind]);
    let dy = values;
    let op = DeltaRuleBackward {
        dx,
        dprojected,
        ddecay,
        dy,
        x: mixed,
        projected,
        decay,
        shape,
        carried: dcarried,
        accumulate,
    };
    found!(op, [dx, dprojected, ddecay.log, ddecay.bias, dy, x, projected, decay.log, decay.bias]);
    found!(op, [carried.before, carried.dbefore, carried.dbehind]);
}

#[test]
fn wrong_sizes_of_the_delta_rule_are_found() {
    let convolution = |batch, heads: LinearHeads| ShortConvolution {
        y: element(R, heads.mixed()),
        projected: element(R, heads.projected()),
        w: element(heads.mixed(), 4),
        shape: LinearShape { batch, heads },
        carried: Carried::default(),
    };
    convolution(batch(), HEADS).check();
    let heads = LinearHeads { key_heads: 2, ..HEADS };
    let op = convolution(batch(), heads);
    assert!(panics(|| op.check()), "two heads of keys do not serve three of values");
    let cached = BatchMetadata { cached: &[0, 2, 0], ..*batch().metadata() };
    let op = convolution(cached.view(), HEADS);
    assert!(panics(|| op.check()), "earlier rows have left nothing");
}

#[test]
fn wrong_views_of_gates_are_found() {
    let shape = linear();
    let projected = element(R, HEADS.projected());
    let values = element(R, HEADS.values());
    let gamma = element(1, 5);
    let epsilon = 1e-6;
    let op = GatedNorm { y: values, x: values, projected, gamma, epsilon, shape };
    found!(op, [y, x, projected, gamma]);
    let op = GatedNormBackward {
        dx: values,
        dprojected: projected,
        dgamma: float(1, 5),
        dy: values,
        x: values,
        projected,
        gamma,
        epsilon,
        shape,
        accumulate: false,
    };
    found!(op, [dx, dprojected, dgamma, dy, x, projected, gamma]);
    let shape = super::shape();
    let qkv = element(R, shape.qkv_width());
    let gates = element(R, shape.width());
    let x = element(R, shape.qkv_width() + shape.width());
    found!(SplitGates { qkv, gates, x, shape }, [qkv, gates, x]);
    found!(JoinGates { y: x, qkv, gates, shape }, [y, qkv, gates]);
    let x = element(R, C);
    found!(SigmoidGate { y: x, x, gates: x }, [y, x, gates]);
    let op = SigmoidGateBackward { dx: x, dgates: x, dy: x, x, gates: x };
    found!(op, [dx, dgates, dy, x, gates]);
}
