"""Overlap on several devices: the measured time of a step beside the time that the simulation predicts.

    cargo build --release && python3 benches/devices.py [--rounds N] [WAY ...]   # another program: L2L=PATH

The devices are CPU devices that sleep as long as a slower device would compute (device.flop_rate), so
that this machine has enough cores for all of them. A step of a GPT-2 of 12 layers in 16 micro-batches
runs on 1, 2 and 4 of them, with each division of the work (WAY). In "long" a step has one sequence of 16 chunks,
and the model 16 layers. Virtual time is the forecast of
`l2l plan --forecast` for the same config. Prints medians over the steps of all rounds without the first step.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

PROGRAM = os.environ.get("L2L", pathlib.Path(__file__).parent.parent / "target/release/l2l")

MODEL = """model.layers=12 model.hidden=64 model.heads=4 model.vocabulary=256 model.positions=32
data.train=random data.sequence_length=32 step.batch=32 step.micro_batch=2 step.steps=4
device.flop_rate=0.7GFLOP/s channels.weights=40 log.format=json"""

# Uploads take longer than kernels.
SLOW = "device.link=8MB/s device.flop_rate=7GFLOP/s channels.weights=2"

# A later chunk attends to more keys than the one before it.
LONG = """model.layers=16 model.hidden=32 model.heads=2 model.positions=2048 data.sequence_length=2048
step.batch=1 step.micro_batch=1 step.chunk_positions=128 device.flop_rate=0.5GFLOP/s"""

WAYS = {
    "layers dealt": "",
    "sequences dealt, 4 groups": "parallel.deal=sequences parallel.groups=4",
    "gpipe": "schedule.kind=gpipe",
    "1f1b": "schedule.kind=1f1b",
    "interleaved": "schedule.kind=interleaved",
    "whole blocks, slow link": f"parallel.deal=sequences parallel.groups=4 {SLOW}",
    "blocks in shards, slow link": f"parallel.deal=sequences parallel.groups=4 parallel.transfer=sharded {SLOW}",
    "long": LONG,
}


def run(command, settings, *options):
    with tempfile.NamedTemporaryFile(suffix=".toml") as empty:
        return run_on(empty.name, command, settings, *options)


def run_on(config, command, settings, *options):
    sets = [word for setting in settings.split() for word in ("--set", setting)]
    command = [PROGRAM, command, config, *sets, *options]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return [json.loads(line) for line in out.splitlines()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=", ".join(WAYS))
    options = parser.parse_args()
    rounds = options.rounds
    print("| way | devices | step, s | virtual time, s | ratio | one device ÷ this |")
    print("|---|---|---|---|---|---|")
    for way in options.ways:
        settings = WAYS[way]
        alone = None
        for devices in (1, 2, 4):
            config = f"{MODEL} device.count={devices} {settings}"
            [plan] = run("plan", config, "--forecast", "--tflops", "1", "--host-gbps", "10")
            seconds = []
            for _ in range(rounds):
                steps = [event for event in run("train", config) if event["event"] == "step"]
                seconds += [step["seconds"] for step in steps[1:]]
            took, virtual = statistics.median(seconds), plan["step_seconds"]
            alone = alone or took
            print(f"| {way} | {devices} | {took:.3f} | {virtual:.3f} | {took / virtual:.3f} | {alone / took:.2f} |")


if __name__ == "__main__":
    main()
