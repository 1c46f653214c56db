//! Experts in one tensor: transformers 5 holds them so, and writes them so with
//! `save_original_format=False`. One tensor of a block has the gates and the up projections of all
//! experts, another their down projections. The tensors of one expert are ranges of these. They are
//! read from both layouts, and l2l writes each expert's tensors by themselves, which every version
//! of transformers reads.

use std::ops::Range;

use safetensors::tensor::{SafeTensors, TensorView};

use super::names::{find, is_float, meanings, spelled_as};
use crate::models::{Experts, Shape};

/// The tensors of all experts of a block, whose number is `{}`: gate and up projection of each
/// expert in turn, and the down projections.
const FUSED: [&str; 2] =
    ["model.layers.{}.mlp.experts.gate_up_proj", "model.layers.{}.mlp.experts.down_proj"];

/// The router of a block in files with such tensors.
const ROUTER: &str = "model.layers.{}.mlp.gate.weight";

/// A tensor of all experts of a block.
struct FusedTensor {
    name: String,
    block: usize,
    /// The names of the modules of an expert that it has, in order.
    modules: &'static [&'static str],
    /// Outputs and inputs of a module of one expert.
    sizes: [usize; 2],
    experts: usize,
}

/// A tensor of one expert, as a part of a fused one.
pub(super) struct Part {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    /// Its bytes in the fused tensor.
    pub(super) bytes: Range<usize>,
}

impl FusedTensor {
    /// The fused tensors of a block. There are none if the block has no experts.
    fn of_block(shape: &Shape, block: usize) -> Vec<FusedTensor> {
        // Stacked experts are whole tensors of the model itself.
        let is_apart = shape.names.stacked.is_empty();
        let has_them = |experts: &Experts| is_apart && block < shape.layers && experts.is_of(block);
        let Some(experts) = shape.experts.filter(has_them) else { return Vec::new() };
        let Experts { count, intermediate, .. } = experts;
        let [first, second] = FUSED.map(|name| numbered(name, block));
        let (gate_up, down) = shape.names.expert.split_at(2);
        let sizes = [intermediate, shape.hidden];
        let of = |name, modules, sizes| FusedTensor { name, block, modules, sizes, experts: count };
        vec![of(first, gate_up, sizes), of(second, down, [shape.hidden, intermediate])]
    }

    /// The fused tensor that a name in a file means.
    fn named(shape: &Shape, in_file: &str) -> Option<FusedTensor> {
        let (before, _) = FUSED[0].split_once("{}").expect("it has a number");
        meanings(in_file, shape.names.prefix).into_iter().find_map(|meant| {
            let block = meant.strip_prefix(before)?.split('.').next()?.parse().ok()?;
            let mut all = FusedTensor::of_block(shape, block).into_iter();
            all.find(|fused| fused.name == meant)
        })
    }

    /// The sizes that it must have.
    fn shape(&self) -> [usize; 3] {
        let [outputs, inputs] = self.sizes;
        [self.experts, self.modules.len() * outputs, inputs]
    }

    /// The bytes of an expert's module in it.
    fn bytes_of(&self, expert: usize, module: usize, view: &TensorView<'_>) -> Range<usize> {
        let bytes = self.sizes.iter().product::<usize>() * view.dtype().bitsize() / 8;
        let at = (expert * self.modules.len() + module) * bytes;
        at..at + bytes
    }

    /// Refuses a tensor of this name with other sizes or numbers.
    fn check(&self, view: &TensorView<'_>) -> Result<(), String> {
        let expected = self.shape();
        let found = view.shape();
        let [experts, rows, columns] = expected;
        if !is_float(view.dtype()) {
            let found = view.dtype();
            return Err(format!("{}: f32, f16 or bf16 expected, {found:?} found", self.name));
        }
        if found == expected {
            return Ok(());
        }
        let is_transposed = found == [experts, columns, rows];
        let hint =
            if is_transposed { ": its matrices are transposed, which is not read" } else { "" };
        Err(format!("{}: {expected:?} expected, {found:?} found{hint}", self.name))
    }
}

/// A name with the number of its block.
fn numbered(name: &str, block: usize) -> String {
    name.replacen("{}", &block.to_string(), 1)
}

/// The name of the weight of an expert's module.
fn weight_of(module: &str, block: usize, expert: usize) -> String {
    format!("{}.weight", numbered(module, block).replacen("{}", &expert.to_string(), 1))
}

