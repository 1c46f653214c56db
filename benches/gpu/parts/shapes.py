"""Whole shapes: Llama-3-8B's layers as deep as the host holds them, Llama-3.2-3B, the largest."""

from .. import models
from ..commands import Failed
from ..figures import figures


def llama8b(bench):
    model, tokens, micro = models.llama(bench.flags)
    settings = bench.program.shaped(model, tokens, micro)
    as_deep_as_fits(bench, "8B's layers", settings, share=0.7, wait=0.015)


def llama8b_clip(bench):
    model, tokens, micro = models.llama(bench.flags)
    settings = bench.program.shaped(model, 2 * tokens, micro, optimizer__clip_norm=1.0)
    as_deep_as_fits(bench, "8B's layers, clipped", settings, wait=0.03)


def largest(bench):
    model, tokens, micro = models.llama(bench.flags)
    as_deep_as_fits(bench, "the largest", bench.program.shaped(model, tokens // 4, micro))


def llama3b(bench):
    model, tokens, micro = models.llama(bench.flags, models.LLAMA_3B)
    speed(bench, "3B", way(bench, "3B", bench.program.shaped(model, tokens, micro)))


def as_deep_as_fits(bench, name, settings, **targets):
    settings = way(bench, name, settings)
    most = 64 if bench.flags.quick else 4096
    settings = bench.program.deepest(bench.program.holds, settings, most)
    layers, parameters = settings["model.layers"], bench.program.parameters(settings)
    figure = f"{name}: layers that {bench.flags.host_gib:g} GiB hold"
    bench.row(figure, layers, "layers", parameters=parameters)
    speed(bench, name, settings, **targets)


def way(bench, name, settings):
    """The settings of the fastest way that the program knows."""
    return list(bench.taken(name, bench.program.ways(settings)).values())[-1]


def speed(bench, name, settings, **targets):
    """A run, with fewer layers where one with as many fails: a host may have less memory than it
    says."""
    all_of_it = bench.left()
    while True:
        settings, steps = bench.program.in_time(settings, 0.9 * bench.left())
        layers, found = settings["model.layers"], bench.program.plan(settings)
        try:
            run = bench.program.run(name, settings, steps + 1)
            break
        except Failed as error:
            if layers == 1 or bench.left() < all_of_it / 3:
                raise
            settings = {**settings, "model.layers": layers - max(1, layers // 5)}
            says = f"tried again with {settings['model.layers']}"
            bench.row(f"a run of {layers} layers", f"failed: {error}", says=says)
    figures(bench, name, [run], **targets, layers=layers, parameters=found["parameters"],
            planned_device_bytes=found["device_bytes"]["total"],
            planned_host_bytes=found["host_bytes"]["total"])
