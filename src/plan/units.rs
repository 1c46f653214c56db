//! How the sequences of a step become micro-batches of the ring.
//!
//! A micro-batch of short sequences stays whole. If one of its sequences is longer than a chunk,
//! each of them is by itself: a long one becomes a run of chunks, so that devices hold chunks alone
//! and several devices share one sequence. Where a visit takes sequences whole, it walks the same
//! rows in the same order, so the numbers are the same.

use std::ops::Range;

use l2l_actors::schedule::{MicroBatch, equal_groups};

use super::step::Purpose;
use crate::config::{Config, ScheduleKind};
use crate::models::Model;

/// A micro-batch of the ring: sequences of a step's batch, or a chunk of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RingUnit {
    pub(crate) sequences: Range<usize>,
    /// The positions of a chunk; `None`: the sequences are whole.
    pub(crate) chunk: Option<Range<usize>>,
}

/// The micro-batches of a step in the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Units {
    all: Vec<RingUnit>,
    /// The chunks of each long sequence.
    pub(crate) runs: Vec<Range<MicroBatch>>,
    /// The units of each micro-batch of `step.micro_batch` sequences.
    whole: Vec<Range<MicroBatch>>,
    /// Tokens of the longest sequence, or of a chunk if there are runs.
    pub(crate) positions: usize,
}

/// The most positions of a unit, if this config's steps for a purpose cut longer sequences.
pub(crate) fn most_positions(config: &Config, model: &Model, purpose: Purpose) -> Option<usize> {
    // Attention to cached keys and values takes all new rows at once.
    let has_cached = matches!(purpose, Purpose::Generate { cached: 1.. });
    // The other orders meet one micro-batch after another, each at all layers of a stage, and a
    // device has one region for the keys of a sequence.
    let is_relay = config.schedule.kind == ScheduleKind::Relay;
    let cuts = is_relay && !has_cached && model.can_be_cut();
    cuts.then_some(model.shape.chunk_positions)
}

impl Units {
    /// The units of sequences of these lengths. `most`: see [`most_positions`].
    pub(crate) fn new(lengths: &[usize], micro_batch: usize, most: Option<usize>) -> Units {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let positions = most.filter(|&most| longest > most).unwrap_or(longest);
        let mut units = Units { positions, ..Units::default() };
        for first in (0..lengths.len()).step_by(micro_batch) {
            let sequences = first..lengths.len().min(first + micro_batch);
            let begin = units.all.len() as MicroBatch;
            if lengths[sequences.clone()].iter().all(|&length| length <= positions) {
                units.all.push(RingUnit { sequences, chunk: None });
            } else {
                sequences.for_each(|sequence| units.add(sequence, lengths[sequence]));
            }
            units.whole.push(begin..units.all.len() as MicroBatch);
        }
        units
    }

    /// Adds a sequence by itself.
    fn add(&mut self, sequence: usize, length: usize) {
        let begin = self.all.len();
        let chunks = (0..length).step_by(self.positions);
        self.all.extend(chunks.map(|from| RingUnit {
            sequences: sequence..sequence + 1,
            chunk: Some(from..length.min(from + self.positions)),
        }));
        if self.all.len() > begin + 1 {
            self.runs.push(begin as MicroBatch..self.all.len() as MicroBatch);
        }
    }

    pub(crate) fn of(&self, m: MicroBatch) -> &RingUnit {
        &self.all[m as usize]
    }

    /// The units of the sequences that are in one micro-batch of the config with this one.
    pub(crate) fn whole(&self, m: MicroBatch) -> Range<MicroBatch> {
        let at = self.whole.partition_point(|units| units.end <= m);
        self.whole[at].clone()
    }

    /// The sequences of some units that follow each other.
    pub(crate) fn sequences_of(&self, units: &Range<MicroBatch>) -> Range<usize> {
        let [first, last] = [units.start, units.end - 1].map(|m| &self.of(m).sequences);
        first.start..last.end
    }

    /// The units in `count` groups. A group has whole micro-batches of the config, so that
    /// processes and devices deal the same sequences however long they are.
    pub(crate) fn groups(&self, count: u32) -> Vec<Range<MicroBatch>> {
        let firsts: Vec<MicroBatch> = self.whole.iter().map(|units| units.start).collect();
        equal_groups(&firsts, self.all.len() as MicroBatch, count)
    }

    /// Tokens of the longest last chunk of a run, if there are runs.
    pub(crate) fn last_chunk(&self) -> Option<u32> {
        let last = |run: &Range<MicroBatch>| self.of(run.end - 1).chunk.as_ref().map(Range::len);
        self.runs.iter().filter_map(last).max().map(|tokens| tokens as u32)
    }

    /// Sequences, or chunks, in each unit.
    pub(crate) fn sizes(&self) -> Vec<u32> {
        self.all.iter().map(|unit| unit.sequences.len() as u32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(lengths: &[usize], most: Option<usize>) -> Vec<(Range<usize>, Option<Range<usize>>)> {
        let units = Units::new(lengths, 2, most);
        units.all.into_iter().map(|unit| (unit.sequences, unit.chunk)).collect()
    }

    #[test]
    fn the_sequences_of_a_micro_batch_with_a_long_one_are_units() {
        let lengths = [100, 300, 128, 128, 129];
        let cut = units(&lengths, Some(128));
        let chunk = |sequence, positions| (sequence..sequence + 1, Some(positions));
        let expected = [
            chunk(0, 0..100),
            chunk(1, 0..128),
            chunk(1, 128..256),
            chunk(1, 256..300),
            (2..4, None),
            chunk(4, 0..128),
            chunk(4, 128..129),
        ];
        assert_eq!(cut, expected);
        let units_of = Units::new(&lengths, 2, Some(128));
        assert_eq!(units_of.runs, [1..4, 5..7]);
        assert_eq!([0, 3, 4, 6].map(|m| units_of.whole(m)), [0..4, 0..4, 4..5, 5..7]);
        assert_eq!(units_of.groups(2), [0..4, 4..7]);
        assert_eq!(units_of.last_chunk(), Some(44));
        assert_eq!((units_of.sizes(), units_of.positions), (vec![1, 1, 1, 1, 2, 1, 1], 128));
    }

    #[test]
    fn short_sequences_and_uncut_ones_stay_whole() {
        let whole = [(0..2, None), (2..3, None)];
        assert_eq!(units(&[100, 128, 3], Some(128)), whole);
        assert_eq!(units(&[100, 500, 3], None), whole);
        let units = Units::new(&[100, 500, 3], 2, None);
        assert_eq!((units.runs.len(), units.positions), (0, 500));
    }
}
