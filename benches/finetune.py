"""Measures ways to fine-tune: host, device and link bytes, speed, and the loss after a fixed number of steps.

    python examples/spam/fetch.py spam && python examples/whale/fetch.py whale
    cargo build --release && python3 benches/finetune.py

`--part` selects among these parts. They share `--results`, so an interrupted run continues where it stopped:

    rates     each rule with each of its rates in TRIED, seed 0; SETTINGS has the best of them
    settings  each setting with its chosen rate, on three seeds
    plan      bytes, from `l2l plan`
    speed     tokens a second, from `l2l bench`, in rounds that alternate between the settings
    spam      accuracy on the emails of examples/spam

`--only NAME` runs some settings, `--tables` runs nothing. The tables are printed at the end, in Markdown.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
# Budgets: a run takes at most about 40 seconds on two cores.
SEQUENCE = 64  # tokens
START = {"built-in": 240, "whale": 150}  # steps of the pretraining, once
STEPS = {"built-in": 60, "whale": 60, "spam": 300}  # of each setting
VALIDATION = {"built-in": 32, "whale": 28, "spam": 1000}  # batches at the end
SEEDS = (0, 1, 2)
ROUNDS, ROUND_STEPS = 3, 16  # of `l2l bench`

START_CONFIG = {"built-in": "built_in.toml", "whale": "whale/pretrain.toml"}
CONFIG = {"built-in": "built_in.toml", "whale": "whale/continue.toml", "spam": "spam/spam.toml"}
LORA = ["train.lora.rank=16"]
# Name: keys, and the rates of the built-in corpus, of whale and of spam. A rate was chosen by the loss of seed 0
# (spam: by the accuracy of seed 0) among those that TRIED has for the rule. Bases and narrow moments use the rate
# of the plain setting.
SETTINGS = {
    "AdamW": ([], 3e-4, 1e-3, 1e-4),
    "LoRA": (LORA, 1e-2, 3e-3, 1e-3),
    "LoRA over bf16": (LORA + ["train.base=bf16"], 1e-2, 3e-3, 1e-3),
    "LoRA over int8": (LORA + ["train.base=int8"], 1e-2, 3e-3, 1e-3),
    "LoRA over nf4 (QLoRA)": (LORA + ["train.base=nf4"], 1e-2, 3e-3, 1e-3),
    "norms only": (['train.only=["norm"]'], 3e-2, 1e-1, None),
    "Adam": (["optimizer.kind=adam"], 1e-4, 3e-3, None),
    "SGD, momentum 0.9": (["optimizer.kind=sgd", "optimizer.momentum=0.9"], 0.01, 0.3, None),
    "LAMB": (["optimizer.kind=lamb"], 1e-2, 3e-2, None),
    "Lion": (["optimizer.kind=lion", "optimizer.betas=[0.9,0.99]"], 3e-4, 1e-3, 2e-5),
    "Adafactor": (["optimizer.kind=adafactor"], 3e-2, 1e-1, 1e-3),
    "Muon": (["optimizer.kind=muon", "optimizer.muon_rate=match-rms-adamw"], 3e-3, 3e-3, 3e-4),
    "AdamW in 8 bits": (["optimizer.kind=adamw-8bit"], 3e-4, 1e-3, 1e-4),
    "AdamW in bf16": (["optimizer.kind=adamw-bf16"], 3e-4, 1e-3, 1e-4),
    "stash in bf16": (["stash.dtype=bf16"], 3e-4, 1e-3, 1e-4),
    "stash in 8 bits": (["stash.dtype=int8"], 3e-4, 1e-3, 1e-4),
    "device in bf16": (["device.dtype=bf16"], 3e-4, 1e-3, 1e-4),
    "device in bf16, masters in bf16": (["device.dtype=bf16", "optimizer.masters=bf16"], 3e-4, 1e-3, 1e-4),
    "the same, AdamW in 8 bits": (["device.dtype=bf16", "optimizer.masters=bf16", "optimizer.kind=adamw-8bit"],
                                  3e-4, 1e-3, 1e-4),
    "device in f16": (["device.dtype=f16"], 3e-4, 1e-3, 1e-4),
    "gradients in bf16": (["device.gradient_dtype=bf16"], 3e-4, 1e-3, 1e-4),
    "gradients in 8 bits": (["compression.kind=int8", "parallel.groups=2"], 3e-4, 1e-3, 1e-4),
    "the largest 1 % of gradients": (["compression.kind=top-k", "parallel.groups=2"], 3e-4, 1e-3, 1e-4),
    "the largest 10 % of gradients": (["compression.kind=top-k", "compression.density=0.1", "parallel.groups=2"],
                                      3e-4, 1e-3, 1e-4),
    "PowerSGD of rank 4": (["compression.kind=powersgd", "parallel.groups=2"], 3e-4, 1e-3, 1e-4),
    "PowerSGD of rank 32": (["compression.kind=powersgd", "compression.rank=32", "parallel.groups=2"],
                            3e-4, 1e-3, 1e-4),
}
TRIED = {  # on the built-in corpus, on whale, on spam
    "AdamW": ([1e-4, 3e-4, 1e-3, 3e-3], [1e-4, 3e-4, 1e-3, 3e-3], [1e-4]),
    "LoRA": ([1e-3, 3e-3, 1e-2], [1e-3, 3e-3, 1e-2], [1e-3]),
    "norms only": ([3e-3, 1e-2, 3e-2], [1e-2, 3e-2, 1e-1], []),
    "Adam": ([1e-4, 3e-4, 1e-3, 3e-3], [3e-4, 1e-3, 3e-3], []),
    "SGD, momentum 0.9": ([0.01, 0.03, 0.1, 0.3], [0.03, 0.1, 0.3, 1], []),
    "LAMB": ([3e-3, 1e-2, 3e-2], [3e-3, 1e-2, 3e-2, 1e-1], []),
    "Lion": ([1e-4, 3e-4, 1e-3], [1e-4, 3e-4, 1e-3, 3e-3], [1e-5, 2e-5, 5e-5]),
    "Adafactor": ([3e-3, 1e-2, 3e-2, 1e-1], [3e-3, 1e-2, 3e-2, 1e-1], [1e-3]),
    "Muon": ([3e-4, 1e-3, 3e-3], [3e-4, 1e-3, 3e-3], [1e-4, 3e-4, 1e-3]),
}
TEXTS, PLACE = ("built-in", "whale"), {"built-in": 1, "whale": 2, "spam": 3}


def l2l(command, config, keys):
    """The JSON events of a command."""
    sets = [part for key in keys for part in ("--set", key)]
    line = [args.l2l, command, "--format", "json", EXAMPLES / config, *sets]
    ran = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        sys.exit(f"failed: {' '.join(map(str, line))}")
    return [json.loads(line) for line in ran.stdout.splitlines()]


def keys_of(corpus, name, rate, run):
    """The keys that a run sets in addition to its config."""
    keys = [f"data.sequence_length={SEQUENCE}", f"step.steps={STEPS[corpus]}", f"optimizer.learning_rate={rate}",
            f"checkpoint.directory={run}", f"validation.batches={VALIDATION[corpus]}"]
    if corpus == "spam":
        keys += ["step.micro_batch=4"]  # two groups need at least two micro-batches
    else:
        keys += ["step.batch=16", "step.micro_batch=8", "schedule.recompute=true", "optimizer.weight_decay=0.01",
                 "optimizer.betas=[0.9,0.999]", "optimizer.min_learning_rate=0", "optimizer.warmup_steps=5",
                 "validation.every_steps=100000", f"model.path={start(corpus)}"]
    return keys + SETTINGS[name][0]


def start(corpus):
    """The model that all settings of a corpus begin with: trained and exported once."""
    to = pathlib.Path(args.work) / f"start-{corpus}"
    if not to.exists():
        run = pathlib.Path(args.work) / f"pretraining-{corpus}"
        shutil.rmtree(run, ignore_errors=True)
        keys = [f"data.sequence_length={SEQUENCE}", f"step.steps={START[corpus]}", "step.seed=100", "step.batch=16",
                f"checkpoint.directory={run}", "optimizer.warmup_steps=20"]
        l2l("train", START_CONFIG[corpus], keys)
        sets = [part for key in keys for part in ("--set", key)]
        subprocess.run([args.l2l, "export", EXAMPLES / START_CONFIG[corpus], *sets, "--to", to], check=True)
    return to


def train(corpus, name, rate, seed):
    """Trains once. The last validation is the result."""
    key = {"part": "train", "corpus": corpus, "setting": name, "rate": rate, "seed": seed, "steps": STEPS[corpus]}
    if not found(key):
        run = pathlib.Path(args.work) / "run"
        shutil.rmtree(run, ignore_errors=True)
        events = l2l("train", CONFIG[corpus], keys_of(corpus, name, rate, run) + [f"step.seed={seed}"])
        told = [event for event in events if event["event"] == "validation"][-1]
        keep(key | {k: told[k] for k in ("loss", "accuracy") if k in told} | {"seconds": events[-1]["seconds"]})


def plan(corpus, name):
    key = {"part": "plan", "corpus": corpus, "setting": name}
    if not found(key):
        made = l2l("plan", CONFIG[corpus], keys_of(corpus, name, SETTINGS[name][PLACE[corpus]], "none"))[-1]
        host = made["host_bytes"]["terms"]
        keep(key | {"host": sum(host.get(term, 0) for term in ("masters", "optimizer_states", "gradient_regions")),
                    "device": made["device_bytes"]["total"], "link": made["upload_bytes"] + made["download_bytes"],
                    "parameters": made["parameters"], "trained": made["trained_parameters"]})


def speed(corpus, name, nth):
    key = {"part": "speed", "corpus": corpus, "setting": name, "round": nth}
    if not found(key):
        keys = keys_of(corpus, name, SETTINGS[name][PLACE[corpus]], "none")
        told = l2l("bench", CONFIG[corpus], [*keys, f"step.steps={ROUND_STEPS}"])[-1]
        keep(key | {"tokens_per_second": told["tokens_per_second"]})


def results():
    path = pathlib.Path(args.results)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def found(key):
    """The results whose fields equal all of the key's."""
    return [one for one in results() if key.items() <= one.items()]


