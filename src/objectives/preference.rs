//! Losses of a chosen and a rejected answer: DPO (Rafailov et al. 2023) with the label smoothing of
//! cDPO (Mitchell 2023) and its robust form (Chowdhury et al. 2024), IPO (Azar et al. 2023), SLiC's
//! hinge (Zhao et al. 2023), SimPO (Meng et al. 2024), CPO (Xu et al. 2024), ORPO (Hong et al.
//! 2024).
//!
//! A record has the chosen answer, then the rejected. S is the log-probability of an answer, n its
//! tokens, R the log-probability by the reference. The loss of a step is the mean over all its
//! records, and what `sft` adds is the mean over all tokens of chosen answers of the step.

use super::{Measurements, Objective, Slopes};

/// The kind of a preference loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreferenceKind {
    /// −ln σ(β h), of h = (S − R of the chosen) − (S − R of the rejected).
    Dpo,
    /// (h ÷ n − 1 ÷ 2β)², of log-probabilities a token.
    Ipo,
    /// max(0, 1 − β h).
    Hinge,
    /// −ln σ(β d − γ), of the difference d of log-probabilities a token. No reference.
    Simpo,
    /// −ln σ(β d), of the difference d of log-probabilities. No reference.
    Cpo,
    /// −β ln σ of the difference of log-odds, of log-probabilities a token. No reference.
    Orpo,
}

impl PreferenceKind {
    /// Its name in configs.
    pub fn name(self) -> &'static str {
        match self {
            PreferenceKind::Dpo => "dpo",
            PreferenceKind::Ipo => "ipo",
            PreferenceKind::Hinge => "hinge",
            PreferenceKind::Simpo => "simpo",
            PreferenceKind::Cpo => "cpo",
            PreferenceKind::Orpo => "orpo",
        }
    }

    /// True if it compares answers with a reference.
    pub fn needs_reference(self) -> bool {
        matches!(self, PreferenceKind::Dpo | PreferenceKind::Ipo | PreferenceKind::Hinge)
    }

    /// True if it reads log-probabilities a token.
    fn is_of_means(self) -> bool {
        matches!(self, PreferenceKind::Ipo | PreferenceKind::Simpo | PreferenceKind::Orpo)
    }
}

/// A loss of a chosen and a rejected answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preference {
    /// The kind of the loss.
    pub kind: PreferenceKind,
    /// β.
    pub beta: f64,
    /// γ of SimPO.
    pub gamma: f64,
    /// The share of records whose answers are taken to be the wrong way round, of DPO and SimPO.
    pub label_smoothing: f64,
    /// The robust form of DPO, whose mean over such records is that without them.
    pub robust: bool,
    /// The factor of the mean cross entropy of chosen answers, which is added.
    pub sft: f64,
}

/// A loss, and its derivative by the number that it is a function of.
type Value = (f64, f64);

/// ln σ(x), without overflow.
pub(super) fn log_sigmoid(x: f64) -> f64 {
    if x >= 0.0 { -(-x).exp().ln_1p() } else { x - x.exp().ln_1p() }
}

pub(super) fn sigmoid(x: f64) -> f64 {
    log_sigmoid(x).exp()
}

/// −(1 − ε) ln σ(x) − ε ln σ(−x).
fn smoothed(x: f64, epsilon: f64) -> Value {
    let loss = -(1.0 - epsilon) * log_sigmoid(x) - epsilon * log_sigmoid(-x);
    (loss, -(1.0 - epsilon) * sigmoid(-x) + epsilon * sigmoid(x))
}

/// The log-odds of a probability e^a < 1, and their derivative by a. A probability of 1 has none,
/// so one that rounds to 1 is taken a little smaller.
fn log_odds(a: f64) -> Value {
    let a = a.min(-1e-7);
    let one_minus = -a.exp_m1();
    let log_one_minus =
        if a > -std::f64::consts::LN_2 { one_minus.ln() } else { (-a.exp()).ln_1p() };
    (a - log_one_minus, 1.0 / one_minus)
}

/// The metrics, under the names that TRL's trainers give them, in our words.
const METRICS: [&str; 6] = [
    "reward_accuracy",
    "reward_margin",
    "reward_chosen",
    "reward_rejected",
    "logp_chosen",
    "logp_rejected",
];

