"""The same model in l2l and in PyTorch, in turns: each on its own, and PyTorch in a loop that uploads layers."""

import statistics

from .. import models
from ..figures import figures
from ..peer.call import WAYS, has_torch, peer

# The settings in which l2l competes. One that the program does not know is left out.
OURS = {"recomputing": {"schedule.recompute": "true"}, "kept where it fits": {"schedule.recompute": "auto"}}
# Bytes of a parameter in PyTorch: master, gradient and two moments in f32.
RESIDENT_BYTES = 16


def llama(bench):
    model, tokens, micro = models.llama(bench.flags)
    settings, steps, model = as_deep_as_both(bench, models.small_vocabulary(model), tokens, micro)
    tries = [{"name": way, "micro": micro, "shrinks": True, **more} for way, more in WAYS.items()]
    goals = {"keeping": 1.15, "checkpointing": 1.6}
    against(bench, "8B's layers", model, settings, steps, tries, goals, share=0.7, wait=0.015, first=1.5)


def bert(bench):
    model, tokens, micro = models.bert(bench.flags)
    tries = [{"name": way, "micro": micro, "shrinks": True, **more} for way, more in WAYS.items()]
    settings = bench.program.shaped(model, tokens, micro)
    against(bench, "BERT-Large", model, settings, bench.flags.steps, tries, {"keeping": 1.4})


def streaming(bench):
    if not has_torch(bench):
        return bench.row("PyTorch, streaming", "not run: this Python has no torch for the device")
    model, tokens, micro = models.llama(bench.flags)
    settings, steps, model = as_deep_as_both(bench, models.small_vocabulary(model), tokens, micro)
    tries = [{"name": "streaming", "micro": micro, "shrinks": True}]
    against(bench, "streaming", model, settings, steps, tries, {"streaming": 1.5}, what="streaming")


def as_deep_as_both(bench, model, tokens, micro):
    """As many layers as both hold and the time allows: settings, steps, and the model."""
    program = bench.program
    room = 0.6 * program.device_memory()
    fits = lambda one: RESIDENT_BYTES * program.parameters(one) < room and program.holds(one, 0.8)
    settings = program.deepest(fits, program.shaped(model, tokens, micro), model["layers"])
    # A round has two runs of l2l, and four of PyTorch that start faster.
    settings, steps = program.in_time(settings, 0.9 * bench.left(), 5)
    return settings, steps, {**model, "layers": settings["model.layers"]}


def against(bench, name, model, settings, steps, tries, goals, what="steps", **targets):
    ways = bench.taken(name, {way: {**settings, **more} for way, more in OURS.items()})
    turns = {f"{name}: l2l {way}": lambda way=way, one=one: bench.program.run(f"{name}, {way}", one, steps + 1)
             for way, one in ways.items()}
    ours = list(turns)
    if has_torch(bench):
        job = {"model": model, "batch": settings["step.batch"], "steps": steps}
        turns["PyTorch"] = lambda: peer(bench, name, what, tries, **job)
    else:
        bench.row(f"{name}: PyTorch", "not run: this Python has no torch for the device")
    found = bench.rounds(turns)
    about = {"layers": model["layers"]}
    for way in ours:
        if way in found:
            figures(bench, way, found[way], **targets, **about, loss=found[way][0].steps[-1]["loss"])
    best = max((way for way in ours if way in found), key=lambda way: statistics.median(run.rate for run in found[way]), default=None)
    for one in tries:
        beside(bench, name, one["name"], found.get("PyTorch", []), found.get(best, []), goals.get(one["name"]), best, **about)


def beside(bench, name, way, theirs, ours, goal, best, **about):
    """The rows of a way of PyTorch, and of ours / PyTorch by round."""
    ran = [told[way] for told in theirs if "rate" in told[way]]
    if not ran:
        why = theirs[0][way]["error"] if theirs else "not run"
        return bench.row(f"{name}: PyTorch {way}", f"failed: {why}", **about) if theirs else None
    more = {key: ran[-1][key] for key in ("micro", "loss", "peak_bytes", "reserved_bytes")}
    bench.median(f"{name}: PyTorch {way}", [one["rate"] for one in ran], "tokens/s", **more, **about)
    pairs = [run.rate / told[way]["rate"] for run, told in zip(ours, theirs) if "rate" in told[way]]
    if pairs:
        bench.median(f"{name}: l2l / PyTorch {way}", pairs, "x", goal and f">= {goal}", goal and (lambda is_: is_ >= goal), way=best, **about)
