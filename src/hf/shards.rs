//! The weights of an export: tensors of some files, changed by adapters or replaced by averages, in
//! another dtype, and in one file or several with an index. Memory holds one tensor at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Map, Value};

use super::average::Averages;
use super::found::Found;
use super::fused::{self, Part};
use super::merge::Merge;
use super::mxfp4::{self, Mxfp4, find_mxfp4};
use super::names::is_float;
use super::tensor_files::{bytes_in, cut_into_files, header, shard_name, write_index};
use super::weight_file::WeightFile;
use super::weights::{CHUNK, check_finite, decode_all, weight_files};
use crate::config::WeightDtype;
use crate::error::Error;
use crate::models::Shape;
use crate::models::families::Names;

/// How an export's values differ from the files.
pub(super) enum Changed {
    No,
    Merged(Box<Merge>),
    Averaged(Averages),
}

impl Changed {
    /// The values of a tensor, if they are not those of its file.
    fn values(&self, name: &str, tensor: &TensorView<'_>) -> Result<Option<Vec<f32>>, String> {
        match self {
            Changed::No => Ok(None),
            Changed::Merged(merge) => merge.merged(name, tensor),
            Changed::Averaged(averages) => averages.of_tensor(name, tensor),
        }
    }
}

/// The tables of a language model.
#[derive(Clone, Copy)]
pub(super) struct Tables {
    pub(super) names: &'static Names,
    /// Whether the head has a table of its own, although the model's `config.json` ties it.
    pub(super) has_own_head: bool,
}

/// The dtype that each tensor is written in.
pub(super) struct Dtypes {
    wanted: Option<Dtype>,
    /// The dtypes of the model that training began with, by tensor.
    of_base: BTreeMap<String, Dtype>,
    /// The most frequent of these dtypes.
    usual: Option<Dtype>,
}

impl Dtypes {
    /// The dtypes for a wanted one. `base` is the model that training began with, if it is not the
    /// model that is exported.
    pub(super) fn of(wanted: WeightDtype, base: Option<&Path>) -> Result<Dtypes, Error> {
        let wanted = match wanted {
            WeightDtype::Source => None,
            WeightDtype::F32 => Some(Dtype::F32),
            WeightDtype::F16 => Some(Dtype::F16),
            WeightDtype::Bf16 => Some(Dtype::BF16),
        };
        let mut of_base = BTreeMap::new();
        if let (None, Some(base)) = (wanted, base) {
            for path in weight_files(base)? {
                let file = WeightFile::open(&path)?;
                let tensors = file.tensors();
                let tensors = tensors.iter();
                of_base.extend(tensors.map(|(name, view)| (name.to_string(), view.dtype())));
            }
        }
        let count = |dtype: Dtype| of_base.values().filter(|&&other| other == dtype).count();
        let usual = of_base.values().copied().filter(|&dtype| is_float(dtype));
        let usual = usual.max_by_key(|&dtype| count(dtype));
        Ok(Dtypes { wanted, of_base, usual })
    }

    fn of_tensor(&self, name: &str, own: Dtype) -> Dtype {
        if !is_float(own) {
            return own;
        }
        let of_base = self.of_base.get(name).copied().filter(|&dtype| is_float(dtype));
        self.wanted.or(of_base).or(self.usual).unwrap_or(own)
    }
}

/// A tensor of the files, or of the adapters that are merged into them.
#[derive(Clone)]
struct SourceTensor {
    name: String,
    /// Its name in its file.
    stored: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// The file that has the tensor. `None` for a tensor that only the adapters have.
    file: Option<usize>,
    /// Its bytes, if it is a part of the tensor in the file.
    bytes: Option<Range<usize>>,
    /// True when the file has it in MXFP4, `stored` being its blocks.
    in_mxfp4: bool,
}

