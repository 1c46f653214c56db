//! The short convolution in front of the delta rule.

use rayon::prelude::*;

use super::super::activation::{silu, slope_of_silu};
use super::super::linear::{SUM_ROWS, add_parts};
use super::super::views::{Call, Compute, ComputeIn};
use super::{left_before, rows_before};
use crate::kernels::{LinearHeads, LinearShape, ShortConvolution, ShortConvolutionBackward};
use crate::simd::Level;
use crate::tensor::View;

/// Rows that follow others have what these left: the operation's declaration checks it.
const LEFT: &str = "earlier rows have left their inputs";

/// The inputs of the convolution: those of the rows, and those that earlier rows have left.
#[derive(Clone, Copy)]
struct Inputs<'i> {
    shape: LinearShape<'i>,
    /// (R, P).
    projected: &'i [f32],
    /// (B, S).
    left: Option<&'i [f32]>,
}

/// A row among those of its sequence.
#[derive(Clone, Copy)]
struct Row {
    sequence: usize,
    at: usize,
    /// The rows before it in its document.
    before: usize,
}

impl<'i> Inputs<'i> {
    fn new(
        call: &'i Call<'_>,
        shape: LinearShape<'i>,
        projected: View,
        left: Option<View>,
    ) -> Inputs<'i> {
        Inputs { shape, projected: call.read(projected), left: call.read_if(left) }
    }

    fn rows(&self) -> Vec<Row> {
        let batch = self.shape.batch;
        let of = |(row, before): (usize, usize)| {
            let (sequence, at) = batch.place(row);
            Row { sequence, at, before }
        };
        rows_before(&batch).into_iter().enumerate().map(of).collect()
    }

    /// The channels of a row that lies `back` rows before the one at `at`, if it is there.
    fn channels(&self, sequence: usize, at: usize, back: usize) -> Option<&'i [f32]> {
        let LinearShape { batch, heads } = self.shape;
        let mixed = heads.mixed();
        if let Some(at) = at.checked_sub(back) {
            let row = batch.sequence(sequence).start + at;
            return Some(&self.projected[row * heads.projected()..][..mixed]);
        }
        let nth = (heads.taps - 1 + at).checked_sub(back)?;
        let left = left_before(&self.shape, self.left, sequence)?;
        Some(&left[nth * mixed..][..mixed])
    }

    /// The weighted sums of a row's channels and of those before it, to `y`.
    #[inline(always)]
    fn convolve(&self, y: &mut [f32], Row { sequence, at, before }: Row, w: &[f32]) {
        let taps = self.shape.heads.taps;
        y.fill(0.0);
        for back in (0..taps.min(before + 1)).rev() {
            let x = self.channels(sequence, at, back).expect(LEFT);
            for ((y, x), w) in y.iter_mut().zip(x).zip(w.chunks_exact(taps)) {
                *y += w[taps - 1 - back] * x;
            }
        }
    }

    /// Writes the inputs of the last rows of each sequence.
    fn leave(&self, behind: &mut [f32]) {
        let LinearShape { batch, heads } = self.shape;
        for (sequence, behind) in behind.chunks_exact_mut(heads.carried()).enumerate() {
            let last = batch.sequence(sequence).len() - 1;
            let rows = behind[..heads.inputs()].chunks_exact_mut(heads.mixed());
            for (back, to) in (0..heads.taps - 1).rev().zip(rows) {
                match self.channels(sequence, last, back) {
                    Some(from) => to.copy_from_slice(from),
                    None => to.fill(0.0),
                }
            }
        }
    }
}

impl Compute for ShortConvolution<'_> {
    fn compute(&self, level: Level, call: &Call<'_>) {
        let ShortConvolution { y, projected, w, shape, carried } = *self;
        let w = call.read(w);
        let inputs = Inputs::new(call, shape, projected, carried.before);
        let rows = inputs.rows();
        call.write(y).par_chunks_mut(shape.heads.mixed()).zip(&rows).for_each(|(y, &row)| {
            level.run(
                #[inline(always)]
                || {
                    inputs.convolve(y, row, w);
                    y.iter_mut().for_each(|y| *y = silu(*y));
                },
            );
        });
        if let Some(behind) = carried.behind {
            inputs.leave(call.write(behind));
        }
    }
}

/// The gradients of the convolution's sums.
#[derive(Clone, Copy)]
struct Sums<'s> {
    shape: LinearShape<'s>,
    /// (R, M).
    dsums: &'s [f32],
    /// Those on the first rows behind. (B, S).
    dbehind: Option<&'s [f32]>,
}

