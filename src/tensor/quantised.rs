//! Frozen weights in fewer bits than 32: 4-bit `NormalFloat` with double quantisation (QLoRA,
//! Dettmers et al. 2023), integers with a scale a row (LLM.int8(), Dettmers et al. 2022), and brain
//! floats.
//!
//! A quantised matrix lies in whole floats, so that slots, copies and files treat it as any block.
//! Its parts begin at multiples of 16 bytes, one behind the other; the bytes between them are zero.
//!
//! | | part | bytes |
//! |---|---|---|
//! | NF4 | codes, two a byte: the first in the upper half | ⌈n ÷ 2⌉ |
//! | | code of each block's absmax | ⌈n ÷ 64⌉ |
//! | | largest magnitude of each group of them: floats | 4 · ⌈n ÷ 16,384⌉ |
//! | | mean of all absmax: a float | 4 |
//! | Int8 | codes | n |
//! | | scale of each row: floats | 4 · rows |
//! | Bf16 | elements | 2 n |
//!
//! Codes are those of bitsandbytes' kernels in PyTorch, but for three things. A short last block
//! is treated as whole ones are, as by its kernels for CUDA. The mean of the absmax is summed in
//! f64, so that it does not depend on the device. And int8 keeps the scale, absmax ÷ 127, where
//! bitsandbytes keeps the absmax.
//!
//! Zeros stay zeros: in NF4 their block has no other codes, and an int8 row's scale is 0.

mod dynamic_map;
mod part;
#[cfg(test)]
mod tests;

use half::bf16;
use rayon::prelude::*;

pub(crate) use self::part::MatrixPart;
pub use self::part::Origin;
use crate::simd::Level;

/// The storage format of a frozen weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantisation {
    /// 4-bit `NormalFloat` in blocks of 64, with double quantisation: 4.127 bits an element.
    Nf4,
    /// 8-bit integers, with a scale a row.
    Int8,
    /// Brain floats, each rounded to the nearest.
    Bf16,
}

/// An element that cannot be quantised.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("row {row}, column {column} (from 0) is {value}, which cannot be quantised")]
pub struct NotQuantisable {
    /// The row, from 0.
    pub row: usize,
    /// The column, from 0.
    pub column: usize,
    /// NaN or infinite.
    pub value: f32,
}

/// Elements of the matrix, row behind row, that share an absmax.
const BLOCK: usize = 64;

/// Blocks whose absmax are quantised together.
const GROUP: usize = 256;

/// Elements of a group, which one task computes.
const TASK: usize = BLOCK * GROUP;

/// The least absmax that is divided by, so that its reciprocal is finite.
const SMALLEST: f32 = 1e-38;

/// The quantiles of the normal distribution that the codes of NF4 stand for.
const NF4: [f32; 16] = [
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
];

/// Midpoints between neighbours. The code of a number is the count of midpoints below it.
const NF4_MIDPOINTS: [f32; 15] = {
    let mut midpoints = [0.0; 15];
    let mut index = 0;
    while index < midpoints.len() {
        midpoints[index] = (NF4[index] + NF4[index + 1]) / 2.0;
        index += 1;
    }
    midpoints
};

/// The values of both codes of a byte.
const NF4_PAIRS: [[f32; 2]; 256] = {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < pairs.len() {
        pairs[byte] = [NF4[byte >> 4], NF4[byte & 15]];
        byte += 1;
    }
    pairs
};

impl Quantisation {
    /// All formats.
    #[cfg(test)]
    pub(crate) const ALL: [Quantisation; 3] =
        [Quantisation::Nf4, Quantisation::Int8, Quantisation::Bf16];

    /// Floats of storage of a (`rows`, `columns`) matrix: a multiple of 16.
    pub fn floats(self, rows: usize, columns: usize) -> usize {
        self.floats_of([rows, columns], None)
    }

    /// Floats of storage of a matrix of this shape, which may be a part of another one.
    pub fn floats_of(self, shape: [usize; 2], origin: Option<Origin>) -> usize {
        self.parts_of(shape, origin)[PARTS]
    }

