//! `model.safetensors` into blocks, and blocks into `model.safetensors`.
//!
//! The vocabulary's tables are cut into tiles on the way in and joined on the way out; every other
//! tensor is one of a block's. Checkpoints with and without the `transformer.` prefix are read.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use l2l_actors::schedule::{BlockId, Version};
use memmap2::Mmap;
use safetensors::tensor::{SafeTensors, TensorView, View};
use safetensors::{Dtype, serialize_to_file};

use crate::eps::{Block, Eps};
use crate::error::Error;
use crate::models::{Model, tensor_ranges};

const PREFIX: &str = "transformer.";

/// Which of the numbers that belong to each parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    /// The parameter.
    Parameter,
    /// One of the optimizer's states of it.
    State(usize),
}

impl Which {
    fn of(self, block: &Block) -> &[f32] {
        match self {
            Which::Parameter => &block.parameters,
            Which::State(index) => &block.states[index],
        }
    }

    fn of_mut(self, block: &mut Block) -> &mut [f32] {
        match self {
            Which::Parameter => &mut block.parameters,
            Which::State(index) => &mut block.states[index],
        }
    }
}

/// A whole tensor of a file, and where its rows lie.
struct Whole {
    which: Which,
    shape: Vec<usize>,
    /// Block, and range of its numbers.
    parts: Vec<(BlockId, Range<usize>)>,
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

/// Reads a directory's weights into the EPS.
///
/// # Errors
/// The file, and the tensors that are missing, too many or of another shape.
pub(crate) fn load(directory: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    let file = directory.join("model.safetensors");
    read(&file, &wholes(model, Which::Parameter), model.shape.tied, eps)
}

/// Reads the optimizer's states into the EPS.
///
/// # Errors
/// As [`load`].
pub(crate) fn load_states(file: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    read(file, &states(model, eps.states()), false, eps)
}

fn read(path: &Path, wholes: &Wholes, tied: bool, eps: &Eps) -> Result<(), Error> {
    let refuse = |what: String| Error::refused(format_args!("{}: {what}", path.display()));
    let file = File::open(path).map_err(|error| refuse(error.to_string()))?;
    // SAFETY: a file that somebody cuts short while it is read is not ours to defend against.
    let bytes = unsafe { Mmap::map(&file) }.map_err(|error| refuse(error.to_string()))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| refuse(error.to_string()))?;
    let found = |name: &str| {
        let short = name.strip_prefix(PREFIX).unwrap_or(name);
        tensors.tensor(name).or_else(|_| tensors.tensor(short)).ok()
    };
    check(&tensors, wholes, tied, found).map_err(refuse)?;
    for (name, whole) in wholes {
        let view = found(name).expect("it was checked");
        let mut from = 0;
        for (block, range) in &whole.parts {
            let mut lease = eps.write(*block, 0);
            decode(&mut whole.which.of_mut(&mut lease)[range.clone()], &view, from);
            from += range.len();
        }
    }
    Ok(())
}

/// What a checkpoint holds beside a model's parameters.
fn is_buffer(name: &str) -> bool {
    name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")
}

fn check<'t>(
    tensors: &SafeTensors<'_>,
    wholes: &Wholes,
    tied: bool,
    found: impl Fn(&str) -> Option<TensorView<'t>>,
) -> Result<(), String> {
    let mut problems = Vec::new();
    for (name, whole) in wholes {
        match found(name) {
            None => problems.push(format!("{name} is missing")),
            Some(view) if view.shape() != whole.shape => {
                problems.push(format!(
                    "{name}: {:?} expected, {:?} found",
                    whole.shape,
                    view.shape()
                ));
            }
            Some(view) if !matches!(view.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16) => {
                problems
                    .push(format!("{name}: f32, f16 or bf16 expected, {:?} found", view.dtype()));
            }
            Some(_) => {}
        }
    }
    let known: BTreeSet<&str> = wholes
        .keys()
        .flat_map(|name| [&**name, name.strip_prefix(PREFIX).unwrap_or(name)])
        .collect();
    for name in tensors.names() {
        let is_tied_head = tied && name == "lm_head.weight";
        if !known.contains(name) && !is_buffer(name) && !is_tied_head {
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

/// A tensor on its way out: its numbers are gathered when they are asked for, so that one tensor at
/// a time is in memory twice.
struct Out<'e> {
    whole: Whole,
    eps: &'e Eps,
    version: Version,
}

impl Out<'_> {
    /// Takes its numbers, part by part.
    fn each(&self, mut take: impl FnMut(&[f32])) {
        for (block, range) in &self.whole.parts {
            take(&self.whole.which.of(&self.eps.read(*block, self.version))[range.clone()]);
        }
    }
}

impl View for Out<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.whole.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = Vec::with_capacity(self.data_len());
        self.each(|part| bytes.extend(part.iter().flat_map(|value| value.to_le_bytes())));
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.whole.parts.iter().map(|(_, range)| range.len() * size_of::<f32>()).sum()
    }
}

/// Writes the EPS's weights, as of a version, to a directory's `model.safetensors`.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn save(
    directory: &Path,
    model: &Model,
    eps: &Eps,
    version: Version,
) -> Result<(), Error> {
    let file = directory.join("model.safetensors");
    write(&file, wholes(model, Which::Parameter), eps, version)
}

/// Writes the optimizer's states, as of a version.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn save_states(
    file: &Path,
    model: &Model,
    eps: &Eps,
    version: Version,
) -> Result<(), Error> {
    write(file, states(model, eps.states()), eps, version)
}

/// Whole or not at all, and on the disk when it returns: a file that was there stays until then.
fn write(path: &Path, wholes: Wholes, eps: &Eps, version: Version) -> Result<(), Error> {
    let out = |(name, whole)| (name, Out { whole, eps, version });
    let all: Vec<(String, Out<'_>)> = wholes.into_iter().map(out).collect();
    let metadata = [("format".to_string(), "pt".to_string())].into_iter().collect();
    let partial = path.with_extension("safetensors.partial");
    let failed = |error: String| Error::failed(format_args!("{}: {error}", path.display()));
    serialize_to_file(all, Some(metadata), &partial).map_err(|error| failed(error.to_string()))?;
    File::open(&partial)
        .and_then(|file| file.sync_all())
        .and_then(|()| std::fs::rename(&partial, path))
        .map_err(|error| failed(error.to_string()))
}

/// Sizes and values of a parameter, as of a version.
pub(crate) fn tensor(
    name: &str,
    model: &Model,
    eps: &Eps,
    version: Version,
) -> Option<(Vec<usize>, Vec<f32>)> {
    let whole = wholes(model, Which::Parameter).remove(name)?;
    let (out, mut values) = (Out { whole, eps, version }, Vec::new());
    out.each(|part| values.extend_from_slice(part));
    Some((out.whole.shape, values))
}
