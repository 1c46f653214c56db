//! The triplet loss (Schroff et al. 2015): an anchor is nearer to its positive than to its
//! negative, by a margin.

use serde::{Deserialize, Serialize};

use super::units::{LEAST, Units};
use super::{Measurements, Measures, Objective, Slopes, widths};

/// The distance of two embeddings.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Distance {
    /// The length of their difference.
    #[default]
    Euclidean,
    /// 1 − cos.
    Cosine,
}

/// max(0, d(anchor, positive) − d(anchor, negative) + margin).
#[derive(Clone, Debug, PartialEq)]
pub struct Triplet {
    /// The margin.
    pub margin: f64,
    /// d.
    pub distance: Distance,
    /// The loss is the sum over the first so many numbers of the embeddings. Empty: all numbers.
    pub dimensions: Vec<usize>,
}

/// A distance, and its derivatives by both vectors.
struct Apart {
    distance: f64,
    by_a: Vec<f64>,
    by_b: Vec<f64>,
}

fn differ(a: &[f32], b: &[f32]) -> Apart {
    let difference: Vec<f64> =
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) - f64::from(b)).collect();
    let distance = difference.iter().map(|x| x * x).sum::<f64>().sqrt();
    let by_a: Vec<f64> = difference.iter().map(|x| x / distance.max(LEAST)).collect();
    let by_b = by_a.iter().map(|x| -x).collect();
    Apart { distance, by_a, by_b }
}

fn turned(a: &[f32], b: &[f32]) -> Apart {
    let cosine: f64 = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    let less = |of: &[f32]| of.iter().map(|&x| -f64::from(x)).collect();
    Apart { distance: 1.0 - cosine, by_a: less(b), by_b: less(a) }
}

impl Objective for Triplet {
    fn name(&self) -> String {
        "triplet".into()
    }

    fn sequences(&self) -> usize {
        3
    }

    fn measures(&self) -> Measures {
        Measures::Embeddings
    }

    fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
        let mean = 1.0 / of.records_of_step() as f64;
        let mut losses = vec![0.0; of.records()];
        for width in widths(of, &self.dimensions)? {
            for (record, loss) in losses.iter_mut().enumerate() {
                let texts: Vec<usize> = of.sequences_of(record).collect();
                let units = Units::of(of, &texts, width);
                let number = |place: usize| match self.distance {
                    Distance::Euclidean => &of.embedding(texts[place])[..width],
                    Distance::Cosine => units.one(place),
                };
                let distance = match self.distance {
                    Distance::Euclidean => differ,
                    Distance::Cosine => turned,
                };
                let near = distance(number(0), number(1));
                let far = distance(number(0), number(2));
                let short = near.distance - far.distance + self.margin;
                // A number that is not finite is not left out.
                if short <= 0.0 {
                    continue;
                }
                *loss += mean * short;
                let by = |slopes: Vec<f64>| slopes.into_iter().map(|by| (mean * by) as f32);
                let of_anchor = near.by_a.iter().zip(&far.by_a).map(|(near, far)| near - far);
                let of_anchor = by(of_anchor.collect());
                let of_negative = by(far.by_b.iter().map(|by| -by).collect());
                let all: Vec<f32> = of_anchor.chain(by(near.by_b)).chain(of_negative).collect();
                match self.distance {
                    Distance::Cosine => units.add(&texts, &all, slopes),
                    Distance::Euclidean => {
                        for (&text, by) in texts.iter().zip(all.chunks_exact(width)) {
                            let to = slopes.of_embedding(text)[..width].iter_mut();
                            to.zip(by).for_each(|(to, by)| *to += by);
                        }
                    }
                }
            }
        }
        Ok(losses)
    }
}
