//! With the EPS on file: when the Prefetcher reads which block, and what a step moves.

use super::plan::{DeviceVisit, Piece, Pools, Reduction, Traffic};
use super::{Block, BlockId, Schedule, Visit};

/// What a step reads and writes of an EPS on file whose updates are eager.
pub(super) fn on_file(
    schedule: &Schedule,
    device_visits: &[DeviceVisit],
    reductions: &[Reduction],
    updates: &[BlockId],
    traffic: &mut Traffic,
) {
    let fetched = device_visits.iter().flat_map(|visit| &visit.residences);
    let fetched = fetched.filter(|residence| residence.fetch).map(|residence| residence.block);
    let gathers = schedule.visits.iter().filter(|visit| visit.is_gather());
    let blocks = gathers.flat_map(Visit::blocks).copied().chain(fetched);
    let mut sum = |id: BlockId, of: fn(&Block) -> u64, reads: bool, writes: bool| {
        let bytes = of(schedule.block(id));
        traffic.read = traffic.read.saturating_add(if reads { bytes } else { 0 });
        traffic.written = traffic.written.saturating_add(if writes { bytes } else { 0 });
    };
    // As many bytes as their gradient, whatever is published of them.
    blocks.for_each(|id| sum(id, |block| block.gradient_bytes, true, false));
    updates.iter().for_each(|&id| sum(id, |block| block.state_bytes, true, true));
    for reduction in reductions {
        if let Reduction::Gradient { block, joins: true } = *reduction {
            sum(block, |block| block.gradient_bytes, true, true);
        }
    }
}

/// Puts the read of each block in front of the piece that takes it, as far ahead as slots allow:
/// a piece's own, and those of the pieces behind it for which slots are left. The slots those take
/// were let go of by uploads of pieces before, so no read waits for what comes behind it.
pub(super) fn with_reads(
    pieces: Vec<Piece>,
    schedule: &Schedule,
    pools: &Pools,
    device_visits: &[DeviceVisit],
) -> Vec<Piece> {
    let taken = |piece: &Piece| -> (usize, Vec<BlockId>) {
        match *piece {
            Piece::Gather { visit } => (visit, schedule.visits[visit].blocks().to_vec()),
            Piece::Weights { device_visit } => {
                let DeviceVisit { visit, residences, .. } = &device_visits[device_visit];
                let fetched = residences.iter().filter(|residence| residence.fetch);
                (*visit, fetched.map(|residence| residence.block).collect())
            }
            _ => (0, Vec::new()),
        }
    };
    let all: Vec<_> = pieces.iter().map(taken).collect();
    let all =
        all.into_iter().flat_map(|(visit, blocks)| blocks.into_iter().map(move |id| (visit, id)));
    let mut reads = all.enumerate().peekable();
    let (mut list, mut count) = (Vec::with_capacity(2 * pieces.len()), 0);
    for piece in pieces {
        // A gather lets go of its blocks one after the other.
        let (visit, blocks) = taken(&piece);
        if blocks.is_empty() {
            list.push(piece);
            continue;
        }
        let steps = if matches!(piece, Piece::Gather { .. }) { blocks.len() } else { 1 };
        for step in 0..steps {
            let limit = count + pools.reads as usize;
            while let Some((_, (visit, block))) = reads.next_if(|(nth, _)| *nth < limit) {
                list.push(Piece::Read { visit, block });
            }
            count += if steps > 1 { 1 } else { blocks.len() };
            match piece {
                Piece::Gather { .. } => {
                    list.push(Piece::GatherBlock { visit, block: blocks[step] })
                }
                _ => list.push(piece),
            }
        }
    }
    list
}