impl<'s> Sums<'s> {
    /// Those of a row of a sequence, or of one behind it.
    fn of(&self, sequence: usize, at: usize) -> Option<&'s [f32]> {
        let LinearShape { batch, heads } = self.shape;
        let mixed = heads.mixed();
        let rows = batch.sequence(sequence);
        let Some(behind) = at.checked_sub(rows.len()) else {
            return Some(&self.dsums[(rows.start + at) * mixed..][..mixed]);
        };
        let dbehind = &self.dbehind?[sequence * heads.carried()..][..heads.inputs()];
        dbehind.get(behind * mixed..(behind + 1) * mixed)
    }

    /// Positions behind a row in its document that are there.
    fn ahead(&self, Row { sequence, at, .. }: Row) -> usize {
        let batch = self.shape.batch;
        let first = batch.first_position();
        let own = batch.sequence(sequence).len();
        let all = match self.dbehind {
            Some(_) => batch.metadata().sequence(batch.first_sequence() + sequence).len(),
            None => first + own,
        };
        let document = batch.document(sequence, first + at);
        let end = document.map_or(all, |document| all.min(document.to as usize));
        end - first - at - 1
    }

    /// Writes those of the first rows of each sequence.
    fn leave(&self, dbefore: &mut [f32]) {
        let heads = self.shape.heads;
        for (sequence, dbefore) in dbefore.chunks_exact_mut(heads.carried()).enumerate() {
            let rows = dbefore[..heads.inputs()].chunks_exact_mut(heads.mixed());
            for (at, to) in rows.enumerate() {
                match self.of(sequence, at) {
                    Some(from) => to.copy_from_slice(from),
                    None => to.fill(0.0),
                }
            }
        }
    }
}

impl ComputeIn for ShortConvolutionBackward<'_> {
    fn workspace(&self) -> usize {
        let rows = self.dy.rows;
        rows * self.dy.columns + rows.div_ceil(SUM_ROWS) * self.dw.len()
    }

    /// First the gradients of the sums, then those of their inputs, then those of the weights.
    fn compute(&self, level: Level, call: &Call<'_>, workspace: &mut [f32]) {
        let ShortConvolutionBackward { shape, carried, .. } = *self;
        let LinearHeads { taps, .. } = shape.heads;
        let mixed = shape.heads.mixed();
        let [dy, w] = [self.dy, self.w].map(|view| call.read(view));
        let inputs = Inputs::new(call, shape, self.projected, carried.before);
        let rows = &inputs.rows();
        let (dsums, parts) = workspace.split_at_mut(dy.len());
        let of_rows = dsums.par_chunks_mut(mixed).zip(dy.par_chunks(mixed)).zip(rows);
        of_rows.for_each(|((dsum, dy), &row)| {
            level.run(
                #[inline(always)]
                || {
                    inputs.convolve(dsum, row, w);
                    let all = dsum.iter_mut().zip(dy);
                    all.for_each(|(dsum, dy)| *dsum = dy * slope_of_silu(*dsum));
                },
            );
        });
        let sums = Sums { shape, dsums, dbehind: call.read_if(carried.dbehind) };
        let dprojected = call.write(self.dprojected).par_chunks_mut(shape.heads.projected());
        dprojected.zip(rows).for_each(|(dx, &row)| {
            level.run(
                #[inline(always)]
                || {
                    let dx = &mut dx[..mixed];
                    dx.fill(0.0);
                    for ahead in 0..taps.min(sums.ahead(row) + 1) {
                        let Some(dsum) = sums.of(row.sequence, row.at + ahead) else { break };
                        let all = dx.iter_mut().zip(dsum).zip(w.chunks_exact(taps));
                        all.for_each(|((dx, dsum), w)| *dx += w[taps - 1 - ahead] * dsum);
                    }
                },
            );
        });
        let chunks = parts.par_chunks_mut(self.dw.len()).enumerate();
        chunks.for_each(|(chunk, part)| {
            level.run(
                #[inline(always)]
                || {
                    part.fill(0.0);
                    let first = chunk * SUM_ROWS;
                    let of_chunk = first..rows.len().min(first + SUM_ROWS);
                    for (row, &Row { sequence, at, before }) in
                        of_chunk.clone().zip(&rows[of_chunk])
                    {
                        let dsum = &dsums[row * mixed..][..mixed];
                        for back in 0..taps.min(before + 1) {
                            let x = inputs.channels(sequence, at, back).expect(LEFT);
                            let all = part.chunks_exact_mut(taps).zip(dsum).zip(x);
                            all.for_each(|((dw, dsum), x)| dw[taps - 1 - back] += dsum * x);
                        }
                    }
                },
            );
        });
        add_parts(level, call.write(self.dw), parts, self.accumulate);
        if let Some(dbefore) = carried.dbefore {
            sums.leave(call.write(dbefore));
        }
    }
}
