#!/usr/bin/env python3
"""The gate of the CUDA kernels, for machines without a GPU.

    check.py [file ...] [--nvrtc libnvrtc.so] [--cublaslt libcublasLt.so] [--only compile|emulate|look] [--write]

First, NVRTC compiles every file of src/devices/cuda/kernels, behind the prelude, for all architectures
and elements; an error or a warning fails, and registers and spills are printed. NVRTC is that of the
Python packages nvidia-cuda-nvrtc and nvidia-cuda-nvrtc-cu12, the newest and the oldest that the device
works with, or --nvrtc. The functions that the device calls must be there, in cuBLASLt (--cublaslt), too.

Then each file is compiled for the CPU, behind emulator.h, and its kernels are compared to oracles in
numpy's float64. Each comparison runs twice: with buffers that are aligned, and with buffers that are not
and threads that run in the other order; both must give the same bits. Outputs are poisoned with NaN
before; inputs and what lies around all buffers must not change.

Last, accesses to memory are looked at: hazards.cpp says for what.

Compiling and looking take minutes, and give the same for the same texts. So passed.json has a digest of all
that each file's result follows from, written by --write when all passed. Files whose digest is there are left out,
unless a file is named, or `L2L_TESTS=whole`.

Checks are a list of (file, function, cases). `function(device, random, **case)` makes buffers, launches
kernels and expects outputs, all by the device: see `Device`, the checks below and those of
attention.py and linear_attention.py. `random` is a numpy Generator, the same each time. Each case is one task of a pool of
processes.
"""

import argparse
import concurrent.futures
import ctypes
import faulthandler
import hashlib
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as many processes compute as there are cores

import numpy as np

import attention
import linear_attention
import sass

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "src/devices/cuda/kernels"
# By file, the digest with which it was compiled and looked at last, and passed.
PASSED = HERE / "passed.json"
# Whether all is checked (`.ci/run --whole`). If not, kernels are compiled for fewer architectures, each element has
# another third of the cases, and accesses are looked at in fewer cases.
IS_WHOLE = os.environ.get("L2L_TESTS") == "whole"
# By the major version of the compiler.
ALL_ARCHITECTURES = {12: [70, 75, 90], 13: [75, 80, 86, 89, 90, 100, 120]}
ARCHITECTURES = ALL_ARCHITECTURES if IS_WHOLE else {12: [70, 90], 13: [75, 80, 90]}
PRINTED = [80, 90]
ELEMENTS = {32: "float", 16: "bfloat16", 15: "half"}
# The most bytes that kernels may spill, by element, or by element on one architecture: others may none. Attention
# without tensor cores has as few registers as lets two blocks run at once; on tensor cores, sums take nearly all
# that there are.
SPILLS = {
    ("attention", 32): 200,
    ("attention_backward_keys", 32): 80,
    ("attention_backward_queries", 32): 488,
    ("attention_128", 16): 48,
    ("attention_128", 15): 48,
    ("attention_backward_keys_64", 16): 208,
    ("attention_backward_keys_64", 15): 208,
    ("attention_backward_keys_128", 16): 208,
    ("attention_backward_keys_128", 16, 100): 232,
    ("attention_backward_keys_128", 15): 208,
    ("attention_backward_keys_256", 16): 32,
    ("attention_backward_keys_256", 15): 32,
    ("attention_backward_queries", 32, 70): 624,
    ("attention_backward_keys", 32, 70): 116,
    ("attention_backward_keys_wide", 32, 70): 116,
    ("attention_backward_keys_wide", 15, 70): 116,
    # On sm_70 and sm_75, what is copied to shared memory goes through registers.
    ("attention_64", 15, 70): 352,
    ("attention_128", 15, 70): 64,
    ("attention_backward_keys_128_64k", 15, 70): 64,
    ("attention_256", 15, 75): 40,
    ("attention_backward_keys_64", 15, 75): 368,
    ("attention_backward_keys_128", 15, 75): 400,
    ("attention_backward_keys_256", 15, 75): 148,
    ("attention_backward_keys_128_64k", 15, 75): 268,
    ("attention_backward_keys_256_64k", 15, 75): 152,
    ("attention_backward_queries_256_64k", 15, 75): 24,
}
# A kernel that spills: 64 numbers, in 32 registers.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* y) {
    float x[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] = y[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) y[i * 1024 + threadIdx.x] = x[i] * x[63 - i];
}
"""
# Half of the distance to the next number, relative.
ROUNDING = {32: 0.0, 16: 2.0**-8, 15: 2.0**-11}
GUARD = 64  # elements around each buffer
KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\)")
LAUNCH = re.compile(r"// launch: (.*)\n(?://.*\n)*[^;{]*?" + KERNEL.pattern)


# Files that are compiled as one, in this order.
TOGETHER = {"attention": ["heads", "plain", "plain_kernels", "warp", "mma", "quad_pairs", "tiles", "passes", "cores"],
            "linear_attention": ["rows", "rule", "pieces"]}


# Behind the name of a file: its kernels as they are on sm_70, which the emulator runs, too.
SM_70 = "_sm_70"


def text_of(file):
    if file.endswith(SM_70):
        return "#define SM_70\n" + text_of(file.removesuffix(SM_70))
    parts = [f"{file}/{part}" for part in TOGETHER[file]] if file in TOGETHER else [file]
    return "".join((KERNELS / f"{part}.cu").read_text("utf-8") for part in parts)


def digest(file):
    """Of all that the machine code and the accesses of a file's kernels follow from."""
    tools = ["nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvdisasm", "numpy"]
    versions = [importlib.metadata.version(tool) for tool in tools]
    scripts = [path.read_text("utf-8") for path in sorted(HERE.glob("*.py")) + sorted(HERE.glob("*[.]h"))]
    scripts.append((HERE / "hazards.cpp").read_text("utf-8"))
    parts = [text_of("prelude"), text_of(file), *versions, *scripts]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_compiled(file, element, architecture):
    """bfloat16 came with sm_80. Attention takes long to compile: in half, it is that of bfloat16 with another
    instruction."""
    is_same = file == "attention" and element == 15 and architecture >= 80 and architecture != 90
    return (element != 16 or architecture >= 80) and not is_same


# ---- Compiling for GPUs. ----


class Nvrtc:
    """NVIDIA's run-time compiler."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)

    @staticmethod
    def find():
        for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
            files = importlib.metadata.files(package)
            yield next(str(f.locate()) for f in files if re.fullmatch(r"libnvrtc\.so\.\d+", f.name))

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, name, text, element, architecture):
        """Whether it went well, the log, and the code."""
        program, nvrtc = ctypes.c_void_p(), self.library
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
        options = [
            f"--gpu-architecture=sm_{architecture}",
            f"--define-macro=ELEMENT={element}",
            "--std=c++17",
            "--ptxas-options=-v",
        ]
        encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return failed == 0, log.value.decode(), code.raw


def resources(log):
    """What each kernel uses, from the assembler's log."""
    found = {}
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", part)[1]
        number = lambda pattern: sum(int(n) for n in re.findall(pattern, part))
        found[name] = {
            "registers": number(r"Used (\d+) registers"),
            "stack": number(r"(\d+) bytes stack frame"),
            "spilled": number(r"(\d+) bytes spill (?:stores|loads)"),
            "shared": number(r"(\d+) bytes smem"),
        }
    return found


def compile_all(nvrtc, files, write):
    """Compiles all, and prints a table. Whether all went well, and the code of attention is as committed."""
    targets = [
        (file, element, architecture)
        for file, element, architecture in itertools.product(files, ELEMENTS, ARCHITECTURES[nvrtc.version()[0]])
        if is_compiled(file, element, architecture)
    ]
    texts = {file: text_of("prelude") + text_of(file) for file in files}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda t: nvrtc.compile(t[0], texts[t[0]], t[1], t[2]), targets))

    well, table, machine_code = True, {}, {}
    for (file, element, architecture), (compiled, log, code) in zip(targets, results):
        noise = [line for line in log.splitlines() if not re.match(r"ptxas( info|  )|\0?$", line)]
        if noise or not compiled:
            print(f"{file}.cu, {ELEMENTS[element]}, sm_{architecture}:", *noise, sep="\n    ")
            well = False
        used = resources(log)
        for kernel, of in used.items():
            table[file, kernel, element, architecture] = of
        is_looked_at = file in sass.STEADY and architecture in PRINTED and element != 15
        if is_looked_at and nvrtc.version()[0] == 13 and sass.nvdisasm():
            launches = {name: shape for shape, name, _ in LAUNCH.findall(texts[file])}
            _, _, steady = nvrtc.compile(file, sass.steady(file, texts[file]), element, architecture)
            if file == "attention":
                rows = sass.table(code, steady, architecture, used, launches)
            else:
                rows = sass.streams(steady, architecture, 4 if element == 32 else 2)
            name_of = lambda kernel: f"sm_{architecture} {ELEMENTS[element]} {file}.{kernel}"
            machine_code |= {name_of(kernel): row for kernel, row in rows.items()}
    if machine_code:
        well &= sass.check(machine_code, files, write)
    elif not sass.nvdisasm():
        print("without nvidia-cuda-nvdisasm the machine code is not looked at")
    _, log, _ = nvrtc.compile("spilling", SPILLING, 32, 90)
    if not resources(log)["spilling"]["spilled"]:
        print("a kernel that is made to spill was not found to")
        well = False
    print_table(table)
    for (file, kernel, element, architecture), used in table.items():
        most = SPILLS.get((kernel, element, architecture), SPILLS.get((kernel, element), 0))
        if used["spilled"] > most:
            print(f"{file}.{kernel}, {ELEMENTS[element]}, sm_{architecture}: {used['spilled']} bytes spilled")
            well = False
    version = "{}.{}".format(*nvrtc.version())
    print(f"compiled {len(targets)} times by NVRTC {version}" + ("" if well else ": FAILED"))
    return well


# Functions of cudarc's module `result`, and what they call.
CALLS = {
    "create_program": ["nvrtcCreateProgram"],
    "compile_program": ["nvrtcCompileProgram"],
    "destroy_program": ["nvrtcDestroyProgram"],
    "get_program_log": ["nvrtcGetProgramLogSize", "nvrtcGetProgramLog"],
    "create_handle": ["cublasLtCreate"],
    "destroy_handle": ["cublasLtDestroy"],
    "create_matmul_desc": ["cublasLtMatmulDescCreate"],
    "destroy_matmul_desc": ["cublasLtMatmulDescDestroy"],
    "set_matmul_desc_attribute": ["cublasLtMatmulDescSetAttribute"],
    "create_matrix_layout": ["cublasLtMatrixLayoutCreate"],
    "destroy_matrix_layout": ["cublasLtMatrixLayoutDestroy"],
    "create_matmul_pref": ["cublasLtMatmulPreferenceCreate"],
    "destroy_matmul_pref": ["cublasLtMatmulPreferenceDestroy"],
    "set_matmul_pref_attribute": ["cublasLtMatmulPreferenceSetAttribute"],
    "matmul": ["cublasLtMatmul"],
}


def has_all(path, prefix, *sources):
    """Whether a library has all functions that these files of the device call."""
    library, missing = ctypes.CDLL(path), []
    for source in sources:
        text = (KERNELS.parent / source).read_text("utf-8")
        called = re.findall(rf"sys::({prefix}[A-Z]\w*)\(", text)
        called += [name for one in re.findall(r"result::([a-z_]+)\(", text) for name in CALLS[one]]
        missing += [name for name in called if name.startswith(prefix) and not hasattr(library, name)]
    print(f"{path}: " + (f"lacks {', '.join(missing)}" if missing else "has all that the device calls"))
    return not missing


def print_table(table):
    columns = [(element, a) for a in PRINTED for element in ELEMENTS]
    print("registers (+ bytes of stack, ! bytes spilled, s bytes of static shared memory)")
    print(f"{'':44}" + "".join(f"{ELEMENTS[e] + ' ' + str(a):>18}" for e, a in columns))
    for file, kernel in dict.fromkeys(key[:2] for key in table):
        cells = []
        for element, architecture in columns:
            used = table.get((file, kernel, element, architecture))
            cell = "" if used is None else f"{used['registers']}"
            for sign, what in [("+", "stack"), ("!", "spilled"), ("s", "shared")]:
                if used is not None and used[what]:
                    cell += f" {sign}{used[what]}"
            cells.append(f"{cell:>18}")
        print(f"{file + '.' + kernel:44}" + "".join(cells))


# ---- Emulating. ----


