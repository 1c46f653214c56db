//! Initial weights: random numbers from a seed, block by block.

use l2l_actors::schedule::BlockId;

use super::{BlockRun, Eps};
use crate::error::Error;
use crate::models::{Init, Model};
use crate::random;

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
    /// Gives every tensor of a model its initial values, from a seed.
    ///
    /// # Errors
    /// The file under the EPS cannot be written.
    pub(crate) fn randomise(&self, model: &Model, seed: u64) -> Result<(), Error> {
        let blocks = (0..).map(BlockId).zip(&model.blocks);
        for (nth, (id, tensors)) in blocks.filter(|(_, all)| !all.is_empty()).enumerate() {
            self.write_with(id, BlockRun::Parameters, |parameters| {
                for (number, (tensor, range)) in tensors.ranges().enumerate() {
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
    match init {
        Init::Zeros => values.fill(0.0),
        Init::Ones => values.fill(1.0),
        Init::Uniform(bound) => {
            let mut draws = Draws(Draws(seed).next() ^ Draws(!stream).next());
            for value in values {
                *value = ((2.0 * draws.uniform() - 1.0) * f64::from(bound)) as f32;
            }
        }
        Init::Normal(deviation) => {
            let mut draws = Draws(Draws(seed).next() ^ Draws(!stream).next());
            for pair in values.chunks_mut(2) {
                for (value, normal) in pair.iter_mut().zip(draws.normals()) {
                    *value = (normal * f64::from(deviation)) as f32;
                }
            }
        }
    }
}
