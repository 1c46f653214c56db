//! CUDA on a machine without a GPU: the refusal says what is missing or too old, and what to
//! install.
//!
//! The test builds small libraries that know little but their version.

use std::path::Path;
use std::process::Command;

/// Builds a library. False when there is no compiler.
fn library(folder: &Path, name: &str, text: &str) -> bool {
    let source = folder.join("library.c");
    let made = folder.join(name);
    std::fs::write(&source, text).expect("room on a disk");
    let compiler =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(made).arg(source).status();
    compiler.is_ok_and(|status| status.success())
}

/// The refusal of `train` on CUDA with these libraries.
fn said(folder: &Path, more: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_l2l"));
    command.args(["train", "--set", "device.kind=cuda"]).args(more).current_dir(folder);
    let output = command.env("LD_LIBRARY_PATH", folder).output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.starts_with("error: device.kind = \"cuda\": "), "{error}");
    error
}

const DRIVER: &str = "
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return ERROR; }
int cuGetErrorName(int error, const char **name) { *name = \"CUDA_ERROR_NO_DEVICE\"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = \"no device\"; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return 0; }
";

fn driver(version: u32, error: u32) -> String {
    DRIVER.replace("VERSION", &version.to_string()).replace("ERROR;", &format!("{error};"))
}

#[test]
fn what_is_missing_is_said() {
    if !l2l::devices::gpus().unwrap_or_default().is_empty() {
        return; // here nothing is missing
    }
    let folder = tempfile::tempdir().expect("a place for files");
    let folder = folder.path();
    let error = said(folder, &[]);
    assert!(error.contains("libcuda.so is not there") && error.contains("driver"), "{error}");
    if !library(folder, "libcuda.so", &driver(13000, 100)) {
        return;
    }
    let error = said(folder, &[]);
    assert!(error.contains("libnvrtc.so is not there"), "{error}");
    assert!(error.contains("device.cuda_libraries"), "{error}");
    let nvrtc = "int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }";
    let wheels = folder.join("wheels").join("cuda_nvrtc").join("lib");
    std::fs::create_dir_all(&wheels).expect("room on a disk");
    // As in a wheel: outside the loader's path, with a version in the file name and in the library.
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,-soname,libnvrtc.so.13", "-x", "c", "-o"])
        .arg(wheels.join("libnvrtc.so.13"))
        .arg({
            let source = folder.join("nvrtc.c");
            std::fs::write(&source, nvrtc).expect("room on a disk");
            source
        })
        .status();
    assert!(made.is_ok_and(|status| status.success()));
    let set = format!("device.cuda_libraries={}", folder.join("wheels").display());
    let set = ["--set", set.as_str()];
    let error = said(folder, &set);
    assert!(error.contains("libcublasLt.so is not there"), "{error}");
    let nowhere = said(folder, &["--set", "device.cuda_libraries=/nowhere"]);
    assert!(nowhere.contains("device.cuda_libraries /nowhere: "), "{nowhere}");
    let products = "unsigned long cublasLtGetVersion(void) { return 130000; }";
    assert!(library(folder, "libcublasLt.so", products));
    assert!(library(folder, "libcuda.so", &driver(11080, 100)));
    let error = said(folder, &set);
    assert!(
        error.contains("libcuda.so is of CUDA 11.8, and has to be of at least 12.0"),
        "{error}"
    );
    assert!(library(folder, "libcuda.so", &driver(12040, 100)));
    let error = said(folder, &set);
    assert!(error.contains("the driver is of CUDA 12.4 and libnvrtc.so of 13.0"), "{error}");
    let older = "unsigned long cublasLtGetVersion(void) { return 111103; }";
    assert!(
        library(folder, "libcublasLt.so", older)
            && library(folder, "libcuda.so", &driver(13000, 100))
    );
    let error = said(folder, &set);
    assert!(error.contains("libcublasLt.so is of CUDA 11.11, and has to be of at"), "{error}");
    let newer = "unsigned long cublasLtGetVersion(void) { return 140000; }";
    assert!(
        library(folder, "libcublasLt.so", newer)
            && library(folder, "libcuda.so", &driver(13000, 100))
    );
    let error = said(folder, &set);
    assert!(error.contains("the driver is of CUDA 13.0 and libcublasLt.so of 14.0"), "{error}");
    assert!(library(folder, "libcublasLt.so", products));
    let error = said(folder, &set);
    assert!(error.contains("no device") || error.contains("NO_DEVICE"), "{error}");
    assert!(library(folder, "libcuda.so", &driver(13000, 0)));
    let error = said(folder, &set);
    assert!(error.contains("device.ordinal is 0, and the driver has 0 devices"), "{error}");
}
