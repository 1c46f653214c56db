//! Products by cuBLASLt. The algorithm of a size follows from the library's own rule for it, unless
//! the caller names one; never from timing.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::{MaybeUninit, size_of_val};
use std::sync::Mutex;

use bytemuck::bytes_of;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUstream;
use l2l_actors::BoxedError;

use super::driver::{Address, Algorithm, AlgorithmKey, Alignment, Matrix, Product, WORKSPACE};
use crate::tensor::Dtype;

/// The most algorithms that the library is asked for.
const ALGORITHMS: usize = 8;

/// The library, and the algorithms that it has chosen.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    /// The library's first algorithm for each product; `None`: it has none.
    chosen: Mutex<HashMap<AlgorithmKey, Option<sys::cublasLtMatmulAlgo_t>>>,
}

// SAFETY: the library's handle may be used by any thread, one at a time; one lane does.
unsafe impl Send for Products {}
// SAFETY: one thread uses the handle at a time, as above.
unsafe impl Sync for Products {}

/// A description that is destroyed when it is dropped.
struct Description(sys::cublasLtMatmulDesc_t);

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: it was created, and is destroyed once.
        _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// The layout of a matrix by columns, which is the transpose of one by rows.
    fn new(
        dtype: Dtype,
        [rows, columns]: [usize; 2],
        stride: usize,
    ) -> Result<Layout, result::CublasError> {
        let made =
            result::create_matrix_layout(kind(dtype), rows as u64, columns as u64, stride as i64)?;
        Ok(Layout(made))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it was created, and is destroyed once.
        _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: it was created, and is destroyed once.
        _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

impl Products {
    /// The library, on the current device.
    pub(super) fn new() -> Result<Products, BoxedError> {
        Ok(Products { handle: result::create_handle()?, chosen: Mutex::default() })
    }

    /// The library's version, as it counts.
    pub(super) fn version() -> u64 {
        // SAFETY: the library is there.
        unsafe { sys::cublasLtGetVersion() as u64 }
    }

    /// Multiplies by this algorithm, or by the library's first. Returns false if there is none, or
    /// if it is refused. The library stores matrices by columns, so it is asked for bᵀ aᵀ.
    pub(super) fn run(
        &self,
        product: &Product,
        relies_on: Alignment,
        named: Option<Algorithm>,
        workspace: Address,
        stream: CUstream,
    ) -> Result<bool, BoxedError> {
        let Product { a, b, c, accumulate, .. } = *product;
        let described = Described::new(product)?;
        let Described { description, layouts: [layout_b, layout_a, layout_c] } = &described;
        let key = AlgorithmKey { product: product.key(), relies_on };
        let algorithm = match named {
            Some(data) => sys::cublasLtMatmulAlgo_t { data },
            None => match self.first(key, &described)? {
                Some(first) => first,
                None => return Ok(false),
            },
        };
        let one = 1.0_f32;
        let beta = if accumulate { 1.0_f32 } else { 0.0 };
        // SAFETY: all descriptions live until the call returns, and the matrices are where they
        // say.
        let done = unsafe {
            result::matmul(
                self.handle,
                description.0,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                b.at.at as *const c_void,
                layout_b.0,
                a.at.at as *const c_void,
                layout_a.0,
                c.at as *const c_void,
                layout_c.0,
                c.at as *mut c_void,
                layout_c.0,
                &raw const algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )
        };
        let is_done = unless_refused(done)?.is_some();
        if !is_done && named.is_none() {
            self.chosen.lock().expect("nothing panics inside").insert(key, None);
        }
        Ok(is_done)
    }

    /// The first algorithm, and others that the library names for a product. All are of the first's
    /// preference, so they add partial sums in one order, too.
    pub(super) fn algorithms(
        &self,
        product: &Product,
        relies_on: Alignment,
    ) -> Result<Vec<Algorithm>, BoxedError> {
        let described = Described::new(product)?;
        let key = AlgorithmKey { product: product.key(), relies_on };
        let Some(first) = self.first(key, &described)? else { return Ok(Vec::new()) };
        let found = unless_refused(self.named(key, &described, ALGORITHMS))?.unwrap_or_default();
        let fits = |one: &sys::cublasLtMatmulHeuristicResult_t| {
            one.state.result().is_ok() && one.workspaceSize <= WORKSPACE
        };
        let others = found.iter().filter(|one| fits(one)).map(|one| one.algo.data);
        let others = others.filter(|other| *other != first.data);
        Ok([first.data].into_iter().chain(others).take(ALGORITHMS).collect())
    }

    /// The library's first algorithm for a product, if there is one. It is chosen once, and is the
    /// same for the same library and device.
    fn first(
        &self,
        key: AlgorithmKey,
        described: &Described,
    ) -> Result<Option<sys::cublasLtMatmulAlgo_t>, BoxedError> {
        let mut chosen = self.chosen.lock().expect("nothing panics inside");
        if let Some(algorithm) = chosen.get(&key) {
            return Ok(*algorithm);
        }
        let none = result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
        let first = self.named(key, described, 1).and_then(|found| {
            let first = found.first().ok_or(none)?;
            first.state.result().map(|()| first.algo)
        });
        let algorithm = unless_refused(first)?;
        chosen.insert(key, algorithm);
        Ok(algorithm)
    }

    /// At most `most` algorithms that the library names for a product, beginning with the one that
    /// it takes for the fastest. The alignment that the library is given follows from shapes and
    /// not from addresses, so that bits do not depend on slots.
    fn named(
        &self,
        key: AlgorithmKey,
        Described { description, layouts: [a, b, c] }: &Described,
        most: usize,
    ) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>, result::CublasError> {
        let [of_a, of_b, of_c] = key.alignments();
        let preference = Preference(result::create_matmul_pref()?);
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let bytes = WORKSPACE as u64;
        // Partial sums are floats, and are added in one order.
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        // The library's a is our b.
        let of: [(_, &[u8]); 6] = [
            (Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes_of(&bytes)),
            (Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, bytes_of(&scheme)),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, bytes_of(&of_b)),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, bytes_of(&of_a)),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, bytes_of(&of_c)),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, bytes_of(&of_c)),
        ];
        for (what, value) in of {
            let at = value.as_ptr().cast();
            // SAFETY: the preference is there, and the value is of this attribute.
            unsafe { result::set_matmul_pref_attribute(preference.0, what, at, value.len())? };
        }
        let mut found = vec![MaybeUninit::uninit(); most];
        let mut count = 0;
        // SAFETY: all descriptions are there, and there is a place for each that is asked for.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description.0,
                a.0,
                b.0,
                c.0,
                c.0,
                preference.0,
                most as i32,
                found.as_mut_ptr().cast(),
                &mut count,
            )
            .result()?;
        }
        found.truncate(count as usize);
        // SAFETY: the library has written `count` of them.
        Ok(found.into_iter().map(|one| unsafe { one.assume_init() }).collect())
    }
}

