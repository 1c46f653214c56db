//! Runs of several processes, which a launcher started: the fabric of `l2l train` between them,
//! their common end, and `l2l doctor --mpi`, which checks and measures the fabric.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{process, thread};

use l2l::config::{ByteSize, DeviceConfig, DeviceKind, FabricKind, Format};
use l2l::fabric::{self, Channel, Fabric, Rank, Tag, conformance};
use l2l::{Config, Error, devices};
use serde_json::json;

use super::{Common, print, say};

/// Bytes of the messages whose rate is measured.
const LARGE: usize = 64 << 20;

/// The number of times that each exchange is measured.
const ROUNDS: usize = 5;

pub(super) fn check(common: &Common) -> Result<(), Error> {
    let (config, _) = common.read()?;
    let fabric = &*fabric::open_mpi(patience(&config))?;
    conformance::check(fabric, 16 << 20);
    let small = seconds(fabric, 8)?;
    let large = seconds(fabric, LARGE)?;
    if fabric.rank() == 0 {
        show(&config, fabric.ranks(), small, large);
    }
    Ok(())
}

/// The median time of an exchange of `bytes` between all pairs of ranks.
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
        let tag = Tag::new(Channel::Blocks, number);
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

/// The fabric of a run. It is MPI's if a launcher started several processes or the config asks for
/// it, and there is none otherwise.
///
/// # Errors
/// The config forbids several processes, or this program was built without MPI.
pub(super) fn of(config: &Config) -> Result<Option<Arc<dyn Fabric>>, Error> {
    let launched = fabric::launched();
    match (config.parallel.fabric, launched) {
        (FabricKind::Auto | FabricKind::None, None) => Ok(None),
        (FabricKind::None, Some((_, ranks))) => Err(Error::Argument(format!(
            "a launcher started {ranks} processes, and parallel.fabric is \"none\", so each would \
             do all of the work: start one, or set parallel.fabric = \"mpi\""
        ))),
        (FabricKind::Auto, Some((_, ranks))) => match fabric::open_mpi(patience(config)) {
            Ok(fabric) => Ok(Some(fabric.into())),
            Err(Error::Argument(what)) => Err(Error::Argument(format!(
                "a launcher started {ranks} processes, which need MPI to share the work: {what}"
            ))),
            Err(error) => Err(error),
        },
        (FabricKind::Mpi, _) => fabric::open_mpi(patience(config)).map(|it| Some(it.into())),
    }
}

/// Gives each process of a host a GPU of its own, by turns, unless the config names GPUs. (A
/// launcher may let each process see a GPU of its own: then that is the only one.)
pub(super) fn choose_gpu(device: &mut DeviceConfig) {
    let is_named = device.ordinal > 0 || device.ordinals.is_some();
    if let (DeviceKind::Cuda, false, Some(nth)) =
        (device.kind, is_named, fabric::launched_on_host())
    {
        let there = devices::gpus().map_or(1, |gpus| gpus.len()).max(1);
        device.ordinal = nth as usize % there;
    }
}

/// The longest time that a rank may be silent.
fn patience(config: &Config) -> Duration {
    Duration::from_secs_f64(config.watchdog.seconds)
}

/// The time that the first rank has to say why a run ended, before another rank ends its process.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Ends this process unless it is the first of a launcher's. The first usually reports the same
/// error, and then the launcher ends this process. If it does not, this process reports the error.
pub(super) fn leave_it_to_the_first(error: &Error) {
    if let Some((rank @ 1.., _)) = fabric::launched() {
        thread::sleep(LAST_WORDS);
        say(format_args!("error: rank {rank}: {error}"));
        process::exit(error.exit_code().into());
    }
}

/// Ends this process after a run that failed. If all ranks failed, the first reports all errors,
/// each once; otherwise each rank reports its own.
pub(super) fn end(fabric: &dyn Fabric, error: &Error) -> ! {
    let own = error.to_string();
    let begin = Instant::now();
    let tag = Tag::new(Channel::End, 0);
    let all = fabric::gather(fabric, tag, own.as_bytes(), &|| begin.elapsed() < 2 * LAST_WORDS);
    let rank = fabric.rank();
    match all {
        Err(_) => say(format_args!("error: rank {rank}: {error}")),
        Ok(_) if rank > 0 => thread::sleep(LAST_WORDS),
        Ok(all) => {
            say(format_args!("error: {error}"));
            let other = |text: &[u8]| String::from_utf8_lossy(text).into_owned();
            let others = all.iter().map(|text| other(text)).enumerate().skip(1);
            // Another rank may have the error from the first, which has just reported it.
            let is_said = |text: &str| text == own || text.starts_with("rank 0: ");
            for (rank, text) in others.filter(|(_, text)| !is_said(text)) {
                say(format_args!("error: rank {rank}: {text}"));
            }
        }
    }
    // MPI cannot be ended in an orderly way: other ranks may be in the middle of an exchange.
    process::exit(error.exit_code().into())
}

/// Refuses to run a command that a launcher started in several processes, because each process
/// would do the same work.
///
/// # Errors
/// There are several processes. Only the first one returns.
pub(super) fn refuse_ranks(what: &str) -> Result<(), Error> {
    let Some((_, ranks)) = fabric::launched() else { return Ok(()) };
    let error = Error::Argument(format!(
        "a launcher started {ranks} processes of `l2l {what}`, and each would do all of the work: \
         start one"
    ));
    leave_it_to_the_first(&error);
    Err(error)
}
