//! `model.safetensors` into blocks, and blocks into `model.safetensors`.
//!
//! The vocabulary's tables are cut into tiles on the way in and joined on the way out; every other
//! tensor is one of a block's. Checkpoints with and without the family's prefix are read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use half::{bf16, f16};
use l2l_actors::schedule::BlockId;
use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, SafeTensors, TensorInfo, TensorView};

use crate::eps::{Eps, Which};
use crate::error::Error;
use crate::models::{Model, tensor_ranges};

/// A whole tensor of a file, and where its rows lie.
struct Whole {
    which: Which,
    shape: Vec<usize>,
    /// Block, and range of its numbers.
    parts: Vec<(BlockId, Range<usize>)>,
}

impl Whole {
    fn bytes(&self) -> usize {
        self.parts.iter().map(|(_, range)| range.len() * size_of::<f32>()).sum()
    }
}

/// The tensors of a file, by name.
type Wholes = BTreeMap<String, Whole>;

fn wholes(model: &Model, which: Which) -> Wholes {
    let mut all = Wholes::new();
    for (block, tensors) in model.blocks.iter().enumerate() {
        for (tensor, range) in tensors.iter().zip(tensor_ranges(tensors)) {
            let name = match which {
                Which::Parameter => tensor.name.clone(),
                Which::State(index) => format!("{}.state{index}", tensor.name),
            };
            let empty = Whole { which, shape: tensor.shape.clone(), parts: Vec::new() };
            let whole = all.entry(name).or_insert(empty);
            if !whole.parts.is_empty() {
                whole.shape[0] += tensor.shape[0];
            }
            whole.parts.push((BlockId(block as u32), range));
        }
    }
    all
}

/// The tensors of the optimizer's file.
fn states(model: &Model, count: usize) -> Wholes {
    (0..count).flat_map(|index| wholes(model, Which::State(index))).collect()
}

/// Reads a directory's weights into the EPS; `begins`: a head of sequences that it has not keeps the
/// numbers it was made with.
///
/// # Errors
/// The file, and the tensors that are missing, too many or of another shape.
pub(crate) fn load(directory: &Path, model: &Model, eps: &Eps, begins: bool) -> Result<(), Error> {
    let files = weight_files(directory)?;
    read(&files, &wholes(model, Which::Parameter), Some(model), eps, begins)
}

/// Reads the optimizer's states into the EPS.
///
/// # Errors
/// As [`load`].
pub(crate) fn load_states(file: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    read(&[file.to_path_buf()], &states(model, eps.states()), None, eps, false)
}

/// A directory's files of weights: one, or those that an index names.
pub(super) fn weight_files(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let (index, single) =
        (directory.join("model.safetensors.index.json"), directory.join("model.safetensors"));
    if index.exists() && !single.exists() {
        return shards(directory, &index);
    }
    Ok(vec![single])
}

/// The files that an index names, each once.
fn shards(directory: &Path, index: &Path) -> Result<Vec<PathBuf>, Error> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let refuse = |what: String| Error::bad_model(index.display(), what);
    let text = std::fs::read_to_string(index).map_err(|error| refuse(error.to_string()))?;
    let index: Index = serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    let is_plain = |name: &String| {
        let mut parts = Path::new(name).components();
        matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none()
    };
    if names.is_empty() {
        return Err(refuse("it names no file".into()));
    }
    match names.iter().find(|name| !is_plain(name)) {
        Some(name) => Err(refuse(format!("{name:?} is no file beside it"))),
        None => Ok(names.iter().map(|name| directory.join(name)).collect()),
    }
}

