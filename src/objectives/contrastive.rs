//! The contrastive loss of sentence embeddings (van den Oord et al. 2018), which
//! sentence-transformers calls MultipleNegativesRankingLoss.
//!
//! A record has an anchor, its positive, and perhaps hard negatives. The candidates of an anchor
//! are the positives and negatives of all records of the step. The loss is the mean cross entropy
//! of each anchor's own positive among them, of scores `scale` · cos.
//!
//! Scores are computed for some anchors and all candidates at a time, so no matrix of all anchors
//! by all candidates is in memory. The order of every sum follows from the records and
//! the instruction set alone.

use std::collections::HashMap;

use rayon::prelude::*;

use super::units::Units;
use super::{Measurements, Measures, Objective, Scope, Slopes};
use crate::product::{Matrix, Product, Start};
use crate::simd::Level;

/// Anchors whose scores are computed at a time.
const ANCHORS: usize = 256;

/// A contrastive loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Contrastive {
    /// Hard negatives of a record.
    pub negatives: usize,
    /// The factor of the cosines.
    pub scale: f64,
    /// True: the mean of this loss and of the same over the anchors as candidates of each positive.
    pub symmetric: bool,
    /// Whether a candidate with the tokens of the anchor, or of its positive, counts as a negative.
    pub keeps_duplicates: bool,
    /// Matryoshka representation learning (Kusupati et al. 2022): the loss is the sum over the
    /// first so many numbers of the embeddings. Empty: all numbers.
    pub dimensions: Vec<usize>,
}

/// Some of a step's texts: their places in the step, and a number for each that equal texts share.
struct Texts {
    sequences: Vec<usize>,
    texts: Vec<usize>,
}

/// The anchors or positives whose targets are looked for among candidates.
struct Search<'a> {
    anchors: &'a Units,
    anchor_texts: &'a [usize],
    candidates: &'a Units,
    candidate_texts: &'a [usize],
    scale: f64,
    /// The factor of the losses.
    weight: f64,
    keeps_duplicates: bool,
}

/// The slopes by the unit vectors of a search.
struct UnitSlopes {
    anchors: Vec<f32>,
    candidates: Vec<f32>,
}

impl Search<'_> {
    /// True if a candidate is left out of the candidates of an anchor.
    fn is_masked(&self, anchor: usize, candidate: usize) -> bool {
        let text = self.candidate_texts[candidate];
        let is_same = text == self.candidate_texts[anchor] || text == self.anchor_texts[anchor];
        candidate != anchor && is_same && !self.keeps_duplicates
    }

    /// Makes of an anchor's cosines the slopes by its scores, and returns its loss.
    fn row(&self, anchor: usize, scores: &mut [f32]) -> f64 {
        for (candidate, score) in scores.iter_mut().enumerate() {
            *score *= self.scale as f32;
            if self.is_masked(anchor, candidate) {
                *score = f32::NEG_INFINITY;
            }
        }
        let most = f64::from(scores.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = scores.iter().map(|score| (f64::from(*score) - most).exp()).sum();
        let loss = most + sum.ln() - f64::from(scores[anchor]);
        let factor = self.scale * self.weight;
        for (candidate, score) in scores.iter_mut().enumerate() {
            let target = if candidate == anchor { 1.0 } else { 0.0 };
            *score = (factor * ((f64::from(*score) - most).exp() / sum - target)) as f32;
        }
        self.weight * loss
    }

    /// The loss of each anchor, whose target is the candidate of its own number. Adds slopes.
    fn run(&self, slopes: &mut UnitSlopes) -> Vec<f64> {
        let level = Level::best();
        let width = self.anchors.width;
        let columns = self.candidates.count();
        let candidates = Matrix::rows(&self.candidates.unit, width);
        let mut scores = vec![0.0; ANCHORS.min(self.anchors.count()) * columns];
        let mut losses = vec![0.0; self.anchors.count()];
        for (nth, losses) in losses.chunks_mut(ANCHORS).enumerate() {
            let rows = losses.len();
            let at = nth * ANCHORS * width..(nth * ANCHORS + rows) * width;
            let anchors = Matrix::rows(&self.anchors.unit[at.clone()], width);
            let scores = &mut scores[..rows * columns];
            let b = candidates.transposed();
            Product { a: anchors, b, rows, depth: width, columns, start: Start::Zero }
                .run(level, scores);
            let each = scores.par_chunks_mut(columns).zip(losses.par_iter_mut()).enumerate();
            let first = nth * ANCHORS;
            each.for_each(|(row, (scores, loss))| *loss = self.row(first + row, scores));
            let scores = Matrix::rows(scores, columns);
            let plain = Product {
                a: scores,
                b: candidates,
                rows,
                depth: columns,
                columns: width,
                start: Start::C,
            };
            plain.run(level, &mut slopes.anchors[at]);
            let by_candidates =
                Product { a: scores.transposed(), b: anchors, rows: columns, depth: rows, ..plain };
            by_candidates.run(level, &mut slopes.candidates);
        }
        losses
    }
}

