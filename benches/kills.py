"""Breaks runs at random moments, lets them go on, and compares their results with those of unbroken runs.

    python3 benches/kills.py [--kind KIND ...] [--count 500] [--seed 0] [--seconds 0] [--only WORD]

The environment variable L2L names the program (default target/release/l2l). Each kind breaks runs `count` times:

    kill    SIGKILL, to train, export, eval and tune
    abort   a future of `fit` is dropped, and the next run begins in the same process. This needs the program
            `cargo build --release --example 10_restart`, which lies beside l2l
    freeze  the file system of checkpoints and of eps.path is frozen for 5 s, with a watchdog of 2 s. Needs root
    first   SIGTERM or SIGINT, to the first process of a PID namespace, as in a container. Needs root
    ranks   SIGKILL, to one of two ranks. Needs mpirun, and a program with MPI

A kind that the machine or the program does not allow is skipped, and the script says why. A moment is drawn from the
time that the unbroken command takes; for a resumed run, from the first 40 % of it. Cases: all families of tests/goldens
in turn with checkpoints, with the EPS on file, and with both; packed data, LoRA, bf16, frozen parts in NF4, a delay,
PipeDream and 2BW, layers in pieces, preferences and embeddings.

A broken run is resumed, and broken again or left to its end; a frozen one goes on by itself. The script counts how
often runs were broken, and four faults:

    wrong    the weights_digest differs from that of the unbroken run, a file is not whole, or a signal was not obeyed
    lost     the run resumed from a step before one that was complete on the disk, or announced by the second step after
    refused  the run did not go on
    left     files remain that no run will read or remove
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Callable, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests/goldens"
PROGRAM = Path(os.environ.get("L2L", ROOT / "target/release/l2l")).resolve()
RESTART = PROGRAM.parent / "examples/10_restart"
PLACES = ("checkpoints", "file", "both")
SMALL = ("model.layers=2", "model.hidden=32", "model.heads=4", "model.vocabulary=256", "model.positions=64",
         "step.batch=4", "step.micro_batch=2")
# Two ranks have a group of micro-batches each.
SHARES = ("parallel.groups=2", "step.batch=4", "step.micro_batch=1")
STEPS = 30
# Steps between checkpoints where batches follow each other without a flush.
WINDOW = 3
# A run on a file system that is frozen does more steps, so that it lasts longer than the freezes take to come.
FROZEN_STEPS = 100
FREEZE_SECONDS = 5
# A run that has not ended after so many freezes does not go on.
MOST_FREEZES = 20
# Runs on one file system: they are frozen together, each at another moment of its own.
FROZEN_TOGETHER = 10


class Skipped(Exception):
    """A kind that the machine or the program does not allow."""


class Way(NamedTuple):
    """How a run is started and broken."""

    start: tuple  # what stands before the program
    breaks: Callable  # is given the process, and a source of random numbers
    is_broken: Callable  # whether a broken run ends with this status


def children(process):
    try:
        return [int(one) for one in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def kill(process, _):
    process.kill()


def kill_a_child(process, chance):
    """Kills one of the ranks. The others then end by themselves."""
    try:
        os.kill(chance.choice(children(process) or [process.pid]), signal.SIGKILL)
    except ProcessLookupError:
        pass


def hears(process, number):
    """True if a process has a handler of a signal. The system drops signals to the first process without one."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def end_the_first(process, chance):
    """Asks the first process of the namespace to end, once it can hear that."""
    number = chance.choice((signal.SIGTERM, signal.SIGINT))
    while process.poll() is None:
        for child in children(process):
            if hears(child, number):
                os.kill(child, number)
                return
        time.sleep(0.001)


KILLED = Way((), kill, lambda status: status == -signal.SIGKILL)
FIRST = Way(("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"), end_the_first,
            lambda status: status in (128 + signal.SIGINT, 128 + signal.SIGTERM))
RANK = Way(("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"), kill_a_child,
           lambda status: status not in (0, 2))


