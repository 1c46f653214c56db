//! The reference of a preference: the log-probabilities of all records by the model as the run
//! begins. Checkpoints keep them, and so does `eps.path`.

use std::sync::Arc;

use super::Trainer;
use crate::blocking::unblock;
use crate::data::{Batch, Dataset, References};
use crate::error::Error;

/// How much of a reference is measured.
#[derive(Clone, Copy)]
pub(super) struct Measured {
    pub(super) batches: u64,
    pub(super) of: u64,
}

impl Trainer {
    /// Gives the records of a dataset the reference that their objective needs: from the checkpoint
    /// that the run resumes from, or else measured of the model, which must be untrained. `goes_on`
    /// is called before each batch, and ends the measurement with `false`. Returns the number of
    /// sequences that were measured.
    ///
    /// # Errors
    /// The run resumes from a checkpoint that has no reference for these records; or as
    /// [`step`](Trainer::step).
    pub(super) async fn refer(
        &mut self,
        data: &mut Dataset,
        goes_on: &mut (dyn FnMut(&Trainer, Measured) -> Result<bool, Error> + Send),
    ) -> Result<u64, Error> {
        data.take_known(&self.run.references)?;
        let records = data.lacks_references();
        if records == 0 {
            return Ok(0);
        }
        if self.progress.step > 0 {
            return Err(self.lacks_reference(data.name()));
        }
        let each = self.run.config.step.batch;
        let mut measured = Vec::new();
        let mut all = data.without_reference();
        for batches in 0.. {
            let progress = Measured { batches, of: records.div_ceil(each as u64) };
            let records = all.by_ref().take(each).collect::<Result<Vec<_>, Error>>()?;
            if records.is_empty() {
                break;
            }
            if !goes_on(self, progress)? {
                return Ok(0);
            }
            let batch = Batch::of_records(&records);
            let found = match batch.labelled {
                0 => vec![0.0; batch.sequences()], // Sums of nothing.
                _ => self.log_probabilities(batch).await?,
            };
            if let Some(at) = found.iter().position(|one| !one.is_finite()) {
                let record = batches * each as u64 + at as u64 / 2 + 1;
                return Err(Error::NotFinite(format!(
                    "data {}: the model gives an answer of record {record} the log-probability \
                     {}, and the reference must be finite",
                    data.name(),
                    found[at]
                )));
            }
            measured.extend(found);
        }
        drop(all);
        let mut references = References::clone(&self.run.references);
        data.take_measured(&measured, &mut references)?;
        self.run.references = Arc::new(references);
        Ok(measured.len() as u64)
    }

    /// The refusal of a run that resumes without a reference for its data.
    fn lacks_reference(&self, data: &str) -> Error {
        let what = match self.run.references.is_empty() {
            true => "is missing in the state that the run resumes from",
            false => "in the state that the run resumes from is of other data",
        };
        Error::bad_checkpoint(
            References::FILE,
            format_args!(
                "{what}, and data {data} needs its own: the reference is the model that the run \
                 began with. Set the data back, give records the columns ref_chosen_logps and \
                 ref_rejected_logps, or set model.path to the checkpoint to begin a new run"
            ),
        )
    }

    /// Keeps the references beside the state in `eps.path`, if the run has one.
    pub(super) async fn keep_references(&self) -> Result<(), Error> {
        let references = self.run.references.clone();
        let folder = self.worker().eps().file().and_then(|file| file.folder());
        let Some(folder) = folder.filter(|_| !references.is_empty()) else { return Ok(()) };
        let folder = folder.to_path_buf();
        let failed = move |error| Error::storage("eps.path", error);
        unblock(move || references.write(&folder)).await?.map_err(failed)
    }
}
