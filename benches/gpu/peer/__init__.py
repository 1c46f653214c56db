"""PyTorch as the peer, in a process of its own, so that it begins with an empty device.

A job is a JSON object. For each of its tries a line is printed as it ends: a job that is cut off
has told its first tries.
"""

import gc
import json


def run(job):
    import torch
    from . import steps, streaming
    device = torch.device(job["kind"])
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    if job["kind"] == "cuda" and job.get("ceiling"):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["ceiling"] / total))
    what = {"steps": steps.steps, "streaming": streaming.steps, "product": product}[job["what"]]
    for one in job["tries"]:
        told = None
        while told is None:
            told = attempt(torch, device, what, job, one)
            # What the try held is let go of here, where its frames have ended.
            gc.collect()
            if job["kind"] == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        print(json.dumps({"try": one["name"], **told}), flush=True)


def attempt(torch, device, what, job, one):
    """What a try tells; `None` if it is to be repeated with a smaller micro-batch."""
    try:
        return what(torch, device, job, one)
    except torch.cuda.OutOfMemoryError as error:
        if one.get("shrinks") and one["micro"] > 1:
            one["micro"] //= 2
            return None
        return {"error": f"out of memory: {str(error)[:200]}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:400]}"}


def product(torch, device, job, one):
    """FLOP/s of a large product, for some seconds without a pause."""
    from .steps import dtype_of, settle
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype_of(torch, job)) for _ in range(2))
    rates, end = [], settle(torch, device) + one["seconds"]
    while len(rates) < 12 or begin < end:
        begin = settle(torch, device)
        for _ in range(4):
            a @ b
        rates.append(4 * 2 * size**3 / (settle(torch, device) - begin))
    return {"rates": rates[2:]}
