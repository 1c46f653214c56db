//! Compressed gradients: what each group's becomes where it lands, and what ranks exchange of it.

use std::ops::Range;

use l2l_actors::BoxedError;
use l2l_actors::schedule::{BlockId, GroupId, sums_of_spans};
use rayon::prelude::*;

use super::Worker;
use super::host_side::{HostSide, add};
use crate::compression::{Compression, Factors, PowerSgd};
use crate::eps::ErrorFeedback;
use crate::fabric::parts::Parts;
use crate::fabric::{Channel, Lost};
use crate::models::Tensor;
use crate::optimizers::chunks;

/// Completes numbers of which each rank has its part, all of one length.
type Complete<'c> = &'c dyn Fn(&mut [f32]) -> Result<(), Lost>;

impl HostSide {
    /// The trained tensors of a whole block.
    fn whole_trained(&self, block: BlockId) -> &[Tensor] {
        match self.eps.parts() {
            None => self.eps.tensors(block).trained(),
            Some(parts) => parts.tensors[block.0 as usize].trained(),
        }
    }

    /// Adds the gradient of one of this process's groups to what is kept of the group. In a kind
    /// that packs chunks it becomes what the packed chunks say; for several ranks, the packed
    /// chunks. Matrices of PowerSGD wait for all groups.
    pub(super) fn compress(
        &self,
        feedback: &ErrorFeedback,
        block: BlockId,
        group: GroupId,
        landed: &mut [f32],
    ) {
        let kind = feedback.compression;
        let tensors = self.whole_trained(block);
        let mut runs = feedback.lease(block);
        let error = &mut runs[kind.runs_per_group() * (feedback.own.start + group) as usize];
        self.threads.install(|| {
            if let Compression::PowerSgd { rank } = kind {
                for matrix in Factors::new(tensors, rank).matrices {
                    add(&mut error[matrix.range.clone()], &landed[matrix.range]);
                }
                return;
            }
            let chunks: Vec<Range<usize>> = chunks(tensors).collect();
            let errors = split(error, &chunks);
            if self.eps.parts().is_none() {
                errors.into_par_iter().zip(split(landed, &chunks)).for_each(|(error, landed)| {
                    let mut packed = vec![0.0; kind.packed_floats(error.len())];
                    error.iter_mut().zip(&*landed).for_each(|(error, landed)| *error += landed);
                    kind.pack(&mut packed, error);
                    kind.unpack(landed, &packed);
                });
                return;
            }
            let landed_chunks = split(landed, &chunks);
            let pairs = errors.into_par_iter().zip(landed_chunks).map(|(error, landed)| {
                error.iter_mut().zip(&*landed).for_each(|(error, landed)| *error += landed);
                error
            });
            let errors: Vec<&mut [f32]> = pairs.collect();
            let packed = split(landed, &packed_ranges(kind, &chunks));
            let each = errors.into_par_iter().zip(packed);
            each.for_each(|(error, packed)| kind.pack(packed, error));
        });
    }

    /// The sum of all groups' gradients by PowerSGD: the elements of a part, in place.
    pub(super) fn factorise(
        &self,
        feedback: &ErrorFeedback,
        block: BlockId,
        (landed, part): (&mut [f32], Range<usize>),
        complete: Option<Complete<'_>>,
    ) -> Result<(), Lost> {
        let Compression::PowerSgd { rank } = feedback.compression else { return Ok(()) };
        let power = PowerSgd { rank, seed: self.seed };
        let factors = Factors::new(self.whole_trained(block), rank);
        let mut runs = feedback.lease(block);
        let own = feedback.own.start as usize..feedback.own.end as usize;
        let width = factors.left_and_vectors(complete.is_some());
        let groups = feedback.groups as usize;
        let mut workspace = self.received.gradient.lock().expect("nothing panics inside");
        let (lefts, rights) = workspace.split_at_mut(groups * width);
        let rights = &mut rights[..groups * factors.right_len];
        let left_of = |group: usize| group * width..(group + 1) * width;
        let right_of = |group: usize| group * factors.right_len..(group + 1) * factors.right_len;
        for group in own.clone() {
            let [error, right] = &mut runs[2 * group..2 * group + 2] else { unreachable!("two") };
            let (left, mut vectors) = lefts[left_of(group)].split_at_mut(factors.left_len);
            self.threads.install(|| {
                power.begin(&factors, right);
                power.left(&factors, left, error, right);
            });
            if complete.is_some() {
                for range in &factors.vectors {
                    let (to, behind) = vectors.split_at_mut(range.len());
                    to.copy_from_slice(&landed[range.clone()]);
                    vectors = behind;
                }
            }
        }
        if let Some(complete) = complete {
            complete(lefts)?;
        }
        self.sum_groups(lefts, width);
        let left = &mut lefts[..width];
        self.threads.install(|| power.orthonormalise(&factors, left));
        for group in own.clone() {
            let error = &runs[2 * group];
            let right = &mut rights[right_of(group)];
            self.threads.install(|| power.right(&factors, right, error, left));
        }
        if let Some(complete) = complete {
            complete(rights)?;
        }
        for group in own.clone() {
            let error = &mut runs[2 * group];
            let right = &rights[right_of(group)];
            self.threads.install(|| power.subtract(&factors, error, left, right));
        }
        self.sum_groups(rights, factors.right_len);
        let right = &rights[..factors.right_len];
        own.for_each(|group| runs[2 * group + 1].copy_from_slice(right));
        let sum = (&mut landed[part.clone()], part);
        self.threads.install(|| power.write(&factors, sum, left, right));
        if complete.is_some() {
            let mut vectors = &left[factors.left_len..];
            for range in &factors.vectors {
                let (from, behind) = vectors.split_at(range.len());
                landed[range.clone()].copy_from_slice(from);
                vectors = behind;
            }
        }
        Ok(())
    }

