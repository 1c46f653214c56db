//! The weights of an export: tensors of some files, changed by adapters or replaced by averages, in
//! the dtype that is asked for, in one file or in several with an index. One tensor at a time is in
//! memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorInfo, TensorView};
use serde_json::{Value, json};

use super::average::Averages;
use super::export::write_file;
use super::merge::Merge;
use super::tensor_files::header;
use super::weights::{check_finite, decode, map, weight_files};
use crate::config::WeightDtype;
use crate::error::Error;

/// What is other than in the files.
pub(super) enum Changed {
    No,
    Merged(Merge),
    Averaged(Averages),
}

impl Changed {
    /// The values of a tensor, where they are others.
    fn values(&self, name: &str, tensor: &TensorView<'_>) -> Result<Option<Vec<f32>>, String> {
        match self {
            Changed::No => Ok(None),
            Changed::Merged(merge) => merge.merged(name, tensor),
            Changed::Averaged(averages) => averages.of_tensor(name, tensor),
        }
    }
}

/// The dtype that each tensor is written in.
pub(super) struct Dtypes {
    wanted: Option<Dtype>,
    /// Those of the model that training began with.
    of_base: BTreeMap<String, Dtype>,
    /// The one that most of them have.
    usual: Option<Dtype>,
}

impl Dtypes {
    /// What is asked for. `base`: the model that training began with, if the files are others.
    ///
    /// # Errors
    /// The files of `base` cannot be read.
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
                let map = map(&path)?;
                let refuse = |error| Error::bad_model(path.display(), error);
                let (_, metadata) = SafeTensors::read_metadata(&map).map_err(refuse)?;
                let tensors = metadata.tensors().into_iter();
                of_base.extend(tensors.map(|(name, info)| (name, info.dtype)));
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

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

/// The tensors of a file that is to be written, by index, and where each lies in it.
type Shard = (Vec<usize>, Vec<(String, TensorInfo)>);

/// The weights of a model in some files.
pub(super) struct Source {
    files: Vec<(PathBuf, Mmap)>,
    /// Name, dtype and shape of each tensor, and the file that it is in; none: the adapters'.
    tensors: Vec<(String, Dtype, Vec<usize>, Option<usize>)>,
}

impl Source {
    /// Opens the files.
    ///
    /// # Errors
    /// One cannot be read; a value is not finite, where all must be; or the adapters are of other
    /// weights.
    pub(super) fn open(
        paths: &[PathBuf],
        changed: &Changed,
        all_finite: bool,
    ) -> Result<Source, Error> {
        let (mut files, mut tensors) = (Vec::new(), Vec::new());
        for (at, path) in paths.iter().enumerate() {
            let map = map(path)?;
            let refuse = |error| Error::bad_model(path.display(), error);
            let (_, metadata) = SafeTensors::read_metadata(&map).map_err(refuse)?;
            let read = SafeTensors::deserialize(&map).map_err(refuse)?;
            if all_finite {
                let mut views = read.tensors().into_iter();
                let checked = views.try_for_each(|(name, view)| check_finite(&name, &view));
                checked.map_err(|what| Error::bad_model(path.display(), what))?;
            }
            for name in metadata.offset_keys() {
                let info = metadata.info(&name).expect("it is one of its keys");
                tensors.push((name, info.dtype, info.shape.clone(), Some(at)));
            }
            files.push((path.clone(), map));
        }
        if let Changed::Merged(merge) = changed {
            let names: Vec<String> = tensors.iter().map(|(name, ..)| name.clone()).collect();
            let last = paths.last().map(|path| path.display().to_string()).unwrap_or_default();
            let new = merge.new_tensors(&names).map_err(|what| Error::bad_model(last, what))?;
            for name in new {
                let tensor = merge.new_tensor(&name);
                tensors.push((name.clone(), tensor.dtype(), tensor.shape().to_vec(), None));
            }
        }
        Ok(Source { files, tensors })
    }

