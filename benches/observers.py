"""Measures the cost of observers, in ten interleaved pairs of runs.

One run of a pair has no observers. The other has metrics that are scraped each second, the live
page open, a timeline and a report.

    cargo build --release && python3 benches/observers.py
"""

import json
import math
import statistics
import subprocess
import tempfile
import threading
import urllib.request
from pathlib import Path

PROGRAM = "target/release/l2l"
PAIRS = 10
STEPS = 24
MODEL = {
    "model.layers": 12,
    "model.hidden": 256,
    "model.heads": 8,
    "data.train": "random",
    "data.sequence_length": 64,
    "step.batch": 8,
    "step.micro_batch": 2,
    "step.steps": STEPS,
}
PORT = 9477


def look(stop):
    while not stop.wait(1):
        for path in ["/metrics", "/live.json"]:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=5).read()
            except OSError:
                pass


def run(config, folder, seen):
    command = [PROGRAM, "train", str(config), "--format", "json"]
    for key, value in MODEL.items():
        command += ["--set", f"{key}={value}"]
    stop = threading.Event()
    looker = threading.Thread(target=look, args=(stop,))
    if seen:
        command += ["--metrics", f"127.0.0.1:{PORT}", "--trace", f"{folder}/trace.json"]
        command += ["--report", f"{folder}/report"]
        looker.start()
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    stop.set()
    if seen:
        looker.join()
    events = [json.loads(line) for line in out.splitlines()]
    steps = [event["seconds"] for event in events if event["event"] == "step"][2:]
    return statistics.median(steps), events[-1]["weights_digest"]


def main():
    with tempfile.TemporaryDirectory() as folder:
        (config := Path(folder, "config.toml")).write_text("")
        ratios, digests = [], set()
        for pair in range(PAIRS):
            order = [False, True] if pair % 2 else [True, False]
            found = {}
            for seen in order:
                found[seen], digest = run(config, folder, seen)
                digests.add(digest)
            ratios.append(found[True] / found[False])
            print(
                f"pair {pair}: {found[False]:.4f} s unseen, {found[True]:.4f} s seen: "
                f"{ratios[-1]:.4f}"
            )
        assert len(digests) == 1, "being seen changes nothing"
        logs = [math.log(ratio) for ratio in ratios]
        middle, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(PAIRS)
        low, high = (math.exp(middle + side * 2.262 * error) for side in [-1, 1])  # t, 9 degrees
        print(f"seen ÷ unseen: {math.exp(middle):.4f}, 95 % interval {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
