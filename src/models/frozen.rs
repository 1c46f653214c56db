//! Formats of frozen weights on the host, if they are not stored as masters.
//!
//! Frozen weights are sent to a device in the format in which they are stored. A visit dequantises
//! them into its workspace, unless they have the device's dtype already.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::layer::{Kind, Tensor, tensor_ranges};
use super::portions::Part;
use crate::tensor::{ALIGNED, ByteRows, Dtype, MatrixPart, Origin, Quantisation, View};

/// How frozen weights are stored.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Base {
    /// In f32, as trained weights.
    #[default]
    AsIs,
    /// In bf16.
    Bf16,
    /// Matrices as integers of 8 bits with a scale a row (LLM.int8(), Dettmers et al. 2022).
    /// Embeddings, heads, biases and norms are in the device's dtype.
    Int8,
    /// Matrices as 4-bit `NormalFloat` with double quantisation (QLoRA, Dettmers et al. 2023), and
    /// all else in the device's dtype.
    Nf4,
}

/// How the elements of some frozen tensors are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightFormat {
    /// In the device's dtype.
    Plain(Dtype),
    /// In fewer bits.
    Quantised(Quantisation),
}

impl WeightFormat {
    /// The format of elements that are stored one by one, for a device of this dtype.
    fn of(stored: Dtype, device: Dtype) -> WeightFormat {
        match stored {
            Dtype::Bf16 if device == Dtype::F32 => WeightFormat::Quantised(Quantisation::Bf16),
            _ => WeightFormat::Plain(device),
        }
    }

    /// Whether elements are stored one by one, so that joined tensors can be one piece.
    fn is_elementwise(self) -> bool {
        matches!(self, WeightFormat::Plain(_) | WeightFormat::Quantised(Quantisation::Bf16))
    }
}

impl Base {
    /// The format of a tensor, for a device of this dtype. `None`: it is stored as masters.
    fn format(self, tensor: &Tensor, dtype: Dtype) -> Option<WeightFormat> {
        let is_matrix = tensor.kind == Kind::Weight && tensor.shape.len() == 2;
        match self {
            Base::AsIs => None,
            Base::Bf16 => Some(WeightFormat::of(Dtype::Bf16, dtype)),
            Base::Int8 if is_matrix => Some(WeightFormat::Quantised(Quantisation::Int8)),
            Base::Nf4 if is_matrix => Some(WeightFormat::Quantised(Quantisation::Nf4)),
            Base::Int8 | Base::Nf4 => Some(WeightFormat::of(dtype, dtype)),
        }
    }

    /// Whether matrices have another format than all other tensors.
    pub(super) fn is_of_matrices(self) -> bool {
        matches!(self, Base::Int8 | Base::Nf4)
    }
}

/// A quantised matrix of the frozen part, or joined tensors that are stored element by element. A
/// portion has parts of them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WeightPiece {
    /// The name of the first tensor.
    pub(crate) name: String,
    /// The elements of its tensors, counted from the begin of the block or of the portion. In a
    /// portion each matrix of a weight has those of all of them.
    pub(crate) elements: Range<usize>,
    /// Its first row and column in the weight.
    at: [usize; 2],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) format: WeightFormat,
    /// The place in its matrix of a part whose scales are of the matrix.
    origin: Option<Origin>,
    /// The floats that it takes, counted from the begin of the stored frozen part.
    pub(crate) floats: Range<usize>,
}

/// The frozen part of a block as it is stored: for each weight of the layer, its pieces.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct FrozenPart {
    weights: Vec<Vec<WeightPiece>>,
}

