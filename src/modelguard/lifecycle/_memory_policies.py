"""Policies on memory: of this process, and of its GPUs."""

# Not `from __future__ import annotations`: these classes show modelguard as their module, where the names of their
# fields' types could not be resolved.
import math
from collections.abc import Iterator

from modelguard import _public, _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle._jittered import Jittered
from modelguard.lifecycle._policy import GpuMemory, Horizon, Level, Snapshot

__all__ = ["GpuMemoryGrowth", "GpuMemoryLimit", "MemoryGrowth", "MemoryLimit"]

#: Bytes. Whoever writes ``MemoryGrowth(500)`` means megabytes; the service would reload every few seconds.
_LEAST_SIZE = 1_000_000


class Sized(Jittered):
    """A policy with a size as its bound."""

    size: int | _units.Percentage

    def __init__(self, size: int | str, *, jitter: float = 0.1) -> None:
        self._set_jitter(jitter)
        parsed = _units.size_or_percentage(size, "size")
        if isinstance(parsed, int) and parsed < _LEAST_SIZE:
            why = f"is {parsed} bytes, less than any process changes by in a second"
            raise InvalidOption("size", size, why=why, fix=f"Write the unit, as in '{parsed} MB'.")
        self._set(size=parsed)

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - readings come at the guard's own pace
        return Horizon(uses=math.inf, seconds=1.0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_show(self.size)!r})"


class _Memory(Sized):
    reads_memory = True


class MemoryGrowth(_Memory):
    """Due when private memory has grown by ``size`` since this generation settled.

    A generation has settled when its predecessor is gone and it has taken ten calls or five seconds have passed. The
    median of the first three readings after that is the baseline. Later, three consecutive readings must be above the
    bound. Readings take at most 1 % of the time: one every 0.1 to 10 seconds, and at most about one a second without
    calls. Private memory is what this process alone has written. RSS is never used: it counts what a forked worker
    shares, and it does not fall after a peak.

    Args:
        size: Bytes, text such as ``"500 MB"`` or ``"1.5 GiB"``, or a percentage of the effective limit such as
            ``"20%"``.
        jitter: Each process allows less growth by a random part of at most this much, so that replicas that leak at the
            same pace do not reload in step. A process's first model gets five times as much, at most half:
            ``MemoryGrowth("500 MB")`` fires between 250 and 500 MB there, and between 450 and 500 MB later. 0 to 1.

    Raises:
        InvalidOption: ``size`` is not a size of at least 1 MB, nor a percentage, or ``jitter`` is not in 0 to 1.
        NoMemoryLimit: A percentage was given and nothing limits this process (raised by ``guard``).
    """

    kind = "memory_growth"

    def due(self, now: Snapshot) -> bool:
        memory, bound = now.settled_memory, _bound(self.size, now)
        if memory is None or now.baseline is None or bound is None:
            return False
        return memory - now.baseline >= bound * (1 - self._brought_forward(now))


class MemoryLimit(_Memory):
    """Due when this process's private memory has reached ``size`` in three consecutive readings.

    If the fresh generation alone is already above the bound, a reload cannot help. The policy is then ignored for that
    generation, and a ``PolicyFutile`` event says so.

    Args:
        size: Bytes, text such as ``"3 GB"``, or a percentage of the effective cgroup limit such as ``"80%"``. The
            percentage is of the whole limit: each of N workers in one container should ask for 80 % / N.
        jitter: As for ``MemoryGrowth``: a part of the room between a fresh model and ``size``. 0 to 1.

    Raises:
        InvalidOption: ``size`` is not a size of at least 1 MB, nor a percentage, or ``jitter`` is not in 0 to 1.
        NoMemoryLimit: A percentage was given and nothing limits this process (raised by ``guard``).
    """

    kind = "memory_limit"

    def due(self, now: Snapshot) -> bool:
        memory, bound = now.settled_memory, _bound(self.size, now)
        if memory is None or bound is None or self.futile(now) is not None:
            return False
        room = 0 if now.baseline is None else bound - now.baseline
        return memory >= bound - room * self._brought_forward(now)

    def futile(self, now: Snapshot) -> str | None:
        bound = _bound(self.size, now)
        if bound is None or now.baseline is None or now.baseline < bound:
            return None
        held, allowed = _units.format_bytes(now.baseline), _units.format_bytes(bound)
        return f"the process holds {held} with a fresh model, and the bound is {allowed}"


class GpuPolicy(Sized):
    """A policy on what torch has allocated on each GPU."""

    reads_gpu = True

    def cache_too_large(self, now: Snapshot) -> bool:
        """Whether torch's cache on a device, and not the model, is above the bound: emptying it may help."""
        raise NotImplementedError

    def futile(self, now: Snapshot) -> str | None:
        if now.gpus is None:
            return None
        if not now.gpus:
            return "this process has not used CUDA so far"
        if isinstance(self.size, int) and all(self.size > gpu.total for gpu in now.gpus):
            return f"no GPU has more than {_units.format_bytes(max(gpu.total for gpu in now.gpus))} for this process"
        return None

    def _bound(self, gpu: GpuMemory) -> int:
        return int(gpu.total * self.size.fraction) if isinstance(self.size, _units.Percentage) else self.size


