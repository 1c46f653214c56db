"""Kills runs at random moments, resumes them, and compares their results with those of unbroken runs.

    python3 benches/kills.py [--kills 500] [--seed 0] [--seconds 0] [--ranks 2] [--only WORD]

The environment variable L2L names the program (default target/release/l2l). Every kill is a SIGKILL at a moment drawn
from the time that the unbroken command takes; for a resumed run, from the first 40 % of it. Cases: all families of
tests/goldens in turn with checkpoints, with the EPS on file, and with both; packed data, LoRA, bf16, frozen parts in NF4;
`export`, `eval` and `tune` of a trained model; with --ranks a run of several processes, one of which is killed (the
program must then be built with MPI).

After each kill the run is resumed, and killed again or left to its end. The script counts four faults:

    wrong    the weights_digest differs from that of the unbroken run
    lost     the run resumed from a step before one that was complete on the disk, or announced by the second step after it
    refused  the run did not resume
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests/goldens"
PROGRAM = Path(os.environ.get("L2L", ROOT / "target/release/l2l")).resolve()
STEPS = 30
KINDS = ("checkpoints", "file", "both")


def families():
    """The goldens that are models with data."""
    found = sorted(path.parent.name for path in GOLDENS.glob("*/data.jsonl"))
    found.remove("long")  # each of its steps takes a second
    return [name for name in found if (GOLDENS / name / "config.json").is_file()]


class Case:
    """A run that is killed: its settings, and the folders that it resumes from."""

    def __init__(self, name, kind, settings, ranks=0):
        self.name, self.kind, self.ranks = name, kind, ranks
        self.settings = [f"step.steps={STEPS}", "log.format=json", *settings]

    def keeps(self, folder):
        """The settings that keep its state in a folder."""
        sets = []
        if self.kind in ("checkpoints", "both"):
            sets += [f"checkpoint.directory={folder}/run", "checkpoint.every_steps=1"]
        if self.kind in ("file", "both"):
            sets += ["eps.tier=file", f"eps.path={folder}/eps"]
        return sets

    def train(self, folder, *more):
        settings = self.settings + self.keeps(folder)
        sets = [word for one in settings for word in ("--set", one)]
        start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(self.ranks)]
        start = start if self.ranks else []
        return [*start, PROGRAM, "train", folder / "run.toml", *sets, *more]


def golden(name, *more):
    return [
        f"model.path={GOLDENS / name}",
        f"data.train={GOLDENS / name / 'data.jsonl'}",
        "data.sequence_length=",
        "step.batch=5",
        "step.micro_batch=2",
        *more,
    ]


def cases(ranks):
    all_of_them = [
        Case(name, KINDS[nth % 3], golden(name, *clip))
        for nth, name in enumerate(families())
        # Every second case has deferred updates.
        for clip in [["optimizer.clip_norm=0.5"] if nth % 2 else []]
    ]
    small = ["model.layers=2", "model.hidden=32", "model.heads=4", "model.vocabulary=256"]
    small += ["model.positions=64", "step.batch=4", "step.micro_batch=2"]
    for kind in KINDS:
        packed = [*small, "data.packing=true", "data.sequence_length=64", "data.train=TEXT"]
        all_of_them += [
            Case("packed", kind, packed),
            Case("bf16", kind, golden("tied", "device.dtype=bf16")),
            Case("LoRA", kind, golden("llama", "train.lora={ rank = 4 }")),
            Case("LoRA on NF4", kind, golden("llama", "train.lora={ rank = 4 }", "train.base=nf4")),
        ]
        if ranks:
            shares = [f"parallel.groups={ranks}", f"step.batch={2 * ranks}", "step.micro_batch=1"]
            groups = golden("llama", *shares)
            all_of_them.append(Case(f"{ranks} ranks", kind, groups, ranks))
    return all_of_them


def events(path):
    """The events in a killed run's output, without a last line that is cut."""
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


def kill(process, ranks, chance):
    """Kills the command. Of several ranks it kills one; the others then end by themselves."""
    if ranks:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children:
            try:
                os.kill(int(chance.choice(children)), signal.SIGKILL)
            except ProcessLookupError:
                pass
            return
    process.kill()


def run(command, folder, chance=None, most=None, ranks=0):
    """Runs a command, and kills it within `most` seconds if there is a number. Returns its status,
    output, and how long it took."""
    out = folder / "out"
    begin = time.monotonic()
    with open(out, "w") as to, open(folder / "err", "w") as error:
        process = subprocess.Popen([str(word) for word in command], stdout=to, stderr=error)
        if most is not None:
            try:
                process.wait(chance.uniform(0, most))
            except subprocess.TimeoutExpired:
                kill(process, ranks, chance)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:  # mpirun sometimes hangs when all of its processes have ended
            process.kill()
            process.wait()
    return process.returncode, events(out), time.monotonic() - begin


def files(folder, settings):
    """The config of a run, and the text of one that is packed."""
    (folder / "run.toml").write_text("")
    lines = [f"Line {n} of a text that is packed, with {n * n % 97} words.\n\n" for n in range(300)]
    (folder / "text.txt").write_text("".join(lines))
    return [one.replace("=TEXT", f"={folder}/text.txt") for one in settings]


