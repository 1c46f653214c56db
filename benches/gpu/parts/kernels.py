"""Where the device's time goes, by kernel, in a few of the 8B's layers. Timing makes the steps slower."""

from .. import models


def run(bench):
    model, tokens, micro = models.llama(bench.flags)
    settings = bench.program.shaped(models.small_vocabulary(model), tokens, micro, layers=2)
    told = bench.program.run("kernels", settings, 3, "bench --kernels")
    if bench.flags.kind != "cuda":
        return bench.row("time by kernel", len(told.kernels), "kernels of the CPU, by rate", says="a GPU's are told by time")
    for event in told.kernels:
        bench.row(event["kernel"], 100 * event["share"], "% of all kernels", seconds=event["seconds"], launches=event["launches"])
