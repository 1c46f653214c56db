"""PyTorch as it is mostly used: all on the device, masters in f32, autocast, fused AdamW.

A try keeps its activations or recomputes them, and runs as written or compiled.
"""

import time

from .layers import block_of, embed, initialise, loss_of, part_shapes


def dtype_of(torch, job):
    return {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[job["dtype"]]


def settle(torch, device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def steps(torch, device, job, one):
    from torch.utils.checkpoint import checkpoint
    model, dtype, micro = job["model"], dtype_of(torch, job), one["micro"]
    new = lambda shape: initialise(torch, torch.empty(shape, device=device)).requires_grad_()
    parts = [[new(shape) for shape in part] for part in part_shapes(model)]
    every = [tensor for part in parts for tensor in part]
    optimizer = torch.optim.AdamW(every, lr=3e-4, weight_decay=0.01, fused=True)
    # In f16, losses are scaled.
    scaler = torch.amp.GradScaler(device.type, enabled=job["dtype"] == "f16")
    block, seconds, losses = block_of(torch, model), [], []
    if one.get("compile"):
        torch._dynamo.reset()
        block = torch.compile(block, dynamic=False)
    recomputing = lambda *tensors: checkpoint(block, *tensors, use_reentrant=False)
    through = recomputing if one.get("recompute") else block
    for _ in range(job["steps"] + 1):
        ids = torch.randint(0, model["vocabulary"], (job["batch"], model["length"]))
        begin, total = settle(torch, device), 0
        for some in ids.split(micro):
            some = some.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype, enabled=job["dtype"] != "f32"):
                x = embed(torch, model, parts[0], some)
                for part in parts[1:-1]:
                    x = through(x, *part)
                loss = loss_of(torch, model, parts[-1], parts[0][0], x, some, job["batch"])
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seconds.append(settle(torch, device) - begin)
        losses.append(float(total))
    return told(torch, device, job, one, seconds, losses)


def told(torch, device, job, one, seconds, losses):
    """What a try tells. The first step is not counted: it allocates, and compiles."""
    on_gpu = device.type == "cuda"
    return {"seconds": seconds[1:], "tokens": job["batch"] * job["model"]["length"],
            "micro": one["micro"], "loss": losses[-1],
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
            "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0}
