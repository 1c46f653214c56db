//! Formats of frozen weights on the host, if they are not stored as masters.
//!
//! Frozen weights are sent to a device in the format in which they are stored. A visit dequantises
//! them into its workspace, unless they have the device's dtype already.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::layer::{Kind, Tensor, tensor_ranges};
use crate::tensor::{ALIGNED, Dtype, Quantisation, View};

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

/// A quantised matrix of the frozen part, or joined tensors that are stored element by element.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WeightPiece {
    /// The name of the first tensor.
    pub(crate) name: String,
    /// The elements, counted from the begin of the block.
    pub(crate) elements: Range<usize>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) format: WeightFormat,
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
                    let name = tensor.name.clone();
                    let mut piece =
                        WeightPiece { name, elements, rows, columns, format, floats: 0..0 };
                    let begin = end;
                    end += piece.stored_len();
                    piece.floats = begin..end;
                    match joined {
                        Some(pieces) => pieces.push(piece),
                        None => weights.push(vec![piece]),
                    }
                }
            }
        }
        FrozenPart { weights }
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

impl WeightPiece {
    /// Floats that the piece takes.
    fn stored_len(&self) -> usize {
        let floats = match self.format {
            WeightFormat::Plain(dtype) => dtype.floats(self.rows * self.columns),
            WeightFormat::Quantised(quantisation) => quantisation.floats(self.rows, self.columns),
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
        [self.pieces.iter().map(|piece| piece.rows).sum(), self.pieces[0].columns]
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

    /// The quantised matrices of the weight: their rows in it, their storage and their format.
    pub(crate) fn quantised(
        &self,
    ) -> impl Iterator<Item = (Range<usize>, View, Quantisation)> + '_ {
        let mut end = 0;
        self.pieces.iter().filter_map(move |piece| {
            let rows = end..end + piece.rows;
            end = rows.end;
            match piece.format {
                WeightFormat::Plain(_) => None,
                WeightFormat::Quantised(quantisation) => {
                    let floats = quantisation.floats(piece.rows, piece.columns);
                    let begin = piece.floats.start;
                    Some((rows, self.stored.part(begin..begin + floats), quantisation))
                }
            }
        })
    }
}
