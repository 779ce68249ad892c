"""Watches a running service from outside and from inside until its growth is decided, and names the causes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from modelguard import _units
from modelguard.diagnosis._attach import Inside, attached, require_attachable
from modelguard.diagnosis._attribution import attribute
from modelguard.diagnosis._child import Progress
from modelguard.diagnosis._compiled import compiled
from modelguard.diagnosis._facts_process import interpreter_of, named_process, process_number, readable
from modelguard.diagnosis._growth import GrowthReport, steps_of
from modelguard.diagnosis._observed import Calls, Look, Observed
from modelguard.environment import _memory, _proc
from modelguard.errors import InvalidOption, NotSupported
from modelguard.facts.growth import FEWEST

__all__ = ["Watched", "diagnose_process"]

_READINGS = 24
_DAY = 86_400


def diagnose_process(
    pid: str | int,
    *,
    seconds: float = 300.0,
    progress: Progress = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> GrowthReport:
    """Watch a running process, decide whether its memory grows with its calls, and attribute the growth.

    CPython 3.14 and later only. A script in a thread of the process counts objects at the start and at the end, and
    calls on guards in between. Freed memory is returned at the start and at the end; nothing else is changed.

    Args:
        pid: The id of the process: of a server with workers, that of one worker.
        seconds: How long to watch it. It has to get requests meanwhile.
        progress: Called at each reading.
        clock: Monotonic seconds.
        sleep: Waits for that many seconds.

    Raises:
        InvalidOption: It is not a process id, the process does not exist, has ended, belongs to another user, or does
            not answer; or the time is not valid.
        NotSupported: This Python is older than 3.14, the process runs another one, or in a container, or this process
            has no right to trace it.
    """
    number = process_number(pid)
    if not 1 <= seconds <= _DAY:
        raise InvalidOption("--time", seconds, why="must be between 1 s and 1 day", fix="Write --time 5m.")
    if not _proc.is_mounted():
        raise NotSupported("modelguard diagnose --pid", reason="there is no /proc")
    require_attachable(number, interpreter_of(number))
    with readable(number):
        subject = named_process(number)
        with attached(number) as inside:
            return Watched(inside, clock, sleep, progress).report(subject, seconds)


@dataclass(frozen=True)
class Watched:
    """A process that is watched.

    Attributes:
        inside: Answers questions in it.
        clock: Monotonic seconds.
        sleep: Waits for that many seconds.
        progress: Called at each reading.
        private: Reads the private memory of a process, in bytes.
    """

    inside: Inside
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    progress: Progress
    private: Callable[[int], int] = _memory.private_of

    def report(self, subject: str, seconds: float) -> GrowthReport:
        """Watch it for so long, and judge."""
        calls, observed = Calls(), Observed()
        free = self._trim()
        first = self._look()
        began = self.clock()
        unknown = self._children()
        try:
            for number in range(_READINGS + 1):
                self.sleep(max(0.0, began + number * seconds / _READINGS - self.clock()))
                total = calls.total(self.inside.ask("uses").get("uses", ()))
                count = total if calls.known else int(1000 * (self.clock() - began))
                private = self.private(self.inside.pid)
                observed.add(count, private)
                self.progress({"calls": total, "private": private, "first": observed.first, "phase": "drive"})
        except KeyboardInterrupt:
            unknown.append("it was interrupted")
        last, trimmed = self._look(), max(0, self._trim() - free)
        measured = observed.measured(first, last, trimmed, "calls" if calls.known else "milliseconds")
        judged = measured.judged
        unknown += steps_of(judged, measured.per)
        if not measured.calls[-1] and len(measured.calls) >= FEWEST:
            unknown.append("no call has ended meanwhile; send it requests")
        elif judged.verdict == "undecided":
            unknown.append(
                f"{judged.reason}; it needs --time {_units.format_seconds(math.ceil(judged.more * seconds))}"
            )
        causes, rest = attribute(measured) if judged.verdict == "grows" else ((), 0.0)
        return GrowthReport(subject, judged.verdict, causes, rest, measured, tuple(unknown))

    def _children(self) -> list[str]:
        count = sum(1 for _ in _proc.descendants(self.inside.pid, _proc.processes())) - 1
        return [f"it has {count} processes below it, which were not watched"] if count > 0 else []

    def _look(self) -> Look:
        said = self.inside.ask("look")
        return Look(
            said.get("census", {}), said.get("types", {}), compiled(self.inside.pid), tuple(said.get("libraries", ()))
        )

    def _trim(self) -> int:
        """Bytes that a trim gives back."""
        before = self.private(self.inside.pid)
        self.inside.ask("trim")
        return max(0, before - self.private(self.inside.pid))
