//! MXFP4 (OCP Microscaling Formats 2023), as gpt-oss is released: the matrices of experts in blocks
//! of 32 numbers of 4 bits, with one scale of 8 bits a block. They are dequantised when they are
//! read. Every number is exact in bf16.
//!
//! The tensor of a name is stored as two of bytes: `NAME_blocks` (E, N, C ÷ 32, 16) and
//! `NAME_scales` (E, N, C ÷ 32). The model has it as (E, C, N): its inputs, then its outputs.

use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView};

use super::names::find;
use crate::models::Shape;

/// Numbers of a block.
const BLOCK: usize = 32;

/// Outputs that are decoded at a time: their blocks stay in the first cache.
const TILE: usize = 64;

/// The ends of the names of its two tensors.
const ENDS: [&str; 2] = ["_blocks", "_scales"];

/// The numbers of 4 bits (e2m1). The last bit is the sign.
const NUMBERS: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A tensor of all experts of a block, in MXFP4.
#[derive(Clone, Debug)]
pub(super) struct Mxfp4<'t> {
    blocks: &'t [u8],
    scales: &'t [u8],
    /// Experts, inputs, outputs.
    shape: [usize; 3],
}

/// 2 to the power of a scale less 127. The last scale is NaN.
fn scale(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        u8::MAX => f32::NAN,
        byte => f32::from_bits(u32::from(byte) << 23),
    }
}

impl<'t> Mxfp4<'t> {
    /// The tensor of two others.
    ///
    /// # Errors
    /// They do not belong together, or are not of bytes.
    fn new(blocks: &TensorView<'t>, scales: &TensorView<'t>) -> Result<Mxfp4<'t>, String> {
        let shape = match (blocks.shape(), scales.shape()) {
            (&[experts, outputs, count, 16], scales) if scales == [experts, outputs, count] => {
                Some([experts, BLOCK * count, outputs])
            }
            _ => None,
        };
        let are_bytes = [blocks, scales].iter().all(|view| view.dtype() == Dtype::U8);
        let Some(shape) = shape.filter(|_| are_bytes) else {
            return Err(format!(
                "bytes of (experts, outputs, inputs / 32, 16) and their scales of (experts, \
                 outputs, inputs / 32) expected, {:?} {:?} and {:?} {:?} found",
                blocks.dtype(),
                blocks.shape(),
                scales.dtype(),
                scales.shape()
            ));
        };
        Ok(Mxfp4 { blocks: blocks.data(), scales: scales.data(), shape })
    }

    /// Its sizes: experts, inputs, outputs.
    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The bytes of its blocks.
    pub(super) fn data(&self) -> &'t [u8] {
        self.blocks
    }

    /// Fills `to` with its elements from `from` on.
    pub(super) fn decode(&self, to: &mut [f32], from: usize) {
        // A group is the elements of 32 inputs, which share blocks, and of all outputs.
        let len = BLOCK * self.shape[2];
        let mut rest = to;
        let mut from = from;
        while !rest.is_empty() {
            let (now, later) = rest.split_at_mut(rest.len().min(len - from % len));
            self.decode_group(now, from / len, from % len);
            from += now.len();
            rest = later;
        }
    }

    /// Fills `to` with elements of a group from `from` on. Of a few outputs, all inputs are read in
    /// turn, so that their blocks are read from memory once.
    fn decode_group(&self, to: &mut [f32], group: usize, from: usize) {
        let [_, inputs, outputs] = self.shape;
        let groups = inputs / BLOCK;
        let first = group / groups * outputs;
        let block = |column: usize| (first + column) * groups + group % groups;
        let end = from + to.len();
        for left in (0..outputs).step_by(TILE) {
            let right = outputs.min(left + TILE);
            let mut scales = [0.0; TILE];
            let columns = scales.iter_mut().zip(left..right);
            columns.for_each(|(to, column)| *to = scale(self.scales[block(column)]));
            for row in from / outputs..end.div_ceil(outputs) {
                // The first and the last row may be there in part.
                let begin = (row * outputs + left).max(from);
                let end = (row * outputs + right).min(end);
                if begin >= end {
                    continue;
                }
                let column = begin - row * outputs;
                let pairs = &self.blocks[block(column) * BLOCK / 2 + row / 2..];
                let pairs = pairs.iter().step_by(groups * BLOCK / 2);
                let shift = 4 * (row % 2);
                let to = to[begin - from..end - from].iter_mut().zip(&scales[column - left..]);
                for ((to, scale), pair) in to.zip(pairs) {
                    *to = NUMBERS[usize::from(pair >> shift & 15)] * scale;
                }
            }
        }
    }

    /// The first element that is NaN or infinite.
    pub(super) fn first_infinite(&self) -> Option<f32> {
        /// Below this scale, even the largest number is finite.
        const LARGE: u8 = 253;
        let large = self.scales.iter().enumerate().filter(|(_, scale)| **scale >= LARGE);
        let mut values = large.flat_map(|(block, byte)| {
            let bytes = &self.blocks[block * BLOCK / 2..][..BLOCK / 2];
            bytes
                .iter()
                .flat_map(|pair| [pair & 15, pair >> 4])
                .map(|one| NUMBERS[usize::from(one)] * scale(*byte))
        });
        values.find(|value| !value.is_finite())
    }
}