def build(file, element, folder, has_hazards=False, own=None):
    """The path of the emulated library of a file of kernels, or of a text; with hazards, its accesses are looked at."""
    text = text_of("prelude") + (own or text_of(file))
    options = ["-std=c++20", f"-DELEMENT={element}"]
    # Kernels may depend on the element.
    seen = ["c++", "-E", "-P", "-x", "c++", "-DEMULATOR", *options, "-"]
    seen = subprocess.run(seen, input=text, capture_output=True, encoding="utf-8", check=True).stdout
    table = "".join(f"EMULATED({name})\n" for name, _ in KERNEL.findall(seen))
    source, library = folder / f"{file}_{element}.cpp", folder / f"{file}_{element}.so"
    source.write_text((HERE / "emulator.h").read_text("utf-8") + text + table, "utf-8")
    strict = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-Wno-unknown-pragmas"]
    common = ["c++", *options, *strict, "-O2", "-fPIC"]
    commands = [[*common, "-shared", source, "-o", library]]
    if has_hazards:
        # The compiler's calls go to hazards.cpp, which is compiled without them.
        parts = [source.with_suffix(".o"), source.with_suffix(".hazards.o")]
        calls = ["-DHAZARDS", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1"]
        commands = [
            [*common, *calls, "-c", source, "-o", parts[0]],
            [*common, "-c", HERE / "hazards.cpp", "-o", parts[1]],
            ["c++", "-shared", *parts, "-o", library],
        ]
    if any(subprocess.run(command).returncode != 0 for command in commands):
        sys.exit(f"{file}.cu, {ELEMENTS[element]}: the emulated library was not built")
    return library


def load(path):
    library = ctypes.CDLL(path)
    if hasattr(library, "hazards_found"):
        library.hazards_found.restype = library.hazards_costs.restype = ctypes.c_char_p
    return library


class Dropout(ctypes.Structure):
    _fields_ = [
        ("key", ctypes.c_uint32 * 2),
        ("first_sequence", ctypes.c_uint32),
        ("first_position", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("threshold", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    ]

    @staticmethod
    def of(probability, key=(0x12345678, 0x9ABCDEF0), first_sequence=3, first_position=5, site=0xDEADBEEF):
        threshold = int(probability * 2**32)
        key = (ctypes.c_uint32 * 2)(*key)
        return Dropout(key, first_sequence, first_position, site, threshold, 1 / (1 - probability))

    def factors(self, sequence, row, column):
        """0 or the scale, of arrays of sequences of the micro-batch, rows and columns."""
        if self.threshold == 0:
            return 1.0
        sequence, row, column = np.broadcast_arrays(sequence, row, column)
        words = [column // 4, self.first_position + row, self.first_sequence + sequence, self.site + 0 * row]
        counter, (a, b) = [word.astype(np.uint64) & 0xFFFFFFFF for word in words], self.key
        for _ in range(10):
            low, high = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
            upper, lower = (lambda x: x >> np.uint64(32)), (lambda x: x & np.uint64(0xFFFFFFFF))
            counter = [
                upper(high) ^ counter[1] ^ np.uint64(a),
                lower(high),
                upper(low) ^ counter[3] ^ np.uint64(b),
                lower(low),
            ]
            a, b = (a + 0x9E3779B9) & 0xFFFFFFFF, (b + 0xBB67AE85) & 0xFFFFFFFF
        draws = np.choose(column % 4, counter)
        return np.where(draws < self.threshold, 0.0, float(self.scale))


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ["sequences", "rows", "past", "heads", "kv_heads"]),
        *((name, ctypes.c_int) for name in ["head_size", "ahead", "window", "first_kept"]),
        ("scale", ctypes.c_float),
        ("dropout", Dropout),
    ]

    @staticmethod
    def of(sequences, rows, heads, kv_heads, head_size, past=0, causal=1, window=0, dropout=None, first_kept=0):
        scale = 1 / math.sqrt(head_size)
        ahead = 1 if causal else window
        sizes = [sequences, rows, past, heads, kv_heads, head_size, ahead, window, first_kept]
        return Attention(*sizes, scale, dropout or Dropout.of(0))

    @property
    def packed(self):
        return (self.heads + 2 * self.kv_heads) * self.head_size


class Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ["sequences", "rows", "past", "key_heads", "value_heads"]),
        *((name, ctypes.c_int) for name in ["key_size", "value_size", "taps"]),
    ]


class ColumnGroups(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), ("kinds", ctypes.c_int * 24)]


class NormParts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ["queries", "keys", "query_channels", "key_channels"]]
    _fields_ += [("norm", ctypes.c_int), ("values", ctypes.c_int)]


class Rotary(ctypes.Structure):
    _fields_ = [("frequencies", ctypes.c_float * 128), ("scale", ctypes.c_float), ("pairs", ctypes.c_int),
                ("interleaved", ctypes.c_int), ("distance", ctypes.c_int), ("beta", ctypes.c_float),
                ("positions", ctypes.c_int)]


class Buffer:
    """Memory of a kernel, with guards around it. `shift`: elements it is off from an aligned place. `is_output`:
    nobody has written it yet."""

    def __init__(self, values, shift, element, changes, is_output):
        self.element, self.changes = element, changes
        whole = values.size + 2 * GUARD + 64
        self.all = np.full(whole * values.itemsize, 0xA5, np.uint8).view(values.dtype)
        off = (-self.all.ctypes.data) % 16 // values.itemsize
        self.at = slice(off + GUARD + shift, off + GUARD + shift + values.size)
        self.bits = self.all[self.at].reshape(values.shape)
        self.bits[...] = values
        self.before = self.all.copy()
        # Bytes of an output that kernels have written, as hazards.cpp notes them.
        self.is_written = np.zeros(self.bits.nbytes, bool) if is_output else None

    @property
    def address(self):
        return self.bits.ctypes.data

    @property
    def wide(self):
        """What it holds, in float64."""
        with np.errstate(invalid="ignore"):
            if self.bits.dtype == np.uint16:
                return (self.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            return self.bits.astype(np.float64)

    def check(self):
        same = self.all.view(np.uint8) == self.before.view(np.uint8)
        if self.changes:
            size = self.bits.itemsize
            same[self.at.start * size : self.at.stop * size] = True
        what = "something was written outside of a buffer" if self.changes else "an input was changed"
        assert same.all(), what


class Before:
    """A pointer to what would lie `rows` rows before a buffer, or to elements behind its begin."""

    def __init__(self, buffer, rows, behind=0):
        self.address = buffer.address + (behind - rows * buffer.bits.shape[-1]) * buffer.bits.itemsize


def to_bfloat(values):
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


class Device:
    """One emulated file of kernels, for the time of one check."""

    Attention, Before, Dropout, Linear, Rotary = Attention, Before, Dropout, Linear, Rotary

    has_hazards = False

    def __init__(self, file, library, element, is_other_way, worst, text=None):
        self.library, self.element, self.shift, self.worst = load(library), element, int(is_other_way), worst
        self.buffers, self.outputs = [], []
        self.library.emulate_backwards(int(is_other_way))
        text = text or text_of(file)
        self.launches = {name: (shape, parameters) for shape, name, parameters in LAUNCH.findall(text)}

    # Buffers. `changes`: a kernel may write to it.

    def _buffer(self, values, element=32, changes=False, is_output=False):
        self.buffers.append(Buffer(values, self.shift, element, changes, is_output))
        return self.buffers[-1]

    def elements(self, values, changes=False):
        """Weights or activations, rounded to the element: the oracle takes their `wide`."""
        convert = {32: np.float32, 16: to_bfloat, 15: np.float16}[self.element]
        return self._buffer(convert(np.asarray(values, np.float32)), self.element, changes)

    def floats(self, values, changes=False):
        return self._buffer(np.asarray(values, np.float32), changes=changes)

    def integers(self, values, kind=np.int32, changes=False):
        return self._buffer(np.asarray(values, kind), changes=changes)

    def out(self, *shape):
        """Elements to be written, NaN before."""
        kind = {32: np.float32, 16: np.uint16, 15: np.float16}[self.element]
        poison = np.full(math.prod(shape) * np.dtype(kind).itemsize, 0xFF, np.uint8)
        return self._buffer(poison.view(kind).reshape(shape), self.element, True, True)

    def floats_out(self, *shape):
        return self._buffer(np.full(shape, np.nan, np.float32), changes=True, is_output=True)

    # Kernels.

    def launch(self, kernel, *arguments, grid=None, block=None, shared=None):
        """Runs a kernel, in the shape of its `launch` line. Arguments become what it declares."""
        shape, parameters = self.launches[kernel]
        declared = [parameter.strip() for parameter in parameters.split(",")]
        assert len(declared) == len(arguments), f"{kernel} takes {len(declared)} arguments"
        known, passed = {"ceil": math.ceil, "min": min, "max": max}, []
        known["wide"] = {32: 4, 16: 8, 15: 8}[self.element]
        known["threads"] = lambda channels: min(256, 32 * math.ceil(channels / 128))
        for parameter, argument in zip(declared, arguments):
            name = parameter.split()[-1]
            known[name] = argument
            if name == "starts":
                known[name] = argument and argument.bits
            if isinstance(argument, (Attention, Linear, NormParts)):
                known |= {name: getattr(argument, name) for name, _ in argument._fields_}
            if "*" in parameter:
                argument = ctypes.c_void_p(argument and argument.address)
            elif not isinstance(argument, ctypes.Structure):
                kinds = {"long long": ctypes.c_longlong, "int": ctypes.c_int, "float": ctypes.c_float}
                argument = kinds[parameter.rsplit(" ", 1)[0]](argument)
            passed.append(argument)
        if "longest" in shape:
            starts = known["starts"]
            known["longest"] = known["rows"] if starts is None else int(np.diff(starts).max())
        if "samples" in shape:  # of sequences; of tokens where there are no sequences
            known["samples"] = known["sequences"] or known["rows"]
        line = shape_of(shape, known)
        grid, block, shared = grid or line[0], block or line[1], line[2] if shared is None else shared
        pointers = [ctypes.cast(ctypes.pointer(argument), ctypes.c_void_p) for argument in passed]
        if self.has_hazards:
            begins = [buffer.bits.ctypes.data for buffer in self.buffers]
            sizes = [buffer.bits.nbytes for buffer in self.buffers]
            notes = [buffer.is_written for buffer in self.buffers]
            notes = [None if note is None else note.ctypes.data for note in notes]
            sizes_of, pointers_of = ctypes.c_size_t * len(begins), ctypes.c_void_p * len(begins)
            self.library.hazards_buffers(sizes_of(*begins), sizes_of(*sizes), pointers_of(*notes), len(begins))
        failure = self.library.emulate(
            kernel.encode(),
            (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid))),
            (ctypes.c_uint * 3)(*block, *[1] * (3 - len(block))),
            shared,
            (ctypes.c_void_p * len(pointers))(*pointers),
        )
        assert failure == 0, f"{kernel}: failure {failure} of emulator.h"
        if self.has_hazards:
            found = self.library.hazards_found().decode()
            assert not found, found
        for buffer in self.buffers:
            buffer.check()
        self.kernel = kernel

    def expect(self, buffer, expected, tolerance=1e-5):
        """Compares an output of the last kernel: to `tolerance` of the largest magnitude (at least 1), beyond
        the rounding of elements."""
        expected = np.asarray(expected, np.float64)
        assert buffer.bits.shape == expected.shape, (buffer.bits.shape, expected.shape)
        self.outputs.append(buffer)
        if expected.size == 0:
            return
        off = np.abs(buffer.wide - expected) - ROUNDING[buffer.element] * np.abs(expected)
        off = np.where(np.isnan(off), np.inf, off) / max(1, np.abs(expected).max())
        at = np.unravel_index(off.argmax(), off.shape)
        key = self.kernel, self.element
        self.worst[key] = max(self.worst.get(key, 0), off[at])
        assert off[at] <= tolerance, f"{self.kernel} at {at}: {buffer.wide[at]}, expected {expected[at]}"

    def same(self, buffer, expected):
        """Compares exactly, by bits."""
        self.outputs.append(buffer)
        self.worst.setdefault((self.kernel, self.element), 0)
        kind = buffer.bits.dtype
        bits = lambda values: np.ascontiguousarray(values, kind).view(f"u{kind.itemsize}")
        found, expected = bits(buffer.bits), bits(expected)
        assert found.shape == expected.shape, (found.shape, expected.shape)
        for at in np.argwhere(found != expected)[:1]:
            raise AssertionError(f"{self.kernel} at {at}: bits {found[*at]:x}, expected {expected[*at]:x}")


def shape_of(line, known):
    """(grid, block, shared) of a launch line, where `a b` is a product."""
    parts = re.fullmatch(r"grid \((.*)\), block \((.*?)\)(?:, shared (.*) bytes)?", line)
    assert parts, f"no launch line: {line}"
    value = lambda text: eval(re.sub(r"(?<=[\w)])\s+(?=[\w(])", " * ", f"({text},)"), {}, known)
    return value(parts[1]), value(parts[2]), value(parts[3] or "0")[0]


def is_emulated(file, element):
    return element == 15 or not file.endswith(SM_70)


