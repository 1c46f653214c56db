"""Ten AdamW steps of models whose head is not their embedding, although config.json ties them, in f64.

Makes heads.json. `own`: the weights of a family's golden, and another head beside them; transformers keeps both.
`adapters`: PEFT's adapters of a tied model, with the embedding, the head or both in `modules_to_save`; `tied`: with one
table for both (`ensure_weight_tying`). A second table is the embedding's, moved by one row and halved; a head's bias likewise.

    pip install torch transformers peft && python heads.py
"""

import json
import pathlib
import shutil
import tempfile

import peft
import torch
import transformers
from families import BATCH, CAUSAL, DECAY, FAMILIES, RATE, STEPS, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

HERE = pathlib.Path(__file__).parent
# Of each model: its embedding, its head, the bias that is stored, and the bias of a head of its own.
DECODER = ("model.embed_tokens.weight", "lm_head.weight", None, None)
NAMES = {
    "tied": ("transformer.wte.weight", "lm_head.weight", None, None),
    "qwen2": DECODER,
    "qwen3": DECODER,
    "gemma3_text": DECODER,
    "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight", None, None),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", "cls.predictions.bias",
             "cls.predictions.decoder.bias"),
    "roberta": ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight", "lm_head.bias",
                "lm_head.decoder.bias"),
    "distilbert": ("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight", "vocab_projector.bias",
                   "vocab_projector.bias"),
}
ADAPTED = ["tied", "qwen2", "opt", "bert", "roberta", "distilbert"]
TABLES = ["embedding", "head", "both"]
TIED = ["qwen2", "opt"]  # PEFT ties again only what is called embed_tokens


def moved(tensor):
    return (0.5 * tensor.roll(1, 0)).contiguous()


def tables_of(name, weights, which):
    """Another embedding, another head with its bias, both, or one table for both."""
    table, of_head, bias, own_bias = NAMES[name]
    tables = {}
    if which != "head":
        tables[table] = moved(weights[table])
    if which == "tied":
        tables[of_head] = tables[table].clone()
    if which in ("head", "both"):
        tables[of_head] = moved(moved(weights[table]))
        if bias:
            tables[own_bias] = moved(weights[bias])
    return tables


def model_of(name, folder):
    kind = AutoModelForCausalLM if name in CAUSAL or name == "tied" else AutoModelForMaskedLM
    return kind.from_pretrained(folder, attn_implementation="eager")


def golden_of(name, model):
    lines = [json.loads(line) for line in (HERE / name / "data.jsonl").read_text().splitlines()]
    family = name if name in FAMILIES else "llama"  # GPT-2's data and loss are those of a decoder
    model = model.double()
    model.train()
    found = train(family, model, lines)
    return {"float64": {"losses": found["losses"], "norms": found["norms"]}}


def with_own_head(name, folder):
    """Makes a directory of a golden's model with another head."""
    weights = load_file(HERE / name / "model.safetensors")
    for file in ("config.json", "data.jsonl"):
        shutil.copy(HERE / name / file, folder)
    save_file(weights | tables_of(name, weights, "head"), f"{folder}/model.safetensors", {"format": "pt"})


def own(name):
    with tempfile.TemporaryDirectory() as folder:
        with_own_head(name, folder)
        model = model_of(name, folder)
        assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
        return golden_of(name, model)


def with_tables(name, which, folder):
    """Makes a directory of a golden's adapters with tables beside them."""
    weights = load_file(HERE / name / "model.safetensors")
    stored = load_file(HERE / "lora" / name / "adapter_model.safetensors")
    new = tables_of(name, weights, which)
    save_file(stored | {f"base_model.model.{key}": value for key, value in new.items()},
              f"{folder}/adapter_model.safetensors", {"format": "pt"})
    config = json.loads((HERE / "lora" / name / "adapter_config.json").read_text())
    config["modules_to_save"] = sorted({key.rpartition(".")[0] for key in new})
    if which == "tied":
        config["modules_to_save"].remove("lm_head")
        config["ensure_weight_tying"] = True
    pathlib.Path(f"{folder}/adapter_config.json").write_text(json.dumps(config))


def adapters(name, which):
    with tempfile.TemporaryDirectory() as folder:
        with_tables(name, which, folder)
        model = peft.PeftModel.from_pretrained(model_of(name, HERE / name), folder, is_trainable=True)
        return golden_of(name, model)


def main():
    made = {"batch": BATCH, "steps": STEPS, "learning_rate": RATE, "weight_decay": DECAY,
            "peft": peft.__version__, "transformers": transformers.__version__,
            "own": {name: own(name) for name in NAMES},
            "adapters": {name: {which: adapters(name, which)
                                for which in TABLES + (["tied"] if name in TIED else [])}
                         for name in ADAPTED}}
    (HERE / "heads.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
