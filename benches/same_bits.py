"""Whether two builds of the program give the same results, to the bit.

    python3 benches/same_bits.py --program OLD --out before.json
    python3 benches/same_bits.py --program NEW --out after.json
    python3 benches/same_bits.py --compare before.json after.json

`--ranks 2` runs other cases, each in two processes under `mpirun`; the programs then need the
feature `mpi`.

A case is one or more short runs of the program in a folder of its own. Its row holds the exit
codes, every JSON event on stdout and the hashes of the written files. Fields that depend on the
clock or on the state of the machine are replaced by null, so that their names are still compared.
`--compare` prints the differences and then exits with 1.

Both tables must come from the same processor: with other vector instructions, sums have another
order. The data are the committed fixtures and files that this script writes, never the built-in
corpus, because that changes with this project's own sources.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "tests/goldens"

# Fields of the JSON events that are measured, not computed.
MEASURED = {"seconds", "exposed_wait_seconds", "host_rss_bytes", "device_peak_bytes",
            "slowest_device"}
# Fields with prose, or with numbers of this machine (its free memory).
MEASURED |= {"why_not", "fits", "largest_micro_batch", "longest_sequence"}

CAUSAL = ["tied", "untied", "clipped", "llama", "mistral", "opt", "qwen2", "qwen3", "phi3",
          "gemma3_text"]
ENCODERS = ["bert", "roberta", "distilbert"]
CLASSIFIERS = ["bert-classes", "bert-value", "roberta-classes", "distilbert-classes"]
FAMILIES = CAUSAL + ENCODERS + CLASSIFIERS

RESIDENT = {"schedule.kind": "resident", "schedule.recompute": False, "stash.place": "device"}
ON_FILE = {"eps.tier": "file", "eps.path": "eps"}
CLIPPED = {"optimizer.clip_norm": 0.5}
SHALLOW = {f"channels.{pool}": 1 for pool in ("weights", "gradients", "reduced", "stash")}
DEEP = {"channels.weights": 5, "channels.gradients": 3, "channels.reduced": 3, "channels.stash": 9}

# Settings that each family is trained with. Most must not change a bit, some do.
WAYS = {
    "relay": {},
    "resident": RESIDENT,
    "resident-recomputed": {"schedule.kind": "resident"},
    "saved": {"schedule.recompute": False},
    "saved-mlp": {"schedule.recompute": "attention"},
    "stash-on-device": {"stash.place": "device", "schedule.recompute": False},
    "stash-bf16": {"stash.dtype": "bf16"},
    "stash-bf16-saved": {"stash.dtype": "bf16", "schedule.recompute": False},
    "file": ON_FILE,
    "file-clipped": {**ON_FILE, **CLIPPED},
    "file-resident": {**ON_FILE, **RESIDENT},
    "clipped": CLIPPED,
    "clipped-resident": {**CLIPPED, **RESIDENT},
    "shallow": SHALLOW,
    "shallow-clipped-file": {**SHALLOW, **CLIPPED, **ON_FILE},
    "deep": DEEP,
    "one-thread": {"device.threads": 1},
    "dropout": {"model.dropout": 0.1},
    "dropout-saved": {"model.dropout": 0.1, "schedule.recompute": False},
    "dropout-saved-mlp": {"model.dropout": 0.1, "schedule.recompute": "attention"},
    "ragged": {"step.batch": 7, "step.micro_batch": 3},
    "whole-batch": {"step.micro_batch": 5},
    "packed": {"data.packing": True},
    "shuffled": {"data.shuffle": True, "step.seed": 3},
    "decay": {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 1,
              "optimizer.weight_decay": 0.1, "optimizer.betas": [0.8, 0.9]},
}

# A small GPT-2 with random weights and random data.
SMALL = {"data.train": "random", "model.layers": 3, "model.hidden": 24, "model.heads": 3,
         "model.vocabulary": 51, "model.positions": 10, "data.sequence_length": 7,
         "step.batch": 5, "step.micro_batch": 2, "step.steps": 3, "step.seed": 5,
         "optimizer.learning_rate": 1e-2, "model.dropout": 0.1}
# Wide enough for every kernel's main loop and several tiles of the vocabulary.
WIDE = {"data.train": "random", "model.layers": 2, "model.hidden": 192, "model.heads": 3,
        "model.vocabulary": 9001, "model.positions": 160, "data.sequence_length": 150,
        "step.batch": 3, "step.micro_batch": 2, "step.steps": 2, "model.dropout": 0.0}
PRESETS = {"gpt2": {}, "bert-base": {}, "llama-1b": {"model.kv_heads": 1},
           "qwen": {"model.kv_heads": 3}}


def golden(name, **more):
    """A fixture's weights and data."""
    return {"model.path": f"goldens/{name}", "data.train": f"goldens/{name}/data.jsonl",
            "data.shuffle": False, "step.batch": 5, "step.micro_batch": 2, "step.steps": 2,
            "optimizer.learning_rate": 1e-2, **more}


