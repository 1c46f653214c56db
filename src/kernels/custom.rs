//! Kernels that are not built in.

use super::operation::{Named, Operation, Views};
use crate::tensor::View;

/// What a kernel does on a CPU: what it writes, what it reads, numbers.
pub type CpuFunction = fn(&mut [&mut [f32]], &[&[f32]], &[f32]);

/// A kernel that is not among [`Kernels`](super::Kernels)' methods: what it does on a CPU, which is
/// what a GPU is checked against, and its text for a GPU.
///
/// The text is CUDA C++ behind `src/devices/cuda/kernels/prelude.cu`. There, `T` is the type of the
/// device's elements, and `get` and `put` read and make one. The text declares
/// `extern "C" __global__ void NAME(T* ..., const T* ..., long long count, float ...)`: what it
/// writes, what it reads, elements of the first that it writes, numbers. It runs on at least
/// `count` threads, in blocks of 256. The element of a thread is
/// `blockIdx.x * blockDim.x + threadIdx.x`, and there may be no such element.
#[derive(Clone, Copy, Debug)]
pub struct CustomKernel {
    /// Its name, in the text too; no other kernel's.
    pub name: &'static str,
    /// Its text for a GPU.
    pub text: &'static str,
    /// The same on a CPU.
    pub cpu: CpuFunction,
}

/// A call of a kernel that is not built in. Nobody but the kernel knows which shapes it takes.
#[derive(Clone, Copy, Debug)]
pub struct Custom<'a> {
    /// The kernel, which its layer [lists](crate::models::Layer::custom_kernels).
    pub kernel: &'a CustomKernel,
    /// Outputs; at least one.
    pub writes: &'a [View],
    /// Inputs.
    pub reads: &'a [View],
    /// Numbers.
    pub numbers: &'a [f32],
}

impl Named for Custom<'_> {
    fn name(&self) -> &'static str {
        self.kernel.name
    }
}

impl Operation for Custom<'_> {
    fn views(&self, views: &mut Views<'_>) {
        // Only the kernel knows the shapes that it takes.
        self.writes.iter().for_each(|view| views.writes("writes", *view, view.shape(), view.dtype));
        self.reads.iter().for_each(|view| views.reads("reads", *view, view.shape(), view.dtype));
    }
}
