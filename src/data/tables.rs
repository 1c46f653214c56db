//! Records of `.json`, `.csv`, `.tsv` and `.parquet` files.

use std::fs::File;
use std::io::{self, BufRead, Read};
#[cfg(feature = "parquet")]
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(feature = "parquet")]
use parquet::record::Field;
use serde::Serialize;
use serde::de::IgnoredAny;
#[cfg(feature = "parquet")]
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use sha2::{Digest, Sha256};

use super::files::{BYTE_ORDER_MARK, LINES_AT_ONCE, Opening, not_utf8};
use super::json_error;
use super::record::ColumnTexts;
use super::tally::Place;
use crate::error::Error;
#[cfg(feature = "parquet")]
use crate::hf::RecordValue;

impl Opening<'_> {
    /// Reads a `.json` file: a list of records, or one record a line.
    pub(super) fn list(&mut self, name: &str, file: &mut impl BufRead) -> Result<(), Error> {
        let start = file.fill_buf().map_err(|error| Error::bad_data(name, error))?;
        let start = start.strip_prefix(BYTE_ORDER_MARK).unwrap_or(start);
        if start.trim_ascii_start().first() == Some(&b'{') {
            return self.lines(name, file);
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|error| Error::bad_data(name, error))?;
        self.hasher.update(&bytes);
        let refuse = |what: &dyn std::fmt::Display| Error::bad_data(name, what);
        let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&bytes);
        let text = std::str::from_utf8(bytes).map_err(|error| refuse(&not_utf8(bytes, error)))?;
        let records = elements(text)
            .map_err(|what| refuse(&format_args!("it is no list of JSON objects: {what}")))?;
        let reader = self.reader;
        for some in records.chunks(LINES_AT_ONCE) {
            self.read_all(name, some.to_vec(), |record| reader.read(record))?;
        }
        Ok(())
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
        let is_named = |one: &str| self.reader.fields.iter().any(|(_, theirs)| theirs == one);
        check_names(&names, delimiter, is_named).map_err(|what| Error::bad_data(name, what))?;
        // An empty cell is a missing value.
        let value = |cell: &str| match cell {
            "" => raw(&()),
            text => raw(text),
        };
        let rows = (1_u64..).zip(table.records()).map(|(number, row)| match row {
            Ok(row) => {
                let place = Place::of_record(number, row.position().map(csv::Position::line));
                (place, Ok(Ok(names.iter().cloned().zip(row.iter().map(value)).collect())))
            }
            Err(error) => {
                let place = Place::of_record(number, error.position().map(csv::Position::line));
                let problem = error.to_string();
                (place, if error.is_io_error() { Err(problem) } else { Ok(Err(problem)) })
            }
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
                Ok(columns.map(|(name, field)| (name, raw(&value_of(&field)))).collect())
            })),
        });
        self.records(name, (1_u64..).map(|number| Place::of_record(number, None)).zip(rows))
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

    /// Reads the records of a table.
    fn records(
        &mut self,
        name: &str,
        mut rows: impl Iterator<Item = (Place, Row)>,
    ) -> Result<(), Error> {
        let reader = self.reader;
        loop {
            let mut some = Vec::new();
            for (place, row) in rows.by_ref().take(LINES_AT_ONCE) {
                some.push((place, row.map_err(|problem| place.error(name, &problem))?));
            }
            if some.is_empty() {
                return Ok(());
            }
            self.read_all(name, some, |row| row.and_then(|columns| reader.read_record(columns)))?;
        }
    }
}

/// A row of a table. The outer error is of the file, which cannot be read further; the inner one is
/// of the row.
type Row = Result<Result<ColumnTexts, String>, String>;

/// Refuses a table whose columns cannot be told apart. `is_named` says whether the config names a
/// column.
fn check_names(
    names: &[String],
    delimiter: u8,
    is_named: impl Fn(&str) -> bool,
) -> Result<(), String> {
    // Spreadsheets write columns without a name behind the others.
    let twice = names.iter().enumerate().find_map(|(at, one)| {
        let first = names[..at].iter().position(|before| before == one)?;
        (!one.is_empty()).then(|| format!("columns {} and {} are both {one:?}", first + 1, at + 1))
    });
    if let Some(twice) = twice {
        return Err(format!("{twice}: each column needs a name of its own"));
    }
    let [only] = names else { return Ok(()) };
    let others = [(b',', "commas"), (b'\t', "tabs"), (b';', "semicolons"), (b'|', "bars")];
    let separates = |(byte, _): &(u8, &str)| *byte != delimiter && only.as_bytes().contains(byte);
    match others.into_iter().find(separates).filter(|_| !is_named(only)) {
        None => Ok(()),
        Some((_, found)) => Err(format!(
            "its only column is {only:?}, so {found} seem to separate the cells: save it with \
             commas as .csv, or with tabs as .tsv"
        )),
    }
}

/// The elements of a JSON list as texts, with their places.
fn elements(text: &str) -> Result<Vec<(Place, &str)>, String> {
    // An error of the whole text has a line and a column of the file.
    let checked = serde_json::from_str::<Vec<IgnoredAny>>(text);
    checked.map_err(|error| json_error::explain(text, &error))?;
    let mut rest = text.trim_start().strip_prefix('[').unwrap_or_default();
    let mut line = 1;
    let mut counted = 0;
    let mut found = Vec::new();
    loop {
        rest = rest.trim_start_matches(|char: char| char.is_ascii_whitespace() || char == ',');
        if rest.starts_with(']') {
            return Ok(found);
        }
        let mut element = serde_json::Deserializer::from_str(rest).into_iter::<IgnoredAny>();
        element.next().expect("the list was checked").map_err(|error| error.to_string())?;
        let (one, behind) = rest.split_at(element.byte_offset());
        let at = text.len() - rest.len();
        line += text[counted..at].matches('\n').count() as u64;
        counted = at;
        found.push((Place::of_record(found.len() as u64 + 1, Some(line)), one));
        rest = behind;
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

/// A value as JSON text.
fn raw(value: &(impl Serialize + ?Sized)) -> Box<RawValue> {
    to_raw_value(value).expect("it is plain data")
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
