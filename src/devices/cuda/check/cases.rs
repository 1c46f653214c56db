//! The cases: every kernel, at sizes that are no round numbers.

use super::FLOATS;
use crate::kernels::{
    Activation, Apart, Attention, BatchView, ClassLoss, CrossEntropy, Kernels, Linear, Norm,
    Places, Rotary, RotaryScaling, STATISTICS, Scores,
};
use crate::tensor::{Dtype, Scratch, View};

/// Floats between places, which nobody writes.
const GUARD: usize = 16;

/// Hands out places of a memory.
struct Layout {
    /// What weights and activations are.
    dtype: Dtype,
    end: usize,
    /// Places and what they begin with, from −1 to 1 about a center.
    begins: Vec<(View, f32)>,
}

impl Layout {
    fn place(&mut self, len: usize, of: Dtype, center: f32) -> View {
        let floats = of.floats(len);
        let view = View::floats(self.end, floats).hold(len, of);
        self.end = (self.end + floats + GUARD).next_multiple_of(16);
        assert!(self.end <= FLOATS / 2, "a case is small");
        self.begins.push((view, center));
        view
    }

    fn about(&mut self, len: usize, center: f32) -> View {
        self.place(len, self.dtype, center)
    }

    /// To read.
    fn of(&mut self, len: usize) -> View {
        self.about(len, 0.0)
    }

    /// To write: what was there does not matter, and must be gone.
    fn out(&mut self, len: usize) -> View {
        self.about(len, f32::NAN)
    }

    fn of_all<const N: usize>(&mut self, len: usize) -> [View; N] {
        [(); N].map(|()| self.of(len))
    }

    /// Floats, whatever the others are: statistics, sums, gradients of weights.
    fn floats(&mut self, len: usize, center: f32) -> View {
        self.place(len, Dtype::F32, center)
    }

    fn floats_out(&mut self, len: usize) -> View {
        self.floats(len, f32::NAN)
    }
}

/// What a case runs, once its places are known.
type Call<'c> = Box<dyn Fn(&dyn Kernels, &Scratch<'_>) + Sync + 'c>;

/// A case's places in one memory, and what it runs there.
pub(super) struct Side<'c> {
    /// Behind the last place.
    pub(super) end: usize,
    pub(super) begins: Vec<(View, f32)>,
    pub(super) call: Call<'c>,
}

/// A case: a name, and what is in the memories of the device and of the CPU.
pub(super) struct Case<'c> {
    pub(super) name: &'static str,
    pub(super) sides: [Side<'c>; 2],
    /// Labels of statistics, where they are read, and in which place.
    pub(super) statistics: Option<(usize, Vec<i32>)>,
}

/// All cases of micro-batches of one kind.
pub(super) struct Cases<'c> {
    /// What the device's weights and activations are.
    pub(super) dtype: Dtype,
    pub(super) batch: BatchView<'c>,
    pub(super) all: Vec<Case<'c>>,
}

