use l2l::{Config, Trainer};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), l2l::Error> {
    let config = Config::read("run.toml".as_ref())?;
    Trainer::fit(config.clone()).run(&mut ()).await?; // the whole run, as `l2l train` does it

    let (mut trainer, mut batches) = Trainer::open(config).await?; // or step by step
    for _ in 0..100 {
        let report = trainer.step(batches.next().await?).await?;
        println!("step {}: loss {:.4}", report.step, report.loss);
    }
    println!("{}", trainer.digest().await?);
    trainer.stop().await.map(drop)
}
