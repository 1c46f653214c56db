"""Held-out loss with updates at once, with `schedule.delay = 1` and by PipeDream, by optimizer and learning rate.

    cargo build --release && python3 benches/delayed.py

A small Llama, whose head is not tied to the embedding, trains on bytes: of the built-in text, or of the `.txt` files of
`--train`, with those of `--validation` held out. Of each optimizer and rate the script prints the mean loss of the last
validation over `--seeds` seeds, with the lowest and the highest: without a delay; with one, which is PipeDream-2BW's rule;
with one that begins after `--after` batches; and by PipeDream with two and with four stages. Each run is kept in
`--results`, so an interrupted script continues where it stopped. `--tables` runs nothing.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

SMALL = ["model.preset=llama-7b", "model.layers=4", "model.hidden=32", "model.heads=2", "model.kv_heads=2",
         "model.intermediate=96", "model.vocabulary=256", "model.positions=64", "data.sequence_length=32", "step.batch=4",
         "step.micro_batch=4", "optimizer.schedule=constant", "device.threads=1"]
MUON, MOMENTUM = ["optimizer.muon_rate=match-rms-adamw"], ["optimizer.momentum=0.9"]
RULES = [("adamw", 1e-3, []), ("adamw", 3e-3, []), ("adamw", 1e-2, []), ("muon", 1e-2, MUON), ("sgd", 3e-1, MOMENTUM)]
DELAY, PIPEDREAM = ["schedule.delay=1"], ["schedule.kind=pipedream", "schedule.window={window}"]
WAYS = {"no delay": [], "delay (2BW)": DELAY, "delay after {after} batches": [*DELAY, "schedule.delay_after={after}"],
        "PipeDream, 2 stages": [*PIPEDREAM, "schedule.stages=2"], "4 stages": [*PIPEDREAM, "schedule.stages=4"]}


def results():
    path = pathlib.Path(args.results)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(key, more):
    """One run, unless its result is there: the loss of its last validation. A loss that is not finite is None."""
    if any(key.items() <= one.items() for one in results()):
        return
    texts = [f"data.{name}={path}" for name, path in [("train", args.train), ("validation", args.validation)] if path]
    keys = SMALL + texts + more + [f"optimizer.kind={key['kind']}", f"optimizer.learning_rate={key['rate']}",
                                   f"step.steps={args.steps}", f"step.seed={key['seed']}", "step.non_finite=continue",
                                   f"validation.batches={args.batches}", f"validation.every_steps={args.steps}"]
    sets = [part for one in keys for part in ("--set", one)]
    with tempfile.NamedTemporaryFile(suffix=".toml") as empty:
        line = [args.l2l, "train", "--format", "json", empty.name, *sets]
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    events = [json.loads(event) for event in done.stdout.splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "validation"]
    if done.returncode or not losses:
        sys.exit(f"failed with status {done.returncode}: {' '.join(line)}\n{done.stderr}")
    with open(args.results, "a") as file:
        file.write(json.dumps(key | {"loss": losses[-1]}) + "\n")
    print(key, losses[-1], file=sys.stderr, flush=True)


def cell(kind, rate, way):
    runs = [one["loss"] for one in results() if key_of(kind, rate, way, one["seed"]).items() <= one.items()]
    if not runs:
        return ""
    if any(loss is None for loss in runs):
        return "diverges"
    return f"{statistics.mean(runs):.3f} ({min(runs):.3f} to {max(runs):.3f})"


def key_of(kind, rate, way, seed):
    return {"kind": kind, "rate": rate, "way": way, "seed": seed, "steps": args.steps, "train": args.train}


def main():
    for way, keys in WAYS.items():
        keys = [one.format(after=args.after, window=args.window) for one in keys]
        for seed in range(1, args.seeds + 1):
            for kind, rate, more in RULES:
                if not args.tables:
                    train(key_of(kind, rate, way, seed), more + keys)
    names = " | ".join(way.format(after=args.after) for way in WAYS)
    print(f"| optimizer | learning rate | {names} |\n" + "|---" * (2 + len(WAYS)) + "|")
    for kind, rate, _ in RULES:
        print(f"| {kind} | {rate:g} | " + " | ".join(cell(kind, rate, way) for way in WAYS) + " |")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--l2l", default="target/release/l2l")
parser.add_argument("--train")
parser.add_argument("--validation")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--batches", type=int, default=32)
parser.add_argument("--after", type=int, default=20)
parser.add_argument("--window", type=int, default=50)
parser.add_argument("--results", default="delayed.jsonl")
parser.add_argument("--tables", action="store_true")
args = parser.parse_args()
main()
