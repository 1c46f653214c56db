//! Adds adapters to the weights that they belong to: W + s B A, tensor by tensor.

use std::collections::BTreeMap;
use std::path::Path;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use safetensors::tensor::TensorView;

use super::adapters::{PREFIX, SavedAdapters, WEIGHTS, adapters_head, read_lora, refused_adapters};
use super::config::read_shape;
use super::names::{in_files, is_float, is_of_other_head, meanings};
use super::tied::{has_own_head, keeps_tied};
use super::weight_file::WeightFile;
use super::weights::decode_all;
use crate::error::Error;
use crate::models::{Head, Lora, Model, Shape, Training, adapters};

/// Adapters that are added to the weights of a model.
pub(super) struct Merge {
    file: WeightFile,
    lora: Lora,
    /// The names of tensors that replace the model's, or that the model does not have.
    saved: Vec<String>,
    /// The model with the adapters' head.
    shape: Shape,
    /// Whether the adapters part the head's table from the embedding.
    unties: bool,
    threads: ThreadPool,
}

impl Merge {
    /// Opens the adapters in `directory` of the model in `base`. `head`: the model's head, if the
    /// caller knows it.
    ///
    /// # Errors
    /// One of the directories cannot be read, or the adapters are of another model.
    pub(super) fn new(directory: &Path, base: &Path, head: Option<Head>) -> Result<Merge, Error> {
        let own = read_shape(base)?;
        let head = head.map_or_else(|| adapters_head(directory, &own), Ok)?;
        let tied = own.tied && !has_own_head(base, &own);
        let shape = Shape { head, tied, ..own };
        let SavedAdapters { lora, saved } = read_lora(directory)?;
        let training = Training {
            lora: Some(lora.clone()),
            saved: saved.clone(),
            keeps_tied: keeps_tied(directory)?,
            ..Training::default()
        };
        let model = Model::for_training(shape, &training);
        let model = model.map_err(|error| refused_adapters(directory, error))?;
        let file = WeightFile::open(&directory.join(WEIGHTS))?;
        check_shapes(&model, &file).map_err(|what| file.refuse(what))?;
        let unties = shape.tied && !model.shape.tied;
        let threads = ThreadPoolBuilder::new().build().map_err(Error::no_thread)?;
        Ok(Merge { file, lora, saved, unties, shape, threads })
    }

    /// The model with the adapters' head.
    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Whether the adapters part the head's table from the embedding.
    pub(super) fn unties(&self) -> bool {
        self.unties
    }

    /// Whether the model with the adapters has no tensor of this name, because the name is of
    /// another task's head.
    pub(super) fn drops(&self, name: &str) -> bool {
        let is_of_masked_head = name.starts_with("cls.") || name.ends_with(".decoder.bias");
        is_of_other_head(name, &self.shape)
            || (!self.shape.scores_vocabulary() && is_of_masked_head)
    }

    /// The shape of the adapters' tensor that replaces a tensor of the files.
    pub(super) fn replaced(&self, in_file: &str) -> Option<Vec<usize>> {
        let name = self.saved.iter().find(|name| self.is_called(in_file, name))?;
        Some(self.new_tensor(name).shape().to_vec())
    }

    /// The names of tensors that only the adapters have, such as a new head. `names` are the
    /// tensors of the weights.
    ///
    /// # Errors
    /// The adapters change a tensor that the weights do not have.
    pub(super) fn new_tensors(&self, names: &[&str]) -> Result<Vec<String>, String> {
        let has = |name: &str| names.iter().any(|own| self.is_called(own, name));
        let weights = self.lora.targets.iter().map(|module| format!("{module}.weight"));
        let mut lost = weights.filter(|name| !has(name) && !self.saved.contains(name));
        match lost.next() {
            Some(lost) => Err(format!(
                "{lost} is missing, which the adapters change: they are of another model"
            )),
            None => Ok(self.saved.iter().filter(|name| !has(name)).cloned().collect()),
        }
    }

