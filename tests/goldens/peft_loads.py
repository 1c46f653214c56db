"""Loads a checkpoint of adapters with PEFT, and the weights that `l2l export` merged: logits are the same.

    l2l train run.toml && l2l export run.toml --to merged
    pip install torch transformers peft && python peft_loads.py BASE CHECKPOINT merged
"""

import json
import pathlib
import sys

import peft
import torch
import transformers
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

KINDS = {
    "CausalLM": AutoModelForCausalLM,
    "LMHeadModel": AutoModelForCausalLM,
    "MaskedLM": AutoModelForMaskedLM,
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
}


def compare(base, checkpoint, merged):
    """How far the adapters move logits, and how far the merged weights are from that."""
    described = AutoConfig.from_pretrained(checkpoint)
    kind = next(kind for end, kind in KINDS.items() if described.architectures[0].endswith(end))
    # The base is tied, also where a table beside the adapters makes the whole model untied.
    described.tie_word_embeddings = AutoConfig.from_pretrained(base).tie_word_embeddings
    # A head that the base model lacks begins at random here, and comes from the checkpoint.
    plain = kind.from_pretrained(base, config=described, attn_implementation="eager").eval()
    merged, info = kind.from_pretrained(merged, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.randint(2, plain.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    for model in plain, merged:
        model.set_experts_implementation("eager")  # the other ways refuse small odd widths
        model.config.pad_token_id = 1  # batches of decoders' sequences need one
    with torch.no_grad():
        before = plain(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(plain, checkpoint).eval()(input_ids=ids).logits
        off = float((merged.eval()(input_ids=ids).logits - adapted).abs().max())
    assert off < 1e-4 * max(1.0, float(adapted.abs().max())), transformers.__version__
    return float((adapted - before).abs().max()), off


def main(base, checkpoint, merged):
    moved, off = compare(base, checkpoint, merged)
    print(f"adapters move logits by up to {moved:.3g}; merged weights differ from them by up to {off:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
