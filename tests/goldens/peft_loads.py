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
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification


def main(base, checkpoint, merged):
    task = json.loads((pathlib.Path(checkpoint) / "adapter_config.json").read_text())["task_type"]
    kind = {"CAUSAL_LM": AutoModelForCausalLM, "SEQ_CLS": AutoModelForSequenceClassification}
    kind = kind.get(task, AutoModelForMaskedLM)
    plain, merged = (kind.from_pretrained(path, attn_implementation="eager").eval() for path in (base, merged))
    ids = torch.randint(2, plain.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = plain(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(plain, checkpoint).eval()(input_ids=ids).logits
        off = float((merged(input_ids=ids).logits - adapted).abs().max())
    print(f"adapters move logits by up to {float((adapted - before).abs().max()):.3g}; "
          f"merged weights differ from them by up to {off:.1e}")
    assert off < 1e-4 * max(1.0, float(adapted.abs().max())), transformers.__version__


if __name__ == "__main__":
    main(*sys.argv[1:])
