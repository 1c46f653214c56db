//! Checks of a batch before a step.

use super::Engine;
use crate::config::ReferenceKind;
use crate::data::Batch;
use crate::error::Error;
use crate::plan::Purpose;

impl Engine {
    /// Checks that a batch fits the plan and the model.
    ///
    /// # Errors
    /// The batch does not fit.
    pub(crate) fn check(&self, batch: &Batch) -> Result<(), Error> {
        batch.check(&self.model, self.plan.batch.positions, self.plan.batch.sequences)
    }

    /// Refuses a batch that does not consist of whole records. A text that goes on is no record.
    fn check_records(&self, batch: &Batch) -> Result<(), Error> {
        let has = batch.sequences();
        let each = self.model.sequences_of_record();
        if has.is_multiple_of(each) {
            return Ok(());
        }
        Err(Error::bad_batch(format_args!(
            "a batch of {has} sequences, and a record of the objective has {each}"
        )))
    }

    /// Refuses a batch without the reference or the scores that the model's objective needs.
    ///
    /// # Errors
    /// The batch has none.
    pub(crate) fn check_reference(&self, batch: &Batch) -> Result<(), Error> {
        let is_in_step = self.config.objective.reference == Some(ReferenceKind::InStep);
        match &self.model.objective {
            Some(objective) if objective.needs_scores() && batch.scores.is_empty() => {
                Err(Error::bad_batch(format_args!(
                    "objective {} needs a score of each record: Sequence::score",
                    objective.name()
                )))
            }
            Some(_) if is_in_step => Ok(()),
            Some(objective) if objective.needs_reference() && batch.reference.is_empty() => {
                Err(Error::bad_batch(format_args!(
                    "objective {} needs the log-probability of each sequence by a reference: \
                     Trainer::open and Trainer::fit compute it, and Batch::with_reference gives it",
                    objective.name()
                )))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a batch that this purpose cannot have.
    pub(super) fn check_purpose(&self, batch: &Batch, purpose: Purpose) -> Result<(), Error> {
        let embeds = self.model.shape.embeds();
        let evaluates = purpose == Purpose::Evaluate;
        // Embeddings are of each text by itself.
        if evaluates || (purpose == Purpose::Measure && !embeds) {
            self.check_records(batch)?;
        }
        if !evaluates {
            return Ok(());
        }
        if embeds && self.model.objective.is_none() {
            let problem = "is not set, and a model that makes embeddings has no loss without it: \
                           set it, for example to \"contrastive\"";
            return Err(Error::config("objective.kind", problem));
        }
        self.check_reference(batch)
    }
}
