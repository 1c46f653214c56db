//! The time of a layer's experts, forward and backward, beside their products alone.

use rayon::ThreadPool;

use super::{KernelRate, Layout, ROUNDS, Rate, seconds};
use crate::devices::cpu::views::CpuKernels;
use crate::kernels::{
    Activation, CombineRows, Gate, GateBackward, GateForm, GatherRows, Kernels, Linear,
    LinearBackward, RowDots, RowWeights, WeighRows,
};
use crate::simd::Level;
use crate::tensor::{Arena, Dtype, Scratch, View};

/// Sizes of a micro-batch's experts, each of which has as many rows.
#[derive(Clone, Copy)]
struct Sizes {
    experts: usize,
    /// Rows of an expert.
    rows: usize,
    /// Hidden channels.
    hidden: usize,
    /// Channels of an expert.
    channels: usize,
    /// Experts of a row.
    per_token: usize,
}

/// Few large experts, as Mixtral has, and many small ones, as Qwen3 has. Both have 1,024 rows, and
/// the sizes of the races G and H in `benches/races.py`.
const CASES: [(&str, Sizes); 2] = [
    ("large experts", Sizes { experts: 8, rows: 256, hidden: 512, channels: 1792, per_token: 2 }),
    ("small experts", Sizes { experts: 32, rows: 128, hidden: 512, channels: 256, per_token: 4 }),
];

