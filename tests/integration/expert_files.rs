//! Files of models with experts: each expert's tensors by themselves, or one tensor of all experts
//! of a block. Both are read to the same bits; what is not one of them is refused by name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use l2l::{Config, Trainer, hf};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::pytorch::case;

const NAMES: [&str; 7] = [
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_moe-sparse",
    "qwen3_next",
];

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Stored {
    fn view(&self) -> TensorView<'_> {
        TensorView::new(self.dtype, self.shape.clone(), &self.bytes).expect("as it was read")
    }
}

pub(crate) type Tensors = BTreeMap<String, Stored>;

pub(crate) fn read(folder: &Path) -> Tensors {
    let bytes = fs::read(folder.join("model.safetensors")).expect("it was written");
    let all = SafeTensors::deserialize(&bytes).expect("it is whole").tensors();
    let stored = |view: TensorView<'_>| Stored {
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        bytes: view.data().to_vec(),
    };
    all.into_iter().map(|(name, view)| (name, stored(view))).collect()
}

pub(crate) fn write(tensors: &Tensors, file: &Path) {
    let views = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.view()));
    let views: Vec<(String, TensorView<'_>)> = views.collect();
    safetensors::serialize_to_file(views, None, file).expect("a directory of ours");
}

pub(crate) fn golden(name: &str) -> Tensors {
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name))
}

/// The tensors as transformers 5 holds them.
pub(crate) fn fused(tensors: &Tensors) -> Tensors {
    let mut all = Tensors::new();
    let mut experts = BTreeMap::<String, BTreeMap<(usize, usize), &Stored>>::new();
    for (name, tensor) in tensors {
        let own = name.replace("block_sparse_moe", "mlp");
        let Some((block, of_expert)) = own.split_once(".experts.") else {
            all.insert(own, tensor.clone());
            continue;
        };
        let mut parts = of_expert.split('.');
        let expert = parts.next().expect("a number").parse().expect("a number");
        let module = match parts.next() {
            Some("gate_proj" | "w1") => ("gate_up_proj", 0),
            Some("up_proj" | "w3") => ("gate_up_proj", 1),
            _ => ("down_proj", 0),
        };
        let joined = experts.entry(format!("{block}.experts.{}", module.0)).or_default();
        joined.insert((expert, module.1), tensor);
    }
    for (name, parts) in experts {
        let count = parts.keys().map(|(expert, _)| expert + 1).max().expect("an expert");
        let shape = &parts[&(0, 0)].shape;
        let shape = vec![count, parts.len() / count * shape[0], shape[1]];
        let bytes = parts.into_values().flat_map(|part| part.bytes.clone()).collect();
        all.insert(name, Stored { dtype: Dtype::F32, shape, bytes });
    }
    all
}

/// A directory with a golden's config.json and these tensors, in this number of files.
pub(crate) fn directory(name: &str, tensors: &Tensors, files: usize) -> TempDir {
    let folder = tempfile::tempdir().expect("a place for files");
    let at = folder.path();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
    fs::copy(from.join("config.json"), at.join("config.json")).expect("it is committed");
    if files == 1 {
        write(tensors, &at.join("model.safetensors"));
        return folder;
    }
    let mut places = BTreeMap::new();
    for index in 0..files {
        let file = format!("model-{:05}-of-{files:05}.safetensors", index + 1);
        let part = tensors.iter().skip(index).step_by(files);
        let part: Tensors = part.map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
        places.extend(part.keys().map(|name| (name.clone(), file.clone())));
        write(&part, &at.join(file));
    }
    let index = json!({ "weight_map": places }).to_string();
    fs::write(at.join("model.safetensors.index.json"), index).expect("a directory of ours");
    folder
}

pub(crate) fn on(name: &str, folder: &Path) -> Config {
    let mut config = case(name).0;
    config.model.path = Some(folder.into());
    config
}

pub(crate) async fn digest(config: Config) -> String {
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    let digest = trainer.digest().await.expect("nothing fails here");
    trainer.stop().await.expect("nothing fails here");
    digest
}

