//! Weights and optimizer states: the tensors of files, and how they are read into the EPS.
//! [`TensorFiles`](super::tensor_files::TensorFiles) writes them.
//!
//! The embedding and the head are cut into tiles when they are read, and joined when they are
//! written. Every other tensor is one tensor of a block. Checkpoints may leave out the family's
//! prefix of tensor names.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use half::{bf16, f16};
use l2l_actors::schedule::BlockId;
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView};

use super::adapters::{PREFIX, WEIGHTS, has_adapters};
use super::dense::{dense_tensors, read_dense, trained_dense};
use super::found::Found;
use super::names::{Spelling, check, find, is_of_new_head};
use super::tied::is_tied;
use super::weight_file::WeightFile;
use super::{json, quantised};
use crate::eps::{BlockRun, Eps};
use crate::error::Error;
use crate::models::adapters::is_of_adapter;
use crate::models::families::Names;
use crate::models::{BlockTensors, Model, is_of_dense};
use crate::optimizers::{RuleState, StateDtype};

/// A tensor of a file, and the place of its elements in the EPS.
#[derive(Clone)]
pub(super) struct FileTensor {
    pub(super) part: BlockRun,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// The tensor's rows, in order: a block, and a range of bytes in the block's part. A tensor
    /// that is cut into tiles has several.
    pub(super) pieces: Vec<(BlockId, Range<usize>)>,
}

impl FileTensor {
    pub(super) fn bytes(&self) -> usize {
        self.pieces.iter().map(|(_, range)| range.len()).sum()
    }
}

/// The index of a model whose weights are in several files.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The file of a model whose weights are in one.
pub(super) const SINGLE: &str = "model.safetensors";

const FLOAT: usize = size_of::<f32>();

/// Elements of a tensor that one thread reads at once: a megabyte, which is little beside a tensor
/// and much beside a page of the file.
pub(super) const CHUNK: usize = 1 << 18;

/// The range of floats at these bytes.
fn floats(bytes: &Range<usize>) -> Range<usize> {
    bytes.start / FLOAT..bytes.end / FLOAT
}

/// The tensors of a file, by name.
pub(super) type FileTensors = BTreeMap<String, FileTensor>;

/// The parameters of a model without adapters.
fn base_tensors(model: &Model, eps: &Eps) -> FileTensors {
    let mut all = file_tensors(model, eps, BlockRun::Parameters);
    all.retain(|name, _| !is_of_adapter(name) && !is_of_dense(name));
    all
}

/// The names of the parameters that are trained.
pub(super) fn trained_names(model: &Model) -> BTreeSet<&str> {
    let trained = model.blocks.iter().flat_map(BlockTensors::trained);
    trained.map(|tensor| &tensor.name[..]).collect()
}

/// The parameters of a model's adapters, and the parameters that are trained beside them, under
/// their names in PEFT.
pub(super) fn adapter_tensors(model: &Model, eps: &Eps) -> FileTensors {
    let trained = trained_names(model);
    named_as_in_peft(model, eps, |name| trained.contains(name))
}

/// Some parameters of a model, under their names in PEFT.
fn named_as_in_peft(model: &Model, eps: &Eps, is_wanted: impl Fn(&str) -> bool) -> FileTensors {
    let all = file_tensors(model, eps, BlockRun::Parameters).into_iter();
    let all = all.filter(|(name, _)| is_wanted(name) && !is_of_dense(name));
    all.map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor)).collect()
}

/// The parameters as files have them. transformers has the bias of a masked head under two names,
/// and expects both where the head has a table of its own.
pub(super) fn stored_parameters(model: &Model, eps: &Eps) -> FileTensors {
    let mut all = file_tensors(model, eps, BlockRun::Parameters);
    all.retain(|name, _| !is_of_dense(name));
    let [of_layer, alone] = model.shape.names.head_biases();
    if let Some(bias) = all.get(&of_layer).filter(|_| model.shape.masked_head()).cloned() {
        all.insert(alone, bias);
    }
    all
}

/// The tensors of a file of adapters. Where PEFT ties the head again, it also looks for the head.
pub(super) fn stored_adapters(model: &Model, eps: &Eps) -> FileTensors {
    let mut all = adapter_tensors(model, eps);
    let Names { embedding, head, .. } = *model.shape.names;
    let table = all.get(&format!("{PREFIX}{embedding}"));
    let ties = model.shape.tied && model.shape.scores_vocabulary();
    if let Some(table) = table.filter(|_| ties).cloned() {
        all.insert(format!("{PREFIX}{head}"), table);
    }
    all
}

