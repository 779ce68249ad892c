"""The models of a pool in the order of their use, and the callers that wait for room. Only under the pool's lock."""

from __future__ import annotations

import copy
import math
import os
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from cachetools import Cache, LRUCache

from modelguard import _units
from modelguard.errors import GuardClosed, LoadFailed, Overloaded
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._readings import UNKNOWN, Probe
from modelguard.lifecycle.policies import Changed
from modelguard.runtime import waiting
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle.runtime import Runtime

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
        self._uses = 0
        self._unused_since = math.inf

    @property
    def unused(self) -> bool:
        if self.loading or self.pins or self.engine is None:
            return False
        return not self.engine.state.in_flight

    def admit(self, now: float, ttl: float) -> None:
        self.loading = False
        self.expires = now + ttl
        self._unused_since = now

    def seconds_unused(self, now: float) -> float:
        """Seconds for which no call has run or ended, as far as those have seen who have asked.

        Never any for a model that a parent process has loaded: it shares the memory, and to release it would return
        nothing.
        """
        generation = None if self.engine is None else self.engine.state.current
        if not self.unused or generation is None or generation.pid != os.getpid():
            self._unused_since = now
        elif generation.uses != self._uses:
            self._uses, self._unused_since = generation.uses, now
        return now - self._unused_since

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
        return any(lease.held_here() is not None for lease in list(self.engine.state.held_leases))

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


class Want(Generic[K, M]):
    """A caller that needs the model of a key.

    What its context and its thread say is noted here, since others look on its behalf while it waits.

    Attributes:
        nested: It is inside a call on one of the models, and must not wait for callers that wait for that one's end.
        awaits: The model that it waits for: one that is being loaded, or that ends.
        gone: It waits no longer.
    """

    def __init__(self, key: K, models: Iterable[PooledModel[M]], now: float) -> None:
        self.key = key
        self.awaits: PooledModel[M] | None = None
        self.gone = False
        self._inside = [model for model in models if model.encloses_this_call]
        self._half_used = [model for model in models if model.half_used_here()]
        self._since = now

    @property
    def nested(self) -> bool:
        return bool(self._inside)

    def is_inside(self, model: PooledModel[M]) -> bool:
        return model in self._inside

    def has_half_used(self, model: PooledModel[M]) -> bool:
        return model in self._half_used

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
            raise afresh(failure) from failure.__cause__


class PoolLRU(Cache[K, PooledModel[M]]):
    """The pool's models. cachetools adds up the sizes; the least recently used model that nobody uses is evicted.

    cachetools' own ``LRUCache`` evicts in its own order, whether or not a model is in use.

    Attributes:
        evicted: Models that were evicted and have to be closed.
    """

    def __init__(self, max_memory: int) -> None:
        super().__init__(max_memory, getsizeof=lambda model: model.size)
        self.evicted: list[PooledModel[M]] = []
        self._by_use: OrderedDict[K, PooledModel[M]] = OrderedDict()  # the latest one last; a lease looks here alone

    def __setitem__(self, key: K, model: PooledModel[M]) -> None:
        super().__setitem__(key, model)
        self._by_use[key] = model

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        del self._by_use[key]

    def clear(self) -> None:
        for key in list(self):  # cachetools 5 would call popitem(), which leaves what is in use
            del self[key]

    def touch(self, key: K) -> PooledModel[M] | None:
        model = self._by_use.get(key)
        if model is not None:
            self._by_use.move_to_end(key)
        return model

    def engines(self) -> list[Engine[M]]:
        return [model.engine for model in self.values() if model.engine is not None]

    def stop_lending_oldest(self, now: float, *, paused: bool) -> None:
        """Close the least recently used of the models in use to new calls, so that steady traffic makes room."""
        for model in self._by_use.values():
            if not model.loading and model.overdue(now, paused=paused) < 0:
                model.stop_lending(now)
                return

    def popitem(self) -> tuple[K, PooledModel[M]]:
        """Remove the least recently used model that nobody uses.

        Raises:
            KeyError: All are in use.
        """
        for key, model in self._by_use.items():
            if model.unused:
                del self[key]
                model.until_next_use = None  # it goes for its room
                self.evicted.append(model)
                return key, model
        raise KeyError("every model of the pool is in use")


# Where the models of a pool come from: one probe for each key, asked while its model is loaded.


#: What is known of keys is kept for the latest ones, this many.
REMEMBERED = 256


class PoolSources(Generic[K]):
    """The probes of one pool. Not thread safe; the probes are.

    Args:
        pool: The pool's name.
        policy: The probe, which takes the key; None for none.
    """

    def __init__(self, pool: str, policy: Changed | None) -> None:
        self._pool = pool
        self._policy = policy
        # Kept beyond a key's model: how often its source has changed is known by them.
        self._probes: LRUCache[K, Probe] = LRUCache(REMEMBERED)

    @property
    def interval(self) -> float:
        """Seconds until probes should be polled again; infinity without a probe."""
        return math.inf if self._policy is None else min(1.0, self._policy.every)

    def of(self, key: K) -> Probe | None:
        policy = self._policy
        if policy is None:
            return None
        probe = self._probes.get(key)
        if probe is None:
            own = Changed(partial(policy.probe, key), policy.every, jitter=policy.jitter, timeout=policy.timeout)
            probe = self._probes[key] = Probe(f"{self._pool}[{key!r}]", own)
        return probe

    def kept(self) -> list[Probe]:
        """The probes of the latest keys, also of those without a model."""
        return list(self._probes.values())

    @staticmethod
    def before_load(probe: Probe | None, runtime: Runtime) -> object:
        """What a probe returns now. Waits for it."""
        return UNKNOWN if probe is None else probe.wait(*probe.ask(runtime))


# The models of a pool that are released until their next use, and their keys. Only under the pool's lock.


#: How often a pool looks for models that nobody uses, in the time after which they are released.
_LOOKS = 10


class IdleKeys(Generic[K, M]):
    """The keys whose models were released until their next use: nobody used them, or it was requested.

    Args:
        after: Seconds without use; infinity for never.

    Attributes:
        unloads: How many there were.
    """

    def __init__(self, after: float) -> None:
        self._after = after
        self._keys: LRUCache[K, None] = LRUCache(REMEMBERED)
        self.unloads = 0

    @property
    def interval(self) -> float:
        return self._after / _LOOKS

    @property
    def keys(self) -> tuple[K, ...]:
        """The latest of them that were not loaded again."""
        return tuple(self._keys)

    def evict_from(self, models: PoolLRU[K, M], now: float) -> None:
        """Evict the models that nobody has used for long enough."""
        if self._after == math.inf:
            return
        reason = Reason("idle", f"Idle({_units.format_seconds(self._after)!r})")
        for key, model in list(models.items()):
            if model.seconds_unused(now) >= self._after:
                self.evict(key, models, reason)

    def evict(self, key: K, models: PoolLRU[K, M], until_next_use: Reason | None) -> None:
        """Evict the model of ``key``; with a reason, until its next use."""
        model = models.pop(key)
        model.until_next_use = until_next_use
        models.evicted.append(model)
        if until_next_use is not None:
            self._keys[key] = None
            self.unloads += 1

    def wake(self, key: K) -> bool:
        try:
            del self._keys[key]
        except KeyError:
            return False
        return True

    def clear(self) -> None:
        self._keys.clear()


def afresh(error: Exception) -> Exception:
    """The same error for another caller: an exception object must not be raised in two threads."""
    again = error.again(error.retry_after, error.current) if isinstance(error, LoadFailed) else copy.copy(error)
    again.__cause__ = error.__cause__
    return again