LORA = {"train.lora.rank": 4, "train.lora.alpha": 8}
OPTIMIZERS = ["adamw", "adam", "sgd", "lamb", "lion", "adafactor", "muon", "adamw-8bit",
              "adamw-bf16"]
# Settings of several devices, for steps of four micro-batches.
PLACES = {
    "layers-2": {"device.count": 2}, "layers-3": {"device.count": 3},
    "sequences-2": {"device.count": 2, "parallel.deal": "sequences", "parallel.groups": 2},
    "groups-2": {"parallel.groups": 2},
    "sequences-3": {"device.count": 3, "parallel.deal": "sequences", "parallel.groups": 4},
    "sharded-2": {"device.count": 2, "parallel.deal": "sequences", "parallel.groups": 2,
                  "parallel.transfer": "sharded"},
    "gpipe-2": {"device.count": 2, "schedule.kind": "gpipe"},
    "1f1b-2": {"device.count": 2, "schedule.kind": "1f1b"},
    "1f1b-3": {"device.count": 3, "schedule.kind": "1f1b"},
    "interleaved-2": {"device.count": 2, "schedule.kind": "interleaved"},
}


class Cases:
    """Cases by name: commands, each a list of arguments, and the files that are hashed after them."""

    def __init__(self):
        self.all = {}

    def add(self, name, *commands, hashed=(), view=None):
        assert name not in self.all, name
        self.all[name] = (commands, hashed, view)

    def train(self, name, settings, **more):
        self.add(f"train/{name}", command("train", settings), **more)


def command(verb, settings, *more, json_format=True):
    """Arguments of one run; two threads unless a case says otherwise."""
    arguments = [verb, "empty.toml", *(["--format", "json"] if json_format else []), *more]
    for key, value in {"device.threads": 2, "metrics.run": "same", **settings}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        arguments += ["--set", f"{key}={text}"]
    return arguments


def training(cases):
    for family in FAMILIES:
        for way, settings in WAYS.items():
            if not (way == "packed" and family in CLASSIFIERS):
                cases.train(f"{family}/{way}", golden(family, **settings))
    for way, settings in WAYS.items():
        data = {"data.packing": False} if way == "packed" else {}
        cases.train(f"small/{way}", {**SMALL, **settings, **data})
    for link in ("relay", "resident"):
        cases.train(f"small/link-{link}", {**SMALL, "schedule.kind": link, "device.link": "2GB/s"})
    for way in ("relay", "resident", "saved-mlp", "stash-bf16", "file-clipped", "one-thread"):
        cases.train(f"wide/{way}", {**WIDE, **WAYS[way]})
    for tokens in (40_000, 100_000):
        tiles = {**SMALL, "model.vocabulary": tokens, "step.steps": 2}
        for way in ("relay", "resident", "file-clipped"):
            cases.train(f"tiles-{tokens}/{way}", {**tiles, **WAYS[way]})
    for preset, settings in PRESETS.items():
        of_preset = {**WIDE, "model.preset": preset, "model.vocabulary": 3000, **settings}
        cases.train(f"preset-{preset}/relay", of_preset)
        cases.train(f"preset-{preset}/dropout", {**of_preset, **WAYS["dropout-saved"]})


