//! Columns of a tensor that belong to one module, where one product computes several modules: an
//! adapter on the values reads and writes a part of queries, keys and values. And columns that a
//! product gives head by head.

use super::linear_attention::LinearHeads;
use super::operation::{KernelOperation, Views};
use crate::tensor::View;

/// The rule that was broken when the columns of the narrow tensor are not in the wide one.
const OUTSIDE: &str = "the columns lie outside";

/// y[:, first..first + N] += scale · x.
#[derive(Clone, Copy, Debug)]
pub struct AddColumns {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, N).
    pub x: View,
    /// The first column.
    pub first: usize,
    /// A factor.
    pub scale: f32,
}

/// y = scale · x[:, first..first + N].
#[derive(Clone, Copy, Debug)]
pub struct TakeColumns {
    /// Output. (R, N).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// The first column.
    pub first: usize,
    /// A factor.
    pub scale: f32,
}

/// y[:, to..to + N] = x[:, from..from + N]. The other columns of `y` stay as they were.
#[derive(Clone, Copy, Debug)]
pub struct CopyColumns {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, M).
    pub x: View,
    /// The first column of `y`.
    pub to: usize,
    /// The first column of `x`.
    pub from: usize,
    /// N.
    pub columns: usize,
}

/// Columns of one kind, in groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupedColumns {
    /// N: columns that a group has of this kind. 0: there is no such kind.
    pub columns: usize,
    /// The first of them in the first group.
    pub first: usize,
    /// How far those of the next group lie behind.
    pub stride: usize,
    /// The first of this kind where columns lie kind by kind, group behind group.
    pub by_kind: usize,
}

/// Columns that lie in groups, each with columns of all kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnGroups {
    /// G: the number of groups.
    pub count: usize,
    /// The kinds.
    pub kinds: [GroupedColumns; ColumnGroups::KINDS],
}

/// Columns that lie in groups are put kind by kind; or back.
#[derive(Clone, Copy, Debug)]
pub struct RegroupColumns {
    /// Output. (R, C).
    pub y: View,
    /// Input. (R, C).
    pub x: View,
    /// All columns.
    pub groups: ColumnGroups,
    /// True: the output is in groups.
    pub back: bool,
}

impl ColumnGroups {
    /// The most kinds.
    pub const KINDS: usize = 6;

    /// Queries, keys and values of each head side by side. Each head of queries has keys and values
    /// of its own.
    pub fn of_heads(heads: usize, head_size: usize) -> ColumnGroups {
        let mut kinds = [GroupedColumns::default(); ColumnGroups::KINDS];
        for (nth, kind) in kinds[..3].iter_mut().enumerate() {
            *kind = GroupedColumns {
                columns: head_size,
                first: nth * head_size,
                stride: 3 * head_size,
                by_kind: nth * heads * head_size,
            };
        }
        ColumnGroups { count: heads, kinds }
    }

    /// The projection of linear attention, by heads of keys: queries, keys, values and gates of
    /// each head side by side, and behind all heads the factors and the steps of each.
    pub fn of_linear_attention(heads: LinearHeads) -> ColumnGroups {
        let LinearHeads { key_heads: count, value_heads, key_size, .. } = heads;
        let served = value_heads / count;
        let values = heads.values() / count;
        let stride = 2 * (key_size + values);
        let behind = count * stride;
        let wide = |columns, first, by_kind| GroupedColumns { columns, first, stride, by_kind };
        let narrow = |nth: usize| GroupedColumns {
            columns: served,
            first: behind + nth * served,
            stride: 2 * served,
            by_kind: heads.mixed() + nth * value_heads,
        };
        let kinds = [
            wide(key_size, 0, 0),
            wide(key_size, key_size, heads.keys()),
            wide(values, 2 * key_size, 2 * heads.keys()),
            wide(values, 2 * key_size + values, heads.remembered()),
            narrow(0),
            narrow(1),
        ];
        ColumnGroups { count, kinds }
    }

    /// C.
    fn columns(&self) -> usize {
        self.count * self.kinds.iter().map(|kind| kind.columns).sum::<usize>()
    }

    /// The places of the columns: in groups, and kind by kind, with their number.
    pub(crate) fn places(&self) -> impl Iterator<Item = [usize; 3]> {
        self.kinds.iter().filter(|kind| kind.columns > 0).flat_map(|kind| {
            let GroupedColumns { columns, first, stride, by_kind } = *kind;
            let place = move |group| [first + group * stride, by_kind + group * columns, columns];
            (0..self.count).map(place)
        })
    }
}

impl KernelOperation for RegroupColumns {
    fn views(&self, views: &mut Views<'_>) {
        let RegroupColumns { y, x, ref groups, .. } = *self;
        let columns = groups.columns();
        views.writes("y", y, [x.rows, columns], x.dtype);
        views.reads("x", x, [x.rows, columns], x.dtype);
        let ends = groups.places().flat_map(|[from, to, some]| [from + some, to + some]);
        views.rule(ends.max().is_some_and(|end| end == columns), OUTSIDE);
    }
}

impl KernelOperation for AddColumns {
    fn views(&self, views: &mut Views<'_>) {
        let AddColumns { y, x, first, .. } = *self;
        views.writes("y", y, y.shape(), y.dtype);
        views.reads("x", x, [y.rows, x.columns], y.dtype);
        views.rule(first + x.columns <= y.columns, OUTSIDE);
    }
}

impl KernelOperation for CopyColumns {
    fn views(&self, views: &mut Views<'_>) {
        let CopyColumns { y, x, to, from, columns } = *self;
        views.writes_opaque("y", y, [x.rows, y.columns], x.dtype);
        views.reads("x", x, x.shape(), x.dtype);
        views.rule(to + columns <= y.columns && from + columns <= x.columns, OUTSIDE);
    }
}

impl KernelOperation for TakeColumns {
    fn views(&self, views: &mut Views<'_>) {
        let TakeColumns { y, x, first, .. } = *self;
        views.writes("y", y, [x.rows, y.columns], x.dtype);
        views.reads("x", x, x.shape(), x.dtype);
        views.rule(first + y.columns <= x.columns, OUTSIDE);
    }
}