/// Reads tensors from files, each mapped and not copied. `of`: the model whose names they have.
fn read(
    files: &[PathBuf],
    wholes: &Wholes,
    of: Option<&Model>,
    eps: &Eps,
    begins: bool,
) -> Result<(), Error> {
    let refuse = |path: &Path, what: &dyn std::fmt::Display| Error::bad_model(path.display(), what);
    let mut maps = Vec::new();
    for path in files {
        let file = File::open(path).map_err(|error| refuse(path, &error))?;
        // SAFETY: a file that somebody cuts short while it is read is not ours to defend against.
        maps.push(unsafe { Mmap::map(&file) }.map_err(|error| refuse(path, &error))?);
    }
    let mut all = Vec::new();
    for (path, map) in files.iter().zip(&maps) {
        all.push(SafeTensors::deserialize(map).map_err(|error| refuse(path, &error))?);
    }
    let prefix = of.map_or("", |model| model.shape.names.prefix);
    let found = |name: &str| {
        let short = name.strip_prefix(prefix).unwrap_or(name);
        let named = |name: &str| all.iter().find_map(|tensors| tensors.tensor(name).ok());
        let old = old_name(name);
        let of_old = || named(&old).or_else(|| named(old.strip_prefix(prefix).unwrap_or(&old)));
        named(name).or_else(|| named(short)).or_else(of_old)
    };
    // A head of sequences that the file has not begins at random, as it was made.
    let is_fresh = |name: &str| {
        let Some(names) = of.map(|model| model.shape.names) else { return false };
        let is_of = |part: &str| !part.is_empty() && name.starts_with(part);
        begins && (is_of(names.class_dense) || is_of(names.class_out)) && found(name).is_none()
    };
    let wholes = wholes.iter().filter(|(name, _)| !is_fresh(name)).collect::<BTreeMap<_, _>>();
    check(&all, &wholes, of, &found).map_err(|what| refuse(&files[0], &what))?;
    // Block by block, for a block on file is written as a whole.
    let mut blocks = BTreeMap::<_, Vec<_>>::new();
    for (name, whole) in wholes {
        let mut from = 0;
        for (block, range) in &whole.parts {
            let parts = blocks.entry((*block, whole.which)).or_default();
            parts.push((name, range.clone(), from));
            from += range.len();
        }
    }
    for ((block, which), parts) in blocks {
        eps.write_with(block, which, |values| {
            for (name, range, from) in parts {
                decode(&mut values[range], &found(name).expect("it was checked"), from);
            }
        })?;
        // What was read need not stay in memory.
        #[cfg(target_os = "linux")]
        for map in &maps {
            // SAFETY: it is of a file, from which the pages come again.
            let _ = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }
    Ok(())
}

/// What a norm's tensor was called in checkpoints of the first BERT.
fn old_name(name: &str) -> String {
    match name.rsplit_once("LayerNorm.") {
        Some((before, "weight")) => format!("{before}LayerNorm.gamma"),
        Some((before, "bias")) => format!("{before}LayerNorm.beta"),
        _ => name.into(),
    }
}

/// What a checkpoint may hold beside a model's parameters: buffers, heads of other tasks, and what
/// is tied.
fn is_spare(name: &str, model: &Model) -> bool {
    const ENDS: [&str; 5] = [
        ".attn.bias",
        ".attn.masked_bias",
        "embeddings.position_ids",
        "rotary_emb.inv_freq",
        ".decoder.bias",
    ];
    const PARTS: [&str; 2] = ["cls.seq_relationship.", "pooler.dense."];
    let names = model.shape.names;
    // A head of tokens, in front of a model that scores sequences.
    let of_tokens = [names.transform, names.transform_norm, names.head_bias, names.head];
    let is_of_tokens = |part: &str| !part.is_empty() && name.starts_with(part);
    if !model.shape.scores_tokens() && of_tokens.iter().any(|part| is_of_tokens(part)) {
        return true;
    }
    ENDS.iter().any(|end| name.ends_with(end))
        || PARTS.iter().any(|part| name.contains(part))
        || (model.shape.tied && name == names.head)
}

fn check<'t>(
    files: &[SafeTensors<'_>],
    wholes: &BTreeMap<&String, &Whole>,
    of: Option<&Model>,
    found: &impl Fn(&str) -> Option<TensorView<'t>>,
) -> Result<(), String> {
    let (mut problems, mut missing) = (Vec::new(), Vec::new());
    for (name, whole) in wholes {
        match found(name) {
            None => missing.push(format!("{name} is missing")),
            Some(view) if view.shape() != whole.shape => {
                let (expected, found) = (&whole.shape, view.shape());
                problems.push(format!("{name}: {expected:?} expected, {found:?} found"));
            }
            Some(view) if !matches!(view.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16) => {
                problems
                    .push(format!("{name}: f32, f16 or bf16 expected, {:?} found", view.dtype()));
            }
            Some(_) => {}
        }
    }
    problems.append(&mut missing);
    let prefix = of.map_or("", |model| model.shape.names.prefix);
    let names = wholes.keys().flat_map(|name| [name.to_string(), old_name(name)]);
    let known: BTreeSet<String> = names
        .flat_map(|name| [name.strip_prefix(prefix).unwrap_or(&name).to_string(), name.clone()])
        .collect();
    for name in files.iter().flat_map(|tensors| tensors.names()) {
        if !known.contains(name) && !of.is_some_and(|model| is_spare(name, model)) {
            problems.push(format!("{name} is in the file and not in the model"));
        }
    }
    const SHOWN: usize = 8;
    match problems.len() {
        0 => Ok(()),
        count if count <= SHOWN => Err(problems.join("; ")),
        count => Err(format!("{}; and {} more", problems[..SHOWN].join("; "), count - SHOWN)),
    }
}

/// Elements `from..` of a tensor, as f32.
fn decode(to: &mut [f32], view: &TensorView<'_>, from: usize) {
    fn each<const N: usize>(
        to: &mut [f32],
        bytes: &[u8],
        from: usize,
        of: impl Fn([u8; N]) -> f32,
    ) {
        for (to, bytes) in to.iter_mut().zip(bytes[from * N..].chunks_exact(N)) {
            *to = of(bytes.try_into().expect("N bytes"));
        }
    }
    match view.dtype() {
        Dtype::F32 => each(to, view.data(), from, f32::from_le_bytes),
        Dtype::F16 => each(to, view.data(), from, |b| f16::from_le_bytes(b).to_f32()),
        Dtype::BF16 => each(to, view.data(), from, |b| bf16::from_le_bytes(b).to_f32()),
        _ => unreachable!("it was checked"),
    }
}

/// Bytes of a file of weights at most, as transformers cuts them.
const SHARD_BYTES: usize = 5_000_000_000;

/// Writes the EPS's weights to a directory's `model.safetensors`, or to several
/// and an index.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn save(directory: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    save_in_shards(directory, model, eps, SHARD_BYTES)
}

