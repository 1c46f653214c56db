//! Writes files of tensors from the EPS, block by block, in any order of blocks.
//!
//! All sizes are known at the start. So headers are written and space is reserved first, and a full
//! disk is found then. A file gets its name when it is complete and on the disk.
//!
//! In a checkpoint, frozen tensors have files of their own. If the file system has hard links,
//! these files are links to the files of the checkpoint before, and so are the files of layers that
//! were not updated since.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use l2l_actors::schedule::BlockId;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::adapters::WEIGHTS;
use super::dense::{dense_tensors, trained_dense};
use super::json;
use super::sealed::file_digest;
use super::weights::{
    FileTensor, FileTensors, INDEX, SINGLE, file_tensors, state_tensors, stored_adapters,
    stored_parameters, trained_names,
};
use crate::eps::{BlockRun, Eps, reserve};
use crate::error::Error;
use crate::folder;
use crate::models::Model;

/// The most bytes of a weight file: transformers' default size of a shard.
pub(super) const SHARD_BYTES: usize = 5_000_000_000;

/// Files that are being written.
#[derive(Default)]
pub(crate) struct TensorFiles {
    files: Vec<OpenFile>,
    /// For each part of a block, the places of its bytes in the files.
    pieces: BTreeMap<(BlockId, BlockRun), Vec<Piece>>,
    linked: Vec<LinkedFile>,
}

/// A file that is a link to a file of the checkpoint before.
pub(crate) struct LinkedFile {
    path: PathBuf,
    tensors: FileTensors,
}

/// The last checkpoint that this process wrote.
#[derive(Clone, Copy)]
pub(crate) struct Before<'b> {
    pub(crate) directory: &'b Path,
    /// The number of updates of each block at that time.
    pub(crate) updates: &'b [u64],
}

/// A file that does not have its name yet.
struct OpenFile {
    path: PathBuf,
    file: File,
}

/// Bytes of a part of a block, and their place in a file.
struct Piece {
    bytes: Range<usize>,
    file: usize,
    at: u64,
}

impl TensorFiles {
    /// Files of a model's masters: `model.safetensors`, or several and an index.
    pub(crate) fn of_model(
        directory: &Path,
        model: &Model,
        eps: &Eps,
    ) -> Result<TensorFiles, Error> {
        let all = stored_parameters(model, eps);
        let files = TensorFiles::in_shards(directory, shards(all, SHARD_BYTES), |_| None)?;
        files.with_dense(directory, dense_tensors(model, eps))
    }

    /// Files of a checkpoint's masters, of at most `most` bytes. `before` is a checkpoint with the
    /// same frozen tensors.
    pub(crate) fn of_checkpoint(
        to: &Path,
        model: &Model,
        eps: &Eps,
        most: Option<u64>,
        before: Option<Before<'_>>,
    ) -> Result<TensorFiles, Error> {
        let most = shard_bytes(most);
        let mut names = trained_names(model);
        if names.contains(&model.shape.head_bias()[..]) {
            names.insert(model.shape.names.head_bias); // its second name
        }
        let all = stored_parameters(model, eps).into_iter();
        let (trained, frozen) = all.partition(|(name, _)| names.contains(&name[..]));
        let mut all = shards(frozen, most);
        all.extend(shards(trained, most));
        let updates = eps.updates();
        let files = TensorFiles::in_shards(to, all, |shard| {
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
        })?;
        files.with_dense(to, dense_tensors(model, eps))
    }

