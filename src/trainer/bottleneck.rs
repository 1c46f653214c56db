//! Which bottleneck a step had: what the compute lane waited for most.

use std::time::Duration;

use crate::engine::Bottleneck;
use crate::telemetry::WaitCause;

/// The bottleneck of a step that took so many seconds. `waited`: the compute lane's waits by
/// [`WaitCause`]; `disk`: what checkpoints took. Kernels are the bottleneck when nothing else has a
/// tenth of the time.
pub(super) fn of_step(
    seconds: f64,
    waited: [Duration; WaitCause::ALL.len()],
    disk: Duration,
) -> Bottleneck {
    let of = |cause: WaitCause| waited[cause as usize];
    let most = [
        (Bottleneck::Upload, of(WaitCause::Upload)),
        (Bottleneck::Download, of(WaitCause::Download)),
        (Bottleneck::Host, of(WaitCause::Host) + of(WaitCause::Ring)),
        (Bottleneck::Update, of(WaitCause::Update)),
        (Bottleneck::Disk, disk + of(WaitCause::File)),
    ];
    let most = most.into_iter().max_by_key(|(_, time)| *time).expect("there are some");
    if most.1.as_secs_f64() < 0.1 * seconds { Bottleneck::Compute } else { most.0 }
}
