//! Parts of quantised matrices: rows, or columns. A part has the codes of its own elements, and all
//! the scales that these need. So each element keeps its value, wherever the matrix is cut.
//!
//! In NF4 a scale is that of 64 elements, row behind row, which a part may share with others. The
//! part then has the scales of all groups between its first element and its last, and knows where
//! it lies in the matrix.

use std::ops::Range;

use rayon::prelude::*;

use super::{BLOCK, GROUP, NF4_PAIRS, Nf4, PARTS, Quantisation, TASK, dynamic_map};
use crate::simd::Level;
use crate::tensor::ByteRows;

/// The place of a part of an NF4 matrix in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The first element, counted from the group of scales that it belongs to.
    pub first: usize,
    /// Elements from a row of the matrix to the next.
    pub pitch: usize,
}

/// A part of a quantised matrix, by its rows and columns.
#[derive(Clone, Debug)]
pub(crate) struct MatrixPart {
    /// The rows and columns of the matrix.
    pub(crate) of: [usize; 2],
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

impl MatrixPart {
    /// Its rows and columns.
    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.rows.len(), self.columns.len()]
    }

    /// The first element in the matrix.
    fn first(&self) -> usize {
        self.rows.start * self.of[1] + self.columns.start
    }

    /// True if its elements follow each other in the matrix.
    fn is_of_rows(&self) -> bool {
        self.columns.len() == self.of[1]
    }
}

impl Quantisation {
    /// The place of a part in its matrix, if it needs one to be dequantised.
    pub(crate) fn origin(self, part: &MatrixPart) -> Option<Origin> {
        let is_cut = self == Quantisation::Nf4 && part.shape() != part.of;
        is_cut.then(|| Origin { first: part.first() % TASK, pitch: part.of[1] })
    }

    /// Whether each row of a part, or all of it, begins and ends at a whole byte of the codes.
    /// Behind the last element of a part of whole rows there may be half a byte.
    pub(crate) fn is_of_bytes(self, part: &MatrixPart) -> bool {
        let is_even = |elements: usize| elements.is_multiple_of(2);
        let are_columns_even = is_even(part.columns.len()) && is_even(part.of[1]);
        self != Quantisation::Nf4
            || is_even(part.first()) && (part.is_of_rows() || are_columns_even)
    }

    /// The bytes of a part's storage that its matrix's storage has.
    pub(crate) fn rows_of(self, part: &MatrixPart) -> Vec<ByteRows> {
        let shape @ [rows, columns] = part.shape();
        let origin = self.origin(part);
        let bytes = |floats: usize| size_of::<f32>() * floats;
        let own = self.parts_of(shape, origin).map(bytes);
        let whole = self.parts_of(part.of, None).map(bytes);
        if shape == part.of {
            return vec![ByteRows::one([0; 2], own[PARTS])];
        }
        let codes = |elements: usize| match self {
            Quantisation::Nf4 => elements.div_ceil(2),
            Quantisation::Int8 => elements,
            Quantisation::Bf16 => 2 * elements,
        };
        let at = [0, codes(part.first())];
        let mut all = vec![match part.is_of_rows() {
            true => ByteRows::one(at, codes(rows * columns)),
            false => {
                let pitch = [columns, part.of[1]].map(codes);
                ByteRows { at, pitch, rows, len: pitch[0] }
            }
        }];
        let mut add = |number: usize, first: usize, len: usize| {
            all.push(ByteRows::one([own[number], whole[number] + first], len));
        };
        match origin {
            Some(origin) => {
                let [blocks, groups] = origin.scales(shape);
                let first = part.first() / TASK;
                add(1, first * GROUP, blocks);
                add(2, bytes(first), bytes(groups));
                add(3, 0, bytes(1));
            }
            None if self == Quantisation::Int8 => add(1, bytes(part.rows.start), bytes(rows)),
            None => {}
        }
        all
    }
}

impl Origin {
    /// The blocks and groups of scales of a part of this shape.
    pub(super) fn scales(self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        let before_last = rows.saturating_sub(1) * self.pitch;
        let span = if rows * columns == 0 { 0 } else { self.first + before_last + columns };
        [span.div_ceil(BLOCK), span.div_ceil(TASK)]
    }

    /// The elements of a run that follow each other in the matrix, and those from a run to the
    /// next: rows, or all of a part of whole rows.
    pub(crate) fn runs(self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        if columns == self.pitch { [rows * columns; 2] } else { [columns, self.pitch] }
    }
}

