"""Ten AdamW steps with label smoothing of models of families.py, in f64: the losses and gradient norms.

    pip install torch transformers && python smoothed.py
"""

import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import families

EPSILON = 0.1
plain = torch.nn.functional.cross_entropy


def main():
    torch.nn.functional.cross_entropy = lambda *of, **more: plain(*of, **more, label_smoothing=EPSILON)
    here, found = pathlib.Path(__file__).parent, {"label_smoothing": EPSILON}
    for family, kind in [("llama", AutoModelForCausalLM), ("bert-classes", AutoModelForSequenceClassification),
                         ("gpt2-classes", AutoModelForSequenceClassification)]:
        model = kind.from_pretrained(here / family, attn_implementation="eager").double().train()
        lines = [json.loads(line) for line in (here / family / "data.jsonl").read_text().splitlines()]
        trained = families.train(family, model, lines)
        found[family] = {key: trained[key] for key in ("losses", "norms")}
    (here / "smoothed.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