class GpuMemoryGrowth(GpuPolicy):
    """Due when torch has allocated ``size`` more on a GPU than when this generation settled.

    What counts is ``torch.cuda.memory_allocated()`` of this process, on each GPU by itself; the use of the whole
    device, as ``nvidia-smi`` shows it, includes other processes. Pinned host memory counts too, if torch reports it
    (2.13 does). Baseline and readings are as for ``MemoryGrowth``.

    If torch's cache grows by as much, a reload does not help. The guard empties it (``GpuCacheEmptied``), at most
    once in half a minute, and less often if it grows again.

    Args:
        size: Bytes, text such as ``"1 GB"``, or a percentage of the GPU's memory such as ``"10%"``: of the MIG slice's,
            where there are such, times the fraction of ``torch.cuda.set_per_process_memory_fraction``. A percentage
            does not apply to pinned memory.
        jitter: As for ``MemoryGrowth``. 0 to 1.

    Raises:
        InvalidOption: ``size`` is not a size of at least 1 MB, nor a percentage, or ``jitter`` is not in 0 to 1.
        NotSupported: There is no torch with CUDA (raised by ``guard`` if it is known by then, else the first load
            fails because of it).
    """

    kind = "gpu_memory_growth"

    def due(self, now: Snapshot) -> bool:
        part = 1 - self._brought_forward(now)
        return any(_growth(level) >= bound * part for level, bound in self._levels(now))

    def cache_too_large(self, now: Snapshot) -> bool:
        return any(_growth(_cached(gpu)) >= self._bound(gpu) for gpu in now.gpus or ())

    def _levels(self, now: Snapshot) -> Iterator[tuple[Level, int]]:
        for gpu in now.gpus or ():
            yield gpu.allocated, self._bound(gpu)
        if isinstance(self.size, int):
            yield now.pinned, self.size


class GpuMemoryLimit(GpuPolicy):
    """Due when torch has allocated ``size`` on a GPU, in three consecutive readings.

    What counts is ``torch.cuda.memory_allocated()`` of this process, on each GPU by itself. If the fresh generation
    alone is already above the bound, a reload cannot help. The policy is then ignored for that GPU and generation, and
    a ``PolicyFutile`` event says so.

    If only the memory that torch has reserved is above the bound, its cache is the reason. The guard empties it
    (``GpuCacheEmptied``), as for ``GpuMemoryGrowth``.

    Args:
        size: Bytes, text such as ``"20 GB"``, or a percentage of the GPU's memory such as ``"80%"``, as for
            ``GpuMemoryGrowth``. The percentage is of the whole GPU: each of N processes on it should ask for 80 % / N.
        jitter: As for ``MemoryLimit``. 0 to 1.

    Raises:
        InvalidOption: ``size`` is not a size of at least 1 MB, nor a percentage, or ``jitter`` is not in 0 to 1.
        NotSupported: As for ``GpuMemoryGrowth``.
    """

    kind = "gpu_memory_limit"

    def due(self, now: Snapshot) -> bool:
        return any(self._is_reached(gpu, now) for gpu in now.gpus or ())

    def cache_too_large(self, now: Snapshot) -> bool:
        return any(
            _at_least(gpu.reserved, self._bound(gpu)) and not self._is_reached(gpu, now) for gpu in now.gpus or ()
        )

    def futile(self, now: Snapshot) -> str | None:
        why = super().futile(now)
        if why is not None:
            return why
        for gpu in now.gpus or ():
            bound = self._bound(gpu)
            if gpu.allocated.baseline is not None and gpu.allocated.baseline >= bound:
                held, allowed = _units.format_bytes(gpu.allocated.baseline), _units.format_bytes(bound)
                return f"a fresh model has {held} on GPU {gpu.device}, and the bound is {allowed}"
        return None

    def _is_reached(self, gpu: GpuMemory, now: Snapshot) -> bool:
        bound, baseline = self._bound(gpu), gpu.allocated.baseline
        if baseline is None or baseline >= bound:
            return False
        return _at_least(gpu.allocated, bound - (bound - baseline) * self._brought_forward(now))


def _cached(gpu: GpuMemory) -> Level:
    """What torch holds on a device without using it."""
    pairs = zip(gpu.reserved.latest, gpu.allocated.latest, strict=True)
    held, used = gpu.reserved.baseline, gpu.allocated.baseline
    baseline = None if held is None or used is None else held - used
    return Level(tuple(reserved - allocated for reserved, allocated in pairs), baseline)


def _growth(level: Level) -> float:
    """Growth above the baseline in bytes; minus infinity while it is not known."""
    return -math.inf if level.settled is None or level.baseline is None else level.settled - level.baseline


def _at_least(level: Level, bound: float) -> bool:
    return level.settled is not None and level.settled >= bound


def _bound(size: int | _units.Percentage, now: Snapshot) -> int | None:
    if isinstance(size, _units.Percentage):
        return None if now.limit is None else int(now.limit * size.fraction)
    return size


def _show(size: int | _units.Percentage) -> str:
    return str(size) if isinstance(size, _units.Percentage) else _units.format_bytes(size)


_public.set_module(globals(), "modelguard")
