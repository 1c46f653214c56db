"""How l2l is called: its settings, its plans, its runs, and what a run told."""

import dataclasses
import functools
import importlib.util
import math
import os
import statistics

from .budget import OutOfTime
from .commands import AT_ONCE, Failed

GIB = 1 << 30
# Seconds that a plan or a look at the machine may take.
PATIENCE = 120


@dataclasses.dataclass
class Run:
    """What a run told: each of its steps, its summary if it came to it, and how long all took."""
    argv: list
    status: int | None
    steps: list
    summary: dict
    kernels: list
    # What made it slower than it could be.
    warnings: list
    seconds: float

    @property
    def counted(self):
        """The steps without the first, in which memory is pinned and touched."""
        return self.steps[1:] or self.steps

    @property
    def rates(self):
        return [step["tokens"] / step["seconds"] for step in self.counted]

    @property
    def rate(self):
        return statistics.median(self.rates)

    @property
    def waits(self):
        return [step["exposed_wait_seconds"] / step["seconds"] for step in self.counted]

    @property
    def flops(self):
        return [step["model_flops"] / step["seconds"] for step in self.counted]

    @property
    def first(self):
        """The time of the first step in later steps."""
        return self.steps[0]["seconds"] / statistics.median(one["seconds"] for one in self.counted)

    @property
    def digest(self):
        return self.summary.get("weights_digest")


