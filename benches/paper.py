"""Prints the tables of docs/paper.md: the L2L paper's comparison and other systems' figures, in virtual time.

    cargo build --release && python3 benches/paper.py            # both
    python3 benches/paper.py --published                         # the second alone

Nothing is measured: `l2l plan --machine` forecasts each step from rates of data sheets. The baseline keeps everything on the
device: weights, gradients, AdamW's states and all activations of the largest micro-batch that fits. Its step is the
time of the kernels alone, and one pass of AdamW over the device's memory; nothing of it waits.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

PROGRAM = os.environ.get("L2L", "target/release/l2l")
MACHINES = pathlib.Path(__file__).parent.parent / "machines"
GB = 1e9
BERT = {
    "model.preset": "bert-large",
    "model.task": "masked-lm",
    "data.sequence_length": 128,
    "device.dtype": "f16",
}
V100 = {"memory": 15.5 * GB, "stream": 900e9}
RESIDENT = {
    "schedule.kind": "resident",
    "schedule.recompute": "false",
    "channels.weights": 100000,
}
# Beside weights and gradients: masters and two moments, and what AdamW moves of all.
STATE_BYTES = 12
UPDATE_BYTES = 4 + 3 * 4 + 3 * 4 + 2
LLAMA_8B = {
    "model.preset": "llama-7b",
    "model.intermediate": 14336,
    "model.kv_heads": 8,
    "model.vocabulary": 128256,
}
QWEN_7B = {
    "model.preset": "llama-7b",
    "model.hidden": 3584,
    "model.layers": 28,
    "model.heads": 28,
    "model.kv_heads": 4,
    "model.intermediate": 18944,
    "model.vocabulary": 152064,
}
QWEN_14B = {
    **QWEN_7B,
    "model.hidden": 5120,
    "model.layers": 48,
    "model.heads": 40,
    "model.kv_heads": 8,
    "model.intermediate": 13824,
}


def forecast(machine, settings):
    """The row of a machine for a config, with the model's parameters."""
    command = [PROGRAM, "plan", os.devnull, "--format", "json"]
    for key, value in {"data.train": "random", "model.dropout": 0, **settings}.items():
        command += ["--set", f"{key}={value}"]
    run = subprocess.run([*command, "--machine", str(machine)], capture_output=True, text=True)
    if run.returncode != 0:
        return {"fits": False, "why_not": run.stderr.strip()}
    return json.loads(run.stdout.splitlines()[0])


