"""Whole models against PyTorch's in float64, relay against resident, features against the CPU.

Every training is tiny, so many share the device at once.
"""

import json
import math
import pathlib

from .. import models
from ..commands import Failed

GOLDENS = pathlib.Path(__file__).resolve().parents[3] / "tests/goldens"
# The most that losses and norms may be off. Norms are relative; in 16 bits losses above 1 are, too.
LOSS_OFF = {"f32": 2e-5, "bf16": 5e-2, "f16": 1e-2}
NORM_OFF = {"f32": 1e-4, "bf16": 5e-2, "f16": 1e-2}
# Seconds of one training. On an H100 all of them took 31 s: one that takes longer hangs.
LIMIT = {"cuda": 100, "cpu": math.inf}
# Steps of a golden: roundings to 16 bits grow from step to step.
STEPS = {"f32": None, "bf16": 2, "f16": 2}
# Families that a GPU refuses.
ON_THE_CPU_ALONE = ["gemma2"]
# Scores of these have no factor and are sharp: 16 bits change the norms of so small a model by more than NORM_OFF. Tests
# compare them with PyTorch's own 16 bits.
IN_F32_ALONE = ["gemma4_text"]
# Layers keep their activations on the device, all of a model as small as these.
KEPT = {"schedule.recompute": "auto", "device.memory": "2GiB"}
# What can be trained in other ways, each against the CPU in f32.
FEATURES = {
    "dropout": {"model.dropout": 0.1},
    "saved activations": {"schedule.recompute": "false"},
    "attention recomputed": {"schedule.recompute": "attention"},
    "kept layers": KEPT,
    "gpipe": {"schedule.kind": "gpipe"},
    "groups": {"parallel.groups": 3},
    "muon": {"optimizer.kind": "muon"},
    "clipped": {"optimizer.clip_norm": 0.5},
    "norms alone": {"train.only": '["norm"]'},
    "LoRA": {"train.lora.rank": 4},
    "LoRA on NF4": {"train.lora.rank": 4, "train.base": "nf4"},
    "LoRA on int8": {"train.lora.rank": 4, "train.base": "int8"},
    "NEFTune, smoothed labels": {"train.neftune_alpha": 5, "train.label_smoothing": 0.1},
}
# Larger shapes.
WIDTHS = {"hidden": 256, "intermediate": 512, "vocabulary": 1000, "length": 128}
WIDE = {"llama of 3 x 256": {**models.TOY_LLAMA, **WIDTHS},
        "bert of 3 x 256": {**models.TOY_BERT, **WIDTHS}}


def run(bench):
    # Goldens of trainings: others hold, for example, codes of quantised weights, or embeddings.
    paths = sorted(GOLDENS.glob("*/golden.json"))
    goldens = {path.parent.name: json.loads(path.read_text()) for path in paths}
    goldens = {name: golden for name, golden in goldens.items() if "float64" in golden}
    if bench.flags.quick:
        # The logic is tried on some; the project's tests train all of them on the CPU.
        goldens = dict(list(goldens.items())[::4])
    if not goldens:
        bench.row("goldens", "missing: no tests/goldens beside benches", met=False)
    dtypes = list(dict.fromkeys(["f32", bench.flags.dtype]))
    jobs = []
    for dtype in dtypes:
        jobs += [(bench, check_golden, *golden, dtype) for golden in goldens.items()]
        jobs += [(bench, compare, name, model, dtype, {}) for name, model in WIDE.items()]
    toy = models.TOY_LLAMA
    jobs += [(bench, compare, name, toy, "f32", more) for name, more in FEATURES.items()]
    ended = bench.commands.side_by_side(attempt, jobs, bench.program.at_once)
    late = [f"{job[2]} in {job[4]}" for job, one in zip(jobs, ended) if one is None]
    if late:
        bench.row("not compared for lack of time", ", ".join(late))
    ended = [one for one in ended if one is not None]
    bench.row("comparisons", len(ended), "of models and features", target="none off",
              met=all(ended))


def attempt(bench, what, name, *arguments):
    """True if a comparison is within its tolerance."""
    try:
        return what(bench, name, *arguments)
    except Failed as error:
        bench.failed(name, error)
        return False


