//! A checkpoint that is being written, block by block.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use l2l_actors::schedule::BlockId;

use super::directory::{PARTIAL, publish, recover, with_suffix};
use super::record::{RunRecord, record_in};
use super::{Identity, Progress};
use crate::eps::Eps;
use crate::error::Error;
use crate::folder::sync;
use crate::hf::{self, Before, RECORD, TensorFiles};
use crate::resolve;

/// A checkpoint that is being written. Its directory has another name until it is complete.
pub(crate) struct Draft {
    directory: PathBuf,
    files: TensorFiles,
    record: RunRecord,
    /// The digests of the checkpoint before, to whose files some files are links.
    linked_digests: BTreeMap<String, String>,
}

impl Draft {
    /// Reserves the disk space of all blocks, which are all of the step in `progress`. `before` is
    /// a checkpoint that this process wrote: files whose blocks were not updated since are links to
    /// its files. The folder of the checkpoints must exist: a folder that was removed during the
    /// run is not made again.
    pub(crate) fn begin(
        directory: &Path,
        before: Option<&Path>,
        run: &Identity,
        eps: &Eps,
        progress: &Progress,
    ) -> Result<Draft, Error> {
        let failed = |error: io::Error| Error::storage(directory.display(), error);
        recover(directory).map_err(failed)?;
        let partial = with_suffix(directory, PARTIAL);
        fs::create_dir(&partial).map_err(failed)?;
        let before = before.filter(|before| *before != directory);
        let before = before.and_then(|before| Some((before, record_in(before)?)));
        let files = match run.config.train.lora {
            Some(_) => TensorFiles::of_adapters(&partial, &run.model, eps)?,
            None => {
                let before = before.as_ref();
                let before = before
                    .map(|(directory, record)| Before { directory, updates: &record.updates });
                let most = run.config.checkpoint.shard_size.bytes();
                TensorFiles::of_checkpoint(&partial, &run.model, eps, most, before)?
            }
        };
        let files = files.with_states(partial.join(hf::STATES), &run.model, eps)?;
        let files = files.with_older(partial.join(hf::OLDER), &run.model, eps)?;
        let record = RunRecord::new(run, progress, eps.updates());
        let linked_digests = before.map(|(_, record)| record.files).unwrap_or_default();
        Ok(Draft { directory: directory.into(), files, record, linked_digests })
    }

    /// Writes a block, and returns the number of its bytes.
    pub(crate) fn write_block(&self, id: BlockId, eps: &Eps) -> Result<u64, Error> {
        self.files.write_block(id, eps)
    }

    /// Adds all other files after the blocks, seals the directory, gives it its name, and waits
    /// until all of it is on the disk.
    pub(crate) fn publish(self, run: &Identity, eps: &Eps) -> Result<(), Error> {
        let Draft { directory, files, mut record, linked_digests } = self;
        let failed = |error: io::Error| Error::storage(directory.display(), error);
        let partial = with_suffix(&directory, PARTIAL);
        let linked = files.publish()?;
        hf::write_config(&partial, &run.model.shape, &run.source_config)?;
        sync(&partial.join("config.json")).map_err(failed)?;
        // The source's, which are copied next, may say something else.
        let positions = run.config.sequence_length(&run.model.shape)?;
        if run.model.shape.embeds() {
            let of = hf::OfSentences {
                positions,
                prompts: &resolve::prompts_of(&run.config)?,
                from: &resolve::directories_of(&run.config),
            };
            hf::write_sentence_modules(&partial, &run.model.shape, &of)?;
        }
        if let Some(path) = &run.config.model.path {
            hf::copy_companions(&[path], &partial).map_err(failed)?;
        }
        if let Some(lora) = resolve::training_of(&run.config)?.lora {
            let base = run.config.model.path.as_deref();
            hf::write_adapter_config(&partial, &run.model, &lora, base)?;
        }
        if !run.references.is_empty() {
            run.references.write(&partial).map_err(failed)?;
        }
        record.files = hf::file_digests(&partial).map_err(failed)?;
        for file in linked {
            let name = file.name();
            if record.files.get(&name) != linked_digests.get(&name) {
                record.files.insert(name, file.write_anew(eps)?);
            }
        }
        let text = serde_json::to_string_pretty(&record).expect("it is plain data");
        fs::write(partial.join(RECORD), hf::seal(&text)).map_err(failed)?;
        sync(&partial.join(RECORD)).map_err(failed)?;
        publish(&partial, &directory).map_err(failed)
    }
}