def parallel(cases):
    """Several devices, of each family."""
    four = {"step.batch": 4, "step.micro_batch": 1}
    for family in FAMILIES:
        for place, settings in PLACES.items():
            cases.train(f"parallel/{family}/{place}", golden(family, **{**four, **settings}))
    for place, settings in PLACES.items():
        for way in ("saved", "file", "clipped", "stash-bf16", "dropout"):
            more = {**four, **settings, **WAYS[way]}
            cases.train(f"parallel/tied/{place}/{way}", golden("tied", **more))
        lora = {**four, **settings, **LORA, "train.base": "nf4"}
        cases.train(f"parallel/llama/{place}/qlora", golden("llama", **lora))


def methods(cases):
    """Adapters, quantised bases, optimizers, 16 bits, compression, frozen tensors."""
    for family in FAMILIES:
        for base in ("as-is", "bf16", "int8", "nf4"):
            for way in ("relay", "resident", "saved", "file-clipped"):
                settings = {**LORA, "train.base": base, **WAYS[way]}
                cases.train(f"lora/{family}/{base}/{way}", golden(family, **settings))
        for only in ("norm", "bias", "layers.0"):
            cases.train(f"frozen/{family}/{only}", golden(family, **{"train.only": [only]}))
    for kind in OPTIMIZERS:
        for family in ("tied", "bert", "qwen3"):
            for way in ("relay", "resident", "file", "clipped"):
                settings = {"optimizer.kind": kind, **WAYS[way]}
                cases.train(f"optimizers/{kind}/{family}/{way}", golden(family, **settings))
    for dtype in ("bf16", "f16"):
        for family in ("tied", "llama", "bert", "bert-classes"):
            for way in ("relay", "resident", "saved", "stash-on-device", "file"):
                settings = {"device.dtype": dtype, **WAYS[way]}
                cases.train(f"{dtype}/{family}/{way}", golden(family, **settings))
    for kind in ("int8", "top-k", "powersgd"):
        for groups in (1, 2):
            settings = {"compression.kind": kind, "parallel.groups": groups, "step.batch": 4,
                        "step.micro_batch": 1}
            cases.train(f"compression/{kind}/{groups}", golden("tied", **settings))
    for encoding in ("bf16", "int8"):
        stash = {"stash.dtype": encoding, "stash.block_size": 4}
        for family in ("tied", "llama", "bert"):
            cases.train(f"stash/{encoding}/{family}", golden(family, **stash))
    few = {"model.max_layers": 4}
    cases.train("max-layers", {**SMALL, **few})


def on_ranks(cases):
    """Several processes, of each family: in memory and on file, clipped, sharded, with adapters."""
    four = {"step.batch": 4, "step.micro_batch": 1, "parallel.groups": 2}
    ways = {way: WAYS[way] for way in ("relay", "resident", "saved", "file", "file-clipped",
                                       "clipped", "stash-bf16", "dropout")}
    ways["layers-2"] = {"device.count": 2}
    ways["sequences-2"] = {"device.count": 2, "parallel.deal": "sequences", "parallel.groups": 4}
    for family in FAMILIES:
        for way, settings in ways.items():
            cases.train(f"ranks/{family}/{way}", golden(family, **{**four, **settings}))
        cases.train(f"ranks/{family}/lora", golden(family, **{**four, **LORA}))
    for kind in OPTIMIZERS:
        settings = {**four, "optimizer.kind": kind}
        cases.train(f"ranks/optimizer-{kind}", golden("tied", **settings))
    for kind in ("int8", "top-k", "powersgd"):
        cases.train(f"ranks/compression-{kind}", golden("tied", **{**four, "compression.kind": kind}))
    for base in ("bf16", "int8", "nf4"):
        settings = {**four, **LORA, "train.base": base}
        cases.train(f"ranks/base-{base}", golden("llama", **settings))


def long_sequences(cases):
    """Sequences above 2,048 positions, which are processed in chunks."""
    long = golden("long", **{"data.sequence_length": 4200, "step.batch": 2, "step.micro_batch": 1,
                             "step.steps": 1})
    for way in ("relay", "resident", "saved", "saved-mlp", "file-clipped", "stash-bf16"):
        cases.train(f"long/{way}", {**long, **WAYS[way]})
    cases.train("long/dropout", {**long, "model.dropout": 0.1, "step.micro_batch": 2})
    cases.add("eval/long", command("eval", {**long, "data.validation": "goldens/long/data.jsonl"}))


