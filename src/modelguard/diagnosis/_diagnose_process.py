"""Watches a running process until its growth is decided: from outside, and from inside where it can be asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from modelguard import _units
from modelguard.diagnosis import _outside
from modelguard.diagnosis._attach import Inside, inside_of
from modelguard.diagnosis._attribution import attribute
from modelguard.diagnosis._child import Progress
from modelguard.diagnosis._compiled import compiled
from modelguard.diagnosis._counts import Counts, Growing
from modelguard.diagnosis._facts_process import interpreter_of, named_process, process_number, readable
from modelguard.diagnosis._growth import GrowthReport, notes_on
from modelguard.diagnosis._holders import Held
from modelguard.diagnosis._observed import Calls, Look, Observed
from modelguard.environment import _memory, _proc
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported
from modelguard.facts.growth import FEWEST

__all__ = ["Watched", "diagnose_process"]

_READINGS = 24
_DAY = 86_400
_OUTSIDE = "from outside, private memory by kind, the allocator ({}), threads, child processes and open files"
_INSIDE = "and from inside: its objects, what holds those that grow, and the calls on its guards"
#: How to get what was not looked at.
_LISTEN = (
    "call modelguard.control.listen() where its application is made, or use Python 3.14 for both; modelguard.diagnosis."
    "watch() in it, or modelguard diagnose MODULE:FUNCTION, find it too"
)


def diagnose_process(
    pid: str | int,
    *,
    seconds: float = 300.0,
    progress: Progress = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> GrowthReport:
    """Watch a running process, decide whether its memory grows with its calls, and attribute the growth.

    Any process is watched from outside: the kinds of its memory, its threads, children and open files. One that has
    called ``modelguard.control.listen()``, or that runs the same CPython as this one, 3.14 or later, is asked too:
    a thread of it counts objects at the start and at the end, finds what holds those that have become more, and counts
    calls on guards in between. Freed memory is then returned at the start and at the end; nothing else is changed.

    Args:
        pid: The id of the process: of a server with workers, that of one worker.
        seconds: How long to watch it. It has to get requests meanwhile.
        progress: Called at each reading.
        clock: Monotonic seconds.
        sleep: Waits for that many seconds.

    Raises:
        InvalidOption: It is not a process id, the process does not exist, has ended, belongs to another user, or has
            stopped to answer; or the time is not valid.
        NotSupported: There is no ``/proc``.
    """
    number = process_number(pid)
    if not 1 <= seconds <= _DAY:
        raise InvalidOption("--time", seconds, why="must be between 1 s and 1 day", fix="Write --time 5m.")
    if not _proc.is_mounted():
        raise NotSupported("modelguard diagnose --pid", reason="there is no /proc")
    with readable(number), ExitStack() as stack:
        _memory.usage(number)  # raises if there is no such process, or it belongs to another user
        subject, python = named_process(number), interpreter_of(number)
        inside, why = None, "it runs no Python"
        if python is not None:
            try:
                inside = stack.enter_context(inside_of(number, python))
            except ModelGuardError as error:
                why = f"{_reason(error)}; {_LISTEN}"
        return Watched(number, inside, clock, sleep, progress, why=why).report(subject, seconds)


def _reason(error: ModelGuardError) -> str:
    """Why it cannot be asked, as the end of a sentence."""
    if isinstance(error, NotSupported):
        return error.reason
    fix = f". {error.fix}" if isinstance(error, InvalidOption) else ""
    return f"it {str(error).removesuffix(fix).partition(': ')[2]}"


@dataclass(frozen=True)
class Watched:
    """A process that is watched.

    Attributes:
        pid: The process.
        inside: Answers questions in it; None if it is seen from outside only.
        clock: Monotonic seconds.
        sleep: Waits for that many seconds.
        progress: Called at each reading.
        private: Reads the private memory of a process, in bytes.
        why: Why it is seen from outside only.
    """

    pid: int
    inside: Inside | None
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    progress: Progress
    private: Callable[[int], int] = _memory.private_of
    why: str = ""
    _unknown: list[str] = field(default_factory=list)

    def report(self, subject: str, seconds: float) -> GrowthReport:
        """Watch it for so long, and judge."""
        calls, observed = Calls(), Observed()
        self._still_there()
        counts = Counts(self.pid)
        free = self._trim()
        first, kinds = self._look(), _outside.kinds_of(self.pid)
        began = self.clock()
        self._unknown.extend(self._children())
        try:
            for number in range(_READINGS + 1):
                self.sleep(max(0.0, began + number * seconds / _READINGS - self.clock()))
                private = self._still_there()
                total = calls.total(self._ask("uses").get("uses", ()))
                made = total if calls.known else int(1000 * (self.clock() - began))
                observed.add(made, private)
                counts.read(made)
                self.progress({"calls": total, "private": private, "first": observed.first, "phase": "drive"})
        except KeyboardInterrupt:
            self._unknown.append("it was interrupted")
        last, now = self._look(), _outside.kinds_of(self.pid)
        held = self._held(calls)
        trimmed = max(0, self._trim() - free)
        measured = observed.measured(first, last, trimmed, "calls" if calls.known else "milliseconds", held)
        measured = replace(measured, growing=tuple(Growing(**each) for each in counts.growing(0)))
        judged = measured.judged
        self._unknown.extend(notes_on(judged, measured.per))
        if not measured.calls[-1] and len(measured.calls) >= FEWEST:
            self._unknown.append("no call has ended meanwhile; send it requests")
        elif judged.verdict == "undecided":
            longer = _units.format_seconds(math.ceil(judged.more * seconds))
            self._unknown.append(f"{judged.reason}; it needs --time {longer}")
        causes, rest = ((), 1.0) if self.inside is None else attribute(measured)
        if judged.verdict != "grows":
            causes, rest = (), 0.0
        seen = (*self._looked_at(), *self._where(kinds, now))
        verdict = "grows" if measured.growing else judged.verdict
        return GrowthReport(subject, verdict, causes, rest, measured, tuple(self._unknown), seen=seen)

    def _still_there(self) -> int:
        """Its private memory.

        Raises:
            InvalidOption: It has ended.
        """
        private = self.private(self.pid)
        if _proc.stat(self.pid) is None:
            why = "has ended meanwhile"
            raise InvalidOption("--pid", self.pid, why=why, fix="Give the id of a process that goes on.")
        return private

    def _looked_at(self) -> Iterator[str]:
        outside = _OUTSIDE.format(_outside.allocator_of(self.pid) or "unknown")
        if self.inside is not None:
            yield f"looked at: {outside}; {_INSIDE}"
            return
        yield f"looked at: {outside}"
        yield f"not looked at: its Python objects, what holds them, and its calls, because {self.why}"

    def _where(self, first: Mapping[str, int], last: Mapping[str, int]) -> Iterator[str]:
        if moved := _outside.moved(first, last):
            yield f"where private memory grew: {moved}"

    def _children(self) -> list[str]:
        count = sum(1 for _ in _proc.descendants(self.pid, _proc.processes())) - 1
        return [f"it has {count} processes below it, which were not watched"] if count > 0 else []

    def _ask(self, question: str) -> dict[str, Any]:
        return {} if self.inside is None else self.inside.ask(question)

    def _look(self) -> Look:
        said = self._ask("look")
        return Look(said.get("census", {}), said.get("types", {}), compiled(self.pid), tuple(said.get("libraries", ())))

    def _held(self, calls: Calls) -> tuple[Held, ...]:
        """What holds what has become more. Where calls are not known, growth with them cannot be asked for."""
        number = calls.total(()) if calls.known else 0
        return tuple(Held(**each) for each in self._ask(f"held {number}").get("held", ()) if each["path"])

    def _trim(self) -> int:
        """Bytes that a trim gives back."""
        before = self.private(self.pid)
        self._ask("trim")
        return max(0, before - self.private(self.pid))
