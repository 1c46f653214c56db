//! The cases: every kernel, at odd sizes.

/// A case of one kernel, on an operation whose views are placed in the order of its fields here.
macro_rules! case {
    ($cases:ident.$kernel:ident, |$places:ident| $op:expr) => {
        $cases.case(stringify!($kernel), |$places| {
            let op = $op;
            move |k, _| k.$kernel(&op)
        })
    };
    ($cases:ident.$kernel:ident, |$places:ident, $scratch:ident| $op:expr) => {
        $cases.case(stringify!($kernel), |$places| {
            let op = $op;
            move |k, $scratch| k.$kernel(&op, $scratch)
        })
    };
}

mod attention;
mod experts;
mod linear_attention;
mod products;
mod quantised;

use super::FLOATS;
use crate::kernels::{
    Activate, ActivateBackward, Activation, AddPositions, AddPositionsBackward, AddTokenTypes,
    AddTokenTypesBackward, ApplyDropout, AttentionShape, BatchView, Cast, ClampedGate, ClassLoss,
    ClassLossBackward, Clear, CrossEntropy, Gate, GateBackward, GateForm, Kernels, LogitForm,
    Logits, Norm, NormBackward, PooledRows, PooledRowsBackward, Pooling, ProblemType, Residual,
    STATISTICS, Samples, Scale, Score, ScoreBackward, Smoothing,
};
use crate::tensor::{Dtype, Scratch, View};

/// Floats between views. No kernel may write them.
const GUARD: usize = 16;

/// Places views in a memory, one behind the other.
struct Layout {
    /// The dtype of weights and activations.
    dtype: Dtype,
    end: usize,
    /// Views, and the center of the values they begin with: from −1 to 1 about it.
    begins: Vec<(View, f32)>,
}

impl Layout {
    fn place(&mut self, [rows, columns]: [usize; 2], dtype: Dtype, center: f32) -> View {
        let floats = dtype.floats(rows * columns);
        let view = View::floats(self.end, floats).hold(rows, columns, dtype);
        self.end = (self.end + floats + GUARD).next_multiple_of(16);
        assert!(self.end <= FLOATS / 2, "a case is small");
        self.begins.push((view, center));
        view
    }

    fn about(&mut self, shape: [usize; 2], center: f32) -> View {
        self.place(shape, self.dtype, center)
    }

    /// A view to read.
    fn input(&mut self, shape: [usize; 2]) -> View {
        self.about(shape, 0.0)
    }

    /// A view to write: its values before are NaN, and must be gone.
    fn output(&mut self, shape: [usize; 2]) -> View {
        self.about(shape, f32::NAN)
    }

    /// Floats, in every dtype: statistics, sums, gradients of weights.
    fn floats(&mut self, shape: [usize; 2], center: f32) -> View {
        self.place(shape, Dtype::F32, center)
    }

    fn floats_output(&mut self, shape: [usize; 2]) -> View {
        self.floats(shape, f32::NAN)
    }

    /// A gradient; if it is not added to, it is NaN before.
    fn gradient(&mut self, shape: [usize; 2], accumulate: bool) -> View {
        self.floats(shape, if accumulate { 0.0 } else { f32::NAN })
    }
}

/// Runs a case's kernels, on the places of its views.
type Call<'c> = Box<dyn Fn(&dyn Kernels, &Scratch<'_>) + Sync + 'c>;

/// A case's views in one memory, and the function that runs its kernels there.
pub(super) struct Side<'c> {
    /// The float behind the last view.
    pub(super) end: usize,
    pub(super) begins: Vec<(View, f32)>,
    pub(super) call: Call<'c>,
}

/// A case: a name, a micro-batch, and the contents of the device's and of the CPU's memory.
pub(super) struct Case<'c> {
    pub(super) name: &'static str,
    pub(super) batch: BatchView<'c>,
    pub(super) sides: [Side<'c>; 2],
    /// The index of the view that holds statistics, and their labels, if a case reads them.
    pub(super) statistics: Option<(usize, Vec<i32>)>,
}

/// Cases, and the micro-batch of the next case.
pub(super) struct Cases<'c> {
    /// The dtype of the device's weights and activations.
    pub(super) dtype: Dtype,
    pub(super) batch: BatchView<'c>,
    pub(super) all: Vec<Case<'c>>,
}

