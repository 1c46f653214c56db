"""Shows that device memory is constant: BERT-Large's shape at any depth and batch.

It also prints the memory of the resident schedule, the L2L paper's comparison at equal ceilings, a deep model under
64 MiB, sequences of 2,048 and 8,192 tokens in chunks of 2,048, and one of 131,072 in chunks of 8,192.

    cargo build --release
    python3 benches/constant_memory.py table [--train]   # BERT-Large, micro-batches of 4 x 128
    python3 benches/constant_memory.py paper             # at ceilings of 16 GiB and 2 GiB
    python3 benches/constant_memory.py small             # 64 layers under 64 MiB, trained
    python3 benches/constant_memory.py long              # sequences
    python3 benches/constant_memory.py longest           # a sequence of 131,072 positions, trained

The resident side is PyTorch's memory of the device: all parameters, their gradients and AdamW's two moments, and all
activations of one micro-batch without recomputation. It is the plan of the resident schedule plus 8 bytes a parameter
for the moments.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = os.environ.get("L2L", "target/release/l2l")
BERT = {"model.preset": "bert-large", "data.train": "random", "data.sequence_length": 128}
RESIDENT = {
    "schedule.kind": "resident",
    "schedule.recompute": "false",
    "channels.weights": 100000,
    "stash.place": "device",
}
GIB, MIB = 1 << 30, 1 << 20


def run(command, settings, *more, config=None):
    # An empty config, so that plans have the defaults instead of the built-in config.
    config = config or (os.devnull if command == "plan" else None)
    arguments = [PROGRAM, command] + ([str(config)] if config else []) + ["--format", "json", *more]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def plan(settings, *more):
    return run("plan", settings, *more)[0]


def device(settings):
    return plan(settings)["device_bytes"]["total"]


def resident(settings):
    """Bytes of the device when it holds the whole model and the activations of one micro-batch."""
    found = plan({**settings, **RESIDENT, "step.batch": settings["step.micro_batch"]})
    return found["device_bytes"]["total"] + 8 * found["parameters"]


def table(trains):
    cases = [
        ({}, layers, batch)
        for layers, batch in [(12, 4), (24, 4), (24, 32), (96, 4), (24, 256), (384, 4), (384, 256)]
    ]
    narrow = {"model.hidden": 512, "model.heads": 8, "model.intermediate": 2048}
    cases.insert(6, (narrow, 384, 4))
    first = None
    print("| layers | batch | device | resident | below 1.5 GiB | below 16 GiB | trained |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text("")
        for more, layers, batch in cases:
            settings = {
                **BERT,
                **more,
                "model.layers": layers,
                "step.batch": batch,
                "step.micro_batch": 4,
            }
            bytes_, other = device(settings), resident(settings)
            if not more:
                first = first or bytes_
                assert bytes_ == first, "equal to the byte"
            told = ""
            if trains and (layers < 384 or more):
                if layers == 384:
                    settings |= {"eps.tier": "file", "eps.path": f"{folder}/eps"}
                events = run("train", {**settings, "step.steps": 1}, config=config)
                step = next(event for event in events if event["event"] == "step")
                assert step["device_peak_bytes"] <= bytes_
                told = (
                    f"loss {step['loss']:.4f}, {step['seconds']:.0f} s, "
                    f"device peak {step['device_peak_bytes']}, "
                    f"resident set {step['host_rss_bytes'] / MIB:.0f} MiB"
                )
            shape = " of width 512, on file" if more else ""
            fits = [("yes" if other <= limit * GIB else "no") for limit in (1.5, 16)]
            print(
                f"| {layers}{shape} | {batch} | {bytes_} | {other} "
                f"| {fits[0]} | {fits[1]} | {told} |",
                flush=True,
            )


def largest(settings, ceiling, size):
    least, most = 0, 1
    fits = lambda m: size({**settings, "step.micro_batch": m, "step.batch": m}) <= ceiling
    while fits(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def paper():
    for ceiling in (16, 2):
        sides = []
        for name, size, more in [("relay", device, {}), ("resident", resident, RESIDENT)]:
            most = largest({**BERT, **more}, ceiling * GIB, size)
            sides.append((name, most, more))
        print(
            f"ceiling {ceiling} GiB: "
            + ", ".join(f"{name}: micro-batches of {most} at most" for name, most, _ in sides)
        )
        batch = max(most for _, most, _ in sides)
        for name, most, more in sides:
            if most:
                settings = {**BERT, **more, "step.batch": batch, "step.micro_batch": most}
                found = plan(settings, "--forecast")
                seconds = found["step_seconds"]
                print(
                    f"  {name}: {batch * 128 / seconds:.0f} tokens/s at a batch of {batch} "
                    f"in virtual time with this "
                    f"machine's rates ({seconds:.1f} s, waits {found['exposed_wait_seconds']:.1f})"
                )
    settings = {**BERT, "step.batch": 32, "step.micro_batch": 32}
    one, other = device(settings), resident(settings)
    print(
        f"micro-batches of 32: relay {one / MIB:.0f} MiB, resident {other / MIB:.0f} MiB: "
        f"{one / other - 1:+.0%}"
    )


def small():
    settings = {
        "data.train": "random",
        "model.layers": 64,
        "model.hidden": 512,
        "model.heads": 8,
        "model.positions": 128,
        "device.memory": "64MiB",
        "step.batch": 16,
        "step.micro_batch": 2,
        "step.steps": 1,
        "schedule.recompute": "true",
        "channels.gradients": 1,
    }
    for event in trained(settings):
        print(
            f"step {event['step']}: loss {event['loss']:.4f}, {event['seconds']:.1f} s, "
            f"device peak "
            f"{event['device_peak_bytes'] / MIB:.1f} MiB"
        )


def trained(settings):
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text("")
        return [
            event for event in run("train", settings, config=config) if event["event"] == "step"
        ]


def long():
    told = {}
    for name, positions, micro_batch in [
        ("2,048", 2048, 1),
        ("8,192", 8192, 1),
        ("4 x 2,048", 2048, 4),
    ]:
        settings = {
            "data.train": "random",
            "model.layers": 4,
            "model.hidden": 512,
            "model.heads": 8,
            "model.positions": 8192,
            "data.sequence_length": positions,
            "step.batch": 4,
            "step.micro_batch": micro_batch,
            "step.chunk_positions": 2048,
            "schedule.recompute": "true",
            "step.steps": 1,
        }
        found = plan(settings)
        (step,) = trained(settings)
        told[name] = {
            **found["device_bytes"]["terms"],
            "host stash": found["host_bytes"]["terms"]["stash"],
            "device, high-water mark": step["device_peak_bytes"],
            "trained": f"{step['loss']:.4f}, {4 * positions / step['seconds']:.0f} tokens/s",
        }
    print("| | " + " | ".join(told) + " |\n|---" * 1 + "|---" * len(told) + "|")
    for term in told["2,048"]:
        print(f"| {term} | " + " | ".join(str(of[term]) for of in told.values()) + " |")


def longest():
    """Plans and trains a small model on one sequence: of two chunks, and of sixteen."""
    told, fixed = {}, set()
    for positions in (16384, 131072):
        settings = {
            "data.train": "random",
            "model.preset": "llama-1b",
            "model.layers": 2,
            "model.hidden": 16,
            "model.heads": 1,
            "model.kv_heads": 1,
            "model.intermediate": 32,
            "model.vocabulary": 256,
            "model.positions": positions,
            "data.sequence_length": positions,
            "step.batch": 1,
            "step.micro_batch": 1,
            "step.steps": 1,
        }
        found = plan(settings)
        terms = found["device_bytes"]["terms"]
        all_bytes = found["device_bytes"]["total"]
        fixed.add(all_bytes - terms["keys_and_values"])
        (step,) = trained(settings)
        assert step["device_peak_bytes"] <= all_bytes
        told[f"{positions:,}"] = {
            "keys_and_values, planned": terms["keys_and_values"],
            "all other terms of the device, planned": all_bytes - terms["keys_and_values"],
            "device, planned": all_bytes,
            "device, high-water mark": step["device_peak_bytes"],
            "host, planned": found["host_bytes"]["total"],
            "resident set": step["host_rss_bytes"],
            "longest sequence here": found["longest_sequence"]["positions"],
            "trained": f"loss {step['loss']:.4f}, {step['seconds']:.1f} s",
        }
    assert len(fixed) == 1, "equal to the byte"
    print("| positions | " + " | ".join(told) + " |\n|---" * 1 + "|---" * len(told) + "|")
    for term in told["16,384"]:
        print(f"| {term} | " + " | ".join(str(of[term]) for of in told.values()) + " |")


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    {
        "table": lambda: table("--train" in sys.argv),
        "paper": paper,
        "small": small,
        "long": long,
        "longest": longest,
    }.get(what, lambda: sys.exit(__doc__))()