def keep(one):
    with open(args.results, "a") as file:
        file.write(json.dumps(one) + "\n")
    print(one, file=sys.stderr, flush=True)


def runs_of(corpus, name):
    rate = SETTINGS[name][PLACE[corpus]]
    return found({"part": "train", "corpus": corpus, "setting": name, "rate": rate, "steps": STEPS[corpus]})


def spread(values, form):
    mean = form.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def row(*cells):
    print("| " + " | ".join(cells) + " |")


def settings_table(corpus):
    base = found({"part": "plan", "corpus": corpus, "setting": "AdamW"})
    if not base:
        return
    print(f"\n{corpus}, {base[0]['parameters']:,} parameters:\n")
    row("setting", "host bytes a parameter", "device MB", "link bytes a step and parameter", "speed", "rate",
        "held-out loss")
    print("|---|---|---|---|---|---|---|")
    begin = found({"part": "start", "corpus": corpus})
    if begin:
        row("before", "", "", "", "", "", f"{begin[0]['loss']:.4f}")
    count = base[0]["parameters"]
    for name in SETTINGS:
        planned = found({"part": "plan", "corpus": corpus, "setting": name})
        ratios = []
        for nth in range(ROUNDS):
            one, other = (found({"part": "speed", "corpus": corpus, "setting": which, "round": nth})
                          for which in (name, "AdamW"))
            if one and other:
                ratios.append(one[0]["tokens_per_second"] / other[0]["tokens_per_second"])
        losses = [run["loss"] for run in runs_of(corpus, name)]
        if planned:
            one = planned[0]
            row(name, f"{one['host'] / count:.2f}", f"{one['device'] / 1e6:.1f}", f"{one['link'] / count:.1f}",
                f"{statistics.median(ratios):.2f}" if ratios else "", f"{SETTINGS[name][PLACE[corpus]]:g}",
                spread(losses, "{:.4f}") if losses else "")


