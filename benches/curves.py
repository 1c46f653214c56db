"""Validation loss of f32, bf16 and f16, by step and by second.

    cargo build --release && pip install matplotlib && python3 benches/curves.py --svg curves.svg

It draws the L2L paper's figure on mixed precision (arXiv 2002.05645), for a GPT on the built-in text
(`examples/built_in.toml`). Each dtype trains from the same seed on the same batches, for `--steps` steps with a
validation every `--every` steps. The runs alternate: each of the `--rounds` rounds trains with every dtype once, so
that a slow phase of the machine affects all of them.

The script checks that losses are equal in all rounds. Seconds at a validation are the median over the rounds. They count
training alone, including the first step. They leave out the reading of data, each validation, the sample behind it, and
the updates that run meanwhile.

Each run is kept in `--results`, so an interrupted script continues where it stopped. `--tables` runs nothing. At the end
the script prints the table in Markdown, and then the dtype with the fastest step, with ratios of medians over the rounds.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

CONFIG = pathlib.Path(__file__).resolve().parent.parent / "examples/built_in.toml"
DTYPES = ("f32", "bf16", "f16")


def train(dtype, nth):
    """One run: its losses, and the seconds of training before each validation."""
    key = settings() | {"dtype": dtype, "round": nth}
    if found(key):
        return
    keys = [f"device.dtype={dtype}", f"step.steps={args.steps}", f"step.seed={args.seed}",
            f"optimizer.warmup_steps={args.warmup}", f"validation.every_steps={args.every}",
            f"validation.batches={args.batches}"]
    line = [args.l2l, "train", "--format", "json", CONFIG, *(part for key in keys for part in ("--set", key))]
    steps, curve, skipped, other, digest = [], [], 0, 0.0, None
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        last = time.perf_counter()
        for event in map(json.loads, process.stdout):
            now = time.perf_counter()
            kind = event["event"]
            if kind == "step":
                # A step's seconds begin at the end of the step before, so a validation between them is subtracted.
                steps.append(event["seconds"] - other)
                skipped += event.get("skipped", False)
                other = 0.0
            else:
                other += now - last
            if kind == "validation":
                curve.append({"step": event["step"], "loss": event["loss"], "seconds": sum(steps)})
            digest = event.get("weights_digest", digest)
            last = now
    if process.returncode or len(steps) != args.steps:
        sys.exit(f"failed with status {process.returncode}: {' '.join(map(str, line))}")
    keep(key | {"curve": curve, "step_seconds": statistics.median(steps), "skipped": skipped, "weights_digest": digest})


def settings():
    """The settings that all runs of a table share."""
    return {name: getattr(args, name) for name in ("steps", "warmup", "every", "batches", "seed")}


def results():
    path = pathlib.Path(args.results)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def found(key):
    """The results whose fields equal all of the key's."""
    return [one for one in results() if key.items() <= one.items()]


def runs_of(dtype):
    return [run for run in found(settings() | {"dtype": dtype}) if run["round"] < args.rounds]


def keep(one):
    with open(args.results, "a") as file:
        file.write(json.dumps(one) + "\n")
    print(f"{one['dtype']}, round {one['round']}: {one['step_seconds']:.3f} s a step", file=sys.stderr, flush=True)


def curve_of(dtype):
    """Steps, losses and median seconds of a dtype."""
    runs = runs_of(dtype)
    losses = [[point["loss"] for point in run["curve"]] for run in runs]
    if any(one != losses[0] for one in losses) or len({run["weights_digest"] for run in runs}) != 1:
        sys.exit(f"{dtype}: rounds differ in their losses or their weights")
    seconds = zip(*([point["seconds"] for point in run["curve"]] for run in runs))
    return [point["step"] for point in runs[0]["curve"]], losses[0], [statistics.median(at) for at in seconds]


def row(*cells):
    print("| " + " | ".join(map(str, cells)) + " |")


def table(curves):
    dtypes = list(curves)
    row("step", *(f"loss, {dtype}" for dtype in dtypes), *(f"seconds, {dtype}" for dtype in dtypes))
    print("|---" * (1 + 2 * len(dtypes)) + "|")
    for at, step in enumerate(curves[dtypes[0]][0]):
        row(step, *(f"{curves[dtype][1][at]:.4f}" for dtype in dtypes),
            *(f"{curves[dtype][2][at]:.1f}" for dtype in dtypes))


def speeds(dtypes):
    """Says which dtype is faster a step, and whether the rounds agree on it."""
    rounds = {}
    for dtype in dtypes:
        runs = runs_of(dtype)
        rounds[dtype] = [run["step_seconds"] for run in runs]
        print(f"{dtype}: {statistics.median(rounds[dtype]):.3f} s a step (rounds: {min(rounds[dtype]):.3f} to "
              f"{max(rounds[dtype]):.3f}), {runs[0]['skipped']} of {args.steps} steps skipped")
    fastest, *others = sorted(dtypes, key=lambda dtype: statistics.median(rounds[dtype]))
    base, doubts = statistics.median(rounds[fastest]), []
    for dtype in others:
        ratio = statistics.median(rounds[dtype]) / base
        print(f"a step of {dtype} takes {ratio:.2f} x the time of {fastest} on this machine (ratio of medians)")
        doubts += [dtype] * (min(rounds[dtype]) <= max(rounds[fastest]))
    if others:
        doubt = f", but its rounds overlap with those of {' and '.join(doubts)}" if doubts else ""
        print(f"{fastest} is the fastest per step on this machine{doubt}")


def draw(curves):
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and no identifier or date differs from run to run.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "l2l", "font.family": "sans-serif"}
    from matplotlib import pyplot

    figure, (by_step, by_second) = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for (dtype, (steps, losses, seconds)), style in zip(curves.items(), ("-", "--", ":")):
        by_step.plot(steps, losses, style, marker=".", label=dtype)
        by_second.plot(seconds, losses, style, marker=".", label=dtype)
    by_step.set(xlabel="step", ylabel="validation loss")
    by_second.set(xlabel="seconds of training")
    for plot in (by_step, by_second):
        plot.grid(alpha=0.3)
        plot.legend()
    figure.savefig(args.svg, metadata={"Date": None})


def main():
    if not args.tables:
        for nth in range(args.rounds):
            for dtype in args.dtypes:
                train(dtype, nth)
    curves = {dtype: curve_of(dtype) for dtype in args.dtypes if runs_of(dtype)}
    if not curves:
        sys.exit(f"{args.results} has no results of these settings")
    table(curves)
    print()
    speeds(list(curves))
    if args.svg:
        draw(curves)


arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--l2l", default="target/release/l2l", help="the program")
arguments.add_argument("--results", default="curves.jsonl", help="file of results, a JSON object a line")
arguments.add_argument("--svg", help="file to draw the curves to")
arguments.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES)
arguments.add_argument("--steps", type=int, default=420)
arguments.add_argument("--warmup", type=int, default=40, help="steps in which the learning rate rises")
arguments.add_argument("--every", type=int, default=30, help="steps between validations")
arguments.add_argument("--batches", type=int, default=16, help="batches of a validation")
arguments.add_argument("--rounds", type=int, default=3)
arguments.add_argument("--seed", type=int, default=0)
arguments.add_argument("--tables", action="store_true", help="print the table of the results, run nothing")
args = arguments.parse_args()
main()
