"""Checks that classifiers of adapters pass between l2l and PEFT unchanged, for each family and task.

Out: l2l trains adapters and a head on a model without one, and exports them merged. PEFT loads the checkpoint; its logits
are those of the exported weights. And back: PEFT saves what it loaded, l2l reads that, and its loss is the checkpoint's.

    cargo build --release && pip install torch transformers peft
    python benches/adapters_round_trip.py [MODEL-TASK...]
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import peft
from transformers import AutoConfig

ROOT = pathlib.Path(__file__).parent.parent
GOLDENS = ROOT / "tests/goldens"
sys.path.insert(0, str(GOLDENS))
from peft_loads import KINDS, compare  # noqa: E402

MODELS = ["tied", "gemma3_text", "llama", "mistral", "olmo2", "olmo3", "opt", "phi3", "qwen2", "qwen3", "smollm3",
          "starcoder2", "gemma2", "granite", "glm", "glm4", "cohere", "cohere2", "ministral", "ministral3", "gpt_neox",
          "bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "mixtral", "qwen2_moe", "qwen3_moe",
          "qwen3_5_moe_text", "gemma4_text", "gemma4_text-inputs", "qwen3_next"]
# transformers has no such models.
NO_TOKENS = ["cohere-tokens", "cohere2-tokens", "gemma3_text-tokens", "granite-tokens", "olmo2-tokens", "olmo3-tokens", "opt-tokens",
             "qwen3_5_moe_text-tokens", "gemma4_text-tokens", "gemma4_text-inputs-tokens"]
NO_SEQUENCES = ["cohere-sequences", "cohere2-sequences", "granite-sequences", "qwen3_5_moe_text-sequences",
                "gemma4_text-sequences", "gemma4_text-inputs-sequences"]
# PEFT makes one parameter of a layer's experts, whose adapters l2l does not read. PEFT 0.21.2 leaves those of
# Qwen2-MoE, Qwen3.5 and Qwen3-Next out.
EXPERTS = ["mixtral", "qwen3_moe"]
TARGETS = {"qwen2_moe": '["self_attn", "shared_expert"]',
           "qwen3_5_moe_text": '["self_attn", "linear_attn", "shared_expert"]',
           "qwen3_next": '["self_attn", "linear_attn", "shared_expert"]'}
TASKS = {"sequences": ("sequence-classification", 3), "tokens": ("token-classification", 4), "lm": (None, None)}


def l2l(command, sets, *more):
    program = os.environ.get("L2L", ROOT / "target/release/l2l")
    arguments = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run([program, command, "/dev/null", *arguments, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loss(sets, *more):
    return json.loads(l2l("eval", sets, "--format", "json", *more).splitlines()[-1])["loss"]


def round_trip(name, task, folder):
    kind, labels = TASKS[task]
    data = GOLDENS / (f"peft_heads/{task}.jsonl" if kind else f"{name}/data.jsonl")
    model = {"model.path": GOLDENS / name, "data.train": data, "data.validation": data}
    if kind:
        model |= {"model.task": kind, "model.labels": labels}
    run = model | {"step.steps": 3, "step.batch": 4, "optimizer.learning_rate": 0.01, "train.lora.rank": 3,
                   "train.lora.alpha_pattern": '{"*att*"=20}', "checkpoint.directory": folder / "run"}
    if name in TARGETS:
        run["train.lora.targets"] = TARGETS[name]
    l2l("train", run)
    checkpoint = next((folder / "run").glob("step-*"))
    merged = folder / "merged"
    l2l("export", run, "--to", merged, "--model", checkpoint)
    moved, off = compare(GOLDENS / name, checkpoint, merged)
    assert moved > 1e-3, moved
    said = (f"{name}-{task}: adapters move logits by up to {moved:.3g}; PEFT's differ from merged weights by up to "
            f"{off:.1e}")
    if name in EXPERTS:
        print(said, flush=True)
        return
    described = AutoConfig.from_pretrained(checkpoint)
    auto = next(auto for end, auto in KINDS.items() if described.architectures[0].endswith(end))
    plain = auto.from_pretrained(GOLDENS / name, config=described)
    back = folder / "back"
    peft.PeftModel.from_pretrained(plain, checkpoint).save_pretrained(back)
    # PEFT's directory has no config.json: the task and the number of labels follow from the adapters.
    found = {key: value for key, value in model.items() if key not in ("model.task", "model.labels")}
    ours, theirs = loss(run, "--model", checkpoint), loss(found, "--model", back)
    assert abs(ours - theirs) < 1e-6, (ours, theirs)
    print(f"{said}; loss {ours:.6f}, back from PEFT {theirs:.6f}", flush=True)


def main():
    for name in MODELS:
        for task in TASKS:
            case = f"{name}-{task}"
            if (sys.argv[1:] and case not in sys.argv[1:]) or case in NO_TOKENS + NO_SEQUENCES:
                continue
            with tempfile.TemporaryDirectory() as folder:
                round_trip(name, task, pathlib.Path(folder))


if __name__ == "__main__":
    main()
