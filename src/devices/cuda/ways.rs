//! How each product is computed: by the library, or, where the library has no algorithm, by a
//! kernel of our own.

use std::collections::HashMap;
use std::sync::Mutex;

use super::driver::ProductKey;

/// The way in which a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By the library, with its bias.
    Library,
    /// By the library; the bias is added behind it.
    ThenBias,
    /// By the library, with an algorithm that does not rely on the alignment of rows, because the
    /// library has refused its first choice. The bias is added behind it.
    Unaligned,
    /// By a kernel of our own.
    Own,
}

impl Way {
    /// All ways, the fastest first.
    pub(super) const ALL: [Way; 4] = [Way::Library, Way::ThenBias, Way::Unaligned, Way::Own];

    fn words(self) -> &'static str {
        match self {
            Way::Library => "cuBLASLt computes it",
            Way::ThenBias => "cuBLASLt has no algorithm with a bias, which is added behind it",
            Way::Unaligned => {
                "cuBLASLt refuses its algorithm for aligned rows, and another computes it"
            }
            Way::Own => "cuBLASLt has no algorithm: a kernel that is slower computes it",
        }
    }
}

/// The way of each product that was computed. It follows from the product and the library, so all
/// runs on a machine take the same.
#[derive(Default)]
pub(super) struct Ways {
    all: Mutex<HashMap<ProductKey, Known>>,
    /// The way of all products during a check.
    only: Mutex<Option<Way>>,
}

#[derive(Clone, Copy)]
struct Known {
    way: Way,
    /// True if the user was warned, or need not be.
    is_reported: bool,
}

impl Ways {
    /// Sets the way of all products, for a check; `None`: the fastest.
    pub(super) fn set_only(&self, way: Option<Way>) {
        *self.only.lock().expect("nothing panics inside") = way;
    }

    pub(super) fn known(&self, key: &ProductKey) -> Option<Way> {
        let only = *self.only.lock().expect("nothing panics inside");
        let known = || self.all.lock().expect("nothing panics inside").get(key).copied();
        only.or_else(|| known().map(|known| known.way))
    }

    pub(super) fn learn(&self, key: ProductKey, way: Way) {
        let known = Known { way, is_reported: way == Way::Library };
        self.all.lock().expect("nothing panics inside").entry(key).or_insert(known);
    }

    /// A warning for each product whose way is not the fastest, once.
    pub(super) fn take_warnings(&self) -> Vec<String> {
        let mut all = self.all.lock().expect("nothing panics inside");
        let mut warnings = Vec::new();
        for (key, known) in all.iter_mut().filter(|(_, known)| !known.is_reported) {
            known.is_reported = true;
            warnings.push(format!("a product of {key}: {}", known.way.words()));
        }
        warnings.sort();
        warnings
    }
}
