"""The peer of race F in `races.py`: layer-to-layer-pytorch 0.3.0 trains BERT's encoder.

It needs PyTorch below 2, so it has its own environment:

    python -m venv old && old/bin/pip install layer-to-layer-pytorch==0.3.0
    python benches/races.py F --layer-to-layer old/bin/python

It splits hidden states into micro-batches, so its layers cannot begin with an embedding. Here the
embedding is computed beforehand and is not trained, which is less work than l2l does. It keeps the
inputs of layers and recomputes the rest, like l2l with recomputation.
"""

import argparse
import json
import pathlib
import time

import torch
from layer_to_layer_pytorch import Layer2Layer
from torch import nn

EPSILON = 1e-12


class Classes(nn.Module):
    """Classes of a sequence by its first position."""

    def __init__(self, hidden, classes):
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.classifier(torch.tanh(self.dense(x[:, 0])))


class Encoder(nn.Module):
    def __init__(self, fields, classes):
        super().__init__()
        hidden = fields["hidden_size"]
        layer = lambda: nn.TransformerEncoderLayer(
            hidden,
            fields["num_attention_heads"],
            fields["intermediate_size"],
            dropout=0.0,
            activation="gelu",
            layer_norm_eps=EPSILON,
            batch_first=True,
        )
        layers = [layer() for _ in range(fields["num_hidden_layers"])]
        self.layers = nn.ModuleList([*layers, Classes(hidden, classes)])


# PyTorch's name of a tensor -> its name in transformers.
NAMES = {
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}


def load(model, weights):
    """Takes the weights of a BertForSequenceClassification."""
    state = {}
    for at in range(len(model.layers) - 1):
        own, source = f"layers.{at}.", f"bert.encoder.layer.{at}."
        for kind in ("weight", "bias"):
            parts = [weights[f"{source}attention.self.{x}.{kind}"] for x in ("query", "key", "value")]
            state[f"{own}self_attn.in_proj_{kind}"] = torch.cat(parts)
            for to, name in NAMES.items():
                state[f"{own}{to}.{kind}"] = weights[f"{source}{name}.{kind}"]
    head = f"layers.{len(model.layers) - 1}."
    for kind in ("weight", "bias"):
        state[f"{head}dense.{kind}"] = weights[f"bert.pooler.dense.{kind}"]
        state[f"{head}classifier.{kind}"] = weights[f"classifier.{kind}"]
    model.load_state_dict(state)


def embedded(ids, weights):
    tables = "bert.embeddings."
    x = weights[f"{tables}word_embeddings.weight"][ids]
    x = x + weights[f"{tables}position_embeddings.weight"][: ids.shape[1]]
    x = x + weights[f"{tables}token_type_embeddings.weight"][0]
    norm = [weights[f"{tables}LayerNorm.{kind}"] for kind in ("weight", "bias")]
    return nn.functional.layer_norm(x, x.shape[-1:], *norm, EPSILON)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    for name in ("batch", "micro", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("rate", "decay"):
        parser.add_argument(f"--{name}", type=float)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fields = json.loads((options.folder / "config.json").read_text())
    weights = torch.load(options.folder / "weights.pt")
    model = Encoder(fields, classes=2).train()
    load(model, weights)
    ring = Layer2Layer(model, microbatch_size=options.micro, gpu_device="cpu")
    groups = {True: [], False: []}
    for (name, _), master in zip(model.named_parameters(), ring.main_params):
        groups["bias" in name or "norm" in name].append(master)
    groups = [
        {"params": groups[False], "weight_decay": options.decay},
        {"params": groups[True], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.rate)
    lines = [json.loads(line) for line in (options.folder / "data.jsonl").open()]
    for step in range(options.steps):
        begin = time.perf_counter()
        batch = lines[step * options.batch : (step + 1) * options.batch]
        x = embedded(torch.tensor([line["input_ids"] for line in batch]), weights)
        labels = torch.tensor([line["label"] for line in batch])
        ring.zero_grad()
        ring.forward(x)
        loss = ring.compute_loss(labels, nn.CrossEntropyLoss())
        ring.backward()
        optimizer.step()
        ring.update_main_model_params()
        seconds = time.perf_counter() - begin
        print(json.dumps({"event": "step", "loss": loss, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
