//! Compression of gradients, with error feedback: the gradient of each group where it lands, and
//! the sum of all groups.

use std::ops::Range;
use std::sync::Mutex;

use l2l_actors::schedule::{BlockId, GroupId};
use rayon::prelude::*;

use super::shared::Shared;
use crate::compression::{Compression, Factors, PowerSgd};
use crate::eps::ErrorFeedback;
use crate::fabric::Lost;
use crate::models::Tensor;
use crate::optimizers::chunks;

/// Receives the numbers of all other ranks. Each rank has equally many.
pub(super) type Complete<'c> = &'c dyn Fn(&mut [f32]) -> Result<(), Lost>;

/// Compresses the gradients of one block.
pub(super) struct Compressor<'a> {
    shared: &'a Shared,
    feedback: &'a ErrorFeedback,
    block: BlockId,
}

impl<'a> Compressor<'a> {
    /// The compressor of a block's gradients, in a run that compresses them.
    pub(super) fn of(shared: &'a Shared, block: BlockId) -> Option<Compressor<'a>> {
        shared.eps.feedback().map(|feedback| Compressor { shared, feedback, block })
    }

    pub(super) fn kind(&self) -> Compression {
        self.feedback.compression
    }

    /// The trained tensors of the whole block.
    pub(super) fn tensors(&self) -> &'a [Tensor] {
        match self.shared.eps.parts() {
            None => self.shared.eps.tensors(self.block).trained(),
            Some(parts) => parts.tensors[self.block.0 as usize].trained(),
        }
    }

    /// Adds the gradient of one of this process's groups to the group's error. PowerSGD leaves it
    /// there until all groups have landed. A kind that packs chunks replaces the gradient: by its
    /// packed chunks where ranks exchange them, else by the numbers that those chunks hold.
    pub(super) fn compress(&self, group: GroupId, landed: &mut [f32]) {
        let kind = self.kind();
        let mut runs = self.feedback.lease(self.block);
        let group = self.feedback.own.start + group;
        let error = &mut runs[kind.runs_per_group() * group as usize];
        self.shared.threads.install(|| {
            if let Compression::PowerSgd { rank } = kind {
                for matrix in Factors::new(self.tensors(), rank).matrices {
                    let error = &mut error[matrix.range.clone()];
                    self.shared.threads.add(error, &landed[matrix.range]);
                }
                return;
            }
            let chunks: Vec<Range<usize>> = chunks(self.tensors()).collect();
            let add = |error: &mut [f32], landed: &[f32]| {
                error.iter_mut().zip(landed).for_each(|(error, landed)| *error += landed);
            };
            let errors = split(error, &chunks);
            if self.shared.eps.parts().is_none() {
                errors.into_par_iter().zip(split(landed, &chunks)).for_each(|(error, landed)| {
                    let mut packed = vec![0.0; kind.packed_floats(error.len())];
                    add(error, landed);
                    kind.pack(&mut packed, error);
                    kind.unpack(landed, &packed);
                });
                return;
            }
            let pairs = errors.into_par_iter().zip(split(landed, &chunks));
            let added = pairs.map(|(error, landed)| {
                add(error, landed);
                error
            });
            let errors: Vec<&mut [f32]> = added.collect();
            let packed = split(landed, &packed_ranges(kind, &chunks));
            let each = errors.into_par_iter().zip(packed);
            each.for_each(|(error, packed)| kind.pack(packed, error));
        });
    }

    /// Replaces a part of `landed` by the sum of all groups' gradients, by PowerSGD. Other kinds
    /// have their sum already. `workspace` holds the factors of all groups.
    pub(super) fn factorise(
        &self,
        landed: &mut [f32],
        part: Range<usize>,
        workspace: &Mutex<Vec<f32>>,
        complete: Option<Complete<'_>>,
    ) -> Result<(), Lost> {
        let Compression::PowerSgd { rank } = self.kind() else { return Ok(()) };
        let threads = &self.shared.threads;
        let power = PowerSgd { rank, seed: self.shared.seed };
        let factors = Factors::new(self.tensors(), rank);
        let mut runs = self.feedback.lease(self.block);
        let own = self.feedback.own.start as usize..self.feedback.own.end as usize;
        let width = factors.left_and_vectors(complete.is_some());
        let groups = self.feedback.groups as usize;
        let mut workspace = workspace.lock().expect("nothing panics inside");
        let (lefts, rights) = workspace.split_at_mut(groups * width);
        let rights = &mut rights[..groups * factors.right_len];
        let left_of = |group: usize| group * width..(group + 1) * width;
        let right_of = |group: usize| group * factors.right_len..(group + 1) * factors.right_len;
        for group in own.clone() {
            let [error, right] = &mut runs[2 * group..2 * group + 2] else { unreachable!("two") };
            let (left, mut vectors) = lefts[left_of(group)].split_at_mut(factors.left_len);
            threads.install(|| {
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
        threads.sum_groups(lefts, width);
        let left = &mut lefts[..width];
        threads.install(|| power.orthonormalise(&factors, left));
        for group in own.clone() {
            let error = &runs[2 * group];
            let right = &mut rights[right_of(group)];
            threads.install(|| power.right(&factors, right, error, left));
        }
        if let Some(complete) = complete {
            complete(rights)?;
        }
        for group in own.clone() {
            let error = &mut runs[2 * group];
            let right = &rights[right_of(group)];
            threads.install(|| power.subtract(&factors, error, left, right));
        }
        threads.sum_groups(rights, factors.right_len);
        let right = &rights[..factors.right_len];
        own.for_each(|group| runs[2 * group + 1].copy_from_slice(right));
        let sum = &mut landed[part.clone()];
        threads.install(|| power.write(&factors, sum, part, left, right));
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
}

/// Where the packed chunks lie, one behind the other.
pub(super) fn packed_ranges(kind: Compression, chunks: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut end = 0;
    let packed = chunks.iter().map(|chunk| {
        let start = end;
        end += kind.packed_floats(chunk.len());
        start..end
    });
    packed.collect()
}

/// Ranges of a slice, which follow each other.
pub(super) fn split<'a>(mut all: &'a mut [f32], ranges: &[Range<usize>]) -> Vec<&'a mut [f32]> {
    let mut at = 0;
    let one = |range: &Range<usize>| {
        let (_, behind) = std::mem::take(&mut all).split_at_mut(range.start - at);
        let (one, behind) = behind.split_at_mut(range.len());
        all = behind;
        at = range.end;
        one
    };
    ranges.iter().map(one).collect()
}
