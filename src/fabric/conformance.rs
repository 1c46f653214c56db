//! A suite of checks that every fabric must pass. All ranks run it at once.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::{Channel, Fabric, Lost, Rank, Tag, gather};

/// Checks a fabric, with messages of up to `largest` bytes. Collective: every rank must call it.
///
/// # Panics
/// The fabric broke a rule, which the message names.
pub fn check(fabric: &dyn Fabric, largest: usize) {
    let numbers = Numbers::default();
    for bytes in [0, 1, 7, 4096, 65_537, largest] {
        everywhere(fabric, numbers.next(Channel::Blocks), bytes);
    }
    different_lengths(fabric, numbers.next(Channel::Gradients));
    around(fabric, &numbers);
    channels_do_not_wait_for_each_other(fabric, &numbers);
    for round in 0..3 {
        let own = vec![fabric.rank() as u8; (1 + fabric.rank() as usize) * 1000 * round as usize];
        let tag = Tag::new(Channel::Control, 2 * round);
        let all = gather(fabric, tag, &own, &|| true).expect("all take part");
        for (rank, of_rank) in all.iter().enumerate() {
            assert_eq!(*of_rank, vec![rank as u8; (1 + rank) * 1000 * round as usize]);
        }
    }
}

/// Counts the exchanges of each channel.
#[derive(Default)]
struct Numbers([AtomicU64; Channel::ALL.len()]);

impl Numbers {
    fn next(&self, channel: Channel) -> Tag {
        Tag::new(channel, self.0[channel as usize].fetch_add(1, Relaxed))
    }
}

fn others(fabric: &dyn Fabric) -> Vec<Rank> {
    (0..fabric.ranks()).filter(|&rank| rank != fabric.rank()).collect()
}

/// Bytes after which a message repeats itself.
const PERIOD: usize = 64 << 10;

/// The message of one rank to another.
fn message(tag: Tag, from: Rank, to: Rank, bytes: usize) -> Vec<u8> {
    let head = [tag.number as usize, tag.channel as usize, from as usize, to as usize];
    let byte = |at: usize| {
        let all = head.into_iter().chain([at, at >> 8]);
        all.fold(17_u8, |sum, of| sum.wrapping_mul(31).wrapping_add(of as u8))
    };
    let period: Vec<u8> = (0..bytes.min(PERIOD)).map(byte).collect();
    let mut message = period.repeat(bytes.div_ceil(PERIOD));
    message.truncate(bytes);
    message
}

/// Sends messages to some ranks, receives messages from others, and checks them.
fn exchange(fabric: &dyn Fabric, tag: Tag, to: &[(Rank, usize)], from: &[(Rank, usize)]) {
    let own = fabric.rank();
    let sends: Vec<_> =
        to.iter().map(|&(rank, bytes)| (rank, message(tag, own, rank, bytes))).collect();
    let sends: Vec<_> = sends.iter().map(|(rank, bytes)| (*rank, &bytes[..])).collect();
    let mut received: Vec<_> = from.iter().map(|&(rank, bytes)| (rank, vec![0; bytes])).collect();
    let mut receives: Vec<_> =
        received.iter_mut().map(|(rank, bytes)| (*rank, &mut bytes[..])).collect();
    fabric.exchange(tag, &sends, &mut receives, &|| true).expect("all take part");
    for (rank, bytes) in received {
        assert!(bytes == message(tag, rank, own, bytes.len()), "rank {rank} to {own}, {tag:?}");
    }
}

/// Every rank sends a message to every other.
fn everywhere(fabric: &dyn Fabric, tag: Tag, bytes: usize) {
    let all: Vec<_> = others(fabric).into_iter().map(|rank| (rank, bytes)).collect();
    exchange(fabric, tag, &all, &all);
}

/// Every pair of ranks exchanges messages of another length.
fn different_lengths(fabric: &dyn Fabric, tag: Tag) {
    let own = fabric.rank();
    let bytes = |from: Rank, to: Rank| 1000 * from as usize + 10 * to as usize;
    let to: Vec<_> = others(fabric).into_iter().map(|rank| (rank, bytes(own, rank))).collect();
    let from: Vec<_> = others(fabric).into_iter().map(|rank| (rank, bytes(rank, own))).collect();
    exchange(fabric, tag, &to, &from);
}

