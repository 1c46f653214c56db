//! Measures how fast this machine updates parameters.

use std::time::Instant;

use rayon::ThreadPoolBuilder;

use super::{AdamW, Masters, SplitMasters, Update, UpdateRule, WeightDecay};
use crate::error::Error;
use crate::models::{Init, Kind, Tensor};
use crate::simd::Level;

/// The seconds of the fastest of five runs on `threads` threads.
fn best(threads: usize, mut run: impl FnMut(u64) + Send) -> Result<f64, Error> {
    let pool = ThreadPoolBuilder::new().num_threads(threads).build().map_err(Error::no_thread)?;
    let seconds = (0..5).map(|nth| {
        let begin = Instant::now();
        pool.install(|| run(nth));
        begin.elapsed().as_secs_f64()
    });
    Ok(seconds.fold(f64::INFINITY, f64::min))
}

/// Measures the memory bandwidth that an update can use: bytes per second of `a += b` over arrays
/// much larger than caches, on `threads` threads. The best of five runs.
///
/// # Errors
/// The system gives no threads.
pub fn stream_bytes_per_second(threads: usize) -> Result<f64, Error> {
    use rayon::prelude::*;
    const FLOATS: usize = 16 << 20;
    const CHUNK: usize = 1 << 14;
    let mut a = vec![0.5_f32; FLOATS];
    let b = vec![0.25_f32; FLOATS];
    let seconds = best(threads, |_| {
        a.par_chunks_mut(CHUNK).zip(b.par_chunks(CHUNK)).for_each(|(a, b)| {
            a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        });
    })?;
    Ok((3 * FLOATS * size_of::<f32>()) as f64 / seconds)
}

/// Measures AdamW: bytes per second that an update of a block much larger than caches moves, on
/// `threads` threads. A parameter takes 28 bytes, with f32 masters and with split ones. The best of
/// five runs.
///
/// # Errors
/// The system gives no threads.
pub fn update_bytes_per_second(threads: usize, split: bool) -> Result<f64, Error> {
    const PARAMETERS: usize = 16 << 20;
    let decay = WeightDecay { rate: 0.01, except: Vec::new() };
    let rule = AdamW { betas: (0.9, 0.999), epsilon: 1e-8, decay };
    let tensor = Tensor {
        name: "w".into(),
        shape: vec![PARAMETERS],
        kind: Kind::Weight,
        init: Init::Zeros,
        joined: false,
        stacked: false,
        kept_with: None,
    };
    let [mut masters, mut m, mut v, gradient] = [0.5, 0.0, 0.0, 0.25].map(|x| vec![x; PARAMETERS]);
    let seconds = best(threads, |step| {
        let update = Update {
            step,
            block_updates: step,
            learning_rate: 1e-4,
            scale: 1.0,
            level: Level::best(),
            seed: 0,
        };
        let masters = if split {
            Masters::Split { halves: SplitMasters::of(&mut masters), room: &mut [] }
        } else {
            Masters::F32(&mut masters)
        };
        rule.apply(&tensor, masters, &mut [&mut m[..], &mut v[..]], &gradient, update);
    })?;
    Ok((7 * PARAMETERS * size_of::<f32>()) as f64 / seconds)
}
