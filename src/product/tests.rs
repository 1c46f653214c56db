//! Products against sums in f64, at every level.

use super::*;
use crate::devices::cpu::oracle::noise;
use crate::tensor::narrow;

/// Rows, depth, columns: edges of every tile, cut, group and stripe.
const SIZES: [[usize; 3]; 10] = [
    [1, 1, 1],
    [3, 5, 7],
    [6, 384, 16],
    [14, 17, 32],
    [5, 385, 33],
    [75, 9, 257],
    [73, 769, 31],
    [130, 33, 300],
    [20, 1537, 40],
    [150, 40, 520],
];

/// Element (i, j) of a dense matrix, or of its transpose.
fn at(data: &[f64], [rows, columns]: [usize; 2], transposed: bool, i: usize, j: usize) -> f64 {
    if transposed { data[j * rows + i] } else { data[i * columns + j] }
}

fn matrix(data: &[f32], size: [usize; 2], transposed: bool) -> Matrix<'_> {
    turned(Elements::Floats(data), size, transposed)
}

fn turned(of: Elements<'_>, [rows, columns]: [usize; 2], transposed: bool) -> Matrix<'_> {
    if transposed { Matrix::rows_of(of, rows).transposed() } else { Matrix::rows_of(of, columns) }
}

#[test]
fn products_are_sums_of_products() {
    for [rows, depth, columns] in SIZES {
        let a = noise(rows * depth, 1);
        let b = noise(depth * columns, 2);
        let before = noise(rows * columns, 3);
        let bias = noise(columns, 4);
        for turns in [[false, false], [false, true], [true, false], [true, true]] {
            let left = matrix(&a.narrow, [rows, depth], turns[0]);
            let right = matrix(&b.narrow, [depth, columns], turns[1]);
            let sum = |i: usize, j: usize| {
                let a = |p| at(&a.wide, [rows, depth], turns[0], i, p);
                let b = |p| at(&b.wide, [depth, columns], turns[1], p, j);
                (0..depth).map(|p| a(p) * b(p)).sum::<f64>()
            };
            let starts = [Start::Zero, Start::C, Start::Bias(&bias.narrow)];
            for (level, start) in
                Level::all().into_iter().flat_map(|level| starts.map(|s| (level, s)))
            {
                let product = Product { a: left, b: right, rows, depth, columns, start };
                let mut c = before.narrow.clone();
                product.run(level, &mut c);
                for (index, c) in c.iter().enumerate() {
                    let i = index / columns;
                    let j = index % columns;
                    let from = match start {
                        Start::Zero => 0.0,
                        Start::C => before.wide[index],
                        Start::Bias(_) => bias.wide[j],
                    };
                    let error = (f64::from(*c) - from - sum(i, j)).abs();
                    let bound = 1e-6 * (depth as f64).sqrt() + 1e-6;
                    assert!(error < bound, "{rows} {depth} {columns} {turns:?}: {error}");
                }
                // A part of wider rows has the same bits.
                let width = columns + 3;
                let mut wider = vec![7.0; rows * width];
                for (wider, before) in wider.chunks_mut(width).zip(before.narrow.chunks(columns)) {
                    wider[..columns].copy_from_slice(before);
                }
                product.on_this_thread(level, &mut wider, width);
                for (wider, c) in wider.chunks(width).zip(c.chunks(columns)) {
                    assert!(wider[..columns] == *c && wider[columns..] == [7.0; 3]);
                }
            }
        }
    }
}

/// The packing and the edges for the tiles of AVX2 and AVX-512, on a processor that has neither.
#[test]
fn tiles_change_no_bits() {
    for [rows, depth, columns] in SIZES {
        let a = noise(rows * depth, 1).narrow;
        let b = noise(depth * columns, 2).narrow;
        for turns in [[false, false], [false, true], [true, false], [true, true]] {
            let a = matrix(&a, [rows, depth], turns[0]);
            let b = matrix(&b, [depth, columns], turns[1]);
            // The widest that one task takes.
            let columns = columns.min(WIDE);
            let product = Product { a, b, rows, depth, columns, start: Start::Zero };
            let mut plain = vec![f32::NAN; rows * columns];
            product.run(Level::Portable, &mut plain);
            let mut six = vec![f32::NAN; plain.len()];
            let mut fourteen = vec![f32::NAN; plain.len()];
            // SAFETY: the results are as large as the product.
            unsafe {
                task::run_in_tiles::<6, 16, 1>(product, six.as_mut_ptr(), columns);
                task::run_in_tiles::<14, 32, 1>(product, fourteen.as_mut_ptr(), columns);
            }
            assert!(plain == six && plain == fourteen, "{rows} {depth} {columns} {turns:?}");
        }
    }
}

/// A short tile computes its rows as a whole one does, wherever they lie.
#[test]
fn short_tiles_have_the_bits_of_whole_ones() {
    let [most, columns] = micro_kernel::LARGEST;
    let depth = 20;
    let a = noise(most * depth, 1).narrow;
    let b = noise(depth * columns, 2).narrow;
    let b = Matrix::rows(&b, columns);
    let start = Start::Zero;
    for a in [Matrix::rows(&a, depth), Matrix::rows(&a, most).transposed()] {
        for level in Level::all() {
            let of = |rows: usize| {
                let mut c = vec![f32::NAN; rows * columns];
                Product { a, b, rows, depth, columns, start }.run(level, &mut c);
                c
            };
            let whole = of(most);
            assert!((1..most).all(|rows| of(rows) == whole[..rows * columns]), "{level:?}");
        }
    }
}

/// Numbers of a dtype of 16 bits, and their floats.
fn halves(dtype: Dtype, len: usize, seed: u64) -> (Vec<u16>, Vec<f32>) {
    let mut halves = vec![0_u16; len];
    narrow(dtype, &mut halves, &noise(len, seed).narrow);
    let mut floats = vec![0.0; len];
    widen(dtype, &mut floats, &halves);
    (halves, floats)
}

/// Pairs of bf16, in the tile of AVX512-BF16, on a processor without it.
#[test]
fn pairs_change_no_bits() {
    for [rows, depth, columns] in SIZES {
        let columns = columns.min(WIDE);
        let a = halves(Dtype::Bf16, rows * depth, 1).0;
        let b = halves(Dtype::Bf16, depth * columns, 2).0;
        for turns in [[false, false], [false, true], [true, false], [true, true]] {
            let a = turned(Elements::Bf16(&a), [rows, depth], turns[0]);
            let b = turned(Elements::Bf16(&b), [depth, columns], turns[1]);
            let product = Product { a, b, rows, depth, columns, start: Start::Zero };
            let [mut plain, mut pairs] = [(); 2].map(|()| vec![f32::NAN; rows * columns]);
            product.run(Level::Portable, &mut plain);
            // SAFETY: the result is as large as the product.
            unsafe { task::run_in_tiles::<14, 32, 2>(product, pairs.as_mut_ptr(), columns) };
            assert!(plain == pairs, "{rows} {depth} {columns} {turns:?}");
        }
    }
}

/// Numbers of 16 bits are what they are as floats, on either side.
#[test]
fn numbers_of_16_bits_have_the_bits_of_their_floats() {
    for ([rows, depth, columns], dtype) in
        SIZES.iter().flat_map(|size| [Dtype::Bf16, Dtype::F16].map(|dtype| (*size, dtype)))
    {
        let a = halves(dtype, rows * depth, 1);
        let b = halves(dtype, depth * columns, 2);
        for turns in [[false, false], [false, true], [true, false], [true, true]] {
            let of = |left: Elements<'_>, right: Elements<'_>, level| {
                let a = turned(left, [rows, depth], turns[0]);
                let b = turned(right, [depth, columns], turns[1]);
                let mut c = vec![f32::NAN; rows * columns];
                Product { a, b, rows, depth, columns, start: Start::Zero }.run(level, &mut c);
                c
            };
            for level in Level::all() {
                let floats = of(Elements::Floats(&a.1), Elements::Floats(&b.1), level);
                assert!(
                    of(Elements::of(dtype, &a.0), Elements::of(dtype, &b.0), level) == floats,
                    "{dtype:?} {turns:?}"
                );
            }
        }
    }
}

#[test]
fn threads_and_other_rows_change_no_bits() {
    // With many threads, the last task has two rows.
    let rows = 71 * 72 + 2;
    let depth = 40;
    let columns = 33;
    let a = noise(rows * depth, 1).narrow;
    let b = noise(depth * columns, 2).narrow;
    let a = Matrix::rows(&a, depth);
    let b = Matrix::rows(&b, columns);
    let product = Product { a, b, rows, depth, columns, start: Start::Zero };
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut c = vec![0.0; rows * columns];
        pool.install(|| product.run(Level::best(), &mut c));
        c
    };
    let one = with(1);
    assert!([2, 3, 80].into_iter().all(|threads| with(threads) == one));
    let mut first = vec![0.0; columns];
    Product { rows: 1, ..product }.run(Level::best(), &mut first);
    assert!(first == one[..columns]);
}