class Case(NamedTuple):
    """A run that is broken: its settings, and where its state is."""

    name: str
    place: str  # one of PLACES; empty if nothing is kept
    settings: tuple
    way: Way = KILLED
    steps: int = STEPS
    window: int = 1  # the steps from one checkpoint to the next

    def __str__(self):
        return f"{self.name} ({self.place})"

    def sets(self, folder):
        """The settings as arguments. The run keeps its state in the folder."""
        sets = [f"step.steps={self.steps}", "log.format=json"]
        files = {"=TEXT": text, "=RECORDS": records}
        for one in self.settings:
            word = next((word for word in files if one.endswith(word)), None)
            sets.append(one.removesuffix(word) + f"={files[word](folder)}" if word else one)
        if self.place in ("checkpoints", "both"):
            sets += [f"checkpoint.directory={folder}/run", f"checkpoint.every_steps={self.window}"]
        if self.place in ("file", "both"):
            sets += ["eps.tier=file", f"eps.path={folder}/eps"]
        return [word for one in sets for word in ("--set", one)]

    def unbroken(self):
        """The same run, with nothing kept and one process."""
        return self._replace(place="", way=KILLED)

    def train(self, folder, *more):
        return [*self.way.start, PROGRAM, "train", config(folder), *self.sets(folder), *more]


def config(folder):
    path = folder / "run.toml"
    path.touch()
    return path


def text(folder, lines=300):
    """A text for packed data."""
    path = folder / f"text-{lines}.txt"
    if not path.exists():
        all_lines = (f"Line {n} of a text that is packed, with {n * n % 97} words.\n\n" for n in range(lines))
        path.write_text("".join(all_lines))
    return path


def records(folder):
    """Preferences, and pairs of texts."""
    path = folder / "records.jsonl"
    if not path.exists():
        of = lambda n: {"prompt": f"Say {n}.", "chosen": f" It is {n}.", "rejected": f" Nothing {n % 7}.",
                        "anchor": f"What is {n * n}?", "positive": f"{n} times {n}"}
        path.write_text("".join(json.dumps(of(n)) + "\n" for n in range(40)))
    return path


def objective(*more):
    return (f"model.path={GOLDENS / 'text/llama'}", "data.train=RECORDS", "data.sequence_length=64", "step.batch=4",
            "step.micro_batch=2", *more)


def golden(name, *more):
    data = GOLDENS / name / "data.jsonl"
    return (f"model.path={GOLDENS / name}", f"data.train={data}", "data.sequence_length=", "step.batch=5",
            "step.micro_batch=2", *more)


def families():
    """The goldens that are models with data."""
    found = sorted(path.parent.name for path in GOLDENS.glob("*/data.jsonl"))
    found.remove("long")  # each of its steps takes a second
    found.remove("embeddinggemma")  # it has a loss of pairs alone
    return [name for name in found if (GOLDENS / name / "config.json").is_file()]


def cases(way=KILLED):
    # Every second case has deferred updates.
    found = [Case(name, PLACES[nth % 3], golden(name, *(["optimizer.clip_norm=0.5"] if nth % 2 else [])), way)
             for nth, name in enumerate(families())]
    packed = (*SMALL, "data.packing=true", "data.sequence_length=64", "data.train=TEXT")
    lora = golden("llama", "train.lora={ rank = 4 }")
    for place in PLACES:
        found += [
            Case("packed", place, packed, way),
            Case("bf16", place, golden("tied", "device.dtype=bf16"), way),
            Case("LoRA", place, lora, way),
            Case("LoRA on NF4", place, (*lora, "train.base=nf4"), way),
            Case("delay", place, golden("llama", "schedule.delay=1"), way),
            Case("delay, bf16", place, golden("tied", "schedule.delay=1", "device.dtype=bf16"), way),
            Case("delay, LoRA", place, (*lora, "schedule.delay=1"), way),
            Case("pieces", place, golden("llama", "parallel.slices=2", "parallel.tensor=2"), way),
            Case("preference", place, objective("objective.kind=dpo", "train.lora={ rank = 4 }"), way),
            Case("preference in the step", place,
                 objective("objective.kind=dpo", "objective.reference=in-step", "train.lora={ rank = 4 }"), way),
            Case("embedding", place, objective("model.task=sentence-embedding", "objective.kind=contrastive"), way),
        ]
    windows = ("schedule.stages=2", f"schedule.window={WINDOW}")
    return found + [
        Case("PipeDream", "checkpoints",
             golden("untied", "schedule.kind=pipedream", "step.micro_batch=5", *windows), way, window=WINDOW),
        Case("2BW", "checkpoints",
             golden("untied", "schedule.kind=2bw", "schedule.delay=1", "step.batch=4", *windows), way, window=WINDOW),
    ]


