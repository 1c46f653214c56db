"""Overlap of several processes: the measured time of a step beside the time that the simulation predicts.

    cargo build --release --features mpi && python3 benches/ranks.py [--rounds N] [WAY ...]

The devices are CPU devices that sleep as long as a slower device would compute (device.flop_rate), and
the fabric sleeps as long as a slower one would take (parallel.fabric_rate), so that this machine has
enough cores for all processes. A step of a GPT-2 of 12 layers in 16 micro-batches runs on 1, 2 and 4
processes, under mpirun. Virtual time is the forecast of `l2l plan --ranks N --rates FILE` for the same config, where
`l2l bench --rates FILE` fitted the rates to short runs of one process.
Prints medians over the steps of all rounds without the first step.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

PROGRAM = pathlib.Path(__file__).parent.parent / "target/release/l2l"

MODEL = """model.layers=12 model.hidden=64 model.heads=4 model.vocabulary=256 model.positions=32
data.train=random data.sequence_length=32 step.batch=32 step.micro_batch=2 step.steps=4
parallel.groups=4 device.flop_rate=0.7GFLOP/s log.format=json"""

WAYS = {
    "the fabric hides": "parallel.fabric_rate=100MB/s",
    "the fabric hides, clipped": "parallel.fabric_rate=100MB/s optimizer.clip_norm=1",
    "the fabric decides": "parallel.fabric_rate=2MB/s",
    "the fabric decides, clipped": "parallel.fabric_rate=2MB/s optimizer.clip_norm=1",
    "the fabric decides, two devices": "parallel.fabric_rate=2MB/s device.count=2",
    "the fabric decides, on file": "parallel.fabric_rate=2MB/s eps.tier=file",
}


def run(command, settings, *options, ranks=None):
    """The events of a command."""
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)] if ranks else []
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "config.toml"
        config.touch()
        sets = [word for setting in settings.split() for word in ("--set", setting)]
        sets += ["--set", f"eps.path={folder}/eps"] if "eps.tier=file" in settings else []
        command = [*launcher, PROGRAM, command, config, *sets, *options]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=", ".join(WAYS))
    options = parser.parse_args()
    print("| way | processes | step, s | virtual time, s | ratio | one process ÷ this |")
    print("|---|---|---|---|---|---|")
    for way in options.ways:
        settings = f"{MODEL} {WAYS[way]}"
        alone = None
        rates = tempfile.NamedTemporaryFile(suffix=".toml")
        run("bench", settings, "--rates", rates.name)
        for ranks in (1, 2, 4):
            [plan] = run("plan", settings, "--rates", rates.name, "--ranks", str(ranks))
            seconds = []
            for _ in range(options.rounds):
                steps = [event for event in run("train", settings, ranks=ranks) if event["event"] == "step"]
                seconds += [step["seconds"] for step in steps[1:]]
            took, virtual = statistics.median(seconds), plan["step_seconds"]
            alone = alone or took
            print(
                f"| {way} | {ranks} | {took:.3f} | {virtual:.3f} | {took / virtual:.3f} | {alone / took:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
