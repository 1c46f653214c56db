//! Cases of mixtures of experts.

use super::{Cases, Layout};
use crate::kernels::{
    CombineRows, Dispatch, GateRows, GateRowsBackward, GatherRows, Kernels, LimitExperts,
    MeasureRoutes, OF_SEQUENCE, Route, RouteBackward, RouteSlopes, RowDots, RowWeights, WeighRows,
};
use crate::tensor::View;

/// Channels of the rows that experts read.
const CHANNELS: usize = 37;

/// A router, and the assignments that it makes.
#[derive(Clone, Copy)]
struct Routed {
    route: Route,
    rows: View,
    places: View,
}

/// The rows of one expert: all that a kernel on them takes.
#[derive(Clone, Copy)]
struct Mine {
    /// Their rows of a tensor of all assignments begin here.
    from: usize,
    rows: View,
    weights: RowWeights,
}

impl Mine {
    /// The part of a tensor of all assignments.
    fn of(&self, view: View) -> View {
        view.row_range(self.from..self.from + self.rows.columns)
    }
}

impl Routed {
    /// A router of one channel: no sum is rounded, so every device makes the same choice.
    fn new(p: &mut Layout, rows: usize, experts: usize, per_token: usize) -> Routed {
        let route = Route {
            chosen: p.floats_output([rows, 2 * per_token]),
            logits: p.floats_output([rows, experts]),
            h: p.input([rows, 1]),
            w: p.input([experts, 1]),
            per_token,
            normalised: true,
        };
        let [rows, places] = [(); 2].map(|()| p.floats_output([1, rows * per_token]));
        Routed { route, rows, places }
    }

    /// Calls `run` with the rows of each expert, some of which have none.
    fn each(&self, k: &dyn Kernels, run: impl Fn(Mine)) {
        let Routed { route: Route { chosen, logits, .. }, rows, places } = *self;
        k.route(&self.route);
        let mut from = 0;
        for count in k.dispatch(&Dispatch { rows, places, chosen, experts: logits.columns }) {
            let [rows, places] = [rows, places].map(|view| view.part(from..from + count));
            run(Mine { from, rows, weights: RowWeights { places, chosen } });
            from += count;
        }
    }
}

