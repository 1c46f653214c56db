"""NVIDIA's compute-sanitizer on what failed before: it names the kernel and line of a fault.

The first failures tell the most, and each is slow under a tool.
"""

import shutil

FAILURES = 2
# Accesses outside of memory, and accesses of two threads without a barrier between them.
TOOLS = ["memcheck", "racecheck"]


def run(bench):
    failed = [one for one in bench.all_rows() if one["met"] is False and one.get("command")]
    failed = [one for one in failed if one["command"][0] == bench.flags.program]
    if not failed:
        return bench.row("compute-sanitizer", "not run: nothing failed")
    if not shutil.which("compute-sanitizer"):
        return bench.row("compute-sanitizer", "not run: it is not on the path")
    jobs = [(bench, one, tool) for one in failed[:FAILURES] for tool in TOOLS]
    bench.commands.side_by_side(check, jobs, bench.program.at_once)


def check(bench, failed, tool):
    figure = f"{tool}: {failed['figure']}"
    argv = ["compute-sanitizer", "--tool", tool, "--print-limit", "20", *failed["command"]]
    ended = bench.commands.run(figure, argv)
    found = [line.strip("= ") for line in ended.says.splitlines() if "SUMMARY" in line]
    bench.row(figure, found[-1] if found else ended.says[-300:], seconds=ended.seconds)
