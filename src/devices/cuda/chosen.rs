//! Algorithms of products that were timed once, and are kept in a file that later runs on the same
//! GPU read when they start. A run never chooses by timing: without a file, each product takes the
//! first algorithm of the library's own rule.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use l2l_actors::BoxedError;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::driver::{
    Address, Algorithm, AlgorithmKey, Alignment, Driver, Event, Product, ProductKey,
    ProductLibrary, Stream, WORKSPACE,
};
use crate::devices::{ProductTable, ProductTime};

/// Timed launches of an algorithm, after one that does not count.
const RUNS: usize = 5;

/// An algorithm replaces the first if it takes at most this share of the first's time.
const FASTER: f64 = 0.98;

/// The chosen algorithms of a device's products.
#[derive(Default)]
pub(super) struct Chosen {
    library: ProductLibrary,
    /// The path of the file; `None`: there is no folder for it.
    path: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    algorithms: HashMap<AlgorithmKey, Algorithm>,
    warnings: Vec<String>,
    /// `None`: products are not timed.
    timed: Option<HashMap<AlgorithmKey, Vec<Candidate>>>,
}

/// An algorithm of a product, and the events before and behind each of its launches.
struct Candidate {
    algorithm: Algorithm,
    launches: Vec<[Arc<Event>; 2]>,
}

/// The content of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    library: ProductLibrary,
    products: Vec<Row>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    product: ProductKey,
    alignment: Alignment,
    algorithm: Algorithm,
    /// The time of the library's first algorithm.
    first_microseconds: f64,
    /// The time of this algorithm.
    best_microseconds: f64,
}

impl Row {
    fn key(&self) -> AlgorithmKey {
        AlgorithmKey { product: self.product, relies_on: self.alignment }
    }
}

/// The rows of a file; none where there is no file.
fn read(path: &Path, library: &ProductLibrary) -> Result<Vec<Row>, BoxedError> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text?,
    };
    let table: Table = serde_json::from_slice(&text)?;
    match table.library == *library {
        true => Ok(table.products),
        false => Err("it is of another GPU or of another cuBLASLt".into()),
    }
}

/// Takes the lock of the processes that read the file and write it anew, and waits while another
/// process has it. On a file system without locks, it does not wait.
fn lock(path: &Path) -> io::Result<File> {
    fs::create_dir_all(path.parent().expect("it is in a folder"))?;
    let file = File::create(path.with_extension("lock"))?;
    match file.lock() {
        Err(error) if error.kind() != io::ErrorKind::Unsupported => Err(error),
        _ => Ok(file),
    }
}

/// Writes a file, a row a line. It has its name only when it is whole.
fn write(path: &Path, library: &ProductLibrary, rows: &[Row]) -> Result<(), BoxedError> {
    let library = serde_json::to_string(library)?;
    let rows: Result<Vec<String>, _> = rows.iter().map(serde_json::to_string).collect();
    let rows = rows?.join(",\n");
    let text = format!("{{\n\"library\": {library},\n\"products\": [\n{rows}\n]\n}}\n");
    let own = path.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&own, text)?;
    Ok(fs::rename(own, path)?)
}

