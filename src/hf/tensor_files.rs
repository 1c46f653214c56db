//! Files of tensors while they are written from the EPS, block by block, in any order of blocks.
//!
//! All sizes are known before the first number: headers are written and the space is reserved
//! first, so a full disk is found then. A file has its name when it is complete and on the disk.
//!
//! In a checkpoint, tensors that are frozen have files of their own. These files, and those of
//! layers that were not updated since the checkpoint before, are links to that one's, where the
//! file system has links.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use l2l_actors::schedule::BlockId;
use safetensors::tensor::{Metadata, TensorInfo};

use super::adapters::WEIGHTS;
use super::sealed::file_digest;
use super::weights::{
    FileTensor, FileTensors, adapter_tensors, file_tensors, state_tensors, trained_names,
};
use crate::eps::{BlockPart, Eps, reserve};
use crate::error::Error;
use crate::models::Model;

/// The most bytes of a weight file: transformers' default size of a shard.
pub(super) const SHARD_BYTES: usize = 5_000_000_000;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct TensorFiles {
    files: Vec<OpenFile>,
    /// For each part of a block, where its bytes go.
    pieces: BTreeMap<(BlockId, BlockPart), Vec<Piece>>,
    linked: Vec<LinkedFile>,
}

/// A file that is a link to one of the checkpoint before.
pub(crate) struct LinkedFile {
    path: PathBuf,
    tensors: FileTensors,
}

/// A checkpoint that this process wrote.
#[derive(Clone, Copy)]
pub(crate) struct Before<'b> {
    pub(crate) directory: &'b Path,
    /// The number of updates that each block had had.
    pub(crate) updates: &'b [u64],
}

/// A file without its name.
struct OpenFile {
    path: PathBuf,
    file: File,
}

/// Bytes of a part of a block, and where they go.
struct Piece {
    bytes: Range<usize>,
    file: usize,
    at: u64,
}

impl TensorFiles {
    /// Files of a model's masters: `model.safetensors`, or several and an index.
    ///
    /// # Errors
    /// A file cannot be made, or the disk is full.
    pub(crate) fn of_model(
        directory: &Path,
        model: &Model,
        eps: &Eps,
    ) -> Result<TensorFiles, Error> {
        let all = file_tensors(model, eps, BlockPart::Parameters);
        TensorFiles::in_shards(directory, shards(all, SHARD_BYTES), |_| None)
    }

    /// The same for a checkpoint, in files of at most so many bytes. `before` is one with the same
    /// frozen tensors.
    ///
    /// # Errors
    /// As [`of_model`](TensorFiles::of_model).
    pub(crate) fn of_checkpoint(
        directory: &Path,
        model: &Model,
        eps: &Eps,
        most: Option<u64>,
        before: Option<Before<'_>>,
    ) -> Result<TensorFiles, Error> {
        let most = most.map_or(SHARD_BYTES, |bytes| bytes.try_into().unwrap_or(usize::MAX));
        let names = trained_names(model);
        let all = file_tensors(model, eps, BlockPart::Parameters).into_iter();
        let (trained, frozen) = all.partition(|(name, _)| names.contains(&name[..]));
        let mut all = shards(frozen, most);
        all.extend(shards(trained, most));
        let updates = eps.updates();
        TensorFiles::in_shards(directory, all, |shard| {
            let Before { directory, updates: before } = before?;
            let is_updated = |block: BlockId| {
                let block = block.0 as usize;
                updates.get(block) != before.get(block)
            };
            let is_same = |(name, tensor): (&String, &FileTensor)| {
                let is_frozen = !names.contains(&name[..]);
                is_frozen || !tensor.pieces.iter().any(|(block, _)| is_updated(*block))
            };
            shard.iter().all(is_same).then_some(directory)
        })
    }

