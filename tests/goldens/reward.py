"""Ten AdamW steps of TRL's RewardTrainer and of sentence-transformers' BinaryCrossEntropyLoss, in f64: losses and gradient norms.

The models are those of families.py and gpt2.py. One with a head of classes keeps the first of them; one without a head gets
it from the adapters, which are made below `reward/`. A record is two sequences of the model's data.jsonl, or one with a label.
Each sequence is computed by itself, so that nothing is padded.

    pip install torch transformers peft trl sentence-transformers && python reward.py
"""

import json
import pathlib
from collections import defaultdict
from types import SimpleNamespace

import peft
import sentence_transformers
import torch
import transformers
import trl
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import AutoModelForSequenceClassification
from trl import RewardTrainer

from families import DECAY, RATE, STEPS

RECORDS = {"reward": 2, "binary": 4}  # of a step
CASES = {
    "reward": dict(kind="reward"),
    "margin": dict(kind="reward", margins=True),
    "centre": dict(kind="reward", centre=0.01, margins=True),
    "binary": dict(kind="binary"),
}
FULL = {"llama-classes": ["reward", "margin", "centre"], "mistral-classes": ["reward", "margin"],
        "qwen3-classes": ["reward", "binary"], "gpt2-classes": ["margin", "centre"], "bert-value": ["binary"],
        "distilbert-classes": ["binary"]}
ADAPTERS = {"llama": (["q_proj", "down_proj"], ["centre"]), "mistral": (["v_proj"], ["reward"]),
            "qwen3": (["q_proj", "up_proj"], ["margin", "binary"]), "tied": (["c_attn"], ["reward"]),
            "bert": (["query"], ["binary"])}
SAVED = {"bert": ["pooler"]}  # the model has none, so nobody else would have it
HEADS = ("score.weight", "classifier.weight", "classifier.bias")


class Unpadded:
    """Computes each sequence of a padded batch by itself."""

    def __init__(self, model):
        self.model, self.training = model, True

    def __call__(self, input_ids, attention_mask, token_type_ids=None, **_):
        logits = []
        for at, mask in enumerate(attention_mask):
            inputs = {"input_ids": input_ids[at:at + 1, :int(mask.sum())]}
            if token_type_ids is not None:
                inputs["token_type_ids"] = token_type_ids[at:at + 1, :int(mask.sum())]
            logits.append(self.model(**inputs).logits)
        return SimpleNamespace(logits=torch.cat(logits))


class Encoder(CrossEncoder):
    """A cross-encoder that gets token ids instead of texts."""

    def __init__(self, model):
        torch.nn.Module.__init__(self)
        self.unpadded = Unpadded(model)

    num_labels, device = 1, "cpu"

    def preprocess(self, inputs, **_):
        return padded([line for line, _ in inputs])

    def forward(self, inputs, **_):
        return {"scores": self.unpadded(**inputs).logits}


def padded(lines):
    width = max(len(line["input_ids"]) for line in lines)
    pad = lambda ids, fill: ids + [fill] * (width - len(ids))
    inputs = {"input_ids": [pad(line["input_ids"], 1) for line in lines],
              "attention_mask": [pad([1] * len(line["input_ids"]), 0) for line in lines]}
    if "token_type_ids" in lines[0]:
        inputs["token_type_ids"] = [pad(line["token_type_ids"], 0) for line in lines]
    return {name: torch.tensor(rows) for name, rows in inputs.items()}


def number_of(record):
    """A margin, or a label from 0 to 1."""
    return ((7 * record) % 5) / 4


def loss_of(model, lines, step, kind, centre=None, margins=False):
    records = RECORDS[kind]
    numbers = [number_of(step * records + nth) for nth in range(records)]
    if kind == "binary":
        part = lines[step * records:(step + 1) * records]
        return BinaryCrossEntropyLoss(Encoder(model))([part, part], torch.tensor(numbers))
    part = lines[2 * step * records:2 * (step + 1) * records]
    inputs = padded(part[0::2] + part[1::2])  # all chosen, then all rejected
    if margins:
        inputs["margin"] = torch.tensor(numbers, dtype=torch.float64)
    alone = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(model=Unpadded(model), accelerator=alone, _metrics=defaultdict(lambda: defaultdict(list)),
                              args=SimpleNamespace(center_rewards_coefficient=centre), _total_train_tokens=0, _tp_size=1)
    return RewardTrainer.compute_loss(trainer, trainer.model, inputs)


def train(model, lines, settings):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decays = lambda name, p: p.ndim > 1 and not name.endswith("bias")
    groups = [{"params": [p for name, p in named if decays(name, p) == is_decayed], "weight_decay": DECAY * is_decayed}
              for is_decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, lines, step, **settings)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([p for _, p in named], float("inf"))))
        optimizer.step()
        losses.append(float(loss))
    return {"losses": losses, "norms": norms}


def lines_of(folder):
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]


def one_score(folder):
    """The model of a directory with the first of its classes alone."""
    whole = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, ignore_mismatched_sizes=True,
                                                               attn_implementation="eager")
    with torch.no_grad():
        for (name, to), of in zip(model.named_parameters(), whole.parameters()):
            if name in HEADS:
                to.copy_(of[:1])
    model.config.pad_token_id = 1
    model.config.problem_type = None
    return model.double().train()


def adapted(here, base, number):
    torch.manual_seed(300 + number)
    model = AutoModelForSequenceClassification.from_pretrained(here / base, num_labels=1, attn_implementation="eager")
    model.config.pad_token_id = 1
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=ADAPTERS[base][0], task_type="SEQ_CLS",
                             modules_to_save=SAVED.get(base), init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    folder = here / "reward" / base
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    written = json.loads((folder / "adapter_config.json").read_text())
    written["base_model_name_or_path"] = f"tests/goldens/{base}"
    (folder / "adapter_config.json").write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    return model.double().train()


def main():
    here = pathlib.Path(__file__).parent
    (here / "reward").mkdir(exist_ok=True)
    versions = {"peft": peft, "sentence-transformers": sentence_transformers, "transformers": transformers, "trl": trl}
    found = {"records": RECORDS, "settings": CASES, "full": {}, "adapters": {},
             "versions": {name: module.__version__ for name, module in versions.items()}}
    for name, cases in FULL.items():
        results = {case: train(one_score(here / name), lines_of(here / name), CASES[case]) for case in cases}
        found["full"][name] = results
    for number, (base, (_, cases)) in enumerate(ADAPTERS.items()):
        results = {case: train(adapted(here, base, number), lines_of(here / base), CASES[case]) for case in cases}
        found["adapters"][base] = results
    (here / "reward" / "golden.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