def spam_table():
    base = [run["accuracy"] for run in runs_of("spam", "AdamW")]
    if not base:
        return
    print(f"\nspam, {STEPS['spam']} steps:\n")
    row("setting", "rate", "accuracy in percent", "points beside AdamW")
    print("|---|---|---|---|")
    for name in SETTINGS:
        hits = [run["accuracy"] for run in runs_of("spam", name)]
        if hits:
            points = 100 * (statistics.mean(hits) - statistics.mean(base))
            row(name, f"{SETTINGS[name][3]:g}", spread([100 * hit for hit in hits], "{:.2f}"),
                "" if name == "AdamW" else f"{points:+.2f}")


def rates_table():
    """The result of each rate in TRIED with seed 0."""
    print("\nRates tried with seed 0: losses, and accuracies of spam:\n")
    row("setting", *PLACE)
    print("|---|---|---|---|")
    for name in SETTINGS:
        cells = []
        for corpus in PLACE:
            runs = found({"part": "train", "corpus": corpus, "setting": name, "seed": 0, "steps": STEPS[corpus]})
            value = lambda run: f"{100 * run['accuracy']:.2f}" if "accuracy" in run else f"{run['loss']:.4f}"
            cells.append(", ".join(f"{run['rate']:g}: {value(run)}" for run in sorted(runs, key=lambda r: r["rate"])))
        row(name, *cells)


