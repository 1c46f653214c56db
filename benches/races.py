"""Training speed and memory against PyTorch and transformers on the same CPU.

    cargo build --release && pip install torch transformers && python benches/races.py A B C D E G H I J

Each race trains one model on the same shapes and data. The runs alternate: each round starts every
process anew, so that a slow phase of the machine affects all of them. The figures are medians over
rounds: tokens/s without the first step, the ratio to PyTorch of the same round with its spread, and
the peak resident set of the process. The losses of the first round are printed beside them.

    A  BERT-Large, masked LM, 16 x 128 in micro-batches of 4, 15 % labelled (A-dropout: 0.1)
    B  GPT-2 124M, 8 x 1024 in micro-batches of 1
    C  MiniLM-shaped classification, 64 sequences of 16 to 128 tokens in micro-batches of 16
    D  Llama-shaped 0.5 B, 4 x 512 in micro-batches of 1, recomputing on both sides
    E  GPT-2 of 12 x 512, vocabulary 8192, 32 x 128 in micro-batches of 8
    F  BERT's encoder of 12 x 512, two classes, 32 x 128 in micro-batches of 8, beside the package
       layer-to-layer-pytorch, which needs --layer-to-layer: see `layer_to_layer.py`
    G  Mixtral of 8 x 512, 8 experts of 1792, 2 a token, 16 x 256 in micro-batches of 4
    H  Qwen3-MoE of 8 x 512, 32 experts of 256, 4 a token, the same
       PyTorch's experts run one by one ("torch") and as one grouped product ("torch grouped")
    I  ModernBERT of 9 x 512, masked LM, 16 x 512 in micro-batches of 2, 15 % labelled
    J  Qwen3.5 of 8 x 512, linear attention in six of eight blocks, 16 x 256 in micro-batches of 4

Options: --rounds N, --steps N, --threads N; --peer sdpa or --peer compile instead of eager
attention without compilation; --peer-micro N sets another micro-batch for PyTorch.

    python benches/races.py E --against PROGRAM

races this build against another one (for example the build before a change) instead of PyTorch. It
uses random weights and needs neither torch nor transformers. It prints the ratios of neighboring runs.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

PROGRAM = pathlib.Path(__file__).parent.parent / "target/release/l2l"
RATE, DECAY = 1e-4, 0.01

# Fields that races of one family share.
BERT = dict(
    vocab_size=30522,
    max_position_embeddings=512,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
GPT2 = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)

# A model (a transformers config and its fields), its task, and the sizes of a step. "preset" has the
# same shape with random weights as keys of l2l's config: --against needs it.
RACES = {
    "A": dict(
        config="BertConfig",
        fields=dict(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            **BERT,
        ),
        task="masked-lm",
        batch=16,
        micro=4,
        length=128,
        ways=["torch", "kept", "recomputing"],
    ),
    "B": dict(
        config="GPT2Config",
        fields=dict(
            n_positions=1024,
            **GPT2,
        ),
        task="causal-lm",
        batch=8,
        micro=1,
        length=1024,
        ways=["torch", "torch checkpointing", "kept", "recomputing"],
    ),
    "C": dict(
        config="BertConfig",
        fields=dict(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            **BERT,
        ),
        task="sequence-classification",
        batch=64,
        micro=16,
        length=128,
        shortest=16,
        ways=["torch", "kept", "recomputing"],
    ),
    "D": dict(
        config="LlamaConfig",
        fields=dict(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=26,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=512,
            bos_token_id=0,
            eos_token_id=0,
        ),
        task="causal-lm",
        batch=4,
        micro=1,
        length=512,
        ways=["torch checkpointing", "recomputing"],
    ),
    "E": dict(
        config="GPT2Config",
        fields=dict(
            vocab_size=8192,
            n_positions=128,
            n_embd=512,
            n_layer=12,
            n_head=8,
            **GPT2,
        ),
        task="causal-lm",
        batch=32,
        micro=8,
        length=128,
        ways=["torch", "kept", "recomputing"],
        preset="preset = 'gpt2', layers = 12, hidden = 512, heads = 8, vocabulary = 8192, "
        "positions = 128, dropout = 0.0",
    ),
}
RACES["F"] = dict(
    config="BertConfig",
    fields=BERT
    | dict(
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        intermediate_size=2048,
        vocab_size=8192,
    ),
    task="sequence-classification",
    batch=32,
    micro=8,
    length=128,
    ways=["layer-to-layer", "torch", "kept", "recomputing"],
)
SPARSE = dict(
    task="causal-lm",
    batch=16,
    micro=4,
    length=256,
    ways=["torch", "torch grouped", "kept", "recomputing"],
)
ATTENTION = dict(
    vocab_size=8192,
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=0,
)
RACES["G"] = SPARSE | dict(
    config="MixtralConfig",
    fields=ATTENTION | dict(intermediate_size=1792, num_local_experts=8, num_experts_per_tok=2),
)
RACES["H"] = SPARSE | dict(
    config="Qwen3MoeConfig",
    fields=ATTENTION
    | dict(
        head_dim=64,
        moe_intermediate_size=256,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    ),
)
RACES["I"] = dict(
    config="ModernBertConfig",
    fields=dict(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=9,
        num_attention_heads=8,
        intermediate_size=768,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        cls_token_id=0,
        sep_token_id=0,
    ),
    task="masked-lm",
    batch=16,
    micro=2,
    length=512,
    ways=["torch", "kept", "recomputing"],
)
RACES["J"] = dict(
    config="Qwen3_5TextConfig",
    fields=dict(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    ),
    task="causal-lm",
    batch=16,
    micro=4,
    length=256,
    ways=["torch", "kept", "recomputing"],
)
RACES["A-dropout"] = RACES["A"] | dict(
    fields=RACES["A"]["fields"]
    | dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
)
IGNORED = -100


def sequences(race, steps):
    """Lines of the data file: ids and labels, or ids and a class."""
    numbers = random.Random(0)
    vocabulary = race["fields"].get("vocab_size", 50257)
    lines = []
    for _ in range(race["batch"] * steps):
        length = numbers.randrange(race.get("shortest", race["length"]), race["length"] + 1)
        ids = [numbers.randrange(1000 % vocabulary, vocabulary) for _ in range(length)]
        line = {"input_ids": ids}
        if race["task"] == "masked-lm":
            marked = set(numbers.sample(range(length), length * 15 // 100))
            line["labels"] = [id if at in marked else IGNORED for at, id in enumerate(ids)]
        elif race["task"] == "sequence-classification":
            line["label"] = numbers.randrange(2)
        lines.append(line)
    return lines


def prepare(folder, race, steps, with_weights):
    lines = sequences(race, steps)
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if with_weights:
        import torch

        torch.manual_seed(0)
        model = model_of(race, race["fields"])
        model.save_pretrained(folder)
        if "layer-to-layer" in race["ways"]:
            torch.save(model.state_dict(), folder / "weights.pt")
    return sum(len(line["input_ids"]) for line in lines) / steps


def model_class(race):
    import transformers

    names = {
        "masked-lm": "AutoModelForMaskedLM",
        "causal-lm": "AutoModelForCausalLM",
        "sequence-classification": "AutoModelForSequenceClassification",
    }
    return getattr(transformers, names[race["task"]])


def model_of(race, fields):
    import transformers

    config = getattr(transformers, race["config"])(**fields)
    return model_class(race).from_config(config)


def torch_batch(lines, task):
    """Padded ids, attention mask (None without padding), labels."""
    import torch

    longest = max(len(line["input_ids"]) for line in lines)
    pad = lambda values, value: values + [value] * (longest - len(values))
    ids = torch.tensor([pad(line["input_ids"], 0) for line in lines])
    mask = torch.tensor([pad([1] * len(line["input_ids"]), 0) for line in lines])
    if task == "sequence-classification":
        labels = torch.tensor([line["label"] for line in lines])
    elif task == "masked-lm":
        labels = torch.tensor([pad(line["labels"], IGNORED) for line in lines])
    else:
        labels = ids
    return ids, None if bool(mask.all()) else mask, labels


def train_with_torch(folder, race, options):
    """The peer's process: prints the same events as `l2l train --format json`."""
    import torch

    torch.set_num_threads(options.threads)
    attention = "sdpa" if options.peer == "sdpa" else "eager"
    model = model_class(race).from_pretrained(folder, attn_implementation=attention)
    model.train()
    if "num_experts_per_tok" in race["fields"]:
        model.set_experts_implementation("grouped_mm" if options.grouped else "eager")
    if options.checkpointing:
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
    named = list(model.named_parameters())
    plain = lambda name: name.endswith("bias") or "norm" in name.lower() or ".ln_" in name
    groups = [
        {"params": [p for name, p in named if not plain(name)], "weight_decay": DECAY},
        {"params": [p for name, p in named if plain(name)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    run = torch.compile(model) if options.peer == "compile" else model
    lines = [json.loads(line) for line in (folder / "data.jsonl").open()]
    micro = options.peer_micro or race["micro"]
    for step in range(options.steps):
        begin = time.perf_counter()
        batch = lines[step * race["batch"] : (step + 1) * race["batch"]]
        # The mean over the labels of the batch, as in one large micro-batch.
        counts = {
            "causal-lm": lambda line: len(line["input_ids"]) - 1,
            "masked-lm": lambda line: sum(label != IGNORED for label in line["labels"]),
            "sequence-classification": lambda line: 1,
        }
        count = counts[race["task"]]
        labelled = sum(map(count, batch))
        total = 0.0
        for at in range(0, len(batch), micro):
            part = batch[at : at + micro]
            ids, mask, labels = torch_batch(part, race["task"])
            loss = run(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss = loss * (sum(map(count, part)) / labelled)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        print(json.dumps({"event": "step", "loss": total, "seconds": seconds}), flush=True)


def layer_to_layer(folder, race, options):
    """The command of the peer that has its own Python environment."""
    command = [options.layer_to_layer, pathlib.Path(__file__).parent / "layer_to_layer.py", folder]
    told = dict(
        batch=race["batch"],
        micro=race["micro"],
        steps=options.steps,
        threads=options.threads,
        rate=RATE,
        decay=DECAY,
    )
    return command + [part for name, value in told.items() for part in (f"--{name}", value)]


def ours(folder, race, options, recompute, program=PROGRAM, schedule="relay"):
    model = race["preset"] if options.against else f'path = "{folder}"'
    config = folder / f"{schedule}-{recompute}.toml"
    config.write_text(f"""
model = {{ {model}, task = "{race["task"]}" }}
data = {{ train = "{folder}/data.jsonl", shuffle = false, sequence_length = {race["length"]} }}
step = {{ batch = {race["batch"]}, micro_batch = {race["micro"]}, steps = {options.steps} }}
optimizer = {{ learning_rate = {RATE}, weight_decay = {DECAY} }}
device.threads = {options.threads}
schedule = {{ kind = "{schedule}", recompute = {str(recompute).lower()} }}
""")
    return [program, "train", config, "--format", "json"]


def run(command):
    """Losses, median seconds of the steps after the first, and peak resident bytes of one process."""
    command = [str(part) for part in command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    events, errors = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{command} failed:\n{errors}")
    steps = [json.loads(line) for line in events.splitlines() if line.startswith("{")]
    steps = [event for event in steps if event["event"] == "step"]
    seconds = statistics.median(event["seconds"] for event in steps[1:])
    return [event["loss"] for event in steps], seconds, usage.ru_maxrss * 1024


def apart(function, *arguments):
    """What a function returns in a process of its own. The peak that Linux reports of a process is at
    least that of the one that started it. So the process that starts the runs imports no torch."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def race_against_torch(name, race, options):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        tokens = apart(prepare, folder, race, options.steps, True)
        peer = [sys.executable, __file__, name, "--folder", folder]
        for option in ("steps", "threads", "peer", "peer_micro"):
            peer += [f"--{option.replace('_', '-')}", getattr(options, option)]
        commands = {
            "torch": peer,
            "torch checkpointing": [*peer, "--checkpointing"],
            "torch grouped": [*peer, "--grouped"],
            "layer-to-layer": layer_to_layer(folder, race, options),
            "kept": ours(folder, race, options, False),
            "recomputing": ours(folder, race, options, True),
        }
        results = {way: [] for way in race["ways"]}
        for _ in range(options.rounds):
            for way in race["ways"]:
                results[way].append(run(commands[way]))
    base = race["ways"][0]
    for way, rounds in results.items():
        against = base
        if way == "recomputing" and "torch checkpointing" in results:
            against = "torch checkpointing"
        ratios = [peer[1] / one[1] for peer, one in zip(results[against], rounds)]
        seconds = statistics.median(one[1] for one in rounds)
        memory = statistics.median(one[2] for one in rounds)
        losses = " ".join(f"{loss:.5f}" for loss in rounds[0][0])
        print(
            f"{name:9} {way:19} {tokens / seconds:7.1f} tokens/s, {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) x {against}, "
            f"peak {memory / 2**20:.0f} MiB, losses {losses}",
            flush=True,
        )


def race_against_build(name, race, options):
    programs = {"other": options.against, "this": PROGRAM}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        tokens = prepare(folder, race, options.steps, False)
        for recompute in (False, True):
            rates = {program: [] for program in programs}
            losses = {}
            for pair in range(options.rounds):
                # The order changes from pair to pair, because the machine may drift.
                for program in sorted(programs, reverse=pair % 2 == 1):
                    command = ours(folder, race, options, recompute, programs[program])
                    losses[program], seconds, _ = run(command)
                    rates[program].append(tokens / seconds)
            ratios = [this / other for this, other in zip(rates["this"], rates["other"])]
            print(
                f"{name}, recompute = {recompute}: this {statistics.median(rates['this']):.1f} "
                f"tokens/s, other {statistics.median(rates['other']):.1f}, this ÷ other "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); "
                f"losses {losses['this']} and {losses['other']}",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("races", nargs="+", choices=RACES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peer", choices=["eager", "sdpa", "compile"], default="eager")
    parser.add_argument("--peer-micro", type=int, default=0)
    parser.add_argument("--against", type=pathlib.Path)
    parser.add_argument("--layer-to-layer", type=pathlib.Path)
    # The arguments of the peer's own process.
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--grouped", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.races:
        if options.against and "preset" not in RACES[name]:
            parser.error(f"--against needs a race with random weights, such as E; {name} has none")
        if name == "F" and not (options.folder or options.layer_to_layer):
            parser.error("F needs --layer-to-layer PYTHON: benches/layer_to_layer.py says which")
    for name in options.races:
        race = RACES[name]
        if options.folder:
            train_with_torch(options.folder, race, options)
        elif options.against:
            race_against_build(name, race, options)
        else:
            race_against_torch(name, race, options)


if __name__ == "__main__":
    main()
