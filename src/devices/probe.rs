//! Facts about GPUs that are found out before a run: libraries, GPUs, kernels, rates.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// A library that a CUDA device needs, with the path and version that were found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// The name of the library's file, without version.
    pub name: &'static str,
    /// The file that was loaded, if the system reports it.
    pub path: Option<PathBuf>,
    /// The version of the library; `None`: it is not there, or cannot be loaded.
    pub version: Option<(u32, u32)>,
    /// The advice how to install it.
    pub install: &'static str,
}

impl Library {
    /// A description of why it cannot be used, and of what to do, to be read behind its name.
    pub fn problem(&self) -> Option<String> {
        match (self.version, &self.path) {
            (Some(_), _) => None,
            (None, None) => Some(format!("is not there, or cannot be loaded: {}", self.install)),
            // The toolkit has stubs of the driver's library, to build programs without a driver.
            (None, Some(path)) => Some(format!(
                "is {}, which does not tell its version, as a stub of CUDA's toolkit: take its \
                 folder out of LD_LIBRARY_PATH, or {}",
                path.display(),
                self.install
            )),
        }
    }
}

/// A GPU, as the driver reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The name of the GPU.
    pub name: String,
    /// The architecture of the GPU: 90 stands for 9.0.
    pub architecture: u32,
    /// Bytes of memory.
    pub memory: u64,
}

/// Kernels that are checked together, in a process of their own: an error of the driver may leave a
/// process without its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum KernelGroup {
    /// Matrix products.
    Products,
    /// Kernels over rows: norms, activations, dropout, copies, tables, frozen weights, experts.
    Rows,
    /// Attention and other kernels over heads.
    Attention,
    /// Losses of tokens and of classes.
    Losses,
}

impl KernelGroup {
    /// All groups.
    pub const ALL: [KernelGroup; 4] =
        [KernelGroup::Products, KernelGroup::Rows, KernelGroup::Attention, KernelGroup::Losses];

    /// The name of the group.
    pub fn name(self) -> &'static str {
        match self {
            KernelGroup::Products => "products",
            KernelGroup::Rows => "rows",
            KernelGroup::Attention => "attention",
            KernelGroup::Losses => "losses",
        }
    }
}

/// The comparison of a GPU's kernel with the CPU's.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// The name of the kernel.
    pub kernel: &'static str,
    /// The number of sizes that it was run at.
    pub cases: usize,
    /// The largest difference, relative to values above 1; infinite if the kernel wrote outside of
    /// its outputs.
    pub off: f64,
    /// The largest difference that is allowed: in bf16, a few roundings.
    pub most: f64,
    /// The driver's error, which ended its cases.
    pub error: Option<String>,
}

impl Check {
    /// A description of the problem, if there is one.
    pub fn problem(&self) -> Option<String> {
        let Check { kernel, off, most, error, .. } = self;
        match error {
            Some(error) => Some(format!("{kernel} failed: {error}")),
            None if off > most => Some(format!("{kernel} is off by {off:e}, of at most {most:e}")),
            None => None,
        }
    }
}

/// The total time of the launches of a GPU's kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTime {
    /// The name of the kernel; `product` for the matrix library's, and `copy` for copies on the
    /// device.
    pub kernel: &'static str,
    /// The number of launches.
    pub launches: u64,
    /// Seconds on the device.
    pub seconds: f64,
}

impl KernelTime {
    /// Sums of times, by kernel; the longest first.
    pub fn sums(times: impl IntoIterator<Item = KernelTime>) -> Vec<KernelTime> {
        let mut all: BTreeMap<&'static str, KernelTime> = BTreeMap::new();
        for KernelTime { kernel, launches, seconds } in times {
            let none = KernelTime { kernel, launches: 0, seconds: 0.0 };
            let sum = all.entry(kernel).or_insert(none);
            (sum.launches, sum.seconds) = (sum.launches + launches, sum.seconds + seconds);
        }
        let mut all: Vec<KernelTime> = all.into_values().collect();
        all.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        all
    }
}

/// The times of the algorithms of a GPU's product.
#[derive(Clone, Debug, PartialEq)]
pub struct ProductTime {
    /// The sizes and dtypes of the product.
    pub product: String,
    /// The number of algorithms that were timed.
    pub algorithms: usize,
    /// Seconds of the library's first.
    pub first: f64,
    /// Seconds of the one that was chosen: the first, unless another is at least 2 % faster.
    pub best: f64,
}

/// The algorithms that were chosen for a GPU's products.
#[derive(Clone, Debug, PartialEq)]
pub struct ProductTable {
    /// The file that later runs on this GPU read.
    pub path: PathBuf,
    /// The products that were timed, the longest first.
    pub products: Vec<ProductTime>,
}

/// The measured speed of a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuRates {
    /// Bytes a second to the device and from it, of pageable memory.
    pub pageable: [f64; 2],
    /// Bytes a second to the device and from it, of pinned memory, if the system gives some.
    pub pinned: Option<[f64; 2]>,
    /// FLOP/s of a large product of the config's `device.dtype`.
    pub product: f64,
}
