"""The workers of one mold: which are idle, which is replaced, and when a new one may start.

It has no process, clock, thread or lock. Its owner reports what happened, and executes the orders that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from modelguard.lifecycle._policy import Backoff
from modelguard.serving.breaker import Breaker, Circuit

#: ``starting``: it is being forked or loads; ``retiring``: its call is its last one.
WorkerState = Literal["starting", "idle", "busy", "retiring"]

#: Whether there are workers. ``ended``: none until the next call; ``returning``: that call waits for the first of them.
Presence = Literal["present", "ended", "returning"]

#: A mold is replaced when so many of its workers in a row have not come up.
FAILED_STARTS = 2


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker and give it this number."""

    number: int


@dataclass(frozen=True, slots=True)
class End:
    """End an idle worker."""

    number: int


@dataclass(frozen=True, slots=True)
class ReplaceMold:
    """Make a new mold: this one gives no working workers."""


Order = Start | End | ReplaceMold


@dataclass(slots=True)
class Member:
    """One worker.

    Attributes:
        number: Its number; the first is 1, and none is given twice.
        state: What it does.
        worn: Whether one of the guard's policies asked for its replacement.
        probe: Whether its call is the breaker's probe.
        calls: Calls that it has answered.
    """

    number: int
    state: WorkerState = "starting"
    worn: bool = False
    probe: bool = False
    calls: int = 0


