"""The paper's race: BERT-Large, 256 sequences of 128 a step, on a card of 16 GiB.

PyTorch is capped at 16 GiB and takes its best micro-batch and way. l2l has `device.memory` of 16
GiB and of 4 GiB. The abstract of the paper claims 40 % more tokens a second in 45 % less memory.
"""

from .. import models
from ..figures import figures
from ..peer.call import WAYS, has_torch, peer
from ..program import GIB

# The first is PyTorch's, too, and has the goals.
CEILINGS = {"16GiB": 16 * GIB, "4GiB": 4 * GIB}
FASTER = {"16GiB": 1.4}
SMALLER = 0.55
# A V100 of 16 GB: what its products reach in f16, its link of PCIe 3, its host's memory.
V100 = ["--tflops", "90", "--link-gbps", "12", "--host-gbps", "60"]


def run(bench):
    model, tokens, _ = models.bert(bench.flags)
    sizes = [2, 4] if bench.flags.quick else [64, 128, 256, 32]
    turns, left = {}, bench.left()
    for index, ceiling in enumerate(CEILINGS, 1):
        # A quarter of the time for the trials of each ceiling, and a quarter for PyTorch's.
        least_left = left * (1 - index / 4)
        if best := best_of_ours(bench, model, tokens, sizes, ceiling, least_left):
            turns[f"l2l in {ceiling}"] = bench.turn(best, bench.flags.steps)
    job = {"what": "steps", "model": model, "batch": tokens // model["length"],
           "ceiling": CEILINGS["16GiB"]}
    if has_torch(bench):
        if fastest := best_of_peer(bench, sizes, job):
            job |= {"tries": [fastest], "steps": bench.flags.steps}
            turns["PyTorch"] = lambda label: peer(bench, "race", **job)[fastest["name"]]
    else:
        bench.row("PyTorch in 16GiB", "not run: this Python has no torch for the device")
    found = bench.rounds(turns)
    theirs = [told for told in found.pop("PyTorch", []) if "rate" in told]
    if theirs:
        bench.median(f"PyTorch in 16GiB, {fastest['name']}", [told["rate"] for told in theirs],
                     "tokens/s", reserved_bytes=theirs[-1]["reserved_bytes"])
    for name, runs in found.items():
        figures(bench, name, runs)
        compare(bench, name, runs, theirs)
    forecast(bench, model, tokens)


def compare(bench, name, ours, theirs):
    pairs = list(zip(ours, theirs))
    rates = [run.rate / told["rate"] for run, told in pairs]
    if rates:
        goal = FASTER.get(name.removeprefix("l2l in "))
        bench.median(f"{name} / PyTorch: tokens a second", rates, "x", least=goal)
    held = [run.counted[-1]["device_peak_bytes"] / told["reserved_bytes"]
            for run, told in pairs if told["reserved_bytes"]]
    if held:
        bench.median(f"{name} / PyTorch: device memory", held, "x", most=SMALLER)


def best_of_ours(bench, model, tokens, sizes, ceiling, least_left):
    """The settings of the fastest micro-batch and way under a ceiling, by short trials."""
    tried = {}
    for size in sizes:
        shape = bench.program.shaped(model, tokens, size, device__memory=ceiling)
        for way, settings in reversed(bench.program.ways(shape, ceiling).items()):
            if tried and bench.left() < least_left:
                break
            if bench.program.refuses(settings) or not bench.program.plan(settings)["fits"]:
                continue
            name = f"{way}, micro-batches of {size}"
            told = bench.attempt(f"{name}, in {ceiling}", bench.turn(settings, 1))
            if told:
                tried[name] = (told.rate, settings)
    says = ", ".join(f"{name}: {rate:,.0f}" for name, (rate, _) in tried.items())
    met = None if tried else False
    bench.row(f"l2l in {ceiling}: trials", says or "no micro-batch ran", "tokens/s", met=met)
    return max(tried.values(), key=lambda one: one[0])[1] if tried else None


def best_of_peer(bench, sizes, job):
    """PyTorch's fastest try in 16 GiB. All tries are made in one process."""
    tries = [{"name": f"{way}, micro-batches of {size}", "micro": size, **more}
             for way, more in WAYS.items() for size in sizes]
    found = peer(bench, "trials of the race", bench.left() / 2, **job, tries=tries, steps=2)
    rates = {name: told["rate"] for name, told in found.items() if "rate" in told}
    says = ", ".join(f"{name}: {rate:,.0f}" for name, rate in rates.items())
    bench.row("PyTorch in 16GiB: trials", says or f"failed: {found}", "tokens/s")
    return max(tries, key=lambda one: rates.get(one["name"], 0)) if rates else None


def forecast(bench, model, tokens):
    """What virtual time says of a V100, on which the paper measured."""
    quarter = tokens // model["length"] // 4
    shape = bench.program.shaped(model, tokens, quarter) | bench.program.device("cpu", "f16")
    for way, settings in bench.program.ways(shape, "16GiB").items():
        if not bench.program.refuses(settings):
            told = bench.program.plan(settings, "--forecast", *V100)
            rate, held = tokens / told["step_seconds"], told["device_bytes"]["total"]
            figure = f"l2l on a V100, in virtual time, {way}"
            bench.row(figure, rate, "tokens/s", rates=V100, planned_device_bytes=held)
