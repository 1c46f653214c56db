//! The check of an objective of your own.

use std::ops::Range;

use super::noise;
use crate::objectives::{
    Measurements, Measures, Objective, Scope, SequenceSlopes, SequenceValues, Slopes, length,
};

/// Records of a check.
const RECORDS: usize = 4;

/// Numbers of an embedding.
const WIDTH: usize = 6;

/// Records whose sequences were measured.
#[derive(Clone)]
struct Records {
    each: usize,
    values: Vec<SequenceValues>,
    reference: Vec<f64>,
    labelled: Vec<u32>,
    ids: Vec<u32>,
    starts: Vec<usize>,
    scores: Vec<f32>,
}

/// What an objective makes of some records.
struct Found {
    losses: Vec<f64>,
    slopes: Vec<SequenceSlopes>,
}

impl Records {
    /// Random records, from this seed.
    fn random(objective: &dyn Objective, seed: u64) -> Records {
        let each = objective.sequences();
        let sequences = RECORDS * each;
        let measures = objective.measures();
        let logs = noise(seed, 8 * sequences);
        let embeddings = noise(seed + 1, WIDTH * sequences);
        let others = noise(seed + 2, 3 * sequences);
        let value = |at: usize| {
            let tokens = 1 + at % 5;
            let of_tokens: Vec<f32> =
                logs[8 * at..][..tokens].iter().map(|x| 2.0 * x - 2.1).collect();
            SequenceValues {
                log_probability: of_tokens.iter().copied().map(f64::from).sum(),
                tokens,
                score: if measures == Measures::Scores { f64::from(3.0 * others[at]) } else { 0.0 },
                of_tokens: if measures == Measures::Tokens { of_tokens } else { Vec::new() },
                embedding: match measures {
                    Measures::Embeddings => embeddings[WIDTH * at..][..WIDTH].to_vec(),
                    _ => Vec::new(),
                },
            }
        };
        let values: Vec<SequenceValues> = (0..sequences).map(value).collect();
        let moved = values.iter().zip(&others[sequences..]);
        let score = |at: usize| (at / each) as f32 / (RECORDS - 1) as f32;
        Records {
            each,
            reference: moved.map(|(of, x)| of.log_probability + f64::from(*x)).collect(),
            labelled: values.iter().map(|of| of.tokens as u32).collect(),
            ids: (0..sequences as u32).collect(),
            starts: (0..=sequences).collect(),
            scores: (0..sequences).map(score).collect(),
            values,
        }
    }

    /// What the objective makes of these records, as a run gives them.
    fn run(&self, objective: &dyn Objective, records: Range<usize>) -> Result<Found, String> {
        let sequences = records.start * self.each..records.end * self.each;
        let values = &self.values[sequences.clone()];
        let of = Measurements {
            sequences: values,
            reference: &self.reference[sequences.clone()],
            labelled: &self.labelled,
            each: self.each,
            ids: &self.ids,
            starts: &self.starts[sequences.start..=sequences.end],
            scores: &self.scores[sequences],
        };
        let mut slopes: Vec<SequenceSlopes> = values.iter().map(SequenceSlopes::of).collect();
        let losses = objective.loss(&of, &mut Slopes(&mut slopes))?;
        let names = objective.metric_names();
        let metrics = objective.metrics(&of);
        if losses.len() != records.len() {
            return Err(format!("it gave {} losses for {} records", losses.len(), records.len()));
        }
        if metrics.len() != records.len() * names.len() {
            let has = metrics.len();
            return Err(format!(
                "it gave {has} metrics for {} records of {}",
                records.len(),
                names.len()
            ));
        }
        Ok(Found { losses, slopes })
    }

    fn all(&self, objective: &dyn Objective) -> Result<Found, String> {
        self.run(objective, 0..RECORDS)
    }

    /// The step's loss if what was measured of a sequence moves so far along a direction.
    fn loss_at(&self, objective: &dyn Objective, at: &Direction, by: f64) -> Result<f64, String> {
        let mut moved = self.clone();
        let values = &mut moved.values[at.sequence];
        match at.place {
            Place::Sum => values.log_probability += by,
            Place::Score => values.score += by,
            Place::Token(token) => {
                let before = f64::from(values.of_tokens[token]);
                values.of_tokens[token] = (before + by) as f32;
                values.log_probability += f64::from(values.of_tokens[token]) - before;
            }
            Place::Embedding => {
                let along = values.embedding.iter_mut().zip(&at.along);
                along.for_each(|(x, along)| *x = (f64::from(*x) + by * f64::from(*along)) as f32);
            }
        }
        Ok(moved.all(objective)?.losses.iter().sum())
    }
}

/// What of a sequence moves.
#[derive(Clone, Copy)]
enum Place {
    Sum,
    Score,
    Token(usize),
    Embedding,
}

/// A direction in which a sequence is moved.
struct Direction {
    sequence: usize,
    place: Place,
    /// Of an embedding.
    along: Vec<f32>,
}

