//! The master weights of a tensor, as an update rule sees them: f32, whole or in two halves.
//!
//! A device that computes in bf16 is sent the upper halves without a conversion. Both halves
//! together give the f32 back to the bit, and take no more bytes. This works because the upper half
//! is rounded to nearest with ties away from zero: then the remainder is a signed 16-bit number.
//! (With ties to even it would need one bit more.) A master that is NaN is given back as NaN,
//! perhaps with other bits.

use std::ops::{Deref, DerefMut};

use half::bf16;
use rayon::prelude::*;

use super::CHUNK;

/// The masters of a tensor, or of a chunk of it.
#[derive(Debug)]
pub enum Masters<'a> {
    /// As f32.
    F32(&'a mut [f32]),
    /// As f32 in two halves.
    Split {
        /// The halves.
        halves: SplitMasters<'a>,
        /// The memory in which [`join`](Masters::join) puts the halves together. It may be empty
        /// for a rule that does not [join masters](super::UpdateRule::joins_masters).
        room: &'a mut [f32],
    },
}

impl<'a> Masters<'a> {
    /// All masters as one slice of f32. Split masters are joined now, and split again when the
    /// slice is dropped.
    ///
    /// # Panics
    /// The rule said that it does not [join masters](super::UpdateRule::joins_masters).
    pub fn join(self) -> Joined<'a> {
        match self {
            Masters::F32(values) => Joined { values, halves: None },
            Masters::Split { halves, room } => {
                let values = room.get_mut(..halves.published.len());
                let values =
                    values.expect("UpdateRule::joins_masters says whether masters are joined");
                halves.join_to(values);
                Joined { values, halves: Some(halves) }
            }
        }
    }

    /// The same masters for a shorter time.
    pub fn reborrow(&mut self) -> Masters<'_> {
        match self {
            Masters::F32(values) => Masters::F32(values),
            Masters::Split { halves: SplitMasters { published, remainder }, room } => {
                Masters::Split { halves: SplitMasters { published, remainder }, room }
            }
        }
    }

    /// The masters in chunks of `size`, without room to join them.
    pub(super) fn chunks(self, size: usize) -> Vec<Masters<'a>> {
        match self {
            Masters::F32(values) => values.chunks_mut(size).map(Masters::F32).collect(),
            Masters::Split { halves: SplitMasters { published, remainder }, .. } => {
                let halves = published.chunks_mut(size).zip(remainder.chunks_mut(size));
                let chunk = |(published, remainder)| Masters::Split {
                    halves: SplitMasters { published, remainder },
                    room: &mut [],
                };
                halves.map(chunk).collect()
            }
        }
    }
}

impl<'a> From<&'a mut [f32]> for Masters<'a> {
    fn from(masters: &'a mut [f32]) -> Masters<'a> {
        Masters::F32(masters)
    }
}

/// Masters as one slice of f32: see [`Masters::join`].
#[derive(Debug)]
pub struct Joined<'a> {
    values: &'a mut [f32],
    /// The halves to which the values are split at the end.
    halves: Option<SplitMasters<'a>>,
}

impl Deref for Joined<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.values
    }
}

impl DerefMut for Joined<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.values
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        if let Some(halves) = &mut self.halves {
            halves.split_from(self.values);
        }
    }
}

/// Masters in two halves.
#[derive(Debug)]
pub struct SplitMasters<'a> {
    /// The published half of each master.
    pub published: &'a mut [bf16],
    /// The remainder of each master: its bits less those of the published half, as an integer.
    pub remainder: &'a mut [i16],
}

impl<'a> SplitMasters<'a> {
    /// Splits a master into its published half and its remainder.
    #[inline(always)]
    pub fn split(master: f32) -> (bf16, i16) {
        let bits = master.to_bits();
        if master.is_nan() {
            return (bf16::NAN, 0);
        }
        (bf16::from_bits((bits.wrapping_add(0x8000) >> 16) as u16), bits as i16)
    }

    /// Joins a published half and its remainder into the master.
    #[inline(always)]
    pub fn join(published: bf16, remainder: i16) -> f32 {
        let upper = u32::from(published.to_bits()) << 16;
        f32::from_bits(upper.wrapping_add_signed(i32::from(remainder)))
    }

    /// The split masters stored in `place`, as many as it has floats: first all published halves,
    /// then all remainders. The number must be even.
    pub fn of(place: &'a mut [f32]) -> SplitMasters<'a> {
        let (published, remainder) = place.split_at_mut(place.len() / 2);
        let published = bytemuck::cast_slice_mut(published);
        SplitMasters { published, remainder: bytemuck::cast_slice_mut(remainder) }
    }

    /// Joins all masters into `masters`, in parallel.
    pub fn join_to(&self, masters: &mut [f32]) {
        let halves = self.published.par_chunks(CHUNK).zip(self.remainder.par_chunks(CHUNK));
        masters.par_chunks_mut(CHUNK).zip(halves).for_each(|(masters, (published, remainder))| {
            for ((master, &published), &remainder) in
                masters.iter_mut().zip(published).zip(remainder)
            {
                *master = SplitMasters::join(published, remainder);
            }
        });
    }

    /// Replaces all masters by `masters`, split in parallel.
    pub fn split_from(&mut self, masters: &[f32]) {
        let halves = self.published.par_chunks_mut(CHUNK).zip(self.remainder.par_chunks_mut(CHUNK));
        masters.par_chunks(CHUNK).zip(halves).for_each(|(masters, (published, remainder))| {
            for ((&master, published), remainder) in masters.iter().zip(published).zip(remainder) {
                (*published, *remainder) = SplitMasters::split(master);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    /// Tests every lower half with some upper halves: signs, zeros, subnormals, infinities.
    #[test]
    fn joined_masters_are_exact_and_the_published_half_is_the_nearest_bf16() {
        let mut state = 5;
        let edges = [0, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x8000, 0xBF80, 0xFF7F];
        let some = (0..60).map(|_| (random::next(&mut state) >> 48) as u32);
        for upper in edges.into_iter().chain(some) {
            for lower in 0..=u32::from(u16::MAX) {
                let master = f32::from_bits(upper << 16 | lower);
                let (published, remainder) = SplitMasters::split(master);
                let back = SplitMasters::join(published, remainder);
                assert!(back.to_bits() == master.to_bits() || back.is_nan() && master.is_nan());
                if !master.is_finite() || published.is_infinite() {
                    continue;
                }
                let error =
                    |bits: u16| (f64::from(bf16::from_bits(bits)) - f64::from(master)).abs();
                let bits = published.to_bits();
                for other in [bits.wrapping_sub(1), bits.wrapping_add(1)] {
                    let neighbour = bf16::from_bits(other);
                    let is_neighbour =
                        neighbour.is_finite() && neighbour.is_sign_negative() == (upper >> 15 == 1);
                    assert!(!is_neighbour || error(bits) <= error(other), "{master:e}");
                }
            }
        }
    }

    #[test]
    fn a_block_is_the_same_after_splitting_and_joining() {
        let masters: Vec<f32> = (0..40_000).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut place = vec![f32::NAN; masters.len()];
        let mut halves = SplitMasters::of(&mut place);
        halves.split_from(&masters);
        let mut back = vec![0.0; masters.len()];
        halves.join_to(&mut back);
        assert_eq!(back, masters);
        assert!(
            SplitMasters::of(&mut place).published.iter().zip(&masters).all(|(bf, x)| (bf
                .to_f32()
                - x)
                .abs()
                <= x.abs() / 256.0)
        );
    }
}
