//! What an objective measured of a step, and the slopes that follow from it.
//!
//! An embedding is made of the last hidden states of a sequence, which come unit by unit. Their
//! mean is a sum in f64 in the order of the rows, so it depends on no group, device or micro-batch.

use std::ops::Range;

use crate::kernels::{CrossEntropy, Loss, STATISTICS, label_of};
use crate::models::EmbeddingPooling;
use crate::objectives::{
    LEAST, Measurements, Measures, Objective, ObjectiveMetrics, SequenceSlopes, SequenceValues,
    Slopes, add_unscaled, length,
};

/// The values and slopes of this rank's sequences; of those of all ranks, if a loss needs them.
#[derive(Default)]
pub(super) struct ObjectiveDesk {
    /// The place of this rank's sequences among these.
    own: Range<usize>,
    values: Vec<SequenceValues>,
    /// The log-probability of each sequence by the reference, if the step computes it.
    reference: Vec<f64>,
    slopes: Vec<SequenceSlopes>,
    /// The loss of each record.
    losses: Vec<f64>,
    /// The metrics of each record. (records, metrics).
    metrics: Vec<f64>,
    /// Those of the whole step, if several ranks share its records.
    metrics_of_step: Option<Vec<f64>>,
    /// The sequences whose losses are computed, from the first on.
    computed: usize,
    /// Of a model that embeds, what is known of each sequence's hidden states.
    pooled: Vec<Pooled>,
}

/// The hidden states of a sequence as one, while its rows come.
#[derive(Clone, Default)]
struct Pooled {
    /// The sum of the rows, or the one row.
    sum: Vec<f64>,
    /// The length of the embedding before it was scaled to 1; `None`: it was not.
    length: Option<f64>,
}

/// Rows of a sequence's hidden states.
#[derive(Clone, Copy)]
pub(super) struct HiddenRows {
    pub(super) sequence: usize,
    /// The place of the first of these rows in the sequence.
    pub(super) first: usize,
    /// Tokens of the whole sequence.
    pub(super) of: usize,
    /// The tokens at its start that the embedding leaves out.
    pub(super) skipped: usize,
}

/// How a model makes embeddings.
#[derive(Clone, Copy)]
pub(super) struct Embeds {
    pub(super) pooling: EmbeddingPooling,
    pub(super) normalise: bool,
}

/// What a loss depends on beside the sequences that were measured.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    /// Of each sequence of this rank, if the batch has them.
    pub(super) reference: &'a [f64],
    /// The labelled tokens of each sequence of the step.
    pub(super) labelled: &'a [u32],
    /// Token ids of this rank's sequences, the first of each, and the end.
    pub(super) ids: &'a [u32],
    pub(super) starts: &'a [usize],
    /// The score of the record of each sequence, if the batch has them.
    pub(super) scores: &'a [f32],
}

impl ObjectiveDesk {
    /// Makes room for the sequences of a step, of which this rank has some.
    pub(super) fn open(&mut self, sequences: usize, own: Range<usize>, each: usize) {
        self.own = own;
        self.values.resize_with(sequences, SequenceValues::default);
        self.slopes.resize_with(sequences, SequenceSlopes::default);
        self.losses.resize(sequences / each, 0.0);
    }

    /// Takes rows of a sequence, which come in their order, from complete statistics.
    pub(super) fn measure(&mut self, sequence: usize, statistics: &[f32], measures: Measures) {
        let values = &mut self.values[sequence];
        for row in statistics.chunks_exact(STATISTICS).filter(|row| label_of(row) >= 0) {
            if measures == Measures::Scores {
                values.score = f64::from(row[0]);
                values.tokens = 1;
                continue;
            }
            let loss = loss_of(row);
            values.log_probability -= f64::from(loss);
            values.tokens += 1;
            values.of_tokens.extend((measures == Measures::Tokens).then_some(-loss));
        }
    }

    /// Takes rows of a sequence, which come in their order, from complete statistics of the
    /// reference. The sum is that of [`measure`](ObjectiveDesk::measure).
    pub(super) fn measure_reference(&mut self, sequence: usize, statistics: &[f32]) {
        self.reference.resize(self.values.len(), 0.0);
        for row in statistics.chunks_exact(STATISTICS).filter(|row| label_of(row) >= 0) {
            self.reference[sequence] -= f64::from(loss_of(row));
        }
    }

