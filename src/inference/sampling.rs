//! Draws a token from logits, by temperature and from the likeliest tokens. The same seed draws the
//! same tokens.

use std::collections::BTreeSet;

use crate::error::Error;
use crate::random;

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The divisor of the logits. 0 means: always the likeliest token.
    pub temperature: f32,
    /// The number of the likeliest tokens that are kept. 0 means: all.
    pub top_k: usize,
    /// The probability of the tokens that are kept: the likeliest tokens that have it together
    /// (Holtzman et al. 2020).
    pub top_p: f32,
    /// The least probability of a token that is kept, as a share of the likeliest token's. 0 means:
    /// all are kept.
    pub min_p: f32,
    /// The penalty for tokens of the prompt and of the text so far: their logits are divided by it
    /// if they are above 0, else multiplied (Keskar et al. 2019). 1 means: no penalty.
    pub repetition_penalty: f32,
    /// The seed of all draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Refuses values that are out of range.
    ///
    /// # Errors
    /// The temperature is negative or not finite, `top_p` is outside (0, 1], `min_p` outside
    /// [0, 1], or the penalty is not above 0.
    pub fn check(&self) -> Result<(), Error> {
        let Sampling { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        if !(temperature.is_finite() && temperature >= 0.0) {
            let what = format_args!("a temperature of {temperature}: it must be 0 or more");
            return Err(Error::argument(what));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            let what = format_args!("a top-p of {top_p}: it must be above 0 and at most 1");
            return Err(Error::argument(what));
        }
        if !(0.0..=1.0).contains(&min_p) {
            let what = format_args!("a min-p of {min_p}: it must be from 0 to 1");
            return Err(Error::argument(what));
        }
        if !(repetition_penalty.is_finite() && repetition_penalty > 0.0) {
            let what =
                format_args!("a repetition penalty of {repetition_penalty}: it must be above 0");
            return Err(Error::argument(what));
        }
        Ok(())
    }
}

/// The draws of one sequence.
pub(crate) struct Dice {
    how: Sampling,
    state: u64,
    /// The tokens of the prompt and of the text so far. Empty without a penalty for them.
    seen: BTreeSet<u32>,
}

impl Dice {
    /// The draws of a sequence, by its index.
    pub(crate) fn new(how: Sampling, sequence: u64) -> Dice {
        Dice { how, state: random::keyed(how.seed, sequence), seen: BTreeSet::new() }
    }

    /// Adds tokens that get a penalty from the next draw on.
    pub(crate) fn see(&mut self, tokens: &[u32]) {
        if self.how.repetition_penalty != 1.0 {
            self.seen.extend(tokens);
        }
    }

    /// Draws a token, which then gets a penalty, too.
    pub(crate) fn draw(&mut self, logits: &[f32]) -> u32 {
        let mut penalised = Vec::new();
        if !self.seen.is_empty() {
            penalised.extend_from_slice(logits);
            let penalty = self.how.repetition_penalty;
            for &token in &self.seen {
                if let Some(logit) = penalised.get_mut(token as usize) {
                    *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                }
            }
        }
        let drawn = self.drawn(if penalised.is_empty() { logits } else { &penalised });
        self.see(&[drawn]);
        drawn
    }

    fn drawn(&mut self, logits: &[f32]) -> u32 {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.how;
        // Of equal logits the first counts.
        let likeliest =
            (1..logits.len()).fold(0, |best, at| if logits[at] > logits[best] { at } else { best });
        // Logits of a model whose training diverged may be no numbers.
        if temperature == 0.0 || !logits[likeliest].is_finite() {
            return likeliest as u32;
        }
        let mut tokens: Vec<usize> =
            (0..logits.len()).filter(|&token| !logits[token].is_nan()).collect();
        // Filters keep the first tokens in this order.
        let order = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        if top_k > 0 && top_k < tokens.len() {
            tokens.select_nth_unstable_by(top_k - 1, order);
            tokens.truncate(top_k);
        }
        let most = f64::from(logits[likeliest]);
        let weight =
            |&token: &usize| ((f64::from(logits[token]) - most) / f64::from(temperature)).exp();
        if top_p < 1.0 {
            tokens.sort_unstable_by(order);
            let all: f64 = tokens.iter().map(weight).sum();
            let mut before = 0.0;
            let kept = tokens.iter().take_while(|token| {
                let is_needed = before < f64::from(top_p) * all;
                before += weight(token);
                is_needed
            });
            let kept = kept.count();
            tokens.truncate(kept.max(1));
        }
        tokens.retain(|token| weight(token) >= f64::from(min_p));
        tokens.sort_unstable();
        let all: f64 = tokens.iter().map(weight).sum();
        let mut left = random::unit(&mut self.state) * all;
        let last = tokens[tokens.len() - 1];
        let drawn = tokens.iter().find(|token| {
            left -= weight(token);
            left < 0.0
        });
        *drawn.unwrap_or(&last) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 6] = [0.5, 1.5, -1.0, 0.0, 1.0, -3.0];

