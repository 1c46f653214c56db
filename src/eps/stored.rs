//! The conversion between a block as it is stored and f32, as which it is read and written between
//! steps. Masters have one of several formats, and frozen tensors may have others. [`BlockTensors`]
//! says in which order they lie.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use l2l_actors::schedule::BlockId;

use super::{BlockRun, Eps};
use crate::error::Error;
use crate::models::{BlockTensors, MasterFormat, WeightFormat, WeightPiece};
use crate::optimizers::{BlockMasters, SplitMasters};
use crate::tensor::{Dtype, Quantisation, narrow, widen};

/// The rows of a tile of the vocabulary, as they are stored.
#[derive(Clone, Copy)]
pub(crate) enum TableRows<'t> {
    F32(&'t [f32]),
    Bf16(&'t [bf16]),
    F16(&'t [f16]),
}

/// The masters of a block that is stored: what devices are sent of it, or the first part of that,
/// and the rest of each master.
pub(crate) struct StoredMasters<'m> {
    pub(crate) sent: &'m mut [f32],
    pub(crate) kept: &'m mut [f32],
}

impl Eps {
    /// Whether all tensors of a block are stored as f32.
    fn is_plain(&self, id: BlockId) -> bool {
        let tensors = self.tensors(id);
        tensors.masters() == MasterFormat::F32 && tensors.stored().pieces().next().is_none()
    }

    /// The masters of a stored block, to be updated.
    pub(crate) fn masters<'m>(&self, id: BlockId, stored: StoredMasters<'m>) -> BlockMasters<'m> {
        block_masters(self.tensors(id).masters(), stored)
    }

    /// The masters of a block that is stored in one range.
    pub(crate) fn whole<'m>(&self, id: BlockId, stored: &'m mut [f32]) -> StoredMasters<'m> {
        let tensors = self.tensors(id);
        let sent = tensors.published_len(tensors.masters().sent());
        let (sent, kept) = stored[..tensors.host_len()].split_at_mut(sent);
        StoredMasters { sent, kept }
    }

    /// The rows of a tile of the vocabulary, given its tensors and its published part as it is
    /// stored.
    pub(crate) fn table_rows<'t>(
        &self,
        tensors: &BlockTensors,
        stored: &'t [f32],
    ) -> TableRows<'t> {
        let (_, range) = tensors.ranges().next().expect("a tile has its table");
        let dtype = tensors.masters().sent();
        let behind = dtype.floats(tensors.masters_len());
        let mut pieces = tensors.stored().pieces();
        let (dtype, stored, range) = match pieces.find(|piece| piece.elements == range) {
            None => (dtype, stored, range),
            Some(WeightPiece { format, floats, .. }) => {
                let dtype = match format {
                    WeightFormat::Plain(dtype) => *dtype,
                    WeightFormat::Quantised(Quantisation::Bf16) => Dtype::Bf16,
                    WeightFormat::Quantised(_) => unreachable!("tables are stored row by row"),
                };
                (dtype, &stored[behind + floats.start..], 0..range.len())
            }
        };
        match dtype {
            Dtype::F32 => TableRows::F32(&stored[range]),
            Dtype::Bf16 => {
                let floats = dtype.floats(range.end);
                TableRows::Bf16(&bytemuck::cast_slice(&stored[..floats])[range])
            }
            Dtype::F16 => {
                let floats = dtype.floats(range.end);
                TableRows::F16(&bytemuck::cast_slice(&stored[..floats])[range])
            }
        }
    }

    /// Reads this rank's part of a run, as f32.
    pub(super) fn read_own<R>(
        &self,
        id: BlockId,
        run: BlockRun,
        read: impl FnOnce(&[f32]) -> R,
    ) -> Result<R, Error> {
        if run == BlockRun::Older {
            let tensors = self.tensors(id);
            return self.read_stored(id, run, |sent| read(&decode_sent(tensors, sent)));
        }
        if run != BlockRun::Parameters || self.is_plain(id) {
            return self.read_stored(id, run, read);
        }
        let tensors = self.tensors(id);
        let mut stored = self.read_stored(id, run, |all| all[..tensors.host_len()].to_vec())?;
        Ok(read(&self.install(|| decode(tensors, &mut stored))))
    }

    /// Changes this rank's part of a run, as f32. Frozen tensors that do not change keep their
    /// bytes.
    pub(super) fn write_own(
        &self,
        id: BlockId,
        run: BlockRun,
        write: impl FnOnce(&mut [f32]),
    ) -> Result<(), Error> {
        if run == BlockRun::Older {
            let tensors = self.tensors(id);
            return self.write_stored(id, run, |sent| {
                let mut values = decode_sent(tensors, sent);
                write(&mut values);
                encode_sent(tensors, &values, sent);
            });
        }
        if run != BlockRun::Parameters || self.is_plain(id) {
            return self.write_stored(id, run, write);
        }
        let tensors = self.tensors(id);
        let mut done = Ok(());
        self.write_stored(id, run, |stored| {
            let stored = &mut stored[..tensors.host_len()];
            let mut values = self.install(|| decode(tensors, stored));
            write(&mut values);
            done = self.install(|| encode(tensors, &values, stored));
        })?;
        done
    }
}

