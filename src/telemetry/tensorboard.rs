//! An event file for TensorBoard: records of protocol buffers, each with its checksums. It is
//! written by hand because four fields of one message do not need a library.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use super::unix_seconds;

/// A file that TensorBoard reads while it grows.
pub(super) struct EventFile(File);

impl EventFile {
    /// Creates a new event file in a folder. Its first record has the version that readers expect.
    pub(super) fn create(folder: &Path) -> io::Result<EventFile> {
        fs::create_dir_all(folder)?;
        let now = unix_seconds();
        let name = format!("events.out.tfevents.{:010}.l2l.{}", now as u64, std::process::id());
        let mut options = OpenOptions::new();
        let mut file = EventFile(options.append(true).create(true).open(folder.join(name))?);
        let mut event = double(1, now);
        event.extend(bytes(3, b"brain.Event:2"));
        file.record(&event)?;
        Ok(file)
    }

    /// Writes the values of a step, each under its tag.
    pub(super) fn scalars(&mut self, step: u64, scalars: &[(String, f64)]) -> io::Result<()> {
        self.record(&summary(step, scalars))
    }

    /// A record is its length and its bytes, each followed by a checksum.
    fn record(&mut self, event: &[u8]) -> io::Result<()> {
        let length = (event.len() as u64).to_le_bytes();
        let checksums = [checksum(&length), checksum(event)];
        self.0.write_all(&[&length[..], &checksums[0], event, &checksums[1]].concat())
    }
}

/// The masked CRC-32C of TensorFlow's record files.
fn checksum(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// CRC-32C (Castagnoli), a bit at a time, because a record has only some hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let next = |crc: u32, _| (crc >> 1) ^ if crc & 1 == 1 { POLYNOMIAL } else { 0 };
    let of_byte = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), next);
    !bytes.iter().fold(!0, of_byte)
}

/// An `Event` with a `Summary` of simple values, as `tensorflow/core/util/event.proto` defines
/// them.
fn summary(step: u64, scalars: &[(String, f64)]) -> Vec<u8> {
    let value = |(tag, value): &(String, f64)| {
        let mut inner = bytes(1, tag.as_bytes());
        inner.push(2 << 3 | 5);
        inner.extend((*value as f32).to_le_bytes());
        bytes(1, &inner)
    };
    let values: Vec<u8> = scalars.iter().flat_map(value).collect();
    let mut event = double(1, unix_seconds());
    event.push(2 << 3);
    event.extend(varint(step));
    event.extend(bytes(5, &values));
    event
}

fn double(field: u8, value: f64) -> Vec<u8> {
    [&[field << 3 | 1][..], &value.to_le_bytes()].concat()
}

fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
    [&[field << 3 | 2][..], &varint(value.len() as u64), value].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        if value == 0 {
            all.push(low);
            return all;
        }
        all.push(low | 0x80);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The wire format of protocol buffers for fields 1, 2 and 5 of an `Event`.
    #[test]
    fn an_event_is_as_protocol_buffers_write_it() {
        let event = summary(300, &[("loss".into(), 0.5)]);
        let behind =
            [&[0x10, 0xac, 0x02, 0x2a, 13, 0x0a, 11, 0x0a, 4][..], b"loss", &[0x15, 0, 0, 0, 0x3f]];
        assert_eq!(event[0], 0x09);
        assert_eq!(event[9..], behind.concat());
    }

    /// The check values are those of the CRC catalogue and of RFC 3720.
    #[test]
    fn the_checksum_is_crc_32c() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }
}
