//! Operations of several experts at once have the bits of each by itself.

use super::tests::{bits, same};
use crate::devices::cpu::oracle::noise;
use crate::devices::cpu::views::CpuKernels;
use crate::kernels::{CombineRows, Kernels, Linear, LinearBackward, RowWeights};
use crate::simd::Level;
use crate::tensor::{Arena, Dtype, Scratch, View, narrow};

/// Products, their backwards and sums of experts' rows, at once or one by one. Returns the memory
/// behind them.
fn experts_of(dtype: Dtype, has_bias: bool, transposed: bool, at_once: bool) -> Vec<f32> {
    const MEMORY: usize = 1 << 16;
    let [inputs, outputs, k] = [40, 24, 2];
    let all = View::floats(0, MEMORY);
    let mut memory = Arena::new(2 * MEMORY).expect("little");
    match dtype {
        Dtype::F32 => memory.fill(all, &noise(MEMORY, 1).narrow),
        dtype => {
            let mut halves = vec![0.0; MEMORY];
            let x = noise(2 * MEMORY, 1).narrow;
            narrow(dtype, bytemuck::cast_slice_mut(&mut halves), &x);
            memory.fill(all, &halves);
        }
    }
    let scratch = Scratch::new(all, dtype);
    let sum = scratch.take_floats(90, inputs);
    let chosen = scratch.take_floats(90, 2 * k);
    // The rows of three experts, of which the last has most.
    let rows = [vec![2, 3, 89], vec![0], (0..75).collect::<Vec<usize>>()];
    let experts = rows.map(|rows| {
        let n = rows.len();
        let [w_rows, w_columns] = if transposed { [outputs, inputs] } else { [inputs, outputs] };
        let [x, dx] = [(); 2].map(|()| scratch.take(n, inputs));
        let [y, dy] = [(); 2].map(|()| scratch.take(n, outputs));
        let w = scratch.take(w_rows, w_columns);
        let dw = Some(scratch.take_floats(w_rows, w_columns));
        let bias = has_bias.then(|| scratch.take(1, outputs));
        let dbias = has_bias.then(|| scratch.take_floats(1, outputs));
        let [row_bits, places] = [(); 2].map(|()| scratch.take_floats(1, n));
        memory.fill(row_bits, &bits(rows.iter().copied()));
        memory.fill(places, &bits(rows.iter().map(|row| row * k + 1)));
        let weights = Some(RowWeights { places, chosen });
        let linear = Linear { y, x, w, bias, transposed };
        let backward =
            LinearBackward { dx, dw, dbias, dy, x, w, transposed, accumulate: n % 3 == 0 };
        let combine = CombineRows { y: sum, x: dx, rows: Some(row_bits), weights };
        (linear, backward, combine)
    });
    let linears = experts.map(|(linear, _, _)| linear);
    let backwards = experts.map(|(_, backward, _)| backward);
    let combines = experts.map(|(_, _, combine)| combine);
    // Room for the largest operation alone.
    let widened = View::floats(MEMORY, if dtype == Dtype::F32 { 0 } else { 12_000 });
    let kernels = CpuKernels::with_room(Some(&memory), Level::best(), widened);
    if at_once {
        kernels.linears(&linears);
        kernels.linears_backward(&backwards, &scratch);
        kernels.combine_experts(&combines);
    } else {
        linears.iter().for_each(|op| kernels.linear(op));
        backwards.iter().for_each(|op| kernels.linear_backward(op, &scratch));
        combines.iter().for_each(|op| kernels.combine_rows(op));
    }
    memory.values(all).to_vec()
}

#[test]
fn experts_that_run_at_once_have_the_bits_of_each() {
    for (dtype, has_bias) in [(Dtype::F32, false), (Dtype::F32, true), (Dtype::Bf16, false)] {
        for transposed in [false, true] {
            let of = |at_once| experts_of(dtype, has_bias, transposed, at_once);
            assert!(same(&of(true), &of(false)), "{dtype} {has_bias} {transposed}");
        }
    }
}