impl FrozenPart {
    /// The frozen part of a block with `behind` trained elements. It is empty if frozen tensors are
    /// stored as masters.
    pub(super) fn new(tensors: &[Tensor], behind: usize, base: Base, dtype: Dtype) -> FrozenPart {
        let mut weights: Vec<Vec<WeightPiece>> = Vec::new();
        let mut end = 0;
        for (tensor, range) in tensors.iter().zip(tensor_ranges(tensors)) {
            let Some(format) = base.format(tensor, dtype) else { continue };
            let elements = range.start + behind..range.end + behind;
            let is_vector = tensor.shape.len() == 1;
            let rows = if is_vector { 1 } else { tensor.shape[0] };
            let columns = tensor.len() / rows.max(1);
            match weights.last_mut().filter(|_| tensor.joined) {
                Some(pieces) if format.is_elementwise() => {
                    let piece = &mut pieces[0];
                    piece.elements.end = elements.end;
                    *if is_vector { &mut piece.columns } else { &mut piece.rows } +=
                        if is_vector { columns } else { rows };
                    end = piece.floats.start + piece.stored_len();
                    piece.floats.end = end;
                }
                joined => {
                    let above = joined.as_ref().and_then(|pieces| pieces.last());
                    let at = [above.map_or(0, |above| above.at[0] + above.rows), 0];
                    let name = tensor.name.clone();
                    let origin = None;
                    let piece = WeightPiece {
                        name,
                        elements,
                        at,
                        rows,
                        columns,
                        format,
                        origin,
                        floats: 0..0,
                    };
                    let piece = piece.behind(&mut end);
                    match joined {
                        Some(pieces) => pieces.push(piece),
                        None => weights.push(vec![piece]),
                    }
                }
            }
        }
        FrozenPart { weights }
    }

    /// The frozen part of a portion that has these parts of the weights, each by its number and its
    /// elements in the portion.
    pub(super) fn cut<'p>(
        &self,
        parts: impl Iterator<Item = (usize, Range<usize>, &'p Part)>,
    ) -> CutFrozen {
        let mut cut = CutFrozen::default();
        let mut end = 0;
        for (index, elements, part) in parts {
            let pieces = &self.weights[index];
            let own = match &pieces[0] {
                piece if piece.format.is_elementwise() => {
                    let [rows, columns] = part.size_of([piece.rows, piece.columns]);
                    let own = WeightPiece { elements, rows, columns, ..piece.clone() };
                    vec![own.behind(&mut end)]
                }
                _ => cut.matrices(pieces, elements, part, &mut end),
            };
            cut.stored.weights.push(own);
        }
        cut
    }

    /// All pieces, in the order in which they lie.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &WeightPiece> {
        self.weights.iter().flatten()
    }

    /// The first float of each weight.
    pub(super) fn starts(&self) -> impl Iterator<Item = usize> {
        self.weights.iter().map(|pieces| pieces[0].floats.start)
    }

    /// Floats of all pieces.
    pub(super) fn len(&self) -> usize {
        self.pieces().last().map_or(0, |piece| piece.floats.end)
    }

    /// The weights of the frozen part that lies at `stored`, in a device's slot.
    pub(super) fn views(&self, stored: View) -> impl Iterator<Item = StoredWeight<'_>> {
        self.weights.iter().map(move |pieces| StoredWeight { pieces, stored })
    }
}

/// The frozen part of a portion, and what it has of its block's.
#[derive(Clone, Debug, Default)]
pub(super) struct CutFrozen {
    pub(super) stored: FrozenPart,
    /// The bytes of quantised matrices, from the begin of each frozen part.
    pub(super) rows: Vec<ByteRows>,
    /// The first matrix that is cut inside of a byte.
    pub(super) in_byte: Option<String>,
}

impl CutFrozen {
    /// The pieces of a part of a weight whose matrices are quantised.
    fn matrices(
        &mut self,
        pieces: &[WeightPiece],
        elements: Range<usize>,
        part: &Part,
        end: &mut usize,
    ) -> Vec<WeightPiece> {
        let mut all = Vec::new();
        for (at, piece, cut) in parts_of_matrices(pieces, part) {
            let WeightFormat::Quantised(quantisation) = piece.format else { continue };
            let [rows, columns] = cut.shape();
            let origin = quantisation.origin(&cut);
            let elements = elements.clone();
            let own = WeightPiece { elements, at, rows, columns, origin, ..piece.clone() };
            let own = own.behind(end);
            let before = [&own, piece].map(|piece| piece.floats.start * size_of::<f32>());
            let copied = quantisation.rows_of(&cut).into_iter();
            self.rows.extend(copied.map(|rows| rows.behind(before)));
            if !quantisation.is_of_bytes(&cut) {
                self.in_byte.get_or_insert_with(|| own.name.clone());
            }
            all.push(own);
        }
        all
    }
}