impl<'c> Cases<'c> {
    fn case<C>(&mut self, name: &'static str, make: impl Fn(&mut Layout) -> C)
    where
        C: Fn(&dyn Kernels, &Scratch<'_>) + Sync + 'c,
    {
        let sides = [self.dtype, Dtype::F32].map(|of| {
            let mut places = Layout { dtype: of, end: GUARD, begins: Vec::new() };
            let call = Box::new(make(&mut places));
            let Layout { end, begins, .. } = places;
            Side { end, begins, call: call as Call<'c> }
        });
        self.all.push(Case { name, sides, statistics: None });
    }

    /// The last case's statistics, the place of this number, with these labels.
    fn labelled(&mut self, index: usize, labels: Vec<i32>) {
        self.all.last_mut().expect("a case was made").statistics = Some((index, labels));
    }

    /// Sizes of attention, of heads like these.
    fn attention(&self, [heads, kv_heads, head_size]: [usize; 3]) -> Attention<'c> {
        let BatchView { rows, lengths, documents, past, .. } = self.batch;
        Attention {
            rows,
            heads,
            kv_heads,
            head_size,
            causal: true,
            window: None,
            lengths,
            documents,
            past,
            dropout: self.batch.dropout(0.2, 3, 0),
        }
    }

    pub(super) fn of_rows(&mut self) {
        let (batch, rows) = (self.batch, self.batch.rows);
        let r = rows.count();
        for (inputs, outputs, transposed) in [(7, 5, false), (36, 20, true)] {
            let size = Linear { rows: r, inputs, outputs, transposed };
            self.case("linear", |p| {
                let (y, x, w, b) =
                    (p.out(r * outputs), p.of(r * inputs), p.of(inputs * outputs), p.of(outputs));
                move |k, _| k.linear(y, x, w, Some(b), size)
            });
            for accumulate in [false, true] {
                self.case("linear_backward", |p| {
                    let dx = p.out(r * inputs);
                    let begin = if accumulate { 0.0 } else { f32::NAN };
                    let (dw, db) = (p.floats(inputs * outputs, begin), p.floats(outputs, begin));
                    let (dy, x, w) = (p.of(r * outputs), p.of(r * inputs), p.of(inputs * outputs));
                    move |k, s| {
                        k.linear_backward(dx, dw, Some(db), dy, x, w, size, accumulate, s);
                    }
                });
            }
        }
        for (c, rms, accumulate) in [(5, false, false), (1030, true, true), (132, false, true)] {
            let size = Norm { rows: r, channels: c, epsilon: 1e-5, rms };
            self.case("norm", |p| {
                let (y, s) = (p.out(r * c), p.floats_out(2 * r));
                let (x, g, b) = (p.of(r * c), p.about(c, 1.0), p.of(c));
                move |k, _| k.norm(y, s, x, g, (!rms).then_some(b), size)
            });
            self.case("norm_backward", |p| {
                let begin = if accumulate { 0.0 } else { f32::NAN };
                let (dx, dg, db) = (p.out(r * c), p.floats(c, begin), p.floats(c, begin));
                let [a, dy, x] = p.of_all(r * c);
                let (s, g) = (p.floats(2 * r, 1.5), p.about(c, 1.0));
                let (db, a) = ((!rms).then_some(db), accumulate.then_some(a));
                move |k, scratch| {
                    k.norm_backward(dx, dg, db, a, dy, x, s, g, size, accumulate, scratch);
                }
            });
        }
        let c = 13;
        for (_, form) in Activation::ALL {
            self.case("activate", |p| {
                let (y, x) = (p.out(r * c), p.of(r * c));
                move |k, _| k.activate(y, x, form)
            });
            self.case("activate_backward", |p| {
                let [dx, x] = p.of_all(r * c);
                move |k, _| k.activate_backward(dx, x, form)
            });
            self.case("gate", |p| {
                let (y, x) = (p.out(r * c), p.of(2 * r * c));
                move |k, _| k.gate(y, x, c, form)
            });
            self.case("gate_backward", |p| {
                let (dx, dy, x) = (p.out(2 * r * c), p.of(r * c), p.of(2 * r * c));
                move |k, _| k.gate_backward(dx, dy, x, c, form)
            });
        }
        for probability in [0.0, 0.3] {
            let dropout = batch.dropout(probability, 2, 1);
            self.case("residual", |p| {
                let (y, a, x) = (p.out(r * c), p.of(r * c), p.of(r * c));
                move |k, _| k.residual(y, a, x, rows, dropout)
            });
            self.case("dropped", |p| {
                let (y, x) = (p.out(r * c), p.of(r * c));
                move |k, _| k.dropped(y, x, rows, dropout)
            });
        }
        self.case("clear", |p| {
            let (y, z) = (p.out(131), p.floats_out(131));
            move |k, _| {
                k.clear(y);
                k.clear(z);
            }
        });
        if !batch.past.is_empty() {
            return;
        }
        self.case("cast", |p| {
            let (y, x) = (p.floats_out(133), p.of(133));
            let (z, w) = (p.out(133), p.floats(133, 0.0));
            move |k, _| {
                k.cast(y, x);
                k.cast(z, w);
            }
        });
        self.case("first_rows", |p| {
            let (y, x) = (p.out(rows.sequences * c), p.of(r * c));
            move |k, _| k.first_rows(y, x, rows)
        });
        self.case("first_rows_backward", |p| {
            let (dx, dy) = (p.out(r * c), p.of(rows.sequences * c));
            move |k, _| k.first_rows_backward(dx, dy, rows)
        });
        let kinds = batch.kinds;
        self.case("add_types", |p| {
            let (y, w) = (p.of(r * c), p.of(2 * c));
            move |k, _| k.add_types(y, w, kinds)
        });
        let places: Places<'c> = batch.places();
        let table = rows.positions + 3;
        self.case("add_positions", |p| {
            let (y, x, w) = (p.out(r * c), p.of(r * c), p.of(table * c));
            move |k, _| k.add_positions(y, x, w, places)
        });
        for accumulate in [false, true] {
            let begin = if accumulate { 0.0 } else { f32::NAN };
            self.case("add_types_backward", |p| {
                let (dw, dy) = (p.floats(2 * c, begin), p.of(r * c));
                move |k, s| k.add_types_backward(dw, dy, kinds, accumulate, s)
            });
            self.case("add_positions_backward", |p| {
                let (dw, dy) = (p.floats(table * c, begin), p.of(r * c));
                move |k, _| k.add_positions_backward(dw, dy, places, accumulate)
            });
        }
    }

    pub(super) fn of_heads(&mut self) {
        let r = self.batch.rows.count();
        for heads in [[1, 1, 8], [4, 2, 6], [2, 1, 66], [1, 1, 256]] {
            let size = self.attention(heads);
            let (packed, normed, d) = (size.packed(), size.heads + size.kv_heads, size.head_size);
            let mixed = size.heads * d;
            let rotary = Rotary { theta: 100.0, scaling: RotaryScaling::Linear(2.0) };
            for back in [false, true] {
                self.case("rotate", |p| {
                    let qkv = p.of(r * packed);
                    move |k, _| k.rotate(qkv, &rotary, size, back)
                });
            }
            self.case("head_norm", |p| {
                let (y, s, x) = (p.out(r * packed), p.floats_out(r * normed), p.of(r * packed));
                let gamma = [p.about(d, 1.0), p.about(d, 1.0)];
                move |k, _| k.head_norm(y, s, x, gamma, 1e-5, size)
            });
            self.case("head_norm_backward", |p| {
                let (dx, dgamma) = (p.of(r * packed), [p.floats_out(d), p.floats_out(d)]);
                let (x, s) = (p.of(r * packed), p.floats(r * normed, 1.5));
                let gamma = [p.about(d, 1.0), p.about(d, 1.0)];
                move |k, scratch| {
                    k.head_norm_backward(dx, dgamma, x, s, gamma, size, false, scratch);
                }
            });
            self.case("remember", |p| {
                let (y, qkv) = (p.out(r * size.kv_width()), p.of(r * packed));
                move |k, _| k.remember(y, qkv, size)
            });
            self.case("recall", |p| {
                let (qkv, kv) = (p.of(r * packed), p.floats(r * size.kv_width(), 0.0));
                move |k, _| k.recall(qkv, kv, size)
            });
            if !self.batch.past.is_empty() {
                let most = self.batch.past.iter().max().copied().unwrap_or(0) + 1;
                let past = self.batch.rows.sequences * most * size.kv_width();
                self.case("attention_to_past", |p| {
                    let (y, qkv, past) = (p.out(r * mixed), p.of(r * packed), p.of(past));
                    move |k, _| k.attention_to_past(y, qkv, past, size)
                });
                continue;
            }
            for (causal, window) in [(true, None), (false, None), (true, Some(3))] {
                let size = Attention { causal, window, ..size };
                self.case("attention", |p| {
                    let (y, lse) = (p.out(r * mixed), p.floats_out(r * size.heads));
                    let qkv = p.of(r * packed);
                    move |k, _| k.attention(y, lse, qkv, None, size)
                });
                self.case("attention_backward", |p| {
                    let (y, lse) = (p.out(r * mixed), p.floats_out(r * size.heads));
                    let (dqkv, dy, qkv) = (p.out(r * packed), p.of(r * mixed), p.of(r * packed));
                    move |k, s| {
                        k.attention(y, lse, qkv, None, size);
                        k.attention_backward(dqkv, dy, y, lse, qkv, None, size, s);
                    }
                });
            }
        }
    }

    /// A chunk behind 64 positions.
    pub(super) fn of_stretches(&mut self) {
        let r = self.batch.rows.count();
        let size = self.attention([4, 2, 6]);
        let (packed, width, mixed) = (size.packed(), size.kv_width(), size.heads * size.head_size);
        let all = (64 + r) * width;
        for accumulate in [false, true] {
            self.case("attention_backward, apart", |p| {
                let (y, lse) = (p.out(r * mixed), p.floats_out(r * size.heads));
                let (dqkv, dy, qkv) = (p.of(r * packed), p.of(r * mixed), p.of(r * packed));
                let kv = p.of(all);
                let dkv = p.floats(all, if accumulate { 0.0 } else { f32::NAN });
                let apart = Apart { kv, dkv, accumulate };
                move |k, s| {
                    k.attention(y, lse, qkv, Some(kv), size);
                    k.attention_backward(dqkv, dy, y, lse, qkv, Some(apart), size, s);
                }
            });
        }
    }

    /// Tiles of a vocabulary.
    pub(super) fn of_tiles(&mut self) {
        let r = self.batch.rows.count();
        let labels: Vec<i32> =
            (0..r as i32).map(|row| if row % 4 == 1 { -100 } else { row * 7 % 30 }).collect();
        let told = labels.iter().filter(|label| **label >= 0).count();
        for (channels, tile, first) in [(5, 21, 0), (12, 9, 21)] {
            let size = Scores { rows: r, labelled: told, channels, tile, first };
            self.case("score", |p| {
                let statistics = p.floats(r * STATISTICS, 1.5);
                let out = p.floats_out(r * STATISTICS);
                let (h, w, b) = (p.of(r * channels), p.of(tile * channels), p.of(tile));
                move |k, s| k.score(out, statistics, h, w, Some(b), size, s)
            });
            self.labelled(0, labels.clone());
            self.case("logits", |p| {
                let statistics = p.floats(r * STATISTICS, 1.5);
                let y = p.floats_out(told * tile);
                let (h, w, b) = (p.of(r * channels), p.of(tile * channels), p.of(tile));
                move |k, s| k.logits(y, statistics, h, w, Some(b), size, s)
            });
            self.labelled(0, labels.clone());
            for accumulate in [false, true] {
                self.case("score_backward", |p| {
                    let begin = if accumulate { 0.0 } else { f32::NAN };
                    let statistics = p.floats(r * STATISTICS, 3.5);
                    let dh = p.floats_out(r * channels);
                    let before = p.floats(r * channels, 0.0);
                    let (dw, db) = (p.floats(tile * channels, begin), p.floats(tile, begin));
                    let (h, w, b) = (p.of(r * channels), p.of(tile * channels), p.of(tile));
                    let before = accumulate.then_some(before);
                    move |k, s| {
                        k.score_backward(
                            dh,
                            dw,
                            Some(db),
                            before,
                            statistics,
                            h,
                            w,
                            Some(b),
                            &CrossEntropy,
                            0.1,
                            size,
                            accumulate,
                            s,
                        );
                    }
                });
                self.labelled(0, labels.clone());
            }
        }
    }

    /// Losses of whole sequences.
    pub(super) fn of_classes(&mut self) {
        let rows = self.batch.rows;
        let r = rows.count();
        for (labels, is_value) in [(4, false), (1, true)] {
            let size = ClassLoss { rows, labels, is_value };
            let of_rows = (0..r as i32).map(|row| row % 4).collect::<Vec<_>>();
            self.case("class_loss", |p| {
                let statistics = p.floats(r * STATISTICS, 1.5);
                let out = p.floats_out(r * STATISTICS);
                let scores = p.of(rows.sequences * labels);
                move |k, _| k.class_loss(out, statistics, scores, size)
            });
            self.labelled(0, of_rows.clone());
            self.case("class_loss_backward", |p| {
                let statistics = p.floats(r * STATISTICS, 1.5);
                let (d, scores) = (p.out(rows.sequences * labels), p.of(rows.sequences * labels));
                move |k, _| k.class_loss_backward(d, scores, statistics, 0.3, size)
            });
            self.labelled(0, of_rows);
        }
    }
}
