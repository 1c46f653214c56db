"""Ten AdamW steps of PEFT's LoRA in f64, over weights that bitsandbytes' rules have quantised.

Writes, below `lora/`, quantised.json for some cases: for each base the losses and gradient norms. The
adapters are those of `peft_lora.py`; matrices of linear layers but the head's are quantised in f32, as
`quantised.py` says, and what they stand for is computed with in f64. GPT-2's matrices are taken as its files have
them: (inputs, outputs).

    pip install torch transformers peft bitsandbytes && python qlora.py
"""

import json
import pathlib

import peft
import torch
import transformers
from families import BATCH, CAUSAL, CLASSES, DECAY, FAMILIES, RATE, STEPS, train
from quantised import quantised_int8, quantised_nf4
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

HEADS = ("lm_head", "classifier", "cls.predictions.decoder")
BASES = {
    "nf4": lambda weight: quantised_nf4(weight.flatten())[0]["decoded"].reshape(weight.shape),
    "int8": lambda weight: quantised_int8(weight)["decoded"],
    "bf16": lambda weight: weight.bfloat16().float(),
}


def store(model, base):
    with torch.no_grad():
        if base == "bf16":
            for name, parameter in model.named_parameters():
                if not name.startswith("classifier"):  # it is trained
                    parameter.copy_(BASES[base](parameter))
            return
        for name, module in model.named_modules():
            if isinstance(module, (torch.nn.Linear, Conv1D)) and not name.startswith(HEADS):
                module.weight.copy_(BASES[base](module.weight.contiguous()))


def main():
    here = pathlib.Path(__file__).parent
    for name in ["tied", "llama", "bert", "bert-classes"]:
        is_causal = name in CAUSAL or name == "tied"
        kind = AutoModelForCausalLM if is_causal else AutoModelForMaskedLM
        if name in CLASSES:
            kind = AutoModelForSequenceClassification
        folder = here / "lora" / name
        lines = [json.loads(line) for line in (here / name / "data.jsonl").read_text().splitlines()]
        golden = {}
        for base in BASES:
            model = kind.from_pretrained(here / name, attn_implementation="eager")
            store(model, base)
            model = peft.PeftModel.from_pretrained(model, folder, is_trainable=True).double()
            model.train()
            family = name if name in FAMILIES else "llama"
            found = train(family, model, lines)
            golden[base] = {"batch": BATCH, "clip_norm": None, "steps": STEPS, "learning_rate": RATE,
                            "weight_decay": DECAY, "peft": peft.__version__,
                            "transformers": transformers.__version__,
                            "float64": {key: found[key] for key in ("losses", "norms")}}
            print(name, base, found["losses"][0], found["losses"][-1])
        (folder / "quantised.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
