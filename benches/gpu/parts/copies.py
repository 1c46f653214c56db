"""What copies between host and device cost: weight slots, resident, and a run without copies."""

from .. import models


def run(bench):
    model, tokens, micro = models.llama(bench.flags)
    program, room = bench.program, 0.9 * bench.program.device_memory()
    whole = lambda settings: {**settings, **program.resident()}
    held = lambda settings: program.plan(whole(settings))["device_bytes"]["total"]
    fits = lambda settings: held(settings) < room and program.holds(whole(settings))
    shape = program.shaped(models.small_vocabulary(model), tokens, micro)
    relay, steps = program.in_time(program.deepest(fits, shape, 8), 0.9 * bench.left(), 4)
    found = bench.rounds({
        "two slots": bench.turn(relay, steps),
        "without copies": bench.turn(relay, steps, "bench --without-copies"),
        "one slot": bench.turn({**relay, "channels.weights": 1}, steps),
        "resident": bench.turn(whole(relay), steps)})
    about = {"layers": relay["model.layers"], "tokens": tokens, "steps": steps}
    seconds = {name: [tokens / run.rate for run in runs] for name, runs in found.items()}
    for name, runs in found.items():
        bench.median(f"{name}: a step", seconds[name], "s", **about)
        waits = [wait for run in runs for wait in run.waits]
        bench.median(f"{name}: exposed wait", waits, "of the step", **about)

    def ratio(figure, name, least=None, says=None):
        pairs = zip(seconds.get(name, []), seconds.get("two slots", []))
        if pairs := [one / two for one, two in pairs]:
            bench.median(figure, pairs, "x the time", least=least, says=says, **about)

    ratio("one slot / two slots", "one slot")
    ratio("time without copies / time", "without copies", 0.97, "the losses are left out, too")
    ratio("resident / relay", "resident", 0.97, "resident moves each block once a step, too")
