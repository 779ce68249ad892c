"""``Cron``: a policy that is due at the moments of a cron expression."""

# Not `from __future__ import annotations`: as in policies.py.
import math
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from itertools import islice, pairwise, takewhile

from modelguard import _extras, _public, _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle import policies
from modelguard.lifecycle.policies import NextCheck, Snapshot, Value

__all__ = ["Cron"]

#: How many of its moments, and in which time, are looked at for the shortest time between two of them.
_LOOKED_AT = 400
_SECONDS_LOOKED_AT = 5 * 366 * 86_400
#: The wall clock may be set, and a machine may sleep: seconds after which it is read again.
_LONGEST = 30.0


class Cron(Value):
    """Due once for each moment of a cron expression: ``Cron("0 3 * * *", tz="Europe/Berlin")`` replaces at 3 o'clock.

    It is due if such a moment has come since the generation began to take calls. So a process that slept over several
    of them reloads once, and a policy joined by ``&`` may come later: ``Cron("0 3 * * *") & Uses(1000)`` is due after
    3 o'clock, once there were 1,000 calls. Needs the extra ``cron`` (cronsim).

    A moment in the hour that a change to daylight saving time leaves out comes at the end of that hour, and one in the
    hour that it repeats comes once. If the minutes or the hours begin with ``*``, it does not come, or comes twice, as
    Debian's cron does it.

    Args:
        expression: Minute, hour, day of the month, month and day of the week. ``L``, ``MON#2`` and names work; seconds
            and ``@daily`` do not.
        tz: The name of a time zone, such as ``"Europe/Berlin"``. Default: the local time of the machine, which is UTC
            in most containers.
        jitter: Each process waits a random part of at most this long after the moment, so that a fleet does not reload
            in the same second. A duration, not a share: default one minute, 0 for none.

    Raises:
        InvalidOption: The expression is not valid or never comes, the time zone is unknown, or ``jitter`` is not a
            duration or longer than the time between two moments.
        NotSupported: cronsim is not installed.
    """

    kind = "cron"
    renews = True
    expression: str
    tz: str | None
    jitter: float

    def __init__(self, expression: str, *, tz: str | None = None, jitter: _units.Duration = 60.0) -> None:
        words = _check_fields(expression)
        seconds = _units.seconds(jitter, "jitter", zero=True)
        if 0 < seconds < 1:
            fix = "Write for example jitter='5m'. Only the jitter of TTL is a share."
            raise InvalidOption("jitter", jitter, why="is less than a second", fix=fix)
        _zone(tz)
        shortest = _shortest_gap(words)
        if seconds > shortest:
            why = f"is longer than the {_units.format_seconds(shortest)} between two moments of {words!r}"
            raise InvalidOption("jitter", jitter, why=why, fix=f"Give at most {_units.format_seconds(shortest)!r}.")
        self._set(expression=words, tz=tz, jitter=seconds)

    def due(self, now: Snapshot) -> bool:
        return now.time >= self._moment(now)

    def next_check(self, now: Snapshot) -> NextCheck:
        return NextCheck(uses=math.inf, seconds=min(_LONGEST, max(0.0, self._moment(now) - now.time)))

    def _moment(self, now: Snapshot) -> float:
        """When it is due, in seconds since the epoch."""
        return _next_moment(self.expression, self.tz, now.began) + self.jitter * now.jitter

    def __repr__(self) -> str:
        zone = "" if self.tz is None else f", tz={self.tz!r}"
        return f"Cron({self.expression!r}{zone})"


def _check_fields(expression: object) -> str:
    """The expression with single spaces, if it has the form of one."""
    fix = "Write five fields, as in '0 3 * * *': minute, hour, day of the month, month, day of the week."
    words = _units.instance(expression, "expression", str, "a cron expression", fix=fix).split()
    if len(words) != policies.CRON_FIELDS:
        raise InvalidOption("expression", expression, why=f"must have five fields, and has {len(words)}", fix=fix)
    return " ".join(words)


@lru_cache(maxsize=128)  # the same for all checks of one generation
def _next_moment(expression: str, tz: str | None, since: float) -> float:
    """The first moment after ``since``, in seconds since the epoch; infinity if there is none in 50 years."""
    return next(_moments(expression, since, _zone(tz)), math.inf)


def _zone(tz: str | None) -> tzinfo:
    return policies.local_zone() if tz is None else policies.zone_named(tz)


def _shortest_gap(expression: str) -> float:
    """The shortest time between two of its moments, in seconds; infinity for moments that are years apart.

    Raises:
        InvalidOption: It is not valid, or there is no moment.
    """
    # From a fixed day, a leap year's first: the answer must not depend on when the process starts. In UTC: a change to
    # daylight saving time may bring two moments together once a year, which then count as one.
    first = datetime(2024, 1, 1, tzinfo=UTC).timestamp()
    if next(_moments(expression, first, UTC), None) is None:
        raise _invalid(expression, "no moment in fifty years")
    near = takewhile(lambda moment: moment < first + _SECONDS_LOOKED_AT, _moments(expression, first, UTC))
    moments = list(islice(near, _LOOKED_AT))
    return min((later - earlier for earlier, later in pairwise(moments)), default=math.inf)


def _moments(expression: str, since: float, zone: tzinfo) -> Iterator[float]:
    cronsim = _extras.load("cronsim", "modelguard.Cron")
    try:
        simulated = cronsim.CronSim(expression, datetime.fromtimestamp(since, zone))
    except cronsim.CronSimError as error:
        raise _invalid(expression, str(error).lower()) from None
    return (moment.timestamp() for moment in simulated)


def _invalid(expression: str, error: str) -> InvalidOption:
    fix = "Write for example '0 3 * * *' for 3 o'clock, and 'L' for the last day of a month."
    return InvalidOption("expression", expression, why=f"is not a cron expression, or never comes ({error})", fix=fix)


_public.set_module(globals(), "modelguard")
