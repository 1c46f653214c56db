"""Ten steps of each optimizer in f64: PyTorch's, or the paper's rule where PyTorch has none.

Makes, beside itself, optimizers.json: two tensors, their gradients, and the parameters after the steps.

    pip install torch bitsandbytes numpy xxhash && python optimizers.py

Muon's iteration is PyTorch's, but for its cast to bf16, which is left out. The rules with packed moments
(8 bits, bf16) store them as l2l does and compute in f64. The 8-bit rule is then compared with bitsandbytes'
own, in f32 on the CPU.
"""

import json
import pathlib
from unittest import mock

import bitsandbytes
import numpy
import torch
import xxhash
from bitsandbytes.functional import create_dynamic_map

STEPS, RATE, DECAY, BETAS, EPSILON, SCALE = 10, 0.01, 0.1, (0.9, 0.99), 1e-8, 0.5


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                direction = BETAS[0] * momentum + (1 - BETAS[0]) * p.grad
                p.data -= RATE * (direction.sign() + group["weight_decay"] * p.data)
                momentum.mul_(BETAS[1]).add_(p.grad, alpha=1 - BETAS[1])


class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of You et al. 2020, without a bound of the ratio."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                m = state.setdefault("m", torch.zeros_like(p))
                v = state.setdefault("v", torch.zeros_like(p))
                m.mul_(BETAS[0]).add_(p.grad, alpha=1 - BETAS[0])
                v.mul_(BETAS[1]).addcmul_(p.grad, p.grad, value=1 - BETAS[1])
                m_hat, v_hat = m / (1 - BETAS[0] ** state["count"]), v / (1 - BETAS[1] ** state["count"])
                step = m_hat / (v_hat.sqrt() + EPSILON) + group["weight_decay"] * p.data
                p.data -= RATE * (p.data.norm() / step.norm()) * step


def adamw(p, g, m, v, count, decay):
    """One step of AdamW. Gives p, m and v."""
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    m_hat, v_hat = m / (1 - BETAS[0] ** count), v / (1 - BETAS[1] ** count)
    return p * (1 - RATE * decay) - RATE * m_hat / (v_hat**0.5 + EPSILON), m, v


MAPS = {name: create_dynamic_map(signed=name == "signed").double() for name in ["signed", "unsigned"]}


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are stored as bitsandbytes stores them, in blocks of `block`."""

    def __init__(self, groups, block):
        super().__init__(groups, {})
        self.block = block

    def coded(self, values, name):
        """What a moment is after it was encoded and decoded."""
        out = torch.empty_like(values)
        for at in range(0, len(values), self.block):
            part = values[at : at + self.block]
            largest = part.abs().max()
            nearest = ((part / largest)[:, None] - MAPS[name]).abs().argmin(1)
            out[at : at + self.block] = MAPS[name][nearest] * largest
        return out

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                flat, zeros = p.data.view(-1), torch.zeros(p.numel(), dtype=p.dtype)
                m, v = state.get("m", zeros), state.get("v", zeros)
                new, m, v = adamw(flat, p.grad.view(-1), m, v, state["count"], group["weight_decay"])
                flat.copy_(new)
                state["m"], state["v"] = self.coded(m, "signed"), self.coded(v, "unsigned")


def mixed(z):
    """The last step of SplitMix64."""
    z = z ^ (z >> 30)
    z = z * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & (1 << 64) - 1
    return z ^ (z >> 31)


def keyed(seed, key):
    """`random::keyed`."""
    return mixed(seed ^ mixed(key + 0x9E3779B97F4A7C15 & (1 << 64) - 1))


def rounded(value, bits):
    """A number rounded to bf16 by 16 random bits."""
    of_float = int(numpy.float32(value).view(numpy.uint32)) + (bits & 0xFFFF) >> 16 << 16
    return float(numpy.uint32(of_float).view(numpy.float32))


class AdamWBf16(torch.optim.Optimizer):
    """AdamW whose moments are rounded to bf16 at random. `names` are the hashes of the tensors' names."""

    SEED = 9
    NAMES = [xxhash.xxh3_64_intdigest(name) for name in [b"w", b"b"]]

    def step(self):
        for group, name in zip(self.param_groups, self.NAMES):
            for p in group["params"]:
                state = self.state[p]
                key = keyed(keyed(self.SEED, state.get("count", 0)), name)
                state["count"] = state.get("count", 0) + 1
                flat, zeros = p.data.view(-1), torch.zeros(p.numel(), dtype=p.dtype)
                m, v = state.get("m", zeros), state.get("v", zeros)
                new, m, v = adamw(flat, p.grad.view(-1), m, v, state["count"], group["weight_decay"])
                flat.copy_(new)
                bits = [keyed(key, at) for at in range(p.numel())]
                state["m"] = torch.tensor([rounded(x, b) for x, b in zip(m.tolist(), bits)]).double()
                state["v"] = torch.tensor([rounded(x, b >> 16) for x, b in zip(v.tolist(), bits)]).double()