impl Cases<'_> {
    pub(super) fn of_experts(&mut self) {
        self.of_routers();
        self.of_limits();
        self.of_assignments();
        let r = self.batch.rows();
        case!(self.gate_rows, |p| GateRows {
            y: p.floats_output([r, CHANNELS]),
            x: p.input([r, CHANNELS]),
            gate: p.input([r, 1]),
        });
        case!(self.gate_rows_backward, |p| GateRowsBackward {
            dx: p.output([r, CHANNELS]),
            dgate: p.output([r, 1]),
            dy: p.input([r, CHANNELS]),
            x: p.input([r, CHANNELS]),
            gate: p.input([r, 1]),
        });
    }

    /// A router of one channel, as above, and routers of which rows choose every expert.
    fn of_routers(&mut self) {
        let batch = self.batch;
        let r = batch.rows();
        for (c, experts, per_token) in [(1, 40, 3), (CHANNELS, 5, 5), (1030, 6, 6)] {
            for normalised in [false, true] {
                let route = move |p: &mut Layout| Route {
                    chosen: p.floats_output([r, 2 * per_token]),
                    logits: p.floats_output([r, experts]),
                    h: p.input([r, c]),
                    w: p.input([experts, c]),
                    per_token,
                    normalised,
                };
                case!(self.route, |p| route(p));
                self.case("route_backward", |p| {
                    let forward = route(p);
                    let Route { chosen, logits, h, w, .. } = forward;
                    let of_sequences = p.floats([batch.sequences(), experts + 1], 0.0);
                    let slopes = RouteSlopes { of_sequences, batch };
                    let backward = RouteBackward {
                        dh: p.floats([r, c], 0.0),
                        dw: (c != CHANNELS).then_some(p.gradient([experts, c], normalised)),
                        logits,
                        chosen,
                        dchosen: p.floats([r, per_token], 0.0),
                        h,
                        w,
                        normalised,
                        slopes: (c != 1).then_some(slopes),
                        accumulate: normalised,
                    };
                    move |k, scratch| {
                        k.route(&forward);
                        k.route_backward(&backward, scratch);
                    }
                });
            }
        }
    }

    /// Sums of each sequence behind a router that drops assignments. Without a factor, the second
    /// choice is drawn.
    fn of_limits(&mut self) {
        let batch = self.batch;
        let limits = [(40, 3, Some(300_000), false), (5, 2, None, true), (3, 1, Some(1), false)];
        for (experts, per_token, factor_millionths, first_choice) in limits {
            if batch.chunk().is_some() {
                continue;
            }
            self.case("limit_experts", |p| {
                let routed = Routed::new(p, batch.rows(), experts, per_token);
                let Routed { route: Route { chosen, logits, .. }, rows, places } = routed;
                let limited = p.floats_output(chosen.shape());
                let shape = [batch.sequences(), 2 * experts + OF_SEQUENCE];
                let statistics = p.gradient(shape, first_choice);
                let second = batch.dropout(0.5, 3, 3).filter(|_| factor_millionths.is_none());
                let limit =
                    LimitExperts { limited, chosen, logits, factor_millionths, second, batch };
                let chosen = limited;
                let accumulate = first_choice;
                let measure =
                    MeasureRoutes { statistics, logits, chosen, first_choice, batch, accumulate };
                move |k, scratch| {
                    k.route(&routed.route);
                    k.limit_experts(&limit);
                    k.measure_routes(&measure, scratch);
                    // What stands behind the assignments that are left stays as it was.
                    k.dispatch(&Dispatch { rows, places, chosen, experts });
                }
            });
        }
    }

    /// Kernels on the rows of each expert.
    fn of_assignments(&mut self) {
        let r = self.batch.rows();
        let c = CHANNELS;
        for (experts, per_token) in [(7, 1), (40, 3)] {
            let all = r * per_token;
            self.case("gather_rows", |p| {
                let routed = Routed::new(p, r, experts, per_token);
                let y = p.output([all, c]);
                let x = p.input([r, c]);
                move |k, _| {
                    routed.each(k, |mine| {
                        k.gather_rows(&GatherRows { y: mine.of(y), x, rows: mine.rows });
                    });
                }
            });
            self.case("combine_rows", |p| {
                let routed = Routed::new(p, r, experts, per_token);
                let [y, sum] = [(); 2].map(|()| p.floats([r, c], 0.0));
                let x = p.input([all, c]);
                move |k, _| {
                    routed.each(k, |Mine { from, rows, weights }| {
                        let x = Mine { from, rows, weights }.of(x);
                        let weights = Some(weights);
                        k.combine_rows(&CombineRows { y, x, rows: Some(rows), weights });
                        k.combine_rows(&CombineRows { y: sum, x, rows: Some(rows), weights: None });
                    });
                    let x = x.row_range(0..r);
                    k.combine_rows(&CombineRows { y: sum, x, rows: None, weights: None });
                }
            });
            self.case("weigh_rows", |p| {
                let routed = Routed::new(p, r, experts, per_token);
                let y = p.output([all, c]);
                let x = p.input([all, c]);
                move |k, _| {
                    routed.each(k, |mine| {
                        let [y, x] = [y, x].map(|view| mine.of(view));
                        k.weigh_rows(&WeighRows { y, x, weights: mine.weights });
                    });
                }
            });
            self.case("row_dots", |p| {
                let routed = Routed::new(p, r, experts, per_token);
                let out = p.floats_output([r, per_token]);
                let [x, y] = [(); 2].map(|()| p.input([all, c]));
                move |k, _| {
                    routed.each(k, |mine| {
                        let [x, y] = [x, y].map(|view| mine.of(view));
                        k.row_dots(&RowDots { out, x, y, places: mine.weights.places });
                    });
                }
            });
        }
    }
}
