//! Adapters added to the weights that they are of: W + s B A, tensor by tensor.

use std::path::Path;

use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView};

use super::adapters::{PREFIX, WEIGHTS, read_lora};
use super::config::read_shape;
use super::weights::{decode, map};
use crate::error::Error;
use crate::models::families::Names;
use crate::models::{Lora, adapters};

/// Adapters of a directory, to be added to the weights of a model.
pub(super) struct Merge {
    map: Mmap,
    lora: Lora,
    /// Whether weights are (outputs, inputs).
    transposed: bool,
    names: &'static Names,
}

impl Merge {
    /// The adapters of a directory, for the weights of the model in another.
    ///
    /// # Errors
    /// One of them cannot be read.
    pub(super) fn new(directory: &Path, base: &Path) -> Result<Merge, Error> {
        let shape = read_shape(base)?;
        let path = directory.join(WEIGHTS);
        let refuse = |what: String| Error::bad_model(path.display(), what);
        let map = map(&path)?;
        let tensors = SafeTensors::deserialize(&map).map_err(|error| refuse(error.to_string()))?;
        let [a, b] = adapters::ENDS;
        for name in tensors.names() {
            let other = match (name.strip_suffix(a), name.strip_suffix(b)) {
                (Some(module), _) => format!("{module}{b}"),
                (None, Some(module)) => format!("{module}{a}"),
                (None, None) => continue,
            };
            if tensors.tensor(&other).is_err() {
                return Err(refuse(format!("{other} is missing")));
            }
        }
        let (lora, _) = read_lora(directory)?;
        Ok(Merge { map, lora, transposed: shape.transposed, names: shape.names })
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.map).expect("it was read before")
    }

    /// The tensors that weights of these names lack and the adapters have, as those of a new head:
    /// their names in a model.
    ///
    /// # Errors
    /// The adapters are of other weights.
    pub(super) fn new_tensors(&self, names: &[String]) -> Result<Vec<String>, String> {
        let mut missing = self.changes();
        missing.retain(|name| !names.iter().any(|own| self.is_called(own, name)));
        match missing.iter().find(|name| !self.has(name)) {
            Some(lost) => Err(format!(
                "{lost} is missing, which the adapters change: they are of another model"
            )),
            None => Ok(missing),
        }
    }

    /// A tensor of [`new_tensors`](Merge::new_tensors).
    pub(super) fn new_tensor(&self, name: &str) -> TensorView<'_> {
        let tensor = SafeTensors::deserialize(&self.map).expect("it was read before");
        tensor.tensor(&format!("{PREFIX}{name}")).expect("new_tensors() found it")
    }

    /// The names of the weights that have adapters, and of the tensors that replace others.
    fn changes(&self) -> Vec<String> {
        let [a, b] = adapters::ENDS;
        let changed = |name: &str| {
            let bare = name.strip_prefix(PREFIX).unwrap_or(name);
            match bare.strip_suffix(a) {
                Some(module) => Some(format!("{module}.weight")),
                None => (!bare.ends_with(b)).then(|| bare.to_string()),
            }
        };
        let mut all: Vec<String> = self.tensors().names().into_iter().filter_map(changed).collect();
        all.sort();
        all
    }

    /// Whether a tensor of a file is the one of this name, of which files may leave out the prefix.
    fn is_called(&self, in_file: &str, name: &str) -> bool {
        in_file == name || name.strip_prefix(self.names.prefix) == Some(in_file)
    }

    /// Whether the adapters' file has a tensor that the model may lack: one of a head.
    fn has(&self, name: &str) -> bool {
        let Names { class_dense, class_out, token_classes, head, .. } = self.names;
        let is_in = |layer: &str| !layer.is_empty() && name.starts_with(layer);
        let heads = [class_dense, class_out, token_classes, head];
        let is_of_head = heads.into_iter().any(|layer| is_in(layer));
        is_of_head && self.tensors().tensor(&format!("{PREFIX}{name}")).is_ok()
    }

    /// What a tensor is with its adapter, if it has one.
    pub(super) fn merged(
        &self,
        name: &str,
        tensor: &TensorView<'_>,
    ) -> Result<Option<Vec<f32>>, String> {
        let tensors = self.tensors();
        let find = |end: &str, of: &str| {
            let names =
                [format!("{PREFIX}{of}{end}"), format!("{PREFIX}{}{of}{end}", self.names.prefix)];
            names.iter().find_map(|name| tensors.tensor(name).ok())
        };
        let floats = |view: &TensorView<'_>| -> Result<Vec<f32>, String> {
            if !matches!(view.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                return Err(format!("{name}: f32, f16 or bf16 expected, {:?} found", view.dtype()));
            }
            let mut values = vec![0.0; view.shape().iter().product()];
            decode(&mut values, view, 0);
            Ok(values)
        };
        if let Some(other) = find("", name) {
            if other.shape() != tensor.shape() {
                return Err(differs(name, tensor, &other));
            }
            return floats(&other).map(Some);
        }
        let Some(module) = name.strip_suffix(".weight") else { return Ok(None) };
        let [a, b] = adapters::ENDS.map(|end| find(end, module));
        let (Some(a), Some(b)) = (a, b) else { return Ok(None) };
        let (&[r, inputs], &[outputs, of_b]) = (a.shape(), b.shape()) else {
            return Err(differs(name, tensor, &a));
        };
        let expected = if self.transposed { [outputs, inputs] } else { [inputs, outputs] };
        if tensor.shape() != expected || [r, of_b] != [self.lora.rank; 2] {
            return Err(differs(name, tensor, &a));
        }
        let (mut w, rank, scale) = (floats(tensor)?, self.lora.rank, self.lora.scale());
        let (a, b) = (floats(&a)?, floats(&b)?);
        let columns = expected[1];
        w.par_chunks_mut(columns).enumerate().for_each(|(row, w)| {
            for (column, w) in w.iter_mut().enumerate() {
                let (i, o) = if self.transposed { (column, row) } else { (row, column) };
                let sum: f64 = (0..rank)
                    .map(|r| f64::from(b[o * rank + r]) * f64::from(a[r * inputs + i]))
                    .sum();
                *w = (f64::from(*w) + scale * sum) as f32;
            }
        });
        Ok(Some(w))
    }
}

fn differs(name: &str, tensor: &TensorView<'_>, other: &TensorView<'_>) -> String {
    let (has, other) = (tensor.shape(), other.shape());
    format!("{name} has shape {has:?}, and the adapters are of another model: theirs is {other:?}")
}
