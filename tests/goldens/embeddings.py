"""Ten AdamW steps of sentence-transformers' losses on models of families.py and embeddinggemma.py, in f64: losses and gradient norms.

A record is some sequences of the model's data.jsonl, with a score where the loss reads one. The losses are those
of sentence-transformers, on embeddings of all records of a step.

    pip install torch transformers sentence-transformers && python embeddings.py
"""

import json
import pathlib

import torch
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel

from embeddinggemma import modules
from families import DECAY, RATE, STEPS

RECORDS = 4  # of a step
MODELS = {"bert": "mean", "distilbert": "cls", "qwen3": "last", "llama": "mean", "embeddinggemma": "mean",
          "electra-classes": "cls"}
CASES = {
    "contrastive": dict(kind="contrastive"),
    "negatives": dict(kind="contrastive", negatives=2, scale=10.0),
    "symmetric": dict(kind="contrastive", negatives=1, symmetric=True),
    "nested": dict(kind="contrastive", dimensions=[48, 16, 8]),
    "cosine": dict(kind="cosine"),
    "cosent": dict(kind="cosent", scale=15.0),
    "triplet": dict(kind="triplet", margin=0.1),
    "triplet-cosine": dict(kind="triplet", distance="cosine", margin=0.35),
}
# PyTorch in f32 is itself 2e-5 off here: some gradients are near Adam's epsilon.
LEFT_OUT = {("bert", "triplet-cosine")}
SYMMETRIC = dict(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")


def sequences(settings):
    return {"contrastive": 2 + settings.get("negatives", 0), "triplet": 3}.get(settings["kind"], 2)


def loss_of(settings):
    kind, scale = settings["kind"], settings.get("scale", 20.0)
    if kind == "contrastive":
        symmetric = SYMMETRIC if settings.get("symmetric") else {}
        return losses.MultipleNegativesRankingLoss(None, scale=scale, **symmetric)
    if kind == "cosine":
        return losses.CosineSimilarityLoss(None)
    if kind == "cosent":
        return losses.CoSENTLoss(None, scale=scale)
    metrics = losses.TripletDistanceMetric
    if settings.get("distance") == "cosine":
        return losses.TripletLoss(None, metrics.COSINE, settings.get("margin", 0.5))
    return losses.TripletLoss(None, metrics.EUCLIDEAN, settings.get("margin", 5.0))


def embed(model, behind, ids):
    """Each sequence by itself, so that nothing is padded."""
    ids = torch.tensor([ids])
    mask = torch.ones_like(ids)
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    features = {"token_embeddings": hidden, "attention_mask": mask}
    for module in behind:
        features = module(features)
    return features["sentence_embedding"][0]


def main():
    here, found = pathlib.Path(__file__).parent, {"records": RECORDS, "settings": CASES, "pooling": MODELS}
    for family, mode in MODELS.items():
        lines = [json.loads(line)["input_ids"] for line in (here / family / "data.jsonl").read_text().splitlines()]
        found[family] = {}
        for case, settings in CASES.items():
            if (family, case) in LEFT_OUT:
                continue
            model = AutoModel.from_pretrained(here / family, attn_implementation="eager").double().train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            pooling = Pooling(model.config.hidden_size, pooling_mode={"last": "lasttoken"}.get(mode, mode))
            each, loss_function = sequences(settings), loss_of(settings)
            dense = torch.nn.ModuleList(modules(here / family)).double()
            named = [*model.named_parameters(), *dense.named_parameters()]
            groups = [{"params": [p for name, p in named if (p.ndim > 1) == decays], "weight_decay": DECAY * decays}
                      for decays in (True, False)]
            optimizer = torch.optim.AdamW(groups, lr=RATE)
            results = {"losses": [], "norms": []}
            for step in range(STEPS):
                first = step * RECORDS * each
                texts = [lines[(first + index) % len(lines)] for index in range(RECORDS * each)]
                embeddings = torch.stack([embed(model, [pooling, *dense], text) for text in texts])
                columns = [embeddings[place::each] for place in range(each)]
                scores = torch.tensor([((7 * (step * RECORDS + nth)) % 5) / 4 for nth in range(RECORDS)])
                of = lambda width: loss_function.compute_loss_from_embeddings([c[:, :width] for c in columns], scores)
                loss = sum(of(width) for width in settings.get("dimensions", [model.config.hidden_size]))
                optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], float("inf"))
                optimizer.step()
                results["losses"].append(float(loss))
                results["norms"].append(float(norm))
            found[family][case] = results
    (here / "embeddings.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
