"""Ten AdamW steps of PEFT's LoRA on each family, in f64, from adapters whose two matrices are random.

Makes, below `lora/`, a directory a case: adapter_config.json and adapter_model.safetensors as PEFT
writes them, and golden.json (losses, gradient norms, logits of the first sequence before them). The
models and their data are those of `families.py` and `gpt2.py`.

    pip install torch transformers peft && python peft_lora.py [CASE...]
"""

import json
import pathlib
import sys

import peft
import torch
import transformers
import experts  # noqa: F401 (its families are causal, too)
from families import BATCH, CAUSAL, CLASSES, DECAY, FAMILIES, RATE, STEPS, train
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

ALL = "all-linear"
CASES = {
    "tied": dict(r=3, lora_alpha=5, target_modules=["c_attn", "c_fc", "mlp.c_proj"], fan_in_fan_out=True),
    "llama": dict(r=4, lora_alpha=6, target_modules=ALL),
    "mistral": dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"], use_rslora=True),
    "qwen2": dict(r=5, lora_alpha=2.5, target_modules=["k_proj", "up_proj"]),
    "qwen3": dict(r=8, lora_alpha=16, target_modules=["o_proj", "gate_proj", "down_proj"]),
    "bert": dict(r=4, lora_alpha=8, target_modules=["query", "value", "intermediate.dense"]),
    "roberta": dict(r=4, lora_alpha=8, target_modules=["key", "attention.output.dense"]),
    "distilbert": dict(r=4, lora_alpha=8, target_modules=["q_lin", "out_lin", "lin1", "lin2"]),
    "bert-classes": dict(r=4, lora_alpha=8, target_modules=["query", "value"], modules_to_save=["classifier"]),
    "roberta-classes": dict(r=4, lora_alpha=8, target_modules=["query"], modules_to_save=["classifier"]),
    # All linear layers: also a head's transform, and a pooler.
    "bert-linear": dict(r=3, lora_alpha=6, target_modules=ALL),
    "roberta-linear": dict(r=3, lora_alpha=6, target_modules=ALL),
    "distilbert-linear": dict(r=3, lora_alpha=6, target_modules=ALL),
    "bert-classes-linear": dict(r=3, lora_alpha=6, target_modules=ALL, task_type="SEQ_CLS"),
    "opt": dict(r=3, lora_alpha=4, target_modules=["q_proj", "k_proj", "out_proj", "fc1", "fc2"]),
    # Ranks and alphas by module, and adapters of some modules alone.
    "llama-patterns": dict(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "up_proj", "o_proj"], use_rslora=True,
                           rank_pattern={"q_proj": 2, r"^model\.layers\.[12]\.mlp\.up_proj": 7},
                           alpha_pattern={r"layers\.1\..*_proj": 9, "v_proj": 3.5}),
    "bert-patterns": dict(r=3, lora_alpha=6, target_modules=ALL, rank_pattern={"intermediate.dense": 5, "query": 1},
                          alpha_pattern={"cls.predictions.transform.dense": 1.5}),
    "qwen2-layers": dict(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], layers_to_transform=[1],
                         layers_pattern="layers", exclude_modules=["q_proj"]),
    # Of gpt-oss, all linear layers are those of attention.
    "gpt_oss": dict(r=3, lora_alpha=30, target_modules=ALL),
    "olmo2": dict(r=3, lora_alpha=4, target_modules=ALL),
    "starcoder2": dict(r=2, lora_alpha=5, target_modules=["k_proj", "c_fc", "c_proj"]),
    "gemma2": dict(r=3, lora_alpha=4, target_modules=ALL),
    "granite": dict(r=3, lora_alpha=4, target_modules=ALL),
    "glm4": dict(r=2, lora_alpha=5, target_modules=["q_proj", "gate_up_proj", "down_proj"]),
    "glm": dict(r=2, lora_alpha=5, target_modules=["k_proj", "o_proj"]),
    "cohere": dict(r=3, lora_alpha=48, target_modules=ALL),
    "cohere2": dict(r=2, lora_alpha=3, target_modules=["v_proj", "up_proj", "down_proj"]),
    "ministral": dict(r=2, lora_alpha=3, target_modules=["q_proj", "o_proj"]),
    "gpt_neox": dict(r=3, lora_alpha=4, target_modules=ALL),
    "ministral3": dict(r=2, lora_alpha=3, target_modules=["q_proj", "k_proj", "gate_proj"]),
    "modernbert-linear": dict(r=3, lora_alpha=6, target_modules=ALL),
    "modernbert-classes": dict(r=2, lora_alpha=6, target_modules=["Wqkv", "mlp.Wo", "head.dense"], task_type="SEQ_CLS"),
    "qwen3_5_text": dict(r=2, lora_alpha=3, target_modules=ALL),
    "qwen3_5_text-tied": dict(r=3, lora_alpha=4, target_modules=["in_proj_qkv", "in_proj_a", "q_proj", "out_proj"]),
    "seed_oss": dict(r=2, lora_alpha=3, target_modules=ALL),
    "ernie4_5": dict(r=2, lora_alpha=3, target_modules=["q_proj", "k_proj", "down_proj"]),
    "helium": dict(r=3, lora_alpha=4, target_modules=ALL),
    "electra-classes": dict(r=2, lora_alpha=6, target_modules=["query", "output.dense"], task_type="SEQ_CLS"),
    "electra-small-classes": dict(r=3, lora_alpha=6, target_modules=["embeddings_project", "key"], task_type="SEQ_CLS"),
    "gemma4_text": dict(r=3, lora_alpha=4, target_modules=ALL),
    "qwen3_next": dict(r=3, lora_alpha=20, target_modules=["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj"]),
    "gemma4_text-inputs": dict(r=3, lora_alpha=4, target_modules=ALL),
}