impl Contrastive {
    /// The anchors of these records; and the candidates: the positives of all records, then their
    /// negatives.
    fn texts(&self, of: &Measurements<'_>) -> [Texts; 2] {
        let records = of.records();
        let each = self.sequences();
        let anchors: Vec<usize> = (0..records).map(|record| record * each).collect();
        let place = |place: usize| (0..records).map(move |record| record * each + place);
        let candidates: Vec<usize> = (1..each).flat_map(place).collect();
        let mut known = HashMap::new();
        [anchors, candidates].map(|sequences| {
            let text = |&sequence: &usize| {
                let next = known.len();
                *known.entry(of.token_ids(sequence)).or_insert(next)
            };
            let texts = sequences.iter().map(text).collect();
            Texts { sequences, texts }
        })
    }

    /// Adds the losses of the first `width` numbers of the embeddings.
    fn of_prefix(
        &self,
        of: &Measurements<'_>,
        [anchors, candidates]: &[Texts; 2],
        width: usize,
        losses: &mut [f64],
        slopes: &mut Slopes<'_>,
    ) {
        let mean = 1.0 / of.records_of_step() as f64;
        let units = |of_texts: &[usize]| Units::of(of, of_texts, width);
        let of_anchors = units(&anchors.sequences);
        let of_candidates = units(&candidates.sequences);
        let search = Search {
            anchors: &of_anchors,
            anchor_texts: &anchors.texts,
            candidates: &of_candidates,
            candidate_texts: &candidates.texts,
            scale: self.scale,
            weight: if self.symmetric { 0.5 * mean } else { mean },
            keeps_duplicates: self.keeps_duplicates,
        };
        let mut by_units =
            UnitSlopes { anchors: of_anchors.zeros(), candidates: of_candidates.zeros() };
        let mut take = |found: Vec<f64>| {
            losses.iter_mut().zip(found).for_each(|(loss, found)| *loss += found);
        };
        take(search.run(&mut by_units));
        of_anchors.add(&anchors.sequences, &by_units.anchors, slopes);
        of_candidates.add(&candidates.sequences, &by_units.candidates, slopes);
        if !self.symmetric {
            return;
        }
        let positives = &candidates.sequences[..of.records()];
        let of_positives = units(positives);
        let back = Search {
            anchors: &of_positives,
            anchor_texts: &candidates.texts,
            candidates: &of_anchors,
            candidate_texts: &anchors.texts,
            ..search
        };
        let mut by_units =
            UnitSlopes { anchors: of_positives.zeros(), candidates: of_anchors.zeros() };
        take(back.run(&mut by_units));
        of_positives.add(positives, &by_units.anchors, slopes);
        of_anchors.add(&anchors.sequences, &by_units.candidates, slopes);
    }
}

impl Objective for Contrastive {
    fn name(&self) -> String {
        "contrastive".into()
    }

    fn sequences(&self) -> usize {
        2 + self.negatives
    }

    fn measures(&self) -> Measures {
        Measures::Embeddings
    }

    fn scope(&self) -> Scope {
        Scope::Step
    }

    fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
        let texts = self.texts(of);
        let mut losses = vec![0.0; of.records()];
        for width in super::widths(of, &self.dimensions)? {
            self.of_prefix(of, &texts, width, &mut losses, slopes);
        }
        Ok(losses)
    }
}
