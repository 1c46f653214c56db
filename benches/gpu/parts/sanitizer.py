"""NVIDIA's compute-sanitizer on what failed before: a fault that it finds is named with its kernel and line.

The first failures tell the most, and each is slow under a tool. memcheck and racecheck look at different faults.
"""

import shutil

FAILURES = 2
TOOLS = ["memcheck", "racecheck"]


def run(bench):
    failed = [one for one in bench.all_rows() if one["met"] is False and one.get("command")]
    of_program = [one for one in failed if one["command"][0] == bench.flags.program]
    if not of_program:
        return bench.row("compute-sanitizer", "not run: nothing failed")
    if not shutil.which("compute-sanitizer"):
        return bench.row("compute-sanitizer", "not run: it is not on the path (it comes with the CUDA toolkit)")
    bench.commands.side_by_side(lambda *job: check(bench, *job), [(one, tool) for one in of_program[:FAILURES] for tool in TOOLS])


def check(bench, failed, tool):
    argv = ["compute-sanitizer", "--tool", tool, "--print-limit", "20", *failed["command"]]
    ended = bench.commands.run(f"{tool} of {failed['figure']}", argv)
    found = [line for line in ended.says.splitlines() if "SUMMARY" in line]
    bench.row(f"{tool}: {failed['figure']}", found[-1].strip("= ") if found else ended.says[-300:], seconds=ended.seconds)
