"""Ten AdamW steps of the idle Qwen3-MoE of `experts.py` in f64, with a parameter for each expert.

An expert that no token of a step chose has the gradient None, so the optimizer leaves it alone: its weights, moments
and `step`. Writes qwen3_moe-idle/kept.json: losses and norms of each step, and of each expert the number of updates
and the first row of its gate after the last step.

    pip install torch transformers && python kept.py
"""

import json
import pathlib

import torch
import transformers
from experts import BATCH, DECAY, GAP, RATE, STEPS, Routes
from families import loss_of
from transformers import AutoModelForCausalLM

FUSED = (".experts.gate_up_proj", ".experts.down_proj")


class WatchedRoutes(Routes):
    """Also keeps the experts that the tokens of the last step chose. There is one layer."""

    def route(self, router, inputs, outputs):
        super().route(router, inputs, outputs)
        self.chosen = set(outputs[2][self.mask > 0].flatten().tolist())


def main():
    here = pathlib.Path(__file__).parent / "qwen3_moe-idle"
    model = AutoModelForCausalLM.from_pretrained(here, attn_implementation="eager", experts_implementation="eager")
    model = model.double().train()
    lines = [json.loads(line) for line in (here / "data.jsonl").read_text().splitlines()]
    routes = WatchedRoutes(model)
    fused = {name: p for name, p in model.named_parameters() if name.endswith(FUSED)}
    assert len(fused) == 2
    # Each shares the memory of its part of the fused parameter.
    parts = {name: [torch.nn.Parameter(part) for part in p.data] for name, p in fused.items()}
    others = [p for name, p in model.named_parameters() if name not in fused]
    matrices = [p for p in others if p.ndim > 1] + [part for all in parts.values() for part in all]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY},
                                   {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0}], lr=RATE)
    losses, norms = [], []
    for step in range(STEPS):
        model.zero_grad()
        loss = loss_of("qwen3_moe-idle", model, lines[step * BATCH:(step + 1) * BATCH])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        for name, p in fused.items():
            for expert, part in enumerate(parts[name]):
                part.grad = p.grad[expert].clone() if expert in routes.chosen else None
        optimizer.step()
        losses.append(float(loss))
    assert routes.gap >= GAP, f"a gap of {routes.gap}"
    gates, downs = (parts[name] for name in sorted(fused, reverse=True))
    updates = [int(optimizer.state[part]["step"]) if part in optimizer.state else 0 for part in downs]
    rows = [[round(value, 7) for value in part[0].tolist()] for part in gates]
    golden = {"batch": BATCH, "steps": STEPS, "learning_rate": RATE, "weight_decay": DECAY,
              "transformers": transformers.__version__, "float64": {"losses": losses, "norms": norms},
              "updates": updates, "gates": rows}
    (here / "kept.json").write_text(json.dumps(golden, indent=1) + "\n")
    print(f"gap {routes.gap:.1e}, updates {updates}")


if __name__ == "__main__":
    main()