/// The parts of a weight's matrices that a part of the weight has: for each its first row and
/// column in that part.
fn parts_of_matrices<'p>(
    pieces: &'p [WeightPiece],
    part: &Part,
) -> Vec<([usize; 2], &'p WeightPiece, MatrixPart)> {
    let mut all = Vec::new();
    let whole = 0..pieces.iter().map(|piece| piece.rows).sum();
    let columns = 0..pieces[0].columns;
    let (rows, columns) = match part {
        Part::Alone | Part::Shared => (vec![whole], vec![columns]),
        Part::Rows(rows) => (rows.clone(), vec![columns]),
        Part::Columns(columns) => (vec![whole], columns.clone()),
    };
    let mut left = 0;
    for columns in columns {
        let mut above = 0;
        for range in &rows {
            for piece in pieces {
                let first = piece.at[0];
                let start = range.start.max(first);
                let end = range.end.min(first + piece.rows);
                if start < end {
                    let at = [above + start - range.start, left];
                    let rows = start - first..end - first;
                    let of = [piece.rows, piece.columns];
                    all.push((at, piece, MatrixPart { of, rows, columns: columns.clone() }));
                }
            }
            above += range.len();
        }
        left += columns.len();
    }
    if all.is_empty() {
        let of = [pieces[0].rows, pieces[0].columns];
        all.push(([0; 2], &pieces[0], MatrixPart { of, rows: 0..0, columns: 0..of[1] }));
    }
    all
}

impl WeightPiece {
    /// The piece with its floats from `end` on. `end` moves behind them.
    fn behind(self, end: &mut usize) -> WeightPiece {
        let begin = *end;
        *end += self.stored_len();
        WeightPiece { floats: begin..*end, ..self }
    }

    /// Floats that the piece takes.
    fn stored_len(&self) -> usize {
        let floats = match self.format {
            WeightFormat::Plain(dtype) => dtype.floats(self.rows * self.columns),
            WeightFormat::Quantised(quantisation) => {
                quantisation.floats_of([self.rows, self.columns], self.origin)
            }
        };
        floats.next_multiple_of(ALIGNED)
    }
}

/// A frozen weight in a device's weight slot.
#[derive(Clone, Copy, Debug)]
pub struct StoredWeight<'p> {
    pieces: &'p [WeightPiece],
    stored: View,
}

impl StoredWeight<'_> {
    /// Its rows and columns.
    pub(crate) fn shape(&self) -> [usize; 2] {
        let ends = |piece: &WeightPiece| [piece.at[0] + piece.rows, piece.at[1] + piece.columns];
        let ends = self.pieces.iter().map(ends);
        ends.fold([0, 0], |[rows, columns], end| [rows.max(end[0]), columns.max(end[1])])
    }

    /// The view of the elements, if they have the device's dtype.
    pub(crate) fn plain(&self) -> Option<View> {
        match self.pieces {
            [WeightPiece { format: WeightFormat::Plain(dtype), rows, columns, floats, .. }] => {
                Some(self.stored.part(floats.clone()).hold(*rows, *columns, *dtype))
            }
            _ => None,
        }
    }

    /// The quantised matrices of the weight.
    pub(crate) fn quantised(&self) -> impl Iterator<Item = StoredMatrix> + '_ {
        self.pieces.iter().filter_map(|piece| {
            let &WeightPiece { at: [row, column], rows, columns, origin, .. } = piece;
            let WeightFormat::Quantised(quantisation) = piece.format else { return None };
            let floats = quantisation.floats_of([rows, columns], origin);
            let begin = piece.floats.start;
            Some(StoredMatrix {
                rows: row..row + rows,
                columns: column..column + columns,
                x: self.stored.part(begin..begin + floats),
                quantisation,
                origin,
            })
        })
    }
}

/// A quantised matrix of a weight in a device's weight slot.
pub(crate) struct StoredMatrix {
    /// Its rows and columns in the weight.
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
    /// The storage.
    pub(crate) x: View,
    pub(crate) quantisation: Quantisation,
    pub(crate) origin: Option<Origin>,
}
