"""The rows of a shape's runs: how fast, beside a large product of the same runs, in what memory."""


def figures(bench, name, runs, share=None, wait=None, first=None, **about):
    """`share` is the least share of the product, `wait` the most exposed wait, and `first` the
    longest first step in later steps."""
    for line in runs[0].warnings:
        bench.say(f"  {line}")
    every = lambda of: [one for run in runs for one in of(run)]
    last = runs[-1].counted[-1]
    about = {"tokens": last["tokens"], "steps": len(runs[-1].counted),
             "warnings": runs[0].warnings, **about}
    flops = [one / 1e12 for one in every(lambda run: run.flops)]
    bench.median(f"{name}: tokens a second", every(lambda run: run.rates), "tokens/s", **about)
    bench.median(f"{name}: model FLOPs", flops, "TFLOP/s", **about)
    products = [run.summary.get("matmul_flops_per_second") for run in runs]
    products = [one / 1e12 for one in products if one]
    if products:
        product = bench.median(f"{name}: a large product", products, "TFLOP/s")
        shares = [one / product for one in flops]
        bench.median(f"{name}: model FLOPs / product", shares, least=share, **about)
    waits = every(lambda run: run.waits)
    bench.median(f"{name}: exposed wait", waits, "of the step", most=wait, **about)
    firsts = [run.first for run in runs]
    bench.median(f"{name}: first step / later", firsts, most=first, **about)
    held = last["device_peak_bytes"] / 1e9
    bench.row(f"{name}: device memory", held, "GB", host_rss_bytes=last["host_rss_bytes"])
