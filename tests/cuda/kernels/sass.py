"""The machine code of attention's kernels, disassembled: products on tensor cores (HMMA), matrices read from shared
memory (LDSM), copies of 16 bytes to it (LDGSTS); how many blocks an SM runs at once; and how many cycles of an SM one
round of a kernel's main loop takes at least, for each of its pipes, by a warp. `table` counts; `check` compares with
sass.json, which `check.py --write` writes anew.

The cycles are an estimate without a GPU: instructions of the loop, each at the rate of its pipe. Pipes work side by
side, so the busiest says how long a round takes at least. Latencies, and pipes that wait for each other, come on top.
"""

import importlib.metadata
import json
import pathlib
import re
import subprocess
import tempfile

GOLDEN = pathlib.Path(__file__).resolve().parent / "sass.json"
# Of an SM: registers, bytes of shared memory, threads; and bytes of shared memory that each block takes itself.
SM = {80: (65536, 164 << 10, 2048, 1 << 10), 90: (65536, 228 << 10, 2048, 1 << 10)}
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
COUNTED = {
    "HMMA": r"HMMA\b",
    "LDSM": r"LDSM\b",
    "LDGSTS of 16 bytes": r"LDGSTS\b.*\.128",
}

# All rows are aligned.
PACKED = {
    "return count >= N && reinterpret_cast<unsigned long long>(at) % sizeof(Packed<E, N>) == 0;": "return true;",
    "return is_packed<N>(at, count) && channels % N == 0;": "return true;",
}

# What holds in the middle of a long sequence, where nothing is dropped: there is no other code then.
STEADY = {
    "attention": {
        "size.dropout.threshold": "0u",
        "{ return keys.from < last.to && first.from < keys.to; }": "{ return true; }",
        "{ return last.from <= keys.from && keys.to <= first.to; }": "{ return true; }",
        "queries.count() < QUERIES || ": "",
        "const bool is_aligned = ": "const bool is_aligned = true || ",
    },
    # Of long rows, with SiLU.
    "elementwise": {**PACKED, "switch (form)": "switch (SILU)", "dropout.threshold == 0": "true"},
    "norm": {**PACKED, "dropout.threshold == 0": "true"},
    "head_norm": PACKED,
    "rotary": PACKED,
    "rows": PACKED,
    "embedding": {**PACKED, "starts == nullptr": "true"},
    "quantised": PACKED,
    "cross_entropy": {**PACKED, "bias != nullptr": "false", "each != 0.0f": "false"},
}
# Loops over elements; they are compiled without unrolling.
LOOP = re.compile(r"(?:#pragma unroll \d+[^\n]*\n)?( *for \((?:int|long long) (?:column|row|index|part)\b)")
# Bytes that a lane has to move in a round of a kernel's loops: each number once, however often it is read again, and
# without what all rows share. `size`: of an element.
MOVED = {
    "norm_forward": lambda size: 2 * 16,  # x, y
    "residual_norm": lambda size: 4 * 16,  # x, a, sum, y
    "norm_backward": lambda size: 4 * 16,  # dy, x, residual, dx
    "norm_parts": lambda size: 2 * 4 * size,  # dy, x
    "head_norm": lambda size: 2 * 4 * size,  # x, y
    "head_norm_backward": lambda size: 3 * 4 * size,  # dy, x, dx
    "head_norm_parts": lambda size: 2 * 4 * size,  # dy, x
    "rotate": lambda size: 2 * 2 * 4 * size,  # two halves, read and written
    "activate_backward_parts": lambda size: 4 * 3 * 16,  # of four rows: x, dx twice
    "score_rows": lambda size: 16,  # logits
    "score_gradient": lambda size: 16 + 4 * size,  # logits, d
    "column_parts": lambda size: 4 * size,  # x
    "fold": lambda size: 4,  # a part
    "dequantise_nf4": lambda size: 4 + 8 * size,  # codes, y
}
# Bytes of global memory for each cycle of an SM: 2,039 GB/s, 108 SMs and 1.41 GHz; 3,350 GB/s, 132 and 1.755 GHz.
BANDWIDTH = {80: 13.4, 90: 14.5}
# Cycles of an SM for an instruction of a warp, from the rates in the CUDA C++ Programming Guide ("Arithmetic
# Instructions") and 128 bytes of shared memory a cycle. A product on tensor cores is at the data sheet's rate; by
# HMMA, a GPU of sm_90 reaches about 0.63 of it (Luo et al. 2024, arXiv 2402.13499).
PIPES = {
    "tensor": {80: [(r"HMMA\b", 2)], 90: [(r"HMMA\b", 1 / 0.63)]},
    "shared": [(r"LDSM\b.*\.4", 4), (r"LDGSTS\b.*\.128", 4), (r"(LDS|STS)\b.*\.128", 4), (r"(LDS|STS)\b.*\.64", 2),
               (r"LDGSTS\b|LDS\b|STS\b", 1)],
    "special": [(r"MUFU\b", 2)],
    "float": {80: [(r"(FADD|FMUL|FFMA|IMAD)\b", 0.5)], 90: [(r"(FADD|FMUL|FFMA)\b", 0.25), (r"IMAD\b", 0.5)]},
    "integer": [(r"(FMNMX|FSETP|FSEL|F2FP|ISETP|IADD3|LEA|LOP3|SEL|SHF|PRMT|MOV|VIADD|IMNMX|VIMNMX)\b", 0.5)],
    "issue": [(r"", 0.25)],
}


def nvdisasm():
    """The disassembler of the Python package, or none."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm")
    except importlib.metadata.PackageNotFoundError:
        return None
    return next(f.locate() for f in files if f.name == "nvdisasm")


def disassemble(cubin):
    """The text of each kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm(), "--print-code", file.name]
        text = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    parts = re.split(r"^\s*\.text\.(\w+):\s*$", text, flags=re.MULTILINE)
    return {name: code for name, code in zip(parts[1::2], parts[2::2])}


