"""Fits rates to short runs and forecasts other runs with them, beside what those take by the clock.

    cargo build --release && python3 benches/rates.py            # on devices that sleep
    python3 benches/rates.py run.toml --set device.threads=2     # on this machine, for a config of yours

Each run differs from the fitted one in one thing: channels twice as deep, four times the micro-batches, four times the
layers, a second device, recomputation, a norm that updates wait for. The device that sleeps takes the time of its FLOPs and
bytes, so its steps have hardly any noise; on this machine take the median of alternating runs (--rounds).
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

PROGRAM = os.environ.get("L2L", "target/release/l2l")
ASLEEP = {
    "data.train": "random",
    "data.sequence_length": 16,
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 2,
    "model.vocabulary": 256,
    "step.batch": 4,
    "step.micro_batch": 2,
    "device.threads": 1,
    "device.flop_rate": "10MFLOP/s",
    "device.link": "1MB/s",
    "eps.update_rate": "2.5MB/s",
    "stash.place": "host",
}


def events(command, config, sets, *more):
    """The events of a command."""
    given = [f"--set={key}={value}" for key, value in sets.items()]
    line = [PROGRAM, command, config, "--format", "json", *given, *more]
    out = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    return [json.loads(text) for text in out.splitlines()]


def others(sets):
    """Runs that differ from the fitted one in one thing."""
    of = lambda key, default: int(sets.get(key, default))
    yield "the same", {}
    yield "channels × 2", {"channels.weights": 2 * of("channels.weights", 2)}
    yield "micro-batches × 4", {"step.batch": 4 * of("step.batch", 4)}
    yield "layers × 4", {"model.layers": 4 * of("model.layers", 2)}
    # Each device as it was: the devices of a CPU share its threads.
    yield "devices × 2", {"device.count": 2, "device.threads": 2 * of("device.threads", 1)}
    yield "without recomputing", {"schedule.recompute": "false"}
    yield "a norm to wait for", {"optimizer.clip_norm": 1.0}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default=os.devnull)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=1)
    flags = parser.parse_args()
    sets = dict(ASLEEP) if flags.config == os.devnull else {"data.train": "random"}
    sets.update(text.split("=", 1) for text in flags.set)
    with tempfile.TemporaryDirectory() as folder:
        rates = os.path.join(folder, "rates.toml")
        events("bench", flags.config, sets, "--rates", rates)
        measured = {}
        for _ in range(flags.rounds):
            for name, more in others(sets):
                run = events("bench", flags.config, {**sets, "step.steps": 4, **more})
                seconds = [event["seconds"] for event in run if event["event"] == "step"][1:]
                measured.setdefault(name, []).append(statistics.median(seconds))
        print("| run | measured | forecast | |")
        print("|---|---|---|---|")
        for name, more in others(sets):
            [plan] = events("plan", flags.config, {**sets, **more}, "--rates", rates)
            took = statistics.median(measured[name])
            off = 100 * (plan["step_seconds"] / took - 1)
            print(f"| {name} | {took:.3f} s | {plan['step_seconds']:.3f} s | {off:+.1f} % |")


if __name__ == "__main__":
    main()