    /// Takes rows of a sequence's hidden states, which come in their order. (rows, width).
    pub(super) fn pool(&mut self, at: HiddenRows, how: Embeds, hidden: &[f32], width: usize) {
        self.pooled.resize_with(self.values.len(), Pooled::default);
        let Pooled { sum, length: known } = &mut self.pooled[at.sequence];
        sum.resize(width, 0.0);
        for (row, states) in (at.first..).zip(hidden.chunks_exact(width)) {
            if how.takes(row, at) {
                sum.iter_mut().zip(states).for_each(|(sum, &x)| *sum += f64::from(x));
            }
        }
        if at.first + hidden.len() / width < at.of {
            return;
        }
        let rows = how.rows(at);
        let mut embedding: Vec<f32> = sum.iter().map(|sum| (sum / rows) as f32).collect();
        if how.normalise {
            let of_all = length(&embedding);
            embedding.iter_mut().for_each(|x| *x = (f64::from(*x) / of_all.max(LEAST)) as f32);
            *known = Some(of_all);
        }
        let values = &mut self.values[at.sequence];
        values.tokens = at.of;
        values.embedding = embedding;
    }

    /// Writes the gradient of rows of a sequence's hidden states: (rows, width).
    pub(super) fn unpool(&self, at: HiddenRows, how: Embeds, scale: f32, to: &mut [f32]) {
        let by_embedding = &self.slopes[at.sequence].of_embedding;
        let width = by_embedding.len();
        let mut by_state = vec![0.0; width];
        match self.pooled[at.sequence].length {
            Some(length) => {
                let unit = &self.values[at.sequence].embedding;
                add_unscaled(&mut by_state, unit, length, by_embedding);
            }
            None => by_state.copy_from_slice(by_embedding),
        }
        let rows = how.rows(at);
        by_state.iter_mut().for_each(|by| *by = (f64::from(*by) / rows) as f32 * scale);
        for (row, to) in (at.first..).zip(to.chunks_exact_mut(width)) {
            if how.takes(row, at) { to.copy_from_slice(&by_state) } else { to.fill(0.0) }
        }
    }

    /// The embeddings of all sequences. (sequences, width).
    pub(super) fn embeddings(&self) -> Vec<f32> {
        self.values.iter().flat_map(|values| &values.embedding).copied().collect()
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
        let known = if self.reference.is_empty() { given.reference } else { &self.reference };
        let reference = known.get(sequences.clone()).unwrap_or_default();
        let Given { labelled, ids, starts, .. } = given;
        let starts = starts.get(sequences.start..=sequences.end).unwrap_or_default();
        let scores = given.scores.get(sequences.clone()).unwrap_or_default();
        let of = Measurements { sequences: values, reference, labelled, each, ids, starts, scores };
        let slopes = &mut self.slopes[sequences.clone()];
        slopes.iter_mut().zip(values).for_each(|(to, of)| *to = SequenceSlopes::of(of));
        let losses = objective.loss(&of, &mut Slopes(slopes))?;
        if losses.len() != of.records() {
            let has = losses.len();
            return Err(format!("it gave {has} losses for {} records", of.records()));
        }
        self.losses[sequences.start / each..sequences.end / each].copy_from_slice(&losses);
        let metrics = objective.metrics(&of);
        let names = objective.metric_names().len();
        if metrics.len() != names * of.records() {
            let has = metrics.len();
            return Err(format!("it gave {has} metrics for {} records of {names}", of.records()));
        }
        self.metrics.extend(metrics);
        self.computed = sequences.end;
        Ok(())
    }

    /// The sum of the losses of the records that begin among these sequences.
    pub(super) fn loss(&self, sequences: Range<usize>, each: usize) -> f64 {
        let first = |sequence: usize| sequence.div_ceil(each);
        self.losses[first(sequences.start)..first(sequences.end)].iter().sum()
    }

    /// What is measured of this rank's sequences, for the other ranks.
    pub(super) fn own_values(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for at in self.own.clone() {
            let SequenceValues { log_probability, tokens, score, of_tokens, embedding } =
                &self.values[at];
            let by_reference = self.reference.get(at).copied();
            for number in [*log_probability, *score, by_reference.unwrap_or_default()] {
                bytes.extend(number.to_le_bytes());
            }
            let counts = [*tokens, of_tokens.len(), embedding.len()];
            counts.into_iter().for_each(|count| bytes.extend((count as u64).to_le_bytes()));
            let floats = of_tokens.iter().chain(embedding);
            floats.for_each(|number| bytes.extend(number.to_le_bytes()));
        }
        bytes
    }

