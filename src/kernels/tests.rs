//! Every operation refuses views that were swapped, or that have a wrong shape or dtype.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::tensor::{Dtype, Quantisation, View};

/// R, C and N of the operations below: all different, and none twice another.
const R: usize = 12;
const C: usize = 7;
const N: usize = 5;

fn batch() -> BatchView<'static> {
    let dropout_key = Some(DropoutKey { seed: 0, step: 0, first_sequence: 0 });
    let plain = BatchMetadata::plain(&[0, 4, 5, R]);
    BatchMetadata { kinds: &[0; R], dropout_key, ..plain }.view()
}

fn shape() -> AttentionShape<'static> {
    AttentionShape::causal(batch(), [6, 3, 4])
}

/// A view of the device's dtype.
fn element(rows: usize, columns: usize) -> View {
    View { at: 0, rows, columns, dtype: Dtype::Bf16 }
}

/// A view of floats.
fn float(rows: usize, columns: usize) -> View {
    View { dtype: Dtype::F32, ..element(rows, columns) }
}

/// A name, and a function that makes a view wrong.
type Wrong = (&'static str, fn(View) -> View);

/// The ways in which a view may be wrong.
const WRONGS: [Wrong; 4] = [
    ("a row more", |view| View { rows: view.rows + 1, ..view }),
    ("a column more", |view| View { columns: view.columns + 1, ..view }),
    ("transposed", |view| View { rows: view.columns, columns: view.rows, ..view }),
    ("of another dtype", |view| {
        let is_float = view.dtype == Dtype::F32;
        View { dtype: if is_float { Dtype::Bf16 } else { Dtype::F32 }, ..view }
    }),
];

fn panics(call: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(call)).is_err()
}

/// Checks an operation, then checks that it is refused with each listed view wrong in each way. A
/// field in `any_rows` may have any number of rows, and a field in `any_dtype` any dtype.
macro_rules! found {
    (
        $op:expr, [$($($field:ident).+),*]
        $(, any_rows: [$($rows:expr),*])? $(, any_dtype: [$($dtypes:expr),*])?
    ) => {{
        let right = $op;
        right.check();
        let any_rows: &[&str] = &[$($($rows),*)?];
        let any_dtype: &[&str] = &[$($($dtypes),*)?];
        $(
            let field = stringify!($($field).+);
            for (name, wrong) in WRONGS {
                let is_free = name == "a row more" && any_rows.contains(&field)
                    || name == "of another dtype" && any_dtype.contains(&field);
                let mut op = right;
                let view = found!(@view op.$($field).+);
                let is_same = *view == wrong(*view);
                *view = wrong(*view);
                assert!(is_free || is_same || panics(|| op.check()), "{field}: {name}");
            }
        )*
    }};
    (@view $place:expr) => { Viewed::view(&mut $place) };
}

mod linear_attention;

/// A field of an operation: a view, or one that may be absent.
trait Viewed {
    fn view(&mut self) -> &mut View;
}

impl Viewed for View {
    fn view(&mut self) -> &mut View {
        self
    }
}

impl Viewed for Option<View> {
    fn view(&mut self) -> &mut View {
        self.as_mut().expect("the test sets it")
    }
}

#[test]
fn wrong_views_of_products_and_norms_are_found() {
    for transposed in [false, true] {
        let w = if transposed { [N, C] } else { [C, N] };
        let y = element(R, N);
        let x = element(R, C);
        let w = element(w[0], w[1]);
        let bias = Some(element(1, N));
        found!(Linear { y, x, w, bias, transposed }, [y, x, w, bias], any_dtype: ["y"]);
        let dx = x;
        let dw = View { dtype: Dtype::F32, ..w };
        let dbias = Some(float(1, N));
        let op =
            LinearBackward { dx, dw: Some(dw), dbias, dy: y, x, w, transposed, accumulate: false };
        found!(op, [dx, dw, dbias, dy, x, w], any_dtype: ["dx"]);
    }
    let y = element(R, C);
    let statistics = float(R, 2);
    let x = element(R, C);
    let gamma = element(1, C);
    let beta = Some(gamma);
    let gamma_offset = 0.0;
    let epsilon = 1e-5;
    let rms = false;
    let op = Norm { y, statistics, x, gamma, gamma_offset, beta, epsilon, rms };
    found!(op, [y, statistics, x, gamma, beta]);
    let op = NormBackward {
        dx: x,
        dgamma: float(1, C),
        dbeta: Some(float(1, C)),
        residual: Some(x),
        dy: y,
        x,
        statistics,
        gamma,
        gamma_offset,
        rms,
        accumulate: false,
    };
    found!(op, [dx, dgamma, dbeta, residual, dy, x, statistics, gamma]);
}

