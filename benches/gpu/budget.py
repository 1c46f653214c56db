"""Which parts run, and for how long: those that tell most come first, and all end in time."""

import dataclasses
import math
import time
import typing


class OutOfTime(Exception):
    """The time of a part is over."""


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    tells: str
    # With fewer seconds it would tell nothing.
    least: float
    # It stops after this many seconds, so that one part does not take the time of all others.
    most: float
    run: typing.Callable


class Budget:
    """The seconds of all parts together (`None`: no bound), and of the part that runs."""

    def __init__(self, seconds=None, clock=time.monotonic):
        self.clock = clock
        self.end = clock() + (math.inf if seconds is None else seconds)
        self.part_end = self.end

    def left(self):
        """Seconds until the part that runs must have ended."""
        return self.part_end - self.clock()

    def given(self, part, later):
        """The seconds of a part; `None` if it would tell nothing in what is left. The parts after
        it keep their least, as many of them as there is time for, those that tell most first."""
        room = self.end - self.clock() - part.least
        if room < 0:
            return None
        kept = 0
        for one in later:
            if kept + one.least <= room:
                kept += one.least
        return min(part.most, part.least + room - kept)

    def run(self, parts, run, leave_out):
        """Calls `run` with each part that there is time for, and `leave_out` with the others."""
        for index, part in enumerate(parts):
            seconds = self.given(part, parts[index + 1:])
            if seconds is None:
                leave_out(part, self.end - self.clock())
            else:
                self.part_end = self.clock() + seconds
                run(part)