    /// Adds the files of dense modules, each in its folder.
    fn with_dense(
        mut self,
        directory: &Path,
        modules: Vec<(&'static str, FileTensors)>,
    ) -> Result<TensorFiles, Error> {
        for (module, tensors) in modules {
            let at = directory.join(module);
            folder::create(&at).map_err(|error| Error::storage(at.display(), error))?;
            self.add(at.join(SINGLE), tensors)?;
        }
        Ok(self)
    }

    /// One file for each shard. If `link_from` returns a directory that has the same file, this
    /// file is a link to it.
    fn in_shards<'p>(
        directory: &Path,
        shards: Vec<FileTensors>,
        link_from: impl Fn(&FileTensors) -> Option<&'p Path>,
    ) -> Result<TensorFiles, Error> {
        let count = shards.len();
        let mut all = TensorFiles::default();
        let mut weight_map = Map::new();
        let mut total_bytes = 0;
        for (index, shard) in shards.into_iter().enumerate() {
            let file = shard_name(index, count);
            weight_map.extend(shard.keys().map(|name| (name.clone(), file.clone().into())));
            total_bytes += bytes_of(&shard);
            // A single file has trained tensors, so it is not the same as before.
            match link_from(&shard).filter(|_| count > 1) {
                Some(from) => all.link_or_add(&from.join(&file), directory.join(&file), shard)?,
                None => all.add(directory.join(file), shard)?,
            }
        }
        write_index(directory, count, weight_map, total_bytes)?;
        Ok(all)
    }

    /// A file of adapters, and of the tensors that are trained beside them.
    pub(crate) fn of_adapters(
        directory: &Path,
        model: &Model,
        eps: &Eps,
    ) -> Result<TensorFiles, Error> {
        let mut all = TensorFiles::default();
        all.add(directory.join(WEIGHTS), stored_adapters(model, eps))?;
        all.with_dense(directory, trained_dense(model, eps))
    }

    /// Adds a file of the optimizer's states.
    pub(crate) fn with_states(
        mut self,
        path: PathBuf,
        model: &Model,
        eps: &Eps,
    ) -> Result<TensorFiles, Error> {
        self.add(path, state_tensors(model, eps))?;
        Ok(self)
    }

    /// Adds a file of the trained weights before the last update, if the EPS has them.
    pub(crate) fn with_older(
        mut self,
        path: PathBuf,
        model: &Model,
        eps: &Eps,
    ) -> Result<TensorFiles, Error> {
        if eps.has_older() {
            self.add(path, file_tensors(model, eps, BlockRun::Older))?;
        }
        Ok(self)
    }

    /// Adds a link to a file with the same header and length. A file that cannot be linked is
    /// written.
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
        let begin = head.len() as u64;
        let bytes = bytes_of(&tensors) as u64;
        let made = || {
            let file = File::create(partial(&path))?;
            if file.metadata()?.is_file() {
                reserve(&file, begin + bytes)?;
            }
            file.write_all_at(&head, 0)?;
            Ok(file)
        };
        let file = made().map_err(|error: io::Error| Error::storage(path.display(), error))?;
        let index = self.files.len();
        let mut at = begin;
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

