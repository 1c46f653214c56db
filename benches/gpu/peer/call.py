"""How the peer is called: PyTorch in a process of its own, and what it told by try."""

import json
import math
import os
import pathlib
import statistics
import sys

MAIN = pathlib.Path(__file__).resolve().parents[2] / "gpu.py"
# The ways in which PyTorch trains a model that is on the device.
WAYS = {"keeping": {}, "checkpointing": {"recompute": True}, "keeping, compiled": {"compile": True},
        "checkpointing, compiled": {"recompute": True, "compile": True}}


def has_torch(bench):
    """True if this Python has PyTorch for the device."""
    try:
        import torch
    except (ImportError, OSError):
        return False
    return bench.flags.kind == "cpu" or torch.cuda.is_available()


def peer(bench, name, limit=math.inf, **job):
    """By try, what it told with its rates in tokens a second, or its error. A peer costs no row of
    ours."""
    job = {"kind": bench.flags.kind, "dtype": bench.flags.dtype, **job}
    grows = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    argv = [sys.executable, MAIN, "--peer", json.dumps(job)]
    ended = bench.commands.run(f"PyTorch, {name}", argv, limit, PYTORCH_CUDA_ALLOC_CONF=grows)
    found = {one["name"]: {"error": f"status {ended.status}: {ended.why}"} for one in job["tries"]}
    for told in ended.events:
        if "seconds" in told:
            told["rates"] = [told["tokens"] / seconds for seconds in told["seconds"]]
            told["rate"] = statistics.median(told["rates"])
        found[told["try"]] = told
    return found
