"""Where the device's time goes, by kernel, in two of the 8B's layers. Timing slows the steps."""

from .. import models


def run(bench):
    if bench.flags.kind != "cuda":
        return bench.row("time by kernel", "not run: --kind cpu")
    model, tokens, micro = models.llama(bench.flags)
    settings = bench.program.shaped(models.small_vocabulary(model), tokens, micro, layers=2)
    told = bench.program.run("kernels", settings, 3, "bench --kernels")
    for event in told.kernels:
        about = {"seconds": event["seconds"], "launches": event["launches"]}
        bench.row(event["kernel"], 100 * event["share"], "% of all kernels", **about)