def train_case(case, kills, chance, tally):
    """Kills a run up to `kills` times, or until it is done, and resumes it to its end."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        settings = case.settings
        case.settings = files(folder, settings)
        unbroken = Case(case.name, "", case.settings[2:])
        status, found, took = run(unbroken.train(folder), folder)
        expected = digest_of(found)
        if status or not expected:
            sys.exit(f"{case.name}: {(folder / 'err').read_text()}")
        # A run with checkpoints takes longer than one without.
        status, _, took = run(case.train(folder), folder, ranks=case.ranks)
        if status:
            sys.exit(f"{case.name} ({case.kind}): {(folder / 'err').read_text()}")
        for kept in ("run", "eps"):
            shutil.rmtree(folder / kept, ignore_errors=True)
        done, reached = 0, 0
        while True:
            last = done >= kills
            more = [] if last else [chance, 0.4 * took, case.ranks]
            status, found, _ = run(case.train(folder, "--resume"), folder, *more)
            steps = steps_of(found)
            if done:
                tally["resumes"] += 1
            if steps and steps[0] <= reached:
                tally["lost steps"] += reached - steps[0] + 1
                print(f"{case.name} ({case.kind}): step {reached} was complete, resumed before "
                      f"step {steps[0]}", flush=True)
            if status == 0:
                break
            killed = status == -signal.SIGKILL or (case.ranks and status != 2)
            if last or not killed:
                error = (folder / "err").read_text()
                tally["refused"] += 1
                print(f"{case.name} ({case.kind}): status {status}: {error}", flush=True)
                break
            done += 1
            tally["kills"] += 1
            # The checkpoint of a step, or its updates on file, are complete when the second step
            # after it is announced: they are written while the first one runs.
            announced = (steps[-1] if steps else 0) - 2
            reached = max(reached, announced, complete(folder))
        if status == 0:
            tally["ended"] += 1
            digest = digest_of(found)
            if digest != expected:
                tally["wrong"] += 1
                print(f"{case.name} ({case.kind}): {digest}, and not {expected}", flush=True)
        tally["left"] += len(left(folder))
        case.settings = settings
        return done


def other_case(name, kills, chance, tally):
    """Kills a command that reads a run's checkpoint: the run must be as it was, and the command do
    its work when it is called again."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        files(folder, [])
        case = Case("llama", "checkpoints", golden("llama"))
        status, found, _ = run(case.train(folder), folder)
        assert status == 0, (folder / "err").read_text()
        sets = [word for one in case.settings + case.keeps(folder) for word in ("--set", one)]
        to = folder / "made"
        command = {
            "export": [PROGRAM, "export", "--to", to, *sets[4:]],
            "eval": [PROGRAM, "eval", folder / "run.toml", *sets,
                     "--set", f"data.validation={GOLDENS / 'llama' / 'data.jsonl'}"],
            "tune": [PROGRAM, "tune", folder / "run.toml", *sets, "--steps", "1", "--rounds", "1",
                     "--to", to],
        }[name]
        status, expected, took = run(command, folder)
        assert status == 0, (folder / "err").read_text()
        for _ in range(kills):
            shutil.rmtree(to, ignore_errors=True)
            to.unlink(missing_ok=True)
            status, _, _ = run(command, folder, chance, took)
            tally["kills"] += status == -signal.SIGKILL
            # Each file that exists is whole.
            if name == "export" and to.exists() and not (to / "config.json").is_file():
                tally["wrong"] += 1
            if name == "tune" and to.exists() and not to.read_text().startswith("# l2l tune"):
                tally["wrong"] += 1
        shutil.rmtree(to, ignore_errors=True)
        to.unlink(missing_ok=True)
        status, again, _ = run(command, folder)
        tally["resumes"] += 1
        if status:
            tally["refused"] += 1
            print(f"{name}: {(folder / 'err').read_text()}", flush=True)
        elif name == "eval" and again != expected:
            tally["wrong"] += 1
        # The run is unchanged.
        status, resumed, _ = run(case.train(folder, "--resume"), folder)
        tally["ended"] += status == 0
        tally["wrong"] += digest_of(resumed) != digest_of(found)
        names = left(folder)
        tally["left"] += len(names)
        if names:
            print(f"{name} left {Counter(n.rstrip('0123456789') for n in names)}", flush=True)
        return kills


COLUMNS = ("kills", "resumes", "ended", "wrong", "lost steps", "refused", "left")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="end after so long")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    chance, begin = random.Random(arguments.seed), time.monotonic()
    work = [(f"{c.name} ({c.kind})", lambda n, t, c=c: train_case(c, n, chance, t))
            for c in cases(arguments.ranks)]
    work += [(name, lambda n, t, name=name: other_case(name, n, chance, t))
             for name in ("export", "eval", "tune")]
    work = [one for one in work if arguments.only in one[0]]
    tallies, total = {name: Counter() for name, _ in work}, 0
    is_time = lambda: arguments.seconds and time.monotonic() - begin > arguments.seconds
    while total < arguments.kills and not is_time():
        for name, killed in work:
            if total >= arguments.kills or is_time():
                break
            before = tallies[name]["kills"]
            killed(min(5, arguments.kills - total), tallies[name])
            total += tallies[name]["kills"] - before
            print(f"{total:4} kills, {time.monotonic() - begin:5.0f} s: {name}", flush=True)
    print(f"\n| case | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}")
    for name, tally in tallies.items():
        if tally:
            print(f"| {name} | {' | '.join(str(tally[column]) for column in COLUMNS)} |")
    whole = sum(tallies.values(), Counter())
    print(f"| all | {' | '.join(str(whole[column]) for column in COLUMNS)} |")
    sys.exit(any(whole[column] for column in ("wrong", "lost steps", "refused")))


if __name__ == "__main__":
    main()