#[tokio::test]
async fn both_layouts_have_the_same_bits() {
    for name in NAMES {
        let single = golden(name);
        let fused = fused(&single);
        assert!(fused.len() < single.len(), "{name}");
        let bare = fused.iter().map(|(name, tensor)| {
            (name.strip_prefix("model.").unwrap_or(name).to_string(), tensor.clone())
        });
        let bare: Tensors = bare.collect();
        let expected = digest(case(name).0).await;
        for (tensors, files) in [(&single, 3), (&fused, 1), (&fused, 3), (&bare, 1)] {
            let folder = directory(name, tensors, files);
            assert_eq!(digest(on(name, folder.path())).await, expected, "{name} {files}");
        }
    }
}

/// An export has each expert by itself, whatever the layout that it was read from.
#[test]
fn exports_have_each_expert_by_itself() {
    for name in NAMES {
        let single = golden(name);
        let folder = directory(name, &fused(&single), 2);
        let to = folder.path().join("export");
        hf::export(folder.path(), None, &to, Default::default()).expect("a model of ours");
        assert_eq!(read(&to), single, "{name}");
    }
}

/// Adapters are merged into weights of both layouts, to the same bits.
#[tokio::test]
async fn adapters_are_merged_into_both_layouts() {
    for name in ["mixtral", "qwen3_moe"] {
        let folder = directory(name, &fused(&golden(name)), 1);
        let mut config = on(name, folder.path());
        let targets = vec!["q_proj".into(), "v_proj".into()];
        let lora = l2l::config::LoraConfig { targets: Some(targets), ..Default::default() };
        config.train.lora = Some(lora);
        config.optimizer.learning_rate = 0.01;
        let adapters = folder.path().join("adapters");
        let mut batches = l2l::data::Batches::open(&config).expect("it is committed");
        let mut trainer = Trainer::start(config).await.expect("a case of ours");
        for _ in 0..2 {
            trainer.step(batches.next().await.expect("good data")).await.expect("it fits");
        }
        trainer.checkpoint(&adapters).await.expect("a directory of ours");
        trainer.stop().await.expect("nothing fails here");
        let single = case(name).0.model.path.expect("a case has one");
        let merged = [folder.path(), &single].map(|base| {
            let to = tempfile::tempdir().expect("a place for files");
            let to = to.path().join("merged");
            hf::export(&adapters, Some(base), &to, Default::default()).expect("adapters of ours");
            read(&to)
        });
        assert_eq!(merged[0], merged[1], "{name}");
        assert_ne!(merged[0], golden(name), "{name}");
    }
}

/// Trains a model with these tensors, and expects an error that says all of this.
async fn refused(name: &str, tensors: &Tensors, says: &[&str]) {
    let folder = directory(name, tensors, 1);
    let error = Trainer::start(on(name, folder.path())).await.map(drop).expect_err("damaged");
    let error = error.to_string();
    for text in says.iter().chain(&["model.safetensors"]) {
        assert!(error.contains(text), "{text:?} expected in: {error}");
    }
}

