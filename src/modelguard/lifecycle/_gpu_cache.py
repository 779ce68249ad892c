"""Empties torch's cache of GPU memory where a policy finds it too large: a reload would not help."""

from __future__ import annotations

import math
from typing import Any

from modelguard import telemetry
from modelguard.environment._gpu import use_of
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._memory_policies import GpuPolicy
from modelguard.lifecycle._policy import Snapshot
from modelguard.lifecycle.backoff import Backoff

#: After emptying the cache, calls ask the device for memory again, which makes it wait. So a cache that grows back is
#: emptied less and less often.
_PAUSE = Backoff("1m", "1h")

_ADVICE = (
    "The cache grows back or is fragmented. Start the service with the preset 'torch-cuda-dynamic' "
    "(PYTORCH_ALLOC_CONF=expandable_segments:True), or pad inputs to fewer shapes."
)


class GpuCache:
    """The cache of torch, as the policies of one guard judge it. Not thread safe: one thread at a time may check."""

    def __init__(self, guard: GuardContext[Any]) -> None:
        self._guard = guard
        policy = guard.options.reload_on
        parts = () if policy is None else policy.parts()
        self._parts = tuple(part for part in parts if isinstance(part, GpuPolicy))
        self._generation = self._times = 0
        self._next = -math.inf

    def check(self, now: Snapshot) -> None:
        """Empty the cache if a policy finds it too large, and not too soon after the last time."""
        if now.generation != self._generation:
            self._generation, self._times, self._next = now.generation, 0, -math.inf
        part = next((part for part in self._parts if part.cache_too_large(now)), None)
        runtime = self._guard.runtime
        if part is None or runtime.clock() < self._next:
            return
        self._times += 1
        self._next = runtime.clock() + _PAUSE.seconds(self._times, now.jitter)
        self._empty(part, now)

    def _empty(self, part: GpuPolicy, now: Snapshot) -> None:
        runtime = self._guard.runtime
        before, started = use_of(runtime.gpu), runtime.clock()
        runtime.gpu.empty_cache()
        after = use_of(runtime.gpu)
        if before is None or after is None:  # the device has failed
            return
        telemetry.emit(
            telemetry.GpuCacheEmptied(
                guard=self._guard.name,
                generation=now.generation,
                policy=repr(part),
                reserved_before=before.reserved,
                reserved_after=after.reserved,
                allocated=after.allocated,
                seconds=runtime.clock() - started,
                advice=_ADVICE if self._times > 1 or after.reserved >= before.reserved else None,
            )
        )
