//! Sums to columns of a tensor, and copies of columns.

use rayon::prelude::*;

use super::views::{Call, Compute};
use crate::kernels::{AddColumns, CopyColumns, RegroupColumns, TakeColumns};
use crate::simd::Level;

/// Rows of one parallel task.
const ROWS: usize = 16;

impl Compute for AddColumns {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let AddColumns { y, x, first, scale } = *self;
        let all = y.columns;
        let some = x.columns;
        let tasks = call.write(y).par_chunks_mut(ROWS * all);
        tasks.zip(call.read(x).par_chunks(ROWS * some)).for_each(|(to, from)| {
            for (to, from) in to.chunks_exact_mut(all).zip(from.chunks_exact(some)) {
                let to = &mut to[first..first + some];
                to.iter_mut().zip(from).for_each(|(to, from)| *to += scale * from);
            }
        });
    }
}

impl Compute for TakeColumns {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let TakeColumns { y, x, first, scale } = *self;
        let all = x.columns;
        let some = y.columns;
        let tasks = call.write(y).par_chunks_mut(ROWS * some);
        tasks.zip(call.read(x).par_chunks(ROWS * all)).for_each(|(to, from)| {
            for (to, from) in to.chunks_exact_mut(some).zip(from.chunks_exact(all)) {
                let from = &from[first..first + some];
                to.iter_mut().zip(from).for_each(|(to, from)| *to = scale * from);
            }
        });
    }
}

impl Compute for CopyColumns {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let CopyColumns { y, x, to, from, columns } = *self;
        let tasks = call.write(y).par_chunks_mut(ROWS * y.columns);
        tasks.zip(call.read(x).par_chunks(ROWS * x.columns)).for_each(|(y_rows, x_rows)| {
            let rows = y_rows.chunks_exact_mut(y.columns).zip(x_rows.chunks_exact(x.columns));
            rows.for_each(|(y, x)| y[to..][..columns].copy_from_slice(&x[from..][..columns]));
        });
    }
}

impl Compute for RegroupColumns {
    fn compute(&self, _: Level, call: &Call<'_>) {
        let RegroupColumns { y, x, ref groups, back } = *self;
        let width = y.columns;
        let rows = call.write(y).par_chunks_mut(width).zip(call.read(x).par_chunks(width));
        rows.for_each(|(y, x)| {
            for [in_group, by_kind, columns] in groups.places() {
                let [to, from] = if back { [in_group, by_kind] } else { [by_kind, in_group] };
                y[to..to + columns].copy_from_slice(&x[from..from + columns]);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::Bench;
    use super::*;
    use crate::kernels::{ColumnGroups, LinearHeads};

    /// The columns of a row that is 0, 1, 2, …, kind by kind.
    fn regrouped(groups: ColumnGroups, columns: usize) -> Vec<usize> {
        let x: Vec<f32> = (0..2 * columns).map(|at| at as f32).collect();
        let mut bench = Bench::new();
        let [y, again] = [(); 2].map(|()| bench.nan(2, columns));
        let input = bench.tensor(columns, &x);
        bench.run(Level::best(), |k, _| {
            k.regroup_columns(&RegroupColumns { y, x: input, groups, back: false });
            k.regroup_columns(&RegroupColumns { y: again, x: y, groups, back: true });
        });
        assert_eq!(bench.values(again), x);
        bench.values(y)[..columns].iter().map(|&at| at as usize).collect()
    }

    #[test]
    fn heads_are_put_kind_by_kind_and_back() {
        let of_heads = regrouped(ColumnGroups::of_heads(2, 2), 12);
        assert_eq!(of_heads, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
        let heads =
            LinearHeads { key_heads: 2, value_heads: 4, key_size: 1, value_size: 3, taps: 4 };
        let of_linear = regrouped(ColumnGroups::of_linear_attention(heads), heads.projected());
        // Of each head of keys: a query, a key, six values, six gates. Behind them, of each, two
        // factors and two steps.
        let [queries, keys] = [[0, 14], [1, 15]];
        let values = (2..8).chain(16..22);
        let gates = (8..14).chain(22..28);
        let narrow = [28, 29, 32, 33, 30, 31, 34, 35];
        let expected = queries.into_iter().chain(keys).chain(values).chain(narrow).chain(gates);
        assert_eq!(of_linear, expected.collect::<Vec<_>>());
    }
}
