"""Ten AdamW steps of the Llama of `families.py` in f64, whose gradients are clipped in groups.

The feed-forward matrices have a group with a learning rate and a largest norm of their own; all other tensors are
clipped together. Writes llama/clipped_groups.json: losses, and the norms of all gradients before clipping.

    pip install torch transformers && python clipped_groups.py
"""

import json
import pathlib

import torch
import transformers
from families import BATCH, DECAY, RATE, STEPS, loss_of
from transformers import AutoModelForCausalLM

GROUP_NORM, GROUP_RATE, NORM = 0.4, 1e-2, 1.5


def main():
    here = pathlib.Path(__file__).parent
    model = AutoModelForCausalLM.from_pretrained(here / "llama", attn_implementation="eager").double()
    model.train()
    lines = [json.loads(line) for line in (here / "llama/data.jsonl").read_text().splitlines()]
    named = list(model.named_parameters())
    group = [p for name, p in named if ".mlp." in name]
    others = [p for name, p in named if ".mlp." not in name]
    optimizer = torch.optim.AdamW([
        {"params": [p for p in group if p.ndim > 1], "weight_decay": DECAY, "lr": GROUP_RATE},
        {"params": [p for p in group if p.ndim == 1], "weight_decay": 0.0, "lr": GROUP_RATE},
        {"params": [p for p in others if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0}], lr=RATE)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of("llama", model, lines[step * BATCH:(step + 1) * BATCH])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        own = float(torch.nn.utils.clip_grad_norm_(group, GROUP_NORM))
        rest = float(torch.nn.utils.clip_grad_norm_(others, NORM))
        print(f"{float(loss):.4f} group {own:.3f} others {rest:.3f}")
        optimizer.step()
        losses.append(float(loss))
    golden = {"batch": BATCH, "steps": STEPS, "learning_rate": RATE, "weight_decay": DECAY, "clip_norm": NORM,
              "group_norm": GROUP_NORM, "group_rate": GROUP_RATE, "transformers": transformers.__version__,
              "float64": {"losses": losses, "norms": norms}}
    (here / "llama/clipped_groups.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