/// A product as the library knows it, which takes our b for its first factor.
struct Described {
    description: Description,
    /// The layouts of our b, a and c.
    layouts: [Layout; 3],
}

impl Described {
    fn new(product: &Product) -> Result<Described, BoxedError> {
        let Product { rows, inner, columns, a, b, c, stride, .. } = *product;
        assert_eq!(a.at.dtype, b.at.dtype, "factors have one dtype");
        let layout = |matrix: Matrix, rows: usize, columns: usize| {
            let (columns, rows) = if matrix.transposed { (rows, columns) } else { (columns, rows) };
            Layout::new(matrix.at.dtype, [columns, rows], matrix.stride)
        };
        let of_b = layout(b, inner, columns)?;
        let of_a = layout(a, rows, inner)?;
        let of_c = Layout::new(c.dtype, [columns, rows], stride)?;
        Ok(Described { description: describe(product)?, layouts: [of_b, of_a, of_c] })
    }
}

/// `None` if the library refuses the request although nothing is broken.
fn unless_refused<R>(result: Result<R, result::CublasError>) -> Result<Option<R>, BoxedError> {
    use sys::cublasStatus_t as Status;
    match result {
        Ok(result) => Ok(Some(result)),
        Err(result::CublasError(
            Status::CUBLAS_STATUS_NOT_SUPPORTED | Status::CUBLAS_STATUS_INVALID_VALUE,
        )) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Describes a product to the library: which factors are transposed, and the bias.
fn describe(product: &Product) -> Result<Description, BoxedError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let Product { a, b, c, bias, .. } = *product;
    let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    let description = Description(result::create_matmul_desc(compute, kind(Dtype::F32))?);
    let set = |what, value: *const c_void, bytes| {
        // SAFETY: the description lives, and the value is of this attribute's type.
        unsafe { result::set_matmul_desc_attribute(description.0, what, value, bytes) }
    };
    for (what, matrix) in
        [(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, b), (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, a)]
    {
        let transposed = i32::from(matrix.transposed); // CUBLAS_OP_N, CUBLAS_OP_T
        set(what, (&raw const transposed).cast(), size_of_val(&transposed))?;
    }
    if let Some(bias) = bias {
        let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        let what = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE;
        let bytes = size_of_val(&epilogue);
        set(what, (&raw const epilogue).cast(), bytes)?;
        let what = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        set(what, (&raw const bias.at).cast(), size_of_val(&bias.at))?;
        assert_eq!(bias.dtype, c.dtype, "a bias has the dtype of the product");
    }
    Ok(description)
}

/// The library's name for a dtype.
fn kind(dtype: Dtype) -> sys::cudaDataType_t {
    match dtype {
        Dtype::F32 => sys::cudaDataType_t::CUDA_R_32F,
        Dtype::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        Dtype::F16 => sys::cudaDataType_t::CUDA_R_16F,
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: it was created, and is destroyed once.
        _ = unsafe { result::destroy_handle(self.handle) };
    }
}
