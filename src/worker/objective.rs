//! What an objective measured of a step, and the slopes that follow from it.

use std::ops::Range;

use crate::kernels::{CrossEntropy, Loss, STATISTICS, label_of};
use crate::objectives::{
    Measurements, Measures, Objective, SequenceSlopes, SequenceValues, Slopes,
};

/// The values and slopes of this rank's sequences.
#[derive(Default)]
pub(super) struct ObjectiveDesk {
    values: Vec<SequenceValues>,
    slopes: Vec<SequenceSlopes>,
    /// The loss of each record.
    losses: Vec<f64>,
    /// The sequences whose losses are computed, from the first on.
    computed: usize,
}

/// What a loss depends on beside the sequences that were measured.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    /// Of each sequence of this rank, if the batch has them.
    pub(super) reference: &'a [f64],
    /// The labelled tokens of each sequence of the step.
    pub(super) labelled: &'a [u32],
}

impl ObjectiveDesk {
    /// Makes room for the sequences of a step.
    pub(super) fn open(&mut self, sequences: usize, each: usize) {
        self.values.resize_with(sequences, SequenceValues::default);
        self.slopes.resize_with(sequences, SequenceSlopes::default);
        self.losses.resize(sequences / each, 0.0);
    }

    /// Takes rows of a sequence, which come in their order, from complete statistics.
    pub(super) fn measure(&mut self, sequence: usize, statistics: &[f32], measures: Measures) {
        let values = &mut self.values[sequence];
        for row in statistics.chunks_exact(STATISTICS).filter(|row| label_of(row) >= 0) {
            let loss = CrossEntropy.value(row[0] + row[1].ln(), row[2]);
            values.log_probability -= f64::from(loss);
            values.tokens += 1;
            values.of_tokens.extend((measures == Measures::Tokens).then_some(-loss));
        }
    }

    /// Computes the losses of these sequences, which are the next whole records, if that was not
    /// done.
    pub(super) fn compute(
        &mut self,
        objective: &dyn Objective,
        sequences: Range<usize>,
        given: Given<'_>,
    ) -> Result<(), String> {
        if sequences.end <= self.computed {
            return Ok(());
        }
        let each = objective.sequences();
        let values = &self.values[sequences.clone()];
        let reference = given.reference.get(sequences.clone()).unwrap_or_default();
        let of = Measurements { sequences: values, reference, labelled: given.labelled, each };
        let slopes = &mut self.slopes[sequences.clone()];
        slopes.iter_mut().zip(values).for_each(|(to, of)| *to = SequenceSlopes::of(of));
        let losses = objective.loss(&of, &mut Slopes(slopes))?;
        if losses.len() != of.records() {
            let has = losses.len();
            return Err(format!("it gave {has} losses for {} records", of.records()));
        }
        self.losses[sequences.start / each..sequences.end / each].copy_from_slice(&losses);
        self.computed = sequences.end;
        Ok(())
    }

    /// The sum of the losses of the records that begin among these sequences.
    pub(super) fn loss(&self, sequences: Range<usize>, each: usize) -> f64 {
        let first = |sequence: usize| sequence.div_ceil(each);
        self.losses[first(sequences.start)..first(sequences.end)].iter().sum()
    }

    /// The first of these sequences for which a value or a slope is not finite, in words.
    pub(super) fn not_finite(&self, sequences: Range<usize>) -> Option<String> {
        let slope = |at: usize| {
            let SequenceSlopes { of_sequence, of_tokens } = &self.slopes[at];
            of_tokens.iter().fold(*of_sequence, |sum, slope| sum + slope)
        };
        let is_finite =
            |at: &usize| self.values[*at].log_probability.is_finite() && slope(*at).is_finite();
        let at = sequences.into_iter().find(|at| !is_finite(at))?;
        let SequenceValues { log_probability, tokens, .. } = self.values[at];
        Some(format!(
            "sequence {at} of the step has log-probability {log_probability} of {tokens} tokens, \
             and the slope there is {}",
            slope(at)
        ))
    }

