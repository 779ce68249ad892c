"""Memory readings of a process, the memory that it may still take, and what is freed given back."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Self

from modelguard import _public, _units, telemetry
from modelguard.errors import InvalidOption
from modelguard.facts._memory import MemoryUsage, PrivateMeter, private, usage
from modelguard.lifecycle import system
from modelguard.lifecycle._readings import pause_after
from modelguard.lifecycle.system import System
from modelguard.runtime import fork_hooks
from modelguard.runtime.background import TICKER

__all__ = ["MemoryUsage", "PrivateMeter", "Trimming", "private", "trim_every", "usage"]


#: Seconds of processor time in which little can be freed. A waiting worker of gunicorn takes 4 ms in 30 s, ticker
#: included; uvicorn's, whose event loop wakes ten times a second, 60.
_IDLE = 0.01
#: Seconds until an idle process is looked at again, where growth is what is waited for.
_PAUSE = 1.0
#: The name of a process in events.
_PROCESS = "process"


@dataclass(frozen=True)
class TrimSchedule:
    """When to trim: after so many seconds, or after so many bytes of growth; the other one is infinite."""

    seconds: float = math.inf
    growth: float = math.inf

    def __str__(self) -> str:
        return _units.format_seconds(self.seconds) if self.growth == math.inf else _units.format_bytes(int(self.growth))

    @classmethod
    def parse(cls, value: _units.Duration) -> TrimSchedule:
        """Read ``trim_every``: a size if it is text that ends in a B, as in ``"100 MB"``, else a duration."""
        if isinstance(value, str) and value.rstrip().upper().endswith("B"):
            return cls(growth=_units.size(value, "trim_every"))
        try:
            return cls(seconds=_units.seconds(value, "trim_every"))
        except InvalidOption:
            fix = "Write for example '30s', or '100 MB' to trim whenever the process has grown by that much."
            why = "must be a duration of more than 0 s, or a size"
            raise InvalidOption("trim_every", value, why=why, fix=fix) from None


class Trimming(fork_hooks.Forkable):
    """What :func:`trim_every` has started, until :meth:`stop` or the end of a ``with`` block."""

    fork_rank = fork_hooks.Rank.POOL

    def __init__(self, schedule: TrimSchedule, world: System) -> None:
        self.schedule = schedule
        self.system = world
        self._pause = schedule.seconds if schedule.growth == math.inf else _PAUSE
        self.after_fork_in_child()

    def stop(self) -> None:
        """Trim no more. Further calls have no effect. A process that was forked before goes on."""
        TICKER.remove(self)
        if running() is self:
            _running.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Trimming({str(self.schedule)!r}, {'runs' if running() is self else 'stopped'})"

    def after_fork_in_child(self) -> None:
        """Start anew: the readings are of the parent's memory, and a thread of the parent may have held the lock."""
        self._busy = threading.Lock()
        self._cpu = -math.inf
        self._was_busy = True
        self._floor: int | None = None
        self._next = self.system.clock() + self._pause

    def check_interval(self) -> float:
        """For the ticker: seconds until the next look."""
        return max(0.0, self._next - self.system.clock())

    def tick(self) -> None:
        """Trim if it is time and the process has worked since the last time: an idle one frees nothing."""
        system = self.system
        now = system.clock()
        if now < self._next or not self._busy.acquire(blocking=False):
            return
        try:
            self._next = now + self._pause
            worked = system.cpu() - self._cpu
            # Just after a trim a call may free in no time what it held during that: then there is one more.
            if worked < _IDLE and not (self._was_busy and worked):
                return
            self._was_busy = worked >= _IDLE
            if self.schedule.growth == math.inf or self._has_grown():
                self._trim()
            self._cpu = system.cpu()
        finally:
            self._busy.release()

    def _has_grown(self) -> bool:
        system = self.system
        started = system.thread_cpu()
        # What is not in use, and what malloc does not know about. Private memory alone does not work: the memory that a
        # long call uses now would count as the floor.
        held = system.private() - (system.in_use() or 0)
        self._next = system.clock() + pause_after(system.thread_cpu() - started)
        if self._floor is None:  # only a trim shows how much is in use, and growth counts from there
            return True
        self._floor = min(self._floor, held)
        return held - self._floor >= self.schedule.growth

    def _trim(self) -> None:
        system = self.system
        before, in_use = system.private(), system.in_use() or 0
        started = system.clock()
        trim = system.try_trim()
        seconds = system.clock() - started
        after = system.private()
        # Calls go on meanwhile. What they free during the trim must not count as the floor, or it would never be
        # returned; so of the two figures the one that gives the lower floor counts.
        self._floor = after - max(in_use, system.in_use() or 0)
        telemetry.emit(
            telemetry.MemoryTrimmed(
                guard=_PROCESS,
                bytes_before=before,
                bytes_after=after,
                trimmed_by=trim.allocator,
                trim_error=trim.error,
                seconds=seconds,
                in_use=system.in_use(),
                held=system.held(),
            )
        )


#: Under one name, so that of two threads that come at once one wins.
_running: dict[str, Trimming] = {}


def running() -> Trimming | None:
    """What trims this process now."""
    return _running.get(_PROCESS)


def trim_every(every: _units.Duration) -> Trimming:
    """Return freed memory to the system again and again, in this process and in those that are forked from it.

    It is done in a background thread, and only if the process has worked since the last time. Each time emits
    ``MemoryTrimmed``, whose ``guard`` is ``"process"``. A process has one interval: a second call with the same one
    returns what the first has returned.

    Args:
        every: An interval, such as ``"30s"`` or seconds; or a size such as ``"100 MB"`` (text that ends in B): then
            memory is returned each time the process has grown by so much of what can be returned.

    Returns:
        Its ``stop()`` ends it, as does the end of a ``with`` block.

    Raises:
        InvalidOption: It is neither a duration nor a size, or another one is in force.
        NotSupported: The allocator in force is not known, or this is not Linux.
    """
    world = system.default()
    world.check_trim()
    made = Trimming(TrimSchedule.parse(every), world)
    found = _running.setdefault(_PROCESS, made)  # one step: two threads may get here at once
    if found.schedule != made.schedule:
        fix = "Call it once in a process, or stop() what the first call returned."
        raise InvalidOption("trim_every", every, why=f"this process is trimmed every {found.schedule} already", fix=fix)
    if found is made and world.ticks:
        fork_hooks.register(made)
        try:
            TICKER.add(made)
        except RuntimeError:  # the system gives no thread
            made.stop()
            raise
    return found


_public.set_module(globals())
