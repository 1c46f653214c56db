//! The CUDA device of a program that was built without it: the same functions, which return an
//! error.

use std::path::Path;

use l2l_actors::BoxedError;

use super::{Check, Device, Gpu, GpuRates, KernelGroup, Library};
use crate::config::Config;
use crate::error::Error;
use crate::kernels::{Kernels, Rows};
use crate::models::Model;
use crate::tensor::View;

fn left_out() -> Error {
    let problem = "is cuda: this program was built without it; build it with its default features, \
                   or with `--features cuda`";
    Error::config("device.kind", problem)
}

pub(super) fn open(
    _: &Config,
    _: usize,
    _: &Model,
    _: usize,
    _: View,
) -> Result<Box<dyn Device>, Error> {
    Err(left_out())
}

/// The CPU's kernels, with which the plan is made before the device is opened and refused.
pub(super) fn kernels_to_plan() -> Box<dyn Kernels> {
    Box::new(super::cpu::CpuKernels::new(None, crate::simd::Level::Portable))
}

pub(super) fn overhead(_: &Config, _: Rows) -> usize {
    0
}

pub(super) fn overhead_on_host(_: Rows) -> usize {
    0
}

pub(super) fn libraries(_: Option<&Path>) -> [Library; 0] {
    []
}

pub(super) fn gpus() -> Result<Vec<Gpu>, BoxedError> {
    Ok(Vec::new())
}

pub(super) fn free_memory(_: usize) -> Option<u64> {
    None
}

pub(super) fn check(
    _: &Config,
    _: KernelGroup,
    _: u64,
    _: &mut dyn FnMut(&Check),
) -> Result<(), Error> {
    Err(left_out())
}

pub(super) fn rates(_: &Config) -> Result<GpuRates, Error> {
    Err(left_out())
}

pub(super) fn product_rate(_: &Config) -> Result<f64, Error> {
    Err(left_out())
}

/// The emulated driver, which is not built either.
#[cfg(test)]
pub(crate) mod emulated {
    /// True if tests can run on the emulated driver.
    pub(crate) fn instead() -> bool {
        false
    }
}
