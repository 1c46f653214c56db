//! The clocks of ranks, compared with the first rank's.

use std::time::Duration;

use super::{Fabric, Lost, Rank, Tag};

/// Rounds of a measurement. The round with the smallest error is taken.
const ROUNDS: u64 = 8;

/// Exchanges of a measurement.
pub(super) const EXCHANGES: u64 = 2 * ROUNDS;

/// A rank's clock, compared with the first rank's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ClockOffset {
    /// The first rank's time at a moment, minus this rank's.
    pub(crate) nanos: i64,
    /// The largest error of the offset when it was measured.
    pub(crate) within_nanos: i64,
}

/// Measures the offset of the clock `now`, in [`EXCHANGES`] exchanges. Collective: every rank must
/// call it.
///
/// In each round the first rank hears from all others, and then sends them its time. This time lies
/// between the begin and the end of the round on each of the others.
///
/// # Errors
/// As [`Fabric::exchange`].
pub(super) fn offset(
    fabric: &dyn Fabric,
    tag: Tag,
    now: &dyn Fn() -> Duration,
    goes_on: &dyn Fn() -> bool,
) -> Result<ClockOffset, Lost> {
    let nanos = || now().as_nanos() as i64;
    let mut best = ClockOffset { nanos: 0, within_nanos: i64::MAX };
    for round in 0..ROUNDS {
        let asks = Tag { number: tag.number + 2 * round, ..tag };
        let tells = Tag { number: asks.number + 1, ..tag };
        if fabric.rank() == 0 {
            let others: Vec<Rank> = (1..fabric.ranks()).collect();
            let mut asked = vec![[0; 1]; others.len()];
            let receives = others.iter().zip(&mut asked);
            let mut receives: Vec<_> = receives.map(|(&rank, ask)| (rank, &mut ask[..])).collect();
            fabric.exchange(asks, &[], &mut receives, goes_on)?;
            let time = nanos().to_le_bytes();
            let sends: Vec<_> = others.iter().map(|&rank| (rank, &time[..])).collect();
            fabric.exchange(tells, &sends, &mut [], goes_on)?;
            best = ClockOffset::default();
        } else {
            let mut time = [0; 8];
            let begin = nanos();
            fabric.exchange(asks, &[(0, &[0])], &mut [], goes_on)?;
            fabric.exchange(tells, &[], &mut [(0, &mut time)], goes_on)?;
            let end = nanos();
            let within_nanos = (end - begin + 1) / 2;
            if within_nanos < best.within_nanos {
                let middle = begin + (end - begin) / 2;
                best = ClockOffset { nanos: i64::from_le_bytes(time) - middle, within_nanos };
            }
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::{Channel, threads};
    use super::*;

    /// Clocks that are ahead of the first rank's by days, and behind it.
    #[test]
    fn an_offset_is_the_difference_of_clocks() {
        const APART: [i64; 3] = [3_600_000_000_000, 0, 200_000_000_000_000];
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for fabric in threads(3) {
                scope.spawn(move || {
                    let rank = fabric.rank() as usize;
                    let now = || begin.elapsed() + Duration::from_nanos(APART[rank] as u64);
                    let tag = Tag::new(Channel::Control, 5);
                    let offset = offset(&fabric, tag, &now, &|| true).expect("all take part");
                    let error = offset.nanos - (APART[0] - APART[rank]);
                    assert!(error.abs() <= offset.within_nanos, "{offset:?} of rank {rank}");
                    assert!(offset.within_nanos < 1_000_000_000, "{offset:?} of rank {rank}");
                });
            }
        });
    }
}
