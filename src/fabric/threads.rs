//! A fabric whose ranks are threads of one process.

use std::collections::HashMap;
use std::time::Duration;

use flume::{Receiver, RecvTimeoutError, Sender};

use super::{Channel, Fabric, Header, Lost, Rank, Tag};

type Message = (Header, Vec<u8>);

/// One rank of the fabric. When it is dropped, the other ranks learn that it has ended.
pub struct ThreadFabric {
    rank: Rank,
    ranks: u32,
    to: HashMap<(Rank, Channel), Sender<Message>>,
    from: HashMap<(Rank, Channel), Receiver<Message>>,
}

/// A fabric for `ranks` threads: one item for each.
pub fn threads(ranks: u32) -> Vec<ThreadFabric> {
    let rank = |rank| ThreadFabric { rank, ranks, to: HashMap::new(), from: HashMap::new() };
    let mut all: Vec<ThreadFabric> = (0..ranks).map(rank).collect();
    for from in 0..ranks {
        for to in (0..ranks).filter(|&to| to != from) {
            for channel in Channel::ALL {
                let (sender, receiver) = flume::unbounded();
                all[from as usize].to.insert((to, channel), sender);
                all[to as usize].from.insert((from, channel), receiver);
            }
        }
    }
    all
}

/// How long a rank waits before it asks again whether to go on.
const PATIENCE: Duration = Duration::from_millis(10);

impl Fabric for ThreadFabric {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn exchange(
        &self,
        tag: Tag,
        sends: &[(Rank, &[u8])],
        receives: &mut [(Rank, &mut [u8])],
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), Lost> {
        for &(rank, message) in sends {
            let sent =
                self.to[&(rank, tag.channel)].send((Header::of(tag, message), message.to_vec()));
            sent.map_err(|_| Lost::Ranks { ranks: vec![rank], tag })?;
        }
        for (nth, (rank, to)) in receives.iter_mut().enumerate() {
            let from = &self.from[&(*rank, tag.channel)];
            let (header, message) = loop {
                match from.recv_timeout(PATIENCE) {
                    Ok(message) => break message,
                    Err(RecvTimeoutError::Timeout) if goes_on() => {}
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(Lost::Ranks { ranks: vec![*rank], tag });
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        let silent = |rank: &Rank| self.from[&(*rank, tag.channel)].is_empty();
                        let left = receives[nth..].iter().map(|(rank, _)| *rank);
                        return Err(Lost::Ranks { ranks: left.filter(silent).collect(), tag });
                    }
                }
            };
            let expected = Header::of(tag, to);
            if header != expected {
                return Err(header.refused(*rank, expected, tag));
            }
            to.copy_from_slice(&message);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::*;

    #[test]
    fn threads_conform() {
        for ranks in 1..=4 {
            std::thread::scope(|scope| {
                for fabric in threads(ranks) {
                    scope.spawn(move || conformance::check(&fabric, 1 << 20));
                }
            });
        }
    }

    #[test]
    fn ranks_that_disagree_or_are_silent_are_named() {
        for case in conformance::Misuse::ALL {
            std::thread::scope(|scope| {
                for fabric in threads(3) {
                    scope.spawn(move || case.check(&fabric));
                }
            });
        }
    }

    #[test]
    fn a_rank_that_has_ended_is_named() {
        let mut all = threads(3);
        drop(all.remove(1));
        let tag = Tag::new(Channel::Sums, 0);
        let mut to = [0; 4];
        let lost = all[0].exchange(tag, &[], &mut [(1, &mut to)], &|| true);
        assert_eq!(lost, Err(Lost::Ranks { ranks: vec![1], tag }));
        let lost = all[1].exchange(tag, &[(1, &[1, 2])], &mut [], &|| true);
        let says = lost.expect_err("rank 1 has ended").to_string();
        assert_eq!(says, "nothing comes from rank 1 in exchange 0 of channel Sums");
    }
}