def events(path):
    """The events in a broken run's output, without a last line that is cut."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return found


def steps_of(found):
    return [event["step"] for event in found if event.get("event") == "step"]


def digest_of(found):
    return next((e["weights_digest"] for e in found if e.get("event") == "summary"), None)


def complete(folder):
    """The newest step whose checkpoint is complete on the disk."""
    whole = [record.parent.name for record in folder.glob("run/step-*/l2l.json")]
    return max((int(name[5:]) for name in whole if name[5:].isdigit()), default=0)


def left(folder, pattern=("*.l2l-*", ".tmp*", "*.partial", "*/*.l2l-partial", "*/*.l2l-old")):
    return [path.name for one in pattern for path in folder.glob(one)]


def run(command, folder, way=KILLED, chance=None, most=None):
    """Runs a command, and breaks it within `most` seconds if there is a number. Returns its status,
    output, and how long it took."""
    begin = time.monotonic()
    process = start(command, folder)
    if most is not None:
        try:
            process.wait(chance.uniform(0, most))
        except subprocess.TimeoutExpired:
            way.breaks(process, chance)
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:  # mpirun sometimes hangs when all of its processes have ended
        process.kill()
        process.wait()
    return process.returncode, events(folder / "out"), time.monotonic() - begin


def start(command, folder):
    with open(folder / "out", "w") as out, open(folder / "err", "w") as error:
        return subprocess.Popen([str(word) for word in command], stdout=out, stderr=error)


def must_run(what, command, folder):
    """Runs a command that is not broken."""
    status, found, took = run(command, folder)
    if status:
        sys.exit(f"{what}: status {status}: {(folder / 'err').read_text()}")
    return found, took


def tell(tally, fault, text):
    """Counts a fault, and prints what it was."""
    tally[fault] += 1
    print(f"{fault}: {text}", flush=True)


@contextmanager
def place():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def train_case(case, most, chance, tally):
    """Breaks a run up to `most` times, or until it is done, and resumes it to its end."""
    with place() as folder:
        found, _ = must_run(case, case.unbroken().train(folder), folder)
        expected = digest_of(found)
        # A run with checkpoints takes longer than one without.
        _, took = must_run(case, case.train(folder), folder)
        for kept in ("run", "eps"):
            shutil.rmtree(folder / kept, ignore_errors=True)
        status, broken, reached = None, 0, 0
        while status != 0:
            moment = [chance, 0.4 * took] if broken < most else []
            status, found, _ = run(case.train(folder, "--resume"), folder, case.way, *moment)
            steps = steps_of(found)
            tally["resumes"] += broken > 0
            if steps and steps[0] <= reached:
                tell(tally, "lost", f"{case}: step {reached} was complete, resumed before step {steps[0]}")
            if status != 0 and not (moment and case.way.is_broken(status)):
                tell(tally, "refused", f"{case}: status {status}: {(folder / 'err').read_text()}")
                break
            if status != 0:
                broken += 1
                tally["broken"] += 1
                # The checkpoint of a step, or its updates on file, are complete when the second step
                # (or window) after it is announced: they are written while the first one runs.
                reached = max(reached, (steps[-1] if steps else 0) - 2 * case.window, complete(folder))
        ended(case, status, found, expected, folder, tally)


def ended(case, status, found, expected, folder, tally):
    """Counts the end of a run."""
    if status == 0:
        tally["ended"] += 1
        if digest_of(found) != expected:
            tell(tally, "wrong", f"{case}: {digest_of(found)}, and not {expected}")
    tally["left"] += len(left(folder))


def reading_case(name, most, chance, tally):
    """Kills a command that reads a run's checkpoint: the run must be as it was, and the command do
    its work when it is called again."""
    with place() as folder:
        case = Case("llama", "checkpoints", golden("llama"))
        found, _ = must_run(case, case.train(folder), folder)
        made = folder / "made"
        command = {
            "export": [PROGRAM, "export", "--to", made, *case.sets(folder)[4:]],
            "eval": [PROGRAM, "eval", config(folder), *case.sets(folder),
                     "--set", f"data.validation={GOLDENS / 'llama' / 'data.jsonl'}"],
            "tune": [PROGRAM, "tune", config(folder), *case.sets(folder), "--steps", "1", "--rounds", "1",
                     "--to", made],
        }[name]
        is_whole = {
            "export": lambda: (made / "config.json").is_file(),
            "eval": lambda: True,
            "tune": lambda: made.read_text().startswith("# l2l tune"),
        }[name]
        expected, took = must_run(name, command, folder)
        for _ in range(most):
            remove(made)
            status, _, _ = run(command, folder, KILLED, chance, took)
            tally["broken"] += KILLED.is_broken(status)
            if made.exists() and not is_whole():
                tell(tally, "wrong", f"{name}: its file is not whole")
        remove(made)
        status, again, _ = run(command, folder)
        tally["resumes"] += 1
        if status:
            tell(tally, "refused", f"{name}: {(folder / 'err').read_text()}")
        elif name == "eval" and again != expected:
            tell(tally, "wrong", f"{name}: {again}, and not {expected}")
        # The run is unchanged.
        status, resumed, _ = run(case.train(folder, "--resume"), folder)
        ended(name, status, resumed, digest_of(found), folder, tally)


def remove(path):
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def obeying_case(name, most, chance, tally):
    """Asks a command without an end to end."""
    with place() as folder:
        endless = [word for one in [*SMALL, "step.steps=1000000"] for word in ("--set", one)]
        read = ["--set", f"data.train={text(folder, 500_000)}", "--set", "data.sequence_length=64"]
        drawn = ["--set", "data.train=random"]
        command = {
            "train": ["train", config(folder), *endless, *drawn],
            "train that reads data": ["train", config(folder), *endless, *read],
            "bench": ["bench", config(folder), *endless, *drawn],
            "tune": ["tune", config(folder), *endless, *drawn, "--to", folder / "tuned.toml", "--steps", "1000",
                     "--rounds", "1000"],
        }[name]
        for _ in range(most):
            status, _, took = run([*FIRST.start, PROGRAM, *command], folder, FIRST, chance, 1.5)
            tally["broken"] += 1
            if not FIRST.is_broken(status):
                tell(tally, "wrong", f"{name}: status {status} after {took:.1f} s: {(folder / 'err').read_text()}")


def dropping_case(case, most, chance, tally):
    """Drops futures of a run, and begins it again in the same process."""
    with place() as folder:
        shown = [PROGRAM, "config", "show", config(folder), *case.sets(folder)]
        (folder / "run.json").write_text(subprocess.run(shown, check=True, capture_output=True, text=True).stdout)
        status, found, _ = run([RESTART, folder / "run.json", most, chance.randrange(1, 1 << 32)], folder)
        if not found:
            tell(tally, "refused", f"{case}: status {status}: {(folder / 'err').read_text()}")
            return
        [came] = found
        tally["broken"] += came["dropped"]
        tally["resumes"] += came["dropped"]
        tally["waits"] += came["waits"]
        if came["lost"]:
            tell(tally, "lost", f"{case}: {came}")
        found = [{"event": "summary", "weights_digest": came["weights_digest"]}]
        ended(case, 0, found, came["expected"], folder, tally)


@contextmanager
def small_file_system(folder):
    """A file system of its own, in a file."""
    image, at = folder / "image", folder / "mount"
    at.mkdir()
    with open(image, "wb") as file:
        file.truncate(1 << 30)
    system(["mkfs.ext4", "-q", image])
    system(["mount", "-o", "loop", image, at])
    try:
        yield at
    finally:
        system(["umount", at])


@contextmanager
def frozen(file_system):
    system(["fsfreeze", "--freeze", file_system])
    try:
        yield
    finally:
        system(["fsfreeze", "--unfreeze", file_system])


def system(command):
    """Calls a command that needs root. Without it, the kind is skipped."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise Skipped(f"{command[0]} is not installed") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise Skipped(f"{command[0]}: {lines[0] if lines else f'status {done.returncode}'}")


