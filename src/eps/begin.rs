//! How a model begins: random weights from a seed, block by block.

use l2l_actors::schedule::BlockId;

use super::{Eps, Which};
use crate::error::Error;
use crate::models::{Init, tensor_ranges};
use crate::random;

/// A small counter-based generator: weights depend on seed, block, tensor and place alone.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        random::next(&mut self.0)
    }

    /// In (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Two standard normals (Box and Muller 1958).
    fn normals(&mut self) -> [f64; 2] {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        let angle = 2.0 * std::f64::consts::PI * self.uniform();
        [radius * angle.cos(), radius * angle.sin()]
    }
}

impl Eps {
    /// Fills every block from a seed.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn randomise(&self, seed: u64) -> Result<(), Error> {
        for (index, tensors) in self.tensors.iter().enumerate() {
            self.write_with(BlockId(index as u32), Which::Parameter, |parameters| {
                for (number, (tensor, range)) in
                    tensors.iter().zip(tensor_ranges(tensors)).enumerate()
                {
                    let stream = (index as u64) << 32 | number as u64;
                    begin(&mut parameters[range], tensor.init, seed, stream);
                }
            })?;
        }
        Ok(())
    }
}

/// One tensor's numbers.
fn begin(values: &mut [f32], init: Init, seed: u64, stream: u64) {
    match init {
        Init::Zeros => values.fill(0.0),
        Init::Ones => values.fill(1.0),
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
