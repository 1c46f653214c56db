"""PEFT's classifiers on models without a head of classes: the head comes from the adapters.

Makes, below `peft_heads/`, two files of data, a directory of adapters for each family and task, and golden.json: the losses
with the adapters of each. The models are those of `families.py` and `gpt2.py`.

    pip install torch transformers peft && python peft_heads.py
"""

import json
import pathlib

import peft
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

TARGETS = {
    "tied": ["c_attn"],
    "phi3": ["qkv_proj"],
    "bert": ["query"],
    "roberta": ["query"],
    "distilbert": ["q_lin"],
}
DECODERS = ["tied", "gemma3_text", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3"]
# A pooler that the model lacks must be saved, or nobody has it.
SAVED = {"bert-sequences": ["pooler"]}
NO_TOKENS = ["gemma3_text", "opt"]  # transformers has no such model
KINDS = {"sequences": (AutoModelForSequenceClassification, "SEQ_CLS", 3),
         "tokens": (AutoModelForTokenClassification, "TOKEN_CLS", 4)}


def records(labels, generator):
    for index in range(4):
        length = int(torch.randint(3, 12, (1,), generator=generator))
        ids = torch.randint(2, 37, (length,), generator=generator).tolist()
        yield {"input_ids": ids, "label": index % labels}, {"input_ids": ids, "labels": [one % 4 for one in ids]}


def loss_of(model, lines):
    losses = []
    for line in lines:
        labels = torch.tensor(line.get("labels", [line.get("label")]))
        logits = model(input_ids=torch.tensor([line["input_ids"]])).logits
        losses.append(torch.nn.functional.cross_entropy(logits.reshape(len(labels), -1), labels, reduction="none"))
    return float(torch.cat(losses).mean())


def main():
    here = pathlib.Path(__file__).parent
    folder = here / "peft_heads"
    folder.mkdir(exist_ok=True)
    data = dict(zip(KINDS, zip(*records(3, torch.Generator().manual_seed(1)))))
    for task, lines in data.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    golden = {"peft": peft.__version__, "transformers": transformers.__version__, "losses": {}}
    for number, base in enumerate([*DECODERS, "bert", "roberta", "distilbert"]):
        for task, (kind, named, labels) in KINDS.items():
            if task == "tokens" and base in NO_TOKENS:
                continue
            case = f"{base}-{task}"
            torch.manual_seed(200 + number)
            model = kind.from_pretrained(here / base, num_labels=labels, attn_implementation="eager")
            model.config.pad_token_id = 1
            config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=TARGETS.get(base, ["q_proj"]), task_type=named,
                                     modules_to_save=SAVED.get(case), init_lora_weights=False)
            model = peft.get_peft_model(model, config).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        parameter.normal_(std=0.3)
                golden["losses"][case] = loss_of(model.double(), data[task])
            model.float().save_pretrained(folder / case)
            (folder / case / "README.md").unlink(missing_ok=True)
            written = json.loads((folder / case / "adapter_config.json").read_text())
            written["base_model_name_or_path"] = f"tests/goldens/{base}"
            (folder / case / "adapter_config.json").write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