@cache
def expected_digest(case):
    with place() as folder:
        return digest_of(must_run(case, case.train(folder), folder)[0])


def freezing_case(cases, _, chance, tally):
    """Freezes the file system of several runs while they write, until all of them have ended."""
    expected = [expected_digest(case.unbroken()) for case in cases]
    with place() as folder, small_file_system(folder) as mount:
        outs = [folder / f"{nth}" for nth in range(len(cases))]
        homes = [mount / f"{nth}" for nth in range(len(cases))]
        for new in outs + homes:
            new.mkdir()
        processes = [start(case.train(home, "--set", "watchdog.seconds=2"), out)
                     for case, home, out in zip(cases, homes, outs)]
        try:
            for _ in range(MOST_FREEZES):
                if not going(processes):
                    break
                time.sleep(chance.uniform(0.1, 1.5))
                with frozen(mount):
                    time.sleep(FREEZE_SECONDS)
                    tally["broken"] += len(going(processes))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for case, process, digest, home, out in zip(cases, processes, expected, homes, outs):
            if process.returncode:
                tell(tally, "refused", f"{case}: status {process.returncode}: {(out / 'err').read_text()}")
            ended(case, process.returncode, events(out / "out"), digest, home, tally)


def going(processes):
    return [process for process in processes if process.poll() is None]


