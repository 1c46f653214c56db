//! A program can tell errors apart by their type: what does not fit, a full disk, bad data, a bad
//! batch, a loss that is no number.

use std::{fs, io};

use l2l::data::{Batch, Batches, Sequence};
use l2l::{Config, Error, ErrorKind, Resource, Trainer};

fn config() -> Config {
    let mut config = Config::default();
    config.data.train = "random".into();
    config.data.sequence_length = Some(8);
    config.model.layers = Some(1);
    config.model.hidden = Some(16);
    config.model.heads = Some(2);
    config.model.vocabulary = Some(40);
    config.step.batch = 2;
    config.step.micro_batch = 1;
    config
}

#[tokio::test]
async fn what_does_not_fit_says_by_how_much() {
    let mut config = config();
    config.device.memory = "1KB".parse().expect("a size");
    let error = Trainer::start(config).await.err().expect("a kilobyte is too little");
    let Error::DoesNotFit(misfit) = &error else { panic!("{error:?}") };
    assert_eq!((misfit.resource, misfit.available), (Resource::DeviceMemory, 1000));
    assert!(misfit.needed > 1000 && misfit.largest_term.is_some(), "{misfit:?}");
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::DoesNotFit, 2));
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_full_disk_is_no_other_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let partial = folder.path().join("model.safetensors.partial");
    std::os::unix::fs::symlink("/dev/full", partial).expect("a folder of ours");
    let mut trainer = Trainer::start(config()).await.expect("a case of ours");
    let error = trainer.save(folder.path()).await.expect_err("there is no room");
    let Error::Storage { place, source, .. } = &error else { panic!("{error:?}") };
    assert!(place.contains("model.safetensors"), "{place}");
    assert_eq!(source.kind(), io::ErrorKind::StorageFull);
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::StorageFull, 1));
    let nowhere = folder.path().join("no/where");
    let error = trainer.save(&nowhere).await.expect_err("there is no such folder");
    assert_eq!(error.kind(), ErrorKind::Storage);
    trainer.stop().await.expect("the run goes on all the same");
}

#[tokio::test]
async fn bad_data_and_bad_batches() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("data.jsonl");
    fs::write(&file, "{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [1, 99]}\n").expect("ours");
    let mut with_file = config();
    with_file.data.train = file.to_str().expect("UTF-8").into();
    let error = Batches::open(&with_file).err().expect("token 99 is unknown");
    let Error::BadData { file: found, line, .. } = &error else { panic!("{error:?}") };
    assert_eq!((found.as_str(), *line), (file.to_str().expect("UTF-8"), Some(2)));
    let mut trainer = Trainer::start(config()).await.expect("a case of ours");
    let one = Batch::new(&[Sequence::plain(vec![1, 2, 3])]);
    let error = trainer.step(one).await.expect_err("it takes two");
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::BadBatch, 2));
}

#[tokio::test]
async fn a_loss_that_is_no_number_is_told_from_other_failures_of_the_ring() {
    let mut config = config();
    config.optimizer.learning_rate = 1e30;
    let mut batches = Batches::open(&config).expect("random data");
    let mut trainer = Trainer::start(config).await.expect("a case of ours");
    for _ in 0..5 {
        let batch = batches.next().await.expect("random data");
        if let Err(error) = trainer.step(batch).await {
            assert!(matches!(error, Error::Ring(_)), "{error:?}");
            assert_eq!((error.kind(), error.exit_code()), (ErrorKind::NotFinite, 1));
            return;
        }
    }
    panic!("weights of 1e30 have a loss");
}
