"""The driver's own count of device memory while a run goes on, beside the plan."""

import os
import pathlib
import subprocess
import time

from .. import models
from ..commands import Failed


def run(bench):
    model, tokens, micro = models.llama(bench.flags)
    program = bench.program
    toy = program.shaped(models.TOY_LLAMA, 8 * models.TOY["length"], 2)
    # Long enough for the driver to be asked a few times.
    held, how = held_by(bench, toy, 3 if bench.flags.quick else 300)
    context = held - program.plan(toy)["device_bytes"]["total"]
    bench.row("context: a toy model's count - its plan", context / 2**20, "MiB", how=how)
    for layers in (1, 4):
        settings = program.shaped(models.small_vocabulary(model), tokens // 4, micro, layers)
        found = program.plan(settings)
        held, how = held_by(bench, settings, 3)
        planned, terms = found["device_bytes"]["total"], found["device_bytes"]["terms"]
        more = (held - planned - context) / 2**20
        bench.row(f"{layers} layers: driver's count - plan - context", more, "MiB", target="0",
                  counted_bytes=held, planned_bytes=planned, terms=terms, how=how)
    largest = found["largest_layer"]
    each = (terms["weights"] + terms["gradients"]) / largest["parameters"]
    bench.row("weights and gradients on the device", each, "bytes a parameter of the largest layer",
              target="12 (bf16, f16), 16 (f32)", largest=largest)


def held_by(bench, settings, steps):
    """The most that the driver counts for a run: for its process, or for all processes where it
    does not know the process by its number."""
    before, most = driver_bytes(bench, os.getpid())[1], [0, 0]

    def watch(process):
        own, every = driver_bytes(bench, process.pid)
        most[:] = max(most[0], own), max(most[1], every - before)
        time.sleep(0.1)

    bench.program.run("held", settings, steps, watch=watch)
    if not any(most):
        raise Failed("the driver counted nothing while it ran")
    own, every = most
    return (own, "of the process") if own else (every, "of the device, less what was used before")


def driver_bytes(bench, pid):
    """Bytes of the device that the driver counts for a process, and of all."""
    if bench.flags.kind == "cpu":
        try:
            lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            lines = []
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS")), 0
    of = [line.split(",") for line in smi("--query-compute-apps=pid,used_memory")]
    own = [used.strip() for one, used in of if one.strip() == str(pid)]
    own = sum(int(used) << 20 for used in own if used.isdigit())
    ordinals = [one.split("=")[1] for one in bench.flags.set if one.startswith("device.ordinal=")]
    index = ordinals[0] if ordinals else "0"
    total = smi("-i", index, "--query-gpu=memory.used")
    return own, (int(total[0]) << 20 if total else 0)


def smi(*query):
    """Lines of nvidia-smi. It is asked many times a second, so that it has no log."""
    try:
        argv = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
        ended = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=10)
        return ended.stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"nvidia-smi: {error}") from error