/// The masters of a stored block, and its frozen tensors in other formats.
fn split_stored<'m>(
    tensors: &BlockTensors,
    stored: &'m mut [f32],
) -> (BlockMasters<'m>, &'m mut [f32]) {
    let stored = &mut stored[..tensors.host_len()];
    let len = tensors.masters_len();
    let format = tensors.masters();
    let (sent, rest) = stored.split_at_mut(format.sent().floats(len));
    let (frozen, kept) = rest.split_at_mut(rest.len() - format.kept_floats(len));
    (block_masters(format, StoredMasters { sent, kept }), frozen)
}

fn block_masters(format: MasterFormat, stored: StoredMasters<'_>) -> BlockMasters<'_> {
    let StoredMasters { sent, kept } = stored;
    match format {
        MasterFormat::F32 => BlockMasters::Plain(sent),
        MasterFormat::Split => BlockMasters::Split(SplitMasters {
            published: bytemuck::cast_slice_mut(sent),
            remainder: bytemuck::cast_slice_mut(kept),
        }),
        MasterFormat::Copied(dtype) => {
            BlockMasters::Copied { dtype, published: bytemuck::cast_slice_mut(sent), masters: kept }
        }
        MasterFormat::Rounded => BlockMasters::Rounded(bytemuck::cast_slice_mut(sent)),
    }
}

/// The trained part of a block as devices are sent it, as f32.
fn decode_sent(tensors: &BlockTensors, sent: &[f32]) -> Vec<f32> {
    let len = tensors.trained_len();
    match tensors.masters().sent() {
        Dtype::F32 => sent[..len].to_vec(),
        dtype => {
            let mut values = vec![0.0; len];
            widen(dtype, &mut values, &bytemuck::cast_slice(sent)[..len]);
            values
        }
    }
}

/// The inverse of [`decode_sent`].
fn encode_sent(tensors: &BlockTensors, values: &[f32], sent: &mut [f32]) {
    match tensors.masters().sent() {
        Dtype::F32 => sent[..values.len()].copy_from_slice(values),
        dtype => narrow(dtype, &mut bytemuck::cast_slice_mut(sent)[..values.len()], values),
    }
}

fn decode(tensors: &BlockTensors, stored: &mut [f32]) -> Vec<f32> {
    let (masters, frozen) = split_stored(tensors, stored);
    let mut values = vec![0.0; tensors.len()];
    let to = &mut values[..tensors.masters_len()];
    match masters {
        BlockMasters::Plain(masters) | BlockMasters::Copied { masters, .. } => {
            to.copy_from_slice(&masters[..to.len()]);
        }
        BlockMasters::Split(split) => split.join_to(to),
        BlockMasters::Rounded(masters) => masters[..to.len()].convert_to_f32_slice(to),
    }
    for piece in tensors.stored().pieces() {
        decode_piece(piece, frozen, &mut values[piece.elements.clone()]);
    }
    values
}

fn decode_piece(piece: &WeightPiece, frozen: &[f32], to: &mut [f32]) {
    let &WeightPiece { rows, columns, format, ref floats, .. } = piece;
    let stored = &frozen[floats.clone()];
    match format {
        WeightFormat::Plain(Dtype::F32) => to.copy_from_slice(&stored[..to.len()]),
        WeightFormat::Plain(Dtype::Bf16) => Quantisation::Bf16.decode(stored, rows, columns, to),
        WeightFormat::Plain(Dtype::F16) => {
            let stored: &[u16] = bytemuck::cast_slice(stored);
            widen(Dtype::F16, to, &stored[..to.len()]);
        }
        WeightFormat::Quantised(quantisation) => quantisation.decode(stored, rows, columns, to),
    }
}

fn encode(tensors: &BlockTensors, values: &[f32], stored: &mut [f32]) -> Result<(), Error> {
    let (masters, frozen) = split_stored(tensors, stored);
    let from = &values[..tensors.masters_len()];
    match masters {
        BlockMasters::Plain(masters) => masters.copy_from_slice(from),
        BlockMasters::Split(mut split) => split.split_from(from),
        BlockMasters::Copied { dtype, published, masters } => {
            masters.copy_from_slice(from);
            narrow(dtype, &mut published[..from.len()], from);
        }
        BlockMasters::Rounded(masters) => masters[..from.len()].convert_from_f32_slice(from),
    }
    for piece in tensors.stored().pieces() {
        encode_piece(piece, &values[piece.elements.clone()], frozen)?;
    }
    Ok(())
}

fn encode_piece(piece: &WeightPiece, values: &[f32], frozen: &mut [f32]) -> Result<(), Error> {
    let &WeightPiece { rows, columns, format, ref floats, ref name, .. } = piece;
    let quantisation = match format {
        WeightFormat::Plain(Dtype::F32) => {
            frozen[floats.start..][..values.len()].copy_from_slice(values);
            return Ok(());
        }
        WeightFormat::Plain(Dtype::F16) => {
            let stored: &mut [u16] = bytemuck::cast_slice_mut(&mut frozen[floats.clone()]);
            narrow(Dtype::F16, &mut stored[..values.len()], values);
            return Ok(());
        }
        WeightFormat::Plain(Dtype::Bf16) => Quantisation::Bf16,
        WeightFormat::Quantised(quantisation) => quantisation,
    };
    // To quantise a tensor twice gives other bytes, because the scales are rounded again.
    let mut before = vec![0.0; values.len()];
    decode_piece(piece, frozen, &mut before);
    let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
    if before.iter().zip(values).all(is_same) {
        return Ok(());
    }
    let refused = |error| Error::bad_model(format_args!("tensor {name}"), error);
    let stored = &mut frozen[floats.clone()];
    quantisation.encode(values, rows, columns, stored).map_err(refused)
}