/// The name of the model's tensor that a tensor of a file is a part of, and which part.
fn whole<'n>(shape: &Shape, in_file: &'n str) -> Option<(&'n str, usize)> {
    let (at, name) =
        ENDS.iter().enumerate().find_map(|(at, end)| Some((at, in_file.strip_suffix(end)?)))?;
    let prefix = shape.names.prefix;
    let is_of = |pattern: &&str| {
        let (before, after) = pattern.split_once("{}")?;
        let bare = before.strip_prefix(prefix).unwrap_or(before);
        let rest = name.strip_prefix(before).or_else(|| name.strip_prefix(bare))?;
        let block: usize = rest.strip_suffix(after)?.parse().ok()?;
        (block < shape.layers).then_some(())
    };
    shape.names.stacked.iter().any(|pattern| is_of(pattern).is_some()).then_some((name, at))
}

/// Whether files may have a part of a tensor of the model under this name.
pub(super) fn is_part(shape: &Shape, in_file: &str) -> bool {
    whole(shape, in_file).is_some()
}

/// The name of the tensor whose blocks have this name. `None`: it is no such name.
pub(super) fn of_blocks<'n>(shape: &Shape, in_file: &'n str) -> Option<&'n str> {
    whole(shape, in_file).filter(|(_, part)| *part == 0).map(|(name, _)| name)
}

/// Finds a tensor of the model.
pub(super) fn find_mxfp4<'t>(
    shape: &Shape,
    files: &[SafeTensors<'t>],
    name: &str,
) -> Option<Mxfp4<'t>> {
    if shape.names.stacked.is_empty() {
        return None;
    }
    let [blocks, scales] = ENDS.map(|end| find(files, &format!("{name}{end}"), shape.names.prefix));
    Mxfp4::new(&blocks?, &scales?).ok()
}

/// Refuses tensors in MXFP4 that are not whole, or that the files also have in floats.
///
/// # Errors
/// The names of the tensors.
pub(super) fn check(shape: &Shape, files: &[SafeTensors<'_>]) -> Result<(), String> {
    let prefix = shape.names.prefix;
    for in_file in files.iter().flat_map(SafeTensors::names) {
        let Some((name, _)) = whole(shape, in_file) else { continue };
        if find(files, name, prefix).is_some() {
            return Err(format!(
                "{name} and {in_file} are in the files: a tensor must be there once. Remove one of \
                 the two"
            ));
        }
        let [blocks, scales] = ENDS.map(|end| format!("{name}{end}"));
        let view = |name: &str| {
            find(files, name, prefix).ok_or_else(|| format!("{name} is missing, beside {in_file}"))
        };
        Mxfp4::new(&view(&blocks)?, &view(&scales)?)
            .map_err(|what| format!("{blocks} and {scales}: {what}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_format() {
        assert_eq!(
            [0, 1, 127, 128, 254].map(scale),
            [-127, -126, 0, 1, 127].map(|e| 2_f32.powi(e))
        );
        assert!(scale(255).is_nan());
        assert_eq!([1, 7, 8 + 1, 8 + 7].map(|bits| NUMBERS[bits]), [0.5, 6.0, -0.5, -6.0]);
    }

    /// Two experts, in parts of any size: few outputs, and more than a tile of them.
    #[test]
    fn elements_are_transposed() {
        for [groups, outputs] in [[1, 3], [2, 64], [3, 71]] {
            let count = 2 * groups * outputs;
            let blocks: Vec<u8> = (0..16 * count).map(|at| (at * 37 % 251) as u8).collect();
            let scales: Vec<u8> = (0..count).map(|at| 120 + (at * 7 % 11) as u8).collect();
            let tensor = tensor(&blocks, &scales, [groups, outputs]);
            assert_eq!(tensor.shape(), [2, 32 * groups, outputs]);
            let all = 32 * count;
            let expected = (0..all).map(|at| {
                let output = at % outputs;
                let input = at / outputs % (32 * groups);
                let row = at / outputs / (32 * groups) * outputs + output;
                let block = row * groups + input / 32;
                let bits = blocks[16 * block + input % 32 / 2] >> (4 * (input % 2)) & 15;
                NUMBERS[usize::from(bits)] * 2_f32.powi(i32::from(scales[block]) - 127)
            });
            let expected: Vec<f32> = expected.collect();
            for at_once in [1, 5, outputs, 3 * outputs + 1, 33 * outputs - 1, all] {
                let mut found = vec![f32::NAN; all];
                let parts = found.chunks_mut(at_once).enumerate();
                parts.for_each(|(nth, to)| tensor.decode(to, nth * at_once));
                assert_eq!(found, expected, "{groups} {outputs} {at_once}");
            }
        }
    }

    fn tensor<'t>(blocks: &'t [u8], scales: &'t [u8], [groups, outputs]: [usize; 2]) -> Mxfp4<'t> {
        let view = |shape, data| TensorView::new(Dtype::U8, shape, data).expect("whole");
        let blocks = view(vec![2, outputs, groups, 16], blocks);
        let scales = view(vec![2, outputs, groups], scales);
        Mxfp4::new(&blocks, &scales).expect("they belong together")
    }

    #[test]
    fn lost_scales_are_found() {
        let blocks: Vec<u8> = (0..2 * 3 * 16).map(|at| (at * 37 % 251) as u8).collect();
        let whole = [127, 127, 130, 127, 127, 127];
        assert_eq!(tensor(&blocks, &whole, [1, 3]).first_infinite(), None);
        let lost = [127, 127, 255, 127, 127, 127];
        assert!(tensor(&blocks, &lost, [1, 3]).first_infinite().is_some_and(f32::is_nan));
    }
}