def run_all(run, files, folder, each=0):
    """Runs `run(file, function, library, element, case)` for each check, element and case. Yields a name, the case and
    the result. With `each`, libraries look at accesses, and a check runs about so many of its cases."""
    own = [check for check in checks() if check[0].removesuffix(SM_70) in files]
    pairs = [(check, element) for check, element in itertools.product(own, ELEMENTS) if is_emulated(check[0], element)]
    targets = list(dict.fromkeys((check[0], element) for check, element in pairs))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = dict(zip(targets, pool.map(lambda target: build(*target, folder, each > 0), targets)))
    def taken(file, cases, element):
        if each:
            return cases[:: -(-len(cases) // each)]
        # Only one element has the texts of sm_70, and their kernels differ by the size of heads.
        is_all = IS_WHOLE or len(cases) < 4 or file.endswith(SM_70)
        return cases if is_all else cases[list(ELEMENTS).index(element) :: 3]

    tasks = [
        (file, function, libraries[file, element], element, case)
        for (file, function, cases), element in pairs
        for case in taken(file, cases, element)
    ]
    processes = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), processes) as pool:
        for task, future in [(task, pool.submit(run, *task)) for task in tasks]:
            file, function, _, element, case = task
            name = f"{file}, {function.__name__}, {ELEMENTS[element]}"
            try:
                yield name, case, future.result()
            except concurrent.futures.process.BrokenProcessPool:
                sys.exit(f"{name}, {case}: this case, or one of the next, has ended its process")


def emulate_all(files):
    """Builds and checks all. Whether all went well."""
    well, worst, times = True, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, case, (found, of_case, seconds) in run_all(emulate, files, folder):
            if found:
                print(f"{name}, {case}: {found}")
                well = False
            worst |= {kernel: max(off, worst.get(kernel, 0)) for kernel, off in of_case.items()}
            times[name] = times.get(name, 0) + seconds
        if "attention" in files:
            well &= are_quad_pairs_as_cute(folder)
    for name, seconds in times.items():
        if seconds > 10:
            print(f"{name}: {seconds:.0f} s")
    print("largest error, beyond rounding to elements")
    for kernel in dict.fromkeys(kernel for kernel, _ in worst):
        of = [f"{worst.get((kernel, element), math.nan):12.1e}" for element in ELEMENTS]
        print(f"{kernel:40}" + "".join(of))
    every = {name for file in files for name, _ in KERNEL.findall(text_of(file))}
    # Of kernels on tensor cores, sm_70 launches those that need at most 64 KiB of shared memory.
    cores = {name for name in every if re.fullmatch(r"attention\D*\d+(_64k)?", name)}
    every |= {name + SM_70 for name in cores if name + "_64k" not in cores}
    if unchecked := every - {kernel for kernel, _ in worst}:
        print("no check of", ", ".join(sorted(unchecked)))
        well = False
    print("emulated" + ("" if well else ": FAILED"))
    return well


# Behind attention's text of sm_70: a product of a warp.
QUAD_PAIRS = """
// launch: grid (1), block (32)
extern "C" __global__ void warp_product(float* y, const T* left, const T* right, int is_turned) {
    Left a;
    Right b;
    for (int i = 0; i < 8; ++i) {
        const int at = 16 * threadIdx.x + 2 * i;
        a.of[i] = static_cast<unsigned>(left[at + 1].bits) << 16 | left[at].bits;
        b.of[i] = static_cast<unsigned>(right[at + 1].bits) << 16 | right[at].bits;
    }
    Sum sums[2] = {};
    if (is_turned) {
        multiply<true>(sums[0], sums[1], a, b);
    } else {
        multiply<false>(sums[0], sums[1], a, b);
    }
    for (int i = 0; i < 8; ++i) {
        y[8 * threadIdx.x + i] = sums[i / 4].of[i % 4];
    }
}
"""


def are_quad_pairs_as_cute(folder):
    """Whether the emulated product of sm_70 is as CuTe says (cute.json): four products, each of four steps."""
    text, golden = text_of("attention" + SM_70) + QUAD_PAIRS, json.loads((HERE / "cute.json").read_text("utf-8"))
    device = Device("cute", build("cute" + SM_70, 15, folder, own=text), 15, False, {}, text)
    random, well = np.random.default_rng(0), True
    for is_turned, of in enumerate([golden["quad_pair"], golden["quad_pair_turned"]]):
        left, right = (device.elements(random.uniform(-1, 1, (32, 4, 4))) for _ in range(2))
        y = device.floats_out(32, 8)
        device.launch("warp_product", y, left, right, is_turned)
        for pair in range(4):
            lanes, expected = np.array(of["lanes"]) + 4 * pair, np.zeros((8, 8))
            for step in range(4):
                a, b = np.zeros(32), np.zeros(32)
                a[of["left"]], b[of["right"]] = left.wide[lanes, step].ravel(), right.wide[lanes, step].ravel()
                expected += a.reshape(4, 8).T @ b.reshape(4, 8)  # by columns, as CuTe counts
            well &= np.abs(y.wide[lanes].ravel() - expected.T.ravel()[of["sums"]]).max() < 1e-5
    print("products of quad pairs are " + ("as CuTe says" if well else "not as CuTe says: FAILED"))
    return bool(well)


# Each thread begins to copy a number to shared memory, by cp.async.
COPY_AGAIN = "copy<4>(&x[threadIdx.x], &given[threadIdx.x], true);"
COPY = "__shared__ float x[64];" + COPY_AGAIN
# Kernels with a hazard each, and what is to be said of it.
PLANTED = {
    "two_writes": ("two writes at once", "y[0] = threadIdx.x;"),
    "two_blocks": ("two writes at once", "if (threadIdx.x == 0) { y[0] = blockIdx.x; }"),
    "no_barrier": (
        "at once with a",
        "__shared__ float x[64]; x[threadIdx.x] = 1; y[threadIdx.x + 64 * blockIdx.x] = x[63 - threadIdx.x];",
    ),
    "shuffle_for_barrier": (
        "at once with a",
        "__shared__ float x[64]; x[threadIdx.x] = 1; __shfl_xor_sync(FULL_MASK, 1, 1);"
        "y[threadIdx.x + 64 * blockIdx.x] = x[threadIdx.x ^ 1];",
    ),
    "outside": ("write outside of all buffers", "y[threadIdx.x + 64 * blockIdx.x + 1] = 1;"),
    "unwritten": (
        "shared memory that nobody has written",
        "DYNAMIC_SHARED(float, x); y[threadIdx.x + 64 * blockIdx.x] = x[threadIdx.x];",
    ),
    "output_unwritten": ("global memory that nobody has written", "y[threadIdx.x + 64 * blockIdx.x] += 1;"),
    "output_written": (
        "",
        "float* const own = y + threadIdx.x + 64 * blockIdx.x; *own = 1; __syncthreads(); *own += 1;",
    ),
    "with_barriers": (
        "",
        "__shared__ float x[64]; x[threadIdx.x] = 1; __syncwarp(); float sum = x[threadIdx.x ^ 1];"
        "__syncthreads(); sum += x[63 - threadIdx.x]; y[threadIdx.x + 64 * blockIdx.x] = sum;",
    ),
    "one_bank": (
        "",
        "DYNAMIC_SHARED(float, x); x[32 * threadIdx.x] = 1; y[threadIdx.x + 64 * blockIdx.x] = x[32 * threadIdx.x];",
    ),
    "read_in_flight": (
        "read of what is in flight",
        COPY + "y[threadIdx.x + 64 * blockIdx.x] = x[threadIdx.x]; await_copies();",
    ),
    "wait_for_barrier": (
        "read at once with a write",
        COPY + "await_copies(); if (threadIdx.x > 0) { y[threadIdx.x + 64 * blockIdx.x] = x[threadIdx.x - 1]; }",
    ),
    "barrier_for_wait": (
        "read of what is in flight",
        COPY + "__syncthreads(); y[threadIdx.x + 64 * blockIdx.x] = x[63 - threadIdx.x]; await_copies();",
    ),
    "write_in_flight": ("write to what is in flight", COPY + "x[threadIdx.x] = 1; await_copies();"),
    "copy_in_flight": ("write to what is in flight", COPY + COPY_AGAIN + "await_copies();"),
    "never_awaited": ("failure 6", COPY),
    "copied": (
        "",
        COPY + "await_copies(); __syncthreads(); y[threadIdx.x + 64 * blockIdx.x] = x[63 - threadIdx.x];",
    ),
}


def finds_planted(folder):
    """Whether the hazards of kernels that are made to have some are found, and nothing else."""
    text = "".join(
        "// launch: grid (2), block (64), shared 8192 bytes\n"
        f'extern "C" __global__ void {name}(float* y, const float* given) {{ {body} }}\n'
        for name, (_, body) in PLANTED.items()
    )
    library, well = build("planted", 32, folder, True, text), True
    for name, (expected, _) in PLANTED.items():
        device = Device("planted", library, 32, False, {}, text)
        device.has_hazards, found = True, ""
        try:
            device.launch(name, device.floats_out(128), device.floats(np.ones(128)))
        except AssertionError as error:
            found = str(error)
        if (expected not in found) if expected else found:
            print(f"planted {name}: expected {expected!r}, found {found!r}")
            well = False
    # What a launch has written, the next ones may read.
    device = Device("planted", library, 32, False, {}, text)
    device.has_hazards, y, given = True, device.floats_out(128), device.floats(np.ones(128))
    for name in ("output_written", "output_unwritten"):
        device.launch(name, y, given)
    costs = {line.split()[0]: line.split()[1:3] for line in device.library.hazards_costs().decode().splitlines()}
    paid, least = map(int, costs["one_bank"])
    if paid != 32 * least:
        print(f"planted one_bank: {paid} wavefronts, not 32 times {least}")
        well = False
    return well


# Cases of a check whose accesses are looked at: it takes its time.
LOOKED_AT = 6 if IS_WHOLE else 2


def look_all(files):
    """Looks at the accesses of all kernels in some cases, and prints what they cost. Whether nothing was found."""
    costs = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        well = finds_planted(folder)
        for name, case, (found, of_case) in run_all(look, files, folder, LOOKED_AT):
            if found:
                print(f"{name}, {case}: {found}")
                well = False
            for kernel, counts in of_case.items():
                costs[kernel] = [a + b for a, b in zip(costs.get(kernel, [0] * 4), counts)]
    print("wavefronts of shared memory, and sectors of global memory, for each that is needed")
    ratio = lambda paid, least: f"{paid / least:.2f}" if least else "-"
    for kernel in dict.fromkeys(kernel for kernel, _ in costs):
        of = [costs.get((kernel, element), [0] * 4) for element in ELEMENTS]
        print(f"{kernel:40}" + "".join(f"{ratio(*one[:2]):>12}{ratio(*one[2:]):>8}" for one in of))
    print("no hazards" if well else "hazards: FAILED")
    return well


def kernel_of(file, kernel):
    """Its name in what is printed: those of sm_70 have one of their own."""
    return kernel + SM_70 if file.endswith(SM_70) else kernel


def look(file, function, library, element, case):
    """What is wrong with the accesses of a case, if anything, and what they cost."""
    device, found = Device(file, library, element, False, {}), None
    device.has_hazards = True
    try:
        function(device, np.random.default_rng(1), **case)
    except AssertionError as error:
        found = repr(error)
    lines = (line.split() for line in device.library.hazards_costs().decode().splitlines())
    return found, {(kernel_of(file, kernel), element): [int(count) for count in counts] for kernel, *counts in lines}


def emulate(file, function, library, element, case):
    """What is wrong with a case, if anything, both ways; the largest errors, and how long it took."""
    outputs, worst, start, found = [], {}, time.time(), None
    try:
        for is_other_way in (False, True):
            device = Device(file, library, element, is_other_way, worst)
            function(device, np.random.default_rng(1), **case)
            outputs.append([output.bits.tobytes() for output in device.outputs])
        assert outputs[0] == outputs[1], "other bits with the other alignment and order of threads"
    except AssertionError as error:
        found = repr(error)
    worst = {(kernel_of(file, kernel), element): off for (kernel, element), off in worst.items()}
    return found, worst, time.time() - start


# ---- Checks. ----


def noise(random, *shape):
    return random.uniform(-1, 1, shape)


def chunks_of(values, chunk):
    """Sums over `chunk` rows each."""
    return np.stack([values[at : at + chunk].sum(0) for at in range(0, len(values), chunk)])


def slopes(f, x, step=1e-5):
    """f' of a function of each element, by central differences."""
    return (f(x + step) - f(x - step)) / (2 * step)


def row_slopes(f, x, step=1e-5):
    """Gradients of a function of each row."""
    columns = []
    for column in range(x.shape[1]):
        one = np.zeros_like(x)
        one[:, column] = step
        columns.append((f(x + one) - f(x - one)) / (2 * step))
    return np.stack(columns, 1)


def check_casts(device, random, n):
    x, y = device.elements(noise(random, n)), device.floats_out(n)
    device.launch("to_floats", y, x, n)
    device.expect(y, x.wide, 0)
    x, y = device.floats(noise(random, n)), device.out(n)
    device.launch("from_floats", y, x, n)
    device.same(y, device.elements(x.wide).bits)


def check_bias(device, random, rows, channels):
    bias = device.elements(noise(random, channels))
    for kernel, make in [("add_bias", device.elements), ("add_bias_to_floats", device.floats)]:
        y = make(noise(random, rows, channels), changes=True)
        expected = y.wide + bias.wide
        device.launch(kernel, y, bias, rows, channels, channels)
        device.expect(y, expected, 1e-6)