impl Preference {
    /// The loss of a record and its derivatives by both numbers: log-probabilities beside the
    /// reference, or a token.
    fn of_pair(&self, chosen: f64, rejected: f64) -> (f64, [f64; 2]) {
        let &Preference { kind, beta, gamma, label_smoothing: epsilon, robust, .. } = self;
        let x = chosen - rejected;
        let (loss, slope) = match kind {
            PreferenceKind::Dpo if robust => {
                let scale = 1.0 / (1.0 - 2.0 * epsilon);
                let loss =
                    -(1.0 - epsilon) * log_sigmoid(beta * x) + epsilon * log_sigmoid(-beta * x);
                let slope =
                    -beta * ((1.0 - epsilon) * sigmoid(-beta * x) + epsilon * sigmoid(beta * x));
                (scale * loss, scale * slope)
            }
            PreferenceKind::Dpo => {
                let (loss, slope) = smoothed(beta * x, epsilon);
                (loss, beta * slope)
            }
            PreferenceKind::Ipo => {
                let over = x - 1.0 / (2.0 * beta);
                (over * over, 2.0 * over)
            }
            PreferenceKind::Hinge => {
                let short = 1.0 - beta * x;
                (short.max(0.0), if short > 0.0 { -beta } else { 0.0 })
            }
            PreferenceKind::Simpo => {
                let (loss, slope) = smoothed(beta * x - gamma, epsilon);
                (loss, beta * slope)
            }
            PreferenceKind::Cpo => {
                let (loss, slope) = smoothed(beta * x, 0.0);
                (loss, beta * slope)
            }
            PreferenceKind::Orpo => {
                let [(of_chosen, by_chosen), (of_rejected, by_rejected)] =
                    [log_odds(chosen), log_odds(rejected)];
                let odds = of_chosen - of_rejected;
                let slope = -beta * sigmoid(-odds);
                return (-beta * log_sigmoid(odds), [slope * by_chosen, -slope * by_rejected]);
            }
        };
        (loss, [slope, -slope])
    }
}

impl Objective for Preference {
    fn name(&self) -> String {
        self.kind.name().into()
    }

    fn sequences(&self) -> usize {
        2
    }

    fn needs_reference(&self) -> bool {
        self.kind.needs_reference()
    }