#[test]
fn wrong_views_of_activations_and_dropouts_are_found() {
    let narrow = element(R, C);
    let wide = element(R, 2 * C);
    let activation = Activation::Silu;
    found!(Activate { y: narrow, x: narrow, activation }, [y, x]);
    found!(ActivateBackward { dx: narrow, x: narrow, activation }, [dx, x]);
    let form = GateForm::Plain(activation);
    found!(Gate { y: narrow, x: wide, form }, [y, x]);
    found!(GateBackward { dx: wide, dy: narrow, x: wide, form }, [dx, dy, x]);
    let dropout = batch().dropout(0.5, 0, 0);
    assert!(dropout.is_some());
    found!(Residual { y: narrow, a: narrow, x: narrow, dropout }, [y, a, x]);
    found!(ApplyDropout { y: narrow, x: narrow, dropout }, [y, x]);
    let thirds = element(R, 3 * C);
    let mut groups = ColumnGroups::of_heads(1, C);
    found!(RegroupColumns { y: thirds, x: thirds, groups, back: true }, [y, x]);
    groups.kinds[2].first += 1;
    assert!(panics(|| RegroupColumns { y: thirds, x: thirds, groups, back: true }.check()));
    let by = Some(element(1, 1));
    found!(Scale { y: narrow, x: narrow, factor: 2.0, by }, [y, x]);
    let rows = element(R + 1, C);
    assert!(panics(|| ApplyDropout { y: rows, x: rows, dropout }.check()), "rows of no position");
    for quantisation in Quantisation::ALL {
        let x = float(1, quantisation.floats(R, C));
        found!(Dequantise { y: narrow, x, quantisation, origin: None }, [x]);
    }
    found!(Cast { y: float(R, C), x: narrow }, [y, x], any_dtype: ["y", "x"]);
}

#[test]
fn wrong_views_of_attention_are_found() {
    let shape = shape();
    let y = element(R, shape.width());
    let lse = float(R, shape.heads);
    let qkv = element(R, shape.qkv_width());
    found!(Attention { y, lse, qkv, kv: None, shape }, [y, lse, qkv]);
    let dqkv = qkv;
    let dy = y;
    let op = AttentionBackward { dqkv, chunk_kv: None, dy, y, lse, qkv, shape };
    found!(op, [dqkv, dy, y, lse, qkv]);
    let kv = element(R, shape.kv_width());
    found!(WriteKv { kv, qkv, shape }, [kv, qkv]);
    found!(ReadKv { qkv, kv, shape }, [qkv], any_dtype: ["qkv"]);
    assert!(panics(|| ReadKv { qkv: kv, kv: qkv, shape }.check()), "swapped");
    let cache = element(3 * 8, shape.kv_width());
    let lse = float(shape.rows(), shape.heads);
    found!(CachedAttention { y, lse, qkv, cache, shape }, [y, lse, qkv, cache]);
    let rotary = &Rotary::new(100.0);
    found!(Rotate { qkv, rotary, shape, inverse: false }, [qkv], any_dtype: ["qkv"]);
    let one = element(1, shape.head_size);
    let gamma = QueryKey { query: one, key: one };
    let statistics = float(R, shape.heads + shape.kv_heads);
    let gamma_offset = 0.0;
    let epsilon = 1e-5;
    let values = HeadValues::Plain;
    let norm = QkNorm::ByHead;
    let x = qkv;
    let op = HeadNorm { y: qkv, statistics, x, gamma, gamma_offset, epsilon, norm, values, shape };
    found!(op, [y, statistics, x, gamma.query, gamma.key]);
    let one = float(1, shape.head_size);
    let op = HeadNormBackward {
        dx: qkv,
        dgamma: QueryKey { query: one, key: one },
        x: qkv,
        statistics,
        gamma,
        gamma_offset,
        norm,
        values,
        shape,
        accumulate: false,
    };
    found!(op, [dx, dgamma.query, dgamma.key, x, statistics, gamma.query, gamma.key]);
}