def check_columns(device, random, rows, width, columns, first):
    scale, some = 0.75, slice(first, first + columns)
    all_columns, taken = device.elements(noise(random, rows, width)), device.out(rows, columns)
    device.launch("take_columns", taken, all_columns, rows, width, columns, first, scale)
    device.expect(taken, scale * all_columns.wide[:, some], 1e-6)
    for end, make in [("", device.elements), ("_of_floats", device.floats)]:
        y = make(noise(random, rows, width), changes=True)
        x, expected = make(noise(random, rows, columns)), y.wide.copy()
        expected[:, some] += scale * x.wide
        device.launch("add_columns" + end, y, x, rows, width, columns, first, scale)
        device.expect(y, expected, 1e-6)
        y = make(noise(random, rows, width), changes=True)
        expected = y.wide.copy()
        expected[:, some] = x.wide
        device.launch("copy_columns" + end, y, x, rows, width, columns, first, 0, columns)
        device.expect(y, expected, 0)


def table(name):
    """Values of codes, from bitsandbytes."""
    golden = json.loads((HERE.parents[1] / "goldens/quantised/golden.json").read_text("utf-8"))
    return np.frombuffer(bytes.fromhex(golden[name]), np.float32)


def check_nf4(device, random, n):
    codes = device.integers(random.integers(0, 256, (n + 1) // 2), np.uint8)
    scales = device.integers(random.permutation(np.arange(n // 64 + 1) % 256), np.uint8)
    groups, offset = device.floats(noise(random, n // 16384 + 1)), device.floats([0.3])
    of_block = table("dynamic_map")[scales.bits] * groups.bits[np.arange(n // 64 + 1) // 256] + offset.bits
    nibbles = np.stack([codes.bits >> 4, codes.bits & 15], 1).reshape(-1)[:n]
    expected, y = table("nf4_map")[nibbles] * of_block[np.arange(n) // 64], device.out(n)
    device.launch("dequantise_nf4", y, codes, scales, groups, offset, n)
    device.same(y, device.elements(expected).bits)


def check_nf4_part(device, random, rows, run, pitch, first):
    at = (first + np.arange(rows)[:, None] * pitch + np.arange(run)).reshape(-1)
    codes = device.integers(random.integers(0, 256, (rows * run + 1) // 2), np.uint8)
    scales = device.integers(random.permutation(np.arange(at[-1] // 64 + 1) % 256), np.uint8)
    groups, offset = device.floats(noise(random, at[-1] // 16384 + 1)), device.floats([0.3])
    of_block = table("dynamic_map")[scales.bits] * groups.bits[np.arange(len(scales.bits)) // 256] + offset.bits
    nibbles = np.stack([codes.bits >> 4, codes.bits & 15], 1).reshape(-1)[:rows * run]
    expected, y = table("nf4_map")[nibbles] * of_block[at // 64], device.out(rows * run)
    device.launch("dequantise_nf4_part", y, codes, scales, groups, offset, rows * run, run, pitch, first)
    device.same(y, device.elements(expected).bits)


def check_bf16(device, random, n):
    halves = device.integers(random.integers(0, 0x7f80, n), np.uint16)
    expected, y = (halves.bits.astype(np.uint32) << 16).view(np.float32), device.out(n)
    device.launch("dequantise_bf16", y, halves, n)
    device.same(y, device.elements(expected).bits)


def check_int8(device, random, rows, channels):
    codes = device.integers(random.integers(-128, 128, (rows, channels)), np.int8)
    scales, y = device.floats(noise(random, rows)), device.out(rows, channels)
    expected = codes.bits.astype(np.float32) * scales.bits[:, None]
    device.launch("dequantise_int8", y, codes, scales, rows, channels)
    device.same(y, device.elements(expected).bits)


def odd_noise(random, *shape):
    """Noise of many magnitudes, some of it not finite or below the normal numbers."""
    values = (noise(random, *shape) * 2.0 ** random.integers(-20, 20, shape)).astype(np.float32)
    for value in (math.nan, math.inf, -math.inf, 1e-40, 0.0):
        values[random.random(shape) < 0.02] = value
    return values


def check_bfloats(device, random, n):
    """To the nearest, ties to even; NaN stays NaN."""
    x = device.floats(odd_noise(random, n))
    bits = x.bits.view(np.uint32)
    bits[: n // 4] = bits[: n // 4] & 0xFFFF0000 | 0x8000  # ties
    x.before = x.all.copy()
    y = device.integers(np.zeros(n), np.uint16, changes=True)
    device.launch("pack_bfloats", y, x, n)
    rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    device.same(y, np.where(np.isnan(x.bits), bits >> 16 | 0x40, rounded).astype(np.uint16))
    back = device.floats_out(n)
    device.launch("unpack_bfloats", back, y, n)
    device.same(back, (y.bits.astype(np.uint32) << 16).view(np.float32))


def check_packed_rows(device, random, rows, channels, size):
    """The largest magnitude of each `size` numbers is 127 steps, to the bit."""
    x, scales = device.elements(odd_noise(random, rows, channels)), -(-channels // size)
    words = scales + -(-channels // 4)
    with np.errstate(all="ignore"):
        wide = np.pad(x.wide.astype(np.float32), ((0, 0), (0, scales * size - channels)))
        wide = wide.reshape(rows, scales, size)
        of = np.where(np.isfinite(wide).all(2), np.abs(wide).max(2) / np.float32(127), np.float32(math.nan))[..., None]
        per = np.where(of > 0, 1 / of, np.float32(0))
        steps = np.nan_to_num(np.rint(np.where(np.isfinite(per), wide * per, wide / of)))
        steps = np.clip(steps, -128, 127).astype(np.int8)
        numbers = (steps.astype(np.float32) * of).reshape(rows, -1)[:, :channels]
    expected = np.zeros((rows, 4 * words), np.int8)
    expected[:, : 4 * scales] = of[..., 0].copy().view(np.int8)
    expected[:, 4 * scales :][:, :channels] = steps.reshape(rows, -1)[:, :channels]
    packed = device.floats(np.zeros((rows, words)), changes=True)
    device.launch("pack_int8", packed, x, rows, channels, words, size)
    device.same(packed, expected.view(np.float32))
    y = device.out(rows, channels)
    device.launch("unpack_int8", y, packed, rows, channels, words, size)
    is_nan = np.isnan(numbers)
    assert np.isnan(y.wide[is_nan]).all()
    device.same(y, np.where(is_nan, y.bits, device.elements(numbers).bits))


def check_positive(device, random, rows, channels, room):
    x = device.elements(odd_noise(random, rows, channels))
    places, room, size = -(-channels // 32), min(room, channels), x.bits.itemsize
    words, is_positive = 1 + places + -(-room * size // 4), x.wide > 0
    count = is_positive.sum(1).astype(np.int32)
    expected = np.zeros((rows, 4 * words), np.uint8)
    expected[:, :4] = count[:, None].view(np.uint8)
    bits = np.pad(is_positive, ((0, 0), (0, 32 * places - channels)))
    expected[:, 4 : 4 + 4 * places] = np.packbits(bits, axis=1, bitorder="little")
    for row, to in enumerate(expected[:, 4 + 4 * places :]):
        values = x.bits[row][is_positive[row]][:room].view(np.uint8)
        to[: values.size] = values
    packed = device.floats(np.zeros((rows, words)), changes=True)
    device.launch("pack_positive", packed, x, rows, channels, words, room)
    device.same(packed, expected.view(np.float32))
    y, overflowed = device.out(rows, channels), device.integers([0], changes=True)
    device.launch("unpack_positive", y, overflowed, packed, rows, channels, words, room)
    assert overflowed.bits[0] == int(room > 0 and count.max() > room)
    kept = is_positive & (is_positive.cumsum(1) <= room)
    values, ones = np.where(kept, x.bits, 0), device.elements(np.ones((rows, channels))).bits
    device.same(y, values if room else np.where(is_positive, ones, 0))


def check_clear(device, random, n):
    y, floats = device.out(n), device.floats_out(n)
    device.launch("clear", y, n)
    device.same(y, np.zeros(n))
    device.launch("clear_floats", floats, n)
    device.same(floats, np.zeros(n))


def check_scale(device, random, n):
    x, y = device.elements(noise(random, n)), device.out(n)
    device.launch("scale", y, x, n, 0.7, None)
    device.expect(y, 0.7 * x.wide, 1e-6)
    by, y = device.elements(noise(random, 1)), device.out(n)
    device.launch("scale", y, x, n, 0.7, by)
    device.expect(y, 0.7 * by.wide * x.wide, 1e-6)
    x = device.elements(noise(random, n), changes=True)
    expected = -1.5 * x.wide
    device.launch("scale", x, x, n, -1.5, None)
    device.expect(x, expected, 1e-6)


def check_copy_words(device, random, n):
    x, y = device.integers(random.integers(0, 2**32, n), np.uint32), device.integers(np.zeros(n), np.uint32, changes=True)
    device.launch("copy_words", y, x, n)
    device.same(y, x.bits)


def check_mark(device, random, n, at, value, of_step):
    """A mark is written if a number is not finite, unless one of its step is there."""
    step, values = 7, noise(random, n)
    if at is not None:
        values[at] = value
    before = of_step << 32 | 5
    marked = device.integers(np.array([before]), np.int64, changes=True)
    device.launch("mark_non_finite", marked, device.elements(values), n, step << 32 | 3)
    is_marked = at is not None and of_step != step
    device.same(marked, np.array([step << 32 | 3 if is_marked else before]))


def check_product(device, random, rows, inner, columns, transposed, to, accumulate, has_bias):
    shape = lambda r, c, turned: (c, r) if turned else (r, c)
    a = device.elements(noise(random, *shape(rows, inner, transposed[0])))
    b = device.elements(noise(random, *shape(inner, columns, transposed[1])))
    bias = device.elements(noise(random, columns)) if has_bias else None
    make, make_out = (device.elements, device.out) if to == "product" else (device.floats, device.floats_out)
    c = make(noise(random, rows, columns), changes=True) if accumulate else make_out(rows, columns)
    expected = (a.wide.T if transposed[0] else a.wide) @ (b.wide.T if transposed[1] else b.wide)
    expected = expected + (c.wide if accumulate else 0) + (bias.wide if has_bias else 0)
    strides = columns, a.wide.shape[1], b.wide.shape[1]
    flags = *map(int, transposed), int(accumulate)
    device.launch(to, c, a, b, bias, rows, inner, columns, *strides, *flags)
    device.expect(c, expected, 1e-5)


def make_starts(device, random, sequences, positions):
    """Where sequences begin, and the last ends; or None: all have as many rows."""
    starts = np.arange(sequences + 1) * positions
    return device.integers(starts) if random.integers(2) else None


def check_drop(device, random, sequences, positions, channels, probability, has_a, in_place=False):
    rows = sequences * positions
    x = device.elements(noise(random, rows, channels), changes=in_place)
    a = device.elements(noise(random, rows, channels)) if has_a else None
    y = x if in_place else device.out(rows, channels)
    dropout, row = Dropout.of(probability), np.arange(rows)[:, None]
    factors = dropout.factors(row // positions, row % positions, np.arange(channels)[None])
    expected = x.wide * factors + (a.wide if has_a else 0)
    starts = make_starts(device, random, sequences, positions)
    device.launch("drop", y, x, a, starts, sequences, rows, channels, dropout)
    device.expect(y, expected, 1e-6)


def check_identity(device, random):
    """Each number of 16 bits comes back from float as it was."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    kind = {32: np.float32, 16: np.uint16, 15: np.float16}[device.element]
    values = (bits << 16).view(np.float32) if device.element == 32 else bits.astype(np.uint16).view(kind)
    x = device.elements(np.zeros((64, 1024)), changes=True)
    x.bits[...] = values.reshape(64, 1024)
    before, is_number = x.bits.copy(), ~np.isnan(x.wide)
    x.before = x.all.copy()
    y = device.out(64, 1024)
    device.launch("drop", y, x, None, None, 1, 64, 1024, Dropout.of(0))
    y.bits[~is_number] = 0
    device.same(y, np.where(is_number, before, np.array(0, kind)))


erf = np.vectorize(math.erf, otypes=[float])
CURVES = [
    lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    lambda x: x / (1 + np.exp(-x)),
    lambda x: np.maximum(x, 0),
    np.tanh,
]


def check_activate(device, random, n, form):
    x, dy = device.elements(10 * noise(random, n)), noise(random, n)
    y, dx = device.out(n), device.elements(dy, changes=True)
    expected = dx.wide * slopes(CURVES[form], x.wide)
    device.launch("activate", y, x, n, form)
    device.expect(y, CURVES[form](x.wide), 2e-6)
    device.launch("activate_backward", dx, x, n, form)
    device.expect(dx, expected, 2e-6)


def check_activate_parts(device, random, rows, channels, form, chunk):
    """The bits of the two kernels that it does the work of."""
    x, dy = device.elements(3 * noise(random, rows, channels)), noise(random, rows, channels)
    (dx, both), parts = (device.elements(dy, changes=True) for _ in range(2)), device.floats_out(-(-rows // chunk), channels)
    device.launch("activate_backward", dx, x, rows * channels, form)
    device.launch("column_parts", parts, dx, rows, channels, channels, chunk)
    again = device.floats_out(*parts.bits.shape)
    device.launch("activate_backward_parts", both, again, x, rows, channels, chunk, form)
    device.same(both, dx.bits)
    device.same(again, parts.bits)


def check_gate(device, random, rows, channels, form):
    x = device.elements(3 * noise(random, rows, 2 * channels))
    dy = device.elements(noise(random, rows, channels))
    y, dx = device.out(rows, channels), device.out(rows, 2 * channels)
    g, up = x.wide[:, :channels], x.wide[:, channels:]
    device.launch("gate", y, x, rows, channels, form)
    device.expect(y, CURVES[form](g) * up, 2e-6)
    device.launch("gate_backward", dx, dy, x, rows, channels, form)
    both = [slopes(CURVES[form], g) * up * dy.wide, CURVES[form](g) * dy.wide]
    device.expect(dx, np.concatenate(both, 1), 2e-6)


def check_clamped_gate(device, random, rows, channels, alpha, limit):
    x, dy = device.elements(3 * noise(random, rows, channels, 2)), device.elements(noise(random, rows, channels))
    y, dx, n = device.out(rows, channels), device.out(rows, channels, 2), rows * channels
    given, up = x.wide[..., 0], x.wide[..., 1]
    curve = lambda gate: gate / (1 + np.exp(-alpha * gate))
    gate, limited = np.minimum(given, limit), np.clip(up, -limit, limit)
    device.launch("clamped_gate", y, x, n, alpha, limit)
    device.expect(y, (limited + 1) * curve(gate), 2e-6)
    device.launch("clamped_gate_backward", dx, dy, x, n, alpha, limit)
    both = [np.where(given > limit, 0, slopes(curve, gate) * (limited + 1)), np.where(np.abs(up) > limit, 0, curve(gate))]
    device.expect(dx, np.stack(both, -1) * dy.wide[..., None], 2e-6)


def check_sinks(device, random, sequences, positions, heads, head_size):
    """Statistics lie head by head in a sequence, outputs row by row."""
    rows, width = sequences * positions, heads * head_size
    size = Attention.of(sequences, rows, heads, heads, head_size)
    starts, sinks = make_starts(device, random, sequences, positions), device.elements(noise(random, heads))
    of_rows = lambda statistics: statistics.transpose(0, 2, 1).reshape(rows, heads, 1)
    lse = device.floats(noise(random, sequences, heads, positions))
    y = device.elements(noise(random, rows, heads, head_size), changes=True)
    expected = y.wide / (1 + np.exp(sinks.wide[:, None] - of_rows(lse.wide)))
    device.launch("sink_outputs", y, lse, sinks, starts, width, size)
    device.expect(y, expected, 1e-6)
    lse = device.floats(lse.wide, changes=True)
    expected = np.logaddexp(lse.wide, sinks.wide[:, None])
    device.launch("sink_statistics", lse, sinks, starts, rows * heads, size)
    device.expect(lse, expected, 1e-6)

    lse, y, dy = device.floats(expected), device.elements(y.wide), device.elements(noise(random, rows, heads, head_size))
    slope = -(np.exp(sinks.wide[:, None] - of_rows(lse.wide)) * dy.wide * y.wide).sum((0, 2))
    for accumulate in (0, 1):
        dsinks = device.floats(noise(random, heads), changes=True) if accumulate else device.floats_out(heads)
        expected = slope + (dsinks.wide if accumulate else 0)
        device.launch("sink_backward", dsinks, dy, y, lse, sinks, starts, accumulate, size)
        device.expect(dsinks, expected, 4e-6)


def check_fold(device, random, count, length, gap, accumulate):
    parts = device.floats(noise(random, count, length + gap))
    out = device.floats(noise(random, length), changes=True) if accumulate else device.floats_out(length)
    before = out.wide if accumulate else 0
    device.launch("fold", out, parts, count, length + gap, length, accumulate)
    device.expect(out, before + parts.wide[:, :length].sum(0), 1e-6)


def check_column_parts(device, random, rows, channels, chunk):
    for stride in (channels, channels + 3):
        x = device.elements(noise(random, rows, stride))
        parts = device.floats_out(-(-rows // chunk), channels)
        device.launch("column_parts", parts, x, rows, channels, stride, chunk)
        device.expect(parts, chunks_of(x.wide[:, :channels], chunk), 1e-6)


def norm_of(x, rms, epsilon):
    """Normed rows, their means and the reciprocals of their deviations."""
    mean = 0 * x[:, :1] if rms else x.mean(1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + epsilon)
    return (x - mean) * rstd, mean, rstd


def check_residual_norm(device, random, sequences, positions, channels, probability, rms, in_place=False):
    rows, epsilon, dropout = sequences * positions, 1e-5, Dropout.of(probability)
    x, a = (device.elements(noise(random, rows, channels), changes=in_place) for _ in range(2))
    gamma, beta = (device.elements(noise(random, channels)) for _ in range(2))
    y, sums = (x, a) if in_place else (device.out(rows, channels), device.out(rows, channels))
    row, statistics = np.arange(rows)[:, None], device.floats_out(rows, 2)
    expected = a.wide + x.wide * dropout.factors(row // positions, row % positions, np.arange(channels)[None])
    affine, of_rows = [gamma, None if rms else beta], [make_starts(device, random, sequences, positions), sequences]
    tensors, sizes = [y, statistics, sums, x, a, *affine], [*of_rows, rows, channels]
    device.launch("residual_norm", *tensors, *sizes, epsilon, rms, float(rms), dropout)
    device.expect(sums, expected, 1e-6)
    n, mean, rstd = norm_of(sums.wide, rms, epsilon)
    device.expect(y, n * (rms + gamma.wide) + (0 if rms else beta.wide), 4e-6)
    device.expect(statistics, np.concatenate([mean, rstd], 1), 4e-6)
    again = [device.out(rows, channels), device.floats_out(rows, 2)]
    device.launch("norm_forward", *again, sums, *affine, rows, channels, epsilon, rms, float(rms))
    device.same(again[0], y.bits)
    device.same(again[1], statistics.bits)


def check_norm(device, random, rows, channels, rms, chunk=64, without=None, in_place=False):
    epsilon, has_beta, has_residual = 1e-5, without != "beta", without != "residual"
    x = device.elements(noise(random, rows, channels) + 0.5)
    gamma, beta = device.elements(noise(random, channels)), device.elements(noise(random, channels))
    y, statistics = device.out(rows, channels), device.floats_out(rows, 2)
    offset = float(rms)  # as in Gemma, where scales are stored as their differences from 1

    normed = lambda x: norm_of(x, rms, epsilon)
    n, mean, rstd = normed(x.wide)
    affine, sizes = [gamma, beta if has_beta else None], [rows, channels]
    device.launch("norm_forward", y, statistics, x, *affine, *sizes, epsilon, rms, offset)
    device.expect(y, n * (offset + gamma.wide) + (beta.wide if has_beta else 0), 4e-6)
    device.expect(statistics, np.concatenate([mean, rstd], 1), 4e-6)

    dy = device.elements(noise(random, rows, channels))
    residual = device.elements(noise(random, rows, channels), changes=in_place)
    dx = residual if in_place else device.out(rows, channels)
    g = dy.wide * (offset + gamma.wide)
    if channels <= 64:
        slope = row_slopes(lambda x: (normed(x)[0] * g).sum(1), x.wide)
    else:
        slope = rstd * (g - (0 if rms else g.mean(1, keepdims=True)) - n * (g * n).mean(1, keepdims=True))
    expected = slope + (residual.wide if has_residual else 0)
    statistics = device.floats(statistics.bits)
    inputs = [residual if has_residual else None, dy, x, statistics, gamma]
    device.launch("norm_backward", dx, *inputs, *sizes, rms, offset)
    device.expect(dx, expected, 1e-5)

    parts = device.floats_out(-(-rows // chunk), 2, channels)
    device.launch("norm_parts", parts, dy, x, statistics, *sizes, chunk)
    device.expect(parts, np.stack([chunks_of(dy.wide * n, chunk), chunks_of(dy.wide, chunk)], 1), 4e-6)


def check_head_norm(device, random, rows, heads, kv_heads, head_size, chunk):
    """Values are copied, normed without scales, or the keys without their scales. Norms are of each head, of all heads,
    or of each head by mean and deviation."""
    for values, norm in [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 2), (2, 2)]:
        check_head_norm_with(device, random, rows, heads, kv_heads, head_size, chunk, values, norm)


def check_head_norm_with(device, random, rows, heads, kv_heads, head_size, chunk, values, norm):
    epsilon = 1e-5
    counts = [1, 1] if norm == 1 else [heads, kv_heads]
    channels = [heads * head_size // counts[0], kv_heads * head_size // counts[1]]
    parts = NormParts(*counts, *channels, norm, values)
    queries, keys = heads * head_size, kv_heads * head_size
    scaled, every = queries + keys, queries + 2 * keys
    normed = every if values == 1 else scaled
    x = noise(random, rows, scaled if values == 2 else every) + 0.25
    if norm == 2:
        x[:, ::2] += 3  # neighbours differ: without their mean, equal ones would be rounding alone
    x = device.elements(x)
    own = counts if norm == 2 else [1, 1]
    gamma = [device.elements(noise(random, count, size)) for count, size in zip(own, channels)]
    offset = float(kv_heads == 1)  # as in Gemma, where scales are stored as their differences from 1
    scales = [np.broadcast_to(one.wide, (count, size)) for one, count, size in zip(gamma, counts, channels)]
    scale = offset + np.concatenate([one.ravel() for one in scales])
    scale = np.concatenate([scale, np.ones(normed - scaled)])

    def split(all):
        """Of each part, its channels."""
        of_queries = all[:, :queries].reshape(rows, *([counts[0], channels[0]]))
        behind = all[:, queries:].reshape(rows, -1, channels[1])
        return [of_queries, behind]

    def join(of_parts):
        return np.concatenate([part.reshape(rows, -1) for part in of_parts], 1)

    wide = split(x.wide[:, :normed])
    means = [one.mean(2, keepdims=True) if norm == 2 else 0 * one[:, :, :1] for one in wide]
    off = [one - mean for one, mean in zip(wide, means)]
    rstd = [1 / np.sqrt((one**2).mean(2, keepdims=True) + epsilon) for one in off]
    n = [one * by for one, by in zip(off, rstd)]

    numbers = [rstd, means] if norm == 2 else [rstd]
    numbers = np.concatenate([join(one) for one in numbers], 1)
    y, statistics = device.out(rows, every), device.floats_out(*numbers.shape)
    device.launch("head_norm", y, statistics, x, *gamma, rows, epsilon, offset, parts)
    behind = join(n)[:, queries:] if values == 2 else x.wide[:, normed:]
    device.expect(y, np.concatenate([join(n) * scale, behind], 1), 2e-6)
    device.expect(statistics, numbers, 2e-6)

    dy = noise(random, rows, every)
    dx, dy = device.elements(dy, changes=True), device.elements(dy)
    statistics, kinds = device.floats(statistics.bits), sum(own)
    of_all = sum(count * size for count, size in zip(own, channels))
    sums = device.floats_out(-(-rows // chunk), of_all)
    each = split(dy.wide[:, :scaled] * join(n)[:, :scaled])
    each = each if norm == 2 else [one.sum(1, keepdims=True) for one in each]
    device.launch("head_norm_parts", sums, dy, x, statistics, rows, chunk, kinds, parts)
    device.expect(sums, chunks_of(join(each), chunk), 2e-6)

    g = dy.wide[:, :normed] * scale
    if values == 2:
        g[:, queries:] += dy.wide[:, scaled:]
    g = split(g)
    g_mean = [one.mean(2, keepdims=True) if norm == 2 else 0 for one in g]
    g_n = [(one * of).mean(2, keepdims=True) for one, of in zip(g, n)]
    slope = [by * (one - mean - of * by_n) for by, one, mean, of, by_n in zip(rstd, g, g_mean, n, g_n)]
    device.launch("head_norm_backward", dx, x, statistics, *gamma, rows, offset, parts)
    device.expect(dx, np.concatenate([join(slope), dy.wide[:, normed:]], 1), 1e-5)


def make_documents(random, sequences, positions):
    """(from, to) of each position, and its place in its document. (sequences, positions)."""
    documents = np.zeros((sequences, positions, 2), np.int64)
    for sequence in range(sequences):
        bounds = [0, *sorted(random.integers(0, positions + 1, 3)), positions]
        for start, end in itertools.pairwise(bounds):
            documents[sequence, start:end] = start, end
    return documents, np.arange(positions) - documents[:, :, 0]


def make_places(device, random, sequences, positions, past, has_documents, has_pasts):
    """Documents, pasts and the position of each row of (sequences, positions)."""
    if has_pasts:
        pasts = random.integers(0, 7, sequences)
        return None, device.integers(pasts), pasts[:, None] + np.arange(positions)
    if has_documents:
        assert past == 0 or sequences == 1, "documents of a chunk begin with those before it"
        documents, places = make_documents(random, sequences, past + positions)
        return device.integers(documents, np.uint32), None, places[:, past:]
    return None, None, np.broadcast_to(past + np.arange(positions), (sequences, positions))


def check_rotate(device, random, sequences, positions, heads, kv_heads, head_size, **places):
    past = places.get("past", 0)
    size = Attention.of(sequences, sequences * positions, heads, kv_heads, head_size, past=past)
    starts = make_starts(device, random, sequences, positions)
    documents, pasts, place = make_places(
        device, random, sequences, positions, past, places.get("has_documents"), places.get("has_pasts")
    )
    x = noise(random, sequences, positions, heads + 2 * kv_heads, head_size)
    # All of a head rotates, or, scaled, its first half.
    for back, pairs, scale in [(0, head_size // 2, 1), (1, head_size // 2, 1), (0, head_size // 4, 1.5)]:
        frequencies = np.zeros(128, np.float32)
        frequencies[:pairs] = (1 / 10000.0 ** (np.arange(pairs) / max(pairs, 1))).astype(np.float32)
        angle = (place[:, :, None].astype(np.float32) * frequencies[:pairs]).astype(np.float64)[:, :, None]
        qkv = device.elements(x, changes=True)
        a, b, rest = np.split(qkv.wide, [pairs, 2 * pairs], 3)
        cosine, sine = scale * np.cos(angle), scale * np.sin(angle) * (-1 if back else 1)
        expected = np.concatenate([a * cosine - b * sine, b * cosine + a * sine, rest], 3)
        expected[:, :, heads + kv_heads :] = qkv.wide[:, :, heads + kv_heads :]
        of = Rotary((ctypes.c_float * 128)(*frequencies), scale, pairs, 0, pairs, 0, 0)
        device.launch("rotate", qkv, of, starts, documents, pasts, size, back)
        device.expect(qkv, expected, 1e-6)
        # The second channel of a pair is as far behind the first as in a head that rotates as a whole.
        half = head_size // 2
        qkv = device.elements(x, changes=True)
        expected = qkv.wide.copy()
        a, b = qkv.wide[..., :pairs], qkv.wide[..., half : half + pairs]
        expected[..., :pairs], expected[..., half : half + pairs] = a * cosine - b * sine, b * cosine + a * sine
        expected[:, :, heads + kv_heads :] = qkv.wide[:, :, heads + kv_heads :]
        of = Rotary((ctypes.c_float * 128)(*frequencies), scale, pairs, 0, half, 0, 0)
        device.launch("rotate", qkv, of, starts, documents, pasts, size, back)
        device.expect(qkv, expected, 1e-6)
        # Neighbours are paired.
        qkv = device.elements(x, changes=True)
        a, b, rest = qkv.wide[..., : 2 * pairs : 2], qkv.wide[..., 1 : 2 * pairs : 2], qkv.wide[..., 2 * pairs :]
        turned = np.stack([a * cosine - b * sine, b * cosine + a * sine], -1).reshape(*a.shape[:3], 2 * pairs)
        expected = np.concatenate([turned, rest], 3)
        expected[:, :, heads + kv_heads :] = qkv.wide[:, :, heads + kv_heads :]
        of = Rotary((ctypes.c_float * 128)(*frequencies), scale, pairs, 1, pairs, 0, 0)
        device.launch("rotate", qkv, of, starts, documents, pasts, size, back)
        device.expect(qkv, expected, 1e-6)
        # Rotated channels of queries grow with their positions.
        for interleaved in (0, 1):
            qkv = device.elements(x, changes=True)
            of = Rotary((ctypes.c_float * 128)(*frequencies), scale, pairs, interleaved, pairs, 0.4, 3)
            a, b, rest = np.split(qkv.wide, [pairs, 2 * pairs], 3)
            if interleaved:
                a, b = qkv.wide[..., : 2 * pairs : 2], qkv.wide[..., 1 : 2 * pairs : 2]
            turned = np.stack([a * cosine - b * sine, b * cosine + a * sine], -1 if interleaved else -2)
            turned = turned.reshape(*a.shape[:3], 2 * pairs)
            turned[:, :, :heads] *= (1 + 0.4 * np.log(1 + place // 3))[:, :, None, None]
            expected = np.concatenate([turned, rest], 3)
            expected[:, :, heads + kv_heads :] = qkv.wide[:, :, heads + kv_heads :]
            device.launch("rotate", qkv, of, starts, documents, pasts, size, back)
            device.expect(qkv, expected, 1e-6)


def check_positions(device, random, sequences, positions, channels, **places):
    past = places.get("past", 0)
    documents, pasts, place = make_places(
        device, random, sequences, positions, past, places.get("has_documents"), places.get("has_pasts")
    )
    table, starts = past + positions + 9, make_starts(device, random, sequences, positions)
    x = device.elements(noise(random, sequences, positions, channels))
    w = device.elements(noise(random, table, channels))
    y = device.out(sequences, positions, channels)
    sizes = [past, sequences, sequences * positions, channels]
    device.launch("add_positions", y, x, w, starts, documents, pasts, *sizes)
    device.expect(y, x.wide + w.wide[place], 1e-6)
    if pasts is not None:
        return
    for accumulate in (0, 1):
        dw = device.floats_out(table, channels)
        if accumulate:
            dw = device.floats(noise(random, table, channels), changes=True)
        expected = dw.wide if accumulate else np.zeros((table, channels))
        np.add.at(expected, place, x.wide)
        device.launch("add_positions_backward", dw, x, starts, documents, *sizes, table, accumulate)
        device.expect(dw, expected, 1e-6)


def check_kinds(device, random, rows, channels, count, chunk):
    kinds = device.integers(random.integers(0, count, rows), np.uint8)
    y = device.elements(noise(random, rows, channels), changes=True)
    w = device.elements(noise(random, count, channels))
    expected = y.wide + w.wide[kinds.bits]
    device.launch("add_kinds", y, w, kinds, rows, channels)
    device.expect(y, expected, 1e-6)
    dy = device.elements(noise(random, rows, channels))
    parts = device.floats_out(-(-rows // chunk), count, channels)
    device.launch("kind_parts", parts, dy, kinds, rows, channels, count, chunk)
    own = kinds.bits[:, None] == np.arange(count)
    device.expect(parts, chunks_of(own[:, :, None] * dy.wide[:, None], chunk), 1e-6)


def check_pooled_rows(device, random, sequences, positions, channels, pool):
    x = device.elements(noise(random, sequences, positions, channels))
    dy = device.elements(noise(random, sequences, channels))
    y, dx = device.out(sequences, channels), device.out(sequences, positions, channels)
    starts = make_starts(device, random, sequences, positions)
    sizes = [starts, sequences, sequences * positions, channels, pool]
    of_mean, at = pool == 2, [0, -1, None][pool]
    device.launch("pooled_rows", y, x, *sizes)
    device.expect(y, x.wide.mean(1), 1e-6) if of_mean else device.same(y, x.bits[:, at])
    device.launch("pooled_rows_backward", dx, dy, *sizes)
    if of_mean:
        return device.expect(dx, np.repeat(dy.wide[:, None], positions, 1) / positions, 1e-6)
    expected = np.zeros_like(dx.bits)
    expected[:, at] = dy.bits
    device.same(dx, expected)


def check_classes(device, random, sequences, positions, labels, problem, smoothing=0.0, scale=0.37):
    scores = device.elements(5 * noise(random, sequences, labels))
    is_value = problem == 1
    if is_value:
        label = np.float32(noise(random, sequences)).view(np.int32)
    else:
        classes = random.integers(0, labels, sequences)
        label = np.where(random.random(sequences) < 0.3, -100, classes).astype(np.int32)
    out = device.floats(noise(random, sequences, positions, 4), changes=True)
    out.bits[:, 0, 3] = label.view(np.float32)
    out.before = out.all.copy()
    statistics, expected = device.floats(out.bits), out.wide
    value, rows = label.view(np.float32).astype(np.float64), np.arange(sequences)

    def losses(scores):
        if is_value:
            return (scores[:, 0] - value) ** 2
        lse = scores.max(1) + np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1))
        of_label = (1 - smoothing) * scores[rows, label % labels] + smoothing * scores.mean(1)
        return np.where(label < 0, 0, lse - of_label)

    known = (label >= 0) | is_value
    expected[known, 0, 0], expected[known, 0, 1] = losses(scores.wide)[known], 1
    starts = make_starts(device, random, sequences, positions)
    sizes = [starts, sequences, sequences * positions, labels, problem, 1 - smoothing, smoothing / labels]
    device.launch("class_loss", out, scores, *sizes)
    assert out.bits[:, 0, 3].tobytes() == label.tobytes(), "labels changed"
    out.bits[:, 0, 3], expected[:, 0, 3] = 0, 0  # some labels are not numbers
    device.expect(out, expected, 2e-6)
    d = device.out(sequences, labels)
    device.launch("class_loss_backward", d, scores, statistics, scale, *sizes)
    device.expect(d, scale * row_slopes(losses, scores.wide), 2e-6)


def check_label_sets(device, random, sequences, labels, scale=0.37):
    scores = device.elements(20 * noise(random, sequences, labels))
    out = device.floats(noise(random, sequences, 1 + labels), changes=True)
    out.bits[:, 1:] = random.choice([0, 1, 0.25], (sequences, labels))
    out.before = out.all.copy()
    statistics, expected = device.floats(out.bits), out.wide
    known = out.wide[:, 1:].copy()

    def losses(scores):
        return (np.logaddexp(0, scores) - known * scores).mean(1)

    expected[:, 0] = losses(scores.wide)
    sizes = [make_starts(device, random, sequences, 2), sequences, 2 * sequences, labels, 2, 1.0, 0.0]
    device.launch("class_loss", out, scores, *sizes)
    device.expect(out, expected, 2e-6)
    d = device.out(sequences, labels)
    device.launch("class_loss_backward", d, scores, statistics, scale, *sizes)
    device.expect(d, scale / labels * (1 / (1 + np.exp(-scores.wide)) - known), 2e-6)


def check_token_classes(device, random, rows, labels, scale=0.37):
    scores = device.elements(5 * noise(random, rows, labels))
    label = np.where(random.random(rows) < 0.3, -100, random.integers(0, labels, rows)).astype(np.int32)
    out = device.floats(noise(random, rows, 4), changes=True)
    out.bits[:, 3] = label.view(np.float32)
    out.before = out.all.copy()
    statistics, expected = device.floats(out.bits), out.wide

    def losses(scores):
        lse = scores.max(1) + np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1))
        return np.where(label < 0, 0, lse - scores[np.arange(rows), label % labels])

    expected[label >= 0, 0], expected[label >= 0, 1] = losses(scores.wide)[label >= 0], 1
    sizes = [make_starts(device, random, 1, rows), 0, rows, labels, 0, 1.0, 0.0]
    device.launch("class_loss", out, scores, *sizes)
    out.bits[:, 3], expected[:, 3] = 0, 0  # some labels are not numbers
    device.expect(out, expected, 2e-6)
    d = device.out(rows, labels)
    device.launch("class_loss_backward", d, scores, statistics, scale, *sizes)
    device.expect(d, scale * row_slopes(losses, scores.wide), 2e-6)


def check_rows(device, random, rows, channels, count, first):
    statistics = device.floats(noise(random, rows, 4))
    statistics.bits[:, 3] = random.choice([-100, 0, 7], rows).astype(np.int32).view(np.float32)
    statistics.before = statistics.all.copy()
    places = device.integers(np.full(count, 99), changes=True)
    labelled = np.flatnonzero(statistics.bits[:, 3].view(np.int32) >= 0)[first : first + count]
    labelled = np.concatenate([labelled, np.full(count - len(labelled), -1)])
    device.launch("labelled_rows", places, statistics, rows, first, count)
    device.same(places, labelled)
    x, y = device.elements(noise(random, rows, channels)), device.out(count, channels)
    device.launch("gather_rows", y, x, places, count, channels)
    device.same(y, np.where(labelled[:, None] >= 0, x.bits[labelled], np.zeros((), x.bits.dtype)))
    sums = device.floats(noise(random, rows, channels), changes=True)
    added = device.floats(noise(random, count, channels))
    expected = sums.wide.copy()
    expected[labelled[labelled >= 0]] += added.wide[labelled >= 0]
    device.launch("add_rows", sums, added, places, count, channels)
    device.expect(sums, expected, 1e-6)


def softmax_of(logits, chosen, normalised):
    """The weights of chosen experts: the softmax over them, or over all."""
    every = np.exp(logits - logits.max(1, keepdims=True))
    of_chosen = np.take_along_axis(every, chosen, 1)
    return of_chosen / (of_chosen if normalised else every).sum(1, keepdims=True)


def choice_of(logits, per_token):
    """The experts of the largest logits, in ascending order; of equal ones the smaller; NaN comes last."""
    keys = np.where(np.isnan(logits), np.inf, -logits), np.isnan(logits)
    return np.sort(np.lexsort(keys)[:, :per_token], 1)


def packed_choice(chosen, weights):
    """As kernels read it: the bits of the experts, then the weights."""
    return np.concatenate([chosen.astype(np.int32).view(np.float32), np.asarray(weights, np.float32)], 1)


def check_choice(device, random, rows, experts, per_token, normalised):
    """Exactly that of a sort, with ties, infinities and NaN."""
    values = np.where(random.random((rows, experts)) < 0.5, random.integers(-2, 3, (rows, experts)), noise(random, rows, experts))
    special = random.random((rows, experts))
    values[(special < 0.1) & (np.arange(rows)[:, None] % 3 == 0)] = -np.inf
    values[(special > 0.9) & (np.arange(rows)[:, None] % 3 == 1)] = np.nan
    logits = device.floats(values)
    logits.bits[(logits.bits == 0) & (np.arange(experts) % 2 == 0)] = np.float32(-0.0)
    logits.before, chosen = logits.all.copy(), device.floats_out(rows, 2 * per_token)
    device.launch("choose_experts", chosen, logits, rows, experts, per_token, normalised)
    expected = choice_of(logits.wide, per_token)
    found = chosen.bits.copy()
    assert (found[:, :per_token].view(np.int32) == expected).all(), "another choice"
    with np.errstate(invalid="ignore"):
        weights = softmax_of(logits.wide, expected, normalised)
    weights[np.isnan(logits.wide).any(1)] = np.nan
    is_nan = np.isnan(weights)
    assert (np.isnan(found[:, per_token:]) == is_nan).all(), "NaN elsewhere"
    chosen.bits[:, :per_token], chosen.bits[:, per_token:][is_nan] = 0, 0
    device.expect(chosen, np.concatenate([0 * expected, np.where(is_nan, 0, weights)], 1), 1e-6)


def check_route(device, random, rows, channels, experts, per_token, normalised):
    h, w = device.elements(noise(random, rows, channels)), device.elements(noise(random, experts, channels))
    bias, every = device.elements(noise(random, experts)), h.wide @ w.wide.T
    for bias, expected in ((bias, every + bias.wide), (None, every)):
        logits, one = device.floats_out(rows, experts), device.floats_out(1, experts)
        device.launch("route_logits", logits, h, w, bias, rows, experts, channels)
        device.expect(logits, expected, 2e-6)
        device.launch("route_logits", one, device.elements(h.wide[-1:]), w, bias, 1, experts, channels)
        device.same(one, logits.bits[-1:])

    experts_of = np.sort(random.permuted(np.tile(np.arange(experts), (rows, 1)), axis=1)[:, :per_token], 1)
    weights_of = lambda logits: softmax_of(logits, experts_of, normalised)
    chosen = device.floats(packed_choice(experts_of, weights_of(every)))
    dchosen, dl = device.floats(noise(random, rows, per_token)), device.floats_out(rows, experts)
    logits = device.floats(every)
    device.launch("route_gradient", dl, logits, chosen, dchosen, rows, experts, per_token, normalised)
    device.expect(dl, row_slopes(lambda logits: (weights_of(logits) * dchosen.wide).sum(1), every), 2e-6)

    dl, dh = device.floats(dl.bits), device.floats(noise(random, rows, channels), changes=True)
    expected = dh.wide + dl.wide @ w.wide
    device.launch("route_rows", dh, dl, w, rows, experts, channels)
    device.expect(dh, expected, 2e-6)
    for accumulate in (0, 1):
        dw = device.floats(noise(random, experts, channels), changes=True) if accumulate else device.floats_out(experts, channels)
        expected = dl.wide.T @ h.wide + (dw.wide if accumulate else 0)
        device.launch("route_weights", dw, dl, h, rows, experts, channels, 64, accumulate)
        device.expect(dw, expected, 4e-6)


def check_experts(device, random, rows, channels, experts, per_token):
    """Rows go to experts and come back. One expert has all rows, and one has none."""
    draws = random.random((rows, experts))
    draws[:, 0], draws[:, -1] = 2, -1 if per_token < experts else 1
    experts_of = np.sort(np.argsort(-draws, 1)[:, :per_token], 1)
    chosen = device.floats(packed_choice(experts_of, noise(random, rows, per_token)))
    weights = chosen.bits[:, per_token:].ravel()
    row_of, places = (device.integers(np.full(rows * per_token, -1), changes=True) for _ in range(2))
    counts = device.integers(np.full(experts, -1), changes=True)
    device.launch("dispatch", row_of, places, counts, chosen, rows, experts, per_token)
    order = np.argsort(experts_of.ravel(), kind="stable")
    device.same(places, order)
    device.same(row_of, order // per_token)
    device.same(counts, np.bincount(experts_of.ravel(), minlength=experts))

    own = order[experts_of.ravel()[order] == 0]
    count, of_own = len(own), weights[own][:, None].astype(np.float64)
    row_of, places = device.integers(own // per_token), device.integers(own)
    x, z = (device.elements(noise(random, count, channels)) for _ in range(2))
    y, dots = device.out(count, channels), device.floats(noise(random, rows, per_token), changes=True)
    device.launch("weigh_rows", y, x, places, chosen, per_token, count, channels)
    device.expect(y, of_own * x.wide, 1e-7)
    expected = dots.wide
    expected.ravel()[own] = (x.wide * z.wide).sum(1)
    device.launch("row_dots", dots, x, z, places, count, channels, None, None, 0)
    device.expect(dots, expected, 1e-6)
    outputs = channels + 1
    dz, bias = device.elements(noise(random, count, outputs)), device.elements(noise(random, outputs))
    dots = device.floats(noise(random, rows, per_token), changes=True)
    expected = dots.wide
    expected.ravel()[own] = (x.wide * z.wide).sum(1) + dz.wide @ bias.wide
    device.launch("row_dots", dots, x, z, places, count, channels, dz, bias, outputs)
    device.expect(dots, expected, 1e-6)
    for accumulate in (0, 1):
        y = device.floats(noise(random, outputs), changes=True) if accumulate else device.floats_out(outputs)
        expected = (of_own * dz.wide).sum(0) + (y.wide if accumulate else 0)
        device.launch("sum_rows", y, dz, places, chosen, per_token, count, outputs, accumulate)
        device.expect(y, expected, 4e-6)
    for is_weighed in (True, False):
        y = device.floats(noise(random, rows, channels), changes=True)
        product = (weights[own][:, None] if is_weighed else np.float32(1)) * x.wide.astype(np.float32)
        expected = y.bits.copy()
        expected[own // per_token] += product
        of_weights = [places, chosen] if is_weighed else [None, None]
        device.launch("combine_rows", y, x, row_of, *of_weights, per_token, count, channels)
        device.same(y, expected)


def ranks_of(logits, experts_of):
    """The place of each choice among those of its row, the best first."""
    own = np.take_along_axis(logits, experts_of, 1)
    order = np.lexsort((experts_of, -own))
    return np.argsort(order, 1)


def check_limits(device, random, sequences, positions, experts, per_token, factor):
    """Capacities of experts, with and without random second choices; sums of each sequence; slopes of losses."""
    rows = sequences * positions
    starts = make_starts(device, random, sequences, positions)
    logits = device.floats(2 * noise(random, rows, experts))
    experts_of = choice_of(logits.wide, per_token)
    ranks = ranks_of(logits.wide, experts_of)
    weights = softmax_of(logits.wide, experts_of, True)
    chosen = device.floats(packed_choice(experts_of, weights))
    for draws in (Dropout.of(0), Dropout.of(0.5)):
        limited = device.floats_out(rows, 2 * per_token)
        millionths = int(factor * 1e6)
        device.launch("limit_experts", limited, chosen, logits, starts, sequences, rows, experts, per_token, millionths, draws)
        most = max(-(-millionths * per_token * positions // (1000000 * experts)), 1) if millionths else rows
        is_dropped = np.zeros((rows, per_token), bool)
        for sequence in range(sequences):
            taken = np.zeros(experts, int)
            for rank, position in np.ndindex(per_token, positions):
                row = sequence * positions + position
                (choice,) = np.flatnonzero(ranks[row] == rank)
                weight, is_kept = chosen.bits[row, per_token + choice], True
                if rank == 1 and draws.threshold:
                    # Below 2 w, where the threshold of a mask would be.
                    drawn = Dropout.of(0.5)
                    drawn.threshold, drawn.scale = min(int(float(weight) * 2**33), 2**32 - 1), 1
                    is_kept = 2 * weight >= 1 or drawn.factors(sequence, position, 0) == 0
                is_kept &= taken[experts_of[row, choice]] < most
                taken[experts_of[row, choice]] += is_kept
                is_dropped[row, choice] = not is_kept
        expected = experts_of | np.where(is_dropped, -(2**31), 0)
        device.same(limited, packed_choice(expected, chosen.bits[:, per_token:]))

    limited = device.floats(limited.bits)
    row_of, places = (device.integers(np.full(rows * per_token, -1), changes=True) for _ in range(2))
    counts = device.integers(np.full(experts, -1), changes=True)
    device.launch("dispatch", row_of, places, counts, limited, rows, experts, per_token)
    order = np.argsort(experts_of.ravel(), kind="stable")
    order = order[~is_dropped.ravel()[order]]
    left = np.full(rows * per_token - len(order), -1)
    device.same(places, np.concatenate([order, left]))
    device.same(row_of, np.concatenate([order // per_token, left]))
    device.same(counts, np.bincount(experts_of.ravel()[order], minlength=experts))

    lse, most = device.floats_out(rows), logits.wide.max(1)
    every = most + np.log(np.exp(logits.wide - most[:, None]).sum(1))
    device.launch("route_lse", lse, logits, rows, experts)
    device.expect(lse, every, 1e-6)
    p = np.exp(logits.wide - every[:, None])
    lse = device.floats(every)
    for first_choice, accumulate in itertools.product((0, 1), repeat=2):
        of_one = lambda x: x.reshape(sequences, positions, -1).sum(1)
        is_counted = (ranks == 0) | (not first_choice)
        own = ((experts_of[:, :, None] == np.arange(experts)) & is_counted[:, :, None]).sum(1)
        dropped = is_dropped.sum(1, keepdims=True)
        sums = np.concatenate([of_one(part) for part in (own, p, every[:, None] ** 2, dropped)], 1)
        out = device.floats(noise(random, *sums.shape), changes=True) if accumulate else device.floats_out(*sums.shape)
        sums = sums + (out.wide if accumulate else 0)
        sizes = [sequences, rows, experts, per_token, first_choice, accumulate]
        device.launch("measure_routes", out, logits, lse, limited, starts, *sizes)
        device.expect(out, sums, 1e-6)

    slopes = device.floats(noise(random, sequences, experts + 1))
    dl = device.floats(noise(random, rows, experts), changes=True)
    of_rows = np.repeat(slopes.wide, positions, 0)
    mean = (p * of_rows[:, :-1]).sum(1, keepdims=True)
    expected = dl.wide + p * (of_rows[:, :-1] - mean + of_rows[:, -1:] * every[:, None])
    device.launch("route_slopes", dl, logits, slopes, starts, sequences, rows, experts)
    device.expect(dl, expected, 2e-6)


def check_gated_rows(device, random, rows, channels):
    x, gate = device.elements(noise(random, rows, channels)), device.elements(4 * noise(random, rows, 1))
    sigmoid, y = 1 / (1 + np.exp(-gate.wide)), device.floats_out(rows, channels)
    device.launch("gate_rows", y, x, gate, rows, channels)
    device.expect(y, sigmoid * x.wide, 1e-6)
    dy, dx, dgate = device.elements(noise(random, rows, channels)), device.out(rows, channels), device.out(rows, 1)
    device.launch("gate_rows_backward", dx, dgate, dy, x, gate, rows, channels)
    device.expect(dx, sigmoid * dy.wide, 1e-6)
    device.expect(dgate, (dy.wide * x.wide).sum(1, keepdims=True) * sigmoid * (1 - sigmoid), 1e-6)


def check_remember(device, random, rows, packed, width):
    qkv, y = device.elements(noise(random, rows, packed)), device.out(rows, width)
    device.launch("remember", y, qkv, rows, packed, width)
    device.same(y, qkv.bits[:, packed - width :])
    # Of all sizes, so that rounding is seen: to nothing, to the smallest numbers and to infinity.
    kv = device.floats(noise(random, rows, width) * 2.0 ** random.integers(-30, 18, (rows, width)))
    kv.bits.flat[:3] = [1.00390625, 65519.0, 2.0**-25][: kv.bits.size]
    kv.before, back = kv.all.copy(), device.elements(qkv.wide, changes=True)
    with np.errstate(over="ignore"):
        convert = {32: np.float32, 16: to_bfloat, 15: np.float16}[device.element]
        expected = np.concatenate([qkv.bits[:, : packed - width], convert(kv.bits)], 1)
    device.launch("recall", back, kv, rows, packed, width, 1)
    device.same(back, expected)
    shares, back = device.floats(noise(random, 3, rows, width)), device.elements(qkv.wide, changes=True)
    device.launch("recall", back, shares, rows, packed, width, 3)
    device.expect(back, np.concatenate([qkv.wide[:, : packed - width], shares.wide.sum(0)], 1), 1e-6)


def check_regroup(device, random, rows, groups, kinds):
    """`kinds`: the columns that a group has of each; in groups, those of the first `split` lie before the others."""
    kinds, split = kinds
    of_kinds = [(split, 0), (len(kinds), split)]
    first, at = [0] * len(kinds), 0
    for end, start in of_kinds:
        stride = sum(kinds[start:end])
        for kind in range(start, end):
            first[kind] = at + sum(kinds[start:kind])
        at += groups * stride
    width = at
    strides = [sum(kinds[:split])] * split + [sum(kinds[split:])] * (len(kinds) - split)
    # Kind by kind they lie in another order: the last kind comes first.
    order = [len(kinds) - 1, *range(len(kinds) - 1)]
    by_kind, columns, at = [0] * len(kinds), [], 0
    for kind in order:
        by_kind[kind] = at
        at += groups * kinds[kind]
        for group in range(groups):
            begin = first[kind] + group * strides[kind]
            columns += range(begin, begin + kinds[kind])
    sizes = [number for kind in zip(kinds, first, strides, by_kind) for number in kind]
    of_text = ColumnGroups(groups, (ctypes.c_int * 24)(*sizes))
    x, y, back = device.elements(noise(random, rows, width)), device.out(rows, width), device.out(rows, width)
    device.launch("regroup_columns", y, x, rows, width, 0, of_text)
    device.same(y, x.bits[:, columns])
    device.launch("regroup_columns", back, y, rows, width, 1, of_text)
    device.same(back, x.bits)


def check_attention_to_past(device, random, pasts, positions, heads, kv_heads, head_size, window, spare):
    sequences, capacity = len(pasts), max(pasts) + spare
    size = Attention.of(sequences, sequences * positions, heads, kv_heads, head_size, window=window)
    starts = make_starts(device, random, sequences, positions)
    qkv = device.elements(2 * noise(random, sequences, positions, heads + 2 * kv_heads, head_size))
    past = device.elements(2 * noise(random, sequences, max(capacity, 1), 2, kv_heads, head_size))
    expected = np.zeros((sequences, positions, heads, head_size))
    statistics = np.zeros((sequences, heads, positions))
    for sequence, before in enumerate(pasts):
        new = qkv.wide[sequence, :, heads:].reshape(positions, 2, kv_heads, head_size)
        kv = np.concatenate([past.wide[sequence, :before], new])
        for at, head in np.ndindex(positions, heads):
            keys = slice(max(before + at + 1 - window, 0) if window else 0, before + at + 1)
            k, v = kv[keys, :, head * kv_heads // heads].swapaxes(0, 1)
            scores = k @ qkv.wide[sequence, at, head] / math.sqrt(head_size)
            p = np.exp(scores - scores.max())
            expected[sequence, at, head] = p @ v / p.sum()
            statistics[sequence, head, at] = scores.max() + np.log(p.sum())
    y, lse = device.out(*expected.shape), device.floats_out(*statistics.shape)
    arguments = [y, lse, qkv, past, starts, device.integers(pasts), max(capacity, 1), size]
    device.launch("attention_to_past", *arguments)
    device.expect(y, expected, 2e-6)
    device.expect(lse, statistics, 2e-6)


def checks():
    """Of all kernels."""
    n = [dict(n=n) for n in (1, 3, 4, 5, 1023, 1024, 1025, 5003)]
    drops = [(1, 1, 1), (2, 3, 4), (3, 2, 7), (2, 2, 1027)]
    drops = [dict(sequences=b, positions=t, channels=c) for b, t, c in drops]
    probabilities = [(0, False), (0, True), (0.25, False), (0.1, True)]
    probabilities = [dict(probability=p, has_a=a) for p, a in probabilities]
    rows = [(1, 1), (1, 4), (3, 7), (5, 48), (131, 5), (2, 1030), (7, 1024), (65, 132)]
    rows = [dict(rows=r, channels=c) for r, c in rows]
    norms = [dict(without="beta"), dict(without="residual"), dict(in_place=True), dict(chunk=3)]
    heads = [(1, 1, 2), (3, 1, 6), (4, 2, 64), (2, 2, 256), (6, 2, 20)]
    heads = [dict(heads=h, kv_heads=k, head_size=d) for h, k, d in heads]
    wide_heads = [dict(heads=2, kv_heads=1, head_size=512)]
    grouped = [([1] * 3, 3), ([12] * 3, 3), ([130] * 3, 3), ([5, 5, 6, 6, 2, 2], 4), ([64, 64, 256, 256, 3, 3], 4)]
    head_rows = [dict(rows=r, chunk=k) for r, k in ((1, 64), (5, 2), (70, 64))]
    kinds = [dict(count=c, chunk=k) for c, k in ((1, 4), (2, 64), (3, 5))]
    folds = [dict(count=c, length=l) for c, l in itertools.product((1, 7, 40), (1, 255, 257))]
    classes = [dict(labels=l, problem=v) for l, v in ((1, 0), (2, 0), (31, 0), (77, 0), (1, 1))]
    places = [{}, dict(past=64), dict(has_pasts=True)]
    places += [dict(has_documents=True)]
    places = [dict(sequences=b, positions=t, **p) for b, t in ((1, 1), (3, 5), (2, 17)) for p in places]
    places += [dict(sequences=1, positions=t, has_documents=True, past=6) for t in (1, 17)]
    pasts = [([0], 1, 0), ([0, 5, 31], 3, 2), ([300, 0, 64, 257], 2, 1)]
    pasts = [dict(pasts=p, positions=t, spare=s) for p, t, s in pasts]
    remembered = [dict(rows=r, packed=p, width=w) for r, p, w in ((1, 3, 2), (5, 96, 64), (3, 3072, 2048))]

    routers = [(1, 1), (5, 2), (33, 8), (7, 7), (130, 40)]
    routers = [dict(experts=e, per_token=k) for e, k in routers]
    parts = [(1, 3, 3, 0), (5, 12, 4, 8), (3, 9, 1, 3), (2, 2060, 1100, 4), (4, 2051, 2050, 1)]
    parts = [dict(rows=r, width=w, columns=n, first=f) for r, w, n, f in parts]

    def each(*lists, **axes):
        """All combinations."""
        axes = [[{name: value} for value in values] for name, values in axes.items()]
        return [dict(itertools.chain(*map(dict.items, one))) for one in itertools.product(*lists, *axes)]

    # A block of each expert emulates every rank of choices: of many experts with many choices, one case.
    limits = [*routers[:-1], dict(experts=130, per_token=3)]
    limits = each(limits, sequences=[1, 3], positions=[1, 7], factor=[0, 0.3, 1.25])
    limits += each(routers[-1:], sequences=[1], positions=[1], factor=[0.3])

    own = [
        ("elementwise", check_clear, n),
        ("elementwise", check_casts, n),
        ("elementwise", check_scale, n),
        ("elementwise", check_copy_words, n),
        ("elementwise", check_mark, each([dict(n=5, at=None), dict(n=1030, at=1029), dict(n=9, at=0)],
                                         value=[math.inf, math.nan], of_step=[0, 6, 7])),
        ("elementwise", check_bias, rows),
        ("elementwise", check_drop, each(drops, probabilities)),
        ("elementwise", check_drop, each(drops, probability=[0.5], has_a=[True], in_place=[True])),
        ("elementwise", check_identity, [{}]),
        ("elementwise", check_activate, each(n[-3:], form=range(5))),
        ("elementwise", check_activate_parts, each(rows, form=range(5), chunk=[1, 64])),
        ("elementwise", check_gate, each(rows, form=range(5))),
        ("elementwise", check_clamped_gate, each(rows, alpha=[1.702], limit=[7.0, 0.5])),
        ("elementwise", check_fold, each(folds, gap=[0, 3], accumulate=[0, 1])),
        ("elementwise", check_column_parts, each(rows, chunk=[1, 3, 64])),
        ("product", check_product, each(
            [dict(rows=r, inner=k, columns=c) for r, k, c in ((1, 1, 1), (17, 5, 33), (40, 70, 16), (1, 90, 2))],
            transposed=[(False, False), (True, False), (False, True)], to=["product", "product_to_floats"],
            accumulate=[False, True], has_bias=[False, True])),
        ("quantised", check_nf4, [*n, dict(n=34001)]),
        ("quantised", check_nf4_part, [dict(rows=r, run=n, pitch=p, first=f) for r, n, p, f in (
            (1, 1, 1, 0), (1, 643, 643, 16382), (7, 6, 24, 10), (300, 62, 250, 190), (40, 448, 896, 448))]),
        ("quantised", check_bf16, n),
        ("quantised", check_int8, rows),
        ("packed", check_bfloats, n),
        ("packed", check_packed_rows, each([dict(rows=r, channels=c) for r, c in ((1, 1), (3, 7), (2, 1030), (5, 64))],
                                           size=[1, 7, 64])),
        ("packed", check_positive, each(rows, room=[0, 1, 40, 10**6])),
        ("norm", check_norm, each(rows, rms=[0, 1])),
        ("norm", check_norm, each(rows[2:6], norms, rms=[0])),
        ("norm", check_residual_norm, each(drops, probability=[0, 0.3], rms=[0, 1], in_place=[False, True])),
        ("head_norm", check_head_norm, each(heads, head_rows)),
        ("rotary", check_rotate, each(places, heads[:4])),
        ("embedding", check_positions, each(places, channels=[1, 6, 1028])),
        ("embedding", check_kinds, each(rows, kinds)),
        ("classes", check_pooled_rows, each(sequences=[1, 3], positions=[1, 4], channels=[1, 8, 1027], pool=[0, 1, 2])),
        ("classes", check_classes, each(classes, sequences=[1, 9], positions=[1, 3])),
        ("classes", check_token_classes, each(rows=[1, 13], labels=[1, 9, 40])),
        ("classes", check_classes, each(sequences=[3], positions=[2], labels=[2, 40], problem=[0], smoothing=[0.1])),
        ("classes", check_label_sets, each(sequences=[1, 9], labels=[1, 3, 31, 77])),
        ("experts", check_choice, each(routers, rows=[1, 9, 70], normalised=[0, 1])),
        ("experts", check_route, each(rows[2:], routers[:-1], normalised=[0, 1])),
        ("experts", check_experts, each([*rows, dict(rows=1300, channels=3)], routers[:-1])),
        ("experts", check_limits, limits),
        ("experts", check_limits, [dict(sequences=2, positions=600, experts=5, per_token=2, factor=0.5)]),
        ("experts", check_gated_rows, rows),
        ("sinks", check_sinks, each(sequences=[1, 3], positions=[1, 7, 130], heads=[1, 5], head_size=[3, 64])),
        ("rows", check_rows, each([*rows, dict(rows=1300, channels=3)], count=[1, 5, 700], first=[0, 2])),
        ("rows", check_columns, parts),
        ("past", check_remember, remembered),
        ("rows", check_regroup, each(rows=[1, 5], groups=[1, 3], kinds=grouped)),
        ("past", check_attention_to_past, each(pasts, heads[1:] + wide_heads, window=[0, 1, 40])),
    ]
    return own + attention.checks() + linear_attention.checks()


def main():
    faulthandler.enable()
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("files", nargs="*", help="names of files of kernels; none: all")
    arguments.add_argument("--nvrtc", help="the library")
    arguments.add_argument("--cublaslt", help="the library")
    arguments.add_argument("--write", action="store_true", help="write sass.json and passed.json anew")
    arguments.add_argument("--only", choices=["compile", "emulate", "look"])
    arguments = arguments.parse_args()
    every = sorted({path.stem for path in KERNELS.glob("*.cu")} - {"prelude"} | set(TOGETHER))
    files = arguments.files or every
    is_all = IS_WHOLE or arguments.files or arguments.nvrtc or arguments.only or arguments.write
    passed = {} if is_all else json.loads(PASSED.read_text("utf-8"))
    new = [file for file in files if passed.get(file) != digest(file)]
    if passed:
        print(f"compiled and looked at: {', '.join(new) or 'no file'}. The others have not changed since they passed")
    well = True
    if arguments.only in (None, "compile"):
        for path in [arguments.nvrtc] if arguments.nvrtc else Nvrtc.find():
            well &= has_all(path, "nvrtc", "compile.rs", "libraries.rs")
            well &= not new or compile_all(Nvrtc(path), new, arguments.write)
    if arguments.cublaslt:
        well &= has_all(arguments.cublaslt, "cublasLt", "product.rs", "libraries.rs")
    well &= arguments.only not in (None, "emulate") or emulate_all(files)
    well &= arguments.only not in (None, "look") or not new or look_all(new)
    if arguments.write and well and not (arguments.only or arguments.files):
        PASSED.write_text(json.dumps({file: digest(file) for file in every}, indent=1) + "\n", "utf-8")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
