//! Rules that update each parameter by itself: the walk over the tensors of a block, in parallel.

use half::bf16;
use rayon::prelude::*;

use super::{CHUNK, SplitMasters, Update};
use crate::models::{Tensor, tensor_ranges};

/// From a parameter, its `N` states and its gradient to the new parameter.
pub(super) trait ElementRule<const N: usize>:
    Fn(f32, [&mut f32; N], f32) -> f32 + Copy + Send
{
}

impl<const N: usize, F: Fn(f32, [&mut f32; N], f32) -> f32 + Copy + Send> ElementRule<N> for F {}

/// Makes an [`UpdateRule`](super::UpdateRule) of a type whose method `rule` gives the
/// [`ElementRule`] of a tensor. Its states have these names.
macro_rules! elementwise_rule {
    ($rule:ty, [$($state:literal),*]) => {
        impl $crate::optimizers::UpdateRule for $rule {
            fn states(&self) -> usize {
                const NAMES: &[&str] = &[$($state),*];
                NAMES.len()
            }

            fn state_layout(
                &self,
                _tensor: &$crate::models::Tensor,
            ) -> Vec<$crate::optimizers::RuleState> {
                vec![$($crate::optimizers::RuleState::like($state, _tensor)),*]
            }

            fn is_elementwise(&self) -> bool {
                true
            }

            fn apply(
                &self,
                tensors: &[$crate::models::Tensor],
                parameters: &mut [f32],
                states: &mut [&mut [f32]],
                gradient: &[f32],
                update: $crate::optimizers::Update,
            ) {
                let rule = |tensor: &_| self.rule(tensor, update);
                $crate::optimizers::elementwise::update_each(
                    tensors, parameters, states, gradient, update, rule,
                );
            }

            fn apply_split(
                &self,
                tensors: &[$crate::models::Tensor],
                split: &mut $crate::optimizers::SplitMasters<'_>,
                states: &mut [&mut [f32]],
                gradient: &[f32],
                update: $crate::optimizers::Update,
                _unpacked: &mut [f32],
            ) {
                let rule = |tensor: &_| self.rule(tensor, update);
                $crate::optimizers::elementwise::update_each(
                    tensors, split, states, gradient, update, rule,
                );
            }

            fn unpacked_len(&self, _parameters: usize) -> usize {
                0
            }
        }
    };
}
pub(super) use elementwise_rule;

/// The masters of a block, or of a chunk of it.
pub(super) enum Masters<'a> {
    Plain(&'a mut [f32]),
    Split { published: &'a mut [bf16], remainder: &'a mut [i16] },
}

impl<'a> From<&'a mut [f32]> for Masters<'a> {
    fn from(masters: &'a mut [f32]) -> Masters<'a> {
        Masters::Plain(masters)
    }
}

impl<'a> From<&'a mut SplitMasters<'_>> for Masters<'a> {
    fn from(masters: &'a mut SplitMasters<'_>) -> Masters<'a> {
        Masters::Split { published: masters.published, remainder: masters.remainder }
    }
}

impl<'a> Masters<'a> {
    /// The first elements, as many as `len`, and the others.
    pub(super) fn split_at(self, len: usize) -> (Masters<'a>, Masters<'a>) {
        match self {
            Masters::Plain(all) => {
                let (first, others) = all.split_at_mut(len);
                (Masters::Plain(first), Masters::Plain(others))
            }
            Masters::Split { published, remainder } => {
                let (published, others) = published.split_at_mut(len);
                let (remainder, remote_bytes) = remainder.split_at_mut(len);
                let first = Masters::Split { published, remainder };
                (first, Masters::Split { published: others, remainder: remote_bytes })
            }
        }
    }
}

impl<'a> Masters<'a> {
    /// Pieces of `size` elements, of as many as `len`.
    pub(super) fn chunks(self, len: usize, size: usize) -> Vec<Masters<'a>> {
        let (mut rest, mut pieces) = (self, Vec::with_capacity(len.div_ceil(size)));
        for start in (0..len).step_by(size) {
            let (piece, behind) = rest.split_at(size.min(len - start));
            pieces.push(piece);
            rest = behind;
        }
        pieces
    }
}

/// One task: a chunk of a tensor.
pub(super) struct Chunk<'a, const N: usize, F> {
    pub(super) masters: Masters<'a>,
    pub(super) states: [&'a mut [f32]; N],
    pub(super) gradient: &'a [f32],
    pub(super) rule: F,
}

impl<const N: usize, F: ElementRule<N>> Chunk<'_, N, F> {
    #[inline(always)]
    pub(super) fn run(self) {
        let Chunk { masters, mut states, gradient, rule } = self;
        let len = gradient.len();
        let mut states = states.each_mut().map(|state| &mut state[..len]);
        match masters {
            Masters::Plain(masters) => {
                for (i, (p, g)) in masters[..len].iter_mut().zip(gradient).enumerate() {
                    *p = rule(*p, states.each_mut().map(|state| &mut state[i]), *g);
                }
            }
            Masters::Split { published, remainder } => {
                let halves = published[..len].iter_mut().zip(&mut remainder[..len]);
                for (i, ((published, remainder), g)) in halves.zip(gradient).enumerate() {
                    let p = SplitMasters::join(*published, *remainder);
                    let p = rule(p, states.each_mut().map(|state| &mut state[i]), *g);
                    (*published, *remainder) = SplitMasters::split(p);
                }
            }
        }
    }
}

/// Updates a block: `rule_of` gives for a tensor the function from a parameter, its `N` states and
/// its gradient to the new parameter.
pub(super) fn update_each<'a, const N: usize, F: ElementRule<N>>(
    tensors: &[Tensor],
    masters: impl Into<Masters<'a>>,
    states: &mut [&mut [f32]],
    gradient: &[f32],
    update: Update,
    rule_of: impl Fn(&Tensor) -> F,
) {
    let states: &mut [&mut [f32]; N] = states.try_into().expect("as many states as declared");
    let mut states = states.each_mut().map(|state| &mut **state);
    let (mut masters, mut end, mut chunks) = (masters.into(), 0, Vec::new());
    for (tensor, range) in tensors.iter().zip(tensor_ranges(tensors)) {
        let rule = rule_of(tensor);
        let (_, behind) = masters.split_at(range.start - end); // padding stays as it is
        masters = behind;
        states = states.map(|state| state.split_at_mut(range.start - end).1);
        for gradient in gradient[range.clone()].chunks(CHUNK) {
            let (of_chunk, behind) = masters.split_at(gradient.len());
            masters = behind;
            let pairs = states.map(|state| state.split_at_mut(gradient.len()));
            let mut others = Vec::with_capacity(N);
            let of_states = pairs.map(|(of_chunk, behind)| {
                others.push(behind);
                of_chunk
            });
            states = others.try_into().expect("one of each state");
            chunks.push(Chunk { masters: of_chunk, states: of_states, gradient, rule });
        }
        end = range.end;
    }
    chunks.into_par_iter().for_each(|chunk| {
        update.level.run(
            #[inline(always)]
            || chunk.run(),
        );
    });
}
