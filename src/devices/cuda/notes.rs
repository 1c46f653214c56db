//! What a micro-batch is, where kernels read it: lengths, documents and kinds of tokens.

use super::driver::Address;
use super::launches::{FLOAT, NULL};
use crate::kernels::{BatchView, Document, Rows};

/// What a micro-batch is, in the device's memory: lengths, pasts, documents, kinds of tokens. The host's
/// slices say which part of it is meant.
#[derive(Clone, Copy)]
pub(super) struct Notes {
    pub(super) floats: usize,
    at: Address,
    rows: Rows,
    /// Where the host's slices begin, of lengths, pasts, documents and kinds.
    hosts: [usize; 4],
}

impl Notes {
    /// Floats that a micro-batch's notes take.
    pub(super) fn len(rows: Rows) -> usize {
        2 * rows.sequences + 2 * rows.count() + rows.count().div_ceil(FLOAT)
    }

    /// Writes them, for what will be copied to `at`.
    pub(super) fn write(batch: &BatchView<'_>, desk: &mut [f32], at: Address) -> Notes {
        let BatchView { rows, lengths, past, documents, kinds, .. } = *batch;
        let floats = Notes::len(rows);
        let words: &mut [u32] = bytemuck::cast_slice_mut(&mut desk[..floats]);
        let (of_sequences, rest) = words.split_at_mut(2 * rows.sequences);
        let (places, of_kinds) = rest.split_at_mut(2 * rows.count());
        let (to_lengths, to_pasts) = of_sequences.split_at_mut(rows.sequences);
        for (to, length) in to_lengths.iter_mut().zip(lengths) {
            *to = *length as u32;
        }
        for (to, past) in to_pasts.iter_mut().zip(past) {
            *to = *past as u32;
        }
        for (to, document) in places.chunks_exact_mut(2).zip(documents) {
            to.copy_from_slice(&[document.from, document.to]);
        }
        bytemuck::cast_slice_mut(of_kinds)[..kinds.len()].copy_from_slice(kinds);
        let hosts = [address(lengths), address(past), address(documents), address(kinds)];
        Notes { floats, at, rows, hosts }
    }

    /// Where a field begins, and the element of it that a slice of the host's begins with.
    fn part<E>(&self, slice: &[E], field: usize) -> (Address, usize) {
        let Rows { sequences, .. } = self.rows;
        let words = [0, sequences, 2 * sequences, 2 * sequences + 2 * self.rows.count()];
        let at = address(slice).checked_sub(self.hosts[field]).map(|by| by / size_of::<E>());
        let most = [sequences, sequences, self.rows.count(), self.rows.count()][field];
        let at = at.filter(|at| at + slice.len() <= most);
        let at =
            at.expect("kernels are given a micro-batch's own lengths, pasts, documents and kinds");
        (self.at + (words[field] * FLOAT) as Address, at)
    }

    pub(super) fn lengths(&self, lengths: &[usize]) -> Address {
        let (begin, at) = self.part(lengths, 0);
        begin + (at * FLOAT) as Address
    }

    /// Null where all sequences have the same.
    pub(super) fn pasts(&self, past: &[usize]) -> Address {
        let first = self.hosts[1];
        let here = first..first + size_of::<usize>() * self.rows.sequences;
        if past.is_empty() || !here.contains(&address(past)) {
            let first = past.first().copied().unwrap_or(0);
            assert!(past.iter().all(|other| *other == first), "pasts of a layer's own are equal");
            return NULL;
        }
        let (begin, at) = self.part(past, 1);
        begin + (at * FLOAT) as Address
    }

    pub(super) fn documents(&self, documents: &[Document]) -> Address {
        if documents.is_empty() {
            return NULL;
        }
        let (begin, at) = self.part(documents, 2);
        begin + (at * 2 * FLOAT) as Address
    }

    pub(super) fn kinds(&self, kinds: &[u8]) -> Address {
        let (begin, at) = self.part(kinds, 3);
        begin + at as Address
    }
}

fn address<E>(slice: &[E]) -> usize {
    slice.as_ptr().addr()
}
