"""The rows of a shape's runs: how fast, beside a large product of the same runs, and what it takes."""

import statistics


def figures(bench, name, runs, share=None, wait=None, first=None, **about):
    """`share` is the least share of the product, `wait` the most exposed wait, and `first` the longest
    first step in later steps."""
    every = lambda of: [one for run in runs for one in of(run)]
    last = runs[-1].counted[-1]
    about = {"tokens": last["tokens"], "steps": len(runs[-1].counted), "whole": runs[-1].status == 0, **about}
    bench.median(f"{name}: tokens a second", every(lambda run: run.rates), "tokens/s", **about)
    bench.median(f"{name}: model FLOPs", [one / 1e12 for one in every(lambda run: run.flops)], "TFLOP/s", **about)
    products = [run.summary["matmul_flops_per_second"] for run in runs if run.summary.get("matmul_flops_per_second")]
    if products:
        product = bench.median(f"{name}: a large product", [one / 1e12 for one in products], "TFLOP/s")
        shares = [one / 1e12 / product for one in every(lambda run: run.flops)]
        bench.median(f"{name}: model FLOPs / product", shares, "", share and f">= {share}", share and (lambda is_: is_ >= share), **about)
    bench.median(f"{name}: exposed wait", every(lambda run: run.waits), "of the step", wait and f"<= {wait}",
                 wait and (lambda is_: is_ <= wait), **about)
    firsts = [run.steps[0]["seconds"] / statistics.median(step["seconds"] for step in run.counted) for run in runs]
    bench.median(f"{name}: first step / later", firsts, "", first and f"<= {first}", first and (lambda is_: is_ <= first))
    bench.row(f"{name}: device memory", last["device_peak_bytes"] / 1e9, "GB", host_rss_bytes=last["host_rss_bytes"])
