//! The embedding, which the host computes: rows of tables for the tokens of a batch, and the sums
//! of their gradients.

use l2l_actors::schedule::{BlockId, MicroBatch, Role, Share};
use l2l_actors::work::{GradientAt, MasterAt};

use super::rows::{Gathered, Scattered, Table};
use super::visit::HostVisit;
use super::{HostLanes, Squares, loss};
use crate::kernels::STATISTICS;

impl HostLanes {
    /// Writes a share of a gather: the embedding rows of its blocks, for its micro-batches. The
    /// share with the visit's first block also writes the first statistics.
    pub(super) fn gather(&self, at: &HostVisit<'_>, share: Share, master: MasterAt) {
        let visit = at.visit;
        let (blocks, micro_batches) = match &share {
            Share::MicroBatch(m) => (&visit.blocks[..], *m..*m + 1),
            Share::Block(block) => (std::slice::from_ref(block), visit.micro_batches.clone()),
        };
        for m in micro_batches {
            for &block in blocks {
                match master {
                    MasterAt::Memory => {
                        let ahead = at.schedule().ahead(visit, block);
                        let version = at.state.step.version_read(ahead);
                        let lease = self.shared.eps.memory().read(block, version);
                        self.gather_block(at, m, block, lease.pieces()[0]);
                    }
                    MasterAt::Slot(slot) => {
                        self.gather_block(at, m, block, at.host.read_slot(slot));
                    }
                }
            }
            if blocks.first() == visit.blocks.first() {
                self.begin_statistics(at, m);
            }
        }
    }

    /// Copies the rows of a micro-batch's tokens that lie in a block's tile of a table. `stored` is
    /// the published block.
    fn gather_block(&self, at: &HostVisit<'_>, m: MicroBatch, block: BlockId, stored: &[f32]) {
        let model = &*self.shared.model;
        let schedule = at.schedule();
        let place = &model.tables[block.0 as usize];
        let boundary = schedule.with_role(&at.visit.writes, Role::Hidden);
        let boundary = boundary.expect("a gather writes hidden states");
        let x = at.stashed_mut(boundary, m);
        let channels = place.columns.len();
        let rows = Gathered {
            tokens: &at.state.input.batch.tokens[at.state.range(m).rows],
            table: self.shared.eps.table_rows(&model.blocks[block.0 as usize], stored),
            place,
            width: model.shape.gathered_width(),
        };
        let alpha = self.neftune_alpha;
        let is_noisy = alpha > 0.0 && at.state.input.purpose.trains() && place.is_of_tokens;
        let noise = is_noisy.then(|| at.state.view(m, self.shared.seed));
        // Noise depends on the length of the whole sequence.
        let noise = noise.map(|batch| {
            let first = batch.row_range().start;
            let whole = batch.metadata().view();
            move |row: usize| whole.noise(first + row, alpha, channels)
        });
        let packing = self.shared.packing(schedule.boundary(boundary));
        self.shared.threads.install(|| rows.write(x, packing, noise));
    }

    fn begin_statistics(&self, at: &HostVisit<'_>, m: MicroBatch) {
        let schedule = at.schedule();
        let batch = &at.state.input.batch;
        let range = at.state.range(m);
        let boundary = schedule.with_role(&at.visit.writes, Role::Statistics);
        let Some(boundary) = boundary else { return }; // of a model without a head
        let statistics = at.stashed_mut(boundary, m);
        if let Some(labels) = self.shared.model.shape.head.label_set() {
            return loss::begin_label_sets(
                statistics,
                batch.label_sets_of(range.sequences),
                labels,
            );
        }
        let targets = &batch.targets[range.rows];
        let positions = statistics.chunks_exact_mut(STATISTICS).zip(targets);
        positions.for_each(|(of_one, &target)| loss::begin_statistics(of_one, target));
    }

    /// Adds the embedding's gradient to a tile's gradient, in its region or in a landing block, and
    /// returns the sum of squares of the result.
    pub(super) fn scatter(
        &self,
        at: &HostVisit<'_>,
        block: BlockId,
        first: bool,
        gradient: GradientAt,
    ) -> Squares {
        let shared = &*self.shared;
        let schedule = at.schedule();
        let state = &at.state;
        let boundary = schedule.with_role(&at.visit.reads, Role::HiddenGradient);
        let boundary = boundary.expect("a scatter reads gradients of hidden states");
        let mut region;
        let gradient = match gradient {
            GradientAt::Landing(slot) => at.host.landing(slot, shared.own_trained_len(block)),
            GradientAt::Region => {
                region = shared.eps.memory().region_mut(block);
                &mut region[..]
            }
        };
        let place = &shared.model.tables[block.0 as usize];
        // Each rank has its own part of the table.
        let from = shared.eps.parts().map_or(0, |parts| parts.own(block).start);
        let floats = place.tile.rows * place.columns.len();
        let floats = floats.saturating_sub(from).min(gradient.len());
        let (rows, rest) = gradient.split_at_mut(floats);
        if first {
            rest.fill(0.0);
        }
        let table = Table { rows, from, place, is_new: first };
        let received = shared.embedding_rows.read().expect("nothing panics inside");
        let of_micro_batch = |m: MicroBatch| (at.stashed(boundary, m), state.range(m).rows.len());
        let (dx, tokens): (Vec<(&[f32], usize)>, &[u32]) = match &state.input.dealt {
            None => {
                let all = at.visit.micro_batches.clone();
                let [first, last] = [all.start, all.end - 1].map(|m| state.range(m).rows);
                let tokens = &state.input.batch.tokens[first.start..last.end];
                (all.map(of_micro_batch).collect(), tokens)
            }
            Some(dealt) => (vec![(&received, dealt.rows.len())], &dealt.tokens),
        };
        let level = shared.threads.level;
        let width = shared.model.shape.gathered_width();
        let rows = Scattered { level, tokens, dx: &dx, width };
        let packing = shared.packing(schedule.boundary(boundary));
        shared.threads.install(|| rows.add(table, packing));
        self.measure(block, gradient)
    }
}
