//! `l2l doctor --mpi`: checks and measures the fabric between the processes that a launcher
//! started. `train` and `tune` refuse to run in several processes.

use std::time::Instant;

use l2l::config::{ByteSize, Format};
use l2l::fabric::{self, Channel, Fabric, Rank, Tag, conformance};
use l2l::{Config, Error};
use serde_json::json;

use super::{Common, print};

/// Bytes of the messages whose rate is measured.
const LARGE: usize = 64 << 20;

/// How often each time is measured.
const ROUNDS: usize = 5;

pub(super) fn check(common: &Common) -> Result<(), Error> {
    let (config, _) = common.read(None, None)?;
    let fabric = &*fabric::open_mpi()?;
    conformance::check(fabric, 16 << 20);
    let small = seconds(fabric, 8)?;
    let large = seconds(fabric, LARGE)?;
    if fabric.rank() == 0 {
        show(&config, fabric.ranks(), small, large);
    }
    Ok(())
}

/// The median time of an exchange of so many bytes between all pairs of ranks.
fn seconds(fabric: &dyn Fabric, bytes: usize) -> Result<f64, Error> {
    let from = vec![1; bytes];
    let others: Vec<Rank> = (0..fabric.ranks()).filter(|&rank| rank != fabric.rank()).collect();
    let mut to: Vec<Vec<u8>> = others.iter().map(|_| vec![0; bytes]).collect();
    let mut took = Vec::new();
    for number in 0..ROUNDS as u64 {
        let sends: Vec<_> = others.iter().map(|&rank| (rank, &from[..])).collect();
        let receives = others.iter().zip(&mut to);
        let mut receives: Vec<_> = receives.map(|(&rank, to)| (rank, &mut to[..])).collect();
        let begin = Instant::now();
        let tag = Tag { channel: Channel::Blocks, number };
        let exchanged = fabric.exchange(tag, &sends, &mut receives, &|| true);
        exchanged.map_err(|lost| Error::System(lost.to_string()))?;
        took.push(begin.elapsed().as_secs_f64());
    }
    took.sort_by(f64::total_cmp);
    Ok(took[took.len() / 2])
}

fn show(config: &Config, ranks: u32, small: f64, large: f64) {
    let rate = f64::from(ranks - 1) * LARGE as f64 / large;
    if config.log.format == Format::Json {
        print(json!({
            "event": "fabric",
            "ranks": ranks,
            "exchange_seconds": small,
            "bytes_per_second": rate,
        }));
        return;
    }
    print(format_args!("{ranks} ranks exchange messages of every size as they should"));
    if ranks > 1 {
        let rate = ByteSize::from(rate as u64);
        print(format_args!("8 bytes between all of them: {:.0} µs", small * 1e6));
        print(format_args!("each sends {rate}/s, and receives as much at the same time"));
    }
}

/// Refuses to run a command that a launcher started in several processes: each process would do the
/// same work.
///
/// # Errors
/// There are several processes. The first one returns this error. The others end without a message.
pub(super) fn refuse_ranks(what: &str) -> Result<(), Error> {
    match fabric::launched() {
        None => Ok(()),
        Some((0, ranks)) => Err(Error::Argument(format!(
            "a launcher started {ranks} processes of `l2l {what}`, and each would do all of the \
             work: start one. Training on several hosts is not supported yet; `l2l doctor --mpi` \
             checks the fabric between them"
        ))),
        Some(_) => std::process::exit(1),
    }
}
