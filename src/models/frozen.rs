//! How frozen weights are stored on the host and sent to a device, where that is not as trained
//! ones are.
//!
//! What is stored is what is sent: a device's weight slot has the same bytes. A visit dequantises
//! them into its workspace, unless they are of the device's dtype already.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::layer::{Kind, Tensor, tensor_ranges};
use crate::tensor::{Dtype, Quantisation, View};

/// How frozen weights are stored.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Base {
    /// As trained weights are: in f32.
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
    /// In the device's dtype, which is this.
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
    /// How a tensor is stored, for a device of this dtype. `None`: as trained ones are.
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

    /// Whether it stores matrices in another way than all else.
    pub(super) fn is_of_matrices(self) -> bool {
        matches!(self, Base::Int8 | Base::Nf4)
    }
}

/// A tensor of the frozen part that is quantised, or some joined tensors that are not.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WeightPiece {
    /// The name of the first tensor.
    pub(crate) name: String,
    /// Its elements, counted from the block's first.
    pub(crate) elements: Range<usize>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) format: WeightFormat,
    /// Where it is stored, in floats from the begin of the stored part.
    pub(crate) floats: Range<usize>,
}

/// The frozen part of a block as it is stored: for each weight of the layer, its pieces.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct FrozenPart {
    weights: Vec<Vec<WeightPiece>>,
}

/// Floats between the begins of pieces are multiples of this, as between those of tensors.
const ALIGNED: usize = 16;

impl FrozenPart {
    /// How frozen tensors are stored that lie behind so many elements of their block. Empty if they
    /// are stored as trained ones are.
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

    /// All pieces, in the order in which they are stored.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &WeightPiece> {
        self.weights.iter().flatten()
    }

    /// Floats that it takes.
    pub(super) fn len(&self) -> usize {
        self.pieces().last().map_or(0, |piece| piece.floats.end)
    }

    /// For each weight: where it is in a slot that has the stored part here.
    pub(super) fn views(&self, stored: View) -> impl Iterator<Item = StoredWeight<'_>> {
        self.weights.iter().map(move |pieces| StoredWeight { pieces, stored })
    }
}

impl WeightPiece {
    /// Floats that it takes.
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
pub(crate) struct StoredWeight<'p> {
    pieces: &'p [WeightPiece],
    stored: View,
}

impl StoredWeight<'_> {
    /// Its rows and columns.
    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.pieces.iter().map(|piece| piece.rows).sum(), self.pieces[0].columns]
    }

    /// The view of its elements, if they are of the device's dtype.
    pub(crate) fn plain(&self) -> Option<View> {
        match self.pieces {
            [WeightPiece { format: WeightFormat::Plain(dtype), rows, columns, floats, .. }] => {
                Some(self.stored.part(floats.clone()).hold(*rows, *columns, *dtype))
            }
            _ => None,
        }
    }

    /// For each quantised matrix of it: the rows that it is, its storage, and how it is stored.
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
