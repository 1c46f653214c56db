//! Watches a run from inside the program that trains: through a metrics recorder, or as numbers.
//!
//! `cargo run --example 06_watch`. The library installs no recorder and opens no port. Your program
//! passes its own recorder of the `metrics` crate, or serialises a view for its own server.

use l2l::telemetry::{Histograms, publish, recorder};
use l2l::{Config, Error, Trainer};

fn config() -> Config {
    let mut config = Config::default();
    config.data.train = "random".into();
    config.model.layers = Some(4);
    config.model.hidden = Some(32);
    config.model.heads = Some(4);
    config.data.sequence_length = Some(32);
    config.step.batch = 8;
    config.device.link = Some("50MB/s".into());
    config.metrics.run = Some("example".into());
    config
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    // Use any `metrics::Recorder`. This one has buckets that suit the library's histograms.
    let recorder = recorder();
    let histograms = Histograms::new("example", &recorder);

    let config = config();
    let builder = Trainer::builder(config).observe(histograms);
    let (mut trainer, mut batches) = builder.open().await?;
    let watch = trainer.watch(); // may be cloned, sent to other tasks, and kept after the end
    for _ in 0..5 {
        let report = trainer.step(batches.next().await?).await?;
        println!(
            "step {}: {:.3} s, bottleneck {}",
            report.step,
            report.seconds,
            report.bottleneck.name()
        );
    }
    trainer.stop().await?;

    // At each scrape of Prometheus, take a view and publish it to the recorder.
    let view = watch.view(0);
    publish(&view, &recorder);
    println!("{} lines of metrics", recorder.handle().render().lines().count());
    // A view can also be read without a recorder.
    for layer in view.layers.iter().filter(|layer| layer.on_device) {
        println!("layer {}: overlap {:.2}", layer.layer, layer.overlap.unwrap_or(1.0));
    }
    Ok(())
}
