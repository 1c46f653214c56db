"""Two AdamW steps of transformers' Qwen3 in f64 and f32, on sequences longer than a stretch.

Makes `long` beside itself, as families.py makes its directories, without logits.

    pip install torch transformers && python long.py
"""

import json
import pathlib

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config

import families

families.STEPS = families.BATCH = 2
LENGTHS = [4200, 2049, 1000, 4097]


def main():
    folder = pathlib.Path(__file__).parent / "long"
    torch.manual_seed(0)
    config = Qwen3Config(**families.DECODER | dict(
        hidden_size=16, intermediate_size=20, max_position_embeddings=4200, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, tie_word_embeddings=False))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    lines = []
    for length in LENGTHS:
        ids = torch.randint(0, families.VOCABULARY, (length,)).tolist()
        # A token repeats what stood 2,500 before it half of the time, so that far keys matter.
        for at in range(2500, length):
            ids[at] = ids[at - 2500] if torch.rand(()) < 0.5 else ids[at]
        lines.append({"input_ids": ids, "labels": ids})
    text = "".join(json.dumps({"input_ids": line["input_ids"]}, separators=(",", ":")) + "\n" for line in lines)
    (folder / "data.jsonl").write_text(text)
    golden = {"batch": families.BATCH, "clip_norm": None, "steps": families.STEPS,
              "learning_rate": families.RATE, "weight_decay": families.DECAY,
              "transformers": transformers.__version__}
    for dtype in (torch.float64, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").to(dtype)
        model.train()
        golden[str(dtype).removeprefix("torch.")] = found = families.train("qwen3", model, lines)
        del found["logits"]
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