    fn metric_names(&self) -> &'static [&'static str] {
        &METRICS
    }

    /// The reward of an answer is β (S − R); without a reference β S, and of a loss that reads
    /// log-probabilities a token β S ÷ n. IPO's is not of a token, as in TRL.
    fn metrics(&self, of: &Measurements<'_>) -> Vec<f64> {
        let of_token = self.kind.is_of_means() && !self.needs_reference();
        let record = |record: usize| {
            let [chosen, rejected] = [2 * record, 2 * record + 1].map(|one| {
                let tokens = if of_token { of.tokens(one).max(1) as f64 } else { 1.0 };
                let by_reference = if self.needs_reference() { of.reference(one) } else { 0.0 };
                let log = of.log_probability(one) / tokens;
                [self.beta * (log - by_reference), log]
            });
            let is_right = f64::from(u8::from(chosen[0] > rejected[0]));
            let margin = chosen[0] - rejected[0];
            [is_right, margin, chosen[0], rejected[0], chosen[1], rejected[1]]
        };
        (0..of.records()).flat_map(record).collect()
    }

    fn loss(&self, of: &Measurements<'_>, slopes: &mut Slopes<'_>) -> Result<Vec<f64>, String> {
        let records = of.records_of_step() as f64;
        let chosen_tokens = of.tokens_at(0) as f64;
        let mut losses = Vec::with_capacity(of.records());
        for record in 0..of.records() {
            let answers = [2 * record, 2 * record + 1];
            let lengths = answers.map(|one| match of.tokens(one) {
                0 => Err(format!("record {record} has an answer without a labelled token")),
                tokens => Ok(if self.kind.is_of_means() { tokens as f64 } else { 1.0 }),
            });
            let [chosen_length, rejected_length] = lengths;
            let lengths = [chosen_length?, rejected_length?];
            let number = |nth: usize| {
                let one = answers[nth];
                let by_reference = if self.needs_reference() { of.reference(one) } else { 0.0 };
                (of.log_probability(one) - by_reference) / lengths[nth]
            };
            let (loss, by_number) = self.of_pair(number(0), number(1));
            let mut loss = loss / records;
            for nth in 0..2 {
                slopes.add(answers[nth], by_number[nth] / (records * lengths[nth]));
            }
            if self.sft > 0.0 {
                loss -= self.sft * of.log_probability(answers[0]) / chosen_tokens;
                slopes.add(answers[0], -self.sft / chosen_tokens);
            }
            losses.push(loss);
        }
        Ok(losses)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{SequenceSlopes, SequenceValues};
    use super::*;

    const KINDS: [PreferenceKind; 6] = [
        PreferenceKind::Dpo,
        PreferenceKind::Ipo,
        PreferenceKind::Hinge,
        PreferenceKind::Simpo,
        PreferenceKind::Cpo,
        PreferenceKind::Orpo,
    ];

    fn of(kind: PreferenceKind) -> Preference {
        Preference { kind, beta: 0.5, gamma: 0.3, label_smoothing: 0.0, robust: false, sft: 0.0 }
    }

    /// The losses and slopes of answers of these log-probabilities and tokens.
    fn losses(
        one: &Preference,
        answers: &[(f64, usize)],
        reference: &[f64],
    ) -> (Vec<f64>, Vec<f64>) {
        let value = |&(log_probability, tokens): &(f64, usize)| SequenceValues {
            log_probability,
            tokens,
            ..SequenceValues::default()
        };
        let sequences: Vec<_> = answers.iter().map(value).collect();
        let labelled: Vec<u32> = answers.iter().map(|(_, tokens)| *tokens as u32).collect();
        let of = Measurements {
            sequences: &sequences,
            reference,
            labelled: &labelled,
            each: 2,
            ids: &[],
            starts: &[],
            scores: &[],
        };
        let mut slopes = vec![SequenceSlopes::default(); answers.len()];
        let losses = one.loss(&of, &mut Slopes(&mut slopes)).expect("losses");
        (losses, slopes.iter().map(|slopes| slopes.of_sequence).collect())
    }

    #[test]
    fn slopes_are_the_differences_of_losses() {
        let answers = [(-3.0, 4), (-2.0, 3), (-0.75, 2), (-9.5, 5)];
        let reference = [-2.5, -2.25, -1.0, -9.0];
        let mut all: Vec<Preference> = KINDS.map(of).to_vec();
        let smoothed = |kind| Preference { label_smoothing: 0.2, ..of(kind) };
        all.extend([smoothed(PreferenceKind::Dpo), smoothed(PreferenceKind::Simpo)]);
        all.push(Preference { robust: true, ..smoothed(PreferenceKind::Dpo) });
        all.extend(KINDS.map(|kind| Preference { sft: 0.7, ..of(kind) }));
        for one in all {
            let sum = |answers: &[(f64, usize)]| -> f64 {
                losses(&one, answers, &reference).0.into_iter().sum()
            };
            let (_, slopes) = losses(&one, &answers, &reference);
            for (nth, slope) in slopes.into_iter().enumerate() {
                let moved = |by: f64| {
                    let mut answers = answers;
                    answers[nth].0 += by;
                    sum(&answers)
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((slope - difference).abs() < 1e-8, "{one:?} {nth}: {slope} {difference}");
            }
        }
    }

    #[test]
    fn numbers_at_the_ends_stay_finite() {
        for (a, b) in [(-1e4, -1.0), (-1.0, -1e4), (-1e-12, -1e-300), (0.0, 0.0), (-1e4, -1e4)] {
            for kind in KINDS {
                let (loss, slopes) = losses(&of(kind), &[(a, 1), (b, 1)], &[0.0, 0.0]);
                let all = [&loss[..], &slopes].concat();
                assert!(all.iter().all(|number| number.is_finite()), "{kind:?} {a} {b}: {all:?}");
            }
        }
    }

    #[test]
    fn what_is_known_of_the_losses() {
        let same = [(-3.0, 4), (-2.0, 3)];
        // The model as training begins is the reference.
        let (loss, _) = losses(&of(PreferenceKind::Dpo), &same, &[-3.0, -2.0]);
        assert_eq!(loss, [std::f64::consts::LN_2]);
        // Half of the answers are the wrong way round: nothing is to be learnt.
        let half = Preference { label_smoothing: 0.5, ..of(PreferenceKind::Dpo) };
        assert_eq!(losses(&half, &same, &[-3.0, -2.0]).1, [0.0, 0.0]);
        // IPO is content at a difference of 1 ÷ 2β a token.
        let (loss, slopes) = losses(&of(PreferenceKind::Ipo), &[(-2.0, 2), (-6.0, 3)], &[0.0; 2]);
        assert_eq!((loss, slopes), (vec![0.0], vec![0.0, 0.0]));
        // Records count as often as they come.
        let twice = [same, same].concat();
        for kind in KINDS {
            let [(once, _), (both, _)] =
                [losses(&of(kind), &same, &[0.0; 2]), losses(&of(kind), &twice, &[0.0; 4])];
            assert_eq!(both, [once[0] / 2.0, once[0] / 2.0], "{kind:?}");
        }
        let none = [(0.0, 0), (-1.0, 2)].map(|(log_probability, tokens)| SequenceValues {
            log_probability,
            tokens,
            ..SequenceValues::default()
        });
        let of_none = Measurements {
            sequences: &none,
            reference: &[],
            labelled: &[0, 2],
            each: 2,
            ids: &[],
            starts: &[],
            scores: &[],
        };
        let mut slopes = [(); 2].map(|()| SequenceSlopes::default());
        let refused = of(PreferenceKind::Cpo).loss(&of_none, &mut Slopes(&mut slopes));
        assert_eq!(refused, Err("record 0 has an answer without a labelled token".into()));
    }
}