def loops_of(code):
    """The instructions of each loop, with the index of its first."""
    labels, lines = {}, []
    for line in code.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif one := INSTRUCTION.search(line):
            lines.append((one[1], re.search(r"`\(\.(L_x_\d+)\)", line)))
    return [
        (labels[to[1]], [name for name, _ in lines[labels[to[1]] : at + 1]])
        for at, (name, to) in enumerate(lines)
        if name == "BRA" and to and labels[to[1]] < at
    ]


def main_loop(code):
    """The instructions of the loop that has the most products, and of such the shortest."""
    products = lambda loop: sum(name.startswith("HMMA") for name in loop)
    return max((loop for _, loop in loops_of(code)), key=lambda loop: (products(loop), -len(loop)), default=[])


def cycles(loop, architecture):
    """Of each pipe."""
    found = {}
    for pipe, rates in PIPES.items():
        rates = rates[architecture] if isinstance(rates, dict) else rates
        of = lambda name: next((rate for how, rate in rates if re.match(how, name)), 0)
        found[pipe] = round(sum(map(of, loop)))
    return found


def blocks(architecture, threads, registers, shared):
    """Blocks that an SM runs at once."""
    all_registers, all_shared, all_threads, own = SM[architecture]
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = all_registers // (of_warp * (threads // 32))
    return min(by_registers, all_shared // (shared + own), all_threads // threads)


def steady(file, text):
    """A text of which only what holds in the middle of a long sequence is compiled."""
    for of, to in STEADY[file].items():
        assert of in text, f"{file}.cu has no {of}"
        text = text.replace(of, to)
    return text if file == "attention" else LOOP.sub(r"#pragma unroll 1\n\1", text)


def table(cubin, steady_cubin, architecture, used, launches):
    """What is counted of each kernel whose block has a size of its own."""
    rows, loops = {}, disassemble(steady_cubin)
    for name, code in disassemble(cubin).items():
        shape = launches.get(name, "")
        threads = re.search(r"block \((\d+)\)", shape)
        if name not in used or threads is None:
            continue
        shared = re.search(r"shared (\d+) bytes", shape)
        shared = used[name]["shared"] + int(shared[1] if shared else 0)
        found = INSTRUCTION.findall(code)
        row = {what: sum(bool(re.match(how, one)) for one in found) for what, how in COUNTED.items()}
        row["blocks of an SM"] = blocks(architecture, int(threads[1]), used[name]["registers"], shared)
        if row["HMMA"]:
            row["cycles"] = cycles(main_loop(loops[name]), architecture)
        rows[name] = row
    return rows


def streams(steady_cubin, architecture, size):
    """Of each kernel that moves numbers: cycles of an SM that instructions and bytes of a warp take, in a round of its
    loops over elements, where it has any. `size`: bytes of an element."""
    rows = {}
    for name, code in disassemble(steady_cubin).items():
        found = INSTRUCTION.findall(code[: code.rfind("EXIT") + 4])
        is_access = lambda one: re.match(r"(LDG|STG)\b", one)
        if name in MOVED:
            # Innermost loops among those that read or write global memory.
            loops = [(at, loop) for at, loop in loops_of(code) if any(is_access(one) for one in loop)]
            ends = [range(at, at + len(loop)) for at, loop in loops]
            inner = [loop for (at, loop), own in zip(loops, ends) if not any(e.start in own and e != own for e in ends)]
            found, moved = sum(inner, []) or found, 32 * MOVED[name](size)
        else:
            width = lambda one: next((bits // 8 for bits in (128, 64) if f".{bits}" in one), 2 if ".U16" in one else 4)
            moved = 32 * sum(width(one) for one in found if is_access(one))
        if name in MOVED or not main_loop(code):
            rows[name] = {"issue": len(found) // 4, "memory": round(moved / BANDWIDTH[architecture])}
    return rows


def print_streams(found):
    """Where instructions take longer than memory, a kernel is slower than its bound."""
    print("cycles of an SM for a warp: its instructions, and its bytes at the data sheet's rate")
    for key, row in sorted(found.items()):
        if "memory" in row:
            print(f"{key:48}{row['issue']:>6}{row['memory']:>6}")


def print_cycles(found):
    """Beside the bound: the products alone, at the data sheet's rate."""
    print("cycles of an SM for a round of a warp's main loop, by pipe, and the busiest beside the products' bound")
    for key, row in sorted(found.items()):
        if of := row.get("cycles"):
            bound = of["tensor"] * (0.63 if key.startswith("sm_90 ") else 1)
            busiest = max(of, key=of.get)
            pipes = "".join(f"{pipe:>9} {count:<4}" for pipe, count in of.items())
            print(f"{key:48}{pipes}  {busiest} {of[busiest] / bound:.2f}")


def check(found, files, write):
    """Whether all of these files is as committed; prints what is not."""
    committed = json.loads(GOLDEN.read_text("utf-8"))
    is_of = lambda key: key.split()[-1].split(".")[0] in files
    if write:
        others = {key: row for key, row in committed.items() if not is_of(key)}
        rows = (f"{json.dumps(key)}: {json.dumps(row)}" for key, row in sorted((others | found).items()))
        GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        return True
    print_cycles(found)
    print_streams(found)
    expected, well = {key: row for key, row in committed.items() if is_of(key)}, True
    for key in sorted(set(found) | set(expected)):
        if found.get(key) != expected.get(key):
            print(f"{key}: {found.get(key)}, committed: {expected.get(key)} (--write commits)")
            well = False
    return well
