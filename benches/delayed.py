"""Held-out loss with and without `schedule.delay = 1`, by optimizer and learning rate.

    cargo build --release && python3 benches/delayed.py

A small GPT trains on the built-in text (`examples/built_in.toml`), from each of `--seeds` seeds. Of each optimizer and
rate the script prints the mean loss of the last validation, with the lowest and the highest of the seeds: without a
delay, with one, and with one that begins after `--after` batches. Each run is kept in `--results`, so an interrupted
script continues where it stopped. `--tables` runs nothing.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

CONFIG = pathlib.Path(__file__).resolve().parent.parent / "examples/built_in.toml"
SMALL = ["model.layers=2", "model.hidden=32", "model.heads=2", "data.sequence_length=32", "step.batch=4",
         "step.micro_batch=4", "optimizer.warmup_steps=0", "optimizer.schedule=constant",
         "optimizer.min_learning_rate=0", "device.threads=1"]
MUON, MOMENTUM = ["optimizer.muon_rate=match-rms-adamw"], ["optimizer.momentum=0.9"]
RULES = [("adamw", 1e-3, []), ("adamw", 3e-3, []), ("adamw", 1e-2, []), ("muon", 1e-2, MUON), ("sgd", 3e-1, MOMENTUM)]
WAYS = {"none": [], "delay": ["schedule.delay=1"], "after": ["schedule.delay=1", "schedule.delay_after={after}"]}


def results():
    path = pathlib.Path(args.results)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(key, more):
    """One run, unless its result is there: the loss of its last validation. A loss that is not finite is None."""
    if any(key.items() <= one.items() for one in results()):
        return
    keys = SMALL + more + [f"optimizer.kind={key['kind']}", f"optimizer.learning_rate={key['rate']}",
                           f"step.steps={args.steps}", f"step.seed={key['seed']}", "step.non_finite=continue",
                           f"validation.batches={args.batches}", f"validation.every_steps={args.steps}"]
    line = [args.l2l, "train", "--format", "json", str(CONFIG), *(part for one in keys for part in ("--set", one))]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    events = [json.loads(event) for event in done.stdout.splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "validation"]
    if done.returncode or not losses:
        sys.exit(f"failed with status {done.returncode}: {' '.join(line)}\n{done.stderr}")
    with open(args.results, "a") as file:
        file.write(json.dumps(key | {"loss": losses[-1]}) + "\n")
    print(key, losses[-1], file=sys.stderr, flush=True)


def cell(kind, rate, way):
    runs = [one["loss"] for one in results()
            if (one["kind"], one["rate"], one["way"], one["steps"]) == (kind, rate, way, args.steps)]
    if not runs:
        return ""
    if any(loss is None for loss in runs):
        return "diverges"
    return f"{statistics.mean(runs):.3f} ({min(runs):.3f} to {max(runs):.3f})"


def main():
    for way, keys in WAYS.items():
        keys = [one.format(after=args.after) for one in keys]
        for seed in range(1, args.seeds + 1):
            for kind, rate, more in RULES:
                if not args.tables:
                    train({"kind": kind, "rate": rate, "way": way, "seed": seed, "steps": args.steps}, more + keys)
    print(f"| optimizer | learning rate | no delay | delay | delay after {args.after} batches |\n|---|---|---|---|---|")
    for kind, rate, _ in RULES:
        print(f"| {kind} | {rate:g} | " + " | ".join(cell(kind, rate, way) for way in WAYS) + " |")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--l2l", default="target/release/l2l")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--batches", type=int, default=32)
parser.add_argument("--after", type=int, default=20)
parser.add_argument("--results", default="delayed.jsonl")
parser.add_argument("--tables", action="store_true")
args = parser.parse_args()
main()
