"""Compares the growth of resident memory, from 4 to 64 layers, with the growth of the plan.

cargo build --release && python3 benches/memory.py
"""

import json
import os
import pathlib
import subprocess
import tempfile

BINARY = pathlib.Path(__file__).parent.parent / "target/release/l2l"


def run(folder, layers):
    """Peak resident bytes and the plan of one process."""
    config = folder / "config.toml"
    config.write_text(f"""
data.train = "random"
model = {{ layers = {layers}, hidden = 384, heads = 6, vocabulary = 256, positions = 64 }}
step = {{ batch = 8, micro_batch = 4, steps = 3 }}
device.threads = 2
""")
    plan = subprocess.run(
        [BINARY, "plan", config, "--format", "json"], check=True, capture_output=True
    )
    process = subprocess.Popen(
        [BINARY, "train", config, "--format", "json"], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return usage.ru_maxrss * 1024, json.loads(plan.stdout)


def main():
    with tempfile.TemporaryDirectory() as folder:
        (few, few_plan), (many, many_plan) = (
            run(pathlib.Path(folder), layers) for layers in (4, 64)
        )
        assert few_plan["device_bytes"] == many_plan["device_bytes"]
        planned = many_plan["host_bytes"]["total"] - few_plan["host_bytes"]["total"]
        print(
            f"resident {few / 2**20:.1f} MiB at 4 layers, {many / 2**20:.1f} MiB at 64; "
            f"grew {(many - few) / planned:.4f} x the {planned / 2**20:.1f} MiB planned "
            f"for masters, moments, regions, landing and stash"
        )


if __name__ == "__main__":
    main()
