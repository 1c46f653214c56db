//! The work of each rank of a run so far. A rank reports it to the others with its heartbeats.

use l2l_actors::work::Lane;
use serde::Serialize;

use super::{WaitCause, Watch};
use crate::fabric::{NUMBERS, Numbers};
use crate::machine;

/// The work of one rank so far. The numbers of other ranks are up to a second old, and final after
/// the run's end.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankView {
    /// The rank.
    pub rank: u32,
    /// Training steps done.
    pub step: u64,
    /// Seconds that each lane worked, the sum over the rank's devices. A lane that not every run
    /// has is there if it worked.
    pub lanes: Vec<(&'static str, f64)>,
    /// Seconds that its compute lane waited within steps, by cause, the mean over its devices.
    pub waited: Vec<(&'static str, f64)>,
    /// Bytes it sent to other ranks.
    pub sent_bytes: u64,
    /// Bytes it received from other ranks.
    pub received_bytes: u64,
    /// Resident bytes of its process.
    pub resident_bytes: u64,
    /// The highest use of device memory.
    pub device_bytes: u64,
}

/// The numbers of a report that come before those of lanes and causes.
const COUNTS: usize = 5;

const _: () = assert!(COUNTS + Lane::ALL.len() + WaitCause::ALL.len() <= NUMBERS);

impl RankView {
    /// The view of a rank that reported these [`numbers`](Watch::numbers).
    fn of(rank: u32, numbers: &Numbers) -> RankView {
        let [step, sent, received, resident, device] = std::array::from_fn(|nth| numbers[nth]);
        let (lanes, waited) = numbers[COUNTS..].split_at(Lane::ALL.len());
        let lanes = Lane::ALL.into_iter().zip(lanes.iter().copied());
        let is_shown = |(lane, seconds): &(Lane, f64)| lane.is_always_there() || *seconds > 0.0;
        RankView {
            rank,
            step: step as u64,
            lanes: lanes.filter(is_shown).map(|(lane, seconds)| (lane.name(), seconds)).collect(),
            waited: WaitCause::ALL.map(WaitCause::name).into_iter().zip(waited.to_vec()).collect(),
            sent_bytes: sent as u64,
            received_bytes: received as u64,
            resident_bytes: resident as u64,
            device_bytes: device as u64,
        }
    }
}

impl Watch {
    /// The report of this rank.
    pub(crate) fn numbers(&self) -> Numbers {
        let tally = self.tally();
        let step = self.status().step();
        let [sent, received] = self.0.reports.as_ref().map_or([0; 2], |reports| reports.moved());
        let resident = machine::resident_memory().unwrap_or(0);
        let device = self.device_memory().iter().map(|term| term.used).sum();
        let counts: [u64; COUNTS] = [step, sent, received, resident, device];
        let lanes = tally.lanes.iter().map(|lane| lane.busy.as_secs_f64());
        let waited = tally.waited.iter().map(|time| time.as_secs_f64());
        let mut numbers = [0.0; NUMBERS];
        let all = counts.into_iter().map(|count| count as f64).chain(lanes).chain(waited);
        numbers.iter_mut().zip(all).for_each(|(number, value)| *number = value);
        numbers
    }

    /// The views of all ranks that have reported, in order. Empty for a run of one process.
    pub(super) fn ranks(&self) -> Vec<RankView> {
        let Some(reports) = &self.0.reports else { return Vec::new() };
        let mut all = reports.last();
        all[reports.rank as usize] = Some(self.numbers());
        let reported = (0..).zip(&all).filter_map(|(rank, last)| Some((rank, last.as_ref()?)));
        reported.map(|(rank, numbers)| RankView::of(rank, numbers)).collect()
    }
}
