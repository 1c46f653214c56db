//! The host's threads, and the sums that they compute of whole gradients.

use std::ops::Range;
use std::sync::Arc;

use l2l_actors::schedule::sums_of_spans;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::config::Config;
use crate::error::Error;
use crate::simd::Level;
use crate::tensor::ByteRows;

/// Floats of a gradient that one thread copies or adds at once.
const CHUNK: usize = 1 << 18;

/// Threads of updates, and of kernels where they run on the host.
pub(super) struct HostThreads {
    pub(super) pool: Arc<ThreadPool>,
    pub(super) level: Level,
}

impl HostThreads {
    /// As many as the config names, or one for each core.
    pub(super) fn new(config: &Config) -> Result<HostThreads, Error> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let pool = ThreadPoolBuilder::new()
            .num_threads(config.device.threads.unwrap_or(cores))
            .thread_name(|index| format!("l2l-cpu-{index}"))
            .build()
            .map_err(Error::no_thread)?;
        Ok(HostThreads { pool: Arc::new(pool), level: Level::best() })
    }

    /// Runs `work`, whose parallel loops then use these threads.
    pub(super) fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    /// Adds a gradient to a sum.
    pub(super) fn add(&self, sum: &mut [f32], gradient: &[f32]) {
        let add = |sum: &mut [f32], gradient: &[f32]| {
            sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
        };
        self.install(|| {
            let chunks = sum.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK));
            chunks.for_each(|(sum, gradient)| add(sum, gradient));
        });
    }

    /// Copies a gradient.
    pub(super) fn copy(&self, to: &mut [f32], from: &[f32]) {
        self.install(|| {
            let chunks = to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK));
            chunks.for_each(|(to, from)| to.copy_from_slice(from));
        });
    }

    /// Copies rows of floats from a portion to its block.
    pub(super) fn copy_rows(&self, to: &mut [f32], from: &[f32], rows: ByteRows) {
        let of = |byte: usize| byte / size_of::<f32>();
        let [first, at] = rows.at.map(of);
        let [pitch, to_pitch] = rows.pitch.map(of);
        let [rows, len] = [rows.rows, of(rows.len)];
        if rows == 1 {
            return self.copy(&mut to[at..at + len], &from[first..first + len]);
        }
        self.install(|| {
            let places = to[at..].par_chunks_mut(to_pitch).take(rows).zip(0..rows);
            places.for_each(|(to, row)| {
                let first = first + row * pitch;
                to[..len].copy_from_slice(&from[first..first + len]);
            });
        });
    }

    /// Fills a gradient with zeros.
    pub(super) fn clear(&self, gradient: &mut [f32]) {
        self.install(|| gradient.par_chunks_mut(CHUNK).for_each(|chunk| chunk.fill(0.0)));
    }

    /// Adds the numbers of all groups to those of the first group, in the order of the groups'
    /// tree. Each group has `width` numbers.
    pub(super) fn sum_groups(&self, all: &mut [f32], width: usize) {
        let mut groups: Vec<&mut [f32]> = all.chunks_mut(width.max(1)).collect();
        let spans: Vec<Range<u32>> =
            (0..groups.len() as u32).map(|group| group..group + 1).collect();
        for (to, from) in sums_of_spans(&spans) {
            let [to, from] = groups.get_disjoint_mut([to, from]).expect("two groups");
            self.add(to, from);
        }
    }
}
