"""Training speed and memory against transformers on the same CPU, in one run, alternating.

    cargo build --release && pip install torch transformers && python benches/transformers_peer.py

GPT-2 of 12 x 512, vocabulary 8192, batch 32 x 128, micro-batches of 8, two threads each.
transformers runs eager attention, fp32, fused AdamW and gradient accumulation. Each round starts
both processes anew. The ratio is that of the median step times without the first step. The losses
of both are printed side by side.

    python benches/transformers_peer.py --against PROGRAM [PAIRS]

compares this build with another one instead, say with the one before a change: the same shape with
random weights, relay, with and without recomputation. Both run by turns; the ratio is the median of
the pairs' ratios. This needs neither torch nor transformers.
"""

import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROUNDS, STEPS, BATCH, MICRO, LENGTH, THREADS = 3, 4, 32, 8, 128, 2
RATE, DECAY = 3e-4, 0.01
PROGRAM = pathlib.Path(__file__).parent.parent / "target/release/l2l"


def prepare(folder):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=8192,
        n_positions=LENGTH,
        n_embd=512,
        n_layer=12,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    ids = torch.randint(0, 8192, (BATCH * STEPS, LENGTH)).tolist()
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"input_ids": one}) + "\n" for one in ids)
    )


def peer(folder):
    import torch
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(THREADS)
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    model.train()
    named = list(model.named_parameters())
    is_plain = lambda name: name.endswith(".bias") or ".ln_" in name
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if not is_plain(n)], "weight_decay": DECAY},
            {"params": [p for n, p in named if is_plain(n)], "weight_decay": 0.0},
        ],
        lr=RATE,
        fused=True,
    )
    lines = [json.loads(line)["input_ids"] for line in (folder / "data.jsonl").open()]
    for step in range(STEPS):
        begin = time.perf_counter()
        ids = torch.tensor(lines[step * BATCH : (step + 1) * BATCH])
        total = 0.0
        for micro in ids.split(MICRO):
            loss = model(input_ids=micro, labels=micro).loss * (len(micro) / BATCH)
            loss.backward()
            total += float(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(
            json.dumps({"event": "step", "loss": total, "seconds": time.perf_counter() - begin}),
            flush=True,
        )


def ours(folder, recompute, schedule, model, program=PROGRAM):
    config = folder / f"{schedule}-{recompute}.toml"
    config.write_text(f"""
model = {model}
data = {{ train = "{folder}/data.jsonl", shuffle = false }}
step = {{ batch = {BATCH}, micro_batch = {MICRO}, steps = {STEPS} }}
optimizer = {{ learning_rate = {RATE}, weight_decay = {DECAY} }}
device.threads = {THREADS}
schedule = {{ kind = "{schedule}", recompute = {str(recompute).lower()} }}
""")
    return [program, "train", config, "--format", "json"]


def run(command):
    """Losses, median step seconds behind the first, peak resident bytes of one process."""
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    steps = [json.loads(line) for line in process.stdout]
    steps = [event for event in steps if event["event"] == "step"]
    _, status, usage = __import__("os").wait4(process.pid, 0)
    assert status == 0, command
    seconds = [event["seconds"] for event in steps[1:]]
    waits = [event.get("exposed_wait_seconds", 0) / event["seconds"] for event in steps[1:]]
    losses = [event["loss"] for event in steps]
    return losses, statistics.median(seconds), usage.ru_maxrss * 1024, statistics.median(waits)


def product_rate():
    """FLOP/s of a large product on as many threads."""
    import torch

    torch.set_num_threads(THREADS)
    a = torch.rand(2048, 2048)
    rates = []
    for _ in range(9):
        begin = time.perf_counter()
        a @ a
        rates.append(2 * 2048**3 / (time.perf_counter() - begin))
    return statistics.median(rates)


def against(program, pairs):
    """This build and another one by turns; tokens a second, and the median of the pairs' ratios."""
    model = (
        "{ preset = 'gpt2', layers = 12, hidden = 512, heads = 8, vocabulary = 8192, "
        f"positions = {LENGTH}, dropout = 0.0 }}"
    )
    programs = {"other": program, "this": PROGRAM}
    numbers = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        lines = (
            {"input_ids": [numbers.randrange(8192) for _ in range(LENGTH)]}
            for _ in range(BATCH * STEPS)
        )
        (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for recompute in (False, True):
            rates = {name: [] for name in programs}
            losses = {}
            for pair in range(pairs):
                # Who is first changes from pair to pair: the machine may drift.
                for name in sorted(programs, reverse=pair % 2 == 1):
                    command = ours(folder, recompute, "relay", model, programs[name])
                    losses[name], seconds, *_ = run(command)
                    rates[name].append(BATCH * LENGTH / seconds)
            assert losses["other"] == losses["this"], losses
            ratios = [this / other for this, other in zip(rates["this"], rates["other"])]
            medians = {name: statistics.median(all) for name, all in rates.items()}
            print(
                f"recompute = {recompute}: this {medians['this']:.0f} tokens/s, "
                f"other {medians['other']:.0f}, this ÷ other {statistics.median(ratios):.3f} "
                f"(pairs {min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        prepare(folder)
        model = f'{{ path = "{folder}" }}'
        ways = {
            "transformers": [sys.executable, __file__, str(folder)],
            "relay": ours(folder, False, "relay", model),
            "relay, recomputing": ours(folder, True, "relay", model),
            "resident": ours(folder, False, "resident", model),
            "resident, recomputing": ours(folder, True, "resident", model),
        }
        results = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, command in ways.items():
                results[name].append(run(command))
        # 6 FLOPs a weight met by a token, and attention, causal at half; no recomputation.
        flops = 6 * (12 * 12 * 512**2 + 8192 * 512) + 6 * 12 * LENGTH * 512
        limit = product_rate()
        print(f"a large product: {limit / 1e9:.0f} GFLOP/s")
        peer_seconds = statistics.median(one[1] for one in results["transformers"])
        for name, rounds in results.items():
            _, seconds, memory, waited = (
                statistics.median(column) for column in zip(*([0, *one[1:]] for one in rounds))
            )
            rate = flops * BATCH * LENGTH / seconds
            losses = " ".join(f"{loss:.5f}" for loss in rounds[0][0])
            print(
                f"{name:24} {BATCH * LENGTH / seconds:7.0f} tokens/s, "
                f"{rate / 1e9:.0f} model GFLOP/s "
                f"({rate / limit:.2f} of the product), "
                f"{peer_seconds / seconds:.2f} x transformers, "
                f"exposed wait {waited:.3f}, peak {memory / 2**20:.0f} MiB, losses {losses}"
            )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--against", program, *pairs]:
            against(pathlib.Path(program), int(pairs[0]) if pairs else 5)
        case [folder]:
            peer(pathlib.Path(folder))
        case _:
            main()
