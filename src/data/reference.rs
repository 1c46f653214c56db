//! Log-probabilities of records by a reference that was measured: the model as a run begins.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use sha2::{Digest, Sha256};

use super::dataset::Kind;
use super::source::Source;
use super::{Dataset, Sequence};
use crate::error::Error;
use crate::folder::sync;
use crate::hf::hex;
use crate::objectives::Objective;

/// The message about data of which some records alone bring a reference.
pub(super) const IN_SOME: &str = "ref_chosen_logps and ref_rejected_logps are in some records \
                                  and not in others: give them to all, or to none, for which the \
                                  run computes them";

/// A table for each source: the log-probability of each sequence, in the order of the files. Its
/// name is the digest of the source's records.
#[derive(Clone, Debug, Default)]
pub(crate) struct References(BTreeMap<String, Arc<[f64]>>);

impl References {
    /// The file of the tables.
    pub(crate) const FILE: &str = "reference.safetensors";

    /// Reads the tables in a directory. Without their file there are none.
    ///
    /// # Errors
    /// The file cannot be read, or is not what was written.
    pub(crate) fn read(directory: &Path) -> Result<References, Error> {
        let path = directory.join(References::FILE);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(References::default());
            }
            bytes => bytes.map_err(|error| Error::unusable(path.display(), error))?,
        };
        let refuse = |what: &dyn std::fmt::Display| Error::bad_checkpoint(path.display(), what);
        let file = SafeTensors::deserialize(&bytes).map_err(|error| refuse(&error))?;
        let table = |(name, tensor): (String, TensorView<'_>)| match tensor.data().as_chunks() {
            (values, []) if tensor.dtype() == Dtype::F64 => {
                Ok((name, values.iter().map(|value| f64::from_le_bytes(*value)).collect()))
            }
            _ => Err(refuse(&format_args!("{name} is not of type F64"))),
        };
        file.tensors().into_iter().map(table).collect::<Result<_, _>>().map(References)
    }

    /// Writes the tables to a directory, and waits until they are on the disk.
    pub(crate) fn write(&self, directory: &Path) -> io::Result<()> {
        let bytes = |table: &[f64]| table.iter().flat_map(|value| value.to_le_bytes()).collect();
        let all: Vec<(&str, Vec<u8>)> =
            self.0.iter().map(|(name, table)| (&**name, bytes(table))).collect();
        let views = all.iter().map(|(name, bytes)| {
            let view = TensorView::new(Dtype::F64, vec![bytes.len() / size_of::<f64>()], bytes);
            (*name, view.expect("eight bytes a value"))
        });
        let bytes = safetensors::serialize(views, None).map_err(io::Error::other)?;
        let path = directory.join(References::FILE);
        let partial = directory.join("reference.partial");
        fs::write(&partial, bytes)?;
        sync(&partial)?;
        fs::rename(&partial, &path)?;
        sync(directory)
    }

    /// True if there is no table.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Source {
    /// The digest of all records.
    fn records_digest(&self) -> Result<String, Error> {
        let mut hasher = Sha256::new();
        for row in 0..self.len() {
            let Sequence { tokens, labels, documents, .. } = self.spool.read(self.place(row))?;
            hasher.update((documents.len() as u64).to_le_bytes());
            documents.iter().for_each(|&length| hasher.update((length as u64).to_le_bytes()));
            tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
            labels.iter().for_each(|label| hasher.update(label.to_le_bytes()));
        }
        Ok(hex(&hasher.finalize()))
    }

    /// True if the records neither bring a reference nor had one measured.
    fn lacks_reference(&self) -> bool {
        !self.spool.has_reference() && self.reference.is_empty() && self.len() > 0
    }
}

impl Dataset {
    /// The sources without the reference that the objective needs.
    fn lacking(&self) -> impl Iterator<Item = &Source> {
        let sources = match &self.kind {
            Kind::Sources(sources) if self.needs_references => &sources[..],
            _ => &[],
        };
        sources.iter().filter(|source| source.lacks_reference())
    }

    /// The number of records without the reference that the objective needs.
    pub(crate) fn lacks_references(&self) -> u64 {
        self.lacking().map(Source::len).sum()
    }

    /// The records without a reference, in the order of the files.
    pub(crate) fn without_reference(&self) -> impl Iterator<Item = Result<Sequence, Error>> {
        let of = |source: &Source, row| source.spool.read(source.place(row));
        self.lacking().flat_map(move |source| (0..source.len()).map(move |row| of(source, row)))
    }

    /// Changes the sources without a reference.
    fn give(
        &mut self,
        mut give: impl FnMut(&mut Source) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let needs = self.needs_references;
        let Kind::Sources(sources) = &mut self.kind else { return Ok(()) };
        let mut lacking = sources.iter_mut().filter(|source| needs && source.lacks_reference());
        lacking.try_for_each(&mut give)
    }

    /// Takes the tables of its records, as far as there are some.
    pub(crate) fn take_known(&mut self, known: &References) -> Result<(), Error> {
        if known.is_empty() {
            return Ok(());
        }
        self.give(|source| {
            if let Some(table) = known.0.get(&source.records_digest()?) {
                source.reference = table.clone();
            }
            Ok(())
        })
    }

    /// Takes the log-probabilities of the answers of all records without a reference, and adds
    /// their tables.
    pub(crate) fn take_measured(
        &mut self,
        mut measured: &[f64],
        to: &mut References,
    ) -> Result<(), Error> {
        self.give(|source| {
            let (table, rest) = measured.split_at(2 * source.len() as usize);
            measured = rest;
            source.reference = table.into();
            to.0.insert(source.records_digest()?, source.reference.clone());
            Ok(())
        })
    }

    /// Takes the reference that the objective needs from a checkpoint, if the records do not bring
    /// it.
    ///
    /// # Errors
    /// The checkpoint has none of these records.
    pub fn refer_to(&mut self, checkpoint: &Path) -> Result<(), Error> {
        if self.lacks_references() == 0 {
            return Ok(());
        }
        self.take_known(&References::read(checkpoint)?)?;
        match (self.lacks_references(), self.preference) {
            (1.., Some(preference)) => Err(Error::bad_data(
                self.name(),
                format_args!(
                    "objective.kind = {:?} compares answers with a reference, and {} has none of \
                     these records: name the data of the checkpoint's run, or give records the \
                     columns ref_chosen_logps and ref_rejected_logps",
                    preference.name(),
                    checkpoint.join(References::FILE).display()
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Takes a reference by which all answers are certain, if the records bring none: for trials
    /// of speed, whose losses nobody reads.
    pub fn refer_to_nothing(&mut self) {
        let given = self.give(|source| {
            source.reference = vec![0.0; 2 * source.len() as usize].into();
            Ok(())
        });
        given.expect("it reads nothing");
    }
}
