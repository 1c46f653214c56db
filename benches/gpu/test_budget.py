"""Tests that all parts end in time, whatever hangs or fails."""

import contextlib
import io
import json
import os
import pathlib
import sys
import tarfile
import tempfile
import types
import unittest
import unittest.mock

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from gpu.bench import Bench, table
from gpu.budget import Budget, Part
from gpu.commands import Commands, sort_lines
from gpu.parts import PARTS


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def part(name, least, most=1000, takes=9000):
    return Part(name, f"what {name} tells", least, most, takes)


def ran(parts, seconds):
    """By part, the seconds that it was given; `None` if it was left out. A part takes `part.run`
    seconds, at most those that it was given."""
    clock = Clock()
    budget, given = Budget(seconds, clock), {}

    def run(one):
        given[one.name] = budget.left()
        clock.now += min(one.run, budget.left())

    budget.run(parts, run, lambda one, left: given.__setitem__(one.name, None))
    assert seconds is None or clock.now <= seconds
    return given


class OfBudget(unittest.TestCase):
    def test_without_minutes_each_part_has_its_most(self):
        parts = [part("a", 5, 70, takes=70), part("b", 5, 80, takes=80)]
        self.assertEqual(ran(parts, None), {"a": 70, "b": 80})

    def test_later_parts_keep_their_least(self):
        self.assertEqual(ran([part("a", 10), part("b", 20)], 100), {"a": 80, "b": 20})

    def test_a_part_takes_its_most_and_leaves_the_rest(self):
        self.assertEqual(ran([part("a", 10, 30), part("b", 20)], 100), {"a": 30, "b": 70})

    def test_seconds_that_a_part_does_not_take_are_the_next_ones(self):
        self.assertEqual(ran([part("a", 10, takes=5), part("b", 20)], 100), {"a": 80, "b": 95})

    def test_a_part_without_time_is_left_out_and_a_smaller_one_runs(self):
        parts = [part("a", 30), part("large", 80), part("small", 20)]
        self.assertEqual(ran(parts, 60), {"a": 40, "large": None, "small": 20})

    def test_parts_that_tell_most_run_first(self):
        parts = [part("a", 50), part("b", 50), part("c", 10)]
        self.assertEqual(ran(parts, 55), {"a": 55, "b": None, "c": None})

    def test_all_parts_of_the_program_run_in_an_hour_and_a_half(self):
        self.assertNotIn(None, ran([part(one.name, one.least) for one in PARTS], 5400).values())


def commands(folder, *left):
    """Commands to which `left` seconds are left, one after the other."""
    values = iter(left)
    return Commands(folder, lambda: next(values))


