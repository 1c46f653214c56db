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

/// The ends of the names of its two tensors.
const ENDS: [&str; 2] = ["_blocks", "_scales"];

/// The numbers of 4 bits without a sign (e2m1).
const NUMBERS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

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

fn number(bits: u8) -> f32 {
    let number = NUMBERS[usize::from(bits & 7)];
    if bits & 8 == 0 { number } else { -number }
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
        let [_, inputs, outputs] = self.shape;
        let mut rest = to;
        let mut from = from;
        while !rest.is_empty() {
            // Of one input of an expert: an element of each output.
            let expert = from / outputs / inputs;
            let input = from / outputs % inputs;
            let first = expert * outputs + from % outputs;
            let count = rest.len().min(outputs - from % outputs);
            let (now, later) = rest.split_at_mut(count);
            for (row, to) in (first..).zip(now) {
                let pair = self.blocks[(row * inputs + input) / 2];
                let bits = if input.is_multiple_of(2) { pair & 15 } else { pair >> 4 };
                *to = number(bits) * scale(self.scales[(row * inputs + input) / BLOCK]);
            }
            (rest, from) = (later, from + count);
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
                .map(|one| number(one) * scale(*byte))
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
        assert_eq!([1, 7, 8 + 1, 8 + 7].map(number), [0.5, 6.0, -0.5, -6.0]);
    }

    /// Two experts of one block of inputs and three outputs, in parts of any size.
    #[test]
    fn elements_are_transposed() {
        let blocks: Vec<u8> = (0..2 * 3 * 16).map(|at| (at * 37 % 251) as u8).collect();
        let scales = [120, 127, 130, 128, 126, 125];
        let view = |shape, data| TensorView::new(Dtype::U8, shape, data).expect("whole");
        let tensor = Mxfp4::new(&view(vec![2, 3, 1, 16], &blocks), &view(vec![2, 3, 1], &scales));
        let tensor = tensor.expect("they belong together");
        assert_eq!(tensor.shape(), [2, 32, 3]);
        let mut expected = Vec::new();
        for expert in 0..2 {
            for input in 0..32 {
                for output in 0..3 {
                    let row = 3 * expert + output;
                    let bits = blocks[16 * row + input / 2] >> (4 * (input % 2)) & 15;
                    expected.push(number(bits) * 2_f32.powi(i32::from(scales[row]) - 127));
                }
            }
        }
        for at_once in [1, 5, 192] {
            let mut found = vec![f32::NAN; 192];
            let parts = found.chunks_mut(at_once).enumerate();
            parts.for_each(|(nth, to)| tensor.decode(to, nth * at_once));
            assert_eq!(found, expected);
        }
        assert_eq!(tensor.first_infinite(), None);
        let lost = [127, 127, 255, 127, 127, 127];
        let lost = Mxfp4::new(&view(vec![2, 3, 1, 16], &blocks), &view(vec![2, 3, 1], &lost));
        assert!(lost.expect("whole").first_infinite().is_some_and(f32::is_nan));
    }
}
