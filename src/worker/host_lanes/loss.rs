//! Losses from the statistics that the head wrote, and logits.

use std::ops::Range;

use l2l_actors::schedule::{BoundaryId, MicroBatch, Role};

use super::HostLanes;
use super::visit::HostVisit;
use crate::kernels::{Loss, STATISTICS, label_of};
use crate::worker::step::MicroBatchRange;

impl HostLanes {
    /// A micro-batch's share of the loss; keeps its logits, if the step scores.
    pub(super) fn loss(&self, at: &HostVisit<'_>, m: MicroBatch) -> f64 {
        let shared = &*self.shared;
        let scores_vocabulary = shared.model.shape.scores_vocabulary();
        if at.state.input.purpose.scores() {
            self.keep_logits(at, m);
        }
        let sum = match at.state.input.purpose.scores() && scores_vocabulary {
            true => 0.0, // the tiles of the head wrote logits, and no statistics
            false => self.loss_of_statistics(at, m, scores_vocabulary),
        };
        let labelled = at.state.batch_of(m).labelled as f64;
        // Of a window, the mean over its batches.
        let loss = of_micro_batch(at, m, sum) / labelled / at.state.batches.len() as f64;
        if at.schedule().ranks.count > 1 {
            at.state.losses.lock().expect("nothing panics inside").insert(m, loss);
        }
        loss
    }

    /// The sum of the losses of a micro-batch's positions.
    fn loss_of_statistics(&self, at: &HostVisit<'_>, m: MicroBatch, of_tokens: bool) -> f64 {
        let boundary = at.schedule().with_role(&at.visit.reads, Role::Statistics);
        let shared = &*self.shared;
        let statistics = at.stashed(boundary.expect("a loss reads statistics"), m);
        let label_set = shared.model.shape.head.label_set();
        let of_position = |statistics: &[f32]| {
            if label_set.is_some() {
                Some(statistics[0])
            } else if of_tokens {
                token_loss(statistics, &*shared.model.loss)
            } else {
                sequence_loss(statistics)
            }
        };
        let width = label_set.map_or(STATISTICS, |labels| 1 + labels);
        let sum = |statistics: &[f32]| -> f64 {
            let losses = statistics.chunks_exact(width).filter_map(of_position);
            losses.map(f64::from).sum()
        };
        match label_set {
            Some(_) => sum(statistics),
            // The positions of each chunk are summed by themselves, as devices compute them.
            None => {
                let all = at.state.view(m, shared.seed);
                let first = all.row_range().start;
                let chunks = all.chunks(Some(shared.model.shape.chunk_positions)).into_iter();
                let rows = |Range { start, end }: Range<usize>| {
                    &statistics[(start - first) * width..(end - first) * width]
                };
                chunks.map(|chunk| sum(rows(chunk.row_range()))).sum()
            }
        }
    }

    /// Keeps the logits of a micro-batch, sequence by sequence, tile after tile.
    fn keep_logits(&self, at: &HostVisit<'_>, m: MicroBatch) {
        let schedule = at.schedule();
        let is_logits = |id: &&BoundaryId| schedule.boundary(**id).role == Role::Logits;
        let tiles = at.visit.reads.iter().filter(is_logits);
        let tiles: Vec<&[f32]> = tiles.map(|&boundary| at.stashed(boundary, m)).collect();
        let MicroBatchRange { sequences, rows } = at.state.range(m);
        let sequences = sequences.len();
        // The position of a sequence that is scored is in one of its chunks.
        let has_label = |targets: &[i32]| targets.iter().any(|&target| target >= 0);
        let is_chunk = at.state.input.units.of(m).chunk.is_some();
        let scores_vocabulary = self.shared.model.shape.scores_vocabulary();
        if scores_vocabulary && is_chunk && !has_label(&at.state.input.batch.targets[rows]) {
            return;
        }
        let mut logits = self.logits.lock().expect("nothing panics inside");
        if let [all] = tiles[..] {
            return logits.extend(all); // of classes, or of a vocabulary in one tile
        }
        for sequence in 0..sequences {
            for tile in &tiles {
                let floats = tile.len() / sequences;
                logits.extend(&tile[sequence * floats..][..floats]);
            }
        }
    }
}

/// The sum of a micro-batch of the config when the last of its units has come, and 0 before: so it
/// is that of sequences that are not cut.
fn of_micro_batch(at: &HostVisit<'_>, m: MicroBatch, sum: f64) -> f64 {
    let units = at.state.input.units.whole(m);
    let mut partial = at.state.partial_losses.lock().expect("nothing panics inside");
    partial.insert(m, sum);
    let sums = partial.range(units.clone()).map(|(_, sum)| sum);
    if sums.clone().count() == units.len() { sums.sum() } else { 0.0 }
}

/// Writes the statistics of a position before the first tile of the head adds to them.
pub(super) fn begin_statistics(statistics: &mut [f32], label: i32) {
    statistics.copy_from_slice(&[f32::NEG_INFINITY, 0.0, 0.0, f32::from_bits(label as u32)]);
}

/// Writes the statistics of sequences that may have several of the `labels`: a place for the loss,
/// then the bits of a number for each label.
pub(super) fn begin_label_sets(statistics: &mut [f32], sets: &[i32], labels: usize) {
    let rows = statistics.chunks_exact_mut(1 + labels).zip(sets.chunks_exact(labels));
    for (row, set) in rows {
        row[0] = 0.0;
        row[1..].iter_mut().zip(set).for_each(|(to, &bits)| *to = f32::from_bits(bits as u32));
    }
}

/// The loss of a labelled position, from its complete statistics; `None` without a label.
fn token_loss(statistics: &[f32], loss: &dyn Loss) -> Option<f32> {
    let [most, sum, target, _] = *statistics else { unreachable!("four floats a position") };
    (label_of(statistics) >= 0).then(|| loss.value(most + sum.ln(), target))
}

/// The loss of a sequence, which the class head writes to the statistics of the first position;
/// `None` for all other positions.
fn sequence_loss(statistics: &[f32]) -> Option<f32> {
    (statistics[1] == 1.0).then_some(statistics[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::CrossEntropy;

    #[test]
    fn losses_are_those_of_complete_statistics() {
        let mut statistics = [f32::NAN; 4];
        begin_statistics(&mut statistics, 3);
        assert_eq!(label_of(&statistics), 3);
        assert_eq!(sequence_loss(&statistics), None);
        statistics[..3].copy_from_slice(&[2.0, 1.0, 0.5]);
        assert_eq!(token_loss(&statistics, &CrossEntropy), Some(1.5));
        assert_eq!(sequence_loss(&statistics), Some(2.0));
        begin_statistics(&mut statistics, -100);
        assert_eq!(token_loss(&statistics, &CrossEntropy), None);
    }
}
