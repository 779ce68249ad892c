"""Where the models of a pool come from: one probe for each key, asked while its model is loaded."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from cachetools import LRUCache

from modelguard.lifecycle._probed_source import UNKNOWN
from modelguard.lifecycle._probes import Probe
from modelguard.lifecycle.policies import Changed

if TYPE_CHECKING:
    from modelguard.lifecycle.runtime import Runtime

__all__ = ["REMEMBERED", "PoolSources"]

K = TypeVar("K", bound=Hashable)

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
        """The probe of a key; None without one."""
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
