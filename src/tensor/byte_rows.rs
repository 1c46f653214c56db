//! Copies of a part of a matrix, as rows of bytes.

use std::ops::Range;

/// Rows of bytes that lie in two memories: in a part and in the whole that it is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ByteRows {
    /// The first byte of the first row, in the part and in the whole.
    pub(crate) at: [usize; 2],
    /// Bytes from a row to the next one, in each.
    pub(crate) pitch: [usize; 2],
    /// The number of rows, and the bytes of each.
    pub(crate) rows: usize,
    pub(crate) len: usize,
}

impl ByteRows {
    /// One row.
    pub(crate) fn one(at: [usize; 2], len: usize) -> ByteRows {
        ByteRows { at, pitch: [len; 2], rows: 1, len }
    }

    /// The same rows in memories that begin `before` bytes earlier.
    pub(crate) fn behind(self, before: [usize; 2]) -> ByteRows {
        let at = [0, 1].map(|side| self.at[side] + before[side]);
        ByteRows { at, ..self }
    }

    /// The same rows in a whole of which these bytes are left out.
    pub(crate) fn without_first(self, first: usize) -> ByteRows {
        ByteRows { at: [self.at[0], self.at[1] - first], ..self }
    }

    /// Some of the rows.
    pub(crate) fn some(self, rows: Range<usize>) -> ByteRows {
        let at = [0, 1].map(|side| self.at[side] + rows.start * self.pitch[side]);
        ByteRows { at, rows: rows.len(), ..self }
    }

    /// The bytes from the first to the last, in the part (0) or in the whole (1).
    pub(crate) fn span(self, side: usize) -> Range<usize> {
        let at = self.at[side];
        let before_last = self.rows.saturating_sub(1) * self.pitch[side];
        at..if self.rows == 0 { at } else { at + before_last + self.len }
    }

    /// Each row by itself: its place in the part, and in the whole.
    pub(crate) fn each(self) -> impl Iterator<Item = [Range<usize>; 2]> {
        (0..self.rows).map(move |row| [0, 1].map(|side| self.some(row..row + 1).span(side)))
    }

    /// What lies in a range of the part: whole rows, and before and behind them parts of rows.
    pub(crate) fn within(self, range: &Range<usize>) -> impl Iterator<Item = ByteRows> + use<> {
        let [first, pitch] = [self.at[0], self.pitch[0].max(1)];
        let behind = |byte: usize| byte.saturating_sub(first);
        let last = self.rows;
        let from = behind(range.start).div_ceil(pitch).min(last);
        // Row r ends at r * pitch + len.
        let ended = (behind(range.end) + pitch).saturating_sub(self.len) / pitch;
        let whole = from..ended.clamp(from, last);
        let cut = move |row: usize, range: &Range<usize>| {
            let one = self.some(row..row + 1);
            let own = one.span(0);
            let start = own.start.max(range.start);
            let len = own.end.min(range.end).saturating_sub(start);
            let at = [start, one.at[1] + start.saturating_sub(own.start)];
            ByteRows::one(at, len)
        };
        let before = whole.start.checked_sub(1).map(|row| cut(row, range));
        let rest = (whole.end < last).then(|| cut(whole.end, range));
        let all = [before, Some(self.some(whole)), rest];
        all.into_iter().flatten().filter(|rows| rows.rows > 0 && rows.len > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows within ranges that follow each other are all rows, each byte once.
    #[test]
    fn ranges_cut_rows() {
        for [len, pitch, rows] in [[3, 3, 5], [4, 4, 1], [2, 5, 4], [1, 1, 7]] {
            let all = ByteRows { at: [6, 2], pitch: [len, pitch], rows, len };
            let bytes = |rows: ByteRows| -> Vec<[usize; 2]> {
                rows.each().flat_map(|[to, from]| to.zip(from).map(|(a, b)| [a, b])).collect()
            };
            let end = all.span(0).end + 9;
            for first in 0..end {
                for second in first..end {
                    let ranges = [0..first, first..second, second..end];
                    let cut = ranges.iter().flat_map(|range| {
                        let cut: Vec<ByteRows> = all.within(range).collect();
                        assert!(cut.iter().all(|rows| {
                            let span = rows.span(0);
                            range.start <= span.start && span.end <= range.end
                        }));
                        cut
                    });
                    let found: Vec<_> = cut.flat_map(bytes).collect();
                    assert_eq!(found, bytes(all), "{all:?} at {first} and {second}");
                }
            }
        }
    }
}