#[test]
fn wrong_views_of_a_chunks_keys_and_values_are_found() {
    let chunk = batch().chunk_of(SequenceChunk { sequence: 0, from: 2, to: 4 });
    let shape = AttentionShape { batch: chunk, ..shape() };
    let y = element(2, shape.width());
    let lse = float(2, shape.heads);
    let qkv = element(2, shape.qkv_width());
    let kv = element(4, shape.kv_width());
    found!(Attention { y, lse, qkv, kv: Some(kv), shape }, [y, lse, qkv, kv]);
    let right = ChunkKv { kv, dkv: float(4, shape.kv_width()), accumulate: false };
    let backward = |chunk_kv| {
        let dqkv = qkv;
        let dy = y;
        let chunk_kv = Some(chunk_kv);
        AttentionBackward { dqkv, chunk_kv, dy, y, lse, qkv, shape }
    };
    backward(right).check();
    for (name, wrong) in WRONGS {
        let [kv, dkv] = [right.kv, right.dkv].map(wrong);
        assert!(panics(|| backward(ChunkKv { kv, ..right }).check()), "kv: {name}");
        assert!(panics(|| backward(ChunkKv { dkv, ..right }).check()), "dkv: {name}");
    }
}

/// What lies behind a window may be missing, in whole tiles.
#[test]
fn keys_and_values_that_queries_see_are_not_missing() {
    let batch = BatchMetadata::plain(&[0, 400]).view();
    let chunk = batch.chunk_of(SequenceChunk { sequence: 0, from: 256, to: 400 });
    let check = |window, first: usize| {
        let shape = AttentionShape { window, ..AttentionShape::causal(chunk, [2, 1, 4]) };
        let y = element(144, shape.width());
        let lse = float(144, shape.heads);
        let qkv = element(144, shape.qkv_width());
        let kv = Some(element(400 - first, shape.kv_width()));
        Attention { y, lse, qkv, kv, shape }.check();
    };
    for (window, firsts) in [(129, &[0, 128][..]), (130, &[0]), (1, &[0, 128, 256])] {
        for first in [0, 64, 127, 128, 192, 256, 300] {
            let is_refused = panics(|| check(Some(window), first));
            assert_eq!(is_refused, !firsts.contains(&first), "{window}, {first}");
        }
    }
    check(None, 0);
    assert!(panics(|| check(None, 128)));
}

#[test]
fn wrong_views_of_sinks_are_found() {
    let shape = shape();
    let y = element(shape.rows(), shape.width());
    let lse = float(shape.rows(), shape.heads);
    let sinks = element(1, shape.heads);
    found!(Sink { y, lse, sinks, shape }, [y, lse, sinks]);
    let dsinks = float(1, shape.heads);
    let op = SinkBackward { dsinks, dy: y, y, lse, sinks, shape, accumulate: false };
    found!(op, [dsinks, dy, y, lse, sinks]);
}

#[test]
fn wrong_views_of_tables_are_found() {
    let batch = batch();
    let y = element(R, C);
    let table = element(5, C);
    found!(AddTokenTypes { y, table, batch }, [y, table], any_rows: ["table"]);
    found!(AddPositions { y, x: y, table, batch }, [y, x, table], any_rows: ["table"]);
    let dtable = float(5, C);
    let accumulate = false;
    let op = AddTokenTypesBackward { dtable, dy: y, batch, accumulate };
    found!(op, [dtable, dy], any_rows: ["dtable"], any_dtype: ["dy"]);
    let op = AddPositionsBackward { dtable, dy: y, batch, accumulate };
    found!(op, [dtable, dy], any_rows: ["dtable"], any_dtype: ["dy"]);
}

