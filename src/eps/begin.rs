//! How a model begins: random weights from a seed, block by block.

use super::Eps;
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
    pub(crate) fn randomise(&self, seed: u64) {
        for (index, (block, tensors)) in self.blocks.iter().zip(&self.tensors).enumerate() {
            let mut block = block.write().expect("nobody panicked inside");
            for (number, (tensor, range)) in tensors.iter().zip(tensor_ranges(tensors)).enumerate()
            {
                let values = &mut block.parameters[range];
                match tensor.init {
                    Init::Zeros => values.fill(0.0),
                    Init::Ones => values.fill(1.0),
                    Init::Normal(deviation) => {
                        let stream = (index as u64) << 32 | number as u64;
                        let mut draws = Draws(Draws(seed).next() ^ Draws(!stream).next());
                        for pair in values.chunks_mut(2) {
                            for (value, normal) in pair.iter_mut().zip(draws.normals()) {
                                *value = (normal * f64::from(deviation)) as f32;
                            }
                        }
                    }
                }
            }
        }
    }
}
