//! AdamW with moments in bf16, rounded at random so that small changes are not lost on average.

use half::bf16;
use rayon::prelude::*;

use super::elementwise::{Chunk, ElementRule};
use super::rounding::{key, round};
use super::{AdamW, CHUNK, Masters, RuleState, StateDtype, Update, UpdateRule};
use crate::models::Tensor;
use crate::random;

/// AdamW whose two moments take two bytes a parameter each. The tiles of a large table of the
/// vocabulary draw the same numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamWBf16 {
    /// The hyperparameters.
    pub adamw: AdamW,
    /// The seed of the random numbers.
    pub seed: u64,
}

/// Elements that are decoded at once.
const DECODED: usize = 256;

/// The random numbers of a chunk.
struct Draws {
    /// The key of the update of the tensor.
    key: u64,
    /// The place of the chunk's first element in its tensor.
    first: usize,
}

#[inline(always)]
fn update_chunk(
    masters: Masters<'_>,
    [m, v]: [&mut [bf16]; 2],
    gradient: &[f32],
    rule: impl ElementRule<2>,
    draws: Draws,
) {
    let pieces = masters.chunks(DECODED).into_iter();
    let moments = m.chunks_mut(DECODED).zip(v.chunks_mut(DECODED));
    let pieces = pieces.zip(moments).zip(gradient.chunks(DECODED)).enumerate();
    for (nth, ((masters, (m, v)), gradient)) in pieces {
        let mut first_moment = [0.0; DECODED];
        let mut second_moment = [0.0; DECODED];
        let decode = |to: &mut [f32], from: &[bf16]| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32());
        };
        decode(&mut first_moment, m);
        decode(&mut second_moment, v);
        let states = [&mut first_moment[..], &mut second_moment[..]];
        Chunk { masters, states, gradient, rule }.run();
        let moments = first_moment.iter().zip(&second_moment);
        for (i, ((m, v), (of_m, of_v))) in m.iter_mut().zip(v).zip(moments).enumerate() {
            let random = random::keyed(draws.key, (draws.first + nth * DECODED + i) as u64);
            *m = round(*of_m, random);
            *v = round(*of_v, random >> 16);
        }
    }
}

impl UpdateRule for AdamWBf16 {
    fn state_layout(&self, tensor: &Tensor) -> Vec<RuleState> {
        let state = |name| RuleState { dtype: StateDtype::Bf16, ..RuleState::like(name, tensor) };
        vec![state("exp_avg"), state("exp_avg_sq")]
    }

    fn apply(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let [m, v] = states else { unreachable!("two moments") };
        let len = gradient.len();
        let key = key(tensor, Update { seed: self.seed, ..update }, 0);
        let m = &mut bytemuck::cast_slice_mut::<f32, bf16>(m)[..len];
        let v = &mut bytemuck::cast_slice_mut::<f32, bf16>(v)[..len];
        let rule = self.adamw.rule(tensor, update);
        let chunks = masters.chunks(CHUNK).into_par_iter();
        let moments = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK));
        chunks.zip(moments).zip(gradient.par_chunks(CHUNK)).enumerate().for_each(
            |(nth, ((masters, (m, v)), gradient))| {
                update.level.run(
                    #[inline(always)]
                    || {
                        update_chunk(
                            masters,
                            [m, v],
                            gradient,
                            rule,
                            Draws { key, first: nth * CHUNK },
                        )
                    },
                );
            },
        );
    }

    fn joins_masters(&self) -> bool {
        false
    }
}