def text(cases):
    """Text of every kind, through tokenizers and by bytes."""
    short = {"data.sequence_length": 48, "step.batch": 5, "step.micro_batch": 2, "step.steps": 2}
    kinds = {"bpe": ["stream.txt", "texts.jsonl", "completions.jsonl", "chats.jsonl"],
             "llama": ["stream.txt", "texts.jsonl", "chats.jsonl"],
             "wordpiece": ["stream.txt", "texts.jsonl"]}
    for directory, files in kinds.items():
        for file in files:
            data = {"model.path": f"goldens/text/{directory}", "data.train": f"data/{file}",
                    "data.too_long": "split" if file != "chats.jsonl" else "cut", **short}
            name = f"text/{directory}/{file}"
            cases.train(f"{name}/plain", data)
            cases.train(f"{name}/packed", {**data, "data.packing": True})
            cases.add(f"data/{name}", command("data", data, "--batches", "3", json_format=False),
                      command("data", data, "--rows", "2"))
    bpe = {"model.path": "goldens/text/bpe", "data.train": "data/texts.jsonl", **short,
           "data.too_long": "split", "data.packing": True}
    cases.train("text/across", {**bpe, "data.attend_across": True, "data.end_of_text": True})
    labelled = {"model.path": "goldens/text/wordpiece", "model.task": "sequence-classification",
                "data.train": "data/labels.jsonl", "data.validation": "data/labels.jsonl", **short}
    cases.train("text/labels", labelled)
    cases.train("text/pairs", {**labelled, "data.train": "data/pairs.jsonl", "model.labels": 1,
                               "data.validation": "data/pairs.jsonl"})
    by_bytes = {"model.layers": 2, "model.hidden": 32, "model.heads": 2, **short,
                "data.train": "data/stream.txt", "step.epochs": 1, "step.batch": 8,
                "validation.every_steps": 3}
    del by_bytes["step.steps"]
    cases.train("text/bytes", by_bytes)
    cases.train("text/patience", {**by_bytes, "validation.patience": 1, "step.epochs": 4,
                                  "optimizer.learning_rate": 0.5, "validation.every_steps": 1})
    mixed = json.dumps(["data/texts.jsonl", {"path": "data/completions.jsonl", "weight": 0.5}])
    mixed = re.sub(r'"(path|weight)":', r"\1 =", mixed)
    cases.train("text/mixed", {**bpe, "data.train": mixed})
    cases.train("text/tokens", {**SMALL, "data.train": "data/tokens.bin", "step.batch": 4})


def runs(cases):
    """Checkpoints, runs that resume from them, and exports of them."""
    for family in ("tied", "llama", "bert", "bert-classes"):
        for way in ("relay", "file", "clipped", "dropout"):
            saved = golden(family, **WAYS[way], **{"step.steps": 4, "checkpoint.directory": "run",
                           "checkpoint.every_steps": 2, "data.shuffle": True,
                           "data.validation": f"goldens/{family}/data.jsonl",
                           "validation.every_steps": 2, "validation.batches": 2})
            further = {**saved, "step.steps": 7}
            after = [command("eval", saved), command("eval", saved, "--best", "--batches", "1"),
                     command("export", saved, "--to", "exported", json_format=False)]
            cases.add(f"resume/{family}/{way}", command("train", saved),
                      command("train", further, "--resume"), *after, hashed=["run", "exported"])
    for family in FAMILIES:
        given = {"data.validation": f"goldens/{family}/data.jsonl"}
        loaded = golden(family, **given)
        for way in ("relay", "resident", "file", "stash-bf16", "ragged"):
            cases.add(f"eval/{family}/{way}", command("eval", {**loaded, **WAYS[way]}))
        export = command("export", loaded, "--to", "exported", json_format=False)
        cases.add(f"export/{family}", export, hashed=["exported"])
    logged = golden("tied", **{"log.file": "log.jsonl", "metrics.file": "metrics"})
    cases.add("metrics/memory", command("train", logged), hashed=["metrics"], view=metric_names)
    cases.add("metrics/file", command("train", {**logged, **WAYS["file-clipped"]}),
              hashed=["metrics"], view=metric_names)


