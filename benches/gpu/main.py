"""The command: reads the flags, runs the parts within the minutes, prints the table."""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

from . import peer
from .bench import Bench, table
from .budget import Budget
from .parts import GROUPS, PARTS

ABOUT = """One command for a machine with an NVIDIA GPU: checked, then measured, beside PyTorch.

It needs the program (--program, else the environment's L2L, else target/release/l2l) and the folder
tests/goldens; neither cargo nor a network. PyTorch (2.4 or newer) is the peer, where this Python
has it with CUDA. With --minutes all parts together end in time: those that tell most run first, and
those that there is no time for are named. The parts (all of them when none is named), the least
seconds that each needs, and what it tells:

{parts}

Each part writes DIR/PART.json as it runs, DIR/logs.tar.gz has what every program printed, and a
table is printed at the end. A figure is the median of steps (without the first) or of turns, with
the least and the most. A part that would not end in time times fewer layers or steps: the row says
how many. --dtype (bf16; f32 with --kind cpu) is the device's and the peer's: f16 on a V100 or a T4,
which have no bf16. Targets of speed are judged in bf16 alone. --kernels is a folder for compiled
kernels: take it along, and the next machine with the same kind of GPU does not compile them. --kind
cpu --quick tries all of the logic at toy sizes where there is no GPU: its figures mean nothing.
--set goes to the program.
"""
# Toy sizes need this share of the least seconds.
QUICK = 0.04
# Seconds of a part without --minutes: a machine may end a call after ten minutes.
ALONE = 560
# Seconds at the end for the last kill, the archive and the table.
END = 8


def read_flags():
    lines = [f"    {part.name:<14} {part.least:>4.0f} s  {part.tells}" for part in PARTS]
    lines += [f"    {name:<14}         {', '.join(parts)}" for name, parts in GROUPS.items()]
    form = argparse.RawDescriptionHelpFormatter
    about = ABOUT.format(parts="\n".join(lines))
    parser = argparse.ArgumentParser("benches/gpu.py", description=about, formatter_class=form)
    parser.add_argument("--program", default=os.environ.get("L2L", "target/release/l2l"))
    names = [*(part.name for part in PARTS), *GROUPS]
    parser.add_argument("--part", nargs="+", action="extend", choices=names, metavar="NAME")
    parser.add_argument("--minutes", type=float, help="all parts together end within them")
    parser.add_argument("--out", default="gpu-results", metavar="DIR")
    parser.add_argument("--kernels", metavar="DIR", help="folder for compiled kernels")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["f32", "bf16", "f16"])
    parser.add_argument("--host-gib", type=float, help="host memory that a model may take (120)")
    parser.add_argument("--steps", type=int, help="steps of a run at most, after the first (6)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    flags.dtype = flags.dtype or ("bf16" if flags.kind == "cuda" else "f32")
    flags.host_gib = flags.host_gib or (0.03 if flags.quick else 120)
    flags.steps = max(2, flags.steps or (3 if flags.quick else 6))
    return flags


def chosen(flags):
    names = [one for name in flags.part or [] for one in GROUPS.get(name, [name])]
    parts = [part for part in PARTS if not names or part.name in names]
    share = QUICK if flags.quick else 1
    return [dataclasses.replace(part, least=share * part.least,
                                most=part.most if flags.minutes else ALONE) for part in parts]


def main():
    flags = read_flags()
    if flags.peer:
        return peer.run(json.loads(flags.peer))
    program = shutil.which(flags.program)
    if not program:
        sys.exit(f"{flags.program}: no such program: give --program")
    flags.program = os.path.abspath(program)
    budget = Budget(flags.minutes and 60 * flags.minutes - END)
    version = subprocess.run([program, "--version"], stdout=subprocess.PIPE, text=True, check=True)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    head = {"date": now, "program": version.stdout.strip(), "arguments": sys.argv[1:],
            "kind": flags.kind, "dtype": flags.dtype, "quick": flags.quick}
    out = pathlib.Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    # A call that is ended from outside ends its programs, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="l2l-gpu-", ignore_cleanup_errors=True) as scratch:
        bench = Bench(flags, budget, out, pathlib.Path(scratch), head)
        budget.run(chosen(flags), bench.run, bench.leave_out)
    sizes = ", toy sizes" if flags.quick else ""
    print(f"device.kind {flags.kind}, device.dtype {flags.dtype}{sizes}, {now}\n")
    print(table(bench.parts))
    print(f"\n{out.resolve()}")
    bad = any(one["met"] is False for one in bench.all_rows())
    # With --minutes, parts that were cut or left out are named, and no error.
    fine = ("by itself", "left out", "by its limit") if flags.minutes else "by itself"
    cut = any(not part["ended"].startswith(fine) for part in bench.parts)
    sys.exit(1 if bad or cut else 0)
