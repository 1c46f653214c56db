//! Checks of a batch against a model and its plan.

use super::Batch;
use crate::error::Error;
use crate::kernels::ProblemType;
use crate::models::{Head, Model};

impl Batch {
    /// Checks the batch against the model and against the plan, which has memory for `sequences`
    /// sequences of at most `longest` tokens.
    ///
    /// # Errors
    /// The batch is empty, larger or longer than planned, has a token or a label outside the
    /// model's range, or has no label.
    pub(crate) fn check(
        &self,
        model: &Model,
        longest: usize,
        sequences: usize,
    ) -> Result<(), Error> {
        let vocabulary = model.shape.vocabulary;
        let has = self.sequences();
        if has == 0 || has > sequences || self.lengths().any(|length| length == 0) {
            return Err(Error::bad_batch(format_args!(
                "a batch of {has} sequences: it must have 1 to {sequences} (step.batch), none empty"
            )));
        }
        if self.longest() > longest {
            return Err(Error::bad_batch(format_args!(
                "a sequence of {} tokens: the plan was made for at most {longest}",
                self.longest()
            )));
        }
        let mut left_out = self.lengths().zip(&self.skipped);
        if let Some((length, _)) = left_out.find(|(length, out)| **out as usize >= *length) {
            return Err(Error::bad_batch(format_args!(
                "the embedding of a sequence of {length} tokens leaves all of them out"
            )));
        }
        let known = |token: u32| (token as usize) < vocabulary;
        let is_known = |label: u32| match model.shape.head {
            Head::Tokens | Head::Masked => known(label),
            Head::Classes { problem: ProblemType::Regression, .. } => true,
            Head::Classes { labels, .. } => (label as usize) < labels,
            Head::TokenClasses { labels } => (label as usize) < labels,
            Head::Embedding { .. } => true,
        };
        let is_bad = |target: &&i32| **target >= 0 && !is_known(**target as u32);
        if let Some(token) = self.tokens.iter().find(|token| !known(**token)) {
            return Err(Error::bad_batch(format_args!(
                "token {token} is outside the vocabulary of {vocabulary}"
            )));
        }
        if let Some(label) = self.targets.iter().find(is_bad) {
            return Err(Error::bad_batch(match model.shape.head {
                Head::Classes { labels, .. } | Head::TokenClasses { labels } => {
                    format!("label {label} is none of the {labels} classes, which count from 0")
                }
                Head::Tokens | Head::Masked | Head::Embedding { .. } => {
                    format!("label {label} is outside the vocabulary of {vocabulary}")
                }
            }));
        }
        self.check_label_sets(model.shape.head)?;
        if self.labelled == 0 {
            return Err(Error::bad_batch("no position of the batch has a label"));
        }
        Ok(())
    }

    /// Refuses label sets that the head does not score, and the lack of those that it scores.
    fn check_label_sets(&self, head: Head) -> Result<(), Error> {
        let needs = head.label_set().unwrap_or(0) * self.sequences();
        let has = self.label_sets.len();
        if has != needs {
            return Err(Error::bad_batch(format_args!(
                "{has} labels in sets of labels, and the model scores {needs}: make the batch \
                 for what the model predicts"
            )));
        }
        let mut values = self.label_sets.iter().map(|&bits| f32::from_bits(bits as u32));
        match values.find(|value| !(0.0..=1.0).contains(value)) {
            Some(value) => Err(Error::bad_batch(format_args!(
                "label {value} in a set of labels: it must be 0 to 1"
            ))),
            None => Ok(()),
        }
    }
}
