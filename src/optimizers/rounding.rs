//! Rounding to bf16 at random, so that small changes are not lost on average.
//!
//! The random numbers are a function of a seed, the update, the tensor's name and the element, as
//! dropout's are of theirs. So a run that resumes draws the same ones, on any number of threads.
//! The tiles of a large table of the vocabulary draw the same numbers.

use half::bf16;
use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use super::{CHUNK, Update};
use crate::models::Tensor;
use crate::random;

/// The key of the random numbers of one update of a tensor. Each use has a `salt` of its own.
pub(super) fn key(tensor: &Tensor, update: Update, salt: u64) -> u64 {
    let seed = update.seed ^ salt;
    random::keyed(random::keyed(seed, update.step), xxh3_64(tensor.name.as_bytes()))
}

/// Rounds to one of the two bf16 beside a number, to each as often as the other is far away. 16
/// random bits decide.
#[inline(always)]
pub(super) fn round(value: f32, random: u64) -> bf16 {
    let bits = value.to_bits().wrapping_add(random as u32 & 0xffff);
    if value.is_finite() { bf16::from_bits((bits >> 16) as u16) } else { bf16::from_f32(value) }
}

pub(super) fn round_at_random(to: &mut [bf16], from: &[f32], key: u64) {
    let chunks = to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).enumerate();
    chunks.for_each(|(nth, (to, from))| {
        for (i, (to, from)) in to.iter_mut().zip(from).enumerate() {
            *to = round(*from, random::keyed(key, (nth * CHUNK + i) as u64));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On average a rounded number is the number, also where rounding to nearest never moves.
    #[test]
    fn rounding_is_fair() {
        for value in [1.0_f32 + 1e-3, -2.345_67, 1e-20, 0.0, 1.0] {
            let draws = 1 << 16;
            let sum: f64 =
                (0..draws).map(|at| f64::from(round(value, random::keyed(7, at)).to_f32())).sum();
            let error = sum / draws as f64 - f64::from(value);
            assert!(error.abs() <= 5e-5 * f64::from(value.abs()), "{value}: {error}");
        }
        assert!(round(f32::INFINITY, 0xffff).is_infinite() && round(f32::NAN, 0xffff).is_nan());
    }
}
