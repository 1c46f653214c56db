"""Loads a checkpoint or an export with sentence-transformers: embeddings are those of `l2l embed`.

    l2l train run.toml && l2l embed run.toml --texts texts.txt > embeddings.jsonl
    pip install torch sentence-transformers && python sentence_loads.py CHECKPOINT embeddings.jsonl
"""

import json
import pathlib
import sys

import torch
from sentence_transformers import SentenceTransformer


def main(checkpoint, embeddings):
    lines = [json.loads(line) for line in pathlib.Path(embeddings).read_text().splitlines()]
    model = SentenceTransformer(checkpoint, device="cpu", model_kwargs={"attn_implementation": "eager"})
    tokenizer = model.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # it is asked for, and not used
    # One text at a time, so that nothing is padded.
    theirs = torch.stack([model.encode(line["text"], convert_to_tensor=True) for line in lines])
    ours = torch.tensor([line["embedding"] for line in lines])
    off = float((theirs - ours).abs().max())
    assert off < 1e-5 * max(1.0, float(theirs.abs().max())), off
    lengths = [float(length) for length in ours.norm(dim=1)]
    print(f"{len(lines)} texts of lengths {min(lengths):.4f} to {max(lengths):.4f}: embeddings differ by up to {off:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
