//! `l2l doctor`: what this machine has for training.

use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::{ByteSize, Format};
use l2l::{Error, machine};
use serde_json::{Value, json};

use super::print;

/// Libraries of a CUDA device, without version, and what each is for.
const LIBRARIES: [(&str, &str); 4] = [
    ("libcuda.so", "the driver: install NVIDIA's"),
    ("libnvrtc.so", "kernels: install CUDA's nvrtc"),
    ("libcublas.so", "products: install CUDA's cublas"),
    ("libcublasLt.so", "products: install CUDA's cublas"),
];

pub(super) fn doctor(format: Format) -> Result<(), Error> {
    let threads = machine::cores();
    let product = machine::product_flops_per_second(threads)?;
    let stream = machine::stream_bytes_per_second(threads)?;
    let disk = machine::disk_bytes_per_second(&std::env::temp_dir());
    let found = LIBRARIES.map(|(name, purpose)| (name, purpose, find(name)));
    if format == Format::Json {
        let cuda = found.iter().map(|(name, _, path)| (name.to_string(), json!(path)));
        print(json!({
            "event": "doctor",
            "cores": threads,
            "vector_instructions": machine::vector_instructions(),
            "memory_bytes": machine::total_memory(),
            "available_memory_bytes": machine::available_memory(),
            "matmul_flops_per_second": product,
            "stream_bytes_per_second": stream,
            "disk_write_bytes_per_second": disk.as_ref().ok().map(|(write, _)| write),
            "disk_read_bytes_per_second": disk.as_ref().ok().map(|(_, read)| read),
            "cuda_libraries": cuda.collect::<serde_json::Map<String, Value>>(),
        }));
        return Ok(());
    }
    let line = |what: &str, is: String| print(format_args!("{what:<22} {is}"));
    let size =
        |bytes: Option<u64>| bytes.map_or("unknown".into(), |b| ByteSize::from(b).to_string());
    line("cores", threads.to_string());
    line("vector instructions", machine::vector_instructions().into());
    line("memory", size(machine::total_memory()));
    line("  available", size(machine::available_memory()));
    line("product of matrices", format!("{:.0} GFLOP/s, f32, {threads} threads", product / 1e9));
    line("memory stream", format!("{:.1} GB/s, {threads} threads", stream / 1e9));
    match disk {
        Ok((write, read)) => {
            let place = std::env::temp_dir();
            let place = place.display();
            line(
                "disk",
                format!("{:.2} GB/s written, {:.2} read, {place}", write / 1e9, read / 1e9),
            );
        }
        Err(error) => line("disk", format!("not measured: {error}")),
    }
    for (name, purpose, path) in found {
        match path {
            Some(path) => line(name, path.display().to_string()),
            None => line(name, format!("not found ({purpose})")),
        }
    }
    line("cuda", "this program has no CUDA device yet".into());
    Ok(())
}

/// A library of this name, in any version, where loaders look.
fn find(name: &str) -> Option<PathBuf> {
    let listed = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/cuda/lib64",
        "/usr/local/lib",
    ];
    let usual = usual.iter().map(|folder| Path::new(folder).to_path_buf());
    std::env::split_paths(&listed).chain(usual).find_map(|folder| {
        let files = fs::read_dir(folder).ok()?;
        files.flatten().map(|file| file.path()).find(|path| {
            let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
            file.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    })
}