impl SourceTensor {
    /// The tensors of the model that a tensor of a file consists of: itself, or those of each
    /// expert.
    fn of_file(
        stored: String,
        file: usize,
        view: &TensorView<'_>,
        shape: Option<&Shape>,
    ) -> Result<Vec<SourceTensor>, String> {
        let name = shape.map_or(stored.clone(), |shape| fused::own_name(shape, &stored));
        let parts = shape.map_or(Ok(Vec::new()), |shape| fused::parts(shape, &stored, view))?;
        let whole = SourceTensor {
            name,
            stored,
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            file: Some(file),
            bytes: None,
            in_mxfp4: false,
        };
        if parts.is_empty() {
            return Ok(vec![whole]);
        }
        let of_part = |Part { name, shape, bytes }| SourceTensor {
            name,
            shape,
            bytes: Some(bytes),
            ..whole.clone()
        };
        Ok(parts.into_iter().map(of_part).collect())
    }

    /// The tensor whose blocks in MXFP4 have this name. `None`: the name is that of its scales.
    fn of_mxfp4(
        stored: String,
        file: usize,
        opened: &[SafeTensors<'_>],
        shape: &Shape,
        is_finite: bool,
    ) -> Result<Option<SourceTensor>, String> {
        let Some(name) = mxfp4::of_blocks(shape, &stored).map(str::to_string) else {
            return Ok(None);
        };
        let tensor = find_mxfp4(shape, opened, &name).map(Found::Mxfp4).expect("check() found it");
        if is_finite {
            tensor.check_finite(&name)?;
        }
        let shape = tensor.shape().to_vec();
        let dtype = tensor.dtype();
        let in_mxfp4 = true;
        Ok(Some(SourceTensor {
            name,
            stored,
            dtype,
            shape,
            file: Some(file),
            bytes: None,
            in_mxfp4,
        }))
    }

    /// Its elements in the file.
    fn view<'t>(&self, file: &SafeTensors<'t>) -> TensorView<'t> {
        let view = file.tensor(&self.stored).expect("it is one of its names");
        let Some(bytes) = &self.bytes else { return view };
        let part = TensorView::new(view.dtype(), self.shape.clone(), &view.data()[bytes.clone()]);
        part.expect("parts() cut it")
    }
}

/// The weights of a model in some files.
pub(super) struct Source {
    files: Vec<WeightFile>,
    tensors: Vec<SourceTensor>,
    /// Of the model, if its family is known.
    shape: Option<Shape>,
}

impl Source {
    /// Opens the files. `shape` and `tables` are `None` for a model of an unknown family, which is
    /// copied.
    ///
    /// # Errors
    /// A file cannot be read; a value is not finite, where all must be; the adapters are of other
    /// weights; or the experts are not the model's.
    pub(super) fn open(
        paths: &[PathBuf],
        shape: Option<&Shape>,
        changed: &Changed,
        tables: Option<Tables>,
        all_finite: bool,
    ) -> Result<Source, Error> {
        let files =
            paths.iter().map(|path| WeightFile::open(path)).collect::<Result<Vec<_>, _>>()?;
        let opened: Vec<SafeTensors<'_>> = files.iter().map(WeightFile::tensors).collect();
        if let (Some(shape), Some(first)) = (shape, files.first()) {
            let checked = fused::check(shape, &opened).and_then(|()| mxfp4::check(shape, &opened));
            checked.map_err(|what| first.refuse(what))?;
        }
        let mut tensors = Vec::new();
        let merge = match changed {
            Changed::Merged(merge) => Some(&**merge),
            Changed::No | Changed::Averaged(_) => None,
        };
        for (at, (file, read)) in files.iter().zip(&opened).enumerate() {
            for name in file.names_in_order() {
                let view = read.tensor(&name).expect("it is one of its names");
                if all_finite {
                    check_finite(&name, &view).map_err(|what| file.refuse(what))?;
                }
                if merge.is_some_and(|merge| merge.drops(&name)) {
                    continue;
                }
                if let Some(shape) = shape.filter(|shape| mxfp4::is_part(shape, &name)) {
                    let of_file = SourceTensor::of_mxfp4(name, at, &opened, shape, all_finite);
                    tensors.extend(of_file.map_err(|what| file.refuse(what))?);
                    continue;
                }
                let of_file = SourceTensor::of_file(name, at, &view, shape);
                tensors.extend(of_file.map_err(|what| file.refuse(what))?);
            }
        }
        drop(opened);
        let mut source = Source { files, tensors, shape: None };
        if let Some(tables) = tables {
            source.arrange(tables, changed);
        }
        if let Some((merge, last)) = merge.zip(source.files.last()) {
            for tensor in &mut source.tensors {
                tensor.shape = merge.replaced(&tensor.name).unwrap_or(tensor.shape.clone());
            }
            let names: Vec<&str> = source.tensors.iter().map(|tensor| &tensor.name[..]).collect();
            let mut new = merge.new_tensors(&names).map_err(|what| last.refuse(what))?;
            new.retain(|name| {
                tables.is_none_or(|tables| tables.has_own_head || name != tables.names.head)
            });
            for name in new {
                let view = merge.new_tensor(&name);
                let shape = view.shape().to_vec();
                let stored = name.clone();
                let dtype = view.dtype();
                let file = None;
                let in_mxfp4 = false;
                let new = SourceTensor { name, stored, dtype, shape, file, bytes: None, in_mxfp4 };
                source.tensors.push(new);
            }
        }
        source.shape = shape.copied();
        Ok(source)
    }