    /// Says the dtype in a `config.json`: that of most bytes.
    pub(super) fn describe(&self, dtypes: &Dtypes, config: &mut Value) {
        let mut bytes = BTreeMap::<&str, usize>::new();
        for (name, own, shape, _) in &self.tensors {
            let name = match dtypes.of_tensor(name, *own) {
                Dtype::F32 => "float32",
                Dtype::F16 => "float16",
                Dtype::BF16 => "bfloat16",
                _ => continue,
            };
            *bytes.entry(name).or_default() += shape.iter().product::<usize>();
        }
        let most = bytes.into_iter().max_by_key(|(_, bytes)| *bytes);
        if let (Some((name, _)), Some(all)) = (most, config.as_object_mut()) {
            all.remove("torch_dtype");
            all.insert("dtype".into(), name.into());
        }
    }

    /// Writes all to a directory.
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
        let mut shards = vec![Shard::default()];
        let (mut end, mut total) = (0, 0);
        for (at, (name, own, shape, _)) in self.tensors.iter().enumerate() {
            let dtype = dtypes.of_tensor(name, *own);
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            if end > 0 && (end + bytes) as u64 > shard_bytes {
                shards.push(Shard::default());
                end = 0;
            }
            let (tensors, infos) = shards.last_mut().expect("there is one");
            let data_offsets = (end, end + bytes);
            tensors.push(at);
            infos.push((name.clone(), TensorInfo { dtype, shape: shape.clone(), data_offsets }));
            (end, total) = (end + bytes, total + bytes);
        }
        let count = shards.len();
        let mut weight_map = serde_json::Map::new();
        for (index, (tensors, infos)) in shards.into_iter().enumerate() {
            let file = match count {
                1 => "model.safetensors".to_string(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            weight_map.extend(infos.iter().map(|(name, _)| (name.clone(), file.clone().into())));
            self.write_file(changed, &tensors, infos, &to.join(file))?;
        }
        if count == 1 {
            return Ok(());
        }
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        let text = serde_json::to_string_pretty(&index).expect("it is plain JSON");
        write_file(&to.join("model.safetensors.index.json"), &text)
    }

    /// Writes some of the tensors to a file.
    fn write_file(
        &self,
        changed: &Changed,
        tensors: &[usize],
        infos: Vec<(String, TensorInfo)>,
        path: &Path,
    ) -> Result<(), Error> {
        let failed = |error| Error::storage(path.display(), error);
        let dtypes: Vec<Dtype> = infos.iter().map(|(_, info)| info.dtype).collect();
        let header = header(infos).map_err(|what| Error::bad_model(path.display(), what))?;
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path).map_err(failed)?);
        out.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
        out.write_all(&header).map_err(failed)?;
        let opened: Vec<SafeTensors<'_>> = self
            .files
            .iter()
            .map(|(_, map)| SafeTensors::deserialize(map).expect("it was read before"))
            .collect();
        for (&at, dtype) in tensors.iter().zip(dtypes) {
            let (name, _, _, file) = &self.tensors[at];
            let tensor = match (file, changed) {
                (Some(file), _) => opened[*file].tensor(name).expect("it is one of its names"),
                (None, Changed::Merged(merge)) => merge.new_tensor(name),
                (None, _) => unreachable!("only adapters bring tensors"),
            };
            let source = file.map_or(&self.files[0].0, |file| &self.files[file].0);
            let values = match file {
                Some(_) => changed.values(name, &tensor),
                None => Ok(None),
            };
            let values = values.map_err(|what| Error::bad_model(source.display(), what))?;
            match values {
                None if dtype == tensor.dtype() => out.write_all(tensor.data()),
                None => {
                    let mut values = vec![0.0; tensor.shape().iter().product()];
                    decode(&mut values, &tensor, 0);
                    encode(&values, dtype, &mut out)
                }
                Some(values) => encode(&values, dtype, &mut out),
            }
            .map_err(failed)?;
        }
        let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(failed)
    }
}

/// Writes values as elements of this dtype.
fn encode(values: &[f32], dtype: Dtype, out: &mut impl Write) -> std::io::Result<()> {
    values.iter().try_for_each(|&value| match dtype {
        Dtype::F16 => out.write_all(&f16::from_f32(value).to_le_bytes()),
        Dtype::BF16 => out.write_all(&bf16::from_f32(value).to_le_bytes()),
        _ => out.write_all(&value.to_le_bytes()),
    })
}
