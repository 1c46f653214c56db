//! CUDA on a machine without a GPU: the refusal says what is missing or too old, and what to
//! install.
//!
//! The test builds small libraries that know little but their version.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

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

/// What `doctor` reports and how it ends, with these folders on the loader's path.
fn doctor(path: &str, more: &[&str]) -> (Value, Output) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_l2l"));
    command.args(["doctor", "--format", "json"]).args(more).env("LD_LIBRARY_PATH", path);
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    (serde_json::from_str(&text).expect("an object"), output)
}

/// A driver that fails, or a GPU that a config asks for and cannot be used, is told with its reason
/// in both formats, and the command does not end with status 0. A machine without a GPU is well.
#[test]
fn doctor_tells_why_a_gpu_cannot_be_used() {
    if !l2l::devices::gpus().unwrap_or_default().is_empty() {
        return; // here a GPU can be used
    }
    let folder = tempfile::tempdir().expect("a place for files");
    let folder = folder.path();
    let path = folder.display().to_string();
    let (report, output) = doctor(&path, &[]);
    assert_eq!((&report["gpu_error"], &report["disk_error"]), (&Value::Null, &Value::Null));
    assert_eq!(output.status.code(), Some(0));
    let ends_with = |more: &[&str], says: &str| {
        let (report, output) = doctor(&path, more);
        let reason = report["gpu_error"].as_str().expect("a reason");
        assert!(reason.contains(says), "{reason}");
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains(reason));
    };
    ends_with(&["--set", "device.kind=cuda"], "libcuda.so is not there");
    if library(folder, "libcuda.so", &driver(13000, 100)) {
        ends_with(&[], "CUDA_ERROR_NO_DEVICE");
    }
}

/// CUDA's toolkit has a library in place of the driver's, of which every call fails.
const STUB: &str = "
int cuDriverGetVersion(int *version) { return 34; }
int cuInit(unsigned flags) { return 34; }
int cuGetErrorName(int error, const char **name) { return 34; }
int cuGetErrorString(int error, const char **text) { return 34; }
";

/// The toolkit's folder of stubs is left out of the loader's path. A stub elsewhere is named.
#[test]
fn the_drivers_library_is_found_behind_stubs() {
    let folder = tempfile::tempdir().expect("a place for files");
    let stubs = folder.path().join("lib64/stubs");
    let own = folder.path().join("driver");
    std::fs::create_dir_all(&stubs).expect("room on a disk");
    std::fs::create_dir(&own).expect("room on a disk");
    if !library(&stubs, "libcuda.so", STUB) {
        return;
    }
    assert!(library(&own, "libcuda.so.1", &driver(13000, 100)));
    let path = format!("{}:{}", stubs.display(), own.display());
    let (report, _) = doctor(&path, &[]);
    let found = &report["cuda_libraries"]["libcuda.so"];
    let expected = own.join("libcuda.so.1").display().to_string();
    assert_eq!((&found["version"], &found["path"]), (&"13.0".into(), &expected.into()));
    let elsewhere = folder.path().join("elsewhere");
    std::fs::rename(&stubs, &elsewhere).expect("a folder of ours");
    let error = said(&elsewhere, &[]);
    let file = elsewhere.join("libcuda.so").display().to_string();
    assert!(error.contains(&format!("libcuda.so is {file}, which does not tell")), "{error}");
}

