"""The same fine-tune in PyTorch: the runtime's batches, in the runtime's order, on the CPU in fp32.

    pip install torch transformers && python examples/spam/pytorch.py DIRECTORY ORDER.jsonl

DIRECTORY is what fetch.py wrote. Of ORDER.jsonl, lines with "event": "batch" are read, one a step:
"input_ids" and "token_type_ids", rows without padding, and "labels". Prints the loss of each
step, and at the end, one line of JSON: accuracy on test.jsonl, the mean training loss of the last
tenth of the steps, and seconds of training.
"""

import argparse
import json
import pathlib
import time

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

LABELS = ["ham", "spam"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("order", type=pathlib.Path)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--warmup", type=int, default=50, help="steps")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of a forward pass")
    parser.add_argument("--positions", type=int, default=96, help="tokens of a test text, at most")
    parser.add_argument("--model", type=pathlib.Path, help="instead of DIRECTORY/model")
    parser.add_argument("--dropout", type=float, help="the model's, when absent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def pad(rows):
    """Rows of ids as one tensor, and where it is not padding."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


def logits(model, rows, types):
    ids, mask = pad(rows)
    return model(input_ids=ids, attention_mask=mask, token_type_ids=pad(types)[0]).logits


def train(model, batches, options):
    """Losses of the steps."""
    named = list(model.named_parameters())
    plain = [name.endswith(".bias") or "LayerNorm" in name for name, _ in named]
    optimizer = torch.optim.AdamW(
        [{"params": [p for (_, p), is_plain in zip(named, plain) if not is_plain],
          "weight_decay": 0.01},
         {"params": [p for (_, p), is_plain in zip(named, plain) if is_plain],
          "weight_decay": 0.0}],
        lr=options.learning_rate, betas=(0.9, 0.999), eps=1e-8)
    warmup, steps = options.warmup, len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # the runtime's: its first step learns, too
        optimizer, lambda step: min((step + 1) / warmup if step < warmup else 1.0,
                                    (steps - step) / max(1, steps - warmup)))
    model.train()
    losses = []
    for step, batch in enumerate(batches):
        labels, total = torch.tensor(batch["labels"]), 0.0
        for at in range(0, len(labels), options.micro_batch):
            part = slice(at, at + options.micro_batch)
            found = logits(model, batch["input_ids"][part], batch["token_type_ids"][part])
            loss = torch.nn.functional.cross_entropy(found, labels[part], reduction="sum")
            loss = loss / len(labels)
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
        print(json.dumps({"event": "step", "step": step + 1, "loss": total}), flush=True)
    return losses


@torch.no_grad()
def accuracy(model, directory, positions):
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    lines = [json.loads(line) for line in (directory / "test.jsonl").open()]
    tests = [(tokenizer(line["text"], truncation=True, max_length=positions)["input_ids"],
              LABELS.index(line["label"])) for line in lines]
    tests.sort(key=lambda test: len(test[0]))  # rows of a batch as long as each other, about
    model.eval()
    right = 0
    for at in range(0, len(tests), 16):
        rows, labels = zip(*tests[at:at + 16])
        found = logits(model, rows, [[0] * len(row) for row in rows]).argmax(-1)
        right += int((found == torch.tensor(labels)).sum())
    return right / len(tests)


def main():
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    drops = {} if options.dropout is None else dict.fromkeys(
        ["hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"],
        options.dropout)
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model or options.directory / "model", num_labels=len(LABELS), **drops)
    lines = map(json.loads, options.order.open())
    batches = [line for line in lines if line.get("event") == "batch"]
    begin = time.perf_counter()
    losses = train(model, batches, options)
    seconds = time.perf_counter() - begin
    last = losses[-max(1, len(losses) // 10):]
    print(json.dumps({"accuracy": accuracy(model, options.directory, options.positions),
                      "loss": sum(last) / len(last), "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
