//! Finds CUDA's libraries, or says what to install. They are loaded when a config asks for CUDA,
//! and not before.

use std::borrow::Cow;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::devices::Library as Found;
use cudarc::{cublaslt, driver, nvrtc};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// The oldest CUDA of the driver (525) and of its libraries.
const OLDEST: (u32, u32) = (12, 0);

const INSTALL: [(&str, &str); 3] = [
    ("libcuda.so", "install NVIDIA's driver, 525 or newer"),
    (
        "libnvrtc.so",
        "install CUDA's nvrtc, or `pip install nvidia-cuda-nvrtc` (`nvidia-cuda-nvrtc-cu12` for a \
         driver before 580) and set device.cuda_libraries to that environment's \
         site-packages/nvidia",
    ),
    (
        "libcublasLt.so",
        "install CUDA's cublas, or `pip install nvidia-cublas` (`nvidia-cublas-cu12` for a driver \
         before 580) and set device.cuda_libraries to that environment's site-packages/nvidia",
    ),
];

/// The driver, NVRTC and cuBLASLt, looked for on the loader's path, then in a folder. Without one,
/// it is that of the Python environment which the program is installed in.
pub(in crate::devices) fn libraries(folder: Option<&Path>) -> [Found; 3] {
    let program = env::current_exe().ok();
    let beside = || program.as_deref().and_then(wheels_beside).map(Cow::Owned);
    let folder = folder.map(Cow::Borrowed).or_else(beside);
    let folder = folder.as_deref();
    // SAFETY: loading a library runs its initializers, which are NVIDIA's.
    let present: [fn() -> bool; 3] = unsafe {
        [
            || driver::sys::is_culib_present(),
            || nvrtc::sys::is_culib_present(),
            || cublaslt::sys::is_culib_present(),
        ]
    };
    let mut index = 0;
    INSTALL.map(|(name, install)| {
        let is_present = present[index];
        let is_there = is_present()
            || (index > 0 && folder.is_some_and(|folder| load(folder, name, 4)) && is_present());
        let version = is_there.then(|| version(index)).flatten();
        index += 1;
        Found { name, path: is_there.then(|| loaded(name)).flatten(), version, install }
    })
}

/// The folder of NVIDIA's wheels in the Python environment of a program: `bin/l2l` beside
/// `lib/python3.12/site-packages/nvidia`. The pip of Debian and Ubuntu installs into
/// `/usr/local/lib/python3.12/dist-packages` where there is no virtual environment.
fn wheels_beside(program: &Path) -> Option<PathBuf> {
    let lib = program.parent()?.parent()?.join("lib");
    let versions = fs::read_dir(lib).ok()?.flatten();
    let is_python =
        |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b"python");
    let folders = versions.filter(is_python).flat_map(|entry| {
        ["site-packages", "dist-packages"]
            .map(|packages| entry.path().join(packages).join("nvidia"))
    });
    folders.filter(|folder| folder.is_dir()).max()
}

/// The library that NVRTC opens by name when it first compiles. That of CUDA 13.0 does not look for
/// it in its own folder.
const BUILT_INS: &str = "libnvrtc-builtins.so";

/// Loads the first library of a name, in any version, from a folder or not too deep below it. Then
/// the loader knows it by its name alone. So it does NVRTC's built-ins, which are loaded first.
fn load(folder: &Path, name: &str, depth: usize) -> bool {
    let mut files = Vec::new();
    let mut built_ins = Vec::new();
    let mut folders = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let file = entry.file_name();
        let is_called = |name: &str| {
            let rest = file.to_str().and_then(|file| file.strip_prefix(name));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        if path.is_dir() {
            folders.push(path);
        } else if is_called(name) {
            files.push(path);
        } else if is_called(BUILT_INS) {
            built_ins.push(path);
        }
    }
    files.sort();
    folders.sort();
    let loads = |path: &PathBuf| {
        // SAFETY: as above; it stays for as long as the program.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
        library.map(std::mem::forget).is_ok()
    };
    if name.starts_with("libnvrtc") && !files.is_empty() {
        built_ins.iter().for_each(|path| _ = loads(path));
    }
    files.iter().any(loads) || depth > 0 && folders.iter().any(|one| load(one, name, depth - 1))
}

/// The path of a library that this process has loaded.
fn loaded(name: &str) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let mut of_name =
        paths.filter(|path| path.rsplit('/').next().is_some_and(|f| f.starts_with(name)));
    of_name.next().map(PathBuf::from)
}

/// The version of the driver (0), NVRTC (1) or cuBLASLt (2), if it can be loaded.
fn version(index: usize) -> Option<(u32, u32)> {
    let mut major = 0;
    let mut minor = 0;
    // SAFETY: the library is loaded, and each call writes no more than the places that it is given.
    unsafe {
        match index {
            0 => {
                driver::sys::cuDriverGetVersion(&mut major).result().ok()?;
                (major, minor) = (major / 1000, major % 1000 / 10);
            }
            1 => nvrtc::sys::nvrtcVersion(&mut major, &mut minor).result().ok()?,
            _ => {
                let version = cublaslt::sys::cublasLtGetVersion() as i32;
                (major, minor) = (version / 10_000, version / 100 % 100);
            }
        }
    }
    Some((major as u32, minor as u32))
}

/// Loads all three libraries, of versions that go together.
///
/// # Errors
/// A library is missing or too old. The error names it, and says what to do.
pub(super) fn load_all(folder: Option<&Path>) -> Result<[Found; 3], String> {
    if let Some(folder) = folder {
        let unreadable = |error| format!("device.cuda_libraries {}: {error}", folder.display());
        fs::read_dir(folder).map_err(unreadable)?;
    }
    let found = libraries(folder);
    for library in &found {
        let Found { name, version, install, .. } = library;
        let Some(version) = version else {
            return Err(format!("{name} {}", library.problem().unwrap_or_default()));
        };
        let (major, minor) = version;
        let driver = found[0].version.expect("it is the first that is looked at");
        if *version < OLDEST {
            return Err(format!(
                "{name} is of CUDA {major}.{minor}, and has to be of at least {}.{}: {install}",
                OLDEST.0, OLDEST.1
            ));
        }
        if driver.0 < *major {
            return Err(format!(
                "the driver is of CUDA {}.{} and {name} of {major}.{minor}: install a newer \
                 driver, or CUDA's libraries of version {}",
                driver.0, driver.1, driver.0
            ));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_found_beside_the_program() {
        let environment = tempfile::tempdir().expect("a place for files");
        let program = environment.path().join("bin/l2l");
        assert_eq!(wheels_beside(&program), None);
        let lib = environment.path().join("lib");
        fs::create_dir_all(lib.join("python3.11/site-packages")).expect("written");
        fs::create_dir_all(lib.join("other/site-packages/nvidia")).expect("written");
        assert_eq!(wheels_beside(&program), None);
        let wheels = lib.join("python3.11/site-packages/nvidia");
        fs::create_dir(&wheels).expect("written");
        assert_eq!(wheels_beside(&program), Some(wheels));
        let of_debian = lib.join("python3.13/dist-packages/nvidia");
        fs::create_dir_all(&of_debian).expect("written");
        assert_eq!(wheels_beside(&program), Some(of_debian));
        assert_eq!(wheels_beside(Path::new("l2l")), None);
    }
}
