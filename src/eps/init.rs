//! Initial weights: random numbers from a seed, block by block. All threads draw a tensor's chunks
//! side by side, and each chunk has the numbers that one thread would draw for it.

use l2l_actors::schedule::BlockId;
use rayon::prelude::*;

use super::{BlockRun, Eps};
use crate::error::Error;
use crate::models::{Init, Model, Tensor};
use crate::random;

/// The weights of a tensor that one thread draws at once. The number is even, because normal
/// numbers are drawn in pairs.
const CHUNK: usize = 1 << 16;

/// The random numbers of one tensor. Its state is a function of the seed, the block's place in the
/// model and the tensor, so a weight does not depend on the order in which tensors are filled.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        random::next(&mut self.0)
    }

    /// A number in (0, 1], so that its logarithm is finite.
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Two numbers of the standard normal distribution (Box and Muller 1958).
    fn normals(&mut self) -> [f64; 2] {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        let angle = 2.0 * std::f64::consts::PI * self.uniform();
        [radius * angle.cos(), radius * angle.sin()]
    }
}

impl Eps {
    /// Gives tensors of a model their initial values, from a seed. `is_drawn` says which tensors.
    ///
    /// # Errors
    /// The file under the EPS cannot be written.
    pub(crate) fn randomise(
        &self,
        model: &Model,
        seed: u64,
        is_drawn: impl Fn(&Tensor) -> bool,
    ) -> Result<(), Error> {
        let blocks = (0..).map(BlockId).zip(&model.blocks);
        for (nth, (id, tensors)) in blocks.filter(|(_, all)| !all.is_empty()).enumerate() {
            if !tensors.iter().any(&is_drawn) {
                continue;
            }
            self.write_with(id, BlockRun::Parameters, |parameters| {
                let each = tensors.ranges().enumerate();
                for (number, (tensor, range)) in each.filter(|(_, (tensor, _))| is_drawn(tensor)) {
                    let stream = (nth as u64) << 32 | number as u64;
                    initialise(&mut parameters[range], tensor.init, seed, stream);
                }
            })?;
        }
        Ok(())
    }
}

/// Fills a tensor with its initial values. `stream` identifies the tensor.
fn initialise(values: &mut [f32], init: Init, seed: u64, stream: u64) {
    let start = Draws(seed).next() ^ Draws(!stream).next();
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(nth, chunk)| {
        // Each weight before this chunk has taken one draw: a pair of normal numbers takes two.
        fill(chunk, init, Draws(random::after(start, (nth * CHUNK) as u64)));
    });
}

/// Fills values one after the other.
fn fill(values: &mut [f32], init: Init, mut draws: Draws) {
    match init {
        Init::Zeros => values.fill(0.0),
        Init::Ones => values.fill(1.0),
        Init::Uniform(bound) => {
            for value in values {
                *value = ((2.0 * draws.uniform() - 1.0) * f64::from(bound)) as f32;
            }
        }
        Init::LogOfUniform => {
            for value in values {
                *value = (0.01 + draws.uniform() * 15.99).ln() as f32;
            }
        }
        Init::Normal(deviation) => {
            for pair in values.chunks_mut(2) {
                for (value, normal) in pair.iter_mut().zip(draws.normals()) {
                    *value = (normal * f64::from(deviation)) as f32;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any number of threads draws what one thread draws value after value.
    #[test]
    fn weights_that_are_drawn_side_by_side_have_the_bits_of_one_stream() {
        let inits =
            [Init::Zeros, Init::Ones, Init::Uniform(0.3), Init::LogOfUniform, Init::Normal(0.02)];
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let pool = pool.expect("threads of a test");
            for init in inits {
                for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3] {
                    let mut expected = vec![f32::NAN; len];
                    let start = Draws(7).next() ^ Draws(!5).next();
                    fill(&mut expected, init, Draws(start));
                    let mut found = vec![f32::NAN; len];
                    pool.install(|| initialise(&mut found, init, 7, 5));
                    let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&found), bits(&expected), "{init:?} {len} {threads}");
                }
            }
        }
    }
}