/// Dequantises the part of a matrix that begins at `origin`.
pub(super) fn decode(
    level: Level,
    from: &Nf4<'_>,
    shape: [usize; 2],
    origin: Origin,
    to: &mut [f32],
) {
    let [run, pitch] = origin.runs(shape);
    // A task has some runs, or a part of one.
    let [run, pitch] = if run == pitch { [TASK; 2] } else { [run, pitch] };
    let runs = TASK.div_ceil(run);
    let codes = from.codes.par_chunks(runs * run / 2);
    let tasks = to.par_chunks_mut(runs * run).zip(codes).enumerate();
    tasks.for_each(|(task, (to, codes))| {
        level.run(
            #[inline(always)]
            || {
                let all = to.chunks_mut(run).zip(codes.chunks(run / 2));
                for (number, (to, codes)) in all.enumerate() {
                    let first = origin.first + (task * runs + number) * pitch;
                    decode_run(from, first, codes, to);
                }
            },
        );
    });
}

/// Dequantises elements that follow each other, from this one of the groups on.
#[inline(always)]
fn decode_run(from: &Nf4<'_>, first: usize, codes: &[u8], to: &mut [f32]) {
    let mut done = 0;
    while done < to.len() {
        let block = (first + done) / BLOCK;
        let end = to.len().min((block + 1) * BLOCK - first);
        let scale = dynamic_map::VALUES[usize::from(from.scales[block])];
        let scale = scale * from.groups[block / GROUP] + from.offset;
        for (to, code) in to[done..end].chunks_mut(2).zip(&codes[done / 2..]) {
            let pair = NF4_PAIRS[usize::from(*code)];
            to.iter_mut().zip(pair).for_each(|(to, value)| *to = value * scale);
        }
        done = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements of a part have the values that they have in the matrix, to the bit.
    #[test]
    fn parts_have_the_values_of_their_matrix() {
        let long = if cfg!(miri) { [6, 24] } else { [300, 250] };
        for of @ [rows, columns] in [[7, 24], [40, 64], long] {
            let noise = |at: usize| (at as f32 * 0.37).sin() * (1 + at / 50) as f32;
            let matrix: Vec<f32> = (0..rows * columns).map(noise).collect();
            for kind in Quantisation::ALL {
                let mut storage = vec![0.0; kind.floats(rows, columns)];
                kind.encode(&matrix, rows, columns, &mut storage).expect("it is finite");
                let mut whole = vec![0.0; matrix.len()];
                kind.decode(&storage, rows, columns, &mut whole);
                for (own_rows, own_columns) in [
                    (0..rows, 0..columns),
                    (3..rows, 0..columns),
                    (1..4, 0..columns),
                    (0..rows, 0..6),
                    (0..rows, columns - 10..columns),
                    (2..rows - 1, 4..columns - 2),
                    (2..2, 0..columns),
                ] {
                    let part = MatrixPart { of, rows: own_rows, columns: own_columns };
                    assert!(kind.is_of_bytes(&part));
                    let found = taken(kind, &part, &storage);
                    let each = part.rows.clone();
                    let expected: Vec<f32> = each
                        .flat_map(|row| &whole[row * columns..][part.columns.clone()])
                        .copied()
                        .collect();
                    assert_eq!(found, expected, "{kind:?} {part:?}");
                }
            }
        }
    }

    /// A part of a storage, dequantised.
    fn taken(kind: Quantisation, part: &MatrixPart, whole: &[f32]) -> Vec<f32> {
        let shape @ [rows, columns] = part.shape();
        let origin = kind.origin(part);
        let mut storage = vec![f32::NAN; kind.floats_of(shape, origin)];
        let to: &mut [u8] = bytemuck::cast_slice_mut(&mut storage);
        let from: &[u8] = bytemuck::cast_slice(whole);
        for [own, of_whole] in kind.rows_of(part).into_iter().flat_map(ByteRows::each) {
            to[own].copy_from_slice(&from[of_whole]);
        }
        let mut found = vec![f32::NAN; rows * columns];
        kind.decode_at(Level::best(), &storage, shape, origin, &mut found);
        found
    }

    #[test]
    fn half_a_byte_is_not_cut() {
        let kind = Quantisation::Nf4;
        for (of, rows, columns, expected) in [
            ([4, 7], 2..4, 0..7, true),
            ([4, 7], 1..4, 0..7, false),
            ([4, 7], 0..4, 0..2, false),
            ([4, 8], 0..4, 1..3, false),
            ([4, 8], 0..4, 2..5, false),
            ([4, 8], 1..4, 2..4, true),
        ] {
            let part = MatrixPart { of, rows, columns };
            assert_eq!(kind.is_of_bytes(&part), expected, "{part:?}");
            assert!(Quantisation::Int8.is_of_bytes(&part));
        }
    }
}