class Temporary(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        # What reads from it hangs.
        self.hang = self.folder / "hang"
        os.mkfifo(self.hang)


class OfPrograms(Temporary):
    def test_a_program_that_hangs_ends_with_its_whole_group_and_has_told_its_lines(self):
        alive = self.folder / "alive"
        os.mkfifo(alive)
        # The child of the program holds `alive` open, and ignores what a terminal sends.
        script = f"""echo '{{"event": "step"}}'; echo words; exec 3> {alive}
                     sh -c 'trap "" TERM HUP INT; cat {self.hang}' & wait"""
        here = commands(self.folder, 1, 0)
        process = here.start("hangs", ["sh", "-c", script])
        with open(alive) as held:
            ended = here.finish(process)
            # The end of the file: no process holds it any more.
            self.assertEqual(held.read(), "")
        self.assertIsNone(ended.status)
        self.assertEqual(ended.events, [{"event": "step"}])
        self.assertIn("words", ended.says)
        self.assertIn("killed", process.path.read_text())

    def test_jobs_without_time_tell_nothing(self):
        here = commands(self.folder, 1, 1000, 1, 0, 0)
        job = lambda *argv: here.run("job", argv).status
        jobs = [("true",), ("cat", self.hang), ("true",)]
        self.assertEqual(here.side_by_side(job, jobs, 1), [0, None, None])

    def test_lines_that_are_no_objects_are_words(self):
        self.assertEqual(sort_lines(["1", '{"event": "a"}', '{"event": "cut of']),
                         ([{"event": "a"}], '1\n{"event": "cut of'))


class OfParts(Temporary):
    def run_parts(self, parts, seconds, kind="cpu", program="true"):
        flags = types.SimpleNamespace(kind=kind, dtype="f32", quick=True, program=program, set=[],
                                      kernels="kernels")
        self.clock = Clock()
        budget = Budget(seconds, self.clock)
        (self.folder / "scratch").mkdir()
        bench = Bench(flags, budget, self.folder, self.folder / "scratch", {"program": "fake"})
        with contextlib.redirect_stderr(io.StringIO()):
            budget.run(parts, bench.run, bench.leave_out)
        return bench

    def test_a_part_that_fails_costs_no_other(self):
        def breaks(bench):
            bench.row("before", 1.0)
            raise KeyError("a defect")

        def late(bench):
            self.clock.now += 20
            bench.commands.start("late", ["true"])

        def fails(bench):
            bench.attempt("a figure", lambda figure: bench.program.plan({}))

        fine = lambda bench: bench.row("fine", 2.0, met=True)
        for_one_reason = lambda bench: [bench.row(name, "not run: x") for name in "abc"]
        parts = [Part("breaks", "", 1, 9, breaks), Part("late", "", 1, 9, late),
                 Part("large", "all", 99, 99, fine), Part("fails", "", 1, 9, fails),
                 Part("fine", "", 1, 9, fine), Part("words", "", 1, 9, for_one_reason)]
        bench = self.run_parts(parts, 60)
        left_out = "left out: it needs 99 s, and 40 s were left"
        self.assertEqual([part["ended"] for part in bench.parts],
                         ["by KeyError", "by its limit of 9 s", left_out, *["by itself"] * 3])
        files = {path.stem: json.loads(path.read_text()) for path in self.folder.glob("*.json")}
        self.assertEqual(sorted(files), ["breaks", "fails", "fine", "large", "late", "words"])
        self.assertEqual([row["met"] for row in files["breaks"]["rows"]], [None, False])
        self.assertEqual(files["fails"]["rows"][0]["command"][0], "true")
        self.assertEqual(files["fine"]["program"], "fake")
        self.assertIn(f"| large | all | {left_out} |", table(bench.parts))
        self.assertIn("| words | a and 2 others | not run: x |", table(bench.parts))
        self.assertNotIn("| words | b |", table(bench.parts))
        with tarfile.open(self.folder / "logs.tar.gz") as archive:
            self.assertIn("logs/000-plan.log", archive.getnames())

    def script(self, name, line):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return str(path)

    def test_what_failed_runs_again_under_the_sanitizer(self):
        event = {"event": "check", "kernel": "product", "dtype": "f32", "cases": 1, "off": 0.5,
                 "tolerance": 0.1, "seed": 7, "error": None}
        program = self.script("l2l", f"echo '{json.dumps(event)}'; exit 1")
        self.script("compute-sanitizer", 'echo "$@"; echo "== ERROR SUMMARY: 1 error"')
        parts = [one for one in PARTS if one.name in ("check", "sanitizer")]
        path = f"{self.folder}:{os.environ['PATH']}"
        with unittest.mock.patch.dict(os.environ, PATH=path):
            bench = self.run_parts(parts, None, "cuda", program)
        check, sanitizer = (part["rows"] for part in bench.parts)
        self.assertEqual({row["met"] for row in check}, {False})
        self.assertEqual({row["value"] for row in sanitizer}, {"ERROR SUMMARY: 1 error"})
        # Two failures, each under two tools.
        self.assertEqual(len(sanitizer), 4)
        logs = [path.read_text() for path in (self.folder / "scratch/logs").glob("*memcheck*")]
        self.assertTrue(all("--check --group" in log and "kernels" in log for log in logs))


if __name__ == "__main__":
    unittest.main()