impl Chosen {
    /// Reads the algorithms that a folder has for a GPU and its library.
    pub(super) fn read(folder: Option<&Path>, library: ProductLibrary) -> Chosen {
        // Algorithms are for a workspace of this size.
        let ProductLibrary { gpu, architecture, cublaslt } = &library;
        let identity = format!("{gpu} {architecture} {cublaslt} {WORKSPACE}");
        let file = format!("products-{:016x}.json", xxh3_64(identity.as_bytes()));
        let path = folder.map(|folder| folder.join(file));
        let mut state = State::default();
        if let Some(path) = &path {
            match read(path, &library) {
                Ok(rows) => {
                    state.algorithms = rows.iter().map(|row| (row.key(), row.algorithm)).collect();
                }
                Err(error) => state.warnings.push(format!(
                    "the choice of products in {} is ignored ({error}): delete the file, or let \
                     `l2l bench --products` write it again",
                    path.display()
                )),
            }
        }
        Chosen { library, path, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics inside")
    }

    /// Warnings about files that were ignored, each once.
    pub(super) fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.state().warnings)
    }

    /// Computes a product by the algorithm that the file has for it, or by the library's first.
    /// Returns false if the library cannot; then nothing was done.
    pub(super) fn run(
        &self,
        driver: &dyn Driver,
        product: &Product,
        relies_on: Alignment,
        workspace: Address,
    ) -> Result<bool, BoxedError> {
        let key = AlgorithmKey { product: product.key(), relies_on };
        let algorithm = self.state().algorithms.get(&key).copied();
        let run =
            |algorithm| driver.product(Stream::Compute, product, relies_on, algorithm, workspace);
        if algorithm.is_some() {
            if run(algorithm)? {
                return Ok(true);
            }
            let mut state = self.state();
            state.algorithms.remove(&key);
            state.warnings.push(format!(
                "cuBLASLt refuses the algorithm that was chosen for a product of {}, and its \
                 first computes it: let `l2l bench --products` choose again",
                key.product
            ));
        }
        run(None)
    }

    /// Times each product from now on, when it first comes. Until this device ends, the library's
    /// first algorithms compute.
    pub(super) fn begin(&self) {
        let mut state = self.state();
        state.algorithms.clear();
        state.timed.get_or_insert_default();
    }

    /// Times the algorithms of a product, if products are timed and this one comes for the first
    /// time. They write to the product's own place, and the product is computed behind them. A
    /// product that adds to its place is not timed: the choice for the same product without the sum
    /// is for both.
    pub(super) fn time(
        &self,
        driver: &Arc<dyn Driver>,
        product: &Product,
        relies_on: Alignment,
        workspace: Address,
    ) -> Result<(), BoxedError> {
        let key = AlgorithmKey { product: product.key(), relies_on };
        match &self.state().timed {
            Some(timed) if !product.accumulate && !timed.contains_key(&key) => {}
            _ => return Ok(()),
        }
        let on = Stream::Compute;
        let mut candidates: Vec<Candidate> = Vec::new();
        for algorithm in driver.algorithms(product, relies_on)? {
            // One that is refused takes no part; without the first, there is nothing to compare.
            if driver.product(on, product, relies_on, Some(algorithm), workspace)? {
                candidates.push(Candidate { algorithm, launches: Vec::new() });
            } else if candidates.is_empty() {
                break;
            }
        }
        for _ in 0..RUNS {
            let mut before = Event::record(driver, on)?;
            for Candidate { algorithm, launches } in &mut candidates {
                driver.product(on, product, relies_on, Some(*algorithm), workspace)?;
                let behind = Event::record(driver, on)?;
                launches.push([std::mem::replace(&mut before, behind.clone()), behind]);
            }
        }
        if let Some(timed) = &mut self.state().timed {
            timed.insert(key, candidates);
        }
        Ok(())
    }

    /// Chooses for the products that were timed, and writes the choice to the file. Rows of other
    /// products stay there. Waits for the device. Returns `None` if products were not timed.
    pub(super) fn store(&self, driver: &dyn Driver) -> Result<Option<ProductTable>, BoxedError> {
        let Some(timed) = self.state().timed.take() else { return Ok(None) };
        let path = self.path.clone().ok_or("device.kernel_cache names no folder")?;
        let mut products = Vec::new();
        let mut rows = Vec::new();
        for (key, candidates) in timed {
            let AlgorithmKey { product, relies_on: alignment } = key;
            let algorithms = candidates.len();
            let Some((algorithm, [first, best])) = choose(driver, &candidates)? else { continue };
            products.push(ProductTime { product: words(&product), algorithms, first, best });
            let [first_microseconds, best_microseconds] = [first, best].map(|time| time * 1e6);
            let row = Row { product, alignment, algorithm, first_microseconds, best_microseconds };
            rows.push(row);
        }
        products.sort_by(|one, other| other.first.total_cmp(&one.first));
        let unwritten = |error: BoxedError| format!("{}: {error}", path.display());
        let _lock = lock(&path).map_err(|error| unwritten(error.into()))?;
        // A file that cannot be read has given a warning, and is written anew.
        let mut before = read(&path, &self.library).unwrap_or_default();
        before.retain(|row| rows.iter().all(|new| new.key() != row.key()));
        rows.extend(before);
        rows.sort_by_key(|Row { product: of, alignment, .. }| {
            let dtypes = of.dtypes.map(|dtype| dtype as u8);
            (of.sizes, of.strides, of.transposed, of.has_bias, dtypes, *alignment as u8)
        });
        write(&path, &self.library, &rows).map_err(unwritten)?;
        Ok(Some(ProductTable { path, products }))
    }
}

/// The fastest algorithm, with its seconds and those of the first: the medians of their launches.
fn choose(
    driver: &dyn Driver,
    candidates: &[Candidate],
) -> Result<Option<(Algorithm, [f64; 2])>, BoxedError> {
    let mut chosen: Option<(Algorithm, [f64; 2])> = None;
    for Candidate { algorithm, launches } in candidates {
        let seconds = launches.iter().map(|[before, behind]| {
            driver.synchronize(behind.id)?;
            driver.seconds(before.id, behind.id)
        });
        let mut seconds: Vec<f64> = seconds.collect::<Result<_, BoxedError>>()?;
        seconds.sort_by(f64::total_cmp);
        let median = seconds[seconds.len() / 2];
        chosen = match chosen {
            None => Some((*algorithm, [median; 2])),
            Some((_, [first, best])) if median < best && median <= FASTER * first => {
                Some((*algorithm, [first, median]))
            }
            earlier => earlier,
        };
    }
    Ok(chosen)
}

/// The sizes and dtypes of a product, in words.
fn words(key: &ProductKey) -> String {
    let transposed = match key.transposed {
        [false, false] => "",
        [true, false] => ", the first transposed",
        [false, true] => ", the second transposed",
        [true, true] => ", both transposed",
    };
    let bias = if key.has_bias { ", with a bias" } else { "" };
    format!("{key}{transposed}{bias}")
}
