//! Losses of pairs of texts with a score: the squared error of the cosine, and CoSENT (Su 2022).

use super::units::Units;
use super::{Measurements, Measures, Objective, Scope, Slopes, widths};

/// The kind of a loss of scored pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimilarityKind {
    /// (cos − y)².
    Cosine,
    /// ln(1 + Σ e^(`scale` (cos of i − cos of j))), over all pairs of records i and j of the step
    /// of which j has the higher score.
    CoSent,
}

/// A loss of two texts and their score y.
#[derive(Clone, Debug, PartialEq)]
pub struct Similarity {
    /// The kind of the loss.
    pub kind: SimilarityKind,
    /// The factor of the cosines of CoSENT.
    pub scale: f64,
    /// The loss is the sum over the first so many numbers of the embeddings. Empty: all numbers.
    pub dimensions: Vec<usize>,
}

/// ln(e^a + e^b).
fn log_add(a: f64, b: f64) -> f64 {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    if low == f64::NEG_INFINITY { high } else { high + (low - high).exp().ln_1p() }
}

/// The slope of CoSENT by each cosine, and the loss.
fn cosent(cosines: &[f64], scores: &[f32], scale: f64) -> (f64, Vec<f64>) {
    let mut order: Vec<usize> = (0..cosines.len()).collect();
    order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    let groups: Vec<&[usize]> = order.chunk_by(|&a, &b| scores[a] == scores[b]).collect();
    // Of each record i: ln of i's terms, e^(s cos i) times the sum of e^(−s cos j).
    let mut terms = vec![f64::NEG_INFINITY; cosines.len()];
    let mut above = f64::NEG_INFINITY;
    for group in groups.iter().rev() {
        group.iter().for_each(|&i| terms[i] = scale * cosines[i] + above);
        above = group.iter().fold(above, |sum, &j| log_add(sum, -scale * cosines[j]));
    }
    let loss = order.iter().fold(0.0, |sum, &i| log_add(sum, terms[i]));
    let mut slopes = vec![0.0; cosines.len()];
    let mut below = f64::NEG_INFINITY;
    for group in &groups {
        for &j in *group {
            let as_higher = (below - scale * cosines[j] - loss).exp();
            slopes[j] = scale * ((terms[j] - loss).exp() - as_higher);
        }
        below = group.iter().fold(below, |sum, &i| log_add(sum, scale * cosines[i]));
    }
    (loss, slopes)
}

impl Objective for Similarity {
    fn name(&self) -> String {
        match self.kind {
            SimilarityKind::Cosine => "cosine".into(),
            SimilarityKind::CoSent => "cosent".into(),
        }
    }

    fn sequences(&self) -> usize {
        2
    }

    fn measures(&self) -> Measures {
        Measures::Embeddings
    }

    fn scope(&self) -> Scope {
        if self.kind == SimilarityKind::CoSent { Scope::Step } else { Scope::Record }
    }

    fn needs_scores(&self) -> bool {
        true
    }

    fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
        let records = of.records();
        let mean = 1.0 / of.records_of_step() as f64;
        let place =
            |place: usize| (0..records).map(|record| 2 * record + place).collect::<Vec<_>>();
        let sides = [place(0), place(1)];
        let mut losses = vec![0.0; records];
        for width in widths(of, &self.dimensions)? {
            let [a, b] = [0, 1].map(|side| Units::of(of, &sides[side], width));
            let cosine = |record| {
                let both = a.one(record).iter().zip(b.one(record));
                both.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>()
            };
            let cosines: Vec<f64> = (0..records).map(cosine).collect();
            let scores: Vec<f32> = (0..records).map(|record| of.score(record)).collect();
            let by_cosines: Vec<f64> = match self.kind {
                SimilarityKind::Cosine => {
                    let each = cosines.iter().zip(&scores).zip(&mut losses);
                    let off = each.map(|((cosine, &score), loss)| {
                        let off = cosine - f64::from(score);
                        *loss += mean * off * off;
                        2.0 * mean * off
                    });
                    off.collect()
                }
                SimilarityKind::CoSent => {
                    let (loss, by_cosines) = cosent(&cosines, &scores, self.scale);
                    losses.iter_mut().for_each(|of_record| *of_record += mean * loss);
                    by_cosines
                }
            };
            for (own, other, side) in [(&a, &b, &sides[0]), (&b, &a, &sides[1])] {
                let mut by_units = own.zeros();
                for (record, to) in by_units.chunks_exact_mut(width).enumerate() {
                    let slope = by_cosines[record];
                    let other = other.one(record).iter();
                    to.iter_mut()
                        .zip(other)
                        .for_each(|(to, &x)| *to = (slope * f64::from(x)) as f32);
                }
                own.add(side, &by_units, slopes);
            }
        }
        Ok(losses)
    }
}