    /// The tensor of a name that [`new_tensors`](Merge::new_tensors) returned.
    pub(super) fn new_tensor(&self, name: &str) -> TensorView<'_> {
        let name = format!("{PREFIX}{name}");
        self.file.tensors().tensor(&name).expect("new_tensors() found it")
    }

    /// Whether a tensor's name in a file means the tensor of this name.
    fn is_called(&self, in_file: &str, name: &str) -> bool {
        in_files(name, self.shape.names.prefix).iter().any(|one| one == in_file)
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
            let prefix = self.shape.names.prefix;
            let mut names = meanings(of, prefix).into_iter();
            names.find_map(|name| tensors.tensor(&format!("{PREFIX}{name}{end}")).ok())
        };
        let floats = |view: &TensorView<'_>| -> Result<Vec<f32>, String> {
            if !is_float(view.dtype()) {
                return Err(format!("{name}: f32, f16 or bf16 expected, {:?} found", view.dtype()));
            }
            Ok(decode_all(view))
        };
        if let Some(other) = find("", name) {
            return floats(&other).map(Some);
        }
        let Some(module) = name.strip_suffix(".weight") else { return Ok(None) };
        let [a, b] = adapters::ENDS.map(|end| find(end, module));
        let (Some(a), Some(b)) = (a, b) else { return Ok(None) };
        let (&[r, inputs], &[outputs, _]) = (a.shape(), b.shape()) else {
            return Err(differs(name, tensor, &a));
        };
        let is_transposed = self.shape.transposed;
        let expected = if is_transposed { [outputs, inputs] } else { [inputs, outputs] };
        if tensor.shape() != expected {
            return Err(differs(name, tensor, &a));
        }
        let mut w = floats(tensor)?;
        let scale = self.lora.scale_of(module);
        let a = floats(&a)?;
        let b = floats(&b)?;
        let columns = expected[1];
        let add = |(row, w): (usize, &mut [f32])| {
            for (column, w) in w.iter_mut().enumerate() {
                let (i, o) = if is_transposed { (column, row) } else { (row, column) };
                let products =
                    (0..r).map(|k| f64::from(b[o * r + k]) * f64::from(a[k * inputs + i]));
                *w = (f64::from(*w) + scale * products.sum::<f64>()) as f32;
            }
        };
        self.threads.install(|| w.par_chunks_mut(columns).enumerate().for_each(add));
        Ok(Some(w))
    }
}

/// Compares the tensors of adapters with those of the model that they are read with.
///
/// # Errors
/// A tensor has another shape.
fn check_shapes(model: &Model, file: &WeightFile) -> Result<(), String> {
    let mut expected = BTreeMap::<&str, Vec<usize>>::new();
    for tensor in model.blocks.iter().flatten() {
        // The rows of a table are in several blocks.
        let shape = expected.entry(&tensor.name).or_insert_with(|| {
            let mut shape = tensor.sizes_in_file(&tensor.shape);
            shape[0] = 0;
            shape
        });
        shape[0] += tensor.sizes_in_file(&tensor.shape)[0];
    }
    for (name, view) in file.tensors().iter() {
        let bare = name.strip_prefix(PREFIX).unwrap_or(name);
        match expected.get(&model.shape.name_of(bare)[..]) {
            Some(shape) if shape == view.shape() => {}
            Some(shape) => {
                let found = view.shape();
                return Err(format!(
                    "{name}: {shape:?} expected, {found:?} found: the adapters are of another model"
                ));
            }
            None => return Err(format!("{name} is in the file and not in the model")),
        }
    }
    Ok(())
}

fn differs(name: &str, tensor: &TensorView<'_>, other: &TensorView<'_>) -> String {
    format!(
        "{name} has shape {:?}, and the adapters are of another model: theirs is {:?}",
        tensor.shape(),
        other.shape()
    )
}