/// The tensors of a model's parameters, or of one of the optimizer's states.
pub(super) fn file_tensors(model: &Model, eps: &Eps, part: BlockRun) -> FileTensors {
    let mut all = FileTensors::new();
    for (id, tensors) in (0..).map(BlockId).zip(&model.blocks).filter(|(_, all)| !all.is_empty()) {
        for (tensor, state, range) in eps.pieces(id, part, tensors) {
            let (name, dtype, shape) = match state {
                None => (tensor.name.clone(), Dtype::F32, tensor.sizes_in_file(&tensor.shape)),
                Some(RuleState { name, dtype, shape }) => {
                    let name = format!("{}.{name}", tensor.name);
                    (name, dtype_of(dtype), tensor.sizes_in_file(&shape))
                }
            };
            let rows = shape[0];
            let empty = FileTensor { part, dtype, shape, pieces: Vec::new() };
            let joined = all.entry(name).or_insert(empty);
            if !joined.pieces.is_empty() {
                joined.shape[0] += rows;
            }
            joined.pieces.push((id, range));
        }
    }
    all
}

fn dtype_of(dtype: StateDtype) -> Dtype {
    match dtype {
        StateDtype::F32 => Dtype::F32,
        StateDtype::Bf16 => Dtype::BF16,
        StateDtype::U8 => Dtype::U8,
    }
}

/// The tensors of the optimizer's states.
pub(super) fn state_tensors(model: &Model, eps: &Eps) -> FileTensors {
    eps.state_runs().flat_map(|part| file_tensors(model, eps, part)).collect()
}

/// Reads a directory's weights into the EPS. With [`Load::to_train`] the files may lack the tensors
/// of a head, so that a pretrained model gets a new head. Such tensors keep their initial values.
/// Returns their names. Tensors that adapters bring (`brought`) are not read: the files may lack
/// them, or have others.
///
/// # Errors
/// A file cannot be read, or tensors are missing, unknown or of another shape.
pub(crate) fn load(
    directory: &Path,
    model: &Model,
    eps: &Eps,
    how: Load,
    brought: &[String],
) -> Result<Vec<String>, Error> {
    let files = weight_files(directory)?;
    let tensors = &base_tensors(model, eps);
    let wanted = Wanted { tensors, spelling: Some(spelling_of(directory, model)), brought };
    let missing = read(&files, &wanted, eps, how)?;
    read_dense(directory, dense_tensors(model, eps), eps, how)?;
    Ok(missing)
}

/// The names of a model's tensors in the weight files of a directory.
fn spelling_of<'m>(directory: &Path, model: &'m Model) -> Spelling<'m> {
    let is_tied = model.shape.tied || is_tied(directory);
    Spelling { model, of_adapters: false, is_tied }
}

/// Reads the trained tensors into the EPS, from a checkpoint of the whole model.
pub(crate) fn load_trained(directory: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    let files = weight_files(directory)?;
    let how = Load { tensors: Tensors::Trained, all_finite: false };
    let tensors = &base_tensors(model, eps);
    let wanted = Wanted { tensors, spelling: Some(spelling_of(directory, model)), brought: &[] };
    read(&files, &wanted, eps, how)?;
    read_dense(directory, trained_dense(model, eps), eps, how)
}

/// Reads the adapters of a run's own checkpoint, and all tensors that are trained beside them, into
/// the EPS.
pub(crate) fn load_own_adapters(directory: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    read_adapters(directory, &adapter_tensors(model, eps), model, eps, Load::AS_WRITTEN)?;
    read_dense(directory, trained_dense(model, eps), eps, Load::AS_WRITTEN)
}

/// Reads adapters, and the tensors that the file has beside them (`saved`), into the EPS. All other
/// tensors keep their values.
pub(crate) fn load_adapters(
    directory: &Path,
    saved: &[String],
    model: &Model,
    eps: &Eps,
    how: Load,
) -> Result<(), Error> {
    let is_wanted = |name: &str| is_of_adapter(name) || saved.iter().any(|one| one == name);
    read_adapters(directory, &named_as_in_peft(model, eps, is_wanted), model, eps, how)?;
    // Dense modules that were trained beside the adapters; else those of the model stay.
    let mut beside = dense_tensors(model, eps);
    beside.retain(|(folder, _)| directory.join(folder).join(SINGLE).is_file());
    read_dense(directory, beside, eps, how)
}

/// Reads a file of adapters that has these tensors and no others.
fn read_adapters(
    directory: &Path,
    tensors: &FileTensors,
    model: &Model,
    eps: &Eps,
    how: Load,
) -> Result<(), Error> {
    let spelling = Spelling { model, of_adapters: true, is_tied: model.shape.tied };
    let wanted = Wanted { tensors, spelling: Some(spelling), brought: &[] };
    read(&[directory.join(WEIGHTS)], &wanted, eps, how).map(drop)
}

