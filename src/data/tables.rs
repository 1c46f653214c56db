//! Records of `.json`, `.csv`, `.tsv` and `.parquet` files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, Read};
#[cfg(feature = "parquet")]
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(feature = "parquet")]
use parquet::record::Field;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use sha2::{Digest, Sha256};

use super::files::{LINES_AT_ONCE, Opening};
use super::record::Columns;
use crate::error::Error;
#[cfg(feature = "parquet")]
use crate::hf::RecordValue;

impl Opening<'_> {
    /// Reads a `.json` file: a list of records, or one record a line.
    pub(super) fn list(&mut self, name: &str, file: &mut impl BufRead) -> Result<(), Error> {
        let start = file.fill_buf().map_err(|error| Error::bad_data(name, error))?;
        if start.trim_ascii_start().first() == Some(&b'{') {
            return self.lines(name, file);
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(|error| Error::bad_data(name, error))?;
        self.hasher.update(&text);
        let records: Vec<Columns> = serde_json::from_slice(&text).map_err(|error| {
            Error::bad_data(name, format_args!("it is no list of JSON objects: {error}"))
        })?;
        drop(text);
        self.records(name, records.into_iter().map(|Columns(columns)| Ok(columns)))
    }

    /// Reads a `.csv` or `.tsv` file. Its first row has the names of the columns.
    pub(super) fn table(
        &mut self,
        name: &str,
        file: &mut impl BufRead,
        delimiter: u8,
    ) -> Result<(), Error> {
        let hashing = Hashing { from: file, hasher: std::mem::take(&mut self.hasher) };
        let mut table = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(hashing);
        let mut names: Vec<String> = table
            .headers()
            .map_err(|error| Error::bad_data(name, error))?
            .iter()
            .map(str::to_string)
            .collect();
        if let Some(first) = names.first_mut() {
            *first = first.trim_start_matches('\u{feff}').to_string();
        }
        // An empty cell is a missing value.
        let value = |cell: &str| match cell {
            "" => to_raw_value(&Value::Null),
            text => to_raw_value(text),
        };
        let value = |cell: &str| value(cell).expect("a text is plain data");
        let rows = table.records().map(|row| {
            let row = row.map_err(|error| error.to_string())?;
            Ok(names.iter().cloned().zip(row.iter().map(value)).collect())
        });
        self.records(name, rows)?;
        self.hasher = table.into_inner().hasher;
        Ok(())
    }

    /// Reads a Parquet file. Its columns may be nested.
    #[cfg(feature = "parquet")]
    pub(super) fn parquet(&mut self, name: &str, mut file: File) -> Result<(), Error> {
        use parquet::file::reader::SerializedFileReader;

        io::copy(&mut file, &mut self.hasher).map_err(|error| Error::bad_data(name, error))?;
        // The library may panic on a damaged file.
        let damaged = || "the file is damaged".to_string();
        let safely = AssertUnwindSafe(|| SerializedFileReader::new(file));
        let reader = catch_unwind(safely).map_err(|_| Error::bad_data(name, damaged()))?;
        let mut rows = reader.map_err(|error| Error::bad_data(name, error))?.into_iter();
        let mut next = move || catch_unwind(AssertUnwindSafe(|| rows.next()));
        let rows = std::iter::from_fn(move || match next() {
            Err(_) => Some(Err(damaged())),
            Ok(row) => Some(row?.map_err(|error| error.to_string()).map(|row| {
                let columns = row.into_columns().into_iter();
                let text = |field| to_raw_value(&value_of(field)).expect("it is plain data");
                columns.map(|(name, field)| (name, text(&field))).collect()
            })),
        });
        self.records(name, rows)
    }

    /// Refuses a Parquet file, because the program was built without the feature.
    #[cfg(not(feature = "parquet"))]
    pub(super) fn parquet(&mut self, name: &str, _: File) -> Result<(), Error> {
        let what = format_args!(
            "this program was built without the feature parquet: build it with \
             `--features parquet`, or convert the file: python -c \"import pandas; \
             pandas.read_parquet('{name}').to_json('data.jsonl', orient='records', lines=True)\""
        );
        Err(Error::bad_data(name, what))
    }

    /// Reads records. Errors number them from 1.
    fn records(
        &mut self,
        name: &str,
        records: impl Iterator<Item = Result<BTreeMap<String, Box<RawValue>>, String>>,
    ) -> Result<(), Error> {
        let reader = self.reader;
        let mut records = (1_u64..).zip(records);
        loop {
            let some: Vec<_> = records.by_ref().take(LINES_AT_ONCE).collect();
            if some.is_empty() {
                return Ok(());
            }
            self.read_all(name, some, |(number, record)| {
                let sequences = record.and_then(|columns| reader.read_record(columns));
                sequences
                    .map_err(|what| Error::bad_data(name, format_args!("record {number}: {what}")))
            })?;
        }
    }
}

/// A reader that hashes all bytes that pass through it.
struct Hashing<R> {
    from: R,
    hasher: Sha256,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(to)?;
        self.hasher.update(&to[..read]);
        Ok(read)
    }
}

/// A value of a Parquet file. A null inside a column is left out: a column of objects has the keys
/// of all of them, and a key that a record does not have is null.
#[cfg(feature = "parquet")]
fn value_of(field: &Field) -> RecordValue {
    match field {
        Field::Group(row) => RecordValue::Object(
            row.get_column_iter()
                .filter(|(_, field)| !matches!(field, Field::Null))
                .map(|(name, field)| (name.clone(), value_of(field)))
                .collect(),
        ),
        Field::ListInternal(list) => {
            RecordValue::List(list.elements().iter().map(value_of).collect())
        }
        Field::MapInternal(map) => {
            let name = |key: &Field| match key.to_json_value() {
                Value::String(name) => name,
                other => other.to_string(),
            };
            let entries = map.entries().iter();
            RecordValue::Object(entries.map(|(key, one)| (name(key), value_of(one))).collect())
        }
        plain => plain.to_json_value().into(),
    }
}
