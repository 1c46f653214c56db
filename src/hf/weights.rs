//! `model.safetensors` into blocks, and blocks into `model.safetensors`.
//!
//! The vocabulary's tables are cut into tiles on the way in and joined on the way out; every other
//! tensor is one of a block's. Checkpoints with and without the `transformer.` prefix are read.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{SafeTensors, TensorView, View};
use safetensors::{Dtype, serialize_to_file};

use crate::eps::Eps;
use crate::error::Error;
use crate::models::{Model, Tensor, tensor_ranges};

const PREFIX: &str = "transformer.";

/// A whole tensor of a checkpoint, and where its rows lie.
struct Whole<'m> {
    shape: Vec<usize>,
    /// Block, index of the tensor in it.
    parts: Vec<(usize, usize, &'m Tensor)>,
}

/// The tensors of a checkpoint of this model, by name.
fn wholes(model: &Model) -> BTreeMap<&str, Whole<'_>> {
    let mut all: BTreeMap<&str, Whole<'_>> = BTreeMap::new();
    for (block, tensors) in model.blocks.iter().enumerate() {
        for (index, tensor) in tensors.iter().enumerate() {
            let empty = Whole { shape: tensor.shape.clone(), parts: Vec::new() };
            let whole = all.entry(&tensor.name).or_insert(empty);
            if !whole.parts.is_empty() {
                whole.shape[0] += tensor.shape[0];
            }
            whole.parts.push((block, index, tensor));
        }
    }
    all
}

/// Reads a directory's weights into the EPS.
///
/// # Errors
/// The file, and the tensors that are missing, too many or of another shape.
pub(crate) fn load(directory: &Path, model: &Model, eps: &Eps) -> Result<(), Error> {
    let path = directory.join("model.safetensors");
    let refuse = |what: String| Error::refused(format_args!("{}: {what}", path.display()));
    let file = File::open(&path).map_err(|error| refuse(error.to_string()))?;
    // SAFETY: a file that somebody cuts short while it is read is not ours to defend against.
    let bytes = unsafe { Mmap::map(&file) }.map_err(|error| refuse(error.to_string()))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| refuse(error.to_string()))?;
    let wholes = wholes(model);
    let found = |name: &str| {
        let short = name.strip_prefix(PREFIX).unwrap_or(name);
        tensors.tensor(name).or_else(|_| tensors.tensor(short)).ok()
    };
    check(&tensors, &wholes, model.shape.tied, found).map_err(refuse)?;
    for (name, whole) in &wholes {
        let view = found(name).expect("it was checked");
        let mut from = 0;
        for &(block, index, tensor) in &whole.parts {
            let range = tensor_ranges(&model.blocks[block]).nth(index).expect("it has it");
            let mut lease = eps.write(l2l_actors::schedule::BlockId(block as u32), 0);
            decode(&mut lease.parameters[range], &view, from);
            from += tensor.len();
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
    wholes: &BTreeMap<&str, Whole<'_>>,
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
    let known: BTreeSet<&str> =
        wholes.keys().flat_map(|name| [*name, name.strip_prefix(PREFIX).unwrap_or(name)]).collect();
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

/// A tensor on its way out.
struct Out {
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for &Out {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes the EPS's weights, as of a version, to a directory's `model.safetensors`.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn save(directory: &Path, model: &Model, eps: &Eps, version: u64) -> Result<(), Error> {
    let path = directory.join("model.safetensors");
    let mut all = BTreeMap::new();
    for (name, whole) in wholes(model) {
        let mut bytes = Vec::new();
        for &(block, index, _) in &whole.parts {
            let range = tensor_ranges(&model.blocks[block]).nth(index).expect("it has it");
            let lease = eps.read(l2l_actors::schedule::BlockId(block as u32), version);
            bytes.extend(lease.parameters[range].iter().flat_map(|value| value.to_le_bytes()));
        }
        all.insert(name, Out { shape: whole.shape, bytes });
    }
    let metadata = [("format".to_string(), "pt".to_string())].into_iter().collect();
    // Whole or not at all: a file that was there stays until the new one is.
    let partial = path.with_extension("safetensors.partial");
    let failed = |error: String| Error::failed(format_args!("{}: {error}", path.display()));
    serialize_to_file(&all, Some(metadata), &partial).map_err(|error| failed(error.to_string()))?;
    std::fs::rename(&partial, &path).map_err(|error| failed(error.to_string()))
}
