"""Measures whether transfers hide: steps with an emulated link against steps without one.

    cargo build --release && python3 benches/overlap.py [device|host]

GPT-2 of 12 x 512 on two threads, micro-batches of 8 x 128. The link is set so that a block's
upload takes 0.8 of a layer's forward pass, whose time is a share of the unlinked step in proportion to its FLOPs. With
one weight slot the upload is exposed; with two it is hidden. The stash is on the device, so that only blocks and gradients
cross the link. With `host`, boundaries cross it too, and need more bandwidth than the blocks leave.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROUNDS, STEPS, LAYERS, HIDDEN = 3, 3, 12, 512
BINARY = pathlib.Path(__file__).parent.parent / "target/release/l2l"


def run(folder, weights, link):
    config = folder / "config.toml"
    config.write_text(f"""
data.train = "random"
model = {{ layers = {LAYERS}, hidden = {HIDDEN}, heads = 8, vocabulary = 256, positions = 128 }}
step = {{ batch = 32, micro_batch = 8, steps = {STEPS} }}
device = {{ threads = 2 {f', link = "{link}"' if link else ''} }}
channels = {{ weights = {weights} }}
stash.place = "{sys.argv[1] if len(sys.argv) > 1 else "device"}"
""")
    out = subprocess.run(
        [BINARY, "train", config, "--format", "json"], check=True, capture_output=True, text=True
    )
    steps = [json.loads(line) for line in out.stdout.splitlines()]
    return statistics.median(
        event["seconds"] for event in steps if event["event"] == "step" and event["step"] > 1
    )


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        # A step with recomputation takes 4 forward passes: forward, recomputation, and a backward of two.
        forward = run(folder, 2, None) / (4 * LAYERS)
        block = 12 * HIDDEN * HIDDEN * 4
        link = f"{block / (0.8 * forward) / 1e9:.3f}GB/s"
        print(f"a layer's forward takes {forward * 1e3:.0f} ms; link {link}")
        ratios = {1: [], 2: []}
        for _ in range(ROUNDS):
            for weights in ratios:
                ratios[weights].append(run(folder, weights, link) / run(folder, weights, None))
        for weights, rounds in ratios.items():
            print(
                f"{weights} weight slots: {statistics.median(rounds):.2f} x the unlinked step "
                f"(of {', '.join(f'{ratio:.2f}' for ratio in rounds)})"
            )


if __name__ == "__main__":
    main()
