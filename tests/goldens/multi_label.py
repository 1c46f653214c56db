"""Ten AdamW steps of the classifiers of families.py with problem_type "multi_label_classification", in f64, by
transformers' own loss: the losses, gradient norms and logits, and the metrics of the model before them, computed as
scikit-learn does (accuracy_score and precision_recall_fscore_support, micro and macro, zero_division=0).

    pip install torch transformers numpy && python multi_label.py
"""

import json
import pathlib

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

import families

LABELS = 3


def labels_of(index, line):
    """As tests/integration/multi_label.rs has them. Some are between 0 and 1."""
    yes, no = (0.75, 0.25) if index % 10 == 9 else (1.0, 0.0)
    return [yes if (7 * index + 3 * label + len(line["input_ids"])) % 5 < 2 else no for label in range(LABELS)]


def ratio(a, b):
    return float(a / b) if b else 0.0


def metrics(scores, known):
    """scores, known: (sequences, labels)."""
    given, has = scores > 0, known > 0.5
    right, wrong, lost = ((given & has).sum(0), (given & ~has).sum(0), (~given & has).sum(0))
    found = {"subset_accuracy": float((given == has).all(1).mean())}
    for name, under, over in [("precision", 1, 0), ("recall", 0, 1), ("f1", 0.5, 0.5)]:
        each = [ratio(t, t + under * w + over * l) for t, w, l in zip(right, wrong, lost)]
        found[f"{name}_micro"] = ratio(right.sum(), right.sum() + under * wrong.sum() + over * lost.sum())
        found[f"{name}_macro"] = sum(each) / len(each)
    return found


def loss_of(_, model, batch):
    width = max(len(line["input_ids"]) for line in batch)
    pad = lambda line, key, fill: line[key] + [fill] * (width - len(line[key]))
    inputs = {"input_ids": torch.tensor([pad(line, "input_ids", 1) for line in batch]),
              "attention_mask": torch.tensor([pad({"ones": [1] * len(line["input_ids"])}, "ones", 0) for line in batch]),
              "labels": torch.tensor([line["labels"] for line in batch], dtype=model.dtype)}
    if "token_type_ids" in batch[0]:
        inputs["token_type_ids"] = torch.tensor([pad(line, "token_type_ids", 0) for line in batch])
    return model(**inputs).loss


def scores_of(model, line):
    inputs = {key: torch.tensor([line[key]]) for key in ("input_ids", "token_type_ids") if key in line}
    return model(**inputs).logits[0].tolist()


def main():
    families.loss_of = loss_of
    here, found = pathlib.Path(__file__).parent, {}
    for family in sorted(families.CLASSES):
        if "value" in family:
            continue
        model = AutoModelForSequenceClassification.from_pretrained(
            here / family, attn_implementation="eager", problem_type="multi_label_classification").double().train()
        lines = [json.loads(line) for line in (here / family / "data.jsonl").read_text().splitlines()]
        lines = [{**line, "labels": labels_of(index, line)} for index, line in enumerate(lines)]
        with torch.no_grad():
            scores = np.array([scores_of(model, line) for line in lines])
            mean = sum(float(loss_of(family, model, [line])) for line in lines) / len(lines)
        known = np.array([line["labels"] for line in lines])
        trained = families.train(family, model, lines)
        del trained["logits"]
        found[family] = {**trained, "scores": scores[:3].tolist(), "metrics": {"loss": mean, **metrics(scores, known)}}
    (here / "multi_label.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
