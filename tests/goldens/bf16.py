"""How far PyTorch's own bf16 is from the goldens: weights and activations in bf16, masters and AdamW in f32.

Tells, of each family and its first two steps, what losses and gradient norms are off by, relative to values above 1.

    pip install torch transformers && python bf16.py
"""

import json
import pathlib

import torch
from families import BATCH, CAUSAL, CLASSES, DECAY, FAMILIES, RATE, loss_of
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

HERE = pathlib.Path(__file__).parent


def off(found, expected):
    return abs(found - expected) / max(1, expected)


def steps(family, count):
    kind = AutoModelForCausalLM if family in CAUSAL else AutoModelForMaskedLM
    if family in CLASSES:
        kind = AutoModelForSequenceClassification
    master, model = (kind.from_pretrained(HERE / family, attn_implementation="eager").to(dtype).train()
                     for dtype in (torch.float32, torch.bfloat16))
    masters, parameters = list(master.parameters()), list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in masters if p.ndim > 1], "weight_decay": DECAY},
         {"params": [p for p in masters if p.ndim == 1], "weight_decay": 0.0}], lr=RATE)
    lines = [json.loads(line) for line in (HERE / family / "data.jsonl").read_text().splitlines()]

    def told(**inputs):
        output = model(**inputs)
        output.logits = output.logits.float()
        return output

    for step in range(count):
        with torch.no_grad():
            for parameter, of in zip(parameters, masters):
                parameter.copy_(of)
        model.zero_grad()
        loss = loss_of(family, told, lines[step * BATCH:(step + 1) * BATCH])
        loss.backward()
        for parameter, of in zip(parameters, masters):
            of.grad = None if parameter.grad is None else parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(masters, float("inf"))
        optimizer.step()
        yield float(loss), float(norm)


for family in FAMILIES:
    golden = json.loads((HERE / family / "golden.json").read_text())["float64"]
    for step, (loss, norm) in enumerate(steps(family, 2)):
        print(f"{family:20} step {step}: loss off {off(loss, golden['losses'][step]):.1e}, "
              f"norm off {off(norm, golden['norms'][step]):.1e}")
