"""The scales of PyTorch's GradScaler over 2,000 steps, of which some have gradients that are not finite.

python tests/goldens/loss_scale.py > tests/goldens/loss_scale.json     (torch)
"""
import json
import random

import torch

STEPS, INTERVAL = 2000, 20


def case(initial, growth, backoff):
    random.seed(7)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_factor=growth, backoff_factor=backoff,
                                  growth_interval=INTERVAL)
    changes, overflows, before = [], [], None
    for step in range(STEPS):
        # Long runs without overflow, so that the scale comes to its largest value, and short ones.
        overflow = random.random() < (0.2 if step % 1000 > 700 else 0.01)
        if overflow:
            overflows.append(step)
        weight.grad = torch.tensor([float("inf") if overflow else 1.0])
        scaler.scale(torch.zeros(1))  # makes the scale
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() != before:
            before = scaler.get_scale()
            changes.append([step, before])
    return {"initial": initial, "growth_factor": growth, "backoff_factor": backoff, "overflows": overflows,
            "scales": changes}


cases = [case(2.0 ** 120, 2.0, 0.5), case(65536.0, 1.2, 0.8), case(1000.0, 1.9, 0.6)]
print(json.dumps({"steps": STEPS, "growth_interval": INTERVAL, "cases": cases}))