/// Reads the trained weights before the last update into the EPS.
pub(crate) fn load_older(file: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    let tensors = &file_tensors(model, eps, BlockRun::Older);
    let wanted = Wanted { tensors, spelling: None, brought: &[] };
    read(&[file.to_path_buf()], &wanted, eps, Load::AS_WRITTEN).map(drop)
}

/// Reads the optimizer's states into the EPS.
pub(crate) fn load_states(file: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    let wanted = Wanted { tensors: &state_tensors(model, eps), spelling: None, brought: &[] };
    read(&[file.to_path_buf()], &wanted, eps, Load::AS_WRITTEN).map(drop)
}

/// Refuses a tensor with an infinite value or NaN.
///
/// # Errors
/// The index of the first such value.
pub(super) fn check_finite(name: &str, view: &TensorView<'_>) -> Result<(), String> {
    fn first<const N: usize>(bytes: &[u8], is_finite: fn([u8; N]) -> bool) -> Option<usize> {
        bytes.as_chunks::<N>().0.iter().position(|&bytes| !is_finite(bytes))
    }
    let found = match view.dtype() {
        Dtype::F32 => first(view.data(), |bytes| f32::from_le_bytes(bytes).is_finite()),
        Dtype::F16 => first(view.data(), |bytes| f16::from_le_bytes(bytes).is_finite()),
        Dtype::BF16 => first(view.data(), |bytes| bf16::from_le_bytes(bytes).is_finite()),
        _ => None,
    };
    let Some(at) = found else { return Ok(()) };
    let mut value = [0.0];
    decode(&mut value, view, at);
    Err(format!(
        "element {at} of tensor {name} is {}: its training diverged, or the file is damaged. Use \
         another checkpoint, or read it all the same with --unsealed (model.unsealed = true)",
        value[0]
    ))
}

/// The weight files of a directory: a single file, or the files of an index.
pub(super) fn weight_files(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let index = directory.join(INDEX);
    let single = directory.join(SINGLE);
    if index.exists() && !single.exists() {
        return shards(directory, &index);
    }
    if !single.exists() && has_adapters(directory) {
        let what = "it holds adapters, and not the model that they belong to: set model.path to \
                    that model, and train.lora.path to this directory";
        return Err(Error::bad_model(directory.display(), what));
    }
    if !single.exists() && !index.exists() {
        let old = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
        if let Some(file) = old.iter().find(|file| directory.join(file).is_file()) {
            let what = format_args!(
                "it has {file}, a Python pickle, which is not read because it may run code. \
                 Convert it with transformers: python -c \"from transformers import AutoModel as \
                 M; M.from_pretrained('{0}').save_pretrained('{0}')\" (AutoModelForCausalLM for a \
                 model that generates)",
                directory.display()
            );
            return Err(Error::bad_model(directory.display(), what));
        }
    }
    Ok(vec![single])
}

/// Refuses a directory whose weights are in a format that is not read.
pub(crate) fn check_format(directory: &Path) -> Result<(), Error> {
    weight_files(directory)?;
    quantised::check_config(directory)
}

/// The files of an index.
fn shards(directory: &Path, index: &Path) -> Result<Vec<PathBuf>, Error> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let refuse = |what: String| Error::bad_model(index.display(), what);
    let Index { weight_map } = json::read(index)?;
    let names: BTreeSet<String> = weight_map.into_values().collect();
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

/// The tensors that are read, and whether their values are checked.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    tensors: Tensors,
    /// Whether an infinite value or NaN is an error.
    all_finite: bool,
}

impl Load {
    /// All tensors, with any values that a run wrote.
    pub(crate) const AS_WRITTEN: Load = Load { tensors: Tensors::All, all_finite: false };

    /// A model that is trained. A head that the files do not have keeps its random values.
    pub(crate) fn to_train(all_finite: bool) -> Load {
        Load { tensors: Tensors::ButMissingHead, all_finite }
    }

    /// A model, or adapters, whose tensors must all be there.
    pub(crate) fn to_use(all_finite: bool) -> Load {
        Load { tensors: Tensors::All, all_finite }
    }
}

/// Which tensors of a file are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tensors {
    All,
    /// All, but a new head may be missing: see `is_of_new_head`.
    ButMissingHead,
    /// The trained ones alone. All tensors must be in the files.
    Trained,
}

/// The tensors of files that are read.
pub(super) struct Wanted<'w> {
    pub(super) tensors: &'w FileTensors,
    /// Other names of the same tensors. `None`: the files have no other names, because l2l wrote
    /// them.
    pub(super) spelling: Option<Spelling<'w>>,
    /// The names of tensors that adapters replace: they are neither read nor compared.
    pub(super) brought: &'w [String],
}

