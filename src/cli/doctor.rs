//! `l2l doctor`: reports what this machine has for training, and how fast it is.

use std::time::SystemTime;

use l2l::config::{ByteSize, Format};
use l2l::{Error, devices, eps, machine, optimizers};
use serde_json::{Value, json};

use super::{Common, print};

/// Compares every kernel of the GPU with the CPU's.
pub(super) fn check(common: &Common) -> Result<(), Error> {
    let (config, _) = common.read(None, None)?;
    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seed = seed.map_or(0, |time| time.as_nanos() as u64);
    let checks = devices::check_kernels(&config, seed)?;
    for devices::Check { kernel, cases, off, most } in &checks {
        if config.log.format == Format::Json {
            print(json!({
                "event": "check",
                "kernel": kernel,
                "cases": cases,
                "off": off,
                "dtype": config.device.dtype,
                "tolerance": most,
                "seed": seed,
            }));
        } else {
            print(format_args!("{kernel:<26} {cases:>3} sizes, largest deviation {off:.1e}"));
        }
    }
    devices::Check::judge(&checks)
}

pub(super) fn doctor(common: &Common) -> Result<(), Error> {
    let (config, _) = common.read(None, None)?;
    let format = config.log.format;
    let threads = machine::cores();
    let product = devices::product_flops_per_second(threads)?;
    let stream = optimizers::stream_bytes_per_second(threads)?;
    let updates = [false, true].map(|split| optimizers::update_bytes_per_second(threads, split));
    let [update, update_split] = [&updates[0], &updates[1]].map(|rate| rate.as_ref().ok());
    let disk = eps::disk_bytes_per_second(&std::env::temp_dir());
    let found = devices::cuda_libraries(config.device.cuda_libraries.as_deref());
    let gpus = devices::gpus();
    let has_gpu = gpus.as_ref().is_ok_and(|gpus| !gpus.is_empty());
    let rates = has_gpu.then(|| devices::gpu_rates(&config));
    if format == Format::Json {
        let cuda = found.iter().map(|one| {
            let version = one.version.map(|(major, minor)| format!("{major}.{minor}"));
            (one.name.to_string(), json!({ "path": one.path, "version": version }))
        });
        let gpus = gpus.as_deref().unwrap_or_default().iter().map(|gpu| {
            json!({
                "name": gpu.name,
                "architecture": gpu.architecture,
                "memory_bytes": gpu.memory,
            })
        });
        print(json!({
            "event": "doctor",
            "cores": threads,
            "vector_instructions": machine::vector_instructions(),
            "memory_bytes": machine::total_memory(),
            "available_memory_bytes": machine::available_memory(),
            "matmul_flops_per_second": product,
            "stream_bytes_per_second": stream,
            "adamw_bytes_per_second": update,
            "adamw_bf16_bytes_per_second": update_split,
            "disk_write_bytes_per_second": disk.as_ref().ok().map(|(write, _)| write),
            "disk_read_bytes_per_second": disk.as_ref().ok().map(|(_, read)| read),
            "cuda_libraries": cuda.collect::<serde_json::Map<String, Value>>(),
            "gpus": gpus.collect::<Vec<Value>>(),
            "gpu_rates": rates.and_then(Result::ok).map(|rates| json!({
                "pageable_bytes_per_second": rates.pageable,
                "pinned_bytes_per_second": rates.pinned,
                "matmul_flops_per_second": rates.product,
                "dtype": config.device.dtype,
            })),
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
    line("matrix product", format!("{:.0} GFLOP/s, f32, {threads} threads", product / 1e9));
    line("memory stream", format!("{:.1} GB/s, {threads} threads", stream / 1e9));
    if let (Some(update), Some(split)) = (update, update_split) {
        let [of, of_split] = [update, split].map(|rate| rate / 1e9);
        let told = format!("{of:.1} GB/s; with device.dtype = \"bf16\" {of_split:.1}");
        line("  AdamW's update", told);
    }
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
    for devices::Library { name, path, version, install } in &found {
        let place = path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        line(
            name,
            match version {
                Some((major, minor)) => format!("{major}.{minor} {place}"),
                None => format!("not found: {install}"),
            },
        );
    }
    match gpus {
        Ok(gpus) if gpus.is_empty() && found.is_empty() => {
            line("cuda", "this program was built without the feature cuda".into());
        }
        Ok(gpus) if gpus.is_empty() => line("cuda", "no device".into()),
        Ok(gpus) => {
            for (ordinal, devices::Gpu { name, architecture, memory }) in gpus.iter().enumerate() {
                let memory = ByteSize::from(*memory);
                line(
                    &format!("cuda device {ordinal}"),
                    format!("{name}, sm_{architecture}, {memory}"),
                );
            }
        }
        Err(error) => line("cuda", error.to_string()),
    }
    match rates {
        Some(Ok(devices::GpuRates { pageable, pinned, product })) => {
            let told = |[up, down]: [f64; 2]| format!("{:.1} up, {:.1} down", up / 1e9, down / 1e9);
            let pinned = pinned.map_or("not available".into(), told);
            line("  link, GB/s", format!("pinned {pinned}; pageable {}", told(pageable)));
            line("  product", format!("{:.1} TFLOP/s, {}", product / 1e12, config.device.dtype));
        }
        Some(Err(error)) => line("  not usable", error.to_string()),
        None => {}
    }
    Ok(())
}
