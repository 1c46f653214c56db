"""The machine: what it is, what it has free, its rates, and how long the first start takes."""

import importlib.metadata
import pathlib
import platform
import resource
import shutil
import sys

SMI = ("name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,power.draw,"
       "power.limit,temperature.gpu,ecc.mode.current,compute_mode,pcie.link.gen.current,"
       "pcie.link.width.current")
PACKAGES = ["torch", "nvidia-cuda-nvrtc", "nvidia-cublas", "nvidia-cuda-nvrtc-cu12",
            "nvidia-cublas-cu12"]
# Lines of /proc/meminfo, by how they begin.
MEMORY = ("Mem", "Swap", "Cached", "Commit", "Mlocked", "Unevictable", "Huge", "AnonHuge", "Shmem")
TOOLS = ["nvidia-smi", "compute-sanitizer", "ncu", "nvcc"]


def run(bench):
    bench.row("this machine", platform.platform(), memory=memory(), gpu=gpu(bench),
              versions=versions(), processor=processor())
    doctor = bench.program.machine
    rates = doctor.get("gpu_rates") or {}
    met = (doctor["status"] == 0 and bool(rates)) if bench.flags.kind == "cuda" else None
    if met is False:
        bench.row("the GPU", f"failed: {doctor['why']}", met=False)
    # The first start compiles kernels, unless compiled ones were carried here.
    bench.row("doctor, with the first start", doctor["seconds"], "s", met=met, **doctor)
    for how in ("pinned", "pageable"):
        if both := rates.get(f"{how}_bytes_per_second"):
            both = " and ".join(f"{rate / 1e9:.1f}" for rate in both)
            bench.row(f"link, {how}", both, "GB/s up and down")
    for name, of in (("a large product", rates), ("a large product of the host, f32", doctor)):
        if rate := of.get("matmul_flops_per_second"):
            bench.row(name, rate / 1e12, "TFLOP/s")
    for name in ("adamw", "adamw_bf16"):
        rate, stream = (doctor.get(f"{of}_bytes_per_second") for of in (name, "stream"))
        if rate and stream:
            bench.row(f"{name} / the memory's stream", rate / stream, target=">= 0.8",
                      gigabytes_per_second=rate / 1e9)


def memory():
    """/proc/meminfo in its own words, and what a process may pin."""
    found = {}
    for line in read("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name.startswith(MEMORY):
            found[name] = value.strip()
    huge = read("/sys/kernel/mm/transparent_hugepage/enabled").strip()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    free = {folder: shutil.disk_usage(folder).free for folder in ("/tmp", ".")}
    return {**found, "transparent_hugepages": huge, "locked_limit": limit, "free_disk_bytes": free}


def gpu(bench):
    """The card's clocks, power, heat and link, as nvidia-smi names them."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi"
    argv = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
    ended = bench.commands.run("nvidia-smi", argv, 30)
    if ended.status != 0:
        return f"nvidia-smi: {ended.says}"
    bench.commands.run("nvidia-smi -q", ["nvidia-smi", "-q"], 30)
    return [dict(zip(SMI.split(","), line.split(", "))) for line in ended.says.splitlines()]


def versions():
    found = {"python": sys.version.split()[0], "libc": " ".join(platform.libc_ver())}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return {**found, "tools": [name for name in TOOLS if shutil.which(name)]}


def processor():
    lines = read("/proc/cpuinfo").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"name": names[0] if names else platform.processor(), "threads": len(names)}


def read(path):
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""
