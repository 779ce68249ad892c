"""When a model is replaced or released: policies are values that read a snapshot.

A policy has no clock, process or file of its own. The guard takes the readings, puts them into a :class:`Snapshot` and
asks the policy. So a policy is tested by giving it a snapshot.
"""

# Not `from __future__ import annotations`: these classes show modelguard as their module, where the names of their
# fields' types could not be resolved.
import math
from typing import Literal

from modelguard import _public, _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle import _zones
from modelguard.lifecycle._jittered import Jittered
from modelguard.lifecycle._memory_policies import GpuMemoryGrowth, GpuMemoryLimit, MemoryGrowth, MemoryLimit
from modelguard.lifecycle._policy import Horizon, Policy, Snapshot, Value
from modelguard.lifecycle._source_policies import Changed, Modified
from modelguard.lifecycle.backoff import Backoff

__all__ = [
    "TTL",
    "Between",
    "Changed",
    "Errors",
    "GpuMemoryGrowth",
    "GpuMemoryLimit",
    "Idle",
    "MemoryGrowth",
    "MemoryLimit",
    "Modified",
    "Policy",
    "Snapshot",
    "Uses",
]

#: How old a model must be before it is replaced for errors that the last reload has not ended.
_WHILE_FRUITLESS = Backoff("1m", "1h")


class TTL(Jittered):
    """Due when the generation is older than ``age``.

    Args:
        age: Seconds, a ``timedelta``, or text such as ``"1h30m"``.
        jitter: Each process shortens the age by a random part of at most this much, so that workers do not reload in
            step: 0.1 makes ``TTL("1h")`` fire between 54 and 60 minutes. A process's first model, which replicas load
            together, gets five times as much, at most half: it is replaced after 30 to 60 minutes. 0 to 1.

    Raises:
        InvalidOption: ``age`` is not a positive duration, or ``jitter`` is not in 0 to 1.
    """

    kind = "ttl"
    renews = True
    seconds: float

    def __init__(self, age: _units.Duration, *, jitter: float = 0.1) -> None:
        self._set_jitter(jitter)
        self._set(seconds=_units.seconds(age, "age"))

    def due(self, now: Snapshot) -> bool:
        return now.age >= self._age(now)

    def horizon(self, now: Snapshot) -> Horizon:
        return Horizon(uses=math.inf, seconds=max(0.0, self._age(now) - now.age))

    def _age(self, now: Snapshot) -> float:
        return self.seconds * (1 - self._brought_forward(now))

    def __repr__(self) -> str:
        return f"TTL({_units.format_seconds(self.seconds)!r})"


class Uses(Jittered):
    """Due when ``count`` calls or leases have ended on the generation.

    Args:
        count: How many.
        jitter: Each process needs fewer by a random part of at most this much, so that workers with equal shares of the
            traffic do not reload in step: 0.1 makes ``Uses(1000)`` fire between 901 and 1,000 calls, and ``Uses(10)``
            at 10. A process's first model gets five times as much, at most half. 0 to 1.

    Raises:
        InvalidOption: ``count`` is not a whole number of at least 1, or ``jitter`` is not in 0 to 1.
    """

    kind = "uses"
    count: int

    def __init__(self, count: int, *, jitter: float = 0.1) -> None:
        self._set_jitter(jitter)
        self._set(count=_units.whole_number(count, "count"))

    def due(self, now: Snapshot) -> bool:
        return now.uses >= self._least(now)

    def horizon(self, now: Snapshot) -> Horizon:
        return Horizon(uses=max(1, self._least(now) - now.uses), seconds=math.inf)

    def _least(self, now: Snapshot) -> int:
        return max(1, math.ceil(self.count * (1 - self._brought_forward(now))))

    def __repr__(self) -> str:
        return f"Uses({self.count})"


class Errors(Value):
    """Due when this many consecutive calls have raised an ``Exception``.

    Interrupts and cancellations are not errors of the model and do not count. Of a batch that raised and is run again
    in parts, to find the item at fault, the first run counts.

    A reload does not help against an input or a dependency that makes every call fail. So if no call has succeeded
    since a reload for errors, the next one waits: until the model is a minute old, then two, then four, up to an hour,
    each shortened by a random part of up to half.

    Raises:
        InvalidOption: ``consecutive`` is not a whole number of at least 1.
    """

    kind = "errors"
    consecutive: int

    def __init__(self, consecutive: int = 5) -> None:
        self._set(consecutive=_units.whole_number(consecutive, "consecutive"))

    def due(self, now: Snapshot) -> bool:
        if now.consecutive_errors < self.consecutive:
            return False
        fruitless = now.fruitless_reloads
        return fruitless == 0 or now.age >= _WHILE_FRUITLESS.seconds(fruitless, now.jitter)

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - the guard asks after every error by itself
        return Horizon(uses=math.inf, seconds=math.inf)

    def __repr__(self) -> str:
        return f"Errors(consecutive={self.consecutive})"


