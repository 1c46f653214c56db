"""Twenty steps of the Llama of `families.py`, each with the gradient at the weights before the last update:

    W(t + 1) = W(t) - u(gradient of batch t at W(t - 1)), and W(-1) = W(0)

The first `after` batches read W(t). Moments, decay and clipping are as ever, and change W(t). Writes delayed.json
beside itself: for each case its settings, and in f64 and in f32 the losses and the norms of the gradients of each step,
and the sum and the norm of each weight in the end.

    pip install torch transformers && python delayed.py
"""

import json
import pathlib
from unittest import mock

import torch
import transformers
from families import BATCH, DECAY, RATE, loss_of
from transformers import AutoModelForCausalLM

STEPS = 20


class Muon:
    """PyTorch's Muon for matrices of layers, PyTorch's AdamW for the rest."""

    def __init__(self, named):
        matrices = [p for name, p in named if ".layers." in name and p.ndim == 2]
        others = [(name, p) for name, p in named if not (".layers." in name and p.ndim == 2)]
        muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
        self.both = [muon, adamw(others)]
        self.dtype = matrices[0].dtype

    def step(self):
        # Its iteration casts to bf16: here it stays in the dtype of the weights.
        with mock.patch.object(torch, "bfloat16", self.dtype):
            for one in self.both:
                one.step()


def groups(named):
    decayed = [p for _, p in named if p.ndim > 1]
    plain = [p for _, p in named if p.ndim == 1]
    return [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]


def adamw(named):
    return torch.optim.AdamW(groups(named), lr=RATE)


def sgd(named):
    return torch.optim.SGD(groups(named), lr=RATE, momentum=0.9)


RULES = {"adamw": adamw, "sgd": sgd, "muon": Muon}
CASES = [{"kind": kind, "clip_norm": clip, "delay_after": after, "delay": 1}
         for kind, clip, after in [("adamw", None, 0), ("adamw", 0.5, 0), ("adamw", None, 7), ("sgd", None, 0),
                                   ("sgd", 0.5, 3), ("muon", None, 0), ("muon", 0.5, 0)]]
CASES.append({"kind": "muon", "clip_norm": None, "delay_after": 0, "delay": 0})


def train(case, folder, lines, dtype):
    model = lambda: AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").to(dtype).train()
    newest, read = model(), model()
    optimizer = RULES[case["kind"]](list(newest.named_parameters()))
    older = [p.detach().clone() for p in newest.parameters()]
    losses, norms = [], []
    for step in range(STEPS):
        now = [p.detach().clone() for p in newest.parameters()]
        is_delayed = case["delay"] == 1 and step >= case["delay_after"]
        for to, weights in zip(read.parameters(), older if is_delayed else now):
            to.data.copy_(weights)
        older = now
        at = step * BATCH % len(lines)
        loss = loss_of("llama", read, lines[at:at + BATCH])
        read.zero_grad()
        loss.backward()
        for to, weights in zip(newest.parameters(), read.parameters()):
            to.grad = weights.grad.clone()
        limit = float("inf") if case["clip_norm"] is None else case["clip_norm"]
        norms.append(float(torch.nn.utils.clip_grad_norm_(newest.parameters(), limit)))
        optimizer.step()
        losses.append(float(loss))
    return {"losses": losses, "norms": norms, "weights": sums(newest)}


def sums(model):
    """The sum and the norm of each weight, computed in f64."""
    weights = {name: p.double() for name, p in model.state_dict().items()}
    return {name: [float(p.sum()), float(p.norm())] for name, p in weights.items()}


def in_both(train, case, folder, lines):
    dtypes = {"float64": torch.float64, "float32": torch.float32}
    return {**case, **{name: train(case, folder, lines, dtype) for name, dtype in dtypes.items()}}


def main():
    here = pathlib.Path(__file__).parent
    lines = [json.loads(line) for line in (here / "llama/data.jsonl").read_text().splitlines()]
    cases = [in_both(train, case, here / "llama", lines) for case in CASES]
    golden = {"steps": STEPS, "batch": BATCH, "learning_rate": RATE, "weight_decay": DECAY,
              "transformers": transformers.__version__, "cases": cases}
    (here / "delayed.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
