//! A file of floats, read and written with direct I/O where the file system allows it.
//!
//! Each block is read once a step, so the system's page cache would not help, and would take memory
//! as large as the model.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

use crate::tensor::Arena;
use crate::tensor::View;

/// The alignment that direct I/O needs, in bytes: of places in the file, of memory and of lengths.
const PAGE: usize = 4096;

pub(super) const PAGE_FLOATS: usize = PAGE / size_of::<f32>();

/// Bytes of one request: enough to keep the disk busy, and few enough that a chunk is still in the
/// processor's cache when it is digested.
const CHUNK: usize = 4 << 20;

/// Called after each chunk that was read or written, so that a long operation does not trip the
/// watchdog.
pub(super) type Progress<'p> = &'p dyn Fn();

/// A file, and whether direct I/O is used for it.
#[derive(Debug)]
pub(super) struct Direct {
    file: File,
    is_direct: bool,
}

impl Direct {
    /// A file with direct I/O, if the file system allows it.
    pub(super) fn new(file: File) -> Direct {
        let is_direct = set_direct(&file, true) && probe(&file);
        if !is_direct {
            set_direct(&file, false);
        }
        Direct { file, is_direct }
    }

    /// Whether the file is read and written past the system's page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Gives the file its size, with [`reserve`].
    ///
    /// # Errors
    /// The disk is full.
    pub(super) fn reserve(&self, bytes: u64) -> io::Result<()> {
        reserve(&self.file, bytes)
    }

    /// Waits until everything that was written is on the disk.
    ///
    /// # Errors
    /// The disk fails.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Reads floats from byte `at` on, and gives their digest.
    ///
    /// # Errors
    /// The disk fails, or the file is too short.
    pub(super) fn read(&self, at: u64, to: &mut [f32], progress: Progress<'_>) -> io::Result<u128> {
        let mut digest = Xxh3::new();
        let mut at = at;
        for chunk in bytemuck::cast_slice_mut::<f32, u8>(to).chunks_mut(CHUNK) {
            let mut done = 0;
            while done < chunk.len() {
                // A short read ends at a page, so the rest of the request is aligned too.
                match self.file.read_at(&mut chunk[done..], at + done as u64) {
                    Ok(0) => return Err(ends_at(at + done as u64)),
                    Ok(count) => done += count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            digest.update(chunk);
            at += chunk.len() as u64;
            progress();
        }
        Ok(digest.digest128())
    }

    /// Writes floats from byte `at` on, and gives their digest.
    ///
    /// # Errors
    /// The disk fails or is full.
    pub(super) fn write(&self, at: u64, from: &[f32], progress: Progress<'_>) -> io::Result<u128> {
        let mut digest = Xxh3::new();
        let mut at = at;
        for chunk in bytemuck::cast_slice::<f32, u8>(from).chunks(CHUNK) {
            digest.update(chunk);
            let mut done = 0;
            while done < chunk.len() {
                match self.file.write_at(&chunk[done..], at + done as u64) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(count) => done += count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            at += chunk.len() as u64;
            progress();
        }
        Ok(digest.digest128())
    }
}

/// Gives a file its size and allocates it on the disk now, so that the disk cannot be full later.
///
/// # Errors
/// The disk is full.
pub(crate) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)?;
    #[cfg(target_os = "linux")]
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
        Err(error) if error != rustix::io::Errno::OPNOTSUPP => return Err(error.into()),
        _ => {}
    }
    Ok(())
}

/// Measures the disk under a folder: bytes per second that it writes and reads sequentially.
/// The measurement uses an unnamed file of 256 MiB.
///
/// # Errors
/// The disk fails or is full.
pub fn disk_bytes_per_second(folder: &Path) -> io::Result<(f64, f64)> {
    const CHUNKS: u64 = 64;
    let mut chunk = Arena::new(CHUNK / size_of::<f32>())?;
    let chunk = chunk.values_mut(View::floats(0, CHUNK / size_of::<f32>()));
    chunk.iter_mut().enumerate().for_each(|(nth, value)| *value = nth as f32);
    let file = Direct::new(tempfile::tempfile_in(folder)?);
    file.reserve(CHUNKS * CHUNK as u64)?;
    let begin = Instant::now();
    for nth in 0..CHUNKS {
        file.write(nth * CHUNK as u64, chunk, &|| ())?;
    }
    file.sync()?;
    let write_time = begin.elapsed();
    let begin = Instant::now();
    for nth in 0..CHUNKS {
        file.read(nth * CHUNK as u64, chunk, &|| ())?;
    }
    let rate = |time: Duration| (CHUNKS * CHUNK as u64) as f64 / time.as_secs_f64();
    Ok((rate(write_time), rate(begin.elapsed())))
}

fn ends_at(byte: u64) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("it ends at byte {byte}"))
}

#[cfg(target_os = "linux")]
fn set_direct(file: &File, on: bool) -> bool {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let with = |flags: OFlags| if on { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT };
    fcntl_getfl(file).and_then(|flags| fcntl_setfl(file, with(flags))).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn set_direct(_: &File, _: bool) -> bool {
    false
}

/// Whether direct requests work. Some file systems accept the flag and then refuse each request, so
/// this tries to read one page.
fn probe(file: &File) -> bool {
    let Ok(mut page) = memmap2::MmapMut::map_anon(PAGE) else { return false };
    file.read_at(&mut page, 0).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no flags of open files")]
    fn floats_are_read_as_written_and_a_short_file_says_where_it_ends() {
        let file = Direct::new(tempfile::tempfile().expect("a place for files"));
        let len = CHUNK / size_of::<f32>() + 3 * PAGE_FLOATS;
        let mut arena = Arena::new(2 * len).expect("memory");
        let values: Vec<f32> = (0..len).map(|index| index as f32).collect();
        let from = View::floats(0, len);
        let to = View::floats(len, len);
        arena.fill(from, &values);
        let written =
            file.write(PAGE as u64, arena.values(from), &|| ()).expect("a disk with room");
        let read = file.read(PAGE as u64, arena.values_mut(to), &|| ()).expect("what was written");
        assert_eq!(written, read);
        assert_eq!(arena.values(to), values);
        let error =
            file.read(2 * PAGE as u64, arena.values_mut(to), &|| ()).expect_err("too short");
        assert!(error.to_string().contains("ends at byte"), "{error}");
    }
}
