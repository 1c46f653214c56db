//! Kernels of one's own.

/// What a kernel does on a CPU: what it writes, what it reads, numbers.
pub type CpuFunction = fn(&mut [&mut [f32]], &[&[f32]], &[f32]);

/// A kernel that is not among [`Kernels`](super::Kernels)' methods: what it does on a CPU, which is what a
/// GPU is checked against, and its text for a GPU.
///
/// The text is CUDA C++ behind `src/devices/cuda/kernels/prelude.cu`, so `T` is what tensors are made of,
/// `get` and `put` read and make one. It declares
/// `extern "C" __global__ void NAME(T* ..., const T* ..., long long count, float ...)`: what it writes, what
/// it reads, elements of the first that it writes, numbers. It runs on at least `count` threads, in blocks of
/// 256; a thread's element is `blockIdx.x * blockDim.x + threadIdx.x`, which may be none.
#[derive(Clone, Copy, Debug)]
pub struct CustomKernel {
    /// Its name, in the text too; no other kernel's.
    pub name: &'static str,
    /// Its text for a GPU.
    pub text: &'static str,
    /// The same on a CPU.
    pub cpu: CpuFunction,
}
