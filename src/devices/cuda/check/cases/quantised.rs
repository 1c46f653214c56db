//! Cases of frozen weights that are stored in fewer bits.

use super::Cases;
use crate::kernels::Dequantise;
use crate::tensor::{Origin, Quantisation};

impl Cases<'_> {
    /// Cases of stored weights. The storage holds random floats, whose bytes are codes.
    pub(super) fn of_quantised(&mut self) {
        for quantisation in [Quantisation::Nf4, Quantisation::Int8, Quantisation::Bf16] {
            for [rows, columns] in [[1, 3], [7, 37], [40, 420]] {
                case!(self.dequantise, |p| Dequantise {
                    y: p.output([rows, columns]),
                    x: p.floats([1, quantisation.floats(rows, columns)], 0.0),
                    quantisation,
                    origin: None,
                });
            }
        }
        for (shape, first, pitch) in
            [([1, 3], 62, 3), ([40, 420], 16_320, 420), ([40, 62], 10, 484)]
        {
            let quantisation = Quantisation::Nf4;
            let origin = Some(Origin { first, pitch });
            case!(self.dequantise, |p| Dequantise {
                y: p.output(shape),
                x: p.floats([1, quantisation.floats_of(shape, origin)], 0.0),
                quantisation,
                origin,
            });
        }
    }
}
