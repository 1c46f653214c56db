//! Whether the head of stored weights is the embedding. As in transformers 5, `config.json` says so
//! and the tensors are compared: two that differ are two, and one that is stored alone is both.

use std::path::Path;

use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Map, Value};

use super::adapter_config::ADAPTER_CONFIG;
use super::config::read_config;
use super::json;
use super::names::{find, is_float};
use super::weight_file::WeightFile;
use super::weights::{decode, weight_files};
use crate::error::Error;
use crate::models::{Shape, families};

/// Whether the weights of a directory have a head of their own, although its `config.json` ties it
/// to the embedding. Files that cannot be read have none: loading them fails, and says why.
pub(crate) fn has_own_head(directory: &Path, shape: &Shape) -> bool {
    let differs = || {
        let paths = weight_files(directory).ok()?;
        let files = paths.iter().map(|path| WeightFile::open(path).ok());
        let files = files.collect::<Option<Vec<_>>>()?;
        let files: Vec<SafeTensors<'_>> = files.iter().map(WeightFile::tensors).collect();
        let table = |name| find(&files, name, shape.names.prefix);
        Some(differ(&table(shape.names.embedding)?, &table(shape.names.head)?))
    };
    shape.tied && differs().unwrap_or(false)
}

/// Whether the `config.json` of a directory ties the head to the embedding.
pub(super) fn is_tied(directory: &Path) -> bool {
    let shape = read_config(directory).ok().and_then(|config| families::read(&config).ok());
    shape.is_some_and(|shape| shape.tied)
}

/// Whether an embedding that adapters bring stays the head's table, too: PEFT ties them again, or
/// it wrote the table of the model itself (`save_embedding_layers`) and not a trained copy.
pub(crate) fn keeps_tied(adapters: &Path) -> Result<bool, Error> {
    let config: Map<String, Value> = json::read(&adapters.join(ADAPTER_CONFIG))?;
    let ties = config.get("ensure_weight_tying").and_then(Value::as_bool).unwrap_or(false);
    let saved = config.get("modules_to_save").and_then(Value::as_array);
    let Some(saved) = saved.filter(|saved| !saved.is_empty()) else { return Ok(true) };
    // PEFT does not know the tables of other families, and leaves them apart.
    let is_known =
        |module: &str| matches!(module.rsplit('.').next(), Some("embed_tokens" | "lm_head"));
    Ok(ties && saved.iter().filter_map(Value::as_str).any(is_known))
}

/// Whether two tensors have different shapes or values. Their dtypes may differ.
pub(super) fn differ(one: &TensorView<'_>, other: &TensorView<'_>) -> bool {
    const AT_ONCE: usize = 1 << 16;
    if one.shape() != other.shape() {
        return true;
    }
    if one.dtype() == other.dtype() && one.data() == other.data() {
        return false;
    }
    if !is_float(one.dtype()) || !is_float(other.dtype()) {
        return true;
    }
    let elements: usize = one.shape().iter().product();
    let mut values = [vec![0.0; AT_ONCE], vec![0.0; AT_ONCE]];
    (0..elements).step_by(AT_ONCE).any(|from| {
        let count = AT_ONCE.min(elements - from);
        let [a, b] = &mut values;
        decode(&mut a[..count], one, from);
        decode(&mut b[..count], other, from);
        a[..count] != b[..count]
    })
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;

    #[test]
    fn values_are_compared_and_not_bytes() {
        let view = |dtype, bytes: &'static [u8]| {
            TensorView::new(dtype, vec![bytes.len() * 8 / dtype.bitsize()], bytes).expect("whole")
        };
        let one = view(Dtype::F32, &[0, 0, 128, 63]);
        assert!(!differ(&one, &view(Dtype::BF16, &[128, 63])), "1 of another dtype");
        assert!(differ(&one, &view(Dtype::F16, &[1, 60])));
        assert!(differ(&one, &view(Dtype::F32, &[0; 8])), "another shape");
        let zero = view(Dtype::F16, &[0, 0]);
        assert!(!differ(&zero, &view(Dtype::F16, &[0, 128])), "-0 is 0");
        let nan = view(Dtype::F16, &[1, 124]);
        assert!(differ(&nan, &view(Dtype::F16, &[2, 124])));
        assert!(differ(&zero, &view(Dtype::I16, &[0, 0])));
    }
}
