"""The scales of PyTorch's GradScaler over 2,000 steps, of which some have gradients that are not finite.

python tests/goldens/loss_scale.py > tests/goldens/loss_scale.json     (torch)
"""
import json
import random

import torch

STEPS, INTERVAL, INITIAL = 2000, 20, 2.0 ** 120

random.seed(7)
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL, growth_interval=INTERVAL)
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
print(json.dumps({"steps": STEPS, "growth_interval": INTERVAL, "initial": INITIAL,
                  "overflows": overflows, "scales": changes}))