def kill_work():
    return [*[(str(case), train_case, case) for case in cases()],
            *[(name, reading_case, name) for name in ("export", "eval", "tune")]]


def abort_work():
    if not RESTART.is_file():
        raise Skipped(f"{RESTART} is not built: cargo build --release --example 10_restart")
    every = cases()
    # A slow disk is still being written to when the next run begins.
    every[1::2] = [case._replace(settings=(*case.settings, "eps.disk_rate=3MB/s")) for case in every[1::2]]
    return [(str(case), dropping_case, case) for case in every]


def freeze_work():
    with place() as folder, small_file_system(folder) as mount, frozen(mount):
        pass
    every = [case._replace(steps=FROZEN_STEPS) for case in cases()]
    groups = [every[begin:begin + FROZEN_TOGETHER] for begin in range(0, len(every), FROZEN_TOGETHER)]
    return [(f"{group[0]} to {group[-1]}", freezing_case, group) for group in groups]


def first_work():
    system([*FIRST.start, "true"])
    obeys = [(name, obeying_case, name) for name in ("train", "train that reads data", "bench", "tune")]
    trains = [(str(case), train_case, case) for case in cases(FIRST)]
    # Each command comes again after a few runs that are resumed.
    return [one for nth, train in enumerate(trains) for one in (train, *obeys[nth % 4:nth % 4 + 1])]


def rank_work():
    with place() as folder:
        case = Case("llama", "checkpoints", golden("llama", *SHARES), RANK)
        system(case.train(folder))
    # A quantised base is for one process.
    shared = [case for case in cases(RANK) if "train.base=nf4" not in case.settings]
    every = [case._replace(settings=(*case.settings, *SHARES)) for case in shared]
    return [(str(case), train_case, case) for case in every]


KINDS = {"kill": kill_work, "abort": abort_work, "freeze": freeze_work, "first": first_work, "ranks": rank_work}
COLUMNS = ("broken", "resumes", "waits", "ended", "wrong", "lost", "refused", "left")
FAULTS = ("wrong", "lost", "refused")


def break_all(kind, work, count, seconds, chance):
    """Does the work in turn until runs were broken `count` times. Returns what came of it."""
    tallies, total, begin = {}, 0, time.monotonic()
    is_over = lambda: total >= count or (seconds and time.monotonic() - begin > seconds)
    while not is_over():
        for name, call, case in work:
            if is_over():
                break
            tally = Counter()
            call(case, min(5, count - total), chance, tally)
            tallies[name] = tallies.get(name, Counter()) + tally
            total += tally["broken"]
            print(f"{kind}: {total:4}, {time.monotonic() - begin:5.0f} s: {name}", flush=True)
    return tallies


def show(kind, tallies):
    print(f"\n| {kind} | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}")
    for name, tally in {**tallies, "all": sum(tallies.values(), Counter())}.items():
        print(f"| {name} | {' | '.join(str(tally[column]) for column in COLUMNS)} |")
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=["kill"])
    parser.add_argument("--count", type=int, default=500, help="how often each kind breaks runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="end each kind after so long")
    parser.add_argument("--only", default="", help="cases with this in their name")
    arguments = parser.parse_args()
    faults = 0
    for kind in arguments.kind:
        try:
            work = [one for one in KINDS[kind]() if arguments.only in one[0]]
        except Skipped as why:
            print(f"{kind}: skipped: {why}", flush=True)
            continue
        chance = random.Random(arguments.seed)
        tallies = break_all(kind, work, arguments.count, arguments.seconds, chance)
        show(kind, tallies)
        faults += sum(tally[fault] for tally in tallies.values() for fault in FAULTS)
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
