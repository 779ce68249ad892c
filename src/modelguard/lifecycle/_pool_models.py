"""The models of a pool, what is known of their keys, and the callers that wait. Only under the pool's lock."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Generic, TypeVar

from modelguard import _units
from modelguard.errors import GuardClosed, Overloaded
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._readings import Probe
from modelguard.lifecycle.policies import Changed
from modelguard.runtime import waiting
from modelguard.telemetry.reasons import Reason

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")

#: Seconds that the first in line waits for calls to end by themselves, before a model in use is closed to new calls.
OVERDUE = 0.25


class PooledModel(Generic[M]):
    def __init__(self, size: int) -> None:
        self.engine: Engine[M] | None = None
        self.size = size
        self.pins = 0
        self.expires = math.inf
        self._changed_since = math.inf
        self.loading = True
        self.failure: Exception | None = None
        self.probe: Probe | None = None
        self.until_next_use: Reason | None = None
        self._stopped_since = math.inf

    @property
    def unused(self) -> bool:
        if self.loading or self.pins or self.engine is None:
            return False
        return not self.engine.state.in_flight

    def seconds_unused(self, now: float) -> float:
        """Seconds for which no call has run or ended, as far as those have seen who have asked."""
        generation = None if self.engine is None else self.engine.state.current
        if self.engine is None or generation is None:
            return 0.0
        idle = self.engine.checks.readings.idle(generation, now)
        return idle if self.unused else 0.0

    @property
    def encloses_this_call(self) -> bool:
        """Whether the calling context is inside a call on it."""
        return self.engine is not None and self.engine.state.enclosing_generation() is not None

    def half_used_here(self) -> bool:
        """Whether this thread is between two steps of a generator that runs on it.

        The loop over the generator must not wait for the end of the generator. On an event loop all streams share one
        thread, so there it says nothing.
        """
        if self.engine is None or waiting.on_any_loop():
            return False
        return bool(self.engine.state.held_here())

    def overdue(self, now: float, *, paused: bool) -> float:
        """Seconds since which it takes no new calls: too old, its source has changed, or it was stopped.

        Negative while it takes calls.

        Args:
            now: On the pool's clock.
            paused: Whether its age and its source do not matter.
        """
        changed = self.probe is not None and self.probe.answers.changed
        self._changed_since = min(self._changed_since, now) if changed else math.inf
        over = math.inf if paused else min(self.expires, self._changed_since)
        return now - min(over, self._stopped_since)

    def stop_lending(self, now: float) -> None:
        """Take no new calls from ``now`` on: it is evicted when the calls under way are done."""
        self._stopped_since = min(self._stopped_since, now)


class Pin(Generic[M]):
    """That a caller uses a model, which is not evicted meanwhile. It ends by itself when nobody refers to it.

    Made first: no call of a function, in which a signal handler may raise, lies between a pin and its note.

    Attributes:
        held: Whether it counts.
        to_load: Whether the caller is the one to load the model, and has not begun.
    """

    def __init__(self, model: PooledModel[M], drop: Callable[[Pin[M]], object]) -> None:
        self.model = model
        self.held = self.to_load = False
        self._drop = drop

    def __del__(self) -> None:
        if self.held or self.to_load:
            self._drop(self)

    def hold(self) -> None:
        self.held = True
        self.model.pins += 1

    def end(self) -> None:
        if self.held:
            self.held = False
            self.model.pins -= 1


class Want(Generic[K, M]):
    """A caller that needs the model of a key.

    What its context and its thread say is noted here, since others look on its behalf while it waits.
    """

    def __init__(self, key: K, models: Iterable[PooledModel[M]], now: float) -> None:
        self.key = key
        self.awaits: PooledModel[M] | None = None  # the model that it waits for: one that is being loaded, or that ends
        self.gone = False  # it waits no longer
        #: The models on which calls run that it is inside of.
        self.inside = [model for model in models if model.encloses_this_call]
        #: Those that a loop of its thread has half used.
        self.half_used = [model for model in models if model.half_used_here()]
        self._since = now

    @property
    def nested(self) -> bool:
        """Whether it must not wait for callers that wait for the end of its own call."""
        return bool(self.inside)

    def is_overdue(self, now: float) -> bool:
        """Whether the first in line has waited so long that a model in use must make room: once in that time."""
        if now < self._since + OVERDUE:
            return False
        self._since = now
        return True

    def raise_failure(self) -> None:
        """Raise what the load that it has waited for has failed with, unless that says nothing about the next one."""
        failure = None if self.awaits is None else self.awaits.failure
        self.awaits = None
        if failure is not None and not isinstance(failure, GuardClosed | Overloaded):
            raise afresh(failure)


class KeyRecord(Generic[M]):
    """What a pool knows of a key, also while it has no model."""

    def __init__(self, name: str, key: object, policy: Changed | None) -> None:
        #: Where its model comes from: asked while there is one, and kept beyond it, since it knows how often that has
        #: changed.
        self.probe: Probe | None = None
        if policy is not None:
            own = Changed(partial(policy.probe, key), policy.every, jitter=policy.jitter, timeout=policy.timeout)
            self.probe = Probe(_units.KeyedName(name, key), own)
        self.size: int | None = None  # of its model when it was last loaded, None if it never was
        self.failed: Engine[M] | None = None  # the engine whose load has failed: it knows when the next attempt is due
        self.idle = False  # its model was released until its next use: nobody used it, or it was requested


def afresh(error: Exception) -> Exception:
    """The same error for another caller: an exception object must not be raised in two threads."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again
