"""How close the CPU device comes to the machine's limits, and the cost of the ring.

    cargo build --release
    pip install mkl && python benches/limits.py product    # FLOP/s beside MKL's product
    python3 benches/limits.py schedules                    # relay beside resident
    python3 benches/limits.py depth                        # twice the layers
    python3 benches/limits.py visits                       # tiny layers: the cost of a visit
    python3 benches/limits.py ceiling                      # both schedules in the same memory

Only `product` needs a package. `product` and `schedules` take the names of shapes, and all parts take --rounds N. Each
round starts all processes anew, in turn. A figure is the median of the rounds, with their range. `l2l bench --kernels`
prints the rates of kernels.
"""

import argparse
import ctypes
import functools
import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = os.environ.get("L2L", Path(__file__).parent.parent / "target/release/l2l")
STEPS = 3
MIB = 1 << 20
# The shapes of the races A, B, D and E, with random weights.
LLAMA = "preset = 'llama-7b', layers = 26, hidden = 1024, heads = 16, kv_heads = 4, "
SHAPES = {
    "A": ("preset = 'bert-large', positions = 128", 16, 4, 128),
    "B": ("preset = 'gpt2'", 8, 1, 1024),
    "D": (LLAMA + "intermediate = 4096, vocabulary = 32000, positions = 512", 4, 1, 512),
    "E": (
        "preset = 'gpt2', layers = 12, hidden = 512, heads = 8, vocabulary = 8192, positions = 128",
        32,
        8,
        128,
    ),
}


def config_of(model, batch, micro, length, schedule="kind = 'relay', recompute = false", more=""):
    return f"""
model = {{ {model}, dropout = 0.0 }}
data = {{ train = "random", sequence_length = {length} }}
step = {{ batch = {batch}, micro_batch = {micro}, steps = {STEPS} }}
schedule = {{ {schedule} }}
{more}
"""