    /// The first float of each part of the storage, and the length of the storage in floats.
    pub(crate) fn parts_of(
        self,
        shape @ [rows, columns]: [usize; 2],
        origin: Option<Origin>,
    ) -> [usize; PARTS + 1] {
        let elements = rows * columns;
        let whole = Origin { first: 0, pitch: columns };
        let [blocks, groups] = origin.unwrap_or(whole).scales(shape);
        let bytes = match self {
            Quantisation::Nf4 => [elements.div_ceil(2), blocks, 4 * groups, 4],
            Quantisation::Int8 => [elements, 4 * rows, 0, 0],
            Quantisation::Bf16 => [2 * elements, 0, 0, 0],
        };
        let mut end = 0;
        let mut parts = [0; PARTS + 1];
        for (part, bytes) in parts.iter_mut().zip(bytes) {
            *part = end;
            end += bytes.next_multiple_of(16) / size_of::<f32>();
        }
        parts[PARTS] = end.next_multiple_of(16);
        parts
    }

    /// Quantises a matrix, with all threads of the pool. from: (`rows`, `columns`); to: storage,
    /// all of which is written. The bytes depend on the matrix alone.
    ///
    /// # Errors
    /// An element is NaN or infinite, which brain floats alone can be: the first one is named, and
    /// `to` is as before.
    ///
    /// # Panics
    /// The slices are not as long as the matrix and its storage are.
    pub fn encode(
        self,
        from: &[f32],
        rows: usize,
        columns: usize,
        to: &mut [f32],
    ) -> Result<(), NotQuantisable> {
        self.encode_at(Level::best(), from, [rows, columns], to)
    }

    /// [`encode`](Quantisation::encode) with these vector instructions.
    fn encode_at(
        self,
        level: Level,
        from: &[f32],
        [rows, columns]: [usize; 2],
        to: &mut [f32],
    ) -> Result<(), NotQuantisable> {
        assert_eq!(from.len(), rows * columns, "a matrix of {rows} by {columns}");
        let parts = self.parts_of([rows, columns], None);
        assert_eq!(to.len(), parts[PARTS], "storage of {rows} by {columns}");
        let not_finite = if self == Quantisation::Bf16 { None } else { first_not_finite(from) };
        if let Some(at) = not_finite {
            return Err(NotQuantisable {
                row: at / columns,
                column: at % columns,
                value: from[at],
            });
        }
        to.fill(0.0);
        let [_, second, third, fourth, _] = parts;
        let (to, last) = to.split_at_mut(fourth);
        let (to, groups) = to.split_at_mut(third);
        let (codes, scales) = to.split_at_mut(second);
        match self {
            Quantisation::Nf4 if !from.is_empty() => {
                let codes = bytemuck::cast_slice_mut(codes);
                let scales = bytemuck::cast_slice_mut(scales);
                let offset = &mut last[0];
                encode_nf4(level, from, Nf4Mut { codes, scales, groups, offset });
            }
            Quantisation::Int8 if !from.is_empty() => {
                encode_int8(level, from, columns, bytemuck::cast_slice_mut(codes), scales);
            }
            Quantisation::Nf4 | Quantisation::Int8 => {}
            Quantisation::Bf16 => encode_bf16(from, bytemuck::cast_slice_mut(codes)),
        }
        Ok(())
    }

    /// Dequantises a matrix, with all threads of the pool. from: storage; to: (`rows`, `columns`).
    /// Each element is one product of f32; an NF4 block's scale is a product and a sum.
    ///
    /// # Panics
    /// The slices are not as long as the matrix and its storage are.
    pub fn decode(self, from: &[f32], rows: usize, columns: usize, to: &mut [f32]) {
        self.decode_at(Level::best(), from, [rows, columns], None, to);
    }