/// The experts' tensors that a tensor of a file consists of. There are none if it is not a fused
/// one. What comes before its name in the file comes before theirs, too.
///
/// # Errors
/// It has other sizes than the model's experts.
pub(super) fn parts(
    shape: &Shape,
    in_file: &str,
    view: &TensorView<'_>,
) -> Result<Vec<Part>, String> {
    let Some(fused) = FusedTensor::named(shape, in_file) else { return Ok(Vec::new()) };
    fused.check(view)?;
    let part = |at: usize| {
        let expert = at / fused.modules.len();
        let module = at % fused.modules.len();
        let name = weight_of(fused.modules[module], fused.block, expert);
        let name = spelled_as(in_file, &fused.name, &name, shape.names.prefix);
        let bytes = fused.bytes_of(expert, module, view);
        Part { name, shape: fused.sizes.to_vec(), bytes }
    };
    Ok((0..fused.experts * fused.modules.len()).map(part).collect())
}

/// Finds an expert's tensor in the fused tensors of files.
pub(super) fn find_part<'t>(
    shape: &Shape,
    files: &[SafeTensors<'t>],
    name: &str,
) -> Option<TensorView<'t>> {
    let modules = shape.names.expert.iter().filter(|module| !module.is_empty());
    let (module, block, expert) = modules.enumerate().find_map(|(at, module)| {
        let [before, between, after] = module.split("{}").collect::<Vec<_>>()[..] else {
            return None;
        };
        let numbers = name.strip_prefix(before)?.strip_suffix(".weight")?.strip_suffix(after)?;
        let (block, expert) = numbers.split_once(between)?;
        Some((at, block.parse().ok()?, expert.parse::<usize>().ok()?))
    })?;
    let mut all = FusedTensor::of_block(shape, block).into_iter();
    let fused = all.find(|fused| fused.modules.contains(&shape.names.expert[module]))?;
    let view = find(files, &fused.name, shape.names.prefix)?;
    if expert >= fused.experts || fused.check(&view).is_err() {
        return None;
    }
    let at = fused.modules.iter().position(|one| *one == shape.names.expert[module])?;
    let bytes = fused.bytes_of(expert, at, &view);
    TensorView::new(view.dtype(), fused.sizes.to_vec(), &view.data()[bytes]).ok()
}

/// Whether files may have a fused tensor of this name.
pub(super) fn is_fused(shape: &Shape, in_file: &str) -> bool {
    FusedTensor::named(shape, in_file).is_some()
}

/// The other name of a router, which files with fused tensors have.
pub(super) fn other_router(shape: &Shape, name: &str) -> Option<String> {
    if !shape.names.stacked.is_empty() {
        return None;
    }
    translated(name, &[shape.names.router, ".weight"].concat(), ROUTER)
}

/// The name that the model has for a tensor of a file: that of a router, if the file has its other
/// name.
pub(super) fn own_name(shape: &Shape, in_file: &str) -> String {
    if !shape.names.stacked.is_empty() {
        return in_file.into();
    }
    let own = [shape.names.router, ".weight"].concat();
    let prefix = shape.names.prefix;
    let named = meanings(in_file, prefix).into_iter().find_map(|meant| {
        let name = translated(&meant, ROUTER, &own)?;
        Some(spelled_as(in_file, &meant, &name, prefix))
    });
    named.unwrap_or_else(|| in_file.into())
}

/// A name of one pattern under another pattern. The number of the block is `{}` in both.
fn translated(name: &str, from: &str, to: &str) -> Option<String> {
    let (before, after) = from.split_once("{}").filter(|_| from != to && to.contains("{}"))?;
    let number = name.strip_prefix(before)?.strip_suffix(after)?.parse().ok()?;
    Some(numbered(to, number))
}

/// Refuses fused tensors that are not those of the model, and files that have a tensor in both
/// layouts: they may differ, and nothing says which one is meant.
///
/// # Errors
/// The names of the tensors.
pub(super) fn check(shape: &Shape, files: &[SafeTensors<'_>]) -> Result<(), String> {
    let prefix = shape.names.prefix;
    let is_there =
        |name: &str| meanings(name, prefix).iter().any(|name| find(files, name, prefix).is_some());
    let refuse = |one: &str, other: &str| {
        Err(format!(
            "{one} and {other} are in the files: an expert or a router must be there once. Remove \
             one of the two layouts"
        ))
    };
    for (name, view) in files.iter().flat_map(SafeTensors::iter) {
        let parts = parts(shape, name, &view)?;
        if let Some(part) = parts.iter().find(|part| is_there(&part.name)) {
            return refuse(name, &part.name);
        }
        let own = own_name(shape, name);
        if own != name && is_there(&own) {
            return refuse(name, &own);
        }
    }
    Ok(())
}
