//! Remarks about a dataset: files and columns that are not used, and records of which nothing is
//! learnt.

use super::files::Opened;
use super::tally::Tally;

/// What was found while a dataset was read.
#[derive(Default)]
pub(super) struct Remarks {
    /// Columns of its records that are not used.
    pub(super) unused: Vec<String>,
    /// The records that were left out.
    pub(super) skipped: Tally,
    /// The records that have no label and were not left out.
    pub(super) unlabelled: Tally,
    /// The records whose two answers are the same.
    pub(super) same: Tally,
    /// Sentences about its tokenizer and its folders.
    pub(super) notes: Vec<String>,
}

impl Remarks {
    /// Takes what was found in one of its files or folders.
    pub(super) fn take(&mut self, opened: &mut Opened) {
        self.skipped.extend(std::mem::take(&mut opened.skipped));
        self.unlabelled.extend(std::mem::take(&mut opened.unlabelled));
        self.same.extend(std::mem::take(&mut opened.same));
        self.notes.extend(opened.left_out.take());
    }

    /// The remarks as sentences.
    pub(super) fn sentences(&self) -> Vec<String> {
        let mut all = self.notes.clone();
        if !self.unused.is_empty() {
            all.push(format!("columns not used: {}", self.unused.join(", ")));
        }
        if self.skipped.count > 0 {
            all.push(format!("records left out: {}: {}", self.skipped.count, self.skipped));
        }
        if self.unlabelled.count > 0 {
            let count = self.unlabelled.count;
            all.push(format!("records without a label: {count}: {}", self.unlabelled));
        }
        if self.same.count > 0 {
            let count = self.same.count;
            all.push(format!("records that prefer neither answer: {count}: {}", self.same));
        }
        all
    }
}
