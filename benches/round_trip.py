"""Checks that models are unchanged after a round trip through l2l.

l2l loads a model, trains one step with a learning rate of 0, and exports it. transformers loads the original and the
export, and the script compares weights and logits bit by bit.

    cargo build --release && pip install torch transformers
    python benches/round_trip.py [CASE...]
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

ROOT = pathlib.Path(__file__).parent.parent
KINDS = {
    "CausalLM": AutoModelForCausalLM,
    "LMHeadModel": AutoModelForCausalLM,
    "MaskedLM": AutoModelForMaskedLM,
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
}


def main():
    goldens = ROOT / "tests/goldens"
    files = [*goldens.glob("*/golden.json"), *goldens.glob("rotary/*/golden.json")]
    for source in sorted(path.parent for path in files):
        if sys.argv[1:] and source.name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out"
            sets = [
                f"model.path={source}",
                f"data.train={source}/data.jsonl",
                "step.steps=1",
                "step.batch=3",
                "optimizer.learning_rate=0",
                f"checkpoint.directory={folder}/run",
            ]
            if source.parent.name == "rotary":
                sets.append("data.sequence_length=24")
            config = pathlib.Path(folder) / "empty.toml"
            config.write_text("")
            arguments = [part for one in sets for part in ("--set", one)]
            l2l = ROOT / "target/release/l2l"
            subprocess.run([l2l, "train", config, *arguments], check=True, capture_output=True)
            subprocess.run(
                [l2l, "export", config, *arguments, "--to", out], check=True, capture_output=True
            )
            name = AutoConfig.from_pretrained(source).architectures[0]
            kind = next(kind for end, kind in KINDS.items() if name.endswith(end))
            before = kind.from_pretrained(source).eval()
            after, info = kind.from_pretrained(out, output_loading_info=True)
            assert not any(info.values()), info
            assert AutoConfig.from_pretrained(out).architectures == [name]
            left, right = before.state_dict(), after.eval().state_dict()
            assert left.keys() == right.keys()
            assert all(torch.equal(left[key], right[key]) for key in left), source
            ids = torch.tensor(
                [json.loads((source / "data.jsonl").read_text().splitlines()[0])["input_ids"]]
            )
            with torch.no_grad():
                assert torch.equal(before(input_ids=ids).logits, after(input_ids=ids).logits)
            print(f"{source.name}: {len(left)} tensors and the logits are the same bits")


if __name__ == "__main__":
    main()