def plan(settings):
    """The plan of a config on this machine's own device."""
    command = [PROGRAM, "plan", os.devnull, "--format", "json", "--set", "data.train=random"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def halves(batch):
    """The batch, its half and so on."""
    while batch >= 1:
        yield batch
        batch //= 2


def kept(huge, settings, batch):
    """Bytes and tokens a second of the baseline with its largest micro-batch that fits."""
    for micro in halves(batch):
        of = {**settings, **RESIDENT, "step.micro_batch": micro}
        there = plan({**of, "step.batch": micro, "stash.place": "device"})
        count = there["parameters"]
        held = there["device_bytes"]["total"] + STATE_BYTES * count
        if held <= V100["memory"]:
            found = forecast(huge, {**of, "step.batch": batch})
            seconds = found["step_seconds"] * found["computes"]
            seconds += UPDATE_BYTES * count / V100["stream"]
            return held, batch * 128 / seconds
    return None


def relayed(settings, batch, recompute):
    """The fastest row of l2l by micro-batch."""
    of = {**settings, "step.batch": batch, "schedule.recompute": recompute}
    rows = [
        (forecast("v100-512gb", {**of, "step.micro_batch": micro}), micro)
        for micro in halves(min(batch, 64))
        if micro * 16 >= batch or micro >= 16
    ]
    rows = [(row, micro) for row, micro in rows if row["fits"]]
    return max(rows, key=lambda row: row[0]["tokens_per_second"], default=None)


def paper():
    text = (MACHINES / "v100-512gb.toml").read_text()
    with tempfile.TemporaryDirectory() as folder:
        huge = pathlib.Path(folder) / "huge.toml"
        text = text.replace('"15.5GB"', '"100TB"').replace('"480GB"', '"100TB"')
        huge.write_text(text)
        print("| layers | batch | keeps all | | recomputes | | | `auto` | | |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for layers, batch in [
            *((24, 2**power) for power in range(1, 9)),
            (96, 32),
            (96, 256),
            (384, 32),
            (384, 256),
        ]:
            settings = {**BERT, "model.layers": layers}
            base = kept(huge, settings, batch)
            cells = ["does not fit", ""]
            if base:
                cells = [f"{base[0] / GB:.1f} GB", f"{base[1]:,.0f}"]
            for recompute in ("true", "auto"):
                row, micro = relayed(settings, batch, recompute)
                speed = row["tokens_per_second"]
                cells += [f"{row['device_bytes'] / GB:.2f} GB", f"{speed:,.0f}"]
                cells.append(f"{100 * (speed / base[1] - 1):+.0f} %" if base else "")
            print(f"| {layers} | {batch} | {' | '.join(cells)} |", flush=True)
    wide = {
        "model.layers": 62,
        "model.hidden": 8192,
        "model.heads": 64,
        "model.vocabulary": 50257,
        "model.positions": 1024,
        "data.sequence_length": 1024,
        "device.dtype": "f32",
        "schedule.recompute": "true",
        "step.micro_batch": 2,
    }
    for rule in ("adamw", "adamw-8bit"):
        for batch in (16, 64):
            more = {"optimizer.kind": rule, "step.batch": batch}
            row = forecast("v100-512gb", {**wide, **more})
            print(rule, batch, {key: row.get(key) for key in SHOWN}, flush=True)


SHOWN = ["why_not", "device_bytes", "host_bytes", "step_seconds", "tokens_per_second", "computes"]


def published():
    with tempfile.TemporaryDirectory() as folder:
        one = pathlib.Path(folder) / "4090.toml"
        text = (MACHINES / "8x4090.toml").read_text()
        text = text.replace("count = 8", "count = 1").replace('"480GB"', '"1TB"')
        one.write_text(text.replace("[device.root]\ndevices = 2", "[device.root]\ndevices = 1"))
        roomy = pathlib.Path(folder) / "h100.toml"
        roomy.write_text((MACHINES / "h100.toml").read_text().replace('"120GB"', '"1TB"'))
        grace = pathlib.Path(folder) / "gh200.toml"
        grace.write_text((MACHINES / "gh200.toml").read_text())
        common = {"device.dtype": "bf16"}
        llmq = {**common, "data.sequence_length": 1024, "step.batch": 512, "step.micro_batch": 16}
        small = {**llmq, "step.micro_batch": 8}
        long = {**common, "data.sequence_length": 2048, "step.batch": 64, "step.micro_batch": 4}
        for name, machine, settings in [
            ("LLM.Q, H100, 7B", roomy, {**QWEN_7B, **llmq}),
            ("LLM.Q, H100, 14B", roomy, {**QWEN_14B, **llmq}),
            ("LLM.Q, 4090, 7B", one, {**QWEN_7B, **small}),
            ("LLM.Q, 4090, 14B", one, {**QWEN_14B, **small}),
            ("RoundPipe, 4090, 8B", one, {**LLAMA_8B, **long}),
            ("RoundPipe, 8 x 4090, 8B", "8x4090", {**LLAMA_8B, **long, "step.batch": 256}),
            ("MegaTrain, H100, 7B", roomy, {**QWEN_7B, **long}),
            ("MegaTrain, GH200, 14B", grace, {**QWEN_14B, **long}),
        ]:
            count = plan(settings)["parameters"]
            for recompute in ("true", "auto"):
                row = forecast(machine, {**settings, "schedule.recompute": recompute})
                if not row["fits"]:
                    print(f"| {name} | {recompute} | {row['why_not']} |", flush=True)
                    continue
                speed = row["tokens_per_second"]
                flops = 6 * count * speed / 1e12
                print(
                    f"| {name} | {recompute} | {speed:,.0f} | {flops:.0f} TFLOP/s "
                    f"| {row['device_bytes'] / GB:.1f} GB | {row['host_bytes'] / GB:.0f} GB "
                    f"| computes {100 * row['computes']:.0f} % |",
                    flush=True,
                )


if __name__ == "__main__":
    if "--published" not in sys.argv:
        paper()
    published()
