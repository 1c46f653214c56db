"""Loads a checkpoint or an export of a reward model with transformers and PEFT: accuracy, margin and mean score of records are
those of `l2l eval`.

    l2l train run.toml && l2l eval run.toml --format json > evaluation.json
    pip install torch transformers peft && python reward_loads.py CHECKPOINT records.jsonl evaluation.json [BASE]

A record has the texts chosen and rejected. BASE is the model of a checkpoint that has adapters.
"""

import json
import pathlib
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def main(checkpoint, records, evaluation, base=None):
    model = AutoModelForSequenceClassification.from_pretrained(base or checkpoint, num_labels=1, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, checkpoint) if base else model
    tokenizer = AutoTokenizer.from_pretrained(base or checkpoint)

    def score(text):
        ids = tokenizer(text + (tokenizer.eos_token or ""), return_tensors="pt").input_ids
        with torch.no_grad():
            return float(model.eval()(input_ids=ids).logits[0, 0])

    lines = [json.loads(line) for line in pathlib.Path(records).read_text().splitlines()]
    scores = torch.tensor([[score(line.get("prompt", "") + line[name]) for name in ("chosen", "rejected")] for line in lines])
    margins = scores[:, 0] - scores[:, 1]
    theirs = {"accuracy": float((margins > 0).float().mean()), "margin": float(margins.mean()), "mean": float(scores.mean())}
    ours = json.loads(pathlib.Path(evaluation).read_text().splitlines()[-1])
    for name, value in theirs.items():
        assert abs(ours[name] - value) < 1e-5 * max(1.0, abs(value)), (name, ours[name], value)
    print(f"{len(lines)} records: {theirs}")


if __name__ == "__main__":
    main(*sys.argv[1:])