    /// [`decode`](Quantisation::decode) with these vector instructions, of a matrix that may be a
    /// part of another one.
    pub(crate) fn decode_at(
        self,
        level: Level,
        from: &[f32],
        shape @ [rows, columns]: [usize; 2],
        origin: Option<Origin>,
        to: &mut [f32],
    ) {
        assert_eq!(to.len(), rows * columns, "a matrix of {rows} by {columns}");
        let parts = self.parts_of(shape, origin);
        assert_eq!(from.len(), parts[PARTS], "storage of {rows} by {columns}");
        if to.is_empty() {
            return;
        }
        let [codes, scales, groups, last] =
            std::array::from_fn(|part| &from[parts[part]..parts[part + 1]]);
        match self {
            Quantisation::Nf4 => {
                let codes = bytemuck::cast_slice(codes);
                let scales = bytemuck::cast_slice(scales);
                let from = Nf4 { codes, scales, groups, offset: last[0] };
                match origin {
                    Some(origin) => part::decode(level, &from, shape, origin, to),
                    None => decode_nf4(level, from, to),
                }
            }
            Quantisation::Int8 => {
                decode_int8(level, bytemuck::cast_slice(codes), scales, columns, to);
            }
            Quantisation::Bf16 => decode_bf16(level, bytemuck::cast_slice(codes), to),
        }
    }
}

/// The most parts of a storage.
const PARTS: usize = 4;

/// The index of the first NaN or infinite element.
fn first_not_finite(from: &[f32]) -> Option<usize> {
    let is_bad = |value: &f32| !value.is_finite();
    let task = from.par_chunks(TASK).position_first(|values| values.iter().any(is_bad))?;
    let at = from[task * TASK..].iter().position(is_bad)?;
    Some(task * TASK + at)
}

/// The largest magnitude.
#[inline(always)]
fn absmax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, value| value.abs().max(most))
}

/// The storage of an NF4 matrix; there may be unused places behind each part.
struct Nf4<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    groups: &'a [f32],
    offset: f32,
}

/// The storage of an NF4 matrix, to be written.
struct Nf4Mut<'a> {
    codes: &'a mut [u8],
    scales: &'a mut [u8],
    groups: &'a mut [f32],
    offset: &'a mut f32,
}

fn encode_nf4(level: Level, from: &[f32], to: Nf4Mut<'_>) {
    let Nf4Mut { codes, scales, groups, offset } = to;
    let mut all = vec![0.0; from.len().div_ceil(BLOCK)];
    all.par_chunks_mut(GROUP).zip(from.par_chunks(TASK)).for_each(|(all, from)| {
        level.run(
            #[inline(always)]
            || {
                all.iter_mut()
                    .zip(from.chunks(BLOCK))
                    .for_each(|(most, block)| *most = absmax(block))
            },
        );
    });
    let sum: f64 = all.iter().copied().map(f64::from).sum();
    let mean = (sum / all.len() as f64) as f32;
    *offset = mean;
    let tasks = from.par_chunks(TASK).zip(all.par_chunks_mut(GROUP)).zip(groups);
    let tasks = tasks.zip(codes.par_chunks_mut(TASK / 2)).zip(scales.par_chunks_mut(GROUP));
    tasks.for_each(|((((from, all), group), codes), scales)| {
        level.run(
            #[inline(always)]
            || {
                let blocks = from.chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2));
                for ((block, codes), most) in blocks.zip(all.iter_mut()) {
                    encode_block(block, codes, 1.0 / most.max(SMALLEST));
                    *most -= mean;
                }
            },
        );
        *group = absmax(all);
        let inverse = 1.0 / group.max(SMALLEST);
        for (scale, centred) in scales.iter_mut().zip(all) {
            *scale = dynamic_map::nearest(*centred * inverse);
        }
    });
}

