"""Ten AdamW steps of each preference loss on models of families.py and gpt2.py, in f64: losses and gradient norms.

A record is two sequences of the model's data.jsonl that have a label. The losses are the formulas of the papers,
as means over all records of a step. The log-probabilities by the reference are those of the model before the
first step, each moved a little.

    pip install torch transformers && python preference.py
"""

import json
import pathlib

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from families import DECAY, RATE, STEPS

RECORDS = 2  # of a step
CASES = {
    "dpo": dict(kind="dpo", beta=0.5),
    "cdpo": dict(kind="dpo", beta=0.2, label_smoothing=0.1),
    "robust": dict(kind="dpo", beta=0.3, label_smoothing=0.2, robust=True, sft=0.3),
    "ipo": dict(kind="ipo", beta=0.4),
    "hinge": dict(kind="hinge", beta=0.5),
    "simpo": dict(kind="simpo", beta=2.0, gamma=0.5, label_smoothing=0.05),
    "cpo": dict(kind="cpo", beta=0.1, sft=1.0),
    "orpo": dict(kind="orpo", beta=0.6, sft=1.0),
}


def log_probability(model, line):
    """The sum over the labelled tokens, and their number."""
    logits = model(input_ids=torch.tensor([line["input_ids"]])).logits[0, :-1]
    labels = torch.tensor(line["labels"][1:])
    rows = labels >= 0
    return logits.log_softmax(-1)[rows].gather(1, labels[rows][:, None]).sum(), int(rows.sum())


def loss_of(model, records, references, kind, beta, gamma=0.0, label_smoothing=0.0, robust=False, sft=0.0):
    losses, of_chosen, tokens = [], 0, 0
    for (chosen, rejected), (r_chosen, r_rejected) in zip(records, references):
        (chosen, n), (rejected, m) = log_probability(model, chosen), log_probability(model, rejected)
        of_chosen, tokens = of_chosen - chosen, tokens + n
        h = (chosen - r_chosen) - (rejected - r_rejected)
        e = label_smoothing
        if kind == "dpo" and robust:
            loss = (-(1 - e) * logsigmoid(beta * h) + e * logsigmoid(-beta * h)) / (1 - 2 * e)
        elif kind == "dpo":
            loss = -(1 - e) * logsigmoid(beta * h) - e * logsigmoid(-beta * h)
        elif kind == "ipo":
            loss = ((chosen - r_chosen) / n - (rejected - r_rejected) / m - 1 / (2 * beta)) ** 2
        elif kind == "hinge":
            loss = torch.relu(1 - beta * h)
        elif kind == "simpo":
            x = beta * (chosen / n - rejected / m) - gamma
            loss = -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)
        elif kind == "cpo":
            loss = -logsigmoid(beta * (chosen - rejected))
        elif kind == "orpo":
            odds = [a - torch.log1p(-torch.exp(a)) for a in (chosen / n, rejected / m)]
            loss = -beta * logsigmoid(odds[0] - odds[1])
        losses.append(loss)
    return sum(losses) / len(losses) + sft * of_chosen / tokens


def main():
    here, found = pathlib.Path(__file__).parent, {"records": RECORDS}
    for family in ("llama", "qwen3", "mistral", "tied"):
        lines = [json.loads(line) for line in (here / family / "data.jsonl").read_text().splitlines()]
        lines = [line for line in lines if max(line["labels"][1:], default=-100) >= 0]
        records = list(zip(lines[0::2], lines[1::2]))
        first = AutoModelForCausalLM.from_pretrained(here / family, attn_implementation="eager").double()
        with torch.no_grad():
            known = [[float(log_probability(first, line)[0]) for line in record] for record in records]
        references = [[log + 0.1 * ((7 * index + 3 * place) % 11 - 5) for place, log in enumerate(record)]
                      for index, record in enumerate(known)]
        found[family] = {"reference": references}
        for case, settings in CASES.items():
            model = AutoModelForCausalLM.from_pretrained(here / family, attn_implementation="eager").double().train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            named = list(model.named_parameters())
            groups = [{"params": [p for name, p in named if (p.ndim > 1) == decays], "weight_decay": DECAY * decays}
                      for decays in (True, False)]
            optimizer = torch.optim.AdamW(groups, lr=RATE)
            losses, norms = [], []
            for step in range(STEPS):
                part = slice(step * RECORDS, (step + 1) * RECORDS)
                loss = loss_of(model, records[part], references[part], **settings)
                optimizer.zero_grad()
                loss.backward()
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
                optimizer.step()
                losses.append(float(loss))
            found[family][case] = {"losses": losses, "norms": norms}
        found["settings"] = CASES
    (here / "preference.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