    /// Gives a head of its own its tensors, and a tied model one table.
    fn arrange(&mut self, tables: Tables, changed: &Changed) {
        let Names { embedding, head, prefix, .. } = *tables.names;
        let biases = tables.names.head_biases();
        let at = |tensors: &[SourceTensor], name: &str| {
            let is_called = |tensor: &SourceTensor| {
                tensor.name == name || name.strip_prefix(prefix) == Some(&tensor.name)
            };
            tensors.iter().position(is_called)
        };
        let mut copy = |to: &str, from: &str| {
            if let (None, Some(from)) = (at(&self.tensors, to), at(&self.tensors, from)) {
                let tensor = SourceTensor { name: to.into(), ..self.tensors[from].clone() };
                self.tensors.push(tensor);
            }
        };
        copy(embedding, head);
        if tables.has_own_head {
            copy(head, embedding);
            copy(&biases[0], &biases[1]);
            return;
        }
        let is_new =
            matches!(changed, Changed::Merged(merge) if merge.replaced(embedding).is_some());
        let is_stored_once =
            at(&self.tensors, embedding).is_some_and(|at| self.tensors[at].stored != head);
        if let Some(head) = at(&self.tensors, head).filter(|_| is_new || !is_stored_once) {
            self.tensors.remove(head);
        }
    }

    /// Writes the dtype into a `config.json`: the dtype of most elements.
    pub(super) fn describe(&self, dtypes: &Dtypes, config: &mut Value) {
        let mut elements = BTreeMap::<&str, usize>::new();
        for SourceTensor { name, dtype, shape, .. } in &self.tensors {
            let name = match dtypes.of_tensor(name, *dtype) {
                Dtype::F32 => "float32",
                Dtype::F16 => "float16",
                Dtype::BF16 => "bfloat16",
                _ => continue,
            };
            *elements.entry(name).or_default() += shape.iter().product::<usize>();
        }
        let most = elements.into_iter().max_by_key(|(_, count)| *count);
        if let (Some((name, _)), Some(all)) = (most, config.as_object_mut()) {
            all.remove("torch_dtype");
            all.insert("dtype".into(), name.into());
        }
    }

