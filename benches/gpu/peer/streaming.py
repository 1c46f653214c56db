"""The plain loop that l2l competes with: layer by layer, with PyTorch's AdamW on the host.

The weights of a layer are copied in from pinned memory, all micro-batches go through it, its
gradients are copied out, and the host updates it. What passes between layers stays on the device,
which is in the loop's favour.
"""

import math

from .layers import block_of, embed, initialise, loss_of, part_shapes
from .steps import dtype_of, settle, told


def views(flat, shapes):
    sizes = [math.prod(shape) for shape in shapes]
    return [one.view(shape) for one, shape in zip(flat.split(sizes), shapes)]


class Host:
    """Masters in f32 and their optimizer; what is uploaded, in the device's dtype."""

    def __init__(self, torch, device, job):
        self.torch, self.device, self.dtype = torch, device, dtype_of(torch, job)
        self.shapes, self.plain = part_shapes(job["model"]), self.dtype == torch.float32
        self.masters, self.uploaded = [], []
        pinned = {"pin_memory": device.type == "cuda"}
        for part in self.shapes:
            flat = torch.empty(sum(map(math.prod, part)), **(pinned if self.plain else {}))
            for one in views(flat, part):
                initialise(torch, one)
            self.masters.append(torch.nn.Parameter(flat))
            if not self.plain:
                flat = torch.empty(len(flat), dtype=self.dtype, **pinned).copy_(flat)
            self.uploaded.append(flat)
        self.landing = torch.empty(max(map(len, self.uploaded)), dtype=self.dtype, **pinned)
        new = lambda master: torch.optim.AdamW([master], lr=3e-4, weight_decay=0.01, fused=True)
        self.optimizers = [new(master) for master in self.masters]

    def upload(self, index):
        flat = self.uploaded[index].to(self.device, non_blocking=True)
        return [one.detach().requires_grad_() for one in views(flat, self.shapes[index])]

    def backward(self, index, run):
        """Uploads a part, calls `run` with it, and updates it with the gradients that this left."""
        part = self.upload(index)
        flat = self.torch.zeros(len(self.uploaded[index]), device=self.device, dtype=self.dtype)
        for one, gradient in zip(part, views(flat, self.shapes[index])):
            one.grad = gradient
        found = run(part)
        gradient = self.landing[:len(flat)].copy_(flat)
        self.masters[index].grad = gradient.float()
        self.optimizers[index].step()
        if not self.plain:
            self.uploaded[index].copy_(self.masters[index].detach())
        return found


def steps(torch, device, job, one):
    model, host = job["model"], Host(torch, device, job)
    block, last = block_of(torch, model), len(host.shapes) - 1
    seconds, losses = [], []

    def through_block(part, xs, dys):
        xs = [x.detach().requires_grad_() for x in xs]
        for x, dy in zip(xs, dys):
            block(x, *part).backward(dy)
        return [x.grad for x in xs]

    def through_head(part, xs, micros):
        xs, total = [x.detach().requires_grad_() for x in xs], 0
        for x, some in zip(xs, micros):
            loss = loss_of(torch, model, part, None, x, some, job["batch"])
            loss.backward()
            total += loss.detach()
        return [x.grad for x in xs], total

    for _ in range(job["steps"] + 1):
        ids = torch.randint(0, model["vocabulary"], (job["batch"], model["length"])).to(device)
        micros, begin = ids.split(one["micro"]), settle(torch, device)
        with torch.no_grad():
            part = host.upload(0)
            passed = [[embed(torch, model, part, some) for some in micros]]
            for index in range(1, last):
                part = host.upload(index)
                passed.append([block(x, *part) for x in passed[-1]])
        dys, total = host.backward(last, lambda part: through_head(part, passed.pop(), micros))
        for index in range(last - 1, 0, -1):
            dys = host.backward(index, lambda part: through_block(part, passed.pop(), dys))
        through = lambda part, some, dy: embed(torch, model, part, some).backward(dy)
        host.backward(0, lambda part: [through(part, *both) for both in zip(micros, dys)])
        seconds.append(settle(torch, device) - begin)
        losses.append(float(total))
    return told(torch, device, job, one, seconds, losses)