def events(command, config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(config)
        done = subprocess.run(
            [PROGRAM, command, path, "--format", "json"], capture_output=True, text=True
        )
    if done.returncode:
        sys.exit(f"{command} of\n{config}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def steps(config):
    """The step events after the first."""
    return [event for event in events("train", config) if event["event"] == "step"][1:]


def seconds(config):
    return statistics.median(event["seconds"] for event in steps(config))


def spread(values, digits=2):
    middle, least, most = (f(values) for f in (statistics.median, min, max))
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


@functools.cache
def mkl():
    found = glob.glob(f"{sys.prefix}/lib/libmkl_rt.so*")
    if not found:
        sys.exit("`product` needs MKL: pip install mkl, and this python")
    os.environ.setdefault("MKL_NUM_THREADS", str(os.cpu_count()))
    return ctypes.CDLL(found[0])


def mkl_flops_per_second():
    """MKL's best rate over products of the races' sizes and a large square one."""
    row_major, plain, transposed = 101, 111, 112
    largest = 4096 * 4096
    a, b, c = ((ctypes.c_float * largest)(*([0.5] * 4096)) for _ in range(3))
    for matrix in (a, b, c):
        ctypes.memmove(ctypes.byref(matrix, 4 * 4096), matrix, 4 * (largest // 2 - 4096))
    best = 0.0
    for rows, depth, columns in [
        (1024, 1024, 1024),
        (2048, 2048, 2048),
        (512, 1024, 4096),
        (512, 4096, 1024),
        (1024, 512, 2048),
        (1024, 768, 3072),
    ]:
        for of_b, stride in [(plain, columns), (transposed, depth)]:
            for _ in range(8):
                begin = time.perf_counter()
                mkl().cblas_sgemm(
                    *(row_major, plain, of_b, rows, columns, depth, ctypes.c_float(1.0), a, depth),
                    *(b, stride, ctypes.c_float(0.0), c, columns),
                )
                took = time.perf_counter() - begin
                best = max(best, 2 * rows * depth * columns / took)
    return best


def product(rounds, names):
    """Model FLOP/s of training, beside the best rate of MKL before and after it."""
    for name in names or SHAPES:
        shares, products = [], []
        for _ in range(rounds):
            before = mkl_flops_per_second()
            summary = events("bench", config_of(*SHAPES[name]))[-1]
            limit = max(before, mkl_flops_per_second())
            shares.append(summary["model_flops_per_second"] / limit)
            products.append(summary["matmul_flops_per_second"] / limit)
            print(f"{name}: MKL {limit / 1e9:.0f} GFLOP/s", flush=True)
        print(
            f"{name}: model FLOP/s ÷ MKL's product {spread(shares)}; "
            f"our product ÷ MKL's {spread(products)}",
            flush=True,
        )


def schedules(rounds, names):
    """The rate of the relay relative to the resident schedule's."""
    for name in names or SHAPES:
        ratios = []
        for turn in range(rounds):
            kinds = ["relay", "resident"][:: -1 if turn % 2 else 1]
            took = {
                kind: seconds(
                    config_of(*SHAPES[name], schedule=f"kind = '{kind}', recompute = false")
                )
                for kind in kinds
            }
            ratios.append(took["resident"] / took["relay"])
        print(f"{name}: relay ÷ resident {spread(ratios, 3)}", flush=True)


def depth(rounds, _):
    """Seconds a step with 12, 24 and 48 layers, relative to 12."""
    of = lambda layers: config_of(
        f"preset = 'gpt2', layers = {layers}, hidden = 512, heads = 8, vocabulary = 256, "
        "positions = 128",
        *(16, 4, 128),
    )
    ratios = {24: [], 48: []}
    for _ in range(rounds):
        base = seconds(of(12))
        for layers, found in ratios.items():
            found.append(seconds(of(layers)) / base)
    for layers, found in ratios.items():
        print(f"{layers} layers ÷ 12 layers: {spread(found, 3)} of {layers / 12:.0f}")


def visits(rounds, _):
    """The time of a visit to a layer of width 64, and how long the device waits in it."""
    layers = 96
    model = f"layers = {layers}, hidden = 64, heads = 2, vocabulary = 256, positions = 64"
    for micro_batches, length in [(1, 64), (4, 16)]:
        wait, took = [], []
        for _ in range(rounds):
            for step in steps(config_of(model, micro_batches, 1, length)):
                wait.append(1e6 * step["exposed_wait_seconds"] / (2 * layers))
                took.append(1e6 * step["seconds"] / (2 * layers))
        print(
            f"a visit of {micro_batches} micro-batches of {length} tokens: {spread(took, 0)} µs, "
            f"of which the device waits {spread(wait, 0)}"
        )


def ceiling(rounds, _):
    """BERT-Large in the memory that the resident schedule needs for micro-batches of one."""
    model, batch = "preset = 'bert-large', positions = 128", 32
    kinds = {
        "relay": "kind = 'relay', recompute = false",
        "relay, recomputing": "kind = 'relay', recompute = true",
        "resident": "kind = 'resident', recompute = false",
    }
    everything = 'channels.weights = 100000\nstash.place = "device"'
    more = {kind: everything if kind == "resident" else "" for kind in kinds}

    def bytes_of(kind, micro):
        # The resident side also holds the optimizer's moments, as PyTorch does, and the activations of
        # one micro-batch.
        size = micro if kind == "resident" else batch
        plan = events("plan", config_of(model, size, micro, 128, kinds[kind], more[kind]))[0]
        moments = 8 * plan["parameters"] if kind == "resident" else 0
        return plan["device_bytes"]["total"] + moments

    limit = bytes_of("resident", 1)
    sizes = {}
    for kind in kinds:
        fits = [m for m in (1, 2, 4, 8, 16, 32) if bytes_of(kind, m) <= limit]
        sizes[kind] = max(fits)
    took = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, micro in sizes.items():
            took[kind].append(seconds(config_of(model, batch, micro, 128, kinds[kind], more[kind])))
    for kind, micro in sizes.items():
        ratios = [other / own for other, own in zip(took["resident"], took[kind])]
        print(
            f"{kind}: micro-batches of {micro} under {limit / MIB:.0f} MiB, "
            f"{batch * 128 / statistics.median(took[kind]):.1f} tokens/s, {spread(ratios)} x resident",
            flush=True,
        )


def main():
    tasks = {task.__name__: task for task in (product, schedules, depth, visits, ceiling)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tasks)
    parser.add_argument("shapes", nargs="*", choices=[*SHAPES, []])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tasks[options.what](options.rounds, options.shapes)


if __name__ == "__main__":
    main()