    /// One file for each shard: a link to that of the directory that `link_from` gives, if it gives
    /// one and that has the same.
    fn in_shards<'p>(
        directory: &Path,
        mut shards: Vec<FileTensors>,
        link_from: impl Fn(&FileTensors) -> Option<&'p Path>,
    ) -> Result<TensorFiles, Error> {
        let (count, mut all) = (shards.len(), TensorFiles::default());
        if count == 1 {
            all.add(directory.join("model.safetensors"), shards.remove(0))?;
            return Ok(all);
        }
        let (mut map, mut total_bytes) = (serde_json::Map::new(), 0);
        for (index, shard) in shards.into_iter().enumerate() {
            let file = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
            map.extend(shard.keys().map(|name| (name.clone(), file.clone().into())));
            total_bytes += bytes_of(&shard);
            match link_from(&shard) {
                Some(from) => all.link_or_add(&from.join(&file), directory.join(&file), shard)?,
                None => all.add(directory.join(file), shard)?,
            }
        }
        let index =
            serde_json::json!({ "metadata": { "total_size": total_bytes }, "weight_map": map });
        let path = directory.join("model.safetensors.index.json");
        let text = serde_json::to_string_pretty(&index).expect("it is plain JSON");
        let written = fs::write(&path, text).and_then(|()| File::open(&path)?.sync_all());
        written.map_err(|error| Error::storage(path.display(), error))?;
        Ok(all)
    }

    /// A file of adapters, and of what is trained beside them.
    ///
    /// # Errors
    /// As [`of_model`](TensorFiles::of_model).
    pub(crate) fn of_adapters(
        directory: &Path,
        model: &Model,
        eps: &Eps,
    ) -> Result<TensorFiles, Error> {
        let mut all = TensorFiles::default();
        all.add(directory.join(WEIGHTS), adapter_tensors(model, eps))?;
        Ok(all)
    }

    /// The same, with a file of the optimizer's states.
    ///
    /// # Errors
    /// As [`of_model`](TensorFiles::of_model).
    pub(crate) fn with_states(
        mut self,
        path: PathBuf,
        model: &Model,
        eps: &Eps,
    ) -> Result<TensorFiles, Error> {
        self.add(path, state_tensors(model, eps))?;
        Ok(self)
    }

    /// Makes a file a link to another one that has the same header and length. A file that cannot
    /// be linked is written.
    fn link_or_add(
        &mut self,
        from: &Path,
        path: PathBuf,
        tensors: FileTensors,
    ) -> Result<(), Error> {
        let head = head(&path, &tensors)?;
        let is_same = || {
            let file = File::open(from)?;
            let mut found = vec![0; head.len()];
            file.read_exact_at(&mut found, 0)?;
            let len = head.len() + bytes_of(&tensors);
            Ok::<_, io::Error>(found == head && file.metadata()?.len() == len as u64)
        };
        if is_same().unwrap_or(false) && fs::hard_link(from, &path).is_ok() {
            self.linked.push(LinkedFile { path, tensors });
            return Ok(());
        }
        self.add(path, tensors)
    }

    fn add(&mut self, path: PathBuf, tensors: FileTensors) -> Result<(), Error> {
        let head = head(&path, &tensors)?;
        let (begin, bytes) = (head.len() as u64, bytes_of(&tensors) as u64);
        let made = || {
            let file = File::create(partial(&path))?;
            if file.metadata()?.is_file() {
                reserve(&file, begin + bytes)?;
            }
            file.write_all_at(&head, 0)?;
            Ok(file)
        };
        let file = made().map_err(|error: io::Error| Error::storage(path.display(), error))?;
        let (index, mut at) = (self.files.len(), begin);
        self.files.push(OpenFile { path, file });
        for tensor in tensors.into_values() {
            for (block, bytes) in tensor.pieces {
                let len = bytes.len() as u64;
                let pieces = self.pieces.entry((block, tensor.part)).or_default();
                pieces.push(Piece { bytes, file: index, at });
                at += len;
            }
        }
        Ok(())
    }

    /// Writes what the files have of a block; the number of bytes. One part of a block at a time
    /// passes through memory.
    ///
    /// # Errors
    /// The block cannot be read, or a file cannot be written.
    pub(crate) fn write_block(&self, id: BlockId, eps: &Eps) -> Result<u64, Error> {
        let mut sum = 0;
        for ((_, part), pieces) in self.pieces.range((id, BlockPart::FIRST)..=(id, BlockPart::LAST))
        {
            eps.read_with(id, *part, |values| {
                let all: &[u8] = bytemuck::cast_slice(values);
                pieces.iter().try_for_each(|Piece { bytes, file, at }| {
                    let OpenFile { path, file } = &self.files[*file];
                    sum += bytes.len() as u64;
                    let written = file.write_all_at(&all[bytes.clone()], *at);
                    written.map_err(|error| Error::storage(path.display(), error))
                })
            })??;
        }
        Ok(sum)
    }

    /// Waits until the files are on the disk, and gives them their names. Files of these names stay
    /// until then. Returns those that are links.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn publish(self) -> Result<Vec<LinkedFile>, Error> {
        self.files.into_iter().try_for_each(|OpenFile { path, file }| {
            let named = file.sync_all().and_then(|()| fs::rename(partial(&path), &path));
            named.map_err(|error| Error::storage(path.display(), error))
        })?;
        Ok(self.linked)
    }
}

