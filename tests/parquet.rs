//! Parquet files. A program of its own, because it is the only test that a build with the feature
//! needs: `cargo test --features parquet --test parquet`.

use std::fs;
use std::path::Path;

use l2l::config::Config;
use l2l::data::{Dataset, Sequence};
use l2l::{Error, shape_of};
use tempfile::TempDir;

/// A model whose chat template writes all of a chat, with the keys in their order.
fn model() -> TempDir {
    let folder = tempfile::tempdir().expect("a place for files");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text/bpe");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(from.join(file), folder.path().join(file)).expect("it is committed");
    }
    let config = fs::read_to_string(from.join("config.json")).expect("it is committed");
    let config = config.replace("\"n_positions\": 128", "\"n_positions\": 1024");
    fs::write(folder.path().join("config.json"), config).expect("a folder of ours");
    let template = "{{- tools | tojson }}{%- for m in messages %}{{- m | tojson }}{%- endfor %}";
    fs::write(folder.path().join("chat_template.jinja"), template).expect("a folder of ours");
    folder
}

/// The sequences of a file.
fn read(path: &Path) -> Result<Vec<Sequence>, Error> {
    let model = model();
    let mut config = Config::default();
    config.model.path = Some(model.path().into());
    config.data.sequence_length = Some(1024);
    config.data.train = path.display().to_string().into();
    let (data, _) = Dataset::open(&config, &shape_of(&config)?)?;
    let count = data.len().expect("a file has an end");
    Ok((0..count).map(|index| data.sequence(index).expect("it was read")).collect())
}

/// Parquet files have the records of the file of lines beside them; damaged files are refused.
#[test]
fn parquet_files_have_records() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/records");
    let expected = read(&goldens.join("records.jsonl")).expect("it is committed");
    assert_eq!(expected.len(), 4);
    for name in ["snappy.parquet", "zstd.parquet"] {
        assert_eq!(read(&goldens.join(name)).expect("it is committed"), expected, "{name}");
        let bytes = fs::read(goldens.join(name)).expect("it is committed");
        let folder = tempfile::tempdir().expect("a place for files");
        let damaged = folder.path().join(name);
        for at in (0..bytes.len()).step_by(7) {
            fs::write(&damaged, &bytes[..at]).expect("the folder is writable");
            assert!(read(&damaged).is_err(), "{name}, {at} bytes");
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x55;
            fs::write(&damaged, &flipped).expect("the folder is writable");
            _ = read(&damaged); // it ends, whatever it finds
        }
    }
}