impl Direction {
    /// All that are tried of a sequence.
    fn all_of(of: &SequenceValues, measures: Measures, sequence: usize) -> Vec<Direction> {
        let direction = |place| Direction { sequence, place, along: Vec::new() };
        match measures {
            Measures::LogProbabilities => vec![direction(Place::Sum)],
            Measures::Scores => vec![direction(Place::Score)],
            Measures::Tokens => {
                (0..of.of_tokens.len()).map(|token| direction(Place::Token(token))).collect()
            }
            Measures::Embeddings => {
                let along = |seed: u64| {
                    let along = noise(97 * seed + sequence as u64, WIDTH);
                    let of = length(&along) as f32;
                    along.iter().map(|x| x / of).collect()
                };
                let one = |seed| Direction { along: along(seed), ..direction(Place::Embedding) };
                (1..4).map(one).collect()
            }
        }
    }

    /// The derivative along it, by the slopes.
    fn slope(&self, slopes: &SequenceSlopes) -> f64 {
        match self.place {
            Place::Sum | Place::Score => slopes.of_sequence,
            Place::Token(token) => -slopes.weight(token),
            Place::Embedding => super::dot(&slopes.of_embedding, &self.along),
        }
    }

    fn name(&self) -> String {
        let sequence = self.sequence;
        match self.place {
            Place::Sum => format!("the log-probability of sequence {sequence}"),
            Place::Score => format!("the score of sequence {sequence}"),
            Place::Token(token) => format!("token {token} of sequence {sequence}"),
            Place::Embedding => format!("the embedding of sequence {sequence}"),
        }
    }
}

/// Checks that an objective's slopes are the derivatives of its losses, on random records of a
/// step; that with [`Scope::Record`] records by themselves have the losses and slopes that they
/// have among others; that there is a loss for each record and a number for each metric; and that
/// losses and slopes stay finite where answers are as good as certain or impossible.
///
/// # Errors
/// What is wrong, in a sentence.
pub fn check_objective(objective: &dyn Objective) -> Result<(), String> {
    let named = |what: String| format!("objective {}: {what}", objective.name());
    if objective.sequences() == 0 {
        return Err(named("a record has at least one sequence".into()));
    }
    for seed in [1, 50] {
        let records = Records::random(objective, seed);
        check_slopes(objective, &records).map_err(named)?;
        check_scope(objective, &records).map_err(named)?;
    }
    check_extremes(objective).map_err(named)
}

fn check_slopes(objective: &dyn Objective, records: &Records) -> Result<(), String> {
    // Losses of embeddings are made of f32.
    let step = match objective.measures() {
        Measures::LogProbabilities | Measures::Scores => 1e-4,
        Measures::Tokens | Measures::Embeddings => 1e-2,
    };
    let found = records.all(objective)?;
    let mut all = Vec::new();
    for (sequence, of) in records.values.iter().enumerate() {
        for at in Direction::all_of(of, objective.measures(), sequence) {
            let change = |by: f64| -> Result<f64, String> {
                let up = records.loss_at(objective, &at, by)?;
                Ok((up - records.loss_at(objective, &at, -by)?) / (2.0 * by))
            };
            // The error of the one is four times that of the other.
            let difference = (4.0 * change(0.5 * step)? - change(step)?) / 3.0;
            all.push((at.name(), at.slope(&found.slopes[sequence]), difference));
        }
    }
    let largest = all.iter().map(|(_, _, difference)| difference.abs()).fold(0.0, f64::max);
    let is_off = |(_, slope, difference): &&(String, f64, f64)| {
        let off = (slope - difference).abs();
        off.is_nan() || off > 5e-3 * largest + 1e-4
    };
    match all.iter().find(is_off) {
        Some((name, slope, difference)) => Err(format!(
            "the slope by {name} is {slope}, and differences of the loss give {difference}"
        )),
        None => Ok(()),
    }
}

fn check_scope(objective: &dyn Objective, records: &Records) -> Result<(), String> {
    if objective.scope() == Scope::Step {
        return Ok(());
    }
    let together = records.all(objective)?;
    for record in 0..RECORDS {
        let alone = records.run(objective, record..record + 1)?;
        let sequences = record * records.each..(record + 1) * records.each;
        let is_same = alone.losses[0] == together.losses[record];
        if !is_same || alone.slopes[..] != together.slopes[sequences] {
            return Err(format!(
                "record {record} has another loss or another slope by itself than among others: \
                 its scope is Scope::Step"
            ));
        }
    }
    Ok(())
}

