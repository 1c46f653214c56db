//! The CPU as one or more devices: lanes are threads over a rayon pool each, memory is one arena.
//!
//! The host's memory is in the same arena. So kernels of all devices read and write boundaries
//! where they are stashed. Blocks and gradients are copied, as a device behind a link would copy
//! them.

mod activation;
mod attention;
mod classes;
mod columns;
mod copy;
mod cross_entropy;
mod custom;
mod dropout;
mod embedding;
mod experts;
mod head_norm;
mod kv_cache;
mod linear;
mod linear_attention;
mod math;
mod norm;
#[cfg(test)]
pub(crate) mod oracle;
mod output_gates;
mod positive;
mod quantised;
mod rates;
mod rotary;
mod routing;
mod sinks;
mod views;

use std::sync::Arc;

use half::{bf16, f16};
use l2l_actors::BoxedError;
use rayon::{ThreadPool, ThreadPoolBuilder};

pub use rates::{KernelRate, Rate, kernel_rates, product_flops_per_second};
pub(crate) use views::CpuKernels;

use super::{Device, PeerView};
use crate::error::Error;
use crate::kernels::{BatchMetadata, Kernels};
use crate::simd::Level;
use crate::tensor::{Arena, ByteRows, Dtype, Packing, View};

pub(super) struct Cpu {
    memory: Arc<Arena>,
    /// The first float of its own memory.
    first: usize,
    /// Memory for the elements of 16 bits of one operation, widened to floats.
    widened: View,
    threads: Arc<ThreadPool>,
    level: Level,
}

impl Cpu {
    /// A device in this memory, which it shares with the host and with other devices.
    pub(super) fn new(
        memory: &Arc<Arena>,
        first: usize,
        widened: View,
        threads: Arc<ThreadPool>,
    ) -> Cpu {
        Cpu { memory: memory.clone(), first, widened, threads, level: Level::best() }
    }
}

/// The threads of a device: all of the host's if there is one device, else its share, at least one.
pub(super) fn threads_of(
    device: u32,
    devices: u32,
    all: &Arc<ThreadPool>,
) -> Result<Arc<ThreadPool>, Error> {
    if devices == 1 {
        return Ok(all.clone());
    }
    let count = all.current_num_threads();
    let devices = devices as usize;
    let nth = device as usize;
    let share = count / devices + usize::from(nth < count % devices);
    let pool = ThreadPoolBuilder::new()
        .num_threads(share.max(1))
        .thread_name(move |index| format!("l2l-cpu{device}-{index}"));
    pool.build().map(Arc::new).map_err(Error::no_thread)
}

// The ring grants slots. While an operation writes a slot, no other operation touches it; while an
// operation reads a slot, no other operation writes it.
impl Device for Cpu {
    fn upload(&self, to: View, from: &[f32]) -> Result<(), BoxedError> {
        // SAFETY: the ring gives the slot to this upload alone.
        unsafe { self.memory.write(to) }.copy_from_slice(from);
        Ok(())
    }

    fn upload_rows(&self, to: View, from: &[f32], rows: ByteRows) -> Result<(), BoxedError> {
        let span = rows.span(0);
        let first = span.start / size_of::<f32>();
        let to = to.part(first..span.end.div_ceil(size_of::<f32>()));
        // SAFETY: as for other uploads; other parts of the slot may be another copy's.
        let to: &mut [u8] = bytemuck::cast_slice_mut(unsafe { self.memory.write(to) });
        let from: &[u8] = bytemuck::cast_slice(from);
        for [own, of_whole] in rows.each() {
            let begin = first * size_of::<f32>();
            to[own.start - begin..own.end - begin].copy_from_slice(&from[of_whole]);
        }
        Ok(())
    }

    fn download(&self, to: &mut [f32], from: View) -> Result<(), BoxedError> {
        // SAFETY: the ring holds the slot for this download.
        to.copy_from_slice(unsafe { self.memory.read(from) });
        Ok(())
    }

    fn for_peers(&self, view: View) -> PeerView {
        PeerView { context: 0, at: view.at as u64 }
    }

    fn copy_from_peer(&self, to: View, from: PeerView) -> Result<(), BoxedError> {
        let from = View { at: from.at as usize, ..to };
        // SAFETY: the ring gives the slot to this copy alone, and holds the other device's for it.
        unsafe { self.memory.write(to).copy_from_slice(self.memory.read(from)) };
        Ok(())
    }

    fn upload_packed(&self, to: View, from: &[f32], packing: Packing) -> Result<(), BoxedError> {
        // SAFETY: as for other uploads.
        packing.unpack(unsafe { self.memory.write(to) }, from);
        Ok(())
    }

    fn download_packed(
        &self,
        to: &mut [f32],
        from: View,
        packing: Packing,
    ) -> Result<(), BoxedError> {
        // SAFETY: as for other downloads.
        packing.pack(to, unsafe { self.memory.read(from) });
        Ok(())
    }

    fn read_back(&self, view: View) -> Result<Vec<f32>, BoxedError> {
        // SAFETY: the ring gives the slot to the operation that asks, which writes others.
        Ok(unsafe { self.memory.read(view) }.to_vec())
    }

    fn is_finite(&self, view: View, _: i64) -> Result<bool, BoxedError> {
        /// Numbers that are tested together, in vectors.
        const CHUNK: usize = 1 << 12;
        fn all<T: Copy>(values: &[T], is_finite: impl Fn(T) -> bool) -> bool {
            let mut chunks = values.chunks(CHUNK);
            chunks.all(|chunk| chunk.iter().fold(true, |all, &value| all & is_finite(value)))
        }
        let at = view.at * view.dtype.size() / Dtype::F32.size();
        let len = view.len();
        // SAFETY: the ring gives the slot to the operation that asks, which has written it.
        let values = unsafe { self.memory.read(View::floats(at, view.dtype.floats(len))) };
        Ok(match view.dtype {
            Dtype::F32 => all(values, f32::is_finite),
            Dtype::Bf16 => all(&bytemuck::cast_slice(values)[..len], bf16::is_finite),
            Dtype::F16 => all(&bytemuck::cast_slice(values)[..len], f16::is_finite),
        })
    }

    fn compute(
        &self,
        _micro: &BatchMetadata<'_>,
        run: &(dyn Fn(&dyn Kernels) -> usize + Sync),
    ) -> Result<usize, BoxedError> {
        let kernels = CpuKernels::with_room(Some(&self.memory), self.level, self.widened);
        Ok(self.threads.install(|| run(&kernels)))
    }

    fn shared(&self) -> Option<&Arc<Arena>> {
        Some(&self.memory)
    }

    fn first(&self) -> usize {
        self.first
    }
}