def generation(cases):
    draws = {"greedy": [], "cool": ["--temperature", "0.7", "--seed", "1"],
             "hot": ["--temperature", "1.3", "--seed", "2"],
             "top": ["--temperature", "1", "--top-k", "9", "--top-p", "0.9", "--seed", "3"]}
    ways = {"relay": {}, "resident": {"schedule.kind": "resident"}, "one": {"step.micro_batch": 1},
            "on-device": {"stash.place": "device"}, "shallow": SHALLOW, "file": ON_FILE,
            "stash-bf16": {"stash.dtype": "bf16"}}
    for family in ("gpt2", "llama", "mistral", "opt", "qwen3"):
        model = {"model.path": f"goldens/generate/{family}", "step.micro_batch": 2}
        given = ["--prompts", "data/prompts.jsonl", "--tokens", "24", "--ignore-end"]
        for name, how in draws.items():
            cases.add(f"generate/{family}/{name}", command("generate", model, *given, *how))
        for name, settings in ways.items():
            cases.add(f"generate/{family}/{name}",
                      command("generate", {**model, **settings}, *given, *draws["top"]))
        cases.add(f"generate/{family}/plan", command("generate", model, *given, "--plan"))
    for directory in ("bpe", "llama"):
        model = {"model.path": f"goldens/text/{directory}"}
        for name, how in draws.items():
            given = ["--prompt", "The ring", "--prompt", "hé there", "--tokens", "30"]
            cases.add(f"generate/text-{directory}/{name}", command("generate", model, *given, *how))
            cases.add(f"generate/chat-{directory}/{name}",
                      command("generate", model, "--chat", "--prompt", "hello", *how))


def plans(cases):
    """Terms and bytes, for models of all sizes; nothing is started."""
    rates = ["--tflops", "20", "--link-gbps", "12", "--host-gbps", "60", "--disk-gbps", "3"]
    large = {"data.train": "random", "step.batch": 16, "step.micro_batch": 2, "device.threads": 2}
    sizes = {"gpt2": {}, "gpt2-xl": {}, "bert-large": {}, "llama-1b": {}, "llama-7b": {},
             "qwen": {}, "turing-nlg-17b": {}, "gpt3-175b": {"step.micro_batch": 1}}
    ways = {**{way: WAYS[way] for way in ("relay", "resident", "saved", "saved-mlp", "stash-bf16",
                                          "stash-on-device", "file-clipped", "clipped", "deep")},
            "long": {"model.positions": 8192, "data.sequence_length": 8192}}
    for preset, settings in sizes.items():
        for way, more in ways.items():
            chosen = {**large, "model.preset": preset, **settings, **more}
            more_arguments = rates if way in ("relay", "file-clipped") else []
            cases.add(f"plan/{preset}/{way}", command("plan", chosen, *more_arguments))
    for dtype in ("f32", "bf16"):
        on_gpu = {**large, "model.preset": "gpt2", "device.kind": "cuda", "device.dtype": dtype}
        for way in ("relay", "saved", "file-clipped"):
            cases.add(f"plan/cuda-{dtype}/{way}", command("plan", {**on_gpu, **WAYS[way]}))
    for family in FAMILIES:
        cases.add(f"plan/{family}", command("plan", golden(family)))
    cases.add("plan/drawn", command("plan", {**large, "model.preset": "gpt2"}, *rates, "--draw",
                                    "step.svg"), hashed=["step.svg"], view=shapes)


