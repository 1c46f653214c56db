//! Masters in two planes of 16 bits: what is published of each, a brain float, and what that leaves of
//! the f32. A device that computes in bf16 is sent the one as it lies there; both give the master back,
//! to the bit, in as many bytes.
//!
//! That holds because what is published is rounded to nearest, ties away from zero: then the rest of
//! the bits is a number of 16 bits with a sign. (With ties to even it would need one more.) A master
//! that is not a number comes back as not a number, of other bits perhaps.

use half::bf16;
use rayon::prelude::*;

use super::CHUNK;

/// The planes of a block.
#[derive(Debug)]
pub struct Planes<'a> {
    /// What is published.
    pub published: &'a mut [bf16],
    /// What that leaves.
    pub rest: &'a mut [i16],
}

impl<'a> Planes<'a> {
    /// What is published of a master, and what that leaves.
    #[inline(always)]
    pub fn split(master: f32) -> (bf16, i16) {
        let bits = master.to_bits();
        let published = (bits.wrapping_add(0x8000) >> 16) as u16;
        let (published, rest) =
            if master.is_nan() { (bf16::NAN.to_bits(), 0) } else { (published, bits as i16) };
        (bf16::from_bits(published), rest)
    }

    /// The master.
    #[inline(always)]
    pub fn join(published: bf16, rest: i16) -> f32 {
        let upper = u32::from(published.to_bits()) << 16;
        f32::from_bits(upper.wrapping_add_signed(i32::from(rest)))
    }

    /// Those that fill the place of as many floats, an even number of them.
    pub fn of(place: &'a mut [f32]) -> Planes<'a> {
        let (published, rest) = place.split_at_mut(place.len() / 2);
        let (published, rest) =
            (bytemuck::cast_slice_mut(published), bytemuck::cast_slice_mut(rest));
        Planes { published, rest }
    }

    /// The masters, one by one: for who has no pool of threads.
    pub fn masters(&self) -> impl Iterator<Item = f32> {
        let planes = self.published.iter().zip(self.rest.iter());
        planes.map(|(&published, &rest)| Planes::join(published, rest))
    }

    /// Puts the masters together.
    pub fn join_to(&self, masters: &mut [f32]) {
        let planes = self.published.par_chunks(CHUNK).zip(self.rest.par_chunks(CHUNK));
        masters.par_chunks_mut(CHUNK).zip(planes).for_each(|(masters, (published, rest))| {
            for ((master, &published), &rest) in masters.iter_mut().zip(published).zip(rest) {
                *master = Planes::join(published, rest);
            }
        });
    }

    /// Takes them apart.
    pub fn split_from(&mut self, masters: &[f32]) {
        let planes = self.published.par_chunks_mut(CHUNK).zip(self.rest.par_chunks_mut(CHUNK));
        masters.par_chunks(CHUNK).zip(planes).for_each(|(masters, (published, rest))| {
            for ((&master, published), rest) in masters.iter().zip(published).zip(rest) {
                (*published, *rest) = Planes::split(master);
            }
        });
    }
}

/// What is published of each master, in the place of a block in planes that may only be read.
pub(crate) fn published(place: &[f32]) -> &[bf16] {
    bytemuck::cast_slice(&place[..place.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    /// Every pattern of the lower half with some of the upper half: signs, zeros, subnormals, infinities.
    #[test]
    fn masters_come_back_and_what_is_published_is_nearest() {
        let mut state = 5;
        let edges = [0, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x8000, 0xBF80, 0xFF7F];
        let some = (0..60).map(|_| (random::next(&mut state) >> 48) as u32);
        for upper in edges.into_iter().chain(some) {
            for lower in 0..=u32::from(u16::MAX) {
                let master = f32::from_bits(upper << 16 | lower);
                let (published, rest) = Planes::split(master);
                let back = Planes::join(published, rest);
                assert!(back.to_bits() == master.to_bits() || back.is_nan() && master.is_nan());
                if !master.is_finite() || published.is_infinite() {
                    continue;
                }
                let off = |bits: u16| (f64::from(bf16::from_bits(bits)) - f64::from(master)).abs();
                let (bits, here) = (published.to_bits(), off(published.to_bits()));
                for other in [bits.wrapping_sub(1), bits.wrapping_add(1)] {
                    let beside = bf16::from_bits(other);
                    let is_beside =
                        beside.is_finite() && beside.is_sign_negative() == (upper >> 15 == 1);
                    assert!(!is_beside || here <= off(other), "{master:e}");
                }
            }
        }
    }

    #[test]
    fn a_block_in_planes_is_the_block() {
        let masters: Vec<f32> = (0..40_000).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut place = vec![f32::NAN; masters.len()];
        let mut planes = Planes::of(&mut place);
        planes.split_from(&masters);
        let mut back = vec![0.0; masters.len()];
        planes.join_to(&mut back);
        assert_eq!(back, masters);
        assert!(
            published(&place)
                .iter()
                .zip(&masters)
                .all(|(bf, x)| (bf.to_f32() - x).abs() <= x.abs() / 256.0)
        );
    }
}