impl<'c> Cases<'c> {
    /// Sets the micro-batch of the next cases.
    pub(super) fn on(&mut self, batch: BatchView<'c>) -> &mut Cases<'c> {
        self.batch = batch;
        self
    }

    fn case<C>(&mut self, name: &'static str, make: impl Fn(&mut Layout) -> C)
    where
        C: Fn(&dyn Kernels, &Scratch<'_>) + Sync + 'c,
    {
        let sides = [self.dtype, Dtype::F32].map(|dtype| {
            let mut places = Layout { dtype, end: GUARD, begins: Vec::new() };
            let call = Box::new(make(&mut places));
            let Layout { end, begins, .. } = places;
            Side { end, begins, call: call as Call<'c> }
        });
        self.all.push(Case { name, batch: self.batch, sides, statistics: None });
    }

    /// Sets the labels of the last case's statistics, which are the view of this index.
    fn labelled(&mut self, index: usize, labels: Vec<i32>) {
        self.all.last_mut().expect("a case was made").statistics = Some((index, labels));
    }

    /// The shape of attention with `[H, K, D]`.
    fn attention(&self, heads: [usize; 3]) -> AttentionShape<'c> {
        let dropout = self.batch.dropout(0.2, 3, 0);
        AttentionShape { dropout, ..AttentionShape::causal(self.batch, heads) }
    }

    fn has_cached(&self) -> bool {
        !self.batch.metadata().cached.is_empty()
    }

    /// Cases of kernels that treat all rows alike.
    pub(super) fn of_rows(&mut self) {
        self.of_columns();
        self.of_norms();
        self.of_activations();
        self.of_dropouts();
        self.of_quantised();
        self.of_experts();
        self.case("clear", |p| {
            let y = p.output([1, 131]);
            let z = p.floats_output([1, 131]);
            move |k, _| {
                k.clear(&Clear { y });
                k.clear(&Clear { y: z });
            }
        });
        if !self.has_cached() {
            self.of_copies();
            self.of_tables();
        }
    }

    fn of_norms(&mut self) {
        let r = self.batch.rows();
        for (c, rms, accumulate) in [(5, false, false), (1030, true, true), (132, false, true)] {
            let dropout = accumulate.then(|| self.batch.dropout(0.3, 2, 1)).flatten();
            let gamma_offset = if rms { 1.0 } else { 0.0 };
            let epsilon = 1e-5;
            case!(self.norm, |p| Norm {
                y: p.output([r, c]),
                statistics: p.floats_output([r, 2]),
                x: p.input([r, c]),
                gamma: p.about([1, c], 1.0),
                gamma_offset,
                beta: (!rms).then_some(p.input([1, c])),
                epsilon,
                rms,
            });
            self.case("residual_norm", |p| {
                // The sum is rounded before its norm: few channels that are nearly equal are steep.
                let c = c.max(37);
                let [y, sum] = [(); 2].map(|()| p.output([r, c]));
                let [a, x, beta] = [[r, c], [r, c], [1, c]].map(|shape| p.input(shape));
                let statistics = p.floats_output([r, 2]);
                let gamma = p.about([1, c], 1.0);
                let beta = (!rms).then_some(beta);
                let norm = Norm { y, statistics, x: sum, gamma, gamma_offset, beta, epsilon, rms };
                let sum = Residual { y: sum, a, x, dropout };
                move |k, _| k.residual_norm(&sum, &norm)
            });
            case!(self.norm_backward, |p, scratch| NormBackward {
                dx: p.output([r, c]),
                dgamma: p.gradient([1, c], accumulate),
                dbeta: (!rms).then_some(p.gradient([1, c], accumulate)),
                residual: accumulate.then_some(p.input([r, c])),
                dy: p.input([r, c]),
                x: p.input([r, c]),
                statistics: p.floats([r, 2], 1.5),
                gamma: p.about([1, c], 1.0),
                gamma_offset,
                rms,
                accumulate,
            });
        }
    }

    fn of_activations(&mut self) {
        let r = self.batch.rows();
        let c = 13;
        for (_, activation) in Activation::ALL {
            case!(self.activate, |p| Activate {
                y: p.output([r, c]),
                x: p.input([r, c]),
                activation,
            });
            case!(self.activate_backward, |p| ActivateBackward {
                dx: p.input([r, c]),
                x: p.input([r, c]),
                activation,
            });
            self.of_gates(GateForm::Plain(activation));
        }
        self.of_gates(GateForm::Clamped(ClampedGate { alpha: 1.702, limit: 0.7 }));
    }

    fn of_gates(&mut self, form: GateForm) {
        let r = self.batch.rows();
        let c = 13;
        case!(self.gate, |p| Gate { y: p.output([r, c]), x: p.input([r, 2 * c]), form });
        case!(self.gate_backward, |p| GateBackward {
            dx: p.output([r, 2 * c]),
            dy: p.input([r, c]),
            x: p.input([r, 2 * c]),
            form,
        });
    }

    fn of_dropouts(&mut self) {
        let r = self.batch.rows();
        let c = 13;
        for probability in [0.0, 0.3] {
            let dropout = self.batch.dropout(probability, 2, 1);
            case!(self.residual, |p| Residual {
                y: p.output([r, c]),
                a: p.input([r, c]),
                x: p.input([r, c]),
                dropout,
            });
            case!(self.dropout, |p| ApplyDropout {
                y: p.output([r, c]),
                x: p.input([r, c]),
                dropout,
            });
        }
        for has_other in [false, true] {
            case!(self.scale, |p| Scale {
                y: p.output([r, c]),
                x: p.input([r, c]),
                factor: 0.7,
                by: has_other.then(|| p.about([1, 1], 1.0)),
            });
        }
    }

    fn of_copies(&mut self) {
        let batch = self.batch;
        let c = 13;
        let b = batch.sequences();
        let r = batch.rows();
        self.case("cast", |p| {
            let y = p.floats_output([1, 133]);
            let x = p.input([1, 133]);
            let z = p.output([1, 133]);
            let w = p.floats([1, 133], 0.0);
            move |k, _| {
                k.cast(&Cast { y, x });
                k.cast(&Cast { y: z, x: w });
            }
        });
        self.case("pooled_rows", |p| {
            let y = p.output([b, c]);
            let x = p.input([r, c]);
            let z = p.output([b, c]);
            let mean = p.output([b, c]);
            move |k, _| {
                k.pooled_rows(&PooledRows { y, x, pool: Pooling::First, batch });
                k.pooled_rows(&PooledRows { y: z, x, pool: Pooling::Last, batch });
                k.pooled_rows(&PooledRows { y: mean, x, pool: Pooling::Mean, batch });
            }
        });
        for pool in [Pooling::Last, Pooling::Mean] {
            case!(self.pooled_rows_backward, |p| PooledRowsBackward {
                dx: p.output([r, c]),
                dy: p.input([b, c]),
                pool,
                batch,
            });
        }
    }

    fn of_tables(&mut self) {
        let batch = self.batch;
        let c = 13;
        let r = batch.rows();
        let positions = batch.longest() + 3;
        case!(self.add_token_types, |p| AddTokenTypes {
            y: p.input([r, c]),
            table: p.input([2, c]),
            batch,
        });
        case!(self.add_positions, |p| AddPositions {
            y: p.output([r, c]),
            x: p.input([r, c]),
            table: p.input([positions, c]),
            batch,
        });
        for accumulate in [false, true] {
            case!(self.add_token_types_backward, |p, scratch| AddTokenTypesBackward {
                dtable: p.gradient([2, c], accumulate),
                dy: p.input([r, c]),
                batch,
                accumulate,
            });
            case!(self.add_positions_backward, |p| AddPositionsBackward {
                dtable: p.gradient([positions, c], accumulate),
                dy: p.input([r, c]),
                batch,
                accumulate,
            });
        }
    }

    pub(super) fn of_losses(&mut self) {
        self.of_tiles();
        self.of_classes();
    }

    /// Cases of tiles of a vocabulary.
    pub(super) fn of_tiles(&mut self) {
        let r = self.batch.rows();
        let labels: Vec<i32> =
            (0..r as i32).map(|row| if row % 4 == 1 { -100 } else { row * 7 % 30 }).collect();
        let labelled = labels.iter().filter(|label| **label >= 0).count();
        let capped = LogitForm { scale: 0.5, cap: Some(2.0) };
        let ways = [
            (5, 21, 0, Smoothing::NONE, LogitForm::PLAIN),
            (12, 9, 21, Smoothing::of(0.1, 30), LogitForm::PLAIN),
            (7, 21, 0, Smoothing::NONE, LogitForm { scale: 0.5, cap: None }),
            (8, 9, 21, Smoothing::of(0.1, 30), capped),
        ];
        for (c, tile, first, smoothing, form) in ways {
            let has_bias = form == LogitForm::PLAIN;
            case!(self.score, |p, scratch| Score {
                statistics: p.floats([r, STATISTICS], 1.5),
                out: p.floats_output([r, STATISTICS]),
                h: p.input([r, c]),
                w: p.input([tile, c]),
                bias: has_bias.then(|| p.input([1, tile])),
                first,
                labelled,
                smoothing,
                form,
            });
            self.labelled(0, labels.clone());
            case!(self.logits, |p, scratch| Logits {
                statistics: p.floats([r, STATISTICS], 1.5),
                y: p.floats_output([labelled, tile]),
                h: p.input([r, c]),
                w: p.input([tile, c]),
                bias: has_bias.then(|| p.input([1, tile])),
                form,
            });
            self.labelled(0, labels.clone());
            for (accumulate, weighed) in [(false, false), (true, false), (true, true)] {
                let smoothing = if weighed { Smoothing::NONE } else { smoothing };
                case!(self.score_backward, |p, scratch| ScoreBackward {
                    statistics: p.floats([r, STATISTICS], 3.5),
                    dh: p.floats_output([r, c]),
                    dh_before: accumulate.then_some(p.floats([r, c], 0.0)),
                    dw: Some(p.gradient([tile, c], accumulate)),
                    dbias: has_bias.then(|| p.gradient([1, tile], accumulate)),
                    h: p.input([r, c]),
                    w: p.input([tile, c]),
                    bias: has_bias.then(|| p.input([1, tile])),
                    loss: &CrossEntropy,
                    weighed,
                    smoothing,
                    form,
                    scale: 0.1,
                    first,
                    labelled,
                    accumulate,
                });
                self.labelled(0, labels.clone());
            }
        }
    }

    /// Cases of losses of whole sequences and of tokens.
    fn of_classes(&mut self) {
        let batch = self.batch;
        let r = self.batch.rows();
        let none = Smoothing::NONE;
        let some = Smoothing::of(0.1, 4);
        let single = ProblemType::SingleLabelClassification;
        let several = ProblemType::MultiLabelClassification;
        let ways = [
            (Samples::Sequences, 4, single, some, false),
            (Samples::Sequences, 3, single, none, false),
            (Samples::Sequences, 1, ProblemType::Regression, none, false),
            (Samples::Sequences, 1, ProblemType::Regression, none, true),
            (Samples::Tokens, 5, single, none, false),
            (Samples::Sequences, 37, several, none, false),
        ];
        for (samples, labels, problem, smoothing, weighed) in ways {
            let n = samples.of(&batch);
            let shape = if problem == several { [n, 1 + labels] } else { [r, STATISTICS] };
            let of_rows = (0..r as i32).map(|row| row % labels.max(3) as i32).collect::<Vec<_>>();
            case!(self.class_loss, |p| ClassLoss {
                statistics: p.floats(shape, 1.5),
                out: p.floats_output(shape),
                scores: p.input([n, labels]),
                samples,
                problem,
                smoothing,
                weighed,
                batch,
            });
            if problem != several {
                self.labelled(0, of_rows.clone());
            }
            case!(self.class_loss_backward, |p| ClassLossBackward {
                statistics: p.floats(shape, 1.5),
                dscores: p.output([n, labels]),
                scores: p.input([n, labels]),
                scale: 0.3,
                samples,
                problem,
                smoothing,
                weighed,
                batch,
            });
            if problem != several {
                self.labelled(0, of_rows);
            }
        }
    }
}
