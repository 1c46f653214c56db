//! Losses of the one score that a model gives a sequence: of a chosen answer against a rejected
//! one, for reward models (Bradley and Terry 1952; Ouyang et al. 2022), and of a text pair's
//! label, for rerankers (sentence-transformers' BinaryCrossEntropyLoss).

use super::preference::{log_sigmoid, sigmoid};
use super::{Measurements, Measures, Objective, Slopes};

/// −ln σ(chosen − rejected − margin) + `centre` · (chosen + rejected)², of the scores of two
/// answers. The margin is the [score of the record](crate::data::Sequence::score), or 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reward {
    /// The factor of the squared sum of both scores, which pulls scores to a mean of 0.
    pub centre: f64,
}

/// The binary cross entropy of the sigmoid of a score. The label, from 0 to 1, is the
/// [score of the record](crate::data::Sequence::score).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Binary;

impl Objective for Reward {
    fn name(&self) -> String {
        "reward".into()
    }

    fn sequences(&self) -> usize {
        2
    }

    fn measures(&self) -> Measures {
        Measures::Scores
    }

    fn metric_names(&self) -> &'static [&'static str] {
        &["accuracy", "margin", "mean"]
    }

    /// Whether the chosen answer has the higher score, by how much, and the mean of both scores.
    fn metrics(&self, of: &Measurements<'_>) -> Vec<f64> {
        let record = |record: usize| {
            let [chosen, rejected] = [2 * record, 2 * record + 1].map(|one| of.model_score(one));
            let is_right = f64::from(u8::from(chosen > rejected));
            [is_right, chosen - rejected, 0.5 * (chosen + rejected)]
        };
        (0..of.records()).flat_map(record).collect()
    }

    fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
        let mean = 1.0 / of.records_of_step() as f64;
        let record = |record: usize| {
            let answers = [2 * record, 2 * record + 1];
            let [chosen, rejected] = answers.map(|one| of.model_score(one));
            let margin = of.scores.get(answers[0]).copied().map_or(0.0, f64::from);
            let x = chosen - rejected - margin;
            let sum = chosen + rejected;
            let by_sum = 2.0 * self.centre * sum;
            slopes.add(answers[0], mean * (by_sum - sigmoid(-x)));
            slopes.add(answers[1], mean * (by_sum + sigmoid(-x)));
            mean * (self.centre * sum * sum - log_sigmoid(x))
        };
        Ok((0..of.records()).map(record).collect())
    }
}

impl Objective for Binary {
    fn name(&self) -> String {
        "binary".into()
    }

    fn measures(&self) -> Measures {
        Measures::Scores
    }

    fn needs_scores(&self) -> bool {
        true
    }

    fn metric_names(&self) -> &'static [&'static str] {
        &["accuracy"]
    }

    /// Whether score and label are on the same side of a probability of one half.
    fn metrics(&self, of: &Measurements<'_>) -> Vec<f64> {
        let is_right = |record| (of.model_score(record) > 0.0) == (of.score(record) > 0.5);
        (0..of.records()).map(|record| f64::from(u8::from(is_right(record)))).collect()
    }

    fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
        let mean = 1.0 / of.records_of_step() as f64;
        let record = |record: usize| {
            let score = of.model_score(record);
            let label = f64::from(of.score(record));
            slopes.add(record, mean * (sigmoid(score) - label));
            mean * ((1.0 - label) * score - log_sigmoid(score))
        };
        Ok((0..of.records()).map(record).collect())
    }
}
