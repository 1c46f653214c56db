//! Adds adapters to the weights that they belong to: W + s B A, tensor by tensor.

use std::path::Path;

use rayon::prelude::*;
use safetensors::tensor::TensorView;

use super::adapters::{PREFIX, WEIGHTS, read_lora};
use super::config::read_shape;
use super::names::{is_float, is_in};
use super::tied::keeps_tied;
use super::weights::{WeightFile, decode_all};
use crate::error::Error;
use crate::models::families::Names;
use crate::models::{Lora, Shape, Training, adapters};

/// Adapters that are added to the weights of a model.
pub(super) struct Merge {
    file: WeightFile,
    lora: Lora,
    /// The names of weights with adapters, and of tensors that replace the model's.
    changes: Vec<String>,
    /// The shape of the model, as its `config.json` has it.
    shape: Shape,
    /// Whether the adapters part the head's table from the embedding.
    unties: bool,
}

impl Merge {
    /// Opens the adapters in `directory` of the model in `base`.
    ///
    /// # Errors
    /// One of the directories cannot be read, or an adapter has only one of its matrices.
    pub(super) fn new(directory: &Path, base: &Path) -> Result<Merge, Error> {
        let shape = read_shape(base)?;
        let file = WeightFile::open(&directory.join(WEIGHTS))?;
        let tensors = file.tensors();
        let [a, b] = adapters::ENDS;
        for name in tensors.names() {
            let other = match (name.strip_suffix(a), name.strip_suffix(b)) {
                (Some(module), _) => format!("{module}{b}"),
                (None, Some(module)) => format!("{module}{a}"),
                (None, None) => continue,
            };
            if tensors.tensor(&other).is_err() {
                return Err(file.refuse(format_args!("{other} is missing")));
            }
        }
        let (lora, saved) = read_lora(directory)?;
        let weights = lora.targets.iter().map(|module| format!("{module}.weight"));
        let mut changes: Vec<String> = weights.chain(saved.clone()).collect();
        changes.sort();
        let training = Training {
            only: saved,
            keeps_tied: keeps_tied(directory)?,
            lora: Some(lora.clone()),
            ..Training::default()
        };
        drop(tensors);
        Ok(Merge { file, lora, changes, unties: training.unties(&shape), shape })
    }

    /// Whether the adapters part the head's table from the embedding.
    pub(super) fn unties(&self) -> bool {
        self.unties
    }

    /// Whether the adapters replace the tensor of this name.
    pub(super) fn replaces(&self, name: &str) -> bool {
        self.changes.iter().any(|change| change == name)
    }

    /// The names of tensors that only the adapters have, such as a new head. `names` are the
    /// tensors of the weights.
    ///
    /// # Errors
    /// The adapters change a tensor that the weights do not have.
    pub(super) fn new_tensors(&self, names: &[&str]) -> Result<Vec<String>, String> {
        let mut missing = self.changes.clone();
        missing.retain(|name| !names.iter().any(|own| self.is_called(own, name)));
        match missing.iter().find(|name| !self.has(name)) {
            Some(lost) => Err(format!(
                "{lost} is missing, which the adapters change: they are of another model"
            )),
            None => Ok(missing),
        }
    }

    /// The tensor of a name that [`new_tensors`](Merge::new_tensors) returned.
    pub(super) fn new_tensor(&self, name: &str) -> TensorView<'_> {
        let name = format!("{PREFIX}{name}");
        self.file.tensors().tensor(&name).expect("new_tensors() found it")
    }

    /// Whether a tensor's name in a file means the tensor of this name. Files may leave out the
    /// family's prefix.
    fn is_called(&self, in_file: &str, name: &str) -> bool {
        in_file == name || name.strip_prefix(self.shape.names.prefix) == Some(in_file)
    }

    /// Whether the adapters' file has this tensor, and it belongs to a head, which a model may
    /// lack.
    fn has(&self, name: &str) -> bool {
        let Names { class_dense, class_out, token_classes, head, .. } = *self.shape.names;
        let [bias, _] = &self.shape.names.head_biases();
        is_in(name, &[class_dense, class_out, token_classes, head, bias])
            && self.file.tensors().tensor(&format!("{PREFIX}{name}")).is_ok()
    }

    /// The values of a tensor with its adapter, or of the adapters' tensor that replaces it. `None`
    /// if the adapters do not change the tensor.
    pub(super) fn merged(
        &self,
        name: &str,
        tensor: &TensorView<'_>,
    ) -> Result<Option<Vec<f32>>, String> {
        let tensors = self.file.tensors();
        let find = |end: &str, of: &str| {
            let names = [
                format!("{PREFIX}{of}{end}"),
                format!("{PREFIX}{}{of}{end}", self.shape.names.prefix),
            ];
            names.iter().find_map(|name| tensors.tensor(name).ok())
        };
        let floats = |view: &TensorView<'_>| -> Result<Vec<f32>, String> {
            if !is_float(view.dtype()) {
                return Err(format!("{name}: f32, f16 or bf16 expected, {:?} found", view.dtype()));
            }
            Ok(decode_all(view))
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
        let expected = if self.shape.transposed { [outputs, inputs] } else { [inputs, outputs] };
        if tensor.shape() != expected || [r, of_b] != [self.lora.rank; 2] {
            return Err(differs(name, tensor, &a));
        }
        let mut w = floats(tensor)?;
        let scale = self.lora.scale();
        let a = floats(&a)?;
        let b = floats(&b)?;
        let columns = expected[1];
        w.par_chunks_mut(columns).enumerate().for_each(|(row, w)| {
            for (column, w) in w.iter_mut().enumerate() {
                let (i, o) = if self.shape.transposed { (column, row) } else { (row, column) };
                let products =
                    (0..r).map(|k| f64::from(b[o * r + k]) * f64::from(a[k * inputs + i]));
                *w = (f64::from(*w) + scale * products.sum::<f64>()) as f32;
            }
        });
        Ok(Some(w))
    }
}

fn differs(name: &str, tensor: &TensorView<'_>, other: &TensorView<'_>) -> String {
    format!(
        "{name} has shape {:?}, and the adapters are of another model: theirs is {:?}",
        tensor.shape(),
        other.shape()
    )
}