/// Reads tensors of files into the EPS. Returns the names of missing tensors that may be missing.
pub(super) fn read(
    paths: &[PathBuf],
    wanted: &Wanted<'_>,
    eps: &Eps,
    Load { tensors: reads, all_finite }: Load,
) -> Result<Vec<String>, Error> {
    let &Wanted { tensors, spelling, brought } = wanted;
    let files = paths.iter().map(|path| WeightFile::open(path)).collect::<Result<Vec<_>, _>>()?;
    let parsed: Vec<SafeTensors<'_>> = files.iter().map(WeightFile::tensors).collect();
    let model = spelling.map(|spelling| spelling.model);
    let find = |name: &str| match spelling {
        Some(spelling) => spelling.find(&parsed, name),
        None => find(&parsed, name, "").map(Found::Stored),
    };
    let keeps_initial = |name: &str| {
        let may_miss = reads == Tensors::ButMissingHead;
        may_miss && model.is_some_and(|model| is_of_new_head(name, model)) && find(name).is_none()
    };
    let own = tensors.iter().filter(|(name, _)| !brought.contains(name));
    let (missing, tensors): (BTreeMap<_, _>, BTreeMap<_, _>) =
        own.partition(|(name, _)| keeps_initial(name));
    check(&parsed, &tensors, spelling, brought, &find).map_err(|what| files[0].refuse(what))?;
    if all_finite {
        let views = tensors.keys().filter_map(|name| Some((name, find(name)?)));
        let views: Vec<(&&String, Found<'_>)> = views.collect();
        let found = views.par_iter().find_map_first(|(name, view)| {
            let file = files.iter().find(|file| file.has(view.data())).unwrap_or(&files[0]);
            view.check_finite(name).map_err(|what| file.refuse(what)).err()
        });
        found.map_or(Ok(()), Err)?;
    }
    // Block by block, because the EPS on file writes whole blocks.
    let mut blocks = BTreeMap::<_, Vec<_>>::new();
    let trained = model.filter(|_| reads == Tensors::Trained).map(trained_names);
    let is_read = |name: &str| trained.as_ref().is_none_or(|trained| trained.contains(name));
    for (name, tensor) in tensors.into_iter().filter(|(name, _)| is_read(name)) {
        let mut from = 0;
        for (block, range) in &tensor.pieces {
            let pieces = blocks.entry((*block, tensor.part)).or_default();
            pieces.push((name, range.clone(), from));
            from += range.len();
        }
    }
    for ((block, part), pieces) in blocks {
        eps.write_with(block, part, |values| {
            for (name, range, from) in pieces {
                let view = find(name).expect("check() found it");
                if part == BlockRun::Parameters {
                    let to = values[floats(&range)].par_chunks_mut(CHUNK).enumerate();
                    to.for_each(|(nth, to)| view.decode(to, from / FLOAT + nth * CHUNK));
                } else {
                    let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
                    let from = view.data()[from..][..range.len()].par_chunks(FLOAT * CHUNK);
                    let to = bytes[range].par_chunks_mut(FLOAT * CHUNK);
                    to.zip(from).for_each(|(to, from)| to.copy_from_slice(from));
                }
            }
        })?;
        files.iter().for_each(WeightFile::forget_pages);
    }
    Ok(missing.into_keys().cloned().collect())
}

/// All elements of a tensor, as f32.
pub(super) fn decode_all(view: &TensorView<'_>) -> Vec<f32> {
    let mut values = vec![0.0; view.shape().iter().product()];
    decode(&mut values, view, 0);
    values
}

/// Fills `to` with a tensor's elements from `from` on, as f32.
pub(super) fn decode(to: &mut [f32], view: &TensorView<'_>, from: usize) {
    fn each<const N: usize>(to: &mut [f32], bytes: &[u8], as_f32: impl Fn([u8; N]) -> f32) {
        to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, &bytes)| *to = as_f32(bytes));
    }
    let bytes = &view.data()[from * view.dtype().bitsize() / 8..];
    match view.dtype() {
        Dtype::F32 => each(to, bytes, f32::from_le_bytes),
        Dtype::F16 => each(to, bytes, |bytes| f16::from_le_bytes(bytes).to_f32()),
        Dtype::BF16 => each(to, bytes, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        _ => unreachable!("check() refuses other dtypes"),
    }
}

/// The shape and the values of a parameter, by its name.
///
/// # Errors
/// The model has no tensor of this name, or the tensor cannot be read.
pub(crate) fn tensor(
    name: &str,
    model: &Model,
    eps: &Eps,
) -> Result<(Vec<usize>, Vec<f32>), Error> {
    let tensor = file_tensors(model, eps, BlockRun::Parameters).remove(name);
    let tensor =
        tensor.ok_or_else(|| Error::argument(format_args!("the model has no tensor {name:?}")))?;
    let mut all = Vec::new();
    for (block, range) in &tensor.pieces {
        eps.read_with(*block, tensor.part, |values| all.extend_from_slice(&values[floats(range)]))?;
    }
    Ok((tensor.shape, all))
}
