//! How well embeddings find texts: the place of each anchor's positive among all texts that are
//! searched.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use rayon::prelude::*;

use crate::product::{Matrix, Product, Start};
use crate::simd::Level;

/// Anchors whose texts are found at a time.
const ANCHORS: usize = 256;

/// The places of the anchors' positives. The positives and negatives of all records are searched,
/// each text once, by the cosine of its embedding with the anchor's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Retrieval {
    /// Unit vectors. (anchors, width).
    anchors: Vec<f32>,
    /// Of each anchor, its positive among the texts.
    positives: Vec<usize>,
    /// Unit vectors. (texts, width).
    texts: Vec<f32>,
    /// The place of each text, by a hash of its tokens.
    known: HashMap<u64, usize>,
    /// Of each anchor: 1 for a positive that is nearer than all other texts.
    places: Vec<usize>,
}

/// A number for a text, which equal texts share.
pub(super) fn number_of(tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    tokens.hash(&mut hasher);
    hasher.finish()
}

fn unit(embedding: &[f32]) -> impl Iterator<Item = f32> {
    let length = embedding.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    let length = length.max(crate::objectives::LEAST);
    embedding.iter().map(move |&x| (f64::from(x) / length) as f32)
}

/// The cosine of two embeddings.
pub(super) fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let both = unit(a).zip(unit(b));
    both.map(|(a, b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32
}

impl Retrieval {
    /// Takes the embeddings of records of `each` texts: an anchor, its positive, negatives.
    /// `numbers` has that of each text.
    pub(super) fn take(&mut self, embeddings: &[f32], numbers: &[u64], each: usize) {
        let width = embeddings.len() / numbers.len().max(1);
        let all: Vec<&[f32]> = embeddings.chunks_exact(width.max(1)).collect();
        for (record, numbers) in all.chunks_exact(each).zip(numbers.chunks_exact(each)) {
            self.anchors.extend(unit(record[0]));
            for (nth, (embedding, number)) in record.iter().zip(numbers).enumerate().skip(1) {
                let next = self.known.len();
                let at = *self.known.entry(*number).or_insert(next);
                if at == next {
                    self.texts.extend(unit(embedding));
                }
                if nth == 1 {
                    self.positives.push(at);
                }
            }
        }
    }

    /// Finds the places of all positives.
    pub(super) fn find(&mut self) {
        let count = self.known.len();
        if count == 0 {
            return;
        }
        let width = self.texts.len() / count;
        let mut scores = vec![0.0; ANCHORS.min(self.positives.len()) * count];
        let blocks = self.anchors.chunks(ANCHORS * width).zip(self.positives.chunks(ANCHORS));
        for (anchors, positives) in blocks {
            let rows = positives.len();
            let a = Matrix::rows(anchors, width);
            let b = Matrix::rows(&self.texts, width).transposed();
            Product { a, b, rows, depth: width, columns: count, start: Start::Zero }
                .run(Level::best(), &mut scores[..rows * count]);
            let each = scores[..rows * count].par_chunks(count).zip(positives);
            // Texts that are as near come first: embeddings that are all alike find nothing.
            let place = |(scores, &own): (&[f32], &usize)| {
                let is_before = |&(at, score): &(usize, &f32)| at != own && *score >= scores[own];
                1 + scores.iter().enumerate().filter(is_before).count()
            };
            self.places.par_extend(each.map(place));
        }
    }

    fn mean(&self, of: impl Fn(usize) -> f64) -> f64 {
        let sum: f64 = self.places.iter().map(|&place| of(place)).sum();
        if self.places.is_empty() { 0.0 } else { sum / self.places.len() as f64 }
    }

    /// The share of anchors whose positive comes first.
    pub fn accuracy_1(&self) -> f64 {
        self.mean(|place| if place == 1 { 1.0 } else { 0.0 })
    }

    /// The mean of 1 ÷ the place of the positive, or of 0 if that is above 10.
    pub fn mrr_10(&self) -> f64 {
        self.mean(|place| if place <= 10 { 1.0 / place as f64 } else { 0.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_each_text_once_and_alike_texts_before() {
        let mut found = Retrieval::default();
        // Anchor, positive, negative. The second record's negative is the first one's positive.
        let of_records =
            [[[1.0, 0.0], [2.0, 0.1], [0.0, 1.0]], [[0.0, 3.0], [0.5, 0.5], [2.0, 0.1]]];
        let numbers = [10, 11, 12, 20, 21, 11];
        let embeddings: Vec<f32> = of_records.concat().concat();
        found.take(&embeddings[..6], &numbers[..3], 3);
        found.take(&embeddings[6..], &numbers[3..], 3);
        found.find();
        assert_eq!(found.known.len(), 3);
        assert_eq!(found.places, [1, 2]);
        assert_eq!((found.accuracy_1(), found.mrr_10()), (0.5, 0.75));
        let mut alike = Retrieval::default();
        alike.take(&[1.0; 8], &[1, 2, 3, 4], 2);
        alike.find();
        assert_eq!((alike.places.clone(), alike.accuracy_1()), (vec![2, 2], 0.0));
        assert_eq!(Retrieval::default().accuracy_1(), 0.0);
        assert_eq!(cosine(&[1.0, 0.0], &[0.0, 2.0]), 0.0);
    }
}