class Crew:
    """Decides over workers.

    A worn worker takes calls until another one can take its place, and replacements start one at a time, so capacity
    never falls below ``size``. A spare worker waits for that, so a worn or dead worker is replaced without a delay.
    After several deaths in a row, a new worker starts after a backoff, and then the breaker opens. While the function
    is paused, worn workers stay, and only those that have ended are replaced. All workers can be ended until the next
    call.

    Args:
        size: How many workers may have calls at a time.
        spare: How many more are kept ready.
        breaker: When calls are refused, because workers keep dying.
        backoff: Waits before a start after the second and each further failure in a row.
        is_paused: Whether the function is paused, asked at each decision.
    """

    def __init__(
        self,
        size: int,
        *,
        breaker: Breaker,
        backoff: Backoff,
        spare: int = 0,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._size = size
        self._spare = spare
        self._is_paused = is_paused
        self._busy = 0
        self._backoff = backoff
        self._idle: list[Member] = []
        self._last = 0
        self._failed_starts = 0
        self._asked = False
        self._closed = False
        self.presence: Presence = "present"
        self.circuit = Circuit(breaker)
        self.members: dict[int, Member] = {}
        self.failures = 0
        self.start_at = 0.0

    # What there is

    @property
    def ready(self) -> bool:
        """Whether a worker can take calls, now or after the call that it runs."""
        usable = any(member.state in {"idle", "busy"} for member in self.members.values())
        return usable and not self._closed and self.circuit.state == "closed"

    @property
    def complete(self) -> bool:
        """Whether as many workers have come up as may have calls at a time."""
        return sum(member.state != "starting" for member in self.members.values()) >= self._size

    @property
    def troubled(self) -> bool:
        """Whether the breaker is not closed."""
        return self.circuit.state != "closed"

    @property
    def paused(self) -> bool:
        """Whether worn workers must stay."""
        return self._is_paused()

    def refusal(self, now: float) -> float | None:
        """Seconds after which a caller should try again if the breaker refuses calls now; else None."""
        return self.circuit.retry_after(now)

    # What is asked for

    def settle(self, now: float) -> list[Order]:
        """Start the workers that are missing and end those that have been replaced, as far as it is time for it."""
        if self._closed or self._asked or self.presence == "ended":
            return []
        return [*self._end_replaced(), *self._start_missing(now)]

    def take(self) -> Member | None:
        """Take an idle worker for a call, the one that was used last: its caches are warm. None if there is none."""
        if not self._idle or self._busy >= self._size:
            return None
        member = self._idle.pop()
        self._busy += 1
        member.state = "busy"
        if self.circuit.state != "closed":
            member.probe = self.circuit.admitted()
        return member

    def end_until_next_call(self) -> list[End] | None:
        """End all workers, and start none until :meth:`call_back`. None, and nothing ends, unless all are idle."""
        members = tuple(self.members.values())
        if self._closed or self._asked or any(member.state != "idle" for member in members):
            return None
        self.presence = "ended"
        return list(self._end(members))

    def call_back(self) -> None:
        """A call has come."""
        if self.presence == "ended":
            self.presence = "returning"

    def close(self) -> list[Order]:
        """Start no more workers, and end those that are idle; the others end after their calls."""
        self._closed = True
        return list(self._end(tuple(self.members.values())))

    # What happened

    def started(self, number: int) -> bool:
        """A worker is ready for calls. Returns whether it is to be ended instead."""
        member = self.members.get(number)
        if member is None or self._closed:
            self.members.pop(number, None)
            return True
        self._failed_starts = 0
        self.presence = "present"
        member.state = "idle"
        self._idle.append(member)
        return False

    def answered(self, number: int, *, worn: bool, counts: bool = True) -> bool:
        """A worker has ended its call, and can take another one. Returns whether it is to be ended instead.

        Args:
            number: The worker.
            worn: Whether it asked for its replacement.
            counts: Whether this shows that the model works; an abandoned call does not.
        """
        member = self.members.get(number)
        if member is None:
            return True
        self._busy -= 1
        member.calls += 1
        member.worn = member.worn or worn
        if counts:
            self.failures = 0
            if member.probe or self.circuit.failures:
                self.circuit.succeeded(probe=member.probe)
        elif member.probe:
            self.circuit.probe_inconclusive()
        member.probe = False
        if member.state == "retiring" or self._closed:
            del self.members[number]
            return True
        member.state = "idle"
        self._idle.append(member)
        return False

    def lost(self, number: int, now: float, *, draw: float, blame: bool = True) -> None:
        """A worker has ended by itself, or was killed at its deadline.

        Args:
            number: The worker.
            now: Seconds on a monotonic clock.
            draw: A random number in [0, 1), for the backoff.
            blame: Whether this counts as a failure; a worker that was ended because its caller is gone does not.
        """
        member = self.members.pop(number, None)
        if member is None:
            return
        if member.state == "idle":
            self._idle.remove(member)
        if member.state == "starting":
            self._failed_starts += 1
            self.presence = "present"
        if member.state in {"busy", "retiring"}:
            self._busy -= 1
        if not blame:
            if member.probe:
                self.circuit.probe_inconclusive()
            return
        self.failures += 1
        if self.failures > 1:
            self.start_at = now + self._backoff.seconds(self.failures - 1, draw)
        if member.state in {"busy", "retiring"}:
            self.circuit.failed(now, probe=member.probe)

    # Decisions

    def _start_missing(self, now: float) -> Iterator[Order]:
        if self._failed_starts >= FAILED_STARTS:
            self._asked = True
            yield ReplaceMold()
            return
        members = self.members.values()
        to_replace = [] if self.paused else [member for member in members if member.worn]
        # While workers keep dying, one is enough: for the probe.
        wanted = self._size + self._spare if self.circuit.state == "closed" else 1
        # Never more than one above the size, so a worn worker's last call may delay the start of the next spare one.
        staying = len(members) - len(to_replace)
        missing = min(wanted - staying, self._size + 1 - len(members))
        if missing <= 0 or now < self.start_at:
            return
        if to_replace:
            missing = 0 if any(member.state == "starting" for member in members) else 1
        for _ in range(missing):
            self._last += 1
            self.members[self._last] = Member(self._last)
            yield Start(self._last)

    def _end_replaced(self) -> Iterator[Order]:
        if self.paused:
            return
        up = [member for member in self.members.values() if member.state in {"idle", "busy"}]
        excess = len(up) - self._size
        if excess > 0:
            yield from self._end([member for member in up if member.worn][:excess])

    def _end(self, members: list[Member] | tuple[Member, ...]) -> Iterator[End]:
        for member in members:
            if member.state == "busy":
                member.state = "retiring"
            elif member.state == "idle":
                self._idle.remove(member)
                del self.members[member.number]
                yield End(member.number)