def main():
    pathlib.Path(args.work).mkdir(exist_ok=True)
    names = [name for name in SETTINGS if not args.only or name in args.only]
    parts = [] if args.tables else args.part
    if "rates" in parts:
        for name in (name for name in names if name in TRIED):
            for corpus in PLACE:
                for rate in TRIED[name][PLACE[corpus] - 1]:
                    train(corpus, name, rate, 0)
    for corpus in TEXTS:
        if "settings" in parts:
            if not found({"part": "start", "corpus": corpus}):
                run = pathlib.Path(args.work) / "run"
                shutil.rmtree(run, ignore_errors=True)
                keys = [*keys_of(corpus, "AdamW", 0, run), "step.steps=1"]
                told = [event for event in l2l("train", CONFIG[corpus], keys) if event["event"] == "validation"]
                keep({"part": "start", "corpus": corpus, "loss": told[-1]["loss"]})
            for seed in SEEDS:
                for name in names:
                    train(corpus, name, SETTINGS[name][PLACE[corpus]], seed)
        if "plan" in parts:
            for name in names:
                plan(corpus, name)
        if "speed" in parts:
            for nth in range(ROUNDS):
                for name in names:
                    speed(corpus, name, nth)
    if "spam" in parts:
        for seed in SEEDS[: args.spam_seeds]:
            for name in (name for name in names if SETTINGS[name][3]):
                train("spam", name, SETTINGS[name][3], seed)
    for corpus in TEXTS:
        settings_table(corpus)
    spam_table()
    rates_table()


arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--l2l", default="target/release/l2l", help="the program")
arguments.add_argument("--results", default="finetune.jsonl", help="file of results, a JSON object a line")
arguments.add_argument("--work", default="finetune-runs", help="folder of starting points and runs")
arguments.add_argument("--part", nargs="*", default=["rates", "settings", "plan", "speed", "spam"])
arguments.add_argument("--only", nargs="*", help="names of SETTINGS")
arguments.add_argument("--spam-seeds", type=int, default=1)
arguments.add_argument("--tables", action="store_true", help="print the tables of the results, run nothing")
args = arguments.parse_args()
main()
