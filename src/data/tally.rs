//! Records that teach a model nothing: those that `data.bad_records = "skip"` leaves out, and those
//! that stay and have no label. They are counted, and the first few are named by file and line.

use std::fmt;

use crate::error::Error;

/// The number of records that a message names. A person mends these few, and then looks again.
const NAMED: usize = 3;

/// The place of a record in its file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// The line, from 1, where the file has lines.
    pub(super) line: Option<u64>,
    /// The number of the record, from 1, where a record is not a line.
    pub(super) record: Option<u64>,
}

impl Place {
    /// The place of a record that is a line.
    pub(super) fn of_line(number: u64) -> Place {
        Place { line: Some(number), record: None }
    }

    /// The place of a record by its number.
    pub(super) fn of_record(number: u64, line: Option<u64>) -> Place {
        Place { line, record: Some(number) }
    }

    /// The error of a record at this place.
    pub(super) fn error(self, file: &str, problem: &dyn fmt::Display) -> Error {
        let problem = match self.record {
            Some(number) => format!("record {number}: {problem}"),
            None => problem.to_string(),
        };
        Error::BadData { file: file.into(), line: self.line, problem }
    }
}

/// Records of one kind: their number, and the first few by place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) count: u64,
    first: Vec<Counted>,
}

/// A counted record.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Counted {
    file: String,
    place: Place,
    problem: String,
}

impl Tally {
    /// Counts a record.
    pub(super) fn add(&mut self, file: &str, place: Place, problem: impl Into<String>) {
        self.count += 1;
        if self.first.len() < NAMED {
            self.first.push(Counted { file: file.into(), place, problem: problem.into() });
        }
    }

    /// Adds the records of another tally behind these.
    pub(super) fn extend(&mut self, other: Tally) {
        self.count += other.count;
        self.first.extend(other.first);
        self.first.truncate(NAMED);
    }

    /// The error of the first record, whose problem is continued by `more`.
    pub(super) fn error(&self, more: impl fmt::Display) -> Option<Error> {
        let Counted { file, place, problem } = self.first.first()?;
        Some(place.error(file, &format_args!("{problem}{more}")))
    }
}

/// The first few records, with their problems.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Counted { file, place, problem }) in self.first.iter().enumerate() {
            let separator = if at > 0 { "; " } else { "" };
            write!(f, "{separator}{}", place.error(file, problem))?;
        }
        match self.count - self.first.len() as u64 {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_counted_and_the_first_are_named() {
        let mut tally = Tally::default();
        tally.add("a.jsonl", Place::of_line(4), "bad");
        let mut more = Tally::default();
        (1..=4).for_each(|number| more.add("b.csv", Place::of_record(number, Some(2)), "worse"));
        tally.extend(more);
        let says = "data a.jsonl, line 4: bad; data b.csv, line 2: record 1: worse; data b.csv, \
                    line 2: record 2: worse; and 2 more";
        assert_eq!(tally.to_string(), says);
        let error = tally.error(", which ends the run").expect("there are some").to_string();
        assert_eq!(error, "data a.jsonl, line 4: bad, which ends the run");
    }
}