def interface(cases):
    """The interface for tools: options, keys and their defaults, exit codes."""
    verbs = ["train", "data", "eval", "generate", "plan", "bench", "tune", "dashboards", "export",
             "doctor", "config", "completions"]
    for verb in verbs:
        cases.add(f"interface/{verb}", [verb, "--help"], view=options)
    cases.add("interface/program", ["--help"], view=options)
    cases.add("interface/show", ["config", "show", "empty.toml"])
    cases.add("interface/schema", ["config", "schema"], view=without_prose)
    bad = {"no-such-key": command("train", {"step.stepz": 1}),
           "no-such-file": ["train", "nowhere.toml"],
           "bad-value": command("train", {"step.batch": 0}),
           "bad-option": ["train", "--no-such-option"],
           "memory": command("train", {**SMALL, "device.memory": "2KiB"}),
           "no-model": command("eval", {}),
           "no-run": command("export", {}, "--to", "exported", json_format=False),
           "too-long": command("train", golden("tied", **{"data.sequence_length": 4})),
           "token": command("train", {**golden("tied"), "data.train": "data/prompts.jsonl"}),
           "no-gpu": command("train", {**SMALL, "device.kind": "cuda"}),
           "cpu-bf16": command("train", {**SMALL, "device.dtype": "bf16"}),
           "empty-prompt": command("generate", {"model.path": "goldens/text/bpe"}, "--prompt", "")}
    for name, arguments in bad.items():
        cases.add(f"refused/{name}", arguments)


def options(text):
    """The options and values that a help text names."""
    words = set(re.findall(r"(?:--|\b)[a-z][a-z-]*\b", text))
    return sorted(word for word in words if word.startswith("--"))


def without_prose(text):
    """A JSON schema without descriptions and names of types."""
    schema = json.loads(text)
    types = schema.pop("$defs", {})

    def strip(value):
        if isinstance(value, list):
            return [strip(one) for one in value]
        if not isinstance(value, dict):
            return value
        found = {key: strip(one) for key, one in value.items()
                 if key not in ("description", "title", "$ref")}
        named = value.get("$ref")
        return {**strip(types[named.rsplit("/", 1)[1]]), **found} if named else found

    return strip(schema)


def shapes(text):
    """A drawing without its words."""
    return re.sub(r"<(title|text)\b.*?</\1>", "", text)


def metric_names(text):
    """Names, kinds and labels of metrics."""
    kinds = re.findall(r"^# TYPE (\S+) (\S+)", text, re.M)
    samples = re.findall(r"^(l2l_\w+)(?:\{([^}]*)\})?", text, re.M)
    labels = {(name, *re.findall(r"(\w+)=", labels)) for name, labels in samples}
    return {"kinds": sorted(kinds), "labels": sorted(labels)}


class Numbers:
    """A linear congruential generator: the same data everywhere."""

    def __init__(self, state=1):
        self.state = state

    def below(self, bound):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % bound


WORDS = """the device meets one layer at a time and runs all micro batches through it while
next weights come and gradients leave; Zürich, naïve: 3.14 (twice)! ring turns""".split()


def write_data(folder):
    numbers = Numbers()
    words = lambda count: " ".join(WORDS[numbers.below(len(WORDS))] for _ in range(count))
    lines = {"texts": [], "completions": [], "chats": [], "labels": [], "pairs": []}
    for at in range(40):
        lines["texts"].append({"text": words(4 + numbers.below(30))})
        lines["completions"].append({"prompt": words(3), "completion": " " + words(5)})
        turns = [("user", words(3)), ("assistant", words(4)), ("user", words(2)),
                 ("assistant", words(3))]
        turns = turns[:2 + 2 * (at % 2)]
        lines["chats"].append({"messages": [{"role": r, "content": c} for r, c in turns]})
        lines["labels"].append({"text": words(5), "label": ["ham", "spam"][at % 2]})
        lines["pairs"].append({"text": words(5), "text_pair": words(3), "label": at / 10})
    ids = lambda count, bound: [5 + numbers.below(bound) for _ in range(count)]
    lines["prompts"] = [{"input_ids": ids(1 + 7 * at, 50)} for at in range(5)]
    for name, objects in lines.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in objects))
    (folder / "stream.txt").write_text(words(700))
    tokens = b"".join(one.to_bytes(2, "little") for one in ids(200, 40))
    (folder / "tokens.bin").write_bytes(tokens)


def masked(value):
    """An event with null in place of each measured field."""
    if isinstance(value, list):
        return [masked(one) for one in value]
    if isinstance(value, dict):
        return {key: None if key in MEASURED else masked(one) for key, one in value.items()}
    return value