/// A driver of one GPU that loads no code.
const GPU: &str = "
#include <stddef.h>
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) { name[0] = 0; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int *to, int which, int device) { *to = which == 75 ? 9 : 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *all) { *free = *all = (size_t)70 << 30; return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)2; return 0; }
int cuStreamDestroy_v2(void *stream) { return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuModuleLoadData(void **module, const void *image) { return 201; }
int cuGetErrorName(int error, const char **name) { *name = \"NOTHING\"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = \"no code is loaded\"; return 0; }
";

/// The plan of a run on a GPU: layers fill what the driver says is free, less 1 GiB. Without a GPU,
/// or where its memory is the host's, the plan says that it does not know.
#[test]
fn a_plan_fills_what_a_gpu_has_free() {
    if !l2l::devices::gpus().unwrap_or_default().is_empty() {
        return; // here another driver answers
    }
    let folder = tempfile::tempdir().expect("a place for files");
    let folder = folder.path();
    let planned = |more: &[&str], format: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_l2l"));
        command.args(["plan", "--format", format, "--set", "device.kind=cuda"]);
        command.args(["--set", "data.train=random", "--set", "schedule.recompute=auto"]);
        command.args(more).current_dir(folder);
        let output = command.env("LD_LIBRARY_PATH", folder).output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let unknown = "the free memory of the GPU is not known here";
    assert!(planned(&[], "pretty").contains(unknown));
    if !library(folder, "libcuda.so", GPU) {
        return;
    }
    let event = |more: &[&str]| -> Value {
        serde_json::from_str(&planned(more, "json")).expect("an object")
    };
    let plan = event(&[]);
    let ceiling: u64 = 69 << 30;
    assert_eq!(plan["kept_layers"]["ceiling_bytes"], ceiling);
    assert_eq!(plan["kept_layers"]["count"], plan["kept_layers"]["of"]);
    assert_eq!(plan["no_kept_layers"], Value::Null);
    let text = planned(&[], "pretty");
    let says = format!("(of {ceiling} that are free, without 1 GiB for the driver)");
    assert!(text.contains(&says), "{text}");
    let constant = event(&["--set", "schedule.recompute=true"]);
    assert_eq!(
        (&constant["kept_layers"], &constant["no_kept_layers"]),
        (&Value::Null, &Value::Null)
    );
    let ranks = event(&["--ranks", "2", "--set", "parallel.groups=2"]);
    assert_eq!(ranks["kept_layers"], Value::Null);
    let why = ranks["no_kept_layers"].as_str().expect("a reason");
    assert!(why.contains("several ranks may share a GPU"), "{why}");
    // Number 18 is CU_DEVICE_ATTRIBUTE_INTEGRATED.
    let integrated = GPU.replace("which == 75 ? 9 : 0", "which == 75 ? 9 : which == 18");
    assert!(library(folder, "libcuda.so", &integrated));
    assert!(planned(&[], "pretty").contains(unknown));
}

/// NVRTC compiles all kernels from a Python package, outside of the loader's path. `.ci/kernels`
/// installs packages, and names their folders in a variable.
#[test]
fn nvrtc_of_python_packages_compiles_all_kernels() {
    let Ok(folders) = std::env::var("L2L_NVRTC") else { return };
    let mut dtypes = vec![("f32", 7)];
    dtypes.extend(crate::whole().then_some(("bf16", 13)));
    for of_nvrtc in folders.split(':') {
        let folder = tempfile::tempdir().expect("a place for files");
        let folder = folder.path();
        assert!(library(folder, "libcuda.so", GPU), "a C compiler");
        let products = "unsigned long cublasLtGetVersion(void) { return 120000; }";
        assert!(library(folder, "libcublasLt.so", products));
        let kernels = folder.join("kernels");
        let cache = format!("device.kernel_cache={}", kernels.display());
        let libraries = format!("device.cuda_libraries={of_nvrtc}");
        for &(dtype, parts) in &dtypes {
            let dtype = format!("device.dtype={dtype}");
            let sets = ["--set", &cache, "--set", &libraries, "--set", &dtype];
            let error = said(folder, &sets);
            assert!(error.contains("no code is loaded"), "{of_nvrtc}: {error}");
            let files = std::fs::read_dir(&kernels).expect("the cache");
            let names = files.map(|file| file.expect("the cache").file_name());
            let names: Vec<String> = names.map(|name| name.to_string_lossy().into()).collect();
            let of = |text: &str| names.iter().filter(|name| name.starts_with(text)).count();
            assert_eq!((of("attention-"), of("norm-")), (parts, 1), "{names:?}");
            std::fs::remove_dir_all(&kernels).expect("the cache");
        }
    }
}

const DRIVER: &str = "
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return ERROR; }
int cuGetErrorName(int error, const char **name) { *name = \"CUDA_ERROR_NO_DEVICE\"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = \"no device\"; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return 0; }
int cuDeviceGet(int *device, int ordinal) { return 101; }
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
