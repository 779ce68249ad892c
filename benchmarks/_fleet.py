"""Drives many replicas on simulated clocks: an hour of ten thousand of them in a minute, the same every time.

Each replica is the library's own guard, with its evaluator, policies, jitter, backoff and reloads, and where requests
are batched its queue and circuit breaker too. Only the outside world is simulated: clock, memory, files, chance, and
threads. Background work runs in the one thread that there is, and calls and checks go on while it sleeps, as they would
beside it.

Replicas share the moments at which things happen, and nothing else: the registry serves any number of them at once, and
the load balancer sends each the same calls, whether or not others are away. So one after the other gives the same
picture as all at once, and the first hundred of ten thousand are a fleet of a hundred.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from modelguard import Backoff, Loading, Policy, guard
from modelguard.environment import _effect
from modelguard.errors import ModelGuardError
from modelguard.lifecycle import _reload
from modelguard.lifecycle.system import Fingerprint, System, use
from modelguard.runtime.host_lock import Held, HostLock
from modelguard.serving import Limits
from modelguard.serving._execution import BatchFunction, compute
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import Batch, Failure, Request
from modelguard.serving.breaker import Breaker, Circuit

MB = 10**6
GB = 10**9

#: What the policies that watch a file watch.
WEIGHTS = Path(__file__)

#: Seconds that a request of a burst has.
DEADLINE = 5.0

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What happens to every replica, in seconds since all of them began to serve.

    Attributes:
        policy: When a replica reloads.
        backoff: How long it waits after a load that failed.
        until: When the simulation ends.
        room: Whether there is memory for a second copy, so that the old model serves while the new one loads.
        load_seconds: How long a load takes.
        calls: Calls a second, at even intervals, as a load balancer deals them out.
        leak: Bytes that a call leaves behind.
        ticks: Seconds between two checks at the least. The library's own ticker checks once a second.
        outage: When the registry refuses every load.
        weights: When new weights appear.
        bad: When calls carry the poison input.
        burst: How many requests come at once, and are batched; 0 for calls one by one, without a queue.
        bad_in_burst: How many of them carry the poison input while ``bad`` lasts.
        loaded: Whether replicas have a model at the start.
    """

    policy: Policy
    until: float
    backoff: Backoff = field(default_factory=Backoff)
    room: bool = True
    load_seconds: float = 30.0
    calls: float = 0.1
    leak: int = 0
    ticks: float = 0.0
    outage: Span = (math.inf, math.inf)
    weights: float = math.inf
    bad: Span = (math.inf, math.inf)
    burst: int = 0
    bad_in_burst: int = 1
    loaded: bool = True


@dataclass(slots=True)
class History:
    """What one replica went through.

    Attributes:
        requests: When it asked the registry for the model.
        refused: Which of these the registry refused.
        away: When it could not answer.
        installed: When a new model began to serve.
        failed: Calls that failed, those of the poison input not counted.
    """

    requests: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    away: list[Span] = field(default_factory=list)
    installed: list[float] = field(default_factory=list)
    failed: int = 0