/// Each rank sends to the next one and receives from the one before, many times.
fn around(fabric: &dyn Fabric, numbers: &Numbers) {
    if fabric.ranks() == 1 {
        return;
    }
    let own = fabric.rank();
    let ranks = fabric.ranks();
    let next = (own + 1) % ranks;
    let before = (own + ranks - 1) % ranks;
    for nth in 0..100 {
        let bytes = 37 * nth % 1000;
        let tag = numbers.next(Channel::Sums);
        exchange(fabric, tag, &[(next, bytes)], &[(before, bytes)]);
    }
}

/// Threads exchange on three channels at once. On half of the ranks one channel begins when the
/// others have ended, so no channel may wait for another.
fn channels_do_not_wait_for_each_other(fabric: &dyn Fabric, numbers: &Numbers) {
    std::thread::scope(|scope| {
        let (ended, late) = std::sync::mpsc::channel();
        for channel in [Channel::Blocks, Channel::Gradients] {
            let ended = ended.clone();
            scope.spawn(move || {
                (0..50).for_each(|nth| everywhere(fabric, numbers.next(channel), 100 * nth));
                _ = ended.send(()); // half of the ranks do not wait for it
            });
        }
        scope.spawn(move || {
            if fabric.rank().is_multiple_of(2) {
                (0..2).for_each(|_| late.recv().expect("both end"));
            }
            (0..50).for_each(|nth| everywhere(fabric, numbers.next(Channel::Sums), 30 * nth));
        });
    });
}

/// A mistake of rank 1. Afterwards the fabric cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// The rank uses another number for the exchange.
    Number,
    /// The rank names another subject.
    Subject,
    /// The rank sends a longer message.
    Length,
    /// The rank does not take part.
    Silence,
}

impl Misuse {
    /// All mistakes.
    pub const ALL: [Misuse; 4] = [Misuse::Number, Misuse::Subject, Misuse::Length, Misuse::Silence];

    /// Rank 1 makes the mistake; the others check that the fabric finds it and names rank 1.
    /// Collective: every rank must call it.
    ///
    /// # Panics
    /// The mistake is not found.
    pub fn check(self, fabric: &dyn Fabric) {
        let tag = Tag::new(Channel::Gradients, 5);
        let bytes = [1; 100];
        let mistaken = fabric.rank() == 1;
        let begin = Instant::now();
        let goes_on = || begin.elapsed() < Duration::from_secs(if mistaken { 1 } else { 20 });
        let sends: Vec<_> = others(fabric).into_iter().map(|rank| (rank, &bytes[..])).collect();
        if mistaken {
            let other = Tag { number: 6, ..tag };
            let longer = [1; 101];
            let longer: Vec<_> = sends.iter().map(|(rank, _)| (*rank, &longer[..])).collect();
            // Whether this exchange ends well does not matter.
            _ = match self {
                Misuse::Number => fabric.exchange(other, &sends, &mut [], &goes_on),
                Misuse::Subject => {
                    fabric.exchange(Tag { subject: 1, ..tag }, &sends, &mut [], &goes_on)
                }
                Misuse::Length => fabric.exchange(tag, &longer, &mut [], &goes_on),
                Misuse::Silence => Ok(()),
            };
            while goes_on() {
                std::thread::sleep(Duration::from_millis(10));
            }
            return;
        }
        // Silence is found by waiting. In the other cases a message comes, even if late.
        let patience = Duration::from_millis(if self == Misuse::Silence { 500 } else { 60_000 });
        let patient = || begin.elapsed() < patience;
        let mut to = [0; 100];
        let lost = fabric.exchange(tag, &[], &mut [(1, &mut to)], &patient);
        match lost.expect_err("rank 1 made a mistake") {
            Lost::Ranks { ranks, .. } if self == Misuse::Silence => assert_eq!(ranks, [1]),
            Lost::Disagrees { rank: 1, .. } if self != Misuse::Silence => {}
            other => panic!("{self:?}: {other}"),
        }
    }
}
