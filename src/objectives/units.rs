//! Embeddings scaled to length 1.

use super::{Measurements, Slopes};

/// The least length by which an embedding is divided.
pub(crate) const LEAST: f64 = 1e-12;

/// The length of an embedding.
pub(crate) fn length(of: &[f32]) -> f64 {
    of.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

/// Adds to the slopes by an embedding what follows from those by its unit vector, or by all of it
/// after it was scaled to length 1.
pub(crate) fn add_unscaled(to: &mut [f32], unit: &[f32], length: f64, by_unit: &[f32]) {
    let along: f64 = unit.iter().zip(by_unit).map(|(&u, &by)| f64::from(u) * f64::from(by)).sum();
    // A shorter one is divided by a constant.
    let along = if length > LEAST { along } else { 0.0 };
    let length = length.max(LEAST);
    for ((to, &unit), &by_unit) in to.iter_mut().zip(unit).zip(by_unit) {
        *to += ((f64::from(by_unit) - f64::from(unit) * along) / length) as f32;
    }
}

/// The unit vectors of some sequences.
pub(super) struct Units {
    /// The first so many numbers of each embedding.
    pub(super) width: usize,
    /// (sequences, width).
    pub(super) unit: Vec<f32>,
    /// The length of each before.
    lengths: Vec<f64>,
}

impl Units {
    pub(super) fn of(of: &Measurements<'_>, sequences: &[usize], width: usize) -> Units {
        let mut unit = Vec::with_capacity(sequences.len() * width);
        let mut lengths = Vec::with_capacity(sequences.len());
        for &sequence in sequences {
            let embedding = &of.embedding(sequence)[..width];
            let length = length(embedding);
            unit.extend(embedding.iter().map(|&x| (f64::from(x) / length.max(LEAST)) as f32));
            lengths.push(length);
        }
        Units { width, unit, lengths }
    }

    pub(super) fn count(&self) -> usize {
        self.lengths.len()
    }

    pub(super) fn one(&self, nth: usize) -> &[f32] {
        &self.unit[nth * self.width..(nth + 1) * self.width]
    }

    /// Slopes by these vectors, which are 0.
    pub(super) fn zeros(&self) -> Vec<f32> {
        vec![0.0; self.unit.len()]
    }

    /// Adds slopes by these vectors to the slopes by the embeddings.
    pub(super) fn add(&self, sequences: &[usize], by_units: &[f32], slopes: &mut Slopes<'_>) {
        for (nth, &sequence) in sequences.iter().enumerate() {
            let by_unit = &by_units[nth * self.width..(nth + 1) * self.width];
            let to = &mut slopes.of_embedding(sequence)[..self.width];
            add_unscaled(to, self.one(nth), self.lengths[nth], by_unit);
        }
    }
}