/// Log-probabilities, scores and embeddings at the ends of what a model gives.
fn check_extremes(objective: &dyn Objective) -> Result<(), String> {
    for ends in [[0.0, -1e4], [-1e4, 0.0], [0.0, 0.0], [-1e4, -1e4]] {
        let mut records = Records::random(objective, 7);
        for (at, values) in records.values.iter_mut().enumerate() {
            let end: f64 = ends[at % 2];
            values.log_probability = end;
            values.of_tokens.iter_mut().for_each(|log| *log = (end / values.tokens as f64) as f32);
            values.score = if objective.measures() == Measures::Scores { end + 5e3 } else { 0.0 };
            values.embedding.iter_mut().for_each(|x| *x *= end as f32);
        }
        let found = records.all(objective)?;
        let slopes = found.slopes.iter().flat_map(|of| {
            let embedding = of.of_embedding.iter().map(|&by| f64::from(by));
            of.of_tokens.iter().copied().chain(embedding).chain([of.of_sequence])
        });
        if let Some(bad) = found.losses.iter().copied().chain(slopes).find(|x| !x.is_finite()) {
            return Err(format!(
                "a loss or a slope is {bad} where sequences have the log-probabilities {} and \
                 {} in turn",
                ends[0], ends[1]
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objectives::{
        Binary, Contrastive, Distance, Preference, PreferenceKind, Reward, Similarity,
        SimilarityKind, Triplet,
    };

    fn preferences() -> Vec<Box<dyn Objective>> {
        use PreferenceKind::{Cpo, Dpo, Hinge, Ipo, Orpo, Simpo};
        let of = |kind, label_smoothing, robust, sft| {
            let one = Preference { kind, beta: 0.5, gamma: 0.3, label_smoothing, robust, sft };
            Box::new(one) as Box<dyn Objective>
        };
        let plain = [Dpo, Ipo, Hinge, Simpo, Cpo, Orpo].map(|kind| of(kind, 0.0, false, 0.0));
        let others =
            [of(Dpo, 0.2, false, 0.7), of(Dpo, 0.2, true, 0.0), of(Simpo, 0.1, false, 0.0)];
        plain.into_iter().chain(others).collect()
    }

    #[test]
    fn the_objectives_there_are_pass() {
        let mut all = preferences();
        all.push(Box::new(Reward { centre: 0.0 }));
        all.push(Box::new(Reward { centre: 0.1 }));
        all.push(Box::new(Binary));
        for dimensions in [vec![], vec![6, 3]] {
            for (negatives, symmetric) in [(0, false), (2, false), (1, true)] {
                all.push(Box::new(Contrastive {
                    negatives,
                    scale: 5.0,
                    symmetric,
                    keeps_duplicates: false,
                    dimensions: dimensions.clone(),
                }));
            }
            for kind in [SimilarityKind::Cosine, SimilarityKind::CoSent] {
                let dimensions = dimensions.clone();
                all.push(Box::new(Similarity { kind, scale: 5.0, dimensions }));
            }
            for distance in [Distance::Euclidean, Distance::Cosine] {
                let dimensions = dimensions.clone();
                all.push(Box::new(Triplet { margin: 0.5, distance, dimensions }));
            }
        }
        for objective in all {
            check_objective(&*objective).expect("an objective of ours");
        }
    }

    /// The squared sum of both log-probabilities, with a mistake.
    struct Wrong(&'static str);

    impl Objective for Wrong {
        fn name(&self) -> String {
            self.0.into()
        }

        fn sequences(&self) -> usize {
            2
        }

        fn metric_names(&self) -> &'static [&'static str] {
            if self.0 == "metrics" { &["one"] } else { &[] }
        }

        fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
            let records = match self.0 {
                "records" => of.records(),
                _ => of.records_of_step(),
            } as f64;
            let sign = if self.0 == "sign" { -1.0 } else { 1.0 };
            let mut losses = Vec::new();
            for record in 0..of.records() {
                let mut all = of.sequences_of(record);
                let sum: f64 = all.clone().map(|one| of.log_probability(one)).sum();
                let of_log = if self.0 == "ends" { (-sum).ln() } else { sum * sum };
                let by = if self.0 == "ends" { 1.0 / sum } else { 2.0 * sum };
                losses.push(of_log / records);
                if self.0 == "second" {
                    all.next_back();
                }
                all.for_each(|one| slopes.add(one, sign * by / records));
            }
            if self.0 == "losses" {
                losses.pop();
            }
            Ok(losses)
        }
    }

    #[test]
    fn mistakes_are_found() {
        check_objective(&Wrong("none")).expect("it has none");
        for (mistake, says) in [
            ("sign", "the slope by the log-probability of sequence 0 is"),
            ("second", "the slope by the log-probability of sequence 1 is 0,"),
            ("records", "record 0 has another loss or another slope by itself"),
            ("losses", "it gave 3 losses for 4 records"),
            ("metrics", "it gave 0 metrics for 4 records of 1"),
            ("ends", "where sequences have the log-probabilities"),
        ] {
            let error = check_objective(&Wrong(mistake)).expect_err(mistake);
            assert!(error.contains(says), "{mistake}: {error}");
        }
    }
}