#[test]
fn wrong_views_of_experts_are_found() {
    /// E, k, and rows of an expert.
    const E: usize = 9;
    const K: usize = 2;
    const M: usize = 11;
    let h = element(R, C);
    let w = element(E, C);
    let logits = float(R, E);
    let chosen = float(R, 2 * K);
    let per_token = K;
    let normalised = true;
    let biases = element(1, E);
    let bias = Some(biases);
    found!(
        Route { chosen, logits, h, w, bias, per_token, normalised },
        [chosen, logits, h, w, bias]
    );
    let few = element(1, C);
    let logits_of_few = float(R, 1);
    let none =
        Route { w: few, logits: logits_of_few, chosen, h, bias: None, per_token, normalised };
    assert!(panics(|| none.check()), "more than all experts");
    let op = RouteBackward {
        dh: float(R, C),
        dw: Some(float(E, C)),
        dbias: Some(float(1, E)),
        logits,
        chosen,
        dchosen: float(R, K),
        h,
        w,
        normalised,
        slopes: None,
        accumulate: false,
    };
    found!(op, [dh, dw, dbias, logits, chosen, dchosen, h, w]);
    let of_all = float(1, R * K);
    let op = Dispatch { rows: of_all, places: of_all, chosen, experts: E };
    found!(op, [rows, places]);
    for chosen in [float(R, 2 * K + 1), float(R + 1, 2 * K), element(R, 2 * K)] {
        assert!(panics(|| Dispatch { chosen, ..op }.check()), "{chosen}");
    }
    let rows = float(1, M);
    let y = element(M, C);
    found!(GatherRows { y, x: h, rows }, [y, x, rows], any_rows: ["x"]);
    let weights = RowWeights { places: rows, chosen };
    let y = float(R, C);
    let x = element(M, C);
    let op = CombineRows { y, x, rows: Some(rows), weights: None };
    found!(op, [y, x, rows], any_rows: ["y"], any_dtype: ["x"]);
    let op = CombineRows { y, x, rows: Some(rows), weights: Some(weights) };
    found!(op, [y, x, rows], any_dtype: ["x"]);
    let op = CombineRows { y, x: h, rows: None, weights: None };
    found!(op, [y, x], any_dtype: ["x"]);
    let op = WeighRows { y: x, x, weights };
    found!(op, [y, x, weights.places]);
    let out = float(R, K);
    found!(RowDots { out, x, y: x, places: rows, bias: None }, [x, y, places]);
    let y = float(R, C);
    let gate = element(R, 1);
    found!(GateRows { y, x: h, gate }, [y, x, gate]);
    let op = GateRowsBackward { dx: h, dgate: gate, dy: h, x: h, gate };
    found!(op, [dx, dgate, dy, x, gate]);
}

#[test]
fn wrong_views_of_routers_are_found() {
    const E: usize = 9;
    const K: usize = 2;
    let h = element(R, C);
    let logits = float(R, E);
    let chosen = float(R, 2 * K);
    let op = RouteBackward {
        dh: float(R, C),
        dw: None,
        dbias: None,
        logits,
        chosen,
        dchosen: float(R, K),
        h,
        w: element(E, C),
        normalised: true,
        slopes: None,
        accumulate: false,
    };
    let batch = batch();
    for of_sequences in [float(3, E), float(4, E + 1), element(3, E + 1)] {
        let slopes = Some(RouteSlopes { of_sequences, batch });
        assert!(panics(|| RouteBackward { slopes, ..op }.check()), "{of_sequences}");
    }
    let slopes = Some(RouteSlopes { of_sequences: float(3, E + 1), batch });
    RouteBackward { slopes, ..op }.check();
    let first_choice = false;
    let statistics = float(3, 2 * E + OF_SEQUENCE);
    let accumulate = false;
    let op = MeasureRoutes { statistics, logits, chosen, first_choice, batch, accumulate };
    found!(op, [statistics, logits]);
    let factor_millionths = None;
    let second = None;
    let limited = chosen;
    let op = LimitExperts { limited, chosen, logits, factor_millionths, second, batch };
    found!(op, [limited, chosen]);
}

