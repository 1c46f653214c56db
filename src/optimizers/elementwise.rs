//! Rules that update each parameter by itself: the walk over a tensor's elements, in parallel.

use rayon::prelude::*;

use super::{CHUNK, Masters, SplitMasters, Update};

/// A function from a parameter, its `N` states and its gradient to the new parameter.
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
                tensor: &$crate::models::Tensor,
                masters: $crate::optimizers::Masters<'_>,
                states: &mut [&mut [f32]],
                gradient: &[f32],
                update: $crate::optimizers::Update,
            ) {
                let rule = self.rule(tensor, update);
                $crate::optimizers::elementwise::update_each(
                    masters, states, gradient, update, rule,
                );
            }

            fn joins_masters(&self) -> bool {
                false
            }
        }
    };
}
pub(super) use elementwise_rule;

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
            Masters::F32(masters) => {
                for (i, (p, g)) in masters[..len].iter_mut().zip(gradient).enumerate() {
                    *p = rule(*p, states.each_mut().map(|state| &mut state[i]), *g);
                }
            }
            // Joined and split in registers: a pass of their own would read all memory again.
            Masters::Split { halves: SplitMasters { published, remainder }, .. } => {
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

/// Updates a tensor by a function from a parameter, its `N` states and its gradient to the new
/// parameter.
pub(super) fn update_each<const N: usize, F: ElementRule<N>>(
    masters: Masters<'_>,
    states: &mut [&mut [f32]],
    gradient: &[f32],
    update: Update,
    rule: F,
) {
    let states: &mut [&mut [f32]; N] = states.try_into().expect("as many states as declared");
    let mut states = states.each_mut().map(|state| state.chunks_mut(CHUNK));
    let pieces = masters.chunks(CHUNK).into_iter().zip(gradient.chunks(CHUNK));
    let chunk = |(masters, gradient)| {
        let next = states.each_mut().map(|state| state.next().expect("a float of each parameter"));
        Chunk { masters, states: next, gradient, rule }
    };
    let chunks: Vec<Chunk<'_, N, F>> = pieces.map(chunk).collect();
    chunks.into_par_iter().for_each(|chunk| {
        update.level.run(
            #[inline(always)]
            || chunk.run(),
        );
    });
}
