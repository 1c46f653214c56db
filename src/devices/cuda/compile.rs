//! Compiles kernels for a device's architecture, and caches them between runs.

use std::ffi::{CString, c_char};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use cudarc::nvrtc::{result, sys};
use l2l_actors::BoxedError;
use xxhash_rust::xxh3::xxh3_64;

use super::texts::{PRELUDE, Target, element};
use crate::devices::Library;
use crate::machine;

/// A text that is compiled, or one of its [parts](super::texts::parts).
#[derive(Clone, Copy)]
pub(super) struct Unit<'t> {
    pub(super) name: &'t str,
    pub(super) text: &'t str,
    pub(super) part: Option<u32>,
}

/// Machine code of units for a target, in their order, from the cache folder if it is there. Each
/// core compiles one unit at a time.
///
/// # Errors
/// As [`cubin`], of the first unit that has one.
pub(super) fn cubins(
    units: &[Unit<'_>],
    target: Target,
    nvrtc: &Library,
    cache: Option<&Path>,
) -> Result<Vec<Vec<u8>>, BoxedError> {
    let next = AtomicUsize::new(0);
    let codes: Vec<OnceLock<_>> = units.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        while let Some((unit, code)) = units.iter().zip(&codes).nth(next.fetch_add(1, Relaxed)) {
            _ = code.set(cubin(*unit, target, nvrtc, cache));
        }
    };
    thread::scope(|scope| {
        for _ in 1..machine::cores().min(units.len()) {
            // With fewer threads it takes longer.
            _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    codes.into_iter().map(|code| code.into_inner().expect("a thread took it")).collect()
}

/// Machine code of a unit for a target, from the cache folder if it is there.
///
/// # Errors
/// The compiler does not know the architecture, or refuses the text.
fn cubin(
    Unit { name, text, part }: Unit<'_>,
    target: Target,
    nvrtc: &Library,
    cache: Option<&Path>,
) -> Result<Vec<u8>, BoxedError> {
    let Target { dtype, architecture } = target;
    let (major, minor) = nvrtc.version.expect("it is loaded");
    let all = [PRELUDE, text].join("\n");
    let mut options = vec![
        format!("--gpu-architecture=sm_{architecture}"),
        "--std=c++17".into(),
        "--fmad=true".into(),
        element(dtype).into(),
    ];
    options.extend(part.map(|part| format!("-DONLY={part}")));
    let identity = format!("{} {all} {major}.{minor}", options.join(" "));
    let file = format!("{name}-{architecture}-{:016x}.cubin", xxh3_64(identity.as_bytes()));
    let path = cache.map(|folder| folder.join(file));
    if let Some(code) = path.as_ref().and_then(|path| fs::read(path).ok()) {
        // A file that a kill cut off does not end with its digest.
        if let Some((code, digest)) = code.split_last_chunk::<8>()
            && xxh3_64(code).to_le_bytes() == *digest
        {
            return Ok(code.to_vec());
        }
    }
    let known = architectures();
    if !known.is_empty() && !known.contains(&architecture) {
        let is_older = known.iter().all(|one| architecture < *one);
        let install = match is_older {
            true => {
                "install CUDA 12's libraries, which know it (`pip install \
                     nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12`), instead of these"
            }
            false => "install a newer one",
        };
        return Err(format!(
            "NVRTC {major}.{minor} does not know sm_{architecture}, only {known:?}: {install}"
        )
        .into());
    }
    let mut code = compile(name, &all, &options)?;
    if let (Some(folder), Some(path)) = (cache, path) {
        let digest = xxh3_64(&code).to_le_bytes();
        code.extend(digest);
        // Without a folder to keep it in it is compiled again next time.
        _ = fs::create_dir_all(folder).and_then(|()| fs::write(path, &code));
        code.truncate(code.len() - digest.len());
    }
    Ok(code)
}

/// The architectures that the compiler knows; empty if it does not say.
fn architectures() -> Vec<u32> {
    let mut count = 0;
    // SAFETY: the library is loaded, and writes no more than the places that it is given.
    unsafe {
        if sys::nvrtcGetNumSupportedArchs(&mut count).result().is_err() {
            return Vec::new();
        }
        let mut all = vec![0; count as usize];
        match sys::nvrtcGetSupportedArchs(all.as_mut_ptr()).result() {
            Ok(()) => all.into_iter().map(|one| one as u32).collect(),
            Err(_) => Vec::new(),
        }
    }
}

fn compile(name: &str, text: &str, options: &[String]) -> Result<Vec<u8>, BoxedError> {
    let text = CString::new(text)?;
    let file = CString::new(format!("{name}.cu"))?;
    let failed = |what: sys::nvrtcResult| -> BoxedError { format!("NVRTC: {what:?}").into() };
    let program = result::create_program(&text, Some(&file)).map_err(|error| failed(error.0))?;
    // SAFETY: the program is there until it is destroyed below.
    unsafe {
        let compiled = result::compile_program(program, options);
        let code = compiled.map_err(|error| {
            let log = result::get_program_log(program).unwrap_or_default();
            let log: Vec<u8> = log.into_iter().map(|c: c_char| c as u8).collect();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
            format!("NVRTC: {:?}: {log}", error.0).into()
        });
        let code = code.and_then(|()| {
            let mut size = 0;
            sys::nvrtcGetCUBINSize(program, &mut size).result().map_err(|error| failed(error.0))?;
            let mut code = vec![0_u8; size];
            let to = code.as_mut_ptr().cast();
            sys::nvrtcGetCUBIN(program, to).result().map_err(|error| failed(error.0))?;
            Ok(code)
        });
        _ = result::destroy_program(program);
        code
    }
}