#[test]
fn wrong_views_of_biases_of_experts_are_found() {
    /// k, and rows of an expert.
    const K: usize = 2;
    const M: usize = 11;
    let x = element(M, C);
    let rows = float(1, M);
    let out = float(R, K);
    let weights = RowWeights { places: rows, chosen: float(R, 2 * K) };
    let dy = element(M, C + 1);
    let bias = element(1, C + 1);
    let with_bias = |dy, bias| Some(BiasRows { dy, bias });
    let dots = RowDots { out, x, y: x, places: rows, bias: with_bias(dy, bias) };
    found!(dots, [x, y, places]);
    for (name, wrong) in WRONGS {
        let dots = |bias| RowDots { bias, ..dots };
        assert!(panics(|| dots(with_bias(wrong(dy), bias)).check()), "dy: {name}");
        assert!(panics(|| dots(with_bias(dy, wrong(bias))).check()), "bias: {name}");
    }
    let op = SumRows { y: float(1, C), x, weights, accumulate: false };
    found!(op, [y, x, weights.places], any_dtype: ["x"]);
}

#[test]
fn wrong_views_of_heads_are_found() {
    let h = element(R, C);
    let w = element(N, C);
    let bias = Some(element(1, N));
    let statistics = float(R, STATISTICS);
    let smoothing = Smoothing::NONE;
    let form = LogitForm::PLAIN;
    let op =
        Score { out: statistics, statistics, h, w, bias, first: 0, labelled: R, smoothing, form };
    found!(op, [out, statistics, h, w, bias]);
    let capped = Score { form: LogitForm { cap: Some(3.0), ..form }, ..op };
    assert!(panics(|| capped.check()), "a bias");
    Score { bias: None, ..capped }.check();
    let op = Logits { y: float(8, N), statistics, h, w, bias, form };
    found!(op, [y, statistics, h, w, bias], any_rows: ["y"]);
    let op = ScoreBackward {
        dh: float(R, C),
        dw: Some(float(N, C)),
        dbias: Some(float(1, N)),
        dh_before: Some(float(R, C)),
        statistics,
        h,
        w,
        bias,
        loss: &CrossEntropy,
        weighed: false,
        smoothing: Smoothing::NONE,
        form,
        scale: 1.0,
        first: 0,
        labelled: R,
        accumulate: false,
    };
    found!(op, [dh, dw, dbias, dh_before, statistics, h, w, bias]);
}

#[test]
fn wrong_views_of_classes_are_found() {
    let statistics = float(R, STATISTICS);
    let smoothing = Smoothing::NONE;
    let scores = element(3, N);
    let problem = ProblemType::SingleLabelClassification;
    let first = element(3, C);
    let all = element(R, C);
    let batch = batch();
    found!(PooledRows { y: first, x: all, pool: Pooling::First, batch }, [y, x]);
    found!(PooledRowsBackward { dx: all, dy: first, pool: Pooling::Last, batch }, [dx, dy]);
    let op = ClassLoss {
        out: statistics,
        statistics,
        scores,
        samples: Samples::Sequences,
        problem,
        smoothing: Smoothing::NONE,
        weighed: false,
        batch,
    };
    found!(op, [out, statistics], any_rows: ["scores"]);
    assert!(panics(|| ClassLoss { scores: element(5, N), ..op }.check()), "sequences");
    let set = float(3, 1 + N);
    let several = ProblemType::MultiLabelClassification;
    let of_sets = ClassLoss { out: set, statistics: set, problem: several, ..op };
    found!(of_sets, [out, statistics], any_rows: ["scores"]);
    let of_tokens = ClassLoss { samples: Samples::Tokens, ..of_sets };
    assert!(panics(|| of_tokens.check()), "tokens have one label");
    let read = ClassLoss { weighed: true, ..op };
    assert!(panics(|| read.check()), "an objective reads one score");
    let dscores = scores;
    let scale = 1.0;
    let samples = Samples::Sequences;
    let op = ClassLossBackward {
        dscores,
        scores,
        statistics,
        scale,
        samples,
        problem,
        smoothing,
        weighed: false,
        batch,
    };
    found!(op, [dscores, scores, statistics]);
}
