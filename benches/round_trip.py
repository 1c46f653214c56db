"""Checks that models are unchanged after a round trip through l2l.

l2l loads a model, trains one step with a learning rate of 0, and exports it. transformers loads the original and the
export, and the script compares weights and logits bit by bit. The models are the goldens, those of them whose head is
tied also with a head of its own (`NAME-own-head`), and those with experts also as transformers holds them, all experts of a
block in one tensor (`NAME-fused`). L2L names another program than target/release/l2l.

    cargo build --release && pip install torch transformers
    python benches/round_trip.py [CASE...]
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests/goldens"))
import experts  # noqa: E402
import heads  # noqa: E402

KINDS = {
    "CausalLM": AutoModelForCausalLM,
    "LMHeadModel": AutoModelForCausalLM,
    "MaskedLM": AutoModelForMaskedLM,
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
}


def kind_of(architecture):
    return next(kind for end, kind in KINDS.items() if architecture.endswith(end))


def with_fused_experts(source, folder):
    """Writes a golden as transformers holds it."""
    name = AutoConfig.from_pretrained(source).architectures[0]
    kind_of(name).from_pretrained(source).save_pretrained(folder, save_original_format=False)
    names = safe_open(folder / "model.safetensors", "pt").keys()
    assert any("gate_up_proj" in name for name in names) and not any("experts.0" in name for name in names)
    shutil.copy(source / "data.jsonl", folder)


def main():
    goldens = ROOT / "tests/goldens"
    files = [*goldens.glob("*/golden.json"), *goldens.glob("rotary/*/golden.json")]
    sources = {path.parent.name: path.parent for path in sorted(files)}
    del sources["embeddinggemma"]  # it has no logits; tests/integration/embeddinggemma.rs compares its files
    made = [f"{name}-own-head" for name in heads.NAMES] + [f"{name}-fused" for name in experts.CASES if not name.startswith("gpt_oss")]
    for case in [*sources, *made]:
        if sys.argv[1:] and case not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out"
            if case in sources:
                source = sources[case]
            elif case.endswith("-fused"):
                source = pathlib.Path(folder) / case
                with_fused_experts(sources[case.removesuffix("-fused")], source)
            else:
                source = pathlib.Path(folder) / case
                source.mkdir()
                heads.with_own_head(case.removesuffix("-own-head"), source)
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
            l2l = os.environ.get("L2L", ROOT / "target/release/l2l")
            subprocess.run([l2l, "train", config, *arguments], check=True, capture_output=True)
            subprocess.run(
                [l2l, "export", config, *arguments, "--to", out], check=True, capture_output=True
            )
            name = AutoConfig.from_pretrained(source).architectures[0]
            kind = kind_of(name)
            # A model read from fused tensors lies elsewhere in memory, and its products have other last bits.
            before = kind.from_pretrained(sources.get(case.removesuffix("-fused"), source)).eval()
            after, info = kind.from_pretrained(out, output_loading_info=True)
            assert not any(info.values()), info
            assert AutoConfig.from_pretrained(out).architectures == [name]
            left, right = before.state_dict(), after.eval().state_dict()
            assert left.keys() == right.keys()
            # A head of its own adds the bias of its layer, and no model reads the other.
            unread = {"cls.predictions.bias", "lm_head.bias"} if source.name.endswith("-own-head") else set()
            assert all(torch.equal(left[key], right[key]) for key in left.keys() - unread), source
            ids = torch.tensor(
                [json.loads((source / "data.jsonl").read_text().splitlines()[0])["input_ids"]]
            )
            for model in (before, after):  # the default needs shapes that are multiples of 4
                model.config._experts_implementation = "eager"
            with torch.no_grad():
                assert torch.equal(before(input_ids=ids).logits, after(input_ids=ids).logits)
            print(f"{source.name}: {len(left)} tensors and the logits are the same bits")


if __name__ == "__main__":
    main()
