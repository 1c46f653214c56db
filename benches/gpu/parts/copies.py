"""What copies between host and device cost: one weight slot and two, resident, and a run without copies."""

from .. import models


def run(bench):
    model, tokens, micro = models.llama(bench.flags)
    program, room = bench.program, 0.9 * bench.program.device_memory()
    whole = lambda settings: {**settings, **program.resident()}
    fits = lambda one: program.plan(whole(one))["device_bytes"]["total"] < room and program.holds(whole(one))
    relay = program.deepest(fits, program.shaped(models.small_vocabulary(model), tokens, micro), 8)
    ways = {"two slots": {}, "without copies": {}, "one slot": {"channels.weights": 1}, "resident": program.resident()}
    relay, steps = program.in_time(relay, 0.9 * bench.left(), len(ways))
    how = lambda name: "bench --without-copies" if name == "without copies" else "bench"
    turns = {name: lambda name=name, more=more: program.run(name, {**relay, **more}, steps + 1, how(name)) for name, more in ways.items()}
    found = bench.rounds(turns)
    about = {"layers": relay["model.layers"], "tokens": tokens, "steps": steps}
    seconds = {name: [tokens / run.rate for run in runs] for name, runs in found.items()}
    for name, runs in found.items():
        bench.median(f"{name}: a step", seconds[name], "s", **about)
        bench.median(f"{name}: exposed wait", [wait for run in runs for wait in run.waits], "of the step", **about)

    def ratio(figure, name, target=None, says=None):
        pairs = [one / two for one, two in zip(seconds.get(name, []), seconds.get("two slots", []))]
        if pairs:
            bench.median(figure, pairs, "x the time", target and f">= {target}", target and (lambda is_: is_ >= target), says=says, **about)

    ratio("one slot / two slots", "one slot")
    ratio("time without copies / time", "without copies", 0.97, "the losses need copies and are left out, too")
    ratio("resident / relay", "resident", 0.97, "resident moves each block once a step, too")