    /// Writes statistics with the weight of each labelled row. `token` counts the labelled tokens
    /// of the sequence before these rows.
    pub(super) fn weigh(&self, sequence: usize, mut token: usize, from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
        for row in to.chunks_exact_mut(STATISTICS).filter(|row| label_of(row) >= 0) {
            row[2] = self.slopes[sequence].weight(token) as f32;
            token += 1;
        }
    }

    /// The log-probability of each sequence.
    pub(super) fn log_probabilities(&self) -> Vec<f64> {
        self.values.iter().map(|values| values.log_probability).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The squared difference of the log-probabilities of two sequences, and the sum of tokens of
    /// the second.
    struct Difference;

    impl Objective for Difference {
        fn name(&self) -> String {
            "difference".into()
        }

        fn sequences(&self) -> usize {
            2
        }

        fn measures(&self) -> Measures {
            Measures::Tokens
        }

        fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
            let mut losses = Vec::new();
            for record in 0..of.records() {
                let Range { start: a, .. } = of.sequences_of(record);
                let b = a + 1;
                let difference = of.log_probability(a) - of.log_probability(b);
                losses.push(difference * difference);
                slopes.add(a, 2.0 * difference);
                slopes.add(b, -2.0 * difference);
                let tokens = slopes.of_tokens(b).iter_mut().zip(0..);
                tokens.for_each(|(slope, token): (_, i32)| *slope += f64::from(token));
            }
            Ok(losses)
        }
    }

    fn rows(of: &[(f32, i32)]) -> Vec<f32> {
        let row = |&(target, label): &(f32, i32)| [0.0, 1.0, target, f32::from_bits(label as u32)];
        of.iter().flat_map(row).collect()
    }

    #[test]
    fn weights_are_slopes_by_row_and_losses_of_records() {
        let mut desk = ObjectiveDesk::default();
        desk.open(4, 2);
        let a = rows(&[(-1.0, 3), (-9.0, -100), (-2.0, 1)]);
        let b = rows(&[(-0.5, 0), (-0.25, 2), (-7.0, -100)]);
        for (sequence, statistics) in [&a, &b, &b, &a].into_iter().enumerate() {
            // In two chunks.
            let (first, second) = statistics.split_at(STATISTICS);
            desk.measure(sequence, first, Measures::Tokens);
            desk.measure(sequence, second, Measures::Tokens);
        }
        assert_eq!(desk.log_probabilities(), [-3.0, -0.75, -0.75, -3.0]);
        let given = Given { reference: &[], labelled: &[2; 4] };
        desk.compute(&Difference, 0..2, given).expect("a loss");
        desk.compute(&Difference, 0..2, given).expect("computed before");
        desk.compute(&Difference, 2..4, given).expect("a loss");
        assert_eq!(desk.loss(0..4, 2), 2.0 * 2.25 * 2.25);
        assert_eq!(
            [desk.loss(0..1, 2), desk.loss(1..3, 2), desk.loss(3..4, 2)],
            [2.25 * 2.25, 2.25 * 2.25, 0.0]
        );
        let mut weighed = [f32::NAN; 12];
        desk.weigh(1, 0, &b, &mut weighed);
        // The slope of the second sequence is 4.5, and its tokens have 0 and 1 beside it.
        assert_eq!([weighed[2], weighed[6]], [-4.5 + 0.0, -4.5 - 1.0].map(|w: f32| w));
        let bits = |row: &[f32]| row.iter().map(|one| one.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&weighed[8..]), bits(&b[8..]), "a row without a label");
        assert_eq!(weighed[..2], b[..2]);
        let mut last = [f32::NAN; 4];
        desk.weigh(1, 1, &b[4..8], &mut last);
        assert_eq!(last[2], weighed[6], "the second chunk alone");
        assert_eq!(desk.not_finite(0..4), None);
        let endless = rows(&[(f32::NEG_INFINITY, 1)]);
        desk.measure(3, &endless, Measures::Tokens);
        let said = desk.not_finite(0..4).expect("an infinite log-probability");
        assert!(said.contains("sequence 3 of the step has log-probability -inf of 3"), "{said}");
    }
}
