"""Prints the tables of plans in docs/memory.md: which models and settings fit which machine, on a device of f32; and what
models with experts take, on a GPU with bf16.

It also prints how many tokens a step needs to hide transfers and updates.

    cargo build --release && python3 benches/plans.py && python3 benches/plans.py --experts

Rates of other machines are those of their makers (f32 TFLOP/s; link, host memory and disk in GB/s).
"""

import json
import os
import subprocess
import sys

PROGRAM = os.environ.get("L2L", "target/release/l2l")
GB = 1e9
MACHINES = [
    ("V100 16 GB, 512 GB host", 16, 512, (15.7, 12, 100, 3)),
    ("RTX 4090 24 GB, 128 GB host", 24, 128, (82.6, 25, 60, 6)),
    ("H200 141 GB, 1.5 TB host", 141, 1500, (67, 55, 400, 10)),
    ("2 cores, 24 GB", 24, 24, None),
]
# Layers and width.
MODELS = {
    "V100": [(62, 8192)],
    "RTX ": [(32, 4096), (62, 8192)],
    "H200": [(48, 14336), (96, 12288)],
    "2 co": [(24, 2048), (107, 1536)],
}
EIGHT = {"optimizer.kind": "adamw-8bit"}
FILE = {"eps.tier": "file", "eps.path": "/nowhere"}
SETTINGS = [
    ("memory", {}),
    ("memory, clipped", {"optimizer.clip_norm": 1.0}),
    ("memory, AdamW in 8 bits", EIGHT),
    ("memory, AdamW in 8 bits, device in bf16", {**EIGHT, "device.dtype": "bf16"}),
    ("the same, masters in bf16", {**EIGHT, "device.dtype": "bf16", "optimizer.masters": "bf16"}),
    ("file", FILE),
    ("file, stash in bf16", {**FILE, "stash.dtype": "bf16"}),
    ("memory, LoRA over bf16", {"train.lora.rank": 16, "train.base": "bf16"}),
    ("memory, LoRA over NF4", {"train.lora.rank": 16, "train.base": "nf4"}),
]

EXPERTS = ["mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "gpt-oss-120b"]
WAYS = [
    ("AdamW", {}),
    ("AdamW in 8 bits, masters in bf16", {**EIGHT, "optimizer.masters": "bf16"}),
    ("AdamW, file", FILE),
    ("LoRA over bf16", {"train.lora.rank": 16, "train.base": "bf16"}),
    ("LoRA over NF4", {"train.lora.rank": 16, "train.base": "nf4"}),
]


def plan_of(settings, more):
    """The plan of settings, and its bytes by place."""
    # An empty config: without a config, `plan` would take the built-in one.
    command = [PROGRAM, "plan", "--format", "json", os.devnull, *more]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return plan, {place: plan[f"{place}_bytes"]["total"] for place in ("device", "host", "file")}


def experts():
    print("| preset | trained | device | apart | host | file |")
    print("|---|---|---|---|---|---|")
    for preset in EXPERTS:
        for way, more in WAYS:
            settings = {
                "model.preset": preset,
                "data.train": "random",
                "data.sequence_length": 4096,
                "step.batch": 8,
                "step.micro_batch": 1,
                "device.kind": "cuda",
                "device.dtype": "bf16",
                "schedule.recompute": "true",
                "channels.gradients": 1,
                **more,
            }
            _, on = plan_of(settings, [])
            _, apart = plan_of({**settings, "schedule.bundles": 1}, [])
            sizes = [f"{on['device'] / GB:.1f} GB", f"{apart['device'] / GB:.1f} GB"]
            sizes.append(f"{on['host'] / GB:.0f} GB")
            sizes.append(f"{on['file'] / GB:.0f} GB" if on["file"] else "")
            print(f"| {preset} | {way} | {' | '.join(sizes)} |", flush=True)


def main():
    if "--experts" in sys.argv:
        return experts()
    print(
        "| machine | parameters | EPS | device | host | bytes a parameter "
        "| file | fits | hides from |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, device, host, rates in MACHINES:
        for layers, hidden in MODELS[name[:4]]:
            for tier, more in SETTINGS:
                settings = {
                    "model.layers": layers,
                    "model.hidden": hidden,
                    "model.heads": hidden // 128,
                    "model.vocabulary": 50257,
                    "model.positions": 1024,
                    "data.train": "random",
                    "step.batch": 16,
                    "step.micro_batch": 1,
                    **more,
                }
                if "file" in tier and rates is None:
                    settings["eps.path"] = "/tmp"
                given = ["--forecast"] if rates is None else []
                for flag, rate in zip(
                    ("tflops", "link-gbps", "host-gbps", "disk-gbps"), rates or ()
                ):
                    given += [f"--{flag}", str(rate)]
                plan, on = plan_of(settings, given)
                held = on["host"] + (on["device"] if rates is None else 0)
                fits = "yes" if on["device"] <= device * GB and held <= host * GB else "no"
                hides = plan["hides"]["eager" if "clipped" not in tier else "deferred"]
                hides = (
                    f"{hides['tokens']:,} tokens ({hides['lane']})"
                    if hides["tokens"] is not None
                    else f"never ({hides['lane']})"
                )
                print(
                    f"| {name} | {plan['parameters'] / 1e9:.1f} B | {tier} "
                    f"| {on['device'] / GB:.1f} GB | {on['host'] / GB:.1f} GB "
                    f"| {on['host'] / plan['parameters']:.1f} | {on['file'] / GB:.0f} GB "
                    f"| {fits} | {hides} |",
                    flush=True,
                )


main()
