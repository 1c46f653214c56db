"""Twenty AdamW steps of the case `tied` of gpt2.py, each through other layers, in f64.

Writes depth.json beside itself: for each step the layers in the order of their use, the frozen
layers, loss and gradient norm; and at the end the sum of absolute values of each layer's weights.
A layer that a step leaves out has no gradient, so AdamW passes it over.

    pip install torch transformers && python depth.py
"""

import json
import pathlib
import random

import torch
from transformers import GPT2LMHeadModel

STEPS, RATE, DECAY, BATCH = 20, 3e-3, 0.1, 5
HERE = pathlib.Path(__file__).parent


def tied_model():
    model = GPT2LMHeadModel.from_pretrained(HERE / "tied", attn_implementation="eager").double()
    model.train()
    return model


def parameter_groups(named):
    """Weight decay is for matrices alone: not for biases and norms."""
    is_plain = lambda name: name.endswith(".bias") or ".ln_" in name or name.startswith("ln_")
    return [
        {"params": [p for n, p in named if not is_plain(n)], "weight_decay": DECAY},
        {"params": [p for n, p in named if is_plain(n)], "weight_decay": 0.0},
    ]


def loss_of_step(model, step):
    """The mean loss of the batch of this step: lines in their order, again from the first."""
    lines = [json.loads(line) for line in (HERE / "tied" / "data.jsonl").read_text().splitlines()]
    first = step * BATCH % len(lines)
    batch = lines[first : first + BATCH]
    width = max(len(line["input_ids"]) for line in batch)
    pad = lambda line, key, fill: line[key] + [fill] * (width - len(line[key]))
    ids = torch.tensor([pad(line, "input_ids", 0) for line in batch])
    labels = torch.tensor([pad(line, "labels", -100) for line in batch])
    lengths = torch.tensor([[len(line["input_ids"])] for line in batch])
    mask = (torch.arange(width)[None] < lengths).long()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100
    )


def write_golden(name, layers, steps):
    """Settings and steps, and the sum of absolute values of each layer's weights."""
    sums = [sum(float(p.detach().abs().sum()) for p in layer.parameters()) for layer in layers]
    golden = dict(learning_rate=RATE, weight_decay=DECAY, batch=BATCH, steps=steps, sums=sums)
    (HERE / name).write_text(json.dumps(golden, indent=1) + "\n")


def main():
    model = tied_model()
    layers = list(model.transformer.h)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(parameter_groups(named), lr=RATE)
    chance, steps = random.Random(0), []
    for step in range(STEPS):
        order = chance.sample(range(len(layers)), chance.randint(1, len(layers)))
        frozen = [layer for layer in order if chance.random() < 0.2]
        model.transformer.h = torch.nn.ModuleList(layers[layer] for layer in order)
        loss = loss_of_step(model, step)
        optimizer.zero_grad()
        loss.backward()
        for layer in frozen:
            for parameter in layers[layer].parameters():
                parameter.grad = None
        parameters = [parameter for _, parameter in named]
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf"))
        optimizer.step()
        steps.append(dict(layers=order, frozen=frozen, loss=loss.item(), norm=norm.item()))
    write_golden("depth.json", layers, steps)


if __name__ == "__main__":
    main()