class _Model:
    """Takes memory of its replica while it lives, more with each call that leaks."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.size = GB
        replica.memory += self.size

    def leak(self, size: int) -> None:
        self.size += size
        self._replica.memory += size

    def __del__(self) -> None:
        self._replica.memory -= self.size


class _FreeLock(HostLock):
    """Each replica is alone in its container, where nobody else takes the lock."""

    def __init__(self) -> None:
        """Make the lock without a folder, since it has no file."""

    @contextmanager
    def held(self, **_: object) -> Iterator[Held]:
        yield "process"


class Replica:
    """One process with one guard.

    Args:
        conditions: What happens.
        number: Which replica it is.
        seed: Of the whole fleet.
    """

    def __init__(self, conditions: Conditions, number: int, seed: int) -> None:
        self.conditions = conditions
        self.now = 0.0
        self.memory = GB // 5
        self.history = History()
        self.dice = random.Random(f"{seed} {number}")
        self._works: deque[Callable[[], None]] = deque()
        self._being_made = conditions.loaded
        self._next_tick = 0.0
        self._next_call = self.dice.random() / conditions.calls
        system = System(
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
            sleep=self.sleep,
            private=lambda: self.memory,
            headroom=lambda: 100 * GB if conditions.room else 0,
            limit=lambda: 4 * GB,
            trim=lambda: "simulated",
            in_use=lambda: None,
            python_in_use=lambda: None,
            returning=nullcontext,
            held=lambda: None,
            check_trim=lambda: None,
            fingerprint=self._fingerprint,
            random=self.dice.random,
            start_thread=lambda work, _name: self._works.append(work),
            host_lock=_FreeLock(),
            ticks=False,
        )
        with use(lambda: system):
            self.guard = guard(
                self._load,
                reload_on=conditions.policy,
                loading=Loading(backoff=conditions.backoff),
                wait_timeout=0,
                name="model",
            )
        self._predict = self.guard(self._compute)

    def run(self) -> History:
        """Live until the end."""
        with suppress(ModelGuardError):
            self.guard.load(timeout=0)
        self._run_works()
        self._being_made = False
        self.history.requests.clear()
        self.history.installed.clear()
        self._next_tick = self.now + self.dice.random()
        self.sleep(self.conditions.until)
        with suppress(ModelGuardError):
            self.guard.close()
        return self.history

    def sleep(self, seconds: float) -> None:
        """Let time pass. Calls come, policies are asked, and background work that is due begins."""
        end = self.now + seconds
        while True:
            self._run_works()
            at = min(self._next_call, self._next_tick)
            if at > end:
                self.move(end)
                return
            self.move(at)
            if self._next_tick <= self.now:
                self.guard.check()
                self._plan_tick()
            if self._next_call <= self.now:
                self._next_call += 1 / self.conditions.calls
                self.call()

    def move(self, to: float) -> None:
        """Set the clock, and note whether the replica was away meanwhile."""
        if to > self.now:
            if self.away:
                spans = self.history.away
                if spans and spans[-1][1] == self.now:
                    spans[-1] = (spans[-1][0], to)
                else:
                    spans.append((self.now, to))
            self.now = to

    @property
    def away(self) -> bool:
        """Whether it cannot answer."""
        return self.guard.engine.state.current is None

    def call(self) -> None:
        """One call comes."""
        bad = _within(self.conditions.bad, self.now)
        try:
            self._predict([bad])
        except ModelGuardError:
            self.history.failed += 1
        except ValueError:
            self.history.failed += not bad

    def _compute(self, model: _Model, items: Sequence[bool]) -> list[bool]:
        if any(items):
            raise ValueError("cannot be computed")
        if self.conditions.leak:
            model.leak(self.conditions.leak)
        return list(items)

    def _plan_tick(self) -> None:
        self._next_tick = self.now + max(0.05, self.conditions.ticks, self.guard.engine.check_interval())

    def _run_works(self) -> None:
        while self._works:
            self._works.popleft()()
            self._next_tick = min(self._next_tick, self.now + self.dice.random())  # a ticker looks once a second

    def _load(self) -> _Model:
        self.history.requests.append(self.now)
        if not self._being_made:
            if _within(self.conditions.outage, self.now):
                self.history.refused.append(self.now)
                self.sleep(1.0)
                raise ConnectionError("the registry does not answer")
            self.sleep(self.conditions.load_seconds)
            self.history.installed.append(self.now)
        return _Model(self)

    def _fingerprint(self, _path: Path) -> Fingerprint:
        return (("", 0, 0, 0, 0, int(self.now >= self.conditions.weights)),)


class _Asked(Request):
    """A request of a burst, which counts against its replica if it fails without being to blame."""

    def __init__(self, replica: BatchingReplica, *, bad: bool) -> None:
        super().__init__((bad, replica.dice.random()))
        self.deadline = replica.now + DEADLINE
        self._replica = replica
        self._bad = bad

    def deliver(self, outcome: Any) -> None:
        self._replica.history.failed += isinstance(outcome, Failure) and not self._bad


class BatchingReplica(Replica):
    """A replica whose requests come in bursts and are batched, behind a circuit breaker with its default bounds."""

    def __init__(self, conditions: Conditions, number: int, seed: int) -> None:
        super().__init__(conditions, number, seed)
        self._circuit = Circuit(Breaker())
        self._queue = BatchQueue(Limits(name="predict", max_size=conditions.burst, max_queue=128), self._circuit)
        self._batched = BatchFunction(run=self._run_batch, name="predict", isolate=True, clock=lambda: self.now)

    @property
    def away(self) -> bool:
        """Whether it cannot answer."""
        return super().away or self._circuit.retry_after(self.now) is not None

    def call(self) -> None:
        """One burst of requests comes."""
        bad = self.conditions.bad_in_burst if _within(self.conditions.bad, self.now) else 0
        asked = [_Asked(self, bad=number < bad) for number in range(self.conditions.burst)]
        self.dice.shuffle(asked)
        for request in asked:
            try:
                self._queue.admit(request, self.now)
            except ModelGuardError as error:
                request.deliver(Failure(error))
        while isinstance(batch := self._queue.next_batch(self.now), Batch):
            self._compute_batch(batch)

    def _compute_batch(self, batch: Batch) -> None:
        started = self.now
        computed = compute(self._batched, batch)
        # But for the times of runs: bursts are computed as they come.
        self._queue.learn(batch, replace(computed, whole=False, parts=[]), self.now - started, self.now)
        requests, outcomes = self._queue.finish(batch, computed.outcomes, computed.failed)
        self._queue.record_verdict(batch, computed.verdict, self.now)
        for request, outcome in zip(requests, outcomes, strict=True):
            request.deliver(outcome)
        undelivered, self._queue.undelivered = self._queue.undelivered, []
        for request, failure in undelivered:
            request.deliver(failure)

    def _run_batch(self, items: list[tuple[bool, float]], /, **_extras: Any) -> Any:
        self.move(self.now + 0.02 + 0.001 * len(items))
        return self._predict([bad for bad, _ in items])


def _within(span: Span, moment: float) -> bool:
    return span[0] <= moment < span[1]


def fleet(conditions: Conditions, size: int, *, seed: int = 1) -> list[History]:
    """What each replica of a fleet goes through."""
    kind = BatchingReplica if conditions.burst else Replica
    with _without_real_threads():
        return [kind(conditions, number, seed).run() for number in range(size)]


@contextmanager
def _without_real_threads() -> Iterator[None]:
    """Leave out what a load measures and ends in the real process: 10 ms for each of 600,000 loads that take none."""
    meter = nullcontext(SimpleNamespace(longest=0.0))
    with mock.patch.object(_reload, "StallMeter", return_value=meter), mock.patch.object(_effect, "end_openmp_pool"):
        yield


# What a fleet is judged by


def most_away(histories: Sequence[History]) -> float:
    """The largest share of the fleet that is away at one time."""
    changes = [(at, step) for one in histories for span in one.away for at, step in zip(span, (1, -1), strict=True)]
    away = most = 0
    for _, step in sorted(changes):
        away += step
        most = max(most, away)
    return most / len(histories)


def curve_away(histories: Sequence[History], step: float, until: float) -> list[float]:
    """The share that is away, at each multiple of ``step`` seconds."""
    change = [0] * (int(until / step) + 2)
    for one in histories:
        for start, end in one.away:
            first, last = math.ceil(start / step), math.ceil(end / step)
            if first < len(change):
                change[first] += 1
                change[min(last, len(change) - 1)] -= 1
    away, curve = 0, []
    for one_change in change[:-1]:
        away += one_change
        curve.append(away / len(histories))
    return curve


def rates(histories: Sequence[History], width: float) -> Counter[int]:
    """Requests to the registry, in slots of ``width`` seconds."""
    return Counter(int(at / width) for one in histories for at in one.requests)


def herd(histories: Sequence[History], width: float, over: float) -> float:
    """The most requests a second to the registry, as a mean of ``width`` seconds, over the mean of ``over`` seconds.

    The mean counts as at least a third of a request a second: up to one a second is no herd, however rare they are.
    """
    slots = rates(histories, width)
    return max(slots.values(), default=0) / width / max(sum(slots.values()) / over, 1 / 3)


def recovery(histories: Iterable[History], after: float) -> float:
    """Seconds from ``after``, when the registry answers again, until all whom it had refused have a new model."""
    waited = [next((at for at in one.installed if at >= after), math.inf) - after for one in histories if one.refused]
    return max(waited, default=0.0)