impl LinkedFile {
    /// The file's name.
    pub(crate) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Writes a file in place of the link, for a link to a damaged file. Returns the digest of the
    /// new file.
    ///
    /// # Errors
    /// The blocks cannot be read, or the file cannot be written.
    pub(crate) fn write_anew(self, eps: &Eps) -> Result<String, Error> {
        let mut alone = TensorFiles::default();
        alone.add(self.path.clone(), self.tensors)?;
        let blocks: BTreeSet<BlockId> = alone.pieces.keys().map(|(id, _)| *id).collect();
        for id in blocks {
            alone.write_block(id, eps)?;
        }
        alone.publish()?;
        file_digest(&self.path).map_err(|error| Error::storage(self.path.display(), error))
    }
}

/// Tensors in files of at most so many bytes, if no tensor has more.
fn shards(tensors: FileTensors, most: usize) -> Vec<FileTensors> {
    let (mut shards, mut shard_bytes) = (Vec::<FileTensors>::new(), 0);
    for (name, tensor) in tensors {
        let bytes = tensor.bytes();
        if shards.is_empty() || shard_bytes > 0 && shard_bytes + bytes > most {
            shards.push(FileTensors::new());
            shard_bytes = 0;
        }
        shard_bytes += bytes;
        shards.last_mut().expect("there is one").insert(name, tensor);
    }
    shards
}

/// Bytes of a file's tensors.
fn bytes_of(tensors: &FileTensors) -> usize {
    tensors.values().map(|tensor| tensor.bytes()).sum()
}

/// The name of a file that is not complete.
fn partial(path: &Path) -> PathBuf {
    path.with_extension("safetensors.partial")
}

/// Writes the masters to a directory: to `model.safetensors`, or to several files and an index.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn save(directory: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    write_all(TensorFiles::of_model(directory, model, eps)?, model, eps)
}

fn write_all(files: TensorFiles, model: &Model, eps: &Eps) -> Result<(), Error> {
    let blocks = (0..model.blocks.len() as u32).map(BlockId);
    for id in blocks {
        files.write_block(id, eps)?;
    }
    files.publish().map(drop)
}

/// What a file begins with: the length of its header, and the header.
fn head(path: &Path, tensors: &FileTensors) -> Result<Vec<u8>, Error> {
    let header =
        header(infos(tensors)).map_err(|error: String| Error::bad_model(path.display(), error))?;
    Ok([&(header.len() as u64).to_le_bytes()[..], &header].concat())
}

/// Where the tensors of a file lie in it.
fn infos(tensors: &FileTensors) -> Vec<(String, TensorInfo)> {
    let mut end = 0;
    let infos = tensors.iter().map(|(name, tensor)| {
        let begin = end;
        end += tensor.bytes();
        let (dtype, shape, data_offsets) = (tensor.dtype, tensor.shape.clone(), (begin, end));
        (name.clone(), TensorInfo { dtype, shape, data_offsets })
    });
    infos.collect()
}

/// The header of a safetensors file, padded to a multiple of 8 bytes.
pub(super) fn header(infos: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, String> {
    let about = [("format".to_string(), "pt".to_string())].into_iter().collect();
    let header = Metadata::new(Some(about), infos).map_err(|error| error.to_string())?;
    let mut header = serde_json::to_vec(&header).map_err(|error| error.to_string())?;
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::super::weights::{Load, load};
    use super::*;
    use crate::models::families::gpt2;
    use crate::optimizers::StateLayout;

    #[test]
    fn shards_are_read_as_they_were_written() {
        let model = Model::new(gpt2([2, 16, 2, 24, 50, 9]));
        let none = StateLayout::default;
        let make = || Eps::in_memory(model.blocks.clone(), none(), |_| false);
        let (from, to) = (make(), make());
        from.randomise(&model, 3).expect("memory has no disk");
        let folder = tempfile::tempdir().expect("a place for files");
        let all = file_tensors(&model, &from, BlockPart::Parameters);
        let files = TensorFiles::in_shards(folder.path(), shards(all, 4000), |_| None);
        write_all(files.expect("a directory of ours"), &model, &from).expect("room on a disk");
        let files: Vec<_> = fs::read_dir(folder.path()).expect("it is ours").collect();
        assert!(files.len() > 3, "an index and several files: {files:?}");
        load(folder.path(), &model, &to, Load::AS_WRITTEN).expect("what was just written");
        let digest = |eps: &Eps| eps.digest(&model).expect("in memory");
        assert_eq!(digest(&from), digest(&to));
    }
}
