"""What every part uses: the flags, the program, the time that is left, and the rows that it writes."""

import json
import math
import os
import statistics
import sys
import tarfile
import threading
import time

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
        print(f"{part.name}: {part.tells} (at most {self.left():.0f} s)", file=sys.stderr, flush=True)
        try:
            part.run(self)
            self.parts[-1]["ended"] = "by itself"
        except OutOfTime:
            pass
        except Exception as error:
            self.failed(part.name, error)
            self.parts[-1]["ended"] = f"by {type(error).__name__}"
        finally:
            self.commands.kill_all()
            self.parts[-1]["seconds"] = round(time.monotonic() - begin, 1)
            self.store()
            self.pack()

    def leave_out(self, part, left):
        self.begin(part, f"left out: it needs {part.least:.0f} s, and {max(left, 0):.0f} s were left")
        print(f"{part.name}: {self.parts[-1]['ended']}", file=sys.stderr, flush=True)
        self.store()

    def begin(self, part, ended):
        self.parts.append({"part": part.name, "tells": part.tells, **self.head, "ended": ended, "rows": []})

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
            print(f"  {figure}: {told(value)} {unit}".rstrip()[:200], file=sys.stderr, flush=True)

    def median(self, figure, values, unit="", target=None, is_met=None, **more):
        """A row of the median, with the least, the most and the count. Targets are bf16's on a GPU."""
        middle = statistics.median(values)
        judges = self.flags.kind == "cuda" and self.flags.dtype == "bf16" and not self.flags.quick
        met = is_met(middle) if is_met and judges else None
        self.row(figure, middle, unit, [min(values), max(values), len(values)], target, met, **more)
        return middle

    def failed(self, figure, error):
        self.row(figure, f"failed: {error}", met=False, command=getattr(error, "argv", None))

    def attempt(self, figure, function, *arguments):
        """What a call gives; `None`, and a row that says why, if it fails."""
        try:
            return function(*arguments)
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

    def rounds(self, ways):
        """Results of each way, in turns: three, or as many as there is time for. A way that fails ends."""
        found = {name: [] for name in ways}
        for _ in range(1 if self.flags.quick else 3):
            begin = time.monotonic()
            for name in list(ways):
                one = self.attempt(name, ways[name])
                if one is None:
                    del ways[name]
                else:
                    found[name].append(one)
            if time.monotonic() - begin > self.left():
                break
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


def table(parts):
    lines = ["| part | figure | result | least to most | target | met |", "|---|---|---|---|---|---|"]
    for part in parts:
        for one in part["rows"]:
            # Goldens are many: those that are right stand in the file.
            if one.get("detail") and one["met"]:
                continue
            spread = one["spread"]
            spread = spread and f"{told(spread[0])} to {told(spread[1])} of {spread[2]}"
            met = {True: "yes", False: "**no**", None: ""}[one["met"]]
            value = f"{told(one['value'])} {one['unit']}".strip().split("\n")[0][:200]
            layers = f" ({one['layers']} layers)" if "layers" in one else ""
            cells = [part["part"], one["figure"] + layers, value, spread or "", one["target"] or "", met]
            lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
        if part["ended"] != "by itself":
            lines.append(f"| {part['part']} | {part['tells']} | {part['ended']} | | | |")
    return "\n".join(lines)
