"""Ten AdamW steps, in f64, of models of experts.py with losses of their routers.

transformers' loss, which transformers adds to the model's with this factor; then the algorithms of Switch (Fedus et al. 2021,
equations 4 to 6) and GShard (Lepikhin et al. 2020, algorithm 1, without the random second choice), written down below.
Each router's choice is further from a tie than a rounding could move it: see experts.py.

    pip install torch transformers && python balance.py
"""

import json
import math
import pathlib

import torch
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM

import experts
import families

ALPHA, ZETA = 0.1, 0.01
# Of the paper's algorithm: the weights of the choice, the capacity, whether only first choices are counted.
PAPERS = {
    "switch": ("qwen3_moe-idle", dict(normalised=False, capacity=1.25, first_choice=False)),
    "gshard": ("mixtral", dict(normalised=True, capacity=1.0, first_choice=True)),
}


class Paper:
    """Experts in place of those of a model's blocks. The losses of the last forward pass are in `losses`."""

    def __init__(self, model, normalised, capacity, first_choice):
        self.normalised, self.capacity, self.first_choice = normalised, capacity, first_choice
        self.losses, self.mask, self.dropped = [], None, 0
        model.register_forward_pre_hook(self.enter, with_kwargs=True)
        for layer in model.model.layers:
            layer.mlp.forward = lambda hidden, block=layer.mlp: self.forward(block, hidden)

    def enter(self, model, inputs, named):
        mask = named.get("attention_mask")
        self.mask = (torch.ones_like(named["input_ids"]) if mask is None else mask).bool()
        self.losses, self.trains = [], torch.is_grad_enabled()

    def forward(self, block, hidden):
        k, count = block.gate.top_k, block.gate.num_experts
        logits = linear(hidden, block.gate.weight)
        p = logits.softmax(-1)
        weights, chosen = p.topk(k, -1)  # the best first
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        kept = torch.zeros_like(chosen, dtype=torch.bool)
        for sequence, mask in enumerate(self.mask):
            positions = mask.nonzero().flatten().tolist()
            room = max(math.ceil(self.capacity * k * len(positions) / count), 1) if self.trains else len(positions)
            taken = [0] * count
            for rank in range(k):
                for position in positions:
                    expert = int(chosen[sequence, position, rank])
                    kept[sequence, position, rank] = taken[expert] < room
                    taken[expert] += 1
        self.dropped += int((~kept)[self.mask].sum())
        rows = self.mask.sum()
        counted = chosen[self.mask][:, :1] if self.first_choice else chosen[self.mask]
        f = torch.bincount(counted.flatten(), minlength=count) / rows
        balance = count * (f * p[self.mask].sum(0) / rows).sum() / (1 if self.first_choice else k)
        z = (logits[self.mask].logsumexp(-1) ** 2).sum() / rows
        self.losses.append((balance, z))
        out = torch.zeros_like(hidden)
        for expert in range(count):
            gate, up = linear(hidden, block.experts.gate_up_proj[expert]).chunk(2, -1)
            y = linear(silu(gate) * up, block.experts.down_proj[expert])
            out = out + y * (weights * (kept & (chosen == expert))).sum(-1, keepdim=True)
        return out


def train(case, prepare):
    """The losses of the model and of its routers, and the gradient norms."""
    here = pathlib.Path(__file__).parent
    folder = here / case
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    model = model.double().train()
    routes, own, seen, outputs = experts.Routes(model), prepare(model), [], []
    model.register_forward_hook(lambda model, inputs, output: outputs.append(output))
    plain = families.loss_of

    def with_routers(family, model, batch):
        loss = plain(family, model, batch)
        balance, z = own(outputs.pop())
        if torch.is_grad_enabled():
            seen.append([float(loss), float(balance), float(z)])
        return loss + balance + z

    families.loss_of = with_routers
    lines = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    norms = families.train(case, model, lines)["norms"]
    families.loss_of = plain
    losses, balance, z = map(list, zip(*seen))
    print(case, f"balance {balance[0]:.4f} to {balance[-1]:.4f}, gap {routes.gap:.1e}", flush=True)
    return {"losses": losses, "norms": norms, "balance": balance, "z": z}


def of_transformers(model):
    model.config.output_router_logits = True
    return lambda output: (ALPHA * output.aux_loss, 0.0)


def of_paper(paper):
    def losses(_):
        balance, z = map(sum, zip(*paper.losses))
        return ALPHA * balance, ZETA * z

    return losses


def main():
    found = {"balance_loss": ALPHA, "z_loss": ZETA}
    for case in ("mixtral", "qwen3_moe", "qwen2_moe"):
        found[case] = train(case, of_transformers)
    for name, (case, of) in PAPERS.items():
        papers = []
        found[name] = train(case, lambda model: of_paper(papers.append(Paper(model, **of)) or papers[0]))
        print(name, "dropped", papers[0].dropped)
        assert papers[0].dropped > 0
    path = pathlib.Path(__file__).with_name("balance.json")
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