    fn how(temperature: f32, top_k: usize, top_p: f32, seed: u64) -> Sampling {
        Sampling { temperature, top_k, top_p, seed, ..Sampling::default() }
    }

    #[test]
    fn the_likeliest_at_temperature_zero() {
        assert_eq!(Dice::new(how(0.0, 0, 1.0, 3), 0).draw(&LOGITS), 1);
        assert_eq!(Dice::new(how(0.0, 0, 1.0, 3), 0).draw(&[2.0, 7.0, 7.0]), 1);
        assert_eq!(Dice::new(how(1.0, 1, 1.0, 3), 0).draw(&LOGITS), 1);
        assert_eq!(Dice::new(how(1.0, 0, 1e-6, 3), 0).draw(&LOGITS), 1);
    }

    /// A model that diverged has such logits.
    #[test]
    fn logits_that_are_no_numbers_are_drawn_from() {
        let nan = f32::NAN;
        let inf = f32::INFINITY;
        for (logits, token) in [([nan; 3], 0), ([inf; 3], 0), ([-inf; 3], 0), ([1.0, nan, nan], 0)]
        {
            for top_p in [1.0, 0.5] {
                let how = Sampling { min_p: 0.1, ..how(1.0, 2, top_p, 3) };
                assert_eq!(Dice::new(how, 0).draw(&logits), token, "{logits:?}");
            }
        }
    }

    /// Pearson's statistic of 20,000 draws stays below the 99.9 % point for 5 degrees of freedom.
    fn check(how: Sampling, kept: &[usize]) {
        let weight = |token: &usize| f64::from(LOGITS[*token] / how.temperature).exp();
        let all: f64 = kept.iter().map(weight).sum();
        const DRAWS: u32 = 20_000;
        let mut counts = [0_u32; 6];
        let mut dice = Dice::new(how, 7);
        (0..DRAWS).for_each(|_| counts[dice.draw(&LOGITS) as usize] += 1);
        let terms = kept.iter().map(|token| {
            let expected = f64::from(DRAWS) * weight(token) / all;
            (f64::from(counts[*token]) - expected).powi(2) / expected
        });
        let statistic: f64 = terms.sum();
        assert!(statistic < 20.5, "{how:?}: {statistic}: {counts:?}");
        let others = (0..6).filter(|token| !kept.contains(token)).map(|token| counts[token]);
        assert_eq!(others.sum::<u32>(), 0, "{how:?}: {counts:?}");
    }

    #[test]
    fn frequencies_are_the_softmax_of_what_is_kept() {
        check(how(1.0, 0, 1.0, 1), &[0, 1, 2, 3, 4, 5]);
        check(how(0.7, 0, 1.0, 2), &[0, 1, 2, 3, 4, 5]);
        check(how(1.3, 3, 1.0, 3), &[1, 4, 0]);
        // At temperature 1 the likeliest have 0.429, 0.260, 0.158, 0.096 of all.
        check(how(1.0, 0, 0.8, 4), &[1, 4, 0]);
        check(how(1.0, 0, 0.6, 5), &[1, 4]);
        check(how(1.0, 2, 0.7, 6), &[1, 4]);
    }

    #[test]
    fn unlikely_tokens_are_left_out() {
        // Of the likeliest the others have 0.61, 0.37, 0.22, 0.08, 0.01.
        check(Sampling { min_p: 0.3, ..how(1.0, 0, 1.0, 8) }, &[1, 4, 0]);
        check(Sampling { min_p: 1.0, ..how(1.0, 0, 1.0, 9) }, &[1]);
    }

    #[test]
    fn tokens_that_were_there_are_less_likely() {
        let how = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let mut dice = Dice::new(how, 0);
        assert_eq!(dice.draw(&LOGITS), 1);
        assert_eq!(dice.draw(&LOGITS), 4); // 1.5 ÷ 2 is less than 1
        dice.see(&[0, 3]);
        // 0.25, 0.75, -1, 0, 0.5 and -3 are left.
        assert_eq!(dice.draw(&LOGITS), 1);
        assert_eq!(dice.draw(&[-1.0, -2.0, -3.0]), 0); // -2, -4, -3
        assert_eq!(dice.draw(&[-1.6, -2.0, -3.0]), 2); // -3.2, -4, -3
    }

    #[test]
    fn a_seed_draws_the_same_again() {
        let draws = |seed, sequence| {
            let mut dice = Dice::new(how(1.0, 0, 1.0, seed), sequence);
            (0..50).map(|_| dice.draw(&LOGITS)).collect::<Vec<_>>()
        };
        assert_eq!(draws(1, 0), draws(1, 0));
        assert_ne!(draws(1, 0), draws(2, 0));
        assert_ne!(draws(1, 0), draws(1, 1));
    }
}
