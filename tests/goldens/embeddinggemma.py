"""A small EmbeddingGemma, as sentence-transformers writes it, and its embeddings in f64; `embeddings.py` trains it.

Makes, beside itself, a directory: config.json, model.safetensors, modules.json, the folders of its modules, data.jsonl,
and golden.json (the embeddings of the first sequences). Unlike Google's, its second Dense has a bias.

    pip install torch transformers sentence-transformers && python embeddinggemma.py
"""

import json
import pathlib

import torch
import transformers
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel, Gemma3TextConfig

from families import BATCH, DECAY, DECODER, RATE, STEPS, sequences

NAME = "embeddinggemma"
CONFIG = Gemma3TextConfig(
    **DECODER, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=20, query_pre_attn_scalar=20,
    use_bidirectional_attention=True, sliding_window=9, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})
DENSE = [(48, 70, False), (70, 48, True)]
KINDS = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Dense", "Dense"), ("4_Normalize", "Normalize")]


def modules(folder):
    """The Dense modules of a directory."""
    return [Dense.load(str(folder), subfolder=at.name) for at in sorted(folder.glob("*_Dense"))]


def main():
    folder = pathlib.Path(__file__).parent / NAME
    torch.manual_seed(1)
    model = AutoModel.from_config(CONFIG, attn_implementation="eager")
    with torch.no_grad():  # norms begin as zeros, which would hide mistakes
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    pooling = Pooling(CONFIG.hidden_size, pooling_mode="mean")
    dense = [Dense(*sizes, activation_function=torch.nn.Identity()) for sizes in DENSE]
    for (at, _), module in zip(KINDS[1:], [pooling, *dense]):
        (folder / at).mkdir(exist_ok=True)
        module.save(str(folder / at))
    types = [{"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
             for at, (path, kind) in enumerate(KINDS)]
    (folder / "modules.json").write_text(json.dumps(types, indent=1) + "\n")
    lines = sequences("gemma3_text", torch.Generator().manual_seed(77))
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").double()
    embeddings = []
    for line in lines[:BATCH]:
        ids = torch.tensor([line["input_ids"]])
        features = {"token_embeddings": model(input_ids=ids).last_hidden_state, "attention_mask": torch.ones_like(ids)}
        for module in [pooling, *(module.double() for module in modules(folder)), Normalize()]:
            features = module(features)
        embeddings.append([round(number, 8) for number in features["sentence_embedding"][0].tolist()])
    golden = {"batch": BATCH, "clip_norm": None, "steps": STEPS, "learning_rate": RATE, "weight_decay": DECAY,
              "transformers": transformers.__version__, "embeddings": embeddings}
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