def main():
    here = pathlib.Path(__file__).parent
    for number, (case, settings) in enumerate(CASES.items()):
        if sys.argv[1:] and case not in sys.argv[1:]:
            continue
        name = case
        for end in ("-linear", "-patterns", "-layers"):
            name = name.removesuffix(end)
        torch.manual_seed(100 + number)
        is_causal = name in CAUSAL or name == "tied"
        kind = AutoModelForCausalLM if is_causal else AutoModelForMaskedLM
        if name in CLASSES:
            kind = AutoModelForSequenceClassification
        how = {"experts_implementation": "eager"} if name in experts.CASES else {}
        base = kind.from_pretrained(here / name, attn_implementation="eager", **how).double()
        config = peft.LoraConfig(**settings, lora_dropout=0.0, init_lora_weights=False)
        model = peft.get_peft_model(base, config).double()
        with torch.no_grad():  # f32 values, so that the files hold exactly what is trained
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_((0.3 * parameter).float().double())
        folder = here / "lora" / case
        model.float().save_pretrained(folder)
        model.double()
        (folder / "README.md").unlink(missing_ok=True)
        written = json.loads((folder / "adapter_config.json").read_text())
        written["base_model_name_or_path"] = f"tests/goldens/{name}"
        (folder / "adapter_config.json").write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
        lines = [json.loads(line) for line in (here / name / "data.jsonl").read_text().splitlines()]
        batch = json.loads((here / name / "golden.json").read_text())["batch"]
        assert batch == BATCH
        model.train()
        family = name if name in FAMILIES else "llama"  # GPT-2's data and loss are those of a decoder
        golden = {"batch": BATCH, "clip_norm": None, "steps": STEPS, "learning_rate": RATE,
                  "weight_decay": DECAY, "peft": peft.__version__, "transformers": transformers.__version__,
                  "float64": {key: value for key, value in train(family, model, lines).items()
                              if key != "singles"}}
        (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