#[tokio::test]
async fn experts_of_other_models_are_refused() {
    const UP: &str = "model.layers.1.mlp.experts.gate_up_proj";
    const DOWN: &str = "model.layers.0.mlp.experts.down_proj";
    let single = golden("qwen3_moe");
    let fused = fused(&single);
    let changed = |of: &Tensors, change: &dyn Fn(&mut Tensors)| {
        let mut all = of.clone();
        change(&mut all);
        all
    };
    let gap = "model.layers.1.mlp.experts.2.up_proj.weight";
    let lacks = changed(&single, &|all| drop(all.remove(gap)));
    refused("qwen3_moe", &lacks, &[gap, "is missing"]).await;
    let lacks = changed(&fused, &|all| drop(all.remove(DOWN)));
    let missing = "model.layers.0.mlp.experts.0.down_proj.weight is missing";
    refused("qwen3_moe", &lacks, &[missing]).await;
    let beyond = "model.layers.1.mlp.experts.7.up_proj.weight";
    let more = changed(&single, &|all| drop(all.insert(beyond.into(), all[gap].clone())));
    refused("qwen3_moe", &more, &[beyond, "in the file and not in the model"]).await;
    let reshaped = |at: &'static str, shape: [usize; 3]| {
        changed(&fused, &move |all| {
            let tensor = all.get_mut(at).expect("it is fused");
            tensor.shape = shape.to_vec();
            tensor.bytes.resize(4 * shape.iter().product::<usize>(), 0);
        })
    };
    let transposed = "[7, 28, 30] expected, [7, 30, 28] found: its matrices are transposed";
    refused("qwen3_moe", &reshaped(UP, [7, 30, 28]), &[UP, transposed]).await;
    let eight = "[7, 30, 14] expected, [8, 30, 14] found";
    refused("qwen3_moe", &reshaped(DOWN, [8, 30, 14]), &[DOWN, eight]).await;
    let both = changed(&fused, &|all| drop(all.insert(gap.into(), single[gap].clone())));
    refused("qwen3_moe", &both, &[UP, gap, "must be there once"]).await;
    let folder = directory("qwen3_moe", &both, 2);
    let to = folder.path().join("export");
    let error = hf::export(folder.path(), None, &to, Default::default()).expect_err("twice");
    assert!(error.to_string().contains("must be there once") && !to.exists(), "{error}");
}

/// A router has another name in files of Mixtral with fused experts.
#[tokio::test]
async fn a_router_must_be_there_once() {
    const ROUTER: &str = "model.layers.1.block_sparse_moe.gate.weight";
    let single = golden("mixtral");
    let mut both = fused(&single);
    both.insert(ROUTER.into(), single[ROUTER].clone());
    let other = "model.layers.1.mlp.gate.weight";
    refused("mixtral", &both, &[ROUTER, other, "must be there once"]).await;
}

/// Numbers of experts that are out of range or contradict each other.
#[test]
fn configs_of_other_experts_are_refused() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change, &str); 8] = [
        ("mixtral", |c| c["num_local_experts"] = json!(0), "model.experts is 0: it must be 1 to"),
        ("mixtral", |c| c["num_local_experts"] = json!(5000), "it must be 1 to 4096"),
        ("mixtral", |c| c["num_experts_per_tok"] = json!(0), "model.experts_per_token is 0"),
        ("mixtral", |c| c["num_experts_per_tok"] = json!(6), "is 6, and a block has 5 experts"),
        (
            "qwen3_moe",
            |c| c["moe_intermediate_size"] = json!(1_u64 << 40),
            "model.expert_intermediate",
        ),
        ("qwen3_moe", |c| c["decoder_sparse_step"] = json!(3), "none of the 2 blocks has experts"),
        (
            "qwen2_moe",
            |c| c["shared_expert_intermediate_size"] = json!(u64::MAX),
            "shared_expert_intermediate_size is",
        ),
        (
            "qwen3_moe",
            |c| (c["num_hidden_layers"], c["num_local_experts"]) = (json!(100), json!(4096)),
            "at most 262144 experts",
        ),
    ];
    for (name, change, says) in cases {
        let folder = directory(name, &Tensors::new(), 1);
        let file = folder.path().join("config.json");
        let text = fs::read_to_string(&file).expect("it was copied");
        let mut value: Value = serde_json::from_str(&text).expect("it is JSON");
        change(&mut value);
        fs::write(&file, value.to_string()).expect("a directory of ours");
        let error = l2l::shape_of(&on(name, folder.path())).expect_err(says).to_string();
        assert!(error.contains(says) && error.contains("config.json"), "{says:?} in: {error}");
    }
    let mut sized = case("mixtral").0;
    sized.model.experts = Some(4);
    let error = l2l::shape_of(&sized).expect_err("the directory has sizes").to_string();
    assert!(error.contains("model.experts is set together with model.path"), "{error}");
}