class Program:
    def __init__(self, flags, commands, empty):
        self.flags = flags
        self.commands = commands
        # A config file without keys: every key has its default.
        self.empty = empty

    def device(self, kind=None, dtype=None):
        """The settings of the device."""
        kind = kind or self.flags.kind
        settings = {"device.kind": kind, "device.dtype": dtype or self.flags.dtype}
        is_set = any(one.startswith("device.cuda_libraries=") for one in self.flags.set)
        if kind == "cuda" and not is_set:
            wheels = importlib.util.find_spec("nvidia")
            if wheels and wheels.submodule_search_locations:
                settings["device.cuda_libraries"] = list(wheels.submodule_search_locations)[0]
        if kind == "cuda" and self.flags.kernels:
            settings["device.kernel_cache"] = os.path.abspath(self.flags.kernels)
        return settings

    def shaped(self, model, tokens, micro, layers=None, **more):
        """The settings of a step of `tokens` tokens of a model. `a__b=1` sets `a.b`."""
        found = {
            "model.preset": model["preset"], "model.layers": layers or model["layers"],
            "model.hidden": model["hidden"], "model.intermediate": model["intermediate"],
            "model.heads": model["heads"], "model.kv_heads": model["kv_heads"],
            "model.dropout": 0, "model.vocabulary": model["vocabulary"],
            "model.positions": max(model["length"], 512),
            "data.train": "random", "data.sequence_length": model["length"],
            "step.batch": tokens // model["length"], "step.micro_batch": micro,
            "schedule.recompute": "true"}
        more = {key.replace("__", "."): value for key, value in more.items()}
        return {**self.device(), **found, **more}

    def ways(self, settings, memory=None):
        """The ways of l2l to train a shape. `memory` is the ceiling up to which layers keep their
        activations on the device, without one most of the device."""
        memory = memory or int(0.9 * self.device_memory())
        kept = {**settings, "schedule.recompute": "auto", "device.memory": memory}
        return {"recomputing": settings, "keeping what fits": kept}

    def resident(self):
        """Everything waits on the device, the stash too where it can."""
        more = {"schedule.kind": "resident", "channels.weights": 100000}
        return {**more, "stash.place": "device"} if self.flags.kind == "cpu" else more

    def argv(self, what, settings, *more):
        words = what.split()
        argv = [self.flags.program, words[0], self.empty, *words[1:], "--format", "json", *more]
        for key, value in settings.items():
            argv += ["--set", f"{key}={value}"]
        return argv + [part for one in self.flags.set for part in ("--set", one)]

    def plan(self, settings, *more):
        ended = self.commands.run("plan", self.argv("plan", settings, *more), PATIENCE)
        if ended.status is None and self.commands.left() <= 0:
            raise OutOfTime("plan")
        if ended.status != 0 or not ended.events:
            raise Failed(f"plan: {ended.why}", ended.argv)
        return ended.events[-1]

    def refuses(self, settings):
        """Why the program refuses settings; `None` if it takes them."""
        try:
            self.plan(settings)
        except Failed as error:
            return str(error)
        return None

    def parameters(self, settings):
        return self.plan(settings)["parameters"]

    def run(self, name, settings, steps, what="bench", limit=math.inf, watch=None):
        """Runs steps. `watch` is called with the process until that ends."""
        argv = self.argv(what, {**settings, "step.steps": steps})
        process = self.commands.start(name, argv)
        while watch and process.poll() is None and self.commands.left() > 0:
            watch(process)
        ended = self.commands.finish(process, limit)
        of = lambda event: [one for one in ended.events if one.get("event") == event]
        steps, summary = of("step"), of("summary")
        # A bench that is cut off after a few steps has told its speed.
        cut = ended.status is None and self.commands.left() <= 0
        tells = len(steps) >= 2 and what != "train" if cut else ended.status == 0 and steps
        if cut and not tells:
            raise OutOfTime(name)
        if not tells:
            raise Failed(f"status {ended.status}: {ended.why}", ended.argv)
        summary = summary[-1] if summary else {}
        lines = dict.fromkeys(ended.says.splitlines())
        warnings = [line for line in lines if line.startswith("warning: ")]
        return Run(ended.argv, ended.status, steps, summary, of("kernel"), warnings, ended.seconds)

    @functools.cached_property
    def at_once(self):
        """Tiny trainings that run side by side: one where a GPU takes one process at a time, and no
        more than it has memory for their contexts."""
        if self.flags.kind == "cpu":
            return os.cpu_count()
        mode = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
        try:
            if "Exclusive" in self.commands.run("compute mode", mode, PATIENCE).says:
                return 1
        except Failed:
            # Containers may lack this command.
            pass
        gpus = self.machine.get("gpus") or [{"memory_bytes": GIB}]
        return max(1, min(AT_ONCE, gpus[0]["memory_bytes"] // GIB))

    @functools.cached_property
    def machine(self):
        """What `l2l doctor` says, asked once."""
        ended = self.commands.run("doctor", self.argv("doctor", self.device()), PATIENCE)
        if ended.status is None and self.commands.left() <= 0:
            # The next part asks again: a first start that was cut off has compiled some kernels.
            raise OutOfTime("doctor")
        found = next((one for one in ended.events if one.get("event") == "doctor"), {})
        why = found.get("gpu_error") or ended.why or "it names no GPU"
        return {**found, "status": ended.status, "why": why, "seconds": ended.seconds}

    def device_memory(self):
        """Bytes of the device; of the host half of what is free, where that is the device."""
        if self.flags.kind == "cpu":
            return self.flags.host_gib * GIB / 2
        gpus = self.machine.get("gpus") or []
        if not gpus:
            raise Failed(f"doctor: {self.machine['why']}")
        return gpus[0]["memory_bytes"]

    def holds(self, settings, share=1.0):
        """True if a share of --host-gib holds a run, and this machine does."""
        found = self.plan(settings)
        both = found["host_bytes"]["total"]
        both += found["device_bytes"]["total"] if self.flags.kind == "cpu" else 0
        return found["fits"] and both < share * self.flags.host_gib * GIB

    def deepest(self, fits, settings, limit=4096):
        """The settings with the most layers of which `fits(settings)` is true."""
        deep = lambda layers: {**settings, "model.layers": layers}
        least, most = 0, 1
        while most <= limit and fits(deep(most)):
            least, most = most, 2 * most
        if not least:
            raise Failed("not one layer fits: raise --host-gib, or see why `l2l plan` refuses it")
        most = min(most, limit + 1)
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(deep(middle)) else (least, middle)
        return deep(least)

    def in_time(self, settings, seconds, runs=1):
        """The settings, with fewer layers where two steps of each run would take too long, and the
        steps that there is time for."""
        one, two = ({**settings, "model.layers": layers} for layers in (1, 2))
        trial = self.run("trial of one layer", one, 2)
        parameters = self.parameters(one)
        more = self.parameters(two) - parameters
        pairs = settings["model.hidden"] * settings["data.sequence_length"]
        tokens = settings["step.batch"] * settings["data.sequence_length"]
        start = max(trial.seconds - sum(step["seconds"] for step in trial.steps), 0.1)
        while True:
            layers = settings["model.layers"]
            flops = trial.counted[0]["model_flops"] + 6 * (layers - 1) * (more + pairs) * tokens
            step = 1.1 * flops / max(trial.flops)
            begin = start * (1 + (layers - 1) * more / parameters)
            # The first step takes as long as three of the others.
            steps = int((seconds / runs - begin) / step) - 2
            if steps >= 2 or layers == 1:
                return settings, max(2, min(steps, self.flags.steps))
            settings = {**settings, "model.layers": layers - max(1, layers // 10)}