    /// Takes what all ranks measured, in the order of their sequences.
    ///
    /// # Errors
    /// It is not of the sequences of the step.
    pub(super) fn take_values(&mut self, of_ranks: &[Vec<u8>]) -> Result<(), String> {
        let has_reference = !self.reference.is_empty();
        self.reference.clear();
        let mut known = 0;
        for bytes in of_ranks {
            let mut left = &bytes[..];
            while !left.is_empty() {
                let (values, by_reference) = read_values(&mut left).ok_or(OTHER_SEQUENCES)?;
                *self.values.get_mut(known).ok_or(OTHER_SEQUENCES)? = values;
                self.reference.extend(has_reference.then_some(by_reference));
                known += 1;
            }
        }
        if known < self.values.len() { Err(OTHER_SEQUENCES.into()) } else { Ok(()) }
    }

    /// The metrics of this rank's records, as far as they are computed: (records, metrics).
    pub(super) fn metrics(&self) -> &[f64] {
        &self.metrics
    }

    /// Takes the metrics of all records of the step.
    pub(super) fn set_metrics_of_step(&mut self, all: Vec<f64>) {
        self.metrics_of_step = Some(all);
    }

    /// The means of the metrics over all records of the step.
    pub(super) fn mean_metrics(&self, objective: &dyn Objective) -> ObjectiveMetrics {
        let all = self.metrics_of_step.as_ref().unwrap_or(&self.metrics);
        ObjectiveMetrics::of_records(objective.metric_names(), all)
    }

    /// The first of these sequences for which a value or a slope is not finite, in words.
    pub(super) fn not_finite(&self, sequences: Range<usize>, measures: Measures) -> Option<String> {
        let slope = |at: usize| {
            let SequenceSlopes { of_sequence, of_tokens, of_embedding } = &self.slopes[at];
            let by_embedding = of_embedding.iter().map(|&slope| f64::from(slope));
            of_tokens.iter().copied().chain(by_embedding).fold(*of_sequence, |sum, one| sum + one)
        };
        let embeds = |at: usize| self.values[at].embedding.iter().all(|number| number.is_finite());
        let is_finite = |at: &usize| {
            let SequenceValues { log_probability, score, .. } = self.values[*at];
            let by_reference = self.reference.get(*at).copied().unwrap_or_default();
            let is_finite = (log_probability + score + by_reference).is_finite();
            is_finite && embeds(*at) && slope(*at).is_finite()
        };
        let at = sequences.into_iter().find(|at| !is_finite(at))?;
        let SequenceValues { log_probability, tokens, score, .. } = self.values[at];
        if !self.values[at].embedding.is_empty() {
            let has = if embeds(at) { "finite numbers" } else { "a number that is not finite" };
            return Some(format!(
                "the embedding of sequence {at} of the step, of {tokens} tokens, has {has}, and \
                 the sum of the slopes there is {}",
                slope(at)
            ));
        }
        if measures == Measures::Scores {
            return Some(format!(
                "sequence {at} of the step has score {score}, and the slope there is {}",
                slope(at)
            ));
        }
        let by_reference = self.reference.get(at).map(|one| format!(", by the reference {one}"));
        Some(format!(
            "sequence {at} of the step has log-probability {log_probability} of {tokens} \
             tokens{}, and the slope there is {}",
            by_reference.unwrap_or_default(),
            slope(at)
        ))
    }