    /// Writes all tensors to files of a directory.
    ///
    /// # Errors
    /// A file cannot be written, or an adapter or an average is not of these weights.
    pub(super) fn write(
        &self,
        changed: &Changed,
        dtypes: &Dtypes,
        shard_bytes: u64,
        to: &Path,
    ) -> Result<(), Error> {
        let size = |tensor: &SourceTensor| {
            bytes_in(dtypes.of_tensor(&tensor.name, tensor.dtype), &tensor.shape)
        };
        let sizes: Vec<usize> = self.tensors.iter().map(size).collect();
        let mut files = cut_into_files(&sizes, shard_bytes.try_into().unwrap_or(usize::MAX));
        if files.is_empty() {
            files.push(0..0); // a model without tensors has one file, too
        }
        let count = files.len();
        let mut weight_map = Map::new();
        for (index, tensors) in files.into_iter().enumerate() {
            let file = shard_name(index, count);
            let tensors = &self.tensors[tensors];
            let named = |tensor: &SourceTensor| (tensor.name.clone(), file.clone().into());
            weight_map.extend(tensors.iter().map(named));
            self.write_file(changed, dtypes, tensors, &to.join(&file))?;
        }
        write_index(to, count, weight_map, sizes.iter().sum())
    }

    /// The tensor in the files, if it is there in MXFP4.
    fn in_mxfp4<'t>(&self, tensor: &SourceTensor, opened: &[SafeTensors<'t>]) -> Option<Mxfp4<'t>> {
        let shape = self.shape.as_ref().filter(|_| tensor.in_mxfp4)?;
        find_mxfp4(shape, opened, &tensor.name)
    }

    fn write_file(
        &self,
        changed: &Changed,
        dtypes: &Dtypes,
        tensors: &[SourceTensor],
        path: &Path,
    ) -> Result<(), Error> {
        let failed = |error| Error::storage(path.display(), error);
        let dtype_of = |tensor: &SourceTensor| dtypes.of_tensor(&tensor.name, tensor.dtype);
        let described =
            |tensor: &SourceTensor| (tensor.name.clone(), dtype_of(tensor), tensor.shape.clone());
        let header = header(path, tensors.iter().map(described))?;
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path).map_err(failed)?);
        out.write_all(&header).map_err(failed)?;
        let opened: Vec<SafeTensors<'_>> = self.files.iter().map(WeightFile::tensors).collect();
        for tensor in tensors {
            let name = &tensor.name;
            let (view, values) = match (tensor.file, changed) {
                (Some(file), _) => {
                    let view = tensor.view(&opened[file]);
                    let values = changed.values(name, &view);
                    let values = values.map_err(|what| self.files[file].refuse(what))?;
                    (view, values)
                }
                (None, Changed::Merged(merge)) => (merge.new_tensor(name), None),
                (None, _) => unreachable!("only adapters bring tensors"),
            };
            let dtype = dtype_of(tensor);
            if let (None, Some(stored)) = (&values, self.in_mxfp4(tensor, &opened)) {
                write_mxfp4(&stored, dtype, &mut out).map_err(failed)?;
                continue;
            }
            match values {
                None if dtype == view.dtype() => out.write_all(view.data()),
                None => encode(&decode_all(&view), dtype, &mut out),
                Some(values) => encode(&values, dtype, &mut out),
            }
            .map_err(failed)?;
        }
        let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(failed)
    }
}

/// Writes the elements of a tensor in MXFP4, expert by expert.
fn write_mxfp4(tensor: &Mxfp4<'_>, dtype: Dtype, out: &mut impl Write) -> std::io::Result<()> {
    let shape = tensor.shape();
    let of_expert: usize = shape[1..].iter().product();
    let mut values = vec![0.0; of_expert];
    (0..shape[0]).try_for_each(|expert| {
        let parts = values.par_chunks_mut(CHUNK).enumerate();
        parts.for_each(|(nth, to)| tensor.decode(to, expert * of_expert + nth * CHUNK));
        encode(&values, dtype, out)
    })
}

/// Writes values as elements of this dtype.
fn encode(values: &[f32], dtype: Dtype, out: &mut impl Write) -> std::io::Result<()> {
    values.iter().try_for_each(|&value| match dtype {
        Dtype::F16 => out.write_all(&f16::from_f32(value).to_le_bytes()),
        Dtype::BF16 => out.write_all(&bf16::from_f32(value).to_le_bytes()),
        _ => out.write_all(&value.to_le_bytes()),
    })
}
