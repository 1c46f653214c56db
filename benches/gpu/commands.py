"""Runs programs. Each is a process group of its own that writes to a file, and ends with its part.

A program that hangs inside the driver may not even end when it is killed. It would keep the pipes
that it writes to open, so there are none: nothing ever waits for it longer than its limit.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import time

from .budget import OutOfTime

# Tiny trainings that share a GPU. On an H100 with 16 cores, 106 trainings took 31 s that way.
AT_ONCE = 14
# Seconds that a killed process gets to disappear.
GRACE = 5


class Failed(Exception):
    """A program told nothing. `argv` is its command."""

    def __init__(self, why, argv=None):
        super().__init__(why)
        self.argv = argv


@dataclasses.dataclass
class Ended:
    argv: list
    # `None` if it was killed at its limit.
    status: int | None
    # The JSON objects that it printed, and the last of its other lines.
    events: list
    says: str
    seconds: float

    @property
    def why(self):
        """The error at the end of what it says, without the notes before it."""
        return self.says[max(self.says.rfind("error: "), 0):]


class Commands:
    def __init__(self, logs, left):
        self.logs = logs
        self.left = left
        self.count = itertools.count()
        self.running = set()
        # True while all programs are ended.
        self.closed = False

    def start(self, name, argv, **environment):
        if self.closed or self.left() <= 0:
            raise OutOfTime(name)
        slug = re.sub(r"\W+", "-", name)
        path = self.logs / f"{next(self.count):03}-{slug}.log"
        argv = [str(one) for one in argv]
        with open(path, "w") as file:
            file.write(f"$ {shlex.join(argv)}\n")
            file.flush()
            try:
                process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "RUST_BACKTRACE": "1", **environment})
            except OSError as error:
                raise Failed(f"{argv[0]}: {error}", argv) from error
        process.path, process.begin = path, time.monotonic()
        self.running.add(process)
        if self.closed:
            self.kill(process)
        return process

    def finish(self, process, limit=math.inf):
        """Waits until a process ends, at most until its limit and that of the part."""
        limit = min(limit - (time.monotonic() - process.begin), self.left())
        try:
            status = process.wait(max(0, limit) if limit < math.inf else None)
        except subprocess.TimeoutExpired:
            status = None
            self.kill(process)
        self.running.discard(process)
        if self.closed:
            raise OutOfTime(process.path.name)
        seconds = time.monotonic() - process.begin
        text = process.path.read_text(errors="replace")
        with open(process.path, "a") as file:
            how = "killed" if status is None else f"status {status}"
            file.write(f"\n# {how}, {seconds:.1f} s\n")
        events, says = sort_lines(text.splitlines()[1:])
        if status is None:
            says = f"it did not end within {seconds:.0f} s: {says}"
        return Ended(process.args, status, events, says, seconds)

    def run(self, name, argv, limit=math.inf, **environment):
        return self.finish(self.start(name, argv, **environment), limit)

    def kill(self, process):
        try:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass

    def kill_all(self):
        for process in list(self.running):
            self.kill(process)

    def side_by_side(self, function, jobs, at_once):
        """The results of `function` for each job, in order; `None` for a job without time."""
        def one(job):
            try:
                return function(*job)
            except OutOfTime:
                return None

        pool = concurrent.futures.ThreadPoolExecutor(at_once)
        try:
            return list(pool.map(one, jobs))
        finally:
            # After an error or a signal, jobs that have begun start no further program.
            self.closed = True
            self.kill_all()
            pool.shutdown(cancel_futures=True)
            self.closed = False


def sort_lines(lines):
    """The JSON objects among lines, and the end of the other lines."""
    events, says = [], []
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            one = line
        (events if isinstance(one, dict) else says).append(one)
    return events, "\n".join(map(str, says)).strip()[-1500:]