    /// Writes statistics with the slope by a sequence's score.
    pub(super) fn weigh_score(&self, sequence: usize, from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
        for row in to.chunks_exact_mut(STATISTICS).filter(|row| label_of(row) >= 0) {
            row[2] = self.slopes[sequence].of_sequence as f32;
        }
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

const OTHER_SEQUENCES: &str = "ranks measured other sequences than those of the step";

/// Reads what [`ObjectiveDesk::own_values`] wrote of a sequence: its values, and its
/// log-probability by the reference.
fn read_values(left: &mut &[u8]) -> Option<(SequenceValues, f64)> {
    let mut eight = || left.split_off(..8)?.try_into().ok();
    let [log_probability, score, by_reference] =
        [eight()?, eight()?, eight()?].map(f64::from_le_bytes);
    let [tokens, of_tokens, embedding] =
        [eight()?, eight()?, eight()?].map(|bytes| u64::from_le_bytes(bytes) as usize);
    let mut floats = |count: usize| {
        let (numbers, _) = left.split_off(..count.checked_mul(4)?)?.as_chunks();
        Some(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    };
    let of_tokens = floats(of_tokens)?;
    let embedding = floats(embedding)?;
    let values = SequenceValues { log_probability, tokens, score, of_tokens, embedding };
    Some((values, by_reference))
}

/// The −log p of a labelled row.
fn loss_of(row: &[f32]) -> f32 {
    CrossEntropy.value(row[0] + row[1].ln(), row[2])
}

impl Embeds {
    /// True if a row of a sequence counts for its embedding.
    fn takes(self, row: usize, at: HiddenRows) -> bool {
        match self.pooling {
            EmbeddingPooling::Mean => row >= at.skipped,
            EmbeddingPooling::Cls => row == at.skipped,
            EmbeddingPooling::Last => row + 1 == at.of,
        }
    }

    /// The number of rows that count.
    fn rows(self, at: HiddenRows) -> f64 {
        if self.pooling == EmbeddingPooling::Mean { (at.of - at.skipped) as f64 } else { 1.0 }
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

    /// Ranks that share a step know of all its sequences what one rank would.
    #[test]
    fn ranks_take_what_others_measured() {
        let all = [rows(&[(-1.0, 3)]), rows(&[(-0.5, 0), (-0.25, 2)]), rows(&[(-2.0, 1)])];
        let measure = |own: Range<usize>| {
            let mut desk = ObjectiveDesk::default();
            desk.open(3, own.clone(), 1);
            for at in own {
                desk.measure(at, &all[at], Measures::Tokens);
                desk.measure_reference(at, &all[2 - at]);
                desk.values[at].embedding = vec![at as f32, -0.5];
            }
            desk
        };
        let alone = measure(0..3);
        let mut ranks = [measure(0..1), measure(1..3)];
        let sent = ranks.each_ref().map(ObjectiveDesk::own_values);
        for desk in &mut ranks {
            desk.take_values(&sent).expect("all sequences");
            assert_eq!((&desk.values, &desk.reference), (&alone.values, &alone.reference));
        }
        let [desk, _] = &mut ranks;
        let cut = |of: &[u8]| of[..of.len() - 1].to_vec();
        for wrong in [vec![sent[0].clone()], vec![cut(&sent[0])], vec![sent[1].clone(); 2]] {
            let error = desk.take_values(&wrong).expect_err("it is not the step");
            assert_eq!(error, OTHER_SEQUENCES);
        }
        // Without a reference there is none behind the exchange.
        let mut plain = ObjectiveDesk::default();
        plain.open(1, 0..1, 1);
        plain.measure(0, &all[0], Measures::LogProbabilities);
        plain.take_values(&[plain.own_values()]).expect("its own");
        assert!(plain.reference.is_empty());
    }

    fn rows(of: &[(f32, i32)]) -> Vec<f32> {
        let row = |&(target, label): &(f32, i32)| [0.0, 1.0, target, f32::from_bits(label as u32)];
        of.iter().flat_map(row).collect()
    }

    #[test]
    fn weights_are_slopes_by_row_and_losses_of_records() {
        let mut desk = ObjectiveDesk::default();
        desk.open(4, 0..4, 2);
        let a = rows(&[(-1.0, 3), (-9.0, -100), (-2.0, 1)]);
        let b = rows(&[(-0.5, 0), (-0.25, 2), (-7.0, -100)]);
        for (sequence, statistics) in [&a, &b, &b, &a].into_iter().enumerate() {
            // In two chunks.
            let (first, second) = statistics.split_at(STATISTICS);
            desk.measure(sequence, first, Measures::Tokens);
            desk.measure(sequence, second, Measures::Tokens);
        }
        assert_eq!(desk.log_probabilities(), [-3.0, -0.75, -0.75, -3.0]);
        let given = Given { reference: &[], labelled: &[2; 4], ids: &[], starts: &[], scores: &[] };
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
        assert_eq!(desk.not_finite(0..4, Measures::Tokens), None);
        let endless = rows(&[(f32::NEG_INFINITY, 1)]);
        desk.measure(3, &endless, Measures::Tokens);
        let said = desk.not_finite(0..4, Measures::Tokens).expect("an infinite log-probability");
        assert!(said.contains("sequence 3 of the step has log-probability -inf of 3"), "{said}");
    }
}