/// The rates of experts beside those of their products, the faster of one by one and at once.
pub(super) fn expert_rates(pool: &ThreadPool) -> std::io::Result<Vec<KernelRate>> {
    let rates = CASES.map(|(kernel, sizes)| {
        let mut layout = Layout::default();
        let experts = ExpertRows::place(sizes, &mut layout);
        let workspace = layout.workspace();
        let mut arena = layout.arena()?;
        experts.fill(&mut arena);
        let k = &CpuKernels::new(Some(&arena), Level::best());
        let products = experts.products();
        let runs: [&(dyn Fn(&Scratch<'_>) + Sync); 3] = [
            &|scratch| products.at_once(k, scratch),
            &|scratch| products.one_by_one(k, scratch),
            &|scratch| experts.run(k, &products, scratch),
        ];
        // In turn, so that a busy machine delays all of them alike.
        let mut least = [f64::INFINITY; 3];
        for _ in 0..ROUNDS {
            for (least, run) in least.iter_mut().zip(runs) {
                let once = || run(&Scratch::new(workspace, Dtype::F32));
                *least = least.min(seconds(|| pool.install(once)));
            }
        }
        let [at_once, one_by_one, half] = least;
        let Sizes { experts, rows, hidden, channels, .. } = sizes;
        // Three products of 6 S C I FLOPs: forward, and for both gradients.
        let flops = (18 * experts * rows * hidden * channels) as f64;
        let products = flops / at_once.min(one_by_one);
        Ok(KernelRate { kernel, rate: Rate::OfProducts { flops: flops / half, products } })
    });
    rates.into_iter().collect()
}

/// The rows of all experts, sorted by expert.
///
/// Legend: R rows, C hidden channels, E experts, k experts of a row, S = R k, I channels of an
/// expert.
struct ExpertRows {
    sizes: Sizes,
    /// The experts' input, the gradient of their sum, the sum and the gradient of the input.
    /// (R, C).
    of_rows: [View; 4],
    /// The gathered input, the output, the gradient of the output and that of the input. (S, C).
    gathered: [View; 4],
    /// What stands before the activation function, and its gradient. (S, 2 I).
    up: [View; 2],
    /// What stands behind it, the same weighed, and its gradient. (S, I).
    activated: [View; 3],
    /// The first matrices and their gradients. (E · 2 I, C).
    w_up: [View; 2],
    /// The second matrices and their gradients. (E · C, I).
    w_down: [View; 2],
    /// (R, 2 k).
    chosen: View,
    /// (R, k).
    dchosen: View,
    /// The row and the place of each assignment. (1, S).
    rows: View,
    places: View,
}

/// The products of all experts: the first ones, then the second ones.
struct Products {
    forward: [Vec<Linear>; 2],
    backward: [Vec<LinearBackward>; 2],
}

impl Products {
    fn at_once(&self, k: &dyn Kernels, scratch: &Scratch<'_>) {
        self.forward.iter().for_each(|ops| k.linears(ops));
        self.backward.iter().rev().for_each(|ops| k.linears_backward(ops, scratch));
    }

    fn one_by_one(&self, k: &dyn Kernels, scratch: &Scratch<'_>) {
        self.forward.iter().flatten().for_each(|op| k.linear(op));
        self.backward.iter().rev().flatten().for_each(|op| k.linear_backward(op, scratch));
    }
}

impl ExpertRows {
    fn place(sizes: Sizes, layout: &mut Layout) -> ExpertRows {
        let Sizes { experts, rows, hidden, channels, per_token } = sizes;
        let all = experts * rows;
        let tokens = all / per_token;
        ExpertRows {
            sizes,
            of_rows: [(); 4].map(|()| layout.place(tokens, hidden)),
            gathered: [(); 4].map(|()| layout.place(all, hidden)),
            up: [(); 2].map(|()| layout.place(all, 2 * channels)),
            activated: [(); 3].map(|()| layout.place(all, channels)),
            w_up: [(); 2].map(|()| layout.place(experts * 2 * channels, hidden)),
            w_down: [(); 2].map(|()| layout.place(experts * hidden, channels)),
            chosen: layout.place(tokens, 2 * per_token),
            dchosen: layout.place(tokens, per_token),
            rows: layout.place(1, all),
            places: layout.place(1, all),
        }
    }

    /// Each group of `per_token` experts has all rows: one expert of it every `per_token`-th.
    fn fill(&self, arena: &mut Arena) {
        let Sizes { experts, rows, per_token, .. } = self.sizes;
        let groups = experts / per_token;
        let integers = |of: &dyn Fn(usize, usize) -> usize| -> Vec<f32> {
            let all = (0..experts).flat_map(|expert| (0..rows).map(move |at| (expert, at)));
            all.map(|(expert, at)| f32::from_bits(of(expert, at) as u32)).collect()
        };
        let row = |expert: usize, at: usize| at * groups + expert % groups;
        let place = |expert, at| row(expert, at) * per_token + expert / groups;
        arena.fill(self.rows, &integers(&row));
        arena.fill(self.places, &integers(&place));
    }

    fn products(&self) -> Products {
        let count = self.sizes.experts;
        let part = |view: View, expert: usize| {
            let rows = view.rows / count;
            view.row_range(expert * rows..(expert + 1) * rows)
        };
        let forward = |all: [View; 3]| -> Vec<Linear> {
            let of = |expert| {
                let [y, x, w] = all.map(|view| part(view, expert));
                Linear { y, x, w, bias: None, transposed: true }
            };
            (0..count).map(of).collect()
        };
        let backward = |all: [View; 5]| -> Vec<LinearBackward> {
            let of = |expert| {
                let [dx, dw, dy, x, w] = all.map(|view| part(view, expert));
                let dw = Some(dw);
                let transposed = true;
                let accumulate = true;
                LinearBackward { dx, dw, dbias: None, dy, x, w, transposed, accumulate }
            };
            (0..count).map(of).collect()
        };
        let [x, y, dy, dx] = self.gathered;
        let [up, dup] = self.up;
        let [activated, weighed, dactivated] = self.activated;
        let [w_up, d_up] = self.w_up;
        let [w_down, d_down] = self.w_down;
        Products {
            forward: [forward([up, x, w_up]), forward([y, activated, w_down])],
            backward: [
                backward([dx, d_up, dup, x, w_up]),
                backward([dactivated, d_down, dy, weighed, w_down]),
            ],
        }
    }

    /// The operations of `models/block/experts.rs`, in their order, where `up` is saved.
    fn run(&self, k: &dyn Kernels, products: &Products, scratch: &Scratch<'_>) {
        let form = GateForm::Plain(Activation::Silu);
        let [h, dsum, sum, dh] = self.of_rows;
        let [x, y, dy, dx] = self.gathered;
        let [up, dup] = self.up;
        let [activated, weighed, dactivated] = self.activated;
        let ExpertRows { chosen, rows, places, dchosen, .. } = *self;
        let weights = RowWeights { places, chosen };
        k.gather_rows(&GatherRows { y: x, x: h, rows });
        k.linears(&products.forward[0]);
        k.gate(&Gate { y: activated, x: up, form });
        k.linears(&products.forward[1]);
        self.combine(k, [sum, y], true);
        k.gather_rows(&GatherRows { y: x, x: h, rows });
        k.gather_rows(&GatherRows { y: dy, x: dsum, rows });
        k.gate(&Gate { y: activated, x: up, form });
        k.weigh_rows(&WeighRows { y: weighed, x: activated, weights });
        k.linears_backward(&products.backward[1], scratch);
        k.row_dots(&RowDots { out: dchosen, x: dactivated, y: activated, places, bias: None });
        k.weigh_rows(&WeighRows { y: weighed, x: dactivated, weights });
        k.gate_backward(&GateBackward { dx: dup, dy: weighed, x: up, form });
        k.linears_backward(&products.backward[0], scratch);
        self.combine(k, [dh, dx], false);
    }

    fn combine(&self, k: &dyn Kernels, [y, x]: [View; 2], is_forward: bool) {
        let ExpertRows { sizes, rows, places, chosen, .. } = *self;
        let of = |expert| {
            let range = expert * sizes.rows..(expert + 1) * sizes.rows;
            let weights = RowWeights { places: places.part(range.clone()), chosen };
            let weights = is_forward.then_some(weights);
            let x = x.row_range(range.clone());
            CombineRows { y, x, rows: Some(rows.part(range)), weights }
        };
        k.combine_experts(&(0..sizes.experts).map(of).collect::<Vec<_>>());
    }
}
