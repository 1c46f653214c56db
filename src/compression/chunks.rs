//! Chunks of gradients, packed by themselves: in 8 bits, or as their largest numbers.

use super::Compression;
use crate::tensor::int8;

impl Compression {
    /// The floats of a packed chunk of `len` numbers.
    pub(crate) fn packed_floats(self, len: usize) -> usize {
        match self {
            Compression::Int8 { block } => int8::row_floats(len, block as u32),
            Compression::TopK { density } => {
                let count = largest_count(density, len);
                count + count.div_ceil(2)
            }
            Compression::PowerSgd { .. } => unreachable!("it packs matrices"),
        }
    }

    /// Packs a chunk, and leaves the error of packing in it.
    pub(crate) fn pack(self, packed: &mut [f32], chunk: &mut [f32]) {
        match self {
            Compression::Int8 { block } => {
                int8::pack(packed, chunk, block as u32);
                let row = int8::Int8Row::new(packed, chunk.len(), block as u32);
                let rounded = row.numbers(0..chunk.len());
                chunk.iter_mut().zip(rounded).for_each(|(number, rounded)| *number -= rounded);
            }
            Compression::TopK { density } => {
                let (values, places) = packed.split_at_mut(largest_count(density, chunk.len()));
                let places = &mut bytemuck::cast_slice_mut::<f32, u16>(places)[..values.len()];
                largest(places, chunk);
                for (value, &place) in values.iter_mut().zip(&*places) {
                    *value = std::mem::take(&mut chunk[usize::from(place)]);
                }
            }
            Compression::PowerSgd { .. } => unreachable!("it packs matrices"),
        }
    }

    /// Unpacks a chunk.
    pub(crate) fn unpack(self, chunk: &mut [f32], packed: &[f32]) {
        match self {
            Compression::Int8 { block } => int8::unpack(chunk, packed, block as u32),
            Compression::TopK { density } => {
                let (values, places) = packed.split_at(largest_count(density, chunk.len()));
                let places = &bytemuck::cast_slice::<f32, u16>(places)[..values.len()];
                chunk.fill(0.0);
                for (&value, &place) in values.iter().zip(places) {
                    chunk[usize::from(place)] = value;
                }
            }
            Compression::PowerSgd { .. } => unreachable!("it packs matrices"),
        }
    }
}

/// The number of a chunk's numbers that are kept.
fn largest_count(density: f64, len: usize) -> usize {
    ((density * len as f64).ceil() as usize).clamp(1, len.max(1))
}

/// Finds the places of the numbers with the largest magnitude, in ascending order. Of equal numbers
/// the first are kept. NaN counts as the largest.
fn largest(places: &mut [u16], numbers: &[f32]) {
    let mut all: Vec<u16> = (0..numbers.len() as u16).collect();
    let magnitude =
        |&place: &u16| (std::cmp::Reverse(numbers[usize::from(place)].abs().to_bits()), place);
    if places.len() < all.len() {
        all.select_nth_unstable_by_key(places.len(), magnitude);
    }
    places.copy_from_slice(&all[..places.len()]);
    places.sort_unstable();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The packed numbers and their errors add up to the gradient.
    #[test]
    fn nothing_is_lost_between_packed_and_error() {
        let numbers: Vec<f32> =
            (0..1000).map(|at| (at as f32 * 1.7).sin() * 2_f32.powi(at % 7)).collect();
        for kind in [
            Compression::Int8 { block: 64 },
            Compression::TopK { density: 0.05 },
            Compression::TopK { density: 1e-9 },
            Compression::TopK { density: 0.5 },
        ] {
            let mut error = numbers.clone();
            let mut packed = vec![f32::NAN; kind.packed_floats(1000)];
            kind.pack(&mut packed, &mut error);
            let mut back = vec![f32::NAN; 1000];
            kind.unpack(&mut back, &packed);
            for ((number, back), error) in numbers.iter().zip(&back).zip(&error) {
                assert!((number - (back + error)).abs() <= 1e-6 * number.abs(), "{kind:?}");
            }
            if let Compression::TopK { density } = kind {
                let kept = (1000.0 * density).ceil() as usize;
                assert_eq!(back.iter().filter(|number| **number != 0.0).count(), kept);
                let least =
                    back.iter().map(|x| x.abs()).filter(|x| *x > 0.0).fold(f32::MAX, f32::min);
                assert!(error.iter().all(|error| error.abs() <= least));
            }
        }
    }

    #[test]
    fn of_equals_the_first_are_kept() {
        let kind = Compression::TopK { density: 0.5 };
        let mut packed = vec![0.0; kind.packed_floats(5)];
        let mut back = [0.0; 5];
        kind.pack(&mut packed, &mut [1.0, -1.0, 1.0, 1.0, -1.0]);
        kind.unpack(&mut back, &packed);
        assert_eq!(back, [1.0, -1.0, 1.0, 0.0, 0.0]);
        kind.pack(&mut packed, &mut [1.0, f32::NAN, 1.0, 2.0, -1.0]);
        kind.unpack(&mut back, &packed);
        assert!(back[1].is_nan() && back[3] == 2.0, "who measures it sees it");
    }
}
