"""Twenty steps of the Llama of `families.py` by the rule of PipeDream (Narayanan et al. 2019, arXiv 1806.03377):
a batch goes through each stage, forward and backward, with the version that stage had when the batch came to it.

A table has the versions of each stage: version[stage][k] has had k updates. In a window of batches over n stages, batch
j reads in stage s (both from 0)

    version[s][base + max(0, j - (n - 1 - s))]

and its gradient makes version[s][base + j + 1] of the newest one. Moments and decay are as ever. Writes pipedream.json
beside itself: for each case its settings, and in f64 and in f32 the mean loss and the root mean square of the norms of
each window, and the sum and the norm of each weight in the end.

    pip install torch transformers && python pipedream.py
"""

import json
import pathlib

import torch
from delayed import RULES, STEPS, in_both, sums
from families import BATCH, DECAY, RATE, loss_of
from transformers import AutoModelForCausalLM

# The layers of each stage: those of the device that have at most the stage's share of all parameters together.
EMBEDDING, NORM, HEAD = "model.embed_tokens.", "model.norm.", "lm_head."
LAYERS = [f"model.layers.{layer}." for layer in range(3)]
STAGES = {
    1: [[EMBEDDING, *LAYERS, NORM, HEAD]],
    2: [[EMBEDDING, LAYERS[0]], [LAYERS[1], LAYERS[2], NORM, HEAD]],
    3: [[EMBEDDING, LAYERS[0]], [LAYERS[1]], [LAYERS[2], NORM, HEAD]],
    4: [[EMBEDDING, LAYERS[0]], [LAYERS[1]], [LAYERS[2]], [NORM, HEAD]],
    5: [[EMBEDDING, LAYERS[0]], [LAYERS[1]], [LAYERS[2]], [NORM], [HEAD]],
}
CASES = [{"kind": kind, "stages": stages, "window": window}
         for kind, stages, window in [("adamw", 1, 4), ("adamw", 2, 5), ("adamw", 3, 4), ("adamw", 5, 20),
                                      ("sgd", 3, 20), ("sgd", 4, 10), ("muon", 4, 5)]]


def train(case, folder, lines, dtype):
    model = lambda: AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").to(dtype).train()
    newest, read = model(), model()
    optimizer = RULES[case["kind"]](list(newest.named_parameters()))
    stages, window = STAGES[case["stages"]], case["window"]

    def weights_of(stage):
        return {name: p.detach().clone() for name, p in newest.named_parameters() if name.startswith(tuple(stages[stage]))}

    assert sum(len(weights_of(stage)) for stage in range(len(stages))) == len(list(newest.parameters()))
    version = [[weights_of(stage)] for stage in range(len(stages))]
    into = dict(read.named_parameters())
    losses, norms = [], []
    for base in range(0, STEPS, window):
        for j in range(window):
            for stage in range(len(stages)):
                behind = len(stages) - 1 - stage
                for name, weights in version[stage][base + max(0, j - behind)].items():
                    into[name].data.copy_(weights)
            at = (base + j) * BATCH % len(lines)
            loss = loss_of("llama", read, lines[at:at + BATCH])
            read.zero_grad()
            loss.backward()
            for to, weights in zip(newest.parameters(), read.parameters()):
                to.grad = weights.grad.clone()
            norms.append(float(torch.nn.utils.clip_grad_norm_(newest.parameters(), float("inf"))))
            losses.append(float(loss))
            optimizer.step()
            for stage in range(len(stages)):
                version[stage].append(weights_of(stage))
    windows = range(0, STEPS, window)
    mean = lambda numbers: sum(numbers) / len(numbers)
    of_losses = [mean(losses[base:base + window]) for base in windows]
    of_norms = [mean([norm ** 2 for norm in norms[base:base + window]]) ** 0.5 for base in windows]
    return {"losses": of_losses, "norms": of_norms, "weights": sums(newest)}


def main():
    here = pathlib.Path(__file__).parent
    lines = [json.loads(line) for line in (here / "llama/data.jsonl").read_text().splitlines()]
    cases = [in_both(train, case, here / "llama", lines) for case in CASES]
    golden = {"steps": STEPS, "batch": BATCH, "learning_rate": RATE, "weight_decay": DECAY, "cases": cases}
    (here / "pipedream.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