    /// Adds the numbers of all groups, so many each, in the groups' tree: to the first group's.
    fn sum_groups(&self, all: &mut [f32], width: usize) {
        let mut groups: Vec<&mut [f32]> = all.chunks_mut(width.max(1)).collect();
        let spans: Vec<Range<u32>> =
            (0..groups.len() as u32).map(|group| group..group + 1).collect();
        for (to, from) in sums_of_spans(&spans) {
            let [to, from] = groups.get_disjoint_mut([to, from]).expect("two groups");
            self.add(to, from);
        }
    }
}

impl Worker {
    /// Leaves this rank's part of a gradient's sum at the begin of its landing block, which holds
    /// what [`HostSide::compress`] left of the one group of this rank.
    pub(super) fn deal_compressed(
        &self,
        feedback: &ErrorFeedback,
        block: BlockId,
        gradient: &mut [f32],
        beat: &dyn Fn(),
    ) -> Result<(), BoxedError> {
        let host = &self.host;
        let parts = host.eps.parts().expect("several ranks");
        let exchanges = &parts.exchanges;
        let cut = parts.of_trained(block);
        let rank = exchanges.rank();
        let ranks = exchanges.ranks();
        let own = cut.of(rank);
        if let Compression::PowerSgd { .. } = feedback.compression {
            let complete = |all: &mut [f32]| {
                let each = size_of_val(all) / ranks as usize;
                let parts = Parts::new((1..=ranks as usize).map(|rank| rank * each).collect());
                let bytes = bytemuck::cast_slice_mut(all);
                let subject = u64::from(block.0);
                exchanges.complete(Channel::Gradients, subject, &parts, bytes, beat)
            };
            host.factorise(feedback, block, (gradient, own.clone()), Some(&complete))?;
            gradient.copy_within(own, 0);
            return Ok(());
        }
        let kind = feedback.compression;
        let tensors = host.whole_trained(block);
        let packed_parts = kind.packed_parts(tensors, &cut, ranks);
        let packed = packed_parts.of(rank);
        let mut workspace = host.received.gradient.lock().expect("nothing panics inside");
        let (unpacked, received) = workspace.split_at_mut(ranks as usize * own.len());
        let received = &mut received[..(ranks as usize - 1) * packed.len()];
        let sent = bytemuck::cast_slice(&gradient[..packed_parts.len()]);
        let to = bytemuck::cast_slice_mut(received);
        exchanges.deal(block, &packed_parts.in_bytes(size_of::<f32>()), sent, to, beat)?;
        let chunks: Vec<Range<usize>> = chunks(tensors)
            .filter(|chunk| own.contains(&chunk.start))
            .map(|chunk| chunk.start - own.start..chunk.end - own.start)
            .collect();
        let places = packed_ranges(kind, &chunks);
        let mut others = received.chunks_exact(packed.len().max(1));
        for (of_rank, sum) in (0..ranks).zip(unpacked.chunks_exact_mut(own.len().max(1))) {
            let packed = match of_rank == rank {
                true => &gradient[packed.clone()],
                false => others.next().expect("one of each other rank"),
            };
            let each = split(sum, &chunks).into_par_iter().zip(&places);
            host.threads.install(|| {
                each.for_each(|(chunk, place)| kind.unpack(chunk, &packed[place.clone()]));
            });
        }
        host.sum_groups(unpacked, own.len());
        gradient[..own.len()].copy_from_slice(&unpacked[..own.len()]);
        Ok(())
    }
}

/// Where the packed chunks lie, one behind the other.
fn packed_ranges(kind: Compression, chunks: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut end = 0;
    let packed = chunks.iter().map(|chunk| {
        let start = end;
        end += kind.packed_floats(chunk.len());
        start..end
    });
    packed.collect()
}

/// Ranges of a slice, which follow each other.
fn split<'a>(mut all: &'a mut [f32], ranges: &[Range<usize>]) -> Vec<&'a mut [f32]> {
    let mut at = 0;
    let one = |range: &Range<usize>| {
        let (_, behind) = std::mem::take(&mut all).split_at_mut(range.start - at);
        let (one, behind) = behind.split_at_mut(range.len());
        (all, at) = (behind, range.end);
        one
    };
    ranges.iter().map(one).collect()
}
