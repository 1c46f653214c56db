"""One command for a machine with an NVIDIA GPU: the device checked, then measured, beside PyTorch.

    python3 benches/gpu.py [--program PATH] [--quick] [--part NAME ...] [--out DIR]

It needs the program (--program, else the environment's L2L, else target/release/l2l) and this folder's
tests/goldens; PyTorch (2.4 or newer), where this Python has it with CUDA, is the peer and tells the rate of
a large product, too. Neither cargo nor network. Each part is a process of its own that ends by itself within
--limit seconds (560), so that one which fails or hangs costs no other; what is measured goes to DIR/gpu.json
as it comes, run after run, and a table is printed at the end. Parts, all of them when none is named:

    check           kernels against the CPU's; goldens; relay against resident; the CPU's losses and norms
    product         a large matrix product: in bursts, and for ten seconds without a pause
    copies          one weight slot and two; relay against resident; time without copies / time
    kernels         how long each kernel takes in four of the 8B's layers
    memory          the driver's own count of device memory, against the plan
    llama8b         layers of Llama-3-8B's shape, as many as --host-gib hold, 64k tokens a step
    llama8b_clip    the same with clip_norm, 128k tokens a step
    llama3b, bert   Llama-3.2-3B's shape at 64k tokens; BERT-Large at a batch of 256
    largest         the deepest model of the 8B's layers that --host-gib hold
    peer_resident   the same model in PyTorch, all on the device, recomputing
    peer_streaming  and streamed layer by layer from the host in a plain loop
    race            BERT-Large under 16 GiB each, the best micro-batch each
    peers           the last three

--dtype (bf16; f32 with --kind cpu) is the device's and the peer's: f16 on a V100 or a T4, which have no bf16.
Targets of speed are those of bf16 and judged with it alone. check looks at f32, too, whatever it is. --kind cpu
--quick tries all of the logic at toy sizes where there is no GPU: its figures mean nothing.
Rows are printed as they come. A peer that fails costs none of our own rows. Where the host turns out to have
less memory than it says, a run is tried again with fewer layers.
--set KEY=VALUE goes to the program, say device.cuda_libraries. Medians of steps (the first not counted) or
of alternating rounds, with the least and the most of them. Depths and steps are cut where a short trial
says that a part would not end in time: the row says how many there were.
"""

import argparse
import datetime
import importlib.util
import json
import math
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve()
GOLDENS = HERE.parent.parent / "tests/goldens"
BEGIN = time.monotonic()
GIB = 1 << 30
# The most that losses and norms may be off; norms are relative, in 16 bits losses above 1 are, too.
LOSS_OFF, NORM_OFF = {"f32": 2e-5, "bf16": 5e-2, "f16": 1e-2}, {"f32": 1e-4, "bf16": 5e-2, "f16": 1e-2}
# Steps of a golden: roundings to 16 bits grow from step to step.
GOLDEN_STEPS = {"f32": None, "bf16": 2, "f16": 2}
CEILING = 16 * GIB
# Seconds that a plan or a look at the machine may take.
PATIENCE = 120

# What a model is to us and to the peer.
LLAMA_8B = {"family": "llama", "preset": "llama-7b", "hidden": 4096, "intermediate": 14336, "heads": 32,
            "kv_heads": 8, "vocabulary": 128256, "length": 2048, "layers": 32}
LLAMA_3B = {**LLAMA_8B, "preset": "llama-1b", "hidden": 3072, "intermediate": 8192, "heads": 24, "layers": 28}
BERT = {"family": "bert", "preset": "bert-large", "hidden": 1024, "intermediate": 4096, "heads": 16, "kv_heads": 16, "vocabulary": 30522,
        "length": 128, "layers": 24}
TOY = {"hidden": 64, "intermediate": 128, "heads": 4, "vocabulary": 512, "length": 32, "layers": 3}


class Failed(Exception):
    """A run that told nothing: why."""


# Rows, as a part prints them.

def row(figure, value, unit="", spread=None, target=None, met=None, **more):
    print(json.dumps({"figure": figure, "value": value, "unit": unit, "spread": spread, "target": target,
                      "met": met, **more}), flush=True)


def median_row(figure, values, unit="", target=None, is_met=None, **more):
    """A row of the median, with the least and the most."""
    middle = statistics.median(values)
    judged = is_met(middle) if is_met and judges() else None
    row(figure, middle, unit, [min(values), max(values), len(values)], target, judged, **more)
    return middle


def judges():
    return ARGS.kind == "cuda" and ARGS.dtype == "bf16" and not ARGS.quick


def left():
    """Seconds until the part must have ended."""
    return ARGS.limit - 20 - (time.monotonic() - BEGIN)


# The program.

def command(what, settings, *more):
    # All but training starts from the defaults: an empty config, in place of the built-in one.
    empty = [] if what.startswith("train ") else [os.devnull]
    arguments = [ARGS.program, *what.split(), *empty, "--format", "json", *more]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    return arguments + [part for one in ARGS.set for part in ("--set", one)]


def on_device(kind=None, dtype=None):
    kind = kind or ARGS.kind
    settings = {"device.kind": kind, "device.dtype": dtype or ARGS.dtype}
    if kind == "cuda" and not any(one.startswith("device.cuda_libraries=") for one in ARGS.set):
        wheels = importlib.util.find_spec("nvidia")
        if wheels and wheels.submodule_search_locations:
            settings["device.cuda_libraries"] = list(wheels.submodule_search_locations)[0]
    return settings