def settings_of(bench, name, golden, dtype):
    folder = GOLDENS / name
    settings = {**bench.program.device(dtype=dtype), "model.path": folder,
                "data.train": folder / "data.jsonl", "data.shuffle": "false",
                "step.batch": golden["batch"], "step.micro_batch": 2,
                "optimizer.learning_rate": golden["learning_rate"],
                "optimizer.weight_decay": golden["weight_decay"]}
    if golden["clip_norm"] is not None:
        settings["optimizer.clip_norm"] = golden["clip_norm"]
    if name == "long":
        settings |= {"data.sequence_length": 4200, "step.chunk_positions": 2048}
    if dtype == "f16":
        # With the default some gradients are infinite at first, and steps are skipped.
        settings["loss_scale.initial"] = 256
    return settings


def check_golden(bench, name, golden, dtype):
    figure = f"golden {name} in {dtype}"
    config = json.loads((GOLDENS / name / "config.json").read_text())
    config = config.get("text_config", config)
    if bench.flags.kind == "cuda" and config["model_type"] in ON_THE_CPU_ALONE:
        bench.row(figure, "not run: l2l trains it on the CPU alone")
        return True
    width = next(config[key] for key in ("hidden_size", "n_embd", "dim") if key in config)
    if dtype != "f32" and width % 2:
        bench.row(figure, f"not run: {dtype} takes even widths, and this one is {width}")
        return True
    if dtype != "f32" and config["model_type"] in IN_F32_ALONE:
        bench.row(figure, f"not run: {dtype} changes its norms too much")
        return True
    losses, norms = (golden["float64"][of][:STEPS[dtype]] for of in ("losses", "norms"))
    settings = settings_of(bench, name, golden, dtype)
    ways = {"relay": {"schedule.recompute": "true"},
            "resident": {**bench.program.resident(), "schedule.recompute": "false"},
            "kept layers": KEPT}
    if name == "long":
        ways["attention recomputed"] = {"schedule.recompute": "attention", "step.micro_batch": 1}
    return train(bench, figure, dtype, settings, ways, losses, norms)


def compare(bench, name, model, dtype, more):
    """Larger shapes on random data, and features: the losses of the CPU, which are f32's."""
    settings = {**bench.program.shaped(model, 8 * model["length"], 3), "step.seed": 7, **more}
    if bench.program.refuses(settings):
        bench.row(name, f"not run: {bench.program.refuses(settings)}")
        return True
    on_cpu = {**settings, **bench.program.device("cpu", "f32")}
    steps = bench.program.run(f"{name}, cpu", on_cpu, 4, "train").steps
    losses, norms = ([step[of] for step in steps] for of in ("loss", "grad_norm"))
    ways = {"relay": {}} if more else {"relay": {}, "resident": bench.program.resident()}
    settings |= bench.program.device(dtype=dtype)
    return train(bench, f"{name} in {dtype}", dtype, settings, ways, losses, norms)


def train(bench, figure, dtype, settings, ways, losses, norms):
    """Rows of how far the losses and norms of each way are off, and if all have the same bits."""
    digests, fine = {}, True
    for way, more in ways.items():
        if way == "kept layers" and bench.program.refuses({**settings, **more}):
            continue
        name, of_way = f"{figure}, {way}", {**settings, **more}
        limit = LIMIT[bench.flags.kind]
        run = bench.program.run(name, of_way, len(losses), "train", limit)
        digests[way] = run.digest
        fine &= judge(bench, name, dtype, run, losses, norms)
    # One sequence a micro-batch adds in another order.
    same = {digest for way, digest in digests.items() if way != "attention recomputed"}
    if len(digests) > 1:
        met = len(same) == 1 and None not in same
        bench.row(f"{figure}, relay == resident", "the same bits" if met else "other bits",
                  target="the same bits", met=met, digests=digests, detail=True)
        fine &= met
    return fine


def judge(bench, figure, dtype, run, losses, norms):
    most_loss, most_norm = LOSS_OFF[dtype], NORM_OFF[dtype]
    pairs = lambda of, right: [(step[of], one) for step, one in zip(run.steps, right)]
    # A loss that is no number is null in JSON; a step that is skipped has no norm.
    off = lambda is_, one, of: math.inf if is_ is None else abs(is_ - one) / of
    scale = lambda one: 1 if dtype == "f32" else max(1, abs(one))
    loss = max(off(is_, one, scale(one)) for is_, one in pairs("loss", losses))
    norm = max(off(is_, one, abs(one)) for is_, one in pairs("grad_norm", norms))
    met = len(run.steps) == len(losses) and loss < most_loss and norm < most_norm
    target = f"< {most_loss:g}, norms < {most_norm:g}"
    bench.row(figure, loss, "losses off", target=target, met=met, norms_off=norm, detail=True,
              command=None if met else run.argv)
    return met
