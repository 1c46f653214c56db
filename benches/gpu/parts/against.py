"""One model in l2l and in PyTorch, in turns: PyTorch all on the device, or uploading layers."""

from .. import models
from ..figures import figures
from ..peer.call import WAYS, has_torch, peer

# Bytes of a parameter in PyTorch: master, gradient and two moments in f32.
RESIDENT_BYTES = 16
# The device memory in which BERT-Large is to be faster than PyTorch.
BERT_MEMORY = "9GB"


def llama(bench):
    tries = lambda micro: [{"name": way, "micro": micro, **more} for way, more in WAYS.items()]
    goals = {"keeping": 1.15, "checkpointing": 1.6}
    layers_of_8b(bench, "8B's layers", "steps", tries, goals, share=0.7, wait=0.015, first=1.5)


def streaming(bench):
    if not has_torch(bench):
        return bench.row("PyTorch, streaming", "not run: this Python has no torch for the device")
    tries = lambda micro: [{"name": "streaming", "micro": micro}]
    layers_of_8b(bench, "streaming", "streaming", tries, {"streaming": 1.5})


def layers_of_8b(bench, name, what, tries, goals, **targets):
    """As many layers as both hold and the time allows."""
    model, tokens, micro = models.llama(bench.flags)
    model, program = models.small_vocabulary(model), bench.program
    room = 0.6 * program.device_memory()
    fits = lambda one: RESIDENT_BYTES * program.parameters(one) < room and program.holds(one, 0.8)
    settings = program.deepest(fits, program.shaped(model, tokens, micro), model["layers"])
    # A turn has two runs of l2l, and four tries of PyTorch, which begin faster.
    settings, steps = program.in_time(settings, 0.9 * bench.left(), 5)
    job = {"what": what, "model": {**model, "layers": settings["model.layers"]}, "steps": steps,
           "batch": settings["step.batch"], "tries": tries(micro)}
    against(bench, name, program.ways(settings), job, goals, **targets)


def bert(bench):
    model, tokens, micro = models.bert(bench.flags)
    settings = bench.program.shaped(model, tokens, micro)
    job = {"what": "steps", "model": model, "steps": bench.flags.steps,
           "batch": settings["step.batch"],
           "tries": [{"name": way, "micro": micro, **more} for way, more in WAYS.items()]}
    ways = bench.program.ways(settings, BERT_MEMORY)
    against(bench, "BERT-Large", ways, job, {"keeping": 1.4})


def against(bench, name, ways, job, goals, **targets):
    """Turns of each way of l2l and of PyTorch's job, and the rows of both. PyTorch takes a smaller
    micro-batch where one does not fit."""
    turns = {f"{name}: l2l {way}": bench.turn(settings, job["steps"])
             for way, settings in bench.taken(name, ways).items()}
    ours = list(turns)
    if has_torch(bench):
        tries = [{**one, "shrinks": True} for one in job["tries"]]
        turns["PyTorch"] = lambda label: peer(bench, name, **{**job, "tries": tries})
    else:
        bench.row(f"{name}: PyTorch", "not run: this Python has no torch for the device")
    found = bench.rounds(turns)
    about = {"layers": job["model"]["layers"]}
    ours = {way: found[way] for way in ours if way in found}
    for way, runs in ours.items():
        figures(bench, way, runs, **targets, **about, loss=runs[0].steps[-1]["loss"])
    best = max(ours, key=lambda way: ours[way][0].rate, default=None)
    for one in job["tries"]:
        way = one["name"]
        theirs = [told[way] for told in found.get("PyTorch", [])]
        beside(bench, f"{name}: PyTorch {way}", ours.get(best, []), theirs, goals.get(way), about)


def beside(bench, figure, ours, theirs, goal, about):
    """The rows of a way of PyTorch, and of ours / PyTorch by round."""
    ran = [told for told in theirs if "rate" in told]
    for told in theirs[:1] if not ran else []:
        bench.row(figure, f"failed: {told['error']}", **about)
    if ran:
        more = {key: ran[-1][key] for key in ("micro", "loss", "peak_bytes", "reserved_bytes")}
        bench.median(figure, [told["rate"] for told in ran], "tokens/s", **more, **about)
    pairs = [run.rate / told["rate"] for run, told in zip(ours, theirs) if "rate" in told]
    if pairs:
        bench.median(f"{figure}: l2l is faster by", pairs, "x", least=goal, **about)
