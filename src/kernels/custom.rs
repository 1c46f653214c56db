//! Kernels that a program brings along.

use super::operation::{KernelOperation, Named, Views};
use crate::tensor::View;

/// A kernel's function for the CPU. Its arguments are the outputs, the inputs and the numbers.
pub type CpuFunction = fn(&mut [&mut [f32]], &[&[f32]], &[f32]);

/// A kernel that is not among the methods of [`Kernels`](super::Kernels): a function for the CPU,
/// which is the reference that a GPU is checked against, and CUDA source for a GPU.
///
/// The source is CUDA C++ that is compiled behind `src/devices/cuda/kernels/prelude.cu`. There, `T`
/// is the type of the device's elements, and `get` and `put` convert from and to it. It declares
/// `extern "C" __global__ void NAME(T* ..., const T* ..., long long count, float ...)`: outputs,
/// inputs, the number of elements of the first output, numbers. It runs on at least `count`
/// threads, in blocks of 256. A thread's element is `blockIdx.x * blockDim.x + threadIdx.x`; a
/// thread beyond `count` has none.
#[derive(Clone, Copy, Debug)]
pub struct CustomKernel {
    /// Its name in the source, which no other kernel has.
    pub name: &'static str,
    /// Its CUDA source.
    pub text: &'static str,
    /// Its function for the CPU.
    pub cpu: CpuFunction,
}

/// A call of a [`CustomKernel`]. Shapes are not checked: only the kernel knows them.
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

impl KernelOperation for Custom<'_> {
    fn views(&self, views: &mut Views<'_>) {
        self.writes.iter().for_each(|view| views.writes("writes", *view, view.shape(), view.dtype));
        self.reads.iter().for_each(|view| views.reads("reads", *view, view.shape(), view.dtype));
    }
}
