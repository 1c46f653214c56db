"""The machine code of attention's kernels, disassembled: products on tensor cores (HMMA), matrices read from shared
memory (LDSM), copies of 16 bytes to it (LDGSTS); and how many blocks an SM runs at once. `table` counts; `check`
compares with kernels_sass.json, which `kernels.py --write` writes anew.
"""

import importlib.metadata
import json
import pathlib
import re
import subprocess
import tempfile

GOLDEN = pathlib.Path(__file__).resolve().parent / "kernels_sass.json"
# Of an SM: registers, bytes of shared memory, threads; and bytes of shared memory that each block takes itself.
SM = {80: (65536, 164 << 10, 2048, 1 << 10), 90: (65536, 228 << 10, 2048, 1 << 10)}
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
COUNTED = {
    "HMMA": r"HMMA\b",
    "LDSM": r"LDSM\b",
    "LDGSTS of 16 bytes": r"LDGSTS\b.*\.128",
}


def nvdisasm():
    """The disassembler of the Python package, or none."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm")
    except importlib.metadata.PackageNotFoundError:
        return None
    return next(f.locate() for f in files if f.name == "nvdisasm")


def instructions(cubin):
    """The instructions of each kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm(), "--print-code", file.name]
        text = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    parts = re.split(r"^\s*\.text\.(\w+):\s*$", text, flags=re.MULTILINE)
    return {name: INSTRUCTION.findall(code) for name, code in zip(parts[1::2], parts[2::2])}


def blocks(architecture, threads, registers, shared):
    """Blocks that an SM runs at once."""
    all_registers, all_shared, all_threads, own = SM[architecture]
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = all_registers // (of_warp * (threads // 32))
    return min(by_registers, all_shared // (shared + own), all_threads // threads)


def table(cubin, architecture, used, launches):
    """What is counted of each kernel whose block has a size of its own."""
    rows = {}
    for name, code in instructions(cubin).items():
        shape = launches.get(name, "")
        threads = re.search(r"block \((\d+)\)", shape)
        if name not in used or threads is None:
            continue
        shared = re.search(r"shared (\d+) bytes", shape)
        shared = used[name]["shared"] + int(shared[1] if shared else 0)
        row = {what: sum(bool(re.match(how, one)) for one in code) for what, how in COUNTED.items()}
        row["blocks of an SM"] = blocks(architecture, int(threads[1]), used[name]["registers"], shared)
        rows[name] = row
    return rows


def check(found, write):
    """Whether all is as committed; prints what is not."""
    if write:
        rows = (f"{json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(found.items()))
        GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        return True
    expected, well = json.loads(GOLDEN.read_text("utf-8")), True
    for key in sorted(set(found) | set(expected)):
        if found.get(key) != expected.get(key):
            print(f"{key}: {found.get(key)}, committed: {expected.get(key)} (--write commits)")
            well = False
    return well