def shaped(model, tokens, micro, layers=None, **more):
    """Settings of a step of so many tokens of a model."""
    found = {"model.preset": model["preset"], "model.dropout": 0, "model.layers": layers or model["layers"],
             "model.hidden": model["hidden"], "model.intermediate": model["intermediate"], "model.heads": model["heads"],
             "model.kv_heads": model["kv_heads"], "model.vocabulary": model["vocabulary"],
             "model.positions": max(model["length"], 512), "data.train": "random", "data.sequence_length": model["length"],
             "step.batch": tokens // model["length"], "step.micro_batch": micro, "schedule.recompute": "true"}
    return {**on_device(), **found, **{key.replace("__", "."): value for key, value in more.items()}}


def objects(text):
    """The JSON objects of its lines. A line that was cut off, as a killed program leaves it, is none."""
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return [one for one in found if isinstance(one, dict)]


def called(arguments, seconds, **more):
    """The status of a program, its JSON lines, and what it says on standard error. One that takes longer is killed:
    its status is then none, and the lines that it had written are there."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", **more)
    try:
        out, errors = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        return None, objects(out), f"it did not end within {seconds:.0f} s: {errors.strip()[-1500:]}"
    return process.returncode, objects(out), errors.strip()[-1500:]


def show_warnings(says):
    """What makes a run slower than it could be."""
    for line in dict.fromkeys(says.splitlines()):
        if line.startswith("warning: "):
            print(line, flush=True)


def plan(settings, *more):
    status, told, says = called(command("plan", settings, *more), PATIENCE)
    if status != 0 or not told:
        raise Failed(f"plan: {says}")
    return told[-1]


def ours(settings, steps, what="bench", watch=None):
    """Runs the program: its steps, its summary if it came to it, and how long all took."""
    begin, events = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        if what == "train":
            config = pathlib.Path(folder) / "run.toml"
            config.write_text("")
            what = f"train {config}"
        arguments = command(what, {**settings, "step.steps": steps})
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace")
        late = threading.Timer(max(left(), 1), process.terminate)
        late.start()
        watcher = watch and threading.Thread(target=watch, args=(process,))
        if watcher:
            watcher.start()
        for line in process.stdout:
            events += objects(line)
        status = process.wait()
        late.cancel()
        if watcher:
            watcher.join()
        errors.seek(0)
        told = errors.read().strip()
        show_warnings(told)
    all_steps = [event for event in events if event["event"] == "step"]
    summary = next((event for event in events if event["event"] == "summary"), {})
    if (status and len(all_steps) < 2) or not all_steps:
        raise Failed(f"status {status}: {told[-1500:]} (l2l {' '.join(arguments[1:])})")
    counted = all_steps[1:] or all_steps
    kernels = [event for event in events if event["event"] == "kernel"]
    return {"all": all_steps, "counted": counted, "summary": summary, "kernels": kernels, "wall": time.monotonic() - begin, "status": status,
            "rates": [step["tokens"] / step["seconds"] for step in counted],
            "waits": [step["exposed_wait_seconds"] / step["seconds"] for step in counted]}


def flops_a_token(run):
    summary = run["summary"]
    if not summary.get("tokens_per_second"):
        return None
    return summary["model_flops_per_second"] / summary["tokens_per_second"]


def has_torch():
    """Whether the peer can run on the device that is asked for."""
    try:
        import torch
    except ImportError:
        return False
    return ARGS.kind == "cpu" or torch.cuda.is_available()


def product_rates(run=None):
    """FLOP/s of a large product of the device's dtype, here and now, by who tells it."""
    if ARGS.kind == "cpu":
        return {"l2l": run["summary"]["matmul_flops_per_second"]} if run and run["summary"] else {}
    found = {"l2l": (machine().get("gpu_rates") or {}).get("matmul_flops_per_second")}
    if has_torch():
        found["PyTorch"] = statistics.median(peer({"what": "product"}).get("rates") or [0])
    return {who: rate for who, rate in found.items() if rate}


def device_memory():
    """Bytes of the device; of the host, a share of what is free, where that is the device."""
    if ARGS.kind == "cpu":
        return ARGS.host_gib * GIB / 2
    gpus = machine().get("gpus") or []
    if gpus:
        return gpus[0]["memory_bytes"]
    return int(smi("--query-gpu=memory.total").splitlines()[0]) << 20


def machine():
    """What `l2l doctor` says; nothing if it does not end."""
    _, told, _ = called(command("doctor", on_device()), PATIENCE)
    return next((event for event in told if event.get("event") == "doctor"), {})


# How deep, and for how long.

def deepest(fits, limit=4096):
    """The most layers that fit."""
    least, most = 0, 1
    while most <= limit and fits(most):
        least, most = most, 2 * most
    if not least:
        raise Failed("not one layer fits: raise --host-gib, or see why `l2l plan` refuses it")
    most = min(most, limit + 1)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def device_bytes(settings):
    return plan(settings)["device_bytes"]["total"]


def holds(settings, share=1.0):
    """Whether a share of --host-gib holds a run, and this machine does."""
    found = plan(settings)
    bytes_ = found["host_bytes"]["total"] + (found["device_bytes"]["total"] if ARGS.kind == "cpu" else 0)
    return found["fits"] and bytes_ < share * ARGS.host_gib * GIB


def trial(settings):
    """What two steps of one layer say: seconds of a FLOP, and of a parameter at start and end."""
    settings = {**settings, "model.layers": 1}
    run = ours(settings, 2)
    tokens = run["counted"][0]["tokens"]
    per_token = flops_a_token(run)
    if not per_token:
        raise Failed("a trial of one layer did not end in time")
    start = max(run["wall"] - sum(step["seconds"] for step in run["all"]), 0.1)
    return {"rate": per_token * max(run["rates"]), "start": start / plan(settings)["parameters"], "tokens": tokens}


def seconds_of(model, settings, tried):
    """Of the start and end of a run, and of a step, guessed."""
    parameters = plan(settings)["parameters"]
    # All weights meet all tokens but the embedding's; llama-1b's is its head, too.
    weights = parameters - (0 if model["preset"] == "llama-1b" else model["vocabulary"] * model["hidden"])
    pairs = settings["model.layers"] * model["hidden"] * model["length"]
    flops = 6 * (weights + pairs) * settings["step.batch"] * model["length"]
    return tried["start"] * parameters, 1.1 * flops / tried["rate"]


def in_time(model, settings, seconds, runs=1):
    """The settings, shallower where even two steps of each run would take too long, and the steps there are."""
    tried = trial(settings)
    while True:
        start, step = seconds_of(model, settings, tried)
        steps = int((seconds() / runs - start) / step)
        layers = settings["model.layers"]
        if steps >= 2 or layers == 1:
            return settings, max(2, min(steps, ARGS.steps))
        settings = {**settings, "model.layers": layers - max(1, layers // 10)}


# Parts.

def check():
    for dtype in dtypes():
        check_kernels(dtype)
    # Goldens of trainings: others hold, for example, codes of quantised weights.
    paths = sorted(GOLDENS.glob("*/golden.json"))
    names = [path.parent.name for path in paths if "batch" in json.loads(path.read_text())]
    if not names:
        row("goldens", "missing: no tests/goldens beside benches", met=False)
    for name in names:
        check_golden(name, "f32")
    check_devices()
    for name in names if ARGS.dtype != "f32" else []:
        check_golden(name, ARGS.dtype)


def dtypes():
    """What is checked: f32 always."""
    return list(dict.fromkeys(["f32", ARGS.dtype]))


def check_kernels(dtype):
    if ARGS.kind != "cuda":
        return row(f"kernels in {dtype}", "not run: --kind cpu")
    status, told, says = called(command("doctor --check", on_device(dtype=dtype)), left())
    told = [event for event in told if event.get("event") == "check"]
    for event in told:
        off, tolerance = event["off"], event["tolerance"]
        if event.get("error"):
            row(f"kernels: {event['kernel']} in {event['dtype']}", "failed", said=event["error"], met=False)
            continue
        # JSON has no infinity, which is what a kernel is off by that writes what is not its own.
        row(f"kernels: {event['kernel']} in {event['dtype']}", "infinite" if off is None else off, "largest difference",
            cases=event["cases"], seed=event["seed"], target=f"<= {tolerance:g}", met=off is not None and off <= tolerance)
    row(f"kernels in {dtype}", len(told), "checked", target="none off", met=status == 0 and bool(told), said=says)


def golden_settings(name, golden):
    folder = GOLDENS / name
    settings = {"model.path": folder, "data.train": folder / "data.jsonl", "data.shuffle": "false",
                "step.batch": golden["batch"], "step.micro_batch": 2, "optimizer.learning_rate": golden["learning_rate"],
                "optimizer.weight_decay": golden["weight_decay"]}
    if golden["clip_norm"] is not None:
        settings["optimizer.clip_norm"] = golden["clip_norm"]
    if name == "long":
        settings |= {"data.sequence_length": 4200, "step.chunk_positions": 2048}
    return settings


def resident():
    """Everything waits on the device, the stash too where it can."""
    more = {"schedule.kind": "resident", "channels.weights": 100000}
    return {**more, "stash.place": "device"} if ARGS.kind == "cpu" else more


def check_golden(name, dtype):
    """Relay and resident against a golden's float64."""
    golden = json.loads((GOLDENS / name / "golden.json").read_text())
    settings = {**on_device(dtype=dtype), **golden_settings(name, golden)}
    if dtype == "f16":
        settings["loss_scale.initial"] = 256  # with the default, some gradients are infinite at first, and steps are skipped
    figure = f"golden {name} in {dtype}"
    config = json.loads((GOLDENS / name / "config.json").read_text())
    width = next(config[key] for key in ("hidden_size", "n_embd", "dim") if key in config)
    if dtype != "f32" and width % 2:
        return row(figure, f"not run: {dtype} takes even widths, and this one is {width}")
    losses, norms = (golden["float64"][of][:GOLDEN_STEPS[dtype]] for of in ("losses", "norms"))
    digests = {}
    ways = [("relay", {}), ("resident", {**resident(), "schedule.recompute": "false"})]
    if name == "long":
        ways.append(("attention computed again", {"schedule.recompute": "attention", "step.micro_batch": 1}))
    for schedule, more in ways:
        run = attempt(f"{figure}, {schedule}", ours, {**settings, **more}, len(losses), "train")
        if not run:
            continue
        digests[schedule] = run["summary"].get("weights_digest")
        judge_steps(f"{figure}, {schedule}", dtype, run["all"], losses, norms)
    if "relay" in digests and "resident" in digests:
        same_bits(figure, digests)


def judge_steps(figure, dtype, steps, losses, norms):
    """A row of how far losses and norms are off."""
    most_loss, most_norm = LOSS_OFF[dtype], NORM_OFF[dtype]
    scale = lambda loss: 1 if dtype == "f32" else max(1, abs(loss))
    loss = max(abs(step["loss"] - one) / scale(one) for step, one in zip(steps, losses))
    # A step that is skipped has no norm.
    norm = max(math.inf if step["grad_norm"] is None else abs(step["grad_norm"] / one - 1) for step, one in zip(steps, norms))
    row(figure, loss, "losses off", target=f"< {most_loss:g}, norms < {most_norm:g}",
        met=len(steps) == len(losses) and loss < most_loss and norm < most_norm, norms_off=norm)


def same_bits(figure, digests):
    same = digests["relay"] is not None and digests["relay"] == digests["resident"]
    row(f"{figure}, relay == resident", "the same bits" if same else "other bits", target="the same bits", met=same, digests=digests)


def attempt(figure, what, *arguments):
    """What a call gives, or none and a row that says why."""
    try:
        return what(*arguments)
    except (Failed, subprocess.SubprocessError) as error:
        row(figure, f"failed: {error}", met=False)
        return None


def check_devices():
    """Larger shapes on random data: relay against resident, and the CPU's losses and norms (which are f32's)."""
    wide = {"hidden": 256, "intermediate": 512, "heads": 4, "vocabulary": 1000, "length": 128, "layers": 3}
    for family, preset, kv_heads in [("llama", "llama-7b", 2), ("bert", "bert-large", 4)]:
        model = {"family": family, "preset": preset, "kv_heads": kv_heads, **wide}
        settings = {**shaped(model, 8 * 128, 3), "step.seed": 7}
        for dtype in dtypes():
            compare_devices(f"{family} of 3 x 256 in {dtype}", dtype, {**settings, **on_device(dtype=dtype)})


def compare_devices(name, dtype, settings):
    runs = {}
    for way, more in [("relay", {}), ("resident", resident()), ("cpu", on_device("cpu", "f32"))]:
        runs[way] = attempt(f"{name}, {way}", ours, {**settings, **more}, 4, "train")
    if runs["relay"] and runs["resident"]:
        same_bits(name, {way: runs[way]["summary"].get("weights_digest") for way in ("relay", "resident")})
    if runs["relay"] and runs["cpu"]:
        losses, norms = ([step[of] for step in runs["cpu"]["all"]] for of in ("loss", "grad_norm"))
        judge_steps(f"{name}, {ARGS.kind} against cpu", dtype, runs["relay"]["all"], losses, norms)


def product():
    """Its rate in bursts, and its rate over ten seconds without a pause, in which a device may lower its clock."""
    for who, rate in product_rates().items():
        row(f"a large product in bursts, by {who}", rate / 1e12, "TFLOP/s")
    if not has_torch():
        return row("a large product without a pause", "not run: this Python has no torch for the device")
    told = peer({"what": "product", "sustained": 1 if ARGS.quick else 10})
    if "error" in told:
        return row("a large product without a pause, by PyTorch", f"failed: {told['error']}")
    rates = [rate / 1e12 for rate in told["rates"]]
    half = len(rates) // 2
    median_row("a large product without a pause, by PyTorch", rates[half:], "TFLOP/s", says="its second half")


def copies():
    link = machine().get("gpu_rates") or {}
    for how in ("pinned", "pageable"):
        if rates := link.get(f"{how}_bytes_per_second"):
            row(f"link, {how}", " and ".join(f"{rate / 1e9:.1f}" for rate in rates), "GB/s up and down")
    model, tokens, micro = eight()
    relay = shaped(model, tokens, micro)
    ways = {"two slots": {}, "without copies": {}, "one slot": {"channels.weights": 1}, "resident": resident()}
    what_of = lambda name: "bench --without-copies" if name == "without copies" else "bench"
    room = 0.9 * device_memory()
    whole = {**relay, **resident()}
    fits = lambda layers: device_bytes({**whole, "model.layers": layers}) < room and holds({**whole, "model.layers": layers})
    relay["model.layers"] = deepest(fits, 8)
    relay, steps = in_time(model, relay, lambda: 0.9 * left(), len(ways))
    found = rounds({name: (lambda name=name, more=more: ours({**relay, **more}, steps, what_of(name))) for name, more in ways.items()})
    about = {"layers": relay["model.layers"], "tokens": tokens, "steps": steps}
    seconds = {name: [tokens / statistics.median(run["rates"]) for run in runs] for name, runs in found.items()}
    for name, runs in found.items():
        median_row(f"{name}: a step", seconds[name], "s", **about)
        median_row(f"{name}: exposed wait", [wait for run in runs for wait in run["waits"]], "of the step", **about)
    ratios = lambda name: [one / two for one, two in zip(seconds[name], seconds["two slots"])]
    median_row("one slot / two slots", ratios("one slot"), "x the time", **about)
    median_row("time without copies / time", ratios("without copies"), "", ">= 0.97", lambda is_: is_ >= 0.97, **about,
               says="two slots; the losses, which need what is copied, are left out, too")
    median_row("resident / relay", ratios("resident"), "x the time", ">= 0.97", lambda is_: is_ >= 0.97, **about,
               says="resident moves each block once a step, too")


def rounds(ways):
    """Each way in turns, three times or as often as there is time."""
    found = {name: [] for name in ways}
    while len(next(iter(found.values()))) < (1 if ARGS.quick else 3):
        begin = time.monotonic()
        for name, way in ways.items():
            found[name].append(way())
        if time.monotonic() - begin > left():
            break
    return found


def eight():
    """Llama-3-8B's layers, tokens of a step, and sequences of a micro-batch."""
    return (LLAMA_8B, 65536, 4) if not ARGS.quick else ({**LLAMA_8B, **TOY, "kv_heads": 2}, 256, 2)


def llama8b():
    model, tokens, micro = eight()
    as_deep_as_fits("8B's layers", shaped(model, tokens, micro), model, share=0.55, wait=0.03)


def kernels():
    """Where the device's time goes, by kernel, in a few of the 8B's layers. Timing makes the steps slower."""
    model, tokens, micro = eight()
    settings = shaped(model, tokens, micro, layers=2 if ARGS.quick else 4)
    run = ours(settings, 3, "bench --kernels")
    if ARGS.kind != "cuda":
        return row("time by kernel", len(run["kernels"]), "kernels of the CPU, by rate", says="a GPU's are told by time")
    for event in run["kernels"]:
        row(f"8B's layers: {event['kernel']}", 100 * event["share"], "% of all kernels", seconds=event["seconds"],
            launches=event["launches"])


def llama8b_clip():
    model, tokens, micro = eight()
    as_deep_as_fits("8B's layers, clipped", shaped(model, 2 * tokens, micro, optimizer__clip_norm=1.0), model, wait=0.03)


def largest():
    model, tokens, micro = eight()
    as_deep_as_fits("the largest", shaped(model, tokens // 4, micro), model)


def as_deep_as_fits(name, settings, model, **targets):
    settings["model.layers"] = deepest(lambda layers: holds({**settings, "model.layers": layers}), 64 if ARGS.quick else 4096)
    found, layers = plan(settings), settings["model.layers"]
    row(f"{name}: layers that {ARGS.host_gib:g} GiB hold", layers, "layers", parameters=found["parameters"],
        planned_host_bytes=found["host_bytes"]["total"])
    speed(name, model, settings, layers, **targets)


def as_deep_as_runs(model, settings):
    """A run, with fewer layers where it fails with as many: the host may have less than it says."""
    while True:
        settings, steps = in_time(model, settings, left)
        try:
            return settings, steps, ours(settings, steps)
        except Failed as error:
            layers = settings["model.layers"]
            if layers == 1 or left() < ARGS.limit / 3:
                raise
            settings = {**settings, "model.layers": layers - max(1, layers // 5)}
            row(f"a run of {layers} layers", f"failed: {error}", says=f"tried again with {settings['model.layers']}")


def speed(name, model, settings, planned=None, share=None, wait=None):
    """How fast a shape trains; the targets are the least share of the product and the most exposed wait."""
    before = product_rates()
    settings, steps, run = as_deep_as_runs(model, settings)
    after = product_rates(run)
    found, last = plan(settings), run["counted"][-1]
    about = {"layers": settings["model.layers"], "parameters": found["parameters"], "tokens": last["tokens"],
             "steps": len(run["counted"]), "whole": run["status"] == 0}
    if planned and planned != about["layers"]:
        about["says"] = f"{planned} layers fit as planned, {about['layers']} of them were timed"
    median_row(f"{name}: tokens a second", run["rates"], "tokens/s", **about)
    flops = [rate * flops_a_token(run) for rate in run["rates"]] if flops_a_token(run) else []
    if flops:
        median_row(f"{name}: model FLOPs", [one / 1e12 for one in flops], "TFLOP/s", **about)
    product = 0
    for who, rate in after.items():
        both = [one / 1e12 for one in (before.get(who), rate) if one]
        product = max(product, median_row(f"{name}: a large product, by {who}", both, "TFLOP/s") * 1e12)
    if flops and product:
        shares = [one / product for one in flops]
        median_row(f"{name}: model FLOPs / the faster product", shares, "", share and f">= {share}",
                   share and (lambda is_: is_ >= share), **about)
    median_row(f"{name}: exposed wait", run["waits"], "of the step", wait and f"<= {wait}", wait and (lambda is_: is_ <= wait), **about)
    planned_bytes = found["device_bytes"]["total"]
    row(f"{name}: device peak / plan", last["device_peak_bytes"] / planned_bytes, planned_device_bytes=planned_bytes,
        host_rss_bytes=last["host_rss_bytes"], planned_host_bytes=found["host_bytes"]["total"])


def llama3b():
    model, tokens, micro = (LLAMA_3B, 65536, 4) if not ARGS.quick else ({**LLAMA_3B, **TOY, "kv_heads": 2}, 256, 2)
    speed("3B", model, shaped(model, tokens, micro))


def bert():
    model, batch, micro = large_bert()
    speed("BERT-Large", model, shaped(model, batch * model["length"], micro))


def large_bert():
    """BERT-Large, sequences of a step, and of a micro-batch."""
    return (BERT, 256, 64) if not ARGS.quick else ({**BERT, **TOY, "kv_heads": 4}, 8, 4)


def smi(*query):
    try:
        return subprocess.run(["nvidia-smi", *query, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"nvidia-smi: {error}") from error


def driver_bytes(pid):
    """Bytes of the device that the driver counts for a process (none where it does not know it by this number),
    and of all."""
    if ARGS.kind == "cpu":
        try:
            lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return None, 0
        held = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS")]
        return (held[0] if held else None), 0
    try:
        of = [line.split(",") for line in smi("--query-compute-apps=pid,used_memory").splitlines()]
    except Failed:
        of = []
    mine = [int(used) << 20 for one, used in of if one.strip() == str(pid) and used.strip().isdigit()]
    index = next((one.split("=")[1] for one in ARGS.set if one.startswith("device.ordinal=")), "0")
    total = smi("-i", index, "--query-gpu=memory.used").split()
    return (mine[0] if mine else None), (int(total[0]) << 20 if total else 0)


def held_by(settings, steps=3):
    """The most that the driver counts for a run."""
    before, most = driver_bytes(os.getpid())[1], {"own": 0, "all": 0}

    def watch(process):
        while process.poll() is None:
            own, all_ = driver_bytes(process.pid)
            most["own"], most["all"] = max(most["own"], own or 0), max(most["all"], all_ - before)
            time.sleep(0.1)

    ours(settings, steps, watch=watch)
    if not (most["own"] or most["all"]):
        raise Failed("the driver counted nothing while it ran")
    return (most["own"], "of the process") if most["own"] else (most["all"], "of the device, less what was used before")


def memory():
    model, tokens, micro = eight()
    small = {**model, **TOY, "kv_heads": 2}
    toy = shaped(small, 8 * small["length"], 2, model__vocabulary=512)
    # Long enough for the driver to be asked a few times.
    held, how = held_by(toy, 3 if ARGS.quick else 300)
    context = held - device_bytes(toy)
    row("context (a toy model's count - its plan)", context / 2**20, "MiB", how=how)
    for layers in (1, 4):
        settings = shaped(model, tokens // 4, micro, layers)
        found = plan(settings)
        held, how = held_by(settings)
        planned = found["device_bytes"]["total"]
        row(f"{layers} layers: driver's count - plan - context", (held - planned - context) / 2**20, "MiB", target="0",
            counted_bytes=held, planned_bytes=planned, terms=found["device_bytes"]["terms"], how=how)
    terms, one = found["device_bytes"]["terms"], found["largest_layer"]["parameters"]
    row("weights and gradients on the device", (terms["weights"] + terms["gradients"]) / one,
        "bytes a parameter of the largest layer", target="12 (bf16, f16), 16 (f32)", largest=found["largest_layer"])


# The peer: each job is a process of its own, so that it begins with an empty device.

def peer(job):
    """What the peer measured; or an error in its place, which costs no row of ours."""
    arguments = [sys.executable, str(HERE), "--inside", "peer", "--job", json.dumps(job), "--kind", ARGS.kind, "--dtype", ARGS.dtype]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    status, told, says = called(arguments, left(), env=environment)
    if status != 0 or not told:
        return {"error": f"status {status}: {says}"}
    told = told[-1]
    if "seconds" in told:
        told["rates"] = [told["tokens"] / seconds for seconds in told["seconds"]]
    return told


def peer_resident():
    against_peer("resident", 0.95, 0.6)


def peer_streaming():
    against_peer("streaming", 1.5, 0.6)


def against_peer(what, target, share):
    """The same model here and there, in turns; `share` of the device's memory for 16 bytes a parameter."""
    if not has_torch():
        return row(f"PyTorch, {what}", "not run: this Python has no torch for the device")
    model, tokens, micro = eight()
    settings = shaped(model, tokens, micro)
    room = share * device_memory()
    fits = lambda layers: (16 * plan({**settings, "model.layers": layers})["parameters"] < room
                           and holds({**settings, "model.layers": layers}, 0.8))
    settings["model.layers"] = deepest(fits, model["layers"])
    settings, steps = in_time(model, settings, lambda: 0.9 * left(), 4)
    model = {**model, "layers": settings["model.layers"]}
    job = {"what": what, "model": model, "batch": settings["step.batch"], "micro": micro, "steps": steps, "recompute": True}
    while "error" in (first := peer({**job, "steps": 1, "batch": 2 * job["micro"]})) and job["micro"] > 1:
        job["micro"] //= 2
    ways = {"ours": lambda: ours(settings, steps)}
    if "error" not in first:
        ways["peer"] = lambda: peer(job)
    found = rounds(ways)
    failed = [run["error"] for run in [first, *found.get("peer", [])] if "error" in run]
    if failed:
        rates = [statistics.median(run["rates"]) for run in found["ours"]]
        median_row(f"{what}: ours", rates, "tokens/s", layers=model["layers"], tokens=tokens)
        return row(f"PyTorch, {what}", f"failed: {failed[0]}", layers=model["layers"])
    about = {"layers": model["layers"], "tokens": tokens, "dtype": ARGS.dtype, "peer_micro_batch": job["micro"],
             "losses": [found["ours"][0]["all"][-1]["loss"], found["peer"][0]["losses"][-1]]}
    rates = {name: [statistics.median(run["rates"]) for run in runs] for name, runs in found.items()}
    median_row(f"{what}: ours", rates["ours"], "tokens/s", **about)
    median_row(f"{what}: PyTorch", rates["peer"], "tokens/s", peak_bytes=found["peer"][0]["peak_bytes"], **about)
    ratios = [one / other for one, other in zip(rates["ours"], rates["peer"])]
    median_row(f"{what}: ours / PyTorch", ratios, "x", f">= {target}", lambda is_: is_ >= target, **about)


def race():
    """BERT-Large under the same ceiling: first each one's best micro-batch, then both at one batch, in turns."""
    if not has_torch():
        return row("race", "not run: this Python has no torch for the device")
    model, batch, _ = large_bert()
    batch = 4 * batch
    sizes = [2**power for power in range(1 if ARGS.quick else 3, int(math.log2(batch)) + 1)]
    mine = shaped(model, batch * model["length"], 1, device__memory=CEILING)
    most = plan(mine)["largest_micro_batch"]
    theirs = {"what": "resident", "model": model, "batch": batch, "steps": 2, "ceiling": CEILING}
    tried = {"ours": {}, "peer": {}}
    for size in sizes:
        short = {"step.micro_batch": size, "step.batch": max(size, batch // 4)}
        if most and size <= most and left() > ARGS.limit / 3:
            tried["ours"][size] = max(ours({**mine, **short}, 2)["rates"])
        for recompute in (False, True):
            if left() > ARGS.limit / 3:
                run = peer({**theirs, "micro": size, "batch": short["step.batch"], "recompute": recompute})
                if "error" not in run:
                    tried["peer"][size, recompute] = max(run["rates"])
    if not tried["ours"]:
        return row("race", f"failed: no micro-batch ran: {tried}", met=False)
    if not tried["peer"]:
        best = max(tried["ours"], key=tried["ours"].get)
        row(f"race: ours, micro-batches of {best}", tried["ours"][best], "tokens/s", tried=tried["ours"])
        return row("race: PyTorch", "failed: no micro-batch ran")
    best, (size, recompute) = (max(tried[who], key=tried[who].get) for who in ("ours", "peer"))
    job = {**theirs, "micro": size, "recompute": recompute, "steps": ARGS.steps}
    found = rounds({"ours": lambda: ours({**mine, "step.micro_batch": best}, ARGS.steps), "peer": lambda: peer(job)})
    both = [pair for pair in zip(found["ours"], found["peer"]) if "error" not in pair[1]]
    if not both:
        row(f"race: ours, micro-batches of {best}", statistics.median(found["ours"][0]["rates"]), "tokens/s", tried=tried["ours"])
        return row("race: PyTorch", f"failed: {found['peer'][0]['error']}")
    found = dict(zip(("ours", "peer"), zip(*both)))
    rates = {name: [statistics.median(run["rates"]) for run in runs] for name, runs in found.items()}
    about = {"ceiling_bytes": CEILING, "batch": batch, "length": model["length"]}
    median_row(f"race: ours, micro-batches of {best}", rates["ours"], "tokens/s", **about, tried=tried["ours"], largest=most)
    median_row(f"race: PyTorch, micro-batches of {size}{', recomputing' if recompute else ''}", rates["peer"], "tokens/s", **about,
               tried={f"{one}{', recomputing' if again else ''}": rate for (one, again), rate in tried["peer"].items()})
    median_row("race: ours / PyTorch", [one / other for one, other in zip(rates["ours"], rates["peer"])], "x", **about)


def run_peer(job):
    import torch
    device = torch.device(ARGS.kind)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    if "ceiling" in job and ARGS.kind == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["ceiling"] / total))
    try:
        told = {"product": peer_product, "resident": peer_steps, "streaming": peer_streams}[job["what"]](torch, device, job)
    except torch.cuda.OutOfMemoryError as error:
        told = {"error": f"out of memory: {error}"}
    print(json.dumps(told))


def settle(torch, device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peer_product(torch, device, job):
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype_of(torch)) for _ in range(2))
    rates, end = [], time.perf_counter() + job.get("sustained", 0)
    while len(rates) < 12 or time.perf_counter() < end:
        begin = settle(torch, device)
        for _ in range(4):
            a @ b
        rates.append(4 * 2 * size**3 / (settle(torch, device) - begin))
    return {"rates": rates[2:]}


def dtype_of(torch):
    return {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[ARGS.dtype]


def part_shapes(model):
    """Sizes of each part's tensors: the embedding's, each block's, the head's."""
    h, i, v = model["hidden"], model["intermediate"], model["vocabulary"]
    if model["family"] == "llama":
        kv = h // model["heads"] * model["kv_heads"]
        block = [(h,), (h, h), (kv, h), (kv, h), (h, h), (h,), (i, h), (i, h), (h, i)]
        return [[(v, h)], *[block] * model["layers"], [(h,), (v, h)]]
    block = [(3 * h, h), (3 * h,), (h, h), (h,), (h,), (h,), (i, h), (i,), (h, i), (h,), (h,), (h,)]
    # The head's table is the embedding's.
    return [[(v, h), (512, h), (h,), (h,)], *[block] * model["layers"], [(h, h), (h,), (h,), (h,), (v,)]]


def turn(torch, x):
    """Rotary positions."""
    half, at = x.shape[-1] // 2, torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = at[:, None] * 500000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def block_of(torch, model):
    F, heads = torch.nn.functional, model["heads"]
    split = lambda x, n: x.view(*x.shape[:2], n, -1).transpose(1, 2)
    join = lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def llama(x, n1, q, k, v, o, n2, gate, up, down):
        y = F.rms_norm(x, n1.shape, n1, 1e-5)
        q, k = (turn(torch, split(F.linear(y, w), n)) for w, n in ((q, heads), (k, model["kv_heads"])))
        k, v = (one.repeat_interleave(heads // model["kv_heads"], 1) for one in (k, split(F.linear(y, v), model["kv_heads"])))
        x = x + F.linear(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)), o)
        y = F.rms_norm(x, n2.shape, n2, 1e-5)
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)

    def bert(x, qkv, qkv_bias, o, o_bias, n1, n1_bias, up, up_bias, down, down_bias, n2, n2_bias):
        q, k, v = (split(one, heads) for one in F.linear(x, qkv, qkv_bias).chunk(3, -1))
        x = F.layer_norm(x + F.linear(join(F.scaled_dot_product_attention(q, k, v)), o, o_bias), n1.shape, n1, n1_bias)
        y = F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
        return F.layer_norm(x + y, n2.shape, n2, n2_bias)

    return llama if model["family"] == "llama" else bert


def embed(torch, model, part, ids):
    F, x = torch.nn.functional, torch.nn.functional.embedding(ids, part[0])
    return x if model["family"] == "llama" else F.layer_norm(x + part[1][:ids.shape[1]], part[2].shape, part[2], part[3])


def loss_of(torch, model, part, table, x, ids, count):
    """Llama's: the next tokens'; BERT's: of 15 in 100 positions, the others meet no head."""
    F = torch.nn.functional
    if model["family"] == "llama":
        y, targets = F.rms_norm(x[:, :-1], part[0].shape, part[0], 1e-5), ids[:, 1:]
        logits = F.linear(y, part[1])
    else:
        some = max(1, int(0.15 * ids.shape[1]))
        y, targets = F.gelu(F.linear(x[:, :some], part[0], part[1])), ids[:, :some]
        logits = F.linear(F.layer_norm(y, part[2].shape, part[2], part[3]), table, part[4])
    # `count` sequences a step, each of as many targets.
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return total / (targets.shape[1] * count)


def begin_with(torch, tensor):
    return torch.nn.init.normal_(tensor, 0, 0.02) if tensor.dim() > 1 else tensor.fill_(1)


def peer_steps(torch, device, job):
    """PyTorch as it is mostly used: all on the device, masters in f32, autocast, fused AdamW."""
    from torch.utils.checkpoint import checkpoint
    model, batch, micro = job["model"], job["batch"], job["micro"]
    parts = [[begin_with(torch, torch.empty(shape, device=device)).requires_grad_() for shape in part] for part in part_shapes(model)]
    optimizer = torch.optim.AdamW([one for part in parts for one in part], lr=3e-4, weight_decay=0.01, fused=True)
    # In f16, losses are scaled.
    scaler = torch.amp.GradScaler(device.type, enabled=ARGS.dtype == "f16")
    block, seconds, losses = block_of(torch, model), [], []
    for _ in range(job["steps"]):
        ids = torch.randint(0, model["vocabulary"], (batch, model["length"]))
        begin, total = settle(torch, device), 0
        for some in ids.split(micro):
            some = some.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype_of(torch), enabled=ARGS.dtype != "f32"):
                x = embed(torch, model, parts[0], some)
                for part in parts[1:-1]:
                    x = checkpoint(block, x, *part, use_reentrant=False) if job["recompute"] else block(x, *part)
                loss = loss_of(torch, model, parts[-1], parts[0][0], x, some, batch)
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seconds.append(settle(torch, device) - begin)
        losses.append(float(total))
    return told_of(torch, device, job, seconds, losses)


def told_of(torch, device, job, seconds, losses):
    peak = torch.cuda.max_memory_reserved() if device.type == "cuda" else 0
    return {"seconds": seconds[1:] or seconds, "tokens": job["batch"] * job["model"]["length"], "losses": losses, "peak_bytes": peak}


def views(flat, shapes):
    found, at = [], 0
    for shape in shapes:
        found.append(flat[at:at + math.prod(shape)].view(shape))
        at += math.prod(shape)
    return found


def peer_streams(torch, device, job):
    """The plain loop: a part's weights copied in from pinned memory, all micro-batches through it, its gradients
    copied out, AdamW of PyTorch on the host; what passes between layers stays on the device."""
    model, micro, dtype = job["model"], job["micro"], dtype_of(torch)
    shapes = part_shapes(model)
    pinned = {"pin_memory": device.type == "cuda"}
    masters, published = [], []
    for part in shapes:
        size = sum(map(math.prod, part))
        flat = torch.empty(size, **(pinned if dtype == torch.float32 else {}))
        [begin_with(torch, one) for one in views(flat, part)]
        masters.append(torch.nn.Parameter(flat))
        published.append(masters[-1].detach() if dtype == torch.float32 else torch.empty(size, dtype=dtype, **pinned).copy_(flat))
    landing = torch.empty(max(len(one) for one in published), dtype=dtype, **pinned)
    optimizers = [torch.optim.AdamW([master], lr=3e-4, weight_decay=0.01, fused=True) for master in masters]
    block, seconds, losses = block_of(torch, model), [], []

    def fetch(index):
        flat = published[index].to(device, non_blocking=True)
        return [one.detach().requires_grad_() for one in views(flat, shapes[index])]

    def with_gradients(index):
        part, flat = fetch(index), torch.zeros(len(published[index]), device=device, dtype=dtype)
        for one, gradient in zip(part, views(flat, shapes[index])):
            one.grad = gradient
        return part, flat

    def update(index, flat):
        gradient = landing[:len(flat)]
        gradient.copy_(flat)
        masters[index].grad = gradient.float()
        optimizers[index].step()
        if dtype != torch.float32:
            published[index].copy_(masters[index].detach())

    for _ in range(job["steps"]):
        ids = torch.randint(0, model["vocabulary"], (job["batch"], model["length"])).to(device)
        micros, last = ids.split(micro), len(shapes) - 1
        begin, total = settle(torch, device), 0
        with torch.no_grad():
            part = fetch(0)
            passed = [[embed(torch, model, part, some) for some in micros]]
            for index in range(1, last):
                part = fetch(index)
                passed.append([block(x, *part) for x in passed[-1]])
        part, flat = with_gradients(last)
        back = []
        for x, some in zip(passed.pop(), micros):
            x = x.detach().requires_grad_()
            loss = loss_of(torch, model, part, None, x, some, job["batch"])
            loss.backward()
            back.append(x.grad)
            total += loss.detach()
        update(last, flat)
        for index in range(last - 1, 0, -1):
            part, flat = with_gradients(index)
            for at, x in enumerate(passed.pop()):
                x = x.detach().requires_grad_()
                block(x, *part).backward(back[at])
                back[at] = x.grad
            update(index, flat)
        part, flat = with_gradients(0)
        for some, dx in zip(micros, back):
            embed(torch, model, part, some).backward(dx)
        update(0, flat)
        seconds.append(settle(torch, device) - begin)
        losses.append(float(total))
    return told_of(torch, device, job, seconds, losses)


# All parts.

PARTS = {"check": check, "product": product, "copies": copies, "kernels": kernels, "memory": memory, "llama8b": llama8b, "llama8b_clip": llama8b_clip, "llama3b": llama3b,
         "bert": bert, "largest": largest, "peer_resident": peer_resident, "peer_streaming": peer_streaming, "race": race}
GROUPS = {"peers": ["peer_resident", "peer_streaming", "race"]}


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=os.environ.get("L2L", "target/release/l2l"))
    parser.add_argument("--part", nargs="+", action="extend", choices=[*PARTS, *GROUPS], metavar="NAME")
    parser.add_argument("--out", default=".")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["f32", "bf16", "f16"])
    parser.add_argument("--host-gib", type=float)
    parser.add_argument("--steps", type=int, help="steps of a run at most, the first not counted (6)")
    parser.add_argument("--limit", type=int, default=560, help="seconds of a part at most")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.dtype = given.dtype or ("bf16" if given.kind == "cuda" else "f32")
    given.host_gib = given.host_gib or (0.03 if given.quick else 120)
    given.steps = max(2, given.steps or (3 if given.quick else 6))
    return given


def run_part(name, store):
    """A part in a process of its own; its rows are kept as they come."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    arguments = [sys.executable, str(HERE), *sys.argv[1:], "--inside", name]
    begin, part = time.monotonic(), {"rows": [], "ended": "by itself"}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def stop():
        part["ended"] = f"by its limit of {ARGS.limit} s"
        os.killpg(process.pid, signal.SIGKILL)

    late = threading.Timer(ARGS.limit, stop)
    late.start()
    try:
        for line in process.stdout:
            for one in objects(line):
                part["rows"].append(one)
                store(name, part)
                print(f"  {name}: {one.get('figure')}: {told(one.get('value'))} {one.get('unit') or ''}", file=sys.stderr, flush=True)
        status = process.wait()
    except KeyboardInterrupt:
        stop()
        raise
    finally:
        late.cancel()
    if status and part["ended"] == "by itself":
        part["ended"] = f"with status {status}"
    part["seconds"] = round(time.monotonic() - begin, 1)
    store(name, part)
    return part


def told(number):
    if not isinstance(number, float):
        return str(number)
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def table(parts):
    lines = ["| part | figure | result | least to most | target | met |", "|---|---|---|---|---|---|"]
    for name, part in parts.items():
        for one in part["rows"]:
            spread = one["spread"] and f"{told(one['spread'][0])} to {told(one['spread'][1])} of {one['spread'][2]}"
            met = {True: "yes", False: "**no**", None: ""}[one["met"]]
            value = f"{told(one['value'])} {one['unit']}".strip().split("\n")[0][:200]
            says = f" ({one['layers']} layers)" if "layers" in one else ""
            cells = [name, one["figure"] + says, value, spread or "", one["target"] or "", met]
            lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
        if part["ended"] != "by itself":
            lines.append(f"| {name} | ended {part['ended']} | | | | **no** |")
    return "\n".join(lines)


def write(path, runs):
    whole = path.with_suffix(".json.new")
    whole.write_text(json.dumps(runs, indent=1) + "\n")
    whole.replace(path)


def main():
    names = [one for name in ARGS.part or PARTS for one in GROUPS.get(name, [name])]
    folder = pathlib.Path(ARGS.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    if not shutil.which(ARGS.program):
        sys.exit(f"{ARGS.program}: no such program: give --program")
    version = subprocess.run([ARGS.program, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    run = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "program": version,
           "machine": machine(), "arguments": sys.argv[1:], "kind": ARGS.kind, "dtype": ARGS.dtype, "quick": ARGS.quick, "parts": {}}
    runs.append(run)

    def store(name, part):
        run["parts"][name] = part
        write(path, runs)

    for name in names:
        run_part(name, store)
    print(f"device.kind {ARGS.kind}, device.dtype {ARGS.dtype}{', toy sizes' if ARGS.quick else ''}, {run['date']}\n")
    print(table(run["parts"]))
    print(f"\n{path.resolve()}")
    bad = [one for part in run["parts"].values() for one in part["rows"] if one["met"] is False]
    sys.exit(1 if bad or any(part["ended"] != "by itself" for part in run["parts"].values()) else 0)


def inside():
    if ARGS.inside == "peer":
        return run_peer(json.loads(ARGS.job))
    try:
        PARTS[ARGS.inside]()
    except (Failed, subprocess.SubprocessError) as error:
        row(ARGS.inside, f"failed: {error}", met=False)
        sys.exit(1)


if __name__ == "__main__":
    ARGS = read_arguments()
    inside() if ARGS.inside else main()
