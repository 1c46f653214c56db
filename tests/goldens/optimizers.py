"""Ten steps of each optimizer in f64: PyTorch's, or the paper's rule where PyTorch has none.

Makes, beside itself, optimizers.json: two tensors, their gradients, and the parameters after the steps.

    pip install torch && python optimizers.py
"""

import json
import pathlib

import torch

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


RULES = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON),
    "adam": lambda groups: torch.optim.Adam(groups, lr=RATE, betas=BETAS, eps=EPSILON),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=RATE),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True),
    "lion": lambda groups: Lion(groups, {}),
    "lamb": lambda groups: Lamb(groups, {}),
}


def main():
    generator = torch.Generator().manual_seed(7)
    shapes = [(12, 5), (7,)]
    normal = lambda: [torch.randn(shape, generator=generator).double() for shape in shapes]
    begin, gradients = normal(), [normal() for _ in range(STEPS)]
    flat = lambda tensors: [value for tensor in tensors for value in tensor.flatten().tolist()]
    rules = {}
    for name, make in RULES.items():
        weight, bias = parameters = [torch.nn.Parameter(tensor.clone()) for tensor in begin]
        optimizer = make([{"params": [weight], "weight_decay": DECAY}, {"params": [bias], "weight_decay": 0.0}])
        for gradient in gradients:
            for parameter, one in zip(parameters, gradient):
                parameter.grad = SCALE * one
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
    (pathlib.Path(__file__).parent / "optimizers.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