/// Each product has its own depth and start, and a c with numbers.
#[test]
fn products_that_run_at_once_have_the_bits_of_each() {
    let numbers = SIZES.iter().map(|[rows, depth, columns]| {
        [rows * depth, depth * columns, rows * columns].map(|len| noise(len, len as u64).narrow)
    });
    let numbers = numbers.collect::<Vec<_>>();
    let products = SIZES.iter().zip(&numbers).enumerate().map(|(at, (size, [a, b, _]))| {
        let &[rows, depth, columns] = size;
        let turns = [at % 2 == 0, at % 3 == 0];
        let a = matrix(a, [rows, depth], turns[0]);
        let b = matrix(b, [depth, columns], turns[1]);
        Product { a, b, rows, depth, columns, start: Start::accumulate(at % 2 == 0) }
    });
    let products = products.collect::<Vec<_>>();
    let before: Vec<_> = numbers.iter().map(|[_, _, c]| c.clone()).collect();
    let mut alone = before.clone();
    products.iter().zip(&mut alone).for_each(|(product, c)| product.run(Level::best(), c));
    for threads in [1, 2, 5, 80] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut at_once = before.clone();
        let all = products.iter().copied().zip(at_once.iter_mut().map(|c| &mut c[..]));
        let all = all.collect();
        pool.install(|| Product::run_all(Level::best(), all));
        assert!(at_once == alone, "{threads} threads");
    }
}

/// The lower triangle is that of the plain product, to the bit, and the upper one is its mirror.
#[test]
fn symmetric_products_are_mirrored() {
    for size in [1, 5, 32, 67, 4 * EDGES[1] + 3] {
        let depth = 40;
        let x = noise(size * depth, 5).narrow;
        let a = Matrix::rows(&x, depth);
        let product =
            Product { a, b: a.transposed(), rows: size, depth, columns: size, start: Start::Zero };
        for level in Level::all() {
            let [mut all, mut mirrored] = [(); 2].map(|()| vec![f32::NAN; size * size]);
            product.run(level, &mut all);
            product.run_symmetric(level, &mut mirrored);
            for (at, value) in mirrored.iter().enumerate() {
                let row = at / size;
                let column = at % size;
                let expected = all[row.max(column) * size + row.min(column)];
                assert_eq!(value.to_bits(), expected.to_bits(), "{row}, {column} at {level:?}");
            }
        }
    }
}