fn save_in_shards(directory: &Path, model: &Model, eps: &Eps, most: usize) -> Result<(), Error> {
    let (mut shards, mut bytes, mut all) = (vec![Wholes::new()], 0, 0);
    for (name, whole) in wholes(model, Which::Parameter) {
        let len = whole.bytes();
        if bytes > 0 && bytes + len > most {
            (bytes, _) = (0, shards.push(Wholes::new()));
        }
        (bytes, all) = (bytes + len, all + len);
        shards.last_mut().expect("there is one").insert(name, whole);
    }
    let count = shards.len();
    if count == 1 {
        return write(&directory.join("model.safetensors"), shards.remove(0), eps);
    }
    let mut map = serde_json::Map::new();
    for (index, shard) in shards.into_iter().enumerate() {
        let file = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
        map.extend(shard.keys().map(|name| (name.clone(), file.clone().into())));
        write(&directory.join(file), shard, eps)?;
    }
    let index = serde_json::json!({ "metadata": { "total_size": all }, "weight_map": map });
    let path = directory.join("model.safetensors.index.json");
    let text = serde_json::to_string_pretty(&index).expect("it is plain JSON");
    let written = std::fs::write(&path, text).and_then(|()| File::open(&path)?.sync_all());
    written.map_err(|error| Error::storage(path.display(), error))
}

/// Writes the optimizer's states.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn save_states(file: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    write(file, states(model, eps.states()), eps)
}

/// Whole or not at all, and on the disk when it returns: a file that was there stays until then. A
/// part of a block at a time passes through memory.
fn write(path: &Path, wholes: Wholes, eps: &Eps) -> Result<(), Error> {
    let partial = path.with_extension("safetensors.partial");
    let failed = |error: String| Error::bad_model(path.display(), error);
    let io = |error: io::Error| Error::storage(path.display(), error);
    let mut file = BufWriter::with_capacity(1 << 20, File::create(&partial).map_err(io)?);
    let mut end = 0;
    let tensors = wholes.iter().map(|(name, whole)| {
        let begin = end;
        end += whole.bytes();
        let (dtype, shape, data_offsets) = (Dtype::F32, whole.shape.clone(), (begin, end));
        (name.clone(), TensorInfo { dtype, shape, data_offsets })
    });
    let about = [("format".to_string(), "pt".to_string())].into_iter().collect();
    let header = Metadata::new(Some(about), tensors.collect());
    let header = header.map_err(|error| failed(error.to_string()))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| failed(error.to_string()))?;
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(io)?;
    file.write_all(&header).map_err(io)?;
    for whole in wholes.values() {
        for (block, range) in &whole.parts {
            let written = eps.read_with(*block, whole.which, |values| {
                let mut values = values[range.clone()].iter();
                values.try_for_each(|value| file.write_all(&value.to_le_bytes()))
            })?;
            written.map_err(io)?;
        }
    }
    let file = file.into_inner().map_err(|error| io(error.into_error()))?;
    file.sync_all().and_then(|()| std::fs::rename(&partial, path)).map_err(io)
}

/// Sizes and values of a parameter.
///
/// # Errors
/// There is none of this name, or it cannot be read.
pub(crate) fn tensor(
    name: &str,
    model: &Model,
    eps: &Eps,
) -> Result<(Vec<usize>, Vec<f32>), Error> {
    let whole = wholes(model, Which::Parameter).remove(name);
    let whole =
        whole.ok_or_else(|| Error::argument(format_args!("the model has no tensor {name:?}")))?;
    let mut all = Vec::new();
    for (block, range) in &whole.parts {
        eps.read_with(*block, whole.which, |values| all.extend_from_slice(&values[range.clone()]))?;
    }
    Ok((whole.shape, all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::families::gpt2;

    #[test]
    fn shards_are_read_as_they_were_written() {
        let model = Model::new(gpt2([2, 16, 2, 24, 50, 9]));
        let make = || Eps::in_memory(&model, 0, |_| false);
        let (from, to) = (make(), make());
        from.randomise(3).expect("memory has no disk");
        let folder = tempfile::tempdir().expect("a place for files");
        save_in_shards(folder.path(), &model, &from, 4000).expect("a directory of ours");
        let files: Vec<_> = std::fs::read_dir(folder.path()).expect("it is ours").collect();
        assert!(files.len() > 3, "an index and several files: {files:?}");
        load(folder.path(), &model, &to, false).expect("what was just written");
        assert_eq!(from.digest().expect("in memory"), to.digest().expect("in memory"));
    }
}