def told(text):
    """The JSON objects of stdout; other lines as they are."""
    lines = []
    for line in text.splitlines():
        try:
            lines.append(masked(json.loads(line)))
        except ValueError:
            lines.append(line)
    return lines


def file_hashes(folder, hashed, view):
    found = {}
    for top in hashed:
        top = folder / top
        files = [top] if top.is_file() else sorted(top.rglob("*"))
        for file in (file for file in files if file.is_file()):
            name = str(file.relative_to(folder))
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            found[name] = view(file.read_text()) if view else digest
    return found


def run(program, data, case):
    """`program` is the command that starts it."""
    commands, hashed, view = case
    environment = {key: value for key, value in os.environ.items() if not key.startswith("L2L")}
    row = {"exits": [], "told": []}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        # Relative paths, so that written files do not depend on the place of the folder.
        (folder / "empty.toml").write_text("")
        (folder / "goldens").symlink_to(GOLDENS)
        (folder / "data").symlink_to(data)
        for arguments in commands:
            ended = subprocess.run([*program, *arguments], cwd=folder, env=environment, text=True,
                                   stdin=subprocess.DEVNULL, capture_output=True)
            row["exits"].append(ended.returncode)
            as_text = view and not hashed
            row["told"].append(view(ended.stdout) if as_text else told(ended.stdout))
            if ended.returncode:
                row.setdefault("stderr", []).append(ended.stderr)
        row["files"] = file_hashes(folder, hashed, view)
    events = [event for one in row["told"] for event in one if isinstance(event, dict)]
    row["digest"] = [event["weights_digest"] for event in events if "weights_digest" in event]
    row["losses"] = [event["loss"] for event in events if event.get("event") == "step"]
    return row


ON_ONE_RANK = [training, parallel, methods, long_sequences, text, runs, generation, plans, interface]


def make_table(program, pattern, jobs, ranks):
    program = [str(pathlib.Path(program).resolve())]
    if ranks > 1:
        program = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
                   "-n", str(ranks), *program]
    cases = Cases()
    for add in ON_ONE_RANK if ranks == 1 else [on_ranks]:
        add(cases)
    chosen = {name: case for name, case in cases.all.items() if re.search(pattern, name)}
    with tempfile.TemporaryDirectory() as data, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        write_data(pathlib.Path(data))
        rows = pool.map(lambda case: run(program, data, case), chosen.values())
        return dict(zip(chosen, rows))


def differences(left, right, path=""):
    """The paths at which two rows differ. Error texts may differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            if key != "stderr":
                yield from differences(left.get(key), right.get(key), f"{path}.{key}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for at, (one, other) in enumerate(zip(left, right)):
            yield from differences(one, other, f"{path}[{at}]")
    elif left != right:
        yield f"{path}: {json.dumps(left)[:120]} | {json.dumps(right)[:120]}"


def compare(left, right):
    left, right = (json.loads(pathlib.Path(path).read_text()) for path in (left, right))
    differing = 0
    for name in sorted(left.keys() | right.keys()):
        found = list(differences(left.get(name), right.get(name)))
        differing += bool(found)
        for one in found[:6]:
            print(f"{name}{one}")
    print(f"{differing} of {len(left.keys() | right.keys())} cases differ")
    return 1 if differing else 0


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--program", default="target/release/l2l")
    arguments.add_argument("--out", help="where the table goes")
    arguments.add_argument("--only", default="", help="a regular expression for names of cases")
    arguments.add_argument("--jobs", type=int, default=2, help="cases at once")
    arguments.add_argument("--ranks", type=int, default=1, help="processes of a case")
    arguments.add_argument("--compare", nargs=2, metavar="TABLE")
    given = arguments.parse_args()
    if given.compare:
        sys.exit(compare(*given.compare))
    begin = time.monotonic()
    table = make_table(given.program, given.only, given.jobs, given.ranks)
    if given.out:
        pathlib.Path(given.out).write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    digests = [digest for row in table.values() for digest in row["digest"]]
    print(f"{len(table)} cases, {len(digests)} runs with a digest, {len(set(digests))} of them "
          f"different, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