class Muon(torch.optim.Optimizer):
    """PyTorch's Muon for matrices, PyTorch's AdamW for the rest."""

    def __init__(self, groups, **settings):
        super().__init__(groups, {})
        weight, bias = groups
        self.both = [
            torch.optim.Muon([weight], lr=RATE, **settings),
            torch.optim.AdamW([bias], lr=RATE, betas=BETAS, eps=EPSILON),
        ]

    def step(self):
        # Its iteration casts to bf16: here it stays in f64.
        with mock.patch.object(torch, "bfloat16", torch.float64):
            for one in self.both:
                one.step()


def adafactor(groups, rate=RATE, **settings):
    rule = torch.optim.Adafactor(groups, lr=rate, eps=(2.0**-23, 1e-3), foreach=False)
    for group in rule.param_groups:
        group.update(settings)  # past the check that d is at least 1
    return rule


RULES = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON),
    "adam": lambda groups: torch.optim.Adam(groups, lr=RATE, betas=BETAS, eps=EPSILON),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=RATE),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True),
    "lion": lambda groups: Lion(groups, {}),
    "lamb": lambda groups: Lamb(groups, {}),
    "adafactor": lambda groups: adafactor(groups),
    "adafactor-clipped": lambda groups: adafactor(groups, d=0.25, beta2_decay=-0.5),
    "adafactor-relative": lambda groups: adafactor(groups, rate=0.5),
    "muon": lambda groups: Muon(groups, adjust_lr_fn="original"),
    "muon-wide": lambda groups: Muon(groups, adjust_lr_fn="match_rms_adamw", nesterov=False),
    "adamw-8bit": lambda groups: AdamW8bit(groups, 16),
    "adamw-bf16": lambda groups: AdamWBf16(groups, {}),
}


def compare_with_bitsandbytes():
    """The 8-bit rule and bitsandbytes' own, in blocks of 256."""
    generator = torch.Generator().manual_seed(3)
    begin = torch.randn(5000, generator=generator)
    ours, theirs = torch.nn.Parameter(begin.double()), torch.nn.Parameter(begin.clone())
    rule = AdamW8bit([{"params": [ours], "weight_decay": DECAY}], 256)
    own = bitsandbytes.optim.AdamW8bit([theirs], lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)
    for _ in range(STEPS):
        gradient = torch.randn(5000, generator=generator)
        ours.grad, theirs.grad = gradient.double(), gradient
        rule.step()
        own.step()
    error = (ours.detach() - theirs.detach().double()).abs()
    print(f"8 bits: {(error < 1e-5).double().mean():.4f} of parameters within 1e-5, at most {error.max():.1e}")


def main():
    compare_with_bitsandbytes()
    generator = torch.Generator().manual_seed(7)
    shapes = [(12, 5), (7,)]
    normal = lambda: [torch.randn(shape, generator=generator).double() for shape in shapes]
    begin, gradients = normal(), [normal() for _ in range(STEPS)]
    flat = lambda tensors: [value for tensor in tensors for value in tensor.flatten().tolist()]
    rules = {}
    for name, make in RULES.items():
        weight, bias = parameters = [torch.nn.Parameter(tensor.clone()) for tensor in begin]
        if name.endswith("wide"):
            weight.data = weight.data.view(5, 12)
        optimizer = make([{"params": [weight], "weight_decay": DECAY}, {"params": [bias], "weight_decay": 0.0}])
        for gradient in gradients:
            for parameter, one in zip(parameters, gradient):
                parameter.grad = SCALE * one.view_as(parameter)
            optimizer.step()
        rules[name] = flat(tensor.detach() for tensor in parameters)
    # Two groups: the bias by SGD with momentum, at three times the rate, with another decay.
    weight, bias = parameters = [torch.nn.Parameter(tensor.clone()) for tensor in begin]
    optimizers = [
        torch.optim.AdamW([weight], lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY),
        torch.optim.SGD([bias], lr=3 * RATE, momentum=0.9, weight_decay=0.2),
    ]
    for gradient in gradients:
        for parameter, optimizer, one in zip(parameters, optimizers, gradient):
            parameter.grad = SCALE * one
            optimizer.step()
    rules["groups"] = flat(tensor.detach() for tensor in parameters)
    golden = {"begin": flat(begin), "gradients": [flat(gradient) for gradient in gradients], "rules": rules}
    golden["maps"] = {name: [float(f"{value:.9g}") for value in values.tolist()] for name, values in MAPS.items()}
    (pathlib.Path(__file__).parent / "optimizers.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
