"""What every part uses: the flags, the program, the time that is left, and its rows."""

import collections
import json
import math
import os
import statistics
import sys
import tarfile
import threading
import time
import traceback

from .budget import OutOfTime
from .commands import Commands, Failed
from .program import Program


class Bench:
    def __init__(self, flags, budget, out, scratch, head):
        self.flags = flags
        self.budget = budget
        self.out = out
        self.logs = scratch / "logs"
        self.logs.mkdir()
        empty = scratch / "empty.toml"
        empty.write_text("")
        self.scratch = scratch
        self.commands = Commands(self.logs, self.left)
        self.program = Program(flags, self.commands, empty)
        # What the file of each part begins with.
        self.head = head
        self.parts = []
        # Trainings side by side write rows at once.
        self.lock = threading.Lock()

    def left(self):
        return self.budget.left()

    # Parts.

    def run(self, part):
        """Runs a part. Whatever happens in it costs no other part."""
        begin = time.monotonic()
        self.begin(part, f"by its limit of {self.left():.0f} s")
        self.say(f"{part.name}: {part.tells} (at most {self.left():.0f} s)")
        try:
            part.run(self)
            self.parts[-1]["ended"] = "by itself"
        except OutOfTime:
            pass
        except Exception as error:
            self.failed(part.name, error)
            told = isinstance(error, Failed)
            self.parts[-1]["ended"] = "by itself" if told else f"by {type(error).__name__}"
        finally:
            self.commands.kill_all()
            self.parts[-1]["seconds"] = round(time.monotonic() - begin, 1)
            self.store()
            self.pack()

    def leave_out(self, part, left):
        left = max(left, 0)
        self.begin(part, f"left out: it needs {part.least:.0f} s, and {left:.0f} s were left")
        self.say(f"{part.name}: {self.parts[-1]['ended']}")
        self.store()

    def begin(self, part, ended):
        about = {"part": part.name, "tells": part.tells, **self.head}
        self.parts.append({**about, "ended": ended, "rows": []})

    def say(self, line):
        print(line[:200], file=sys.stderr, flush=True)

    def store(self):
        path = self.out / f"{self.parts[-1]['part']}.json"
        whole = path.with_suffix(".json.new")
        # JSON has no infinity.
        text = json.dumps(finite(self.parts[-1]), indent=1, default=str, allow_nan=False)
        whole.write_text(text + "\n")
        whole.replace(path)

    def pack(self):
        """All logs so far, in one archive: a call that is cut off has told what it knew."""
        path = self.out / "logs.tar.gz"
        with tarfile.open(f"{path}.new", "w:gz") as archive:
            archive.add(self.logs, "logs")
        os.replace(f"{path}.new", path)

    # Rows.

    def row(self, figure, value, unit="", spread=None, target=None, met=None, **more):
        one = {"figure": figure, "value": value, "unit": unit, "spread": spread, "target": target,
               "met": met, **more}
        with self.lock:
            self.parts[-1]["rows"].append(one)
            self.store()
            self.say(f"  {figure}: {told(value)} {unit}".rstrip())

    def median(self, figure, values, unit="", least=None, most=None, **more):
        """A row of the median, with the least, the most and the count. `least` or `most` is its
        target, judged in bf16 on a GPU."""
        middle = statistics.median(values)
        target = least and f">= {least}" or most and f"<= {most}"
        judges = self.flags.kind == "cuda" and self.flags.dtype == "bf16" and not self.flags.quick
        met = (middle >= least if least else middle <= most) if target and judges else None
        self.row(figure, middle, unit, [min(values), max(values), len(values)], target, met, **more)
        return middle

    def failed(self, figure, error):
        # A defect of the command itself is told with its place.
        more = {} if isinstance(error, Failed) else {"trace": traceback.format_exc()}
        command = getattr(error, "argv", None)
        self.row(figure, f"failed: {error!s}", met=False, command=command, **more)

    def attempt(self, figure, function):
        """What the function of a figure gives; `None`, and a row that says why, if it fails."""
        try:
            return function(figure)
        except Failed as error:
            self.failed(figure, error)
            return None

    def taken(self, name, ways):
        """The ways whose settings the program takes: an older one lacks some."""
        found = {}
        for way, settings in ways.items():
            why = self.program.refuses(settings)
            if why is None:
                found[way] = settings
            else:
                self.row(f"{name}: {way}", f"not run: {why}")
        return found

    def turn(self, settings, steps, what="bench"):
        """A run of so many steps after the first, as a turn of `rounds`."""
        return lambda name: self.program.run(name, settings, steps + 1, what)

    def rounds(self, turns):
        """What each of the functions tells, in turns: three, or as many as there is time for. One
        that fails has no further turn."""
        found = {name: [] for name in turns}
        try:
            for _ in range(1 if self.flags.quick else 3):
                begin = time.monotonic()
                for name in list(turns):
                    one = self.attempt(name, turns[name])
                    if one is None:
                        del turns[name]
                    else:
                        found[name].append(one)
                if time.monotonic() - begin > self.left():
                    break
        except OutOfTime:
            # What the earlier turns told is told.
            if not any(found.values()):
                raise
        return {name: results for name, results in found.items() if results}

    def all_rows(self):
        return [one for part in self.parts for one in part["rows"]]


def finite(value):
    """A value with words in place of numbers that are none in JSON."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def told(number):
    if not isinstance(number, float) or not math.isfinite(number):
        return str(number)
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def is_words(value):
    return isinstance(value, str) and value.startswith(("failed: ", "not run: "))


def table(parts):
    """The rows of all parts. Goldens that are right stand in the file alone, and of rows that
    failed or did not run for the same reason there is one."""
    lines = ["| part | figure | result | least to most | target | met |", "|---" * 6 + "|"]
    for part in parts:
        whys = collections.Counter(one["value"] for one in part["rows"] if is_words(one["value"]))
        for one in part["rows"]:
            same = whys.pop(one["value"], 0) if is_words(one["value"]) else 1
            if one.get("detail") and one["met"] or not same:
                continue
            spread = one["spread"]
            spread = spread and f"{told(spread[0])} to {told(spread[1])} of {spread[2]}"
            met = {True: "yes", False: "**no**", None: ""}[one["met"]]
            value = f"{told(one['value'])} {one['unit']}".strip().split("\n")[0][:200]
            layers = f" ({one['layers']} layers)" if "layers" in one else ""
            figure = one["figure"] + layers + (f" and {same - 1} others" if same > 1 else "")
            cells = [part["part"], figure, value, spread or "", one["target"] or "", met]
            lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
        if part["ended"] != "by itself":
            lines.append(f"| {part['part']} | {part['tells']} | {part['ended']} | | | |")
    return "\n".join(lines)
