//! Frozen weights that are stored in fewer bits.

use super::kernels::{On, arguments};
use super::launches::{long, wide};
use crate::kernels::Dequantise;
use crate::tensor::Quantisation;

/// Elements that a thread of `dequantise_nf4` computes.
const OF_THREAD: usize = 8;

/// Elements that a thread of `dequantise_nf4_part` computes: those of a byte.
const OF_BYTE: usize = 2;

impl On<'_> {
    pub(super) fn dequantise(&self, &Dequantise { y, x, quantisation, origin }: &Dequantise) {
        let parts = quantisation.parts_of(y.shape(), origin);
        let [codes, scales, groups, offset, _] = parts.map(|part| self.at(x).behind(part));
        let codes = codes.at;
        let n = long(y.len());
        let [rows, columns] = y.shape();
        let wide = wide(y.dtype);
        match (quantisation, origin) {
            (Quantisation::Nf4, Some(origin)) => {
                let [run, pitch] = origin.runs(y.shape()).map(long);
                let first = long(origin.first);
                let arguments =
                    arguments!(self; y, codes, scales.at, groups, offset, n, run, pitch, first);
                self.queue.each("dequantise_nf4_part", y.len(), OF_BYTE, arguments);
            }
            (Quantisation::Nf4, None) => {
                let arguments = arguments!(self; y, codes, scales.at, groups, offset, n);
                self.queue.each("dequantise_nf4", y.len(), OF_THREAD, arguments);
            }
            (Quantisation::Int8, _) => {
                let arguments = arguments!(self; y, codes, scales, rows, columns);
                self.queue.wide_columns("dequantise_int8", [rows, 1], columns, wide, arguments);
            }
            (Quantisation::Bf16, _) => {
                self.queue.each("dequantise_bf16", y.len(), wide, arguments!(self; y, codes, n));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::devices::Device;
    use crate::devices::cuda::packed::PackBuffers;
    use crate::devices::cuda::{Cuda, emulated, overhead_with};
    use crate::kernels::{BatchMetadata, Kernels, Rows};
    use crate::simd::Level;
    use crate::tensor::{Dtype, Origin, View};

    /// Storage with every code of a scale and of an element. Its floats are no round numbers, and
    /// none is NaN.
    fn storage(quantisation: Quantisation, shape: [usize; 2], origin: Option<Origin>) -> Vec<f32> {
        let parts = quantisation.parts_of(shape, origin);
        let mut storage = vec![0.0; parts[4]];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut storage);
        bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 167 % 256) as u8);
        if quantisation == Quantisation::Bf16 {
            bytes.iter_mut().skip(1).step_by(2).for_each(|byte| *byte &= 0xbf);
        }
        let floats = match quantisation {
            Quantisation::Nf4 => parts[2]..parts[4],
            Quantisation::Int8 => parts[1]..parts[4],
            Quantisation::Bf16 => 0..0,
        };
        for (at, float) in storage[floats].iter_mut().enumerate() {
            *float = 0.137 + (at as f32).sqrt();
        }
        storage
    }

    /// Shapes, and where a part of NF4 lies in its matrix: of whole rows and of columns.
    const CASES: [([usize; 2], Option<Origin>); 7] = [
        ([1, 1], None),
        ([3, 21], None),
        ([2, 1032], None),
        ([130, 257], None),
        ([3, 21], Some(Origin { first: 126, pitch: 21 })),
        ([130, 62], Some(Origin { first: 16_330, pitch: 250 })),
        ([40, 448], Some(Origin { first: 448, pitch: 896 })),
    ];

    #[test]
    fn values_are_the_cpus_to_the_bit() {
        if !emulated::instead() {
            return;
        }
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for quantisation in Quantisation::ALL {
                for (shape, origin) in CASES {
                    if origin.is_none() || quantisation == Quantisation::Nf4 {
                        check(dtype, quantisation, shape, origin);
                    }
                }
            }
        }
    }

    fn check(
        dtype: Dtype,
        quantisation: Quantisation,
        shape @ [rows, columns]: [usize; 2],
        origin: Option<Origin>,
    ) {
        let metadata = BatchMetadata { kinds: &[0], ..BatchMetadata::plain(&[0, 1]) };
        let from = storage(quantisation, shape, origin);
        let mut expected = vec![f32::NAN; rows * columns];
        quantisation.decode_at(Level::best(), &from, shape, origin, &mut expected);

        let x = View::floats(0, from.len());
        let y = View::floats(x.len(), dtype.floats(rows * columns));
        let end = (y.at + y.len()).next_multiple_of(16);
        let none = PackBuffers::default();
        let own = overhead_with(none, Rows { sequences: 1, positions: 1 });
        let driver = emulated::of(dtype);
        let device = Cuda::new(driver, end + own, View::floats(end, own), none);
        let device = device.expect("it is emulated");
        device.upload(x, &from).expect("it is emulated");
        device.driver.finish();
        let op = Dequantise { y: y.hold(rows, columns, dtype), x, quantisation, origin };
        let run = |kernels: &dyn Kernels| {
            kernels.dequantise(&op);
            0
        };
        device.compute(&metadata, &run).expect("it is emulated");
        let found = device.read_back(y).expect("it is emulated");
        let what = format!("{quantisation:?} of {shape:?} in {dtype}, {origin:?}");
        match dtype {
            Dtype::F32 => {
                let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                assert!(found.iter().zip(&expected).all(same), "{what}");
            }
            Dtype::F16 => unreachable!("it is not among these"),
            Dtype::Bf16 => {
                let found: &[bf16] = bytemuck::cast_slice(&found);
                let same = |(a, b): (&bf16, &f32)| a.to_bits() == bf16::from_f32(*b).to_bits();
                assert!(found.iter().zip(&expected).all(same), "{what}");
            }
        }
    }
}
