"""The paper's race: BERT-Large, 256 sequences of 128 a step, on a card of 16 GiB.

PyTorch is capped at 16 GiB and takes its best micro-batch and way. l2l has `device.memory` of 16 GiB and
of 4 GiB. The abstract of the paper claims 40 % more tokens a second in 45 % less memory.
"""

import statistics

from .. import models
from ..figures import figures
from ..program import GIB
from ..peer.call import WAYS, has_torch, peer
from .against import OURS

CEILINGS = ["16GiB", "4GiB"]
FASTER, SMALLER = 1.4, 0.55
# A V100 of 16 GB: what its products reach in f16, its link of PCIe 3, its host's memory.
V100 = ["--tflops", "90", "--link-gbps", "12", "--host-gbps", "60"]


def run(bench):
    model, tokens, _ = models.bert(bench.flags)
    sizes = [2, 4] if bench.flags.quick else [64, 128, 256, 32]
    job = {"model": model, "batch": tokens // model["length"], "ceiling": 16 * GIB}
    turns, half = {}, bench.left() / 2
    for ceiling in CEILINGS:
        best = best_of_ours(bench, model, tokens, sizes, ceiling, half)
        if best:
            name = f"l2l in {ceiling}, micro-batches of {best['step.micro_batch']}"
            turns[name] = lambda name=name, best=best: bench.program.run(name, best, bench.flags.steps + 1)
    ours = list(turns)
    best = best_of_peer(bench, sizes, job) if has_torch(bench) else None
    if best:
        turns["PyTorch"] = lambda: peer(bench, "race", "steps", [best], **job, steps=bench.flags.steps)[best["name"]]
    else:
        bench.row("PyTorch in 16GiB", "not run: this Python has no torch for the device, or no try ran")
    found = bench.rounds(turns)
    theirs = [told for told in found.get("PyTorch", []) if "rate" in told]
    if theirs:
        reserved = theirs[-1]["reserved_bytes"]
        bench.median(f"PyTorch in 16GiB, {best['name']}", [told["rate"] for told in theirs], "tokens/s", reserved_bytes=reserved)
    for name in ours:
        if name in found:
            figures(bench, name, found[name])
            compare(bench, name, found[name], theirs, judged="in 16GiB" in name)
    forecast(bench, model, tokens)


def compare(bench, name, ours, theirs, judged):
    pairs = [(run, told) for run, told in zip(ours, theirs)]
    if not pairs:
        return
    rates = [run.rate / told["rate"] for run, told in pairs]
    goal = (f">= {FASTER}", lambda is_: is_ >= FASTER) if judged else (None, None)
    bench.median(f"{name} / PyTorch: tokens a second", rates, "x", *goal)
    sizes = [run.counted[-1]["device_peak_bytes"] / told["reserved_bytes"] for run, told in pairs if told["reserved_bytes"]]
    if sizes:
        bench.median(f"{name} / PyTorch: device memory", sizes, "x", f"<= {SMALLER}", lambda is_: is_ <= SMALLER)


def best_of_ours(bench, model, tokens, sizes, ceiling, least_left):
    """The settings of the fastest micro-batch and way under a ceiling, by short trials."""
    tried = {}
    for way, more in reversed(OURS.items()):
        for size in sizes:
            settings = {**bench.program.shaped(model, tokens, size, device__memory=ceiling), **more}
            if tried and bench.left() < least_left:
                break
            if bench.program.refuses(settings) or not bench.program.plan(settings)["fits"]:
                continue
            told = bench.attempt(f"trial in {ceiling}, {way}, {size}", bench.program.run, f"trial in {ceiling}", settings, 2)
            if told:
                tried[way, size] = (told.rate, settings)
    if not tried:
        return bench.row(f"l2l in {ceiling}", "failed: no micro-batch ran", met=False)
    bench.row(f"l2l in {ceiling}: trials", ", ".join(f"{way} {size}: {rate:,.0f}" for (way, size), (rate, _) in tried.items()), "tokens/s")
    return max(tried.values(), key=lambda one: one[0])[1]


def best_of_peer(bench, sizes, job):
    """PyTorch's fastest try in 16 GiB, all tries in one process."""
    tries = [{"name": f"{way}, micro-batches of {size}", "micro": size, **more} for way, more in WAYS.items() for size in sizes]
    found = peer(bench, "trials of the race", "steps", tries, **job, steps=2, limit=bench.left() / 2)
    rates = {one["name"]: found[one["name"]]["rate"] for one in tries if "rate" in found[one["name"]]}
    says = ", ".join(f"{name}: {rate:,.0f}" for name, rate in rates.items())
    bench.row("PyTorch in 16GiB: trials", says or next(iter(found.values()))["error"], "tokens/s")
    return max((one for one in tries if one["name"] in rates), key=lambda one: rates[one["name"]], default=None)


def forecast(bench, model, tokens):
    """What virtual time says of a V100, on which the paper measured."""
    settings = {**bench.program.shaped(model, tokens, tokens // model["length"] // 4), **bench.program.device("cpu", "f16")}
    told = bench.attempt("l2l on a V100, in virtual time", bench.program.plan, settings, "--forecast", *V100)
    if told:
        bench.row("l2l on a V100, in virtual time", tokens / told["step_seconds"], "tokens/s", rates=V100)