/// Writes the codes of a block, two a byte. Behind an odd number of codes stands the code of 0.
#[inline(always)]
fn encode_block(block: &[f32], codes: &mut [u8], inverse: f32) {
    let mut scaled = [0.0; BLOCK];
    let mut each = [0; BLOCK];
    scaled[..block.len()].copy_from_slice(block);
    for (code, value) in each.iter_mut().zip(scaled) {
        let value = value * inverse;
        *code = NF4_MIDPOINTS.iter().map(|midpoint| u8::from(value > *midpoint)).sum();
    }
    for (code, pair) in codes[..block.len().div_ceil(2)].iter_mut().zip(each.chunks_exact(2)) {
        *code = pair[0] << 4 | pair[1];
    }
}

fn decode_nf4(level: Level, from: Nf4<'_>, to: &mut [f32]) {
    let Nf4 { codes, scales, groups, offset } = from;
    let tasks = to.par_chunks_mut(TASK).zip(codes.par_chunks(TASK / 2));
    let tasks = tasks.zip(scales.par_chunks(GROUP)).zip(groups);
    tasks.for_each(|(((to, codes), scales), group)| {
        level.run(
            #[inline(always)]
            || {
                let blocks = to.chunks_mut(BLOCK).zip(codes.chunks(BLOCK / 2));
                for ((to, codes), scale) in blocks.zip(scales) {
                    let scale = dynamic_map::VALUES[usize::from(*scale)] * group + offset;
                    for (to, code) in to.chunks_mut(2).zip(codes) {
                        let pair = NF4_PAIRS[usize::from(*code)];
                        to.iter_mut().zip(pair).for_each(|(to, value)| *to = value * scale);
                    }
                }
            },
        );
    });
}

/// Rows of one task.
fn rows_of_task(columns: usize) -> usize {
    TASK.div_ceil(columns)
}

/// Writes the codes and the scale of each row. If 127 ÷ absmax is infinite, the row becomes zeros.
fn encode_int8(level: Level, from: &[f32], columns: usize, codes: &mut [i8], scales: &mut [f32]) {
    let rows = rows_of_task(columns);
    let tasks = from.par_chunks(rows * columns).zip(codes.par_chunks_mut(rows * columns));
    tasks.zip(scales.par_chunks_mut(rows)).for_each(|((from, codes), scales)| {
        level.run(
            #[inline(always)]
            || {
                let rows = from.chunks_exact(columns).zip(codes.chunks_mut(columns));
                for ((from, codes), scale) in rows.zip(scales) {
                    let most = absmax(from);
                    let inverse = 127.0 / most;
                    if inverse.is_finite() {
                        *scale = most / 127.0;
                        for (code, value) in codes.iter_mut().zip(from) {
                            *code = (value * inverse).round_ties_even() as i8;
                        }
                    }
                }
            },
        );
    });
}

fn decode_int8(level: Level, codes: &[i8], scales: &[f32], columns: usize, to: &mut [f32]) {
    let rows = rows_of_task(columns);
    let tasks = to.par_chunks_mut(rows * columns).zip(codes.par_chunks(rows * columns));
    tasks.zip(scales.par_chunks(rows)).for_each(|((to, codes), scales)| {
        level.run(
            #[inline(always)]
            || {
                let rows = to.chunks_exact_mut(columns).zip(codes.chunks(columns));
                for ((to, codes), scale) in rows.zip(scales) {
                    to.iter_mut().zip(codes).for_each(|(to, code)| *to = f32::from(*code) * scale);
                }
            },
        );
    });
}

fn encode_bf16(from: &[f32], codes: &mut [bf16]) {
    let tasks = codes.par_chunks_mut(TASK).zip(from.par_chunks(TASK));
    tasks.for_each(|(codes, from)| {
        let each = codes.iter_mut().zip(from);
        each.for_each(|(code, value)| *code = bf16::from_f32(*value));
    });
}

fn decode_bf16(level: Level, codes: &[u16], to: &mut [f32]) {
    let tasks = to.par_chunks_mut(TASK).zip(codes.par_chunks(TASK));
    tasks.for_each(|(to, codes)| {
        level.run(
            #[inline(always)]
            || {
                let each = to.iter_mut().zip(codes);
                each.for_each(|(to, code)| *to = f32::from_bits(u32::from(*code) << 16));
            },
        );
    });
}