    /// Writes a block's tensors to the files, and returns the number of bytes. Memory holds one
    /// part of the block at a time.
    pub(crate) fn write_block(&self, id: BlockId, eps: &Eps) -> Result<u64, Error> {
        let mut sum = 0;
        for ((_, part), pieces) in self.pieces.range((id, BlockRun::FIRST)..=(id, BlockRun::LAST)) {
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

    /// Writes all blocks, and publishes the files.
    fn write_all(self, eps: &Eps) -> Result<(), Error> {
        let blocks: BTreeSet<BlockId> = self.pieces.keys().map(|(id, _)| *id).collect();
        for id in blocks {
            self.write_block(id, eps)?;
        }
        self.publish().map(drop)
    }

    /// Waits until the files are on the disk, and gives them their names. Older files of these
    /// names stay until then. Returns the files that are links.
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

    /// Replaces a link to a damaged file by a new file, and returns the new file's digest.
    pub(crate) fn write_anew(self, eps: &Eps) -> Result<String, Error> {
        let mut alone = TensorFiles::default();
        alone.add(self.path.clone(), self.tensors)?;
        alone.write_all(eps)?;
        file_digest(&self.path).map_err(|error| Error::storage(self.path.display(), error))
    }
}

/// The most bytes of a checkpoint's file of weights.
pub(crate) fn shard_bytes(most: Option<u64>) -> usize {
    most.map_or(SHARD_BYTES, |bytes| bytes.try_into().unwrap_or(usize::MAX))
}

/// Tensors, cut into files of at most `most` bytes.
fn shards(tensors: FileTensors, most: usize) -> Vec<FileTensors> {
    let sizes: Vec<usize> = tensors.values().map(FileTensor::bytes).collect();
    let mut tensors = tensors.into_iter();
    let files = cut_into_files(&sizes, most).into_iter();
    files.map(|file| tensors.by_ref().take(file.len()).collect()).collect()
}

/// Cuts a list of tensors of these sizes into files of at most `most` bytes. A larger tensor has a
/// file of its own.
pub(crate) fn cut_into_files(sizes: &[usize], most: usize) -> Vec<Range<usize>> {
    let mut files: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0;
    for (at, size) in sizes.iter().enumerate() {
        match files.last_mut() {
            Some(file) if bytes == 0 || bytes + size <= most => file.end = at + 1,
            _ => {
                files.push(at..at + 1);
                bytes = 0;
            }
        }
        bytes += size;
    }
    files
}

/// The name of one of `count` files of weights, as transformers names them.
pub(super) fn shard_name(index: usize, count: usize) -> String {
    match count {
        1 => SINGLE.into(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    }
}

/// Writes the index of several files of weights. A single file needs none.
pub(super) fn write_index(
    directory: &Path,
    count: usize,
    weight_map: Map<String, Value>,
    total_bytes: usize,
) -> Result<(), Error> {
    if count == 1 {
        return Ok(());
    }
    let index = json!({ "metadata": { "total_size": total_bytes }, "weight_map": weight_map });
    json::write(&directory.join(INDEX), &index)
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
pub(crate) fn save(directory: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    TensorFiles::of_model(directory, model, eps)?.write_all(eps)
}

/// The header of a file of these tensors.
fn head(path: &Path, tensors: &FileTensors) -> Result<Vec<u8>, Error> {
    let tensors = tensors.iter();
    header(path, tensors.map(|(name, tensor)| (name.clone(), tensor.dtype, tensor.shape.clone())))
}

/// What a safetensors file begins with: the length of its header, and the header, padded to a
/// multiple of 8 bytes. The data of the tensors (name, dtype, shape) follows in their order.
pub(super) fn header(
    path: &Path,
    tensors: impl Iterator<Item = (String, Dtype, Vec<usize>)>,
) -> Result<Vec<u8>, Error> {
    let mut end = 0;
    let infos = tensors.map(|(name, dtype, shape)| {
        let begin = end;
        end += bytes_in(dtype, &shape);
        (name, TensorInfo { dtype, shape, data_offsets: (begin, end) })
    });
    let about = [("format".to_string(), "pt".to_string())].into_iter().collect();
    let header = Metadata::new(Some(about), infos.collect());
    let header = header.map_err(|error| Error::bad_model(path.display(), error))?;
    let mut header = serde_json::to_vec(&header).expect("it is plain JSON");
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header].concat())
}

/// Bytes of a tensor.
pub(super) fn bytes_in(dtype: Dtype, shape: &[usize]) -> usize {
    shape.iter().product::<usize>() * dtype.bitsize() / 8
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
        let make = || Eps::in_memory(model.blocks.clone(), none(), |_| false, None);
        let from = make();
        let to = make();
        from.randomise(&model, 3, |_| true).expect("memory has no disk");
        let folder = tempfile::tempdir().expect("a place for files");
        let all = stored_parameters(&model, &from);
        let files = TensorFiles::in_shards(folder.path(), shards(all, 4000), |_| None);
        files.expect("a directory of ours").write_all(&from).expect("room on a disk");
        let files: Vec<_> = fs::read_dir(folder.path()).expect("it is ours").collect();
        assert!(files.len() > 3, "an index and several files: {files:?}");
        load(folder.path(), &model, &to, Load::AS_WRITTEN, &[]).expect("what was just written");
        let digest = |eps: &Eps| eps.digest(&model).expect("in memory");
        assert_eq!(digest(&from), digest(&to));
    }
}