class Idle(Value):
    """Due when no call has run for ``after``: the model is released, and the next call loads it again.

    Under :func:`isolate` all processes of the function end. With ``keep="mold"`` only its workers do: the mold stays
    with the model in memory, and forks new workers for the next call.

    That call waits for the load, as a first call does. A guard looks for calls ten times in ``after``, and at most once
    a second, so the release comes up to a tenth of it late. In forked workers that share the model of their parent,
    which would return nothing, it is never due.

    Args:
        after: Seconds, a ``timedelta``, or text such as ``"10m"``.
        ready: Whether the guard is ``ready`` while its model is released. A service that nobody else wakes must be, or
            its load balancer sends it no call.
        keep: ``"mold"``: under ``isolate``, end the workers and keep the mold. None: release the model.

    Raises:
        InvalidOption: ``after`` is not a positive duration, ``ready`` is not a bool, or ``keep`` is something else.
            With ``keep`` also at the first load, if no ``isolate`` is above the guard's decorator.
    """

    kind = "idle"
    after: float
    ready: bool
    keep: Literal["mold"] | None

    def __init__(self, after: _units.Duration, *, ready: bool = True, keep: Literal["mold"] | None = None) -> None:
        if not isinstance(ready, bool):
            raise InvalidOption("ready", ready, why="must be True or False", fix="Write ready=False.")
        if keep not in ("mold", None):
            fix = "Write keep='mold', or leave it out to release the model too."
            raise InvalidOption("keep", keep, why="must be 'mold' or None", fix=fix)
        self._set(after=_units.seconds(after, "after"), ready=ready, keep=keep)

    @property
    def unloads(self) -> bool:  # type: ignore[override]
        return self.keep is None

    @property
    def ends_workers(self) -> bool:  # type: ignore[override]
        return self.keep is not None

    def due(self, now: Snapshot) -> bool:
        return now.idle >= self.after

    def horizon(self, now: Snapshot) -> Horizon:
        left = max(0.0, self.after - now.idle)
        return Horizon(uses=math.inf, seconds=min(left, max(1.0, self.after / 10)))

    def __repr__(self) -> str:
        keep = "" if self.keep is None else f", keep={self.keep!r}"
        return f"Idle({_units.format_seconds(self.after)!r}{keep})"


class Between(Value):
    """Due at every moment of a daily span of time. Restricts other policies: ``TTL("1d") & Between("02:00", "05:00")``.

    By itself it would be due all the time, so it is accepted only joined to another policy by ``&``. A span may include
    midnight. The hour that a change to daylight saving time leaves out does not come on that day; the one that it
    repeats comes twice.

    Args:
        start: The first minute, as ``"HH:MM"``.
        end: The minute after the last one.
        tz: The name of a time zone, such as ``"Europe/Berlin"``. Default: the local time of the machine, which is UTC
            in most containers.

    Raises:
        InvalidOption: A time is not a time of day, both are the same, or the time zone is unknown.
    """

    restricts = True
    start: str
    end: str
    tz: str | None

    def __init__(self, start: str, end: str, *, tz: str | None = None) -> None:
        first, last = _time_of_day("start", start), _time_of_day("end", end)
        if first == last:
            raise InvalidOption("end", end, why="is the same as start", fix="Write a span, as in '02:00', '05:00'.")
        self._set(start=start, end=end, tz=_zones.check(tz))

    def due(self, now: Snapshot) -> bool:
        from datetime import datetime

        zone = None if self.tz is None else _zones.named(self.tz)
        moment = f"{datetime.fromtimestamp(now.time, zone):%H:%M}"
        if self.start < self.end:
            return self.start <= moment < self.end
        return moment >= self.start or moment < self.end

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - a minute is as exact as its bounds
        return Horizon(uses=math.inf, seconds=30.0)

    def __repr__(self) -> str:
        return f"Between({self.start!r}, {self.end!r})"


def _time_of_day(argument: str, given: object) -> str:
    hour, colon, minute = given.partition(":") if isinstance(given, str) else ("", "", "")
    digits = len(hour) == len(minute) == 2 and (hour + minute).isascii() and (hour + minute).isdigit()  # noqa: PLR2004 - HH and MM
    if not (colon and digits and int(hour) < 24 and int(minute) < 60):  # noqa: PLR2004 - hours and minutes
        why = "must be a time of day as HH:MM"
        raise InvalidOption(argument, given, why=why, fix=f"Write for example {argument}='02:30'.")
    return str(given)


_public.set_module(globals(), "modelguard")
