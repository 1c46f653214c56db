"""Measures the cost of a checkpoint: how long the run stands still, and how much longer the next step takes.

    cargo build --release && python3 benches/checkpoints.py

The run writes a checkpoint after every second step. So steps with and without a checkpoint alternate, and a slow phase of
the machine affects both. Times are between the ends of steps. `still` is the time in which the run waited for the
checkpoint alone (`l2l_compute_wait_seconds_total{waited_for="checkpoint"}`).
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

# 28 million parameters: masters and two moments take 338 MB. A step is much longer than its updates, as in real runs.
MODEL = ["model.layers=8", "model.hidden=528", "model.heads=8", "data.sequence_length=128"]
SETTINGS = {
    "eager": [],
    "deferred": ["optimizer.clip_norm=1"],
    "on file": ["eps.tier=file"],
}


def run(keys, steps, folder):
    folder = pathlib.Path(folder)
    metrics = folder / "metrics.txt"
    keys = MODEL + keys + [
        f"step.steps={steps}", f"step.batch={args.batch}", "step.micro_batch=4", "checkpoint.every_steps=2",
        "validation.every_steps=1000000", "validation.batches=1", f"checkpoint.directory={folder / 'checkpoints'}",
        f"metrics.file={metrics}"]
    if "eps.tier=file" in keys:
        keys.append(f"eps.path={folder / 'eps'}")
    sets = [part for key in keys for part in ("--set", key)]
    ran = subprocess.run([args.l2l, "train", "--format", "json", *sets], stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        sys.exit(f"failed: {keys}")
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    seconds = {event["step"]: event["seconds"] for event in events if event["event"] == "step"}
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    lines = [line for line in metrics.read_text().splitlines() if "l2l_compute_wait_seconds_total" in line]
    still = sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'waited_for="checkpoint"' in line)
    return seconds, size, still


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--l2l", default="target/release/l2l")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--only", choices=SETTINGS, nargs="+", default=list(SETTINGS))
args = parser.parse_args()

print("| run | checkpoint | step, behind none | step, behind one | difference in percent | still, of a checkpoint |")
print("|---|---|---|---|---|---|")
for name in args.only:
    keys = SETTINGS[name]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        seconds, size, still = run(keys, args.steps, folder)
    # The run waits for the last checkpoint, because no step runs beside it.
    pairs = [(seconds[step], seconds[step + 1]) for step in range(2, args.steps - 1, 2)]
    none, behind = (statistics.median(pair[at] for pair in pairs) for at in (0, 1))
    ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
    print(f"| {name} | {size / 1e6:.0f} MB | {none:.2f} s | {behind:.2f} s | {100 * (ratio - 1):+.1f} | "
          f"{still:.2f} s in all |", flush=True)
