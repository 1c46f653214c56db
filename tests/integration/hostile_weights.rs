//! Malformed and hostile weight files: each gives an error that names the file and exit status 2,
//! without a panic, a large allocation or an overwritten file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

fn goldens(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

/// A directory with a golden's config.json, and what `fill` puts beside it.
fn directory(name: &str, fill: impl Fn(&Path)) -> TempDir {
    let folder = tempfile::tempdir().expect("a place for files");
    let config = fs::read(goldens(name).join("config.json")).expect("it is committed");
    fs::write(folder.path().join("config.json"), config).expect("a directory of ours");
    fill(folder.path());
    folder
}

/// Trains on a directory, and expects a refusal that says all of this.
#[track_caller]
fn refused(folder: &TempDir, says: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_l2l"))
        .args(["train", "--set", "data.train=random", "--set", "step.steps=1", "--format", "json"])
        .args(["--set", "data.sequence_length=4", "--set", "validation.every_steps=9"])
        .args(["--set", "data.validation_split=0.1"])
        .arg("--set")
        .arg(format!("model.path={}", folder.path().display()))
        .output()
        .expect("the program runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.starts_with("error: ") && !error.contains("panicked"), "{error}");
    for text in says {
        assert!(error.contains(text), "{text:?} expected in: {error}");
    }
}

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn tensor(dtype: &str, shape: Value, offsets: [u64; 2]) -> Value {
    json!({ "transformer.wte.weight": { "dtype": dtype, "shape": shape, "data_offsets": offsets } })
}

#[test]
fn headers() {
    let two = |second: [u64; 2]| {
        let mut header = tensor("F32", json!([2]), [0, 8]);
        header["b"] = json!({ "dtype": "F32", "shape": [2], "data_offsets": second });
        header.to_string()
    };
    let whole = [
        file("", 0),
        file("{", 0),
        file("[]", 0),
        file("{\"a\": 1}", 0),
        file(&tensor("F32", json!([37, 20]), [0, 1 << 60]).to_string(), 8),
        file(&tensor("F32", json!([1_u64 << 40, 1_u64 << 40]), [0, 8]).to_string(), 8),
        file(&tensor("F32", json!([u64::MAX]), [0, 8]).to_string(), 8),
        file(&tensor("F32", json!([2]), [8, 0]).to_string(), 8),
        file(&tensor("F99", json!([2]), [0, 8]).to_string(), 8),
        file(&tensor("F32", json!([2]), [0, 4]).to_string(), 4),
        file(&two([4, 12]), 12),
        file(&two([100, 108]), 108),
        u64::MAX.to_le_bytes().to_vec(),
        (200_u64 << 20).to_le_bytes().to_vec(),
        [1_u64.to_le_bytes().as_slice(), &[0xff]].concat(),
    ];
    for bytes in whole {
        let folder = directory("tied", |at| {
            fs::write(at.join("model.safetensors"), &bytes).expect("a directory of ours");
        });
        refused(&folder, &["model.safetensors"]);
        let kept = fs::read(folder.path().join("model.safetensors")).expect("it is there");
        assert_eq!(kept, bytes);
    }
}

#[test]
fn other_types_and_other_tensors() {
    let folder = directory("tied", |at| {
        let header = tensor("I64", json!([37, 20]), [0, 5920]).to_string();
        fs::write(at.join("model.safetensors"), file(&header, 5920)).expect("a directory of ours");
    });
    refused(&folder, &["transformer.wte.weight: f32, f16 or bf16 expected, I64 found", "missing"]);
    let folder = directory("llama", |at| {
        fs::copy(goldens("bert").join("model.safetensors"), at.join("model.safetensors"))
            .expect("it is committed");
    });
    refused(&folder, &["is missing", "more"]);
}

#[test]
fn indices() {
    let with_map = |map: Value| {
        directory("tied", |at| {
            let index = json!({ "metadata": {}, "weight_map": map }).to_string();
            fs::write(at.join("model.safetensors.index.json"), index).expect("a directory of ours");
        })
    };
    for outside in ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""] {
        let folder = with_map(json!({ "transformer.wte.weight": outside }));
        refused(&folder, &["index.json", "is no file beside it"]);
    }
    refused(&with_map(json!({ "a": "none.safetensors" })), &["none.safetensors", "No such file"]);
    refused(&with_map(json!([1])), &["index.json", "expected a map"]);
    let empty = with_map(json!({}));
    refused(&empty, &["index.json", "names no file"]);
}

#[test]
fn half_written_shards() {
    let weights = fs::read(goldens("tied").join("model.safetensors")).expect("it is committed");
    for cut in [0, 8, weights.len() / 2, weights.len() - 1] {
        let folder = directory("tied", |at| {
            let map = json!({ "a": "model-1.safetensors", "b": "model-2.safetensors" });
            let index = json!({ "metadata": {}, "weight_map": map }).to_string();
            fs::write(at.join("model.safetensors.index.json"), index).expect("ours");
            fs::write(at.join("model-1.safetensors"), &weights).expect("ours");
            fs::write(at.join("model-2.safetensors"), &weights[..cut]).expect("ours");
        });
        refused(&folder, &["model-2.safetensors"]);
    }
}

/// All threads look for values that are not finite. The error is that of the first tensor by name,
/// of its first such value, and of the file that has it.
#[test]
fn the_first_value_that_is_not_finite_is_named() {
    let golden = fs::read(goldens("tied").join("model.safetensors")).expect("it is committed");
    let golden = SafeTensors::deserialize(&golden).expect("it is whole");
    let mut names: Vec<String> = golden.names().into_iter().map(str::to_string).collect();
    names.sort();
    let bad = [&names[names.len() - 1], &names[2]];
    let in_shard = |shard: usize| {
        let own = names.iter().enumerate().filter(|(nth, _)| nth % 2 == shard);
        let tensors = own.map(|(_, name)| {
            let view = golden.tensor(name).expect("it is one of its names");
            let mut data = view.data().to_vec();
            if bad.contains(&name) {
                let nan = f32::NAN.to_le_bytes();
                data[4..8].copy_from_slice(&nan);
                let end = data.len() - 4;
                data[end..].copy_from_slice(&nan);
            }
            (name.clone(), (view.dtype(), view.shape().to_vec(), data))
        });
        tensors.collect::<Vec<_>>()
    };
    let map = json!({ "a": "model-0.safetensors", "b": "model-1.safetensors" });
    let index = json!({ "metadata": {}, "weight_map": map }).to_string();
    let folder = directory("tied", |at| {
        fs::write(at.join("model.safetensors.index.json"), &index).expect("ours");
        for shard in 0..2 {
            let owned = in_shard(shard);
            let views = owned.iter().map(|(name, (dtype, shape, data))| {
                (name, TensorView::new(*dtype, shape.clone(), data).expect("it is whole"))
            });
            let bytes = safetensors::serialize(views, None).expect("plain tensors");
            fs::write(at.join(format!("model-{shard}.safetensors")), bytes).expect("ours");
        }
    });
    let says = format!("model-0.safetensors: element 1 of tensor {} is NaN", names[2]);
    refused(&folder, &[&says]);
}

/// The first BERT's checkpoints have other names of norms.
#[test]
fn old_names_of_norms_are_read() {
    let weights = fs::read(goldens("bert-classes").join("model.safetensors")).expect("committed");
    let renamed = String::from_utf8_lossy(&weights[8..8 + header_len(&weights)])
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta");
    let mut bytes = (renamed.len() as u64).to_le_bytes().to_vec();
    bytes.extend(renamed.as_bytes());
    bytes.extend(&weights[8 + header_len(&weights)..]);
    let run = |weights: &[u8]| {
        let folder = directory("bert-classes", |at| {
            fs::write(at.join("model.safetensors"), weights).expect("a directory of ours");
        });
        let output = Command::new(env!("CARGO_BIN_EXE_l2l"))
            .args(["train", "--set", "step.steps=1", "--format", "json"])
            .args(["--set", "data.sequence_length=30", "--set", "validation.every_steps=9"])
            .args(["--set", "data.validation_split=0.1"])
            .arg("--set")
            .arg(format!("data.train={}/data.jsonl", goldens("bert-classes").display()))
            .arg("--set")
            .arg(format!("model.path={}", folder.path().display()))
            .output()
            .expect("the program runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let summary: Value =
            serde_json::from_str(text.lines().last().expect("a summary")).expect("JSON");
        summary["weights_digest"].clone()
    };
    assert_eq!(run(&weights), run(&bytes));
}

fn header_len(weights: &[u8]) -> usize {
    u64::from_le_bytes(weights[..8].try_into().expect("eight bytes")) as usize
}

const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n";

/// A clone without git-lfs has pointers in place of large files.
#[test]
fn pointers() {
    for name in ["model.safetensors", "model.safetensors.index.json"] {
        let folder = directory("tied", |at| fs::write(at.join(name), POINTER).expect("ours"));
        refused(&folder, &[&format!("{name}: it is a pointer of git-lfs"), "git lfs pull"]);
    }
    let folder = directory("tied", |at| {
        for name in ["config.json", "model.safetensors"] {
            fs::write(at.join(name), POINTER).expect("a directory of ours");
        }
    });
    refused(&folder, &["config.json: it is a pointer of git-lfs"]);
    let data = |model: &str, train: &Path, name: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_l2l"))
            .args(["data", "--set", model, "--set", "data.sequence_length=8", "--set"])
            .arg(format!("data.train={}", train.display()))
            .output()
            .expect("the program runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(&format!("{name}: it is a pointer of git-lfs")), "{error}");
    };
    let folder = directory("tied", |at| {
        fs::write(at.join("tokenizer.json"), POINTER).expect("a directory of ours");
        fs::write(at.join("a.txt"), "a text").expect("a directory of ours");
    });
    let model = format!("model.path={}", folder.path().display());
    data(&model, &folder.path().join("a.txt"), "tokenizer.json");
    let folder = tempfile::tempdir().expect("a place for files");
    for name in ["a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "a.bin"] {
        let path = folder.path().join(name);
        fs::write(&path, POINTER).expect("a directory of ours");
        data("model.preset=gpt-small", &path, name);
    }
}

/// Weights that another program has quantised, by `config.json` or by the names of tensors.
#[test]
fn quantised_weights() {
    let with_config = |how: Value| {
        directory("tied", |at| {
            fs::copy(goldens("tied").join("model.safetensors"), at.join("model.safetensors"))
                .expect("it is committed");
            let path = at.join("config.json");
            let text = fs::read_to_string(&path).expect("it was written");
            let mut config: Value = serde_json::from_str(&text).expect("JSON");
            config["quantization_config"] = how.clone();
            fs::write(path, config.to_string()).expect("a directory of ours");
        })
    };
    for (how, says) in [
        (json!({ "quant_method": "gptq", "bits": 4 }), "quantised (gptq)"),
        (json!({ "quant_method": "awq", "bits": 4 }), "quantised (awq)"),
        (json!({ "load_in_4bit": true }), "quantised (bitsandbytes)"),
        (json!({ "quant_method": "fp8" }), "quantised (fp8)"),
    ] {
        let folder = with_config(how);
        refused(&folder, &["config.json: quantization_config", says, "train.base = \"nf4\""]);
    }
    for (end, says) in [
        ("qweight", "GPTQ or AWQ"),
        ("weight.absmax", "bitsandbytes"),
        ("weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("SCB", "bitsandbytes"),
        ("weight_scale_inv", "FP8"),
    ] {
        let name = format!("transformer.h.0.attn.c_attn.{end}");
        let header =
            json!({ &*name: { "dtype": "U8", "shape": [4], "data_offsets": [0, 4] } }).to_string();
        let folder = directory("tied", |at| {
            fs::write(at.join("model.safetensors"), file(&header, 4)).expect("ours");
        });
        refused(&folder, &[&format!("{name} is of a weight that is quantised ({says})")]);
    }
}
