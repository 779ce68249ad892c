"""The readings that a policy decides by: memory, files and gauges of the current generation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from modelguard.environment._gpu import Gpu
from modelguard.lifecycle import _adapters
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._fingerprints import MAX_ENTRIES, Fingerprint, is_whole
from modelguard.lifecycle._generation import Generation
from modelguard.lifecycle._policy import SAMPLES, FileChange, GpuMemory, Level, Policy, Snapshot
from modelguard.lifecycle._probes import Probes
from modelguard.lifecycle.policies import Changed, Modified
from modelguard.telemetry import logger

#: A generation has settled after this many calls or seconds, once its predecessor is gone. By then it has built its
#: lazy buffers, and any further increase is growth.
SETTLE_USES = 10
SETTLE_SECONDS = 5.0

#: A reading walks the page tables (6 ms in a process of 600 MB). Readings take at most this share of the time.
_BUSY = 0.01
_FASTEST, _SLOWEST = 0.1, 10.0


def pause_after(cost: float) -> float:
    """Seconds to wait after a reading that took ``cost`` seconds."""
    return min(max(cost / _BUSY, _FASTEST), _SLOWEST)


class _Series:
    """Readings of one figure. The first three make the baseline; policies decide by later ones."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self._latest: deque[int] = deque(maxlen=SAMPLES)

    def add(self, reading: int) -> None:
        (self._first if len(self._first) < SAMPLES else self._latest).append(reading)

    @property
    def level(self) -> Level:
        first = self._first
        baseline = sorted(first)[SAMPLES // 2] if len(first) == SAMPLES else None
        return Level(tuple(self._latest), baseline)


class _GpuReadings:
    """What the allocator of torch has reported since the generation settled."""

    def __init__(self) -> None:
        self._read = False
        self._devices: dict[int, tuple[int, _Series, _Series]] = {}
        self._pinned = _Series()

    def take(self, gpu: Gpu) -> None:
        for now in gpu.devices():
            _, allocated, reserved = self._devices.get(now.device) or (0, _Series(), _Series())
            allocated.add(now.allocated)
            reserved.add(now.reserved)
            self._devices[now.device] = now.total, allocated, reserved
        pinned = gpu.pinned()
        if pinned is not None:
            self._pinned.add(pinned)
        self._read = True

    @property
    def gpus(self) -> tuple[GpuMemory, ...] | None:
        """Each device; None before the first reading."""
        if not self._read:
            return None
        found = self._devices.copy().items()
        return tuple(GpuMemory(device, total, used.level, held.level) for device, (total, used, held) in found)

    @property
    def pinned(self) -> Level:
        return self._pinned.level


class AtLoad(NamedTuple):
    """What the source of the model was just before its load.

    Attributes:
        files: Identity of the watched paths.
        answers: Of the probes.
    """

    files: dict[Path, Fingerprint | None]
    answers: Mapping[Changed, object]


class Readings:
    """Takes the readings of one guard. Not thread safe: one thread at a time may ask.

    Attributes:
        generation: The number of the generation that they are of; 0 for none.
    """

    def __init__(self, guard: GuardContext[Any]) -> None:
        self._guard = guard
        self._watch(guard.options.reload_on)
        self._told: set[Path] = set()  # of which paths it was logged that not all is watched
        self._probes = Probes(guard.name, guard.options.reload_on)
        self._at_load: dict[Path, Fingerprint | None] = {}
        self._before: dict[Path, Fingerprint | None] = {}  # the load that is under way
        self._idle_since = guard.runtime.clock()
        self.start(None)

    def _watch(self, policy: Policy | None) -> None:
        self._reads_memory = policy is not None and policy.reads_memory
        self._reads_gpu = policy is not None and policy.reads_gpu
        parts = policy.parts() if policy is not None else ()
        self._paths = tuple({part.path for part in parts if isinstance(part, Modified)})
        self._limit = self._guard.runtime.limit() if self._reads_memory else None

    def follow(self, policy: Policy | None, files: Mapping[Path, Fingerprint | None]) -> None:
        """Read what another policy needs, which has no probes; ``files`` were so before the load that is under way."""
        self._watch(policy)
        self._before.update(files)

    def start(self, generation: Generation[Any] | None) -> None:
        """Start with no readings, for ``generation``."""
        self.generation = generation.number if generation is not None else 0
        self._memory = _Series()
        self._gpu = _GpuReadings()
        self._next_reading = -math.inf
        self._seen: dict[Path, tuple[Fingerprint | None, float]] = {}
        self._first_gauges = _gauges(generation)
        self._uses = 0

    def decide_by(self, policy: Policy | None) -> None:
        """Ask only the probes of this part of the guard's policy from now on."""
        self._probes.decide_by(policy)

    def after_fork_in_child(self, generation: Generation[Any] | None) -> None:
        """Start the child's own readings. Its model, and so what its source was, is the parent's."""
        self._probes.after_fork_in_child(self._guard.runtime)
        self.start(generation)

    def before_load(self) -> AtLoad:
        """The state of the source. Take it before the loader reads it. Waits for probes, up to their ``timeout``."""
        answers = self._probes.before_load(self._guard.runtime)
        found = {path: self._guard.runtime.fingerprint(path) for path in self._paths}
        for path, files in found.items():
            if path not in self._told and not is_whole(files):
                self._told.add(path)
                logger.warning("%s: only the first %d files of %s are watched", self._guard.name, MAX_ENTRIES, path)
        self._before = found
        return AtLoad(found, answers)

    def loaded(self, generation: Generation[Any], at_load: AtLoad, *, replaced: bool = False) -> None:
        """Start for a new generation.

        Args:
            generation: The new generation.
            at_load: What its source was before its load.
            replaced: Whether there was another one before. A reload is no use, so it does not end idleness.
        """
        self._at_load = at_load.files
        self._probes.loaded(at_load.answers, self._guard.runtime)
        if not replaced:
            self._idle_since = self._guard.runtime.clock()
        self.start(generation)

    def snapshot(self, generation: Generation[Any], *, settled: bool, sample: bool) -> Snapshot:
        """Everything a policy may read about ``generation`` now.

        Args:
            generation: The current generation.
            settled: Whether all its predecessors are gone.
            sample: Whether there is time to read memory and files; if not, the latest readings are used.
        """
        now = self._guard.runtime.clock()
        age = now - generation.born
        if sample:
            self._read_files(now)
            self._probes.poll(self._guard.runtime)
            if settled and (generation.uses >= SETTLE_USES or age >= SETTLE_SECONDS):
                self._read_memory(now)
        # Read once, and copied in one step: the end of a load begins anew, in its own thread.
        memory, gpu, seen = self._memory.level, self._gpu, self._seen.copy()
        return Snapshot(
            generation=generation.number,
            age=age,
            began=generation.began,
            idle=self._idle(generation, now),
            uses=generation.uses,
            consecutive_errors=generation.errors,
            fruitless_reloads=0 if generation.served else generation.fruitless_reloads,
            memory=memory.latest,
            baseline=memory.baseline,
            limit=self._limit,
            gpus=gpu.gpus,
            pinned=gpu.pinned,
            jitter=generation.jitter,
            first=generation.number == 1 and self._guard.state.epoch == 0,
            time=self._guard.runtime.wall_clock(),
            files=MappingProxyType({path: self._change(path, *found, now) for path, found in seen.items()}),
            probes=self._probes.answers(),
            gauges=_gauges(generation),
            first_gauges=self._first_gauges,
        )

    @property
    def interval(self) -> float:
        """Seconds until the next reading of memory."""
        reads = self._reads_memory or self._reads_gpu
        return max(0.0, self._next_reading - self._guard.runtime.clock()) if reads else math.inf

    def _idle(self, generation: Generation[Any], now: float) -> float:
        if generation.leases or generation.uses != self._uses:
            self._uses, self._idle_since = generation.uses, now
        return now - self._idle_since

    def _read_memory(self, now: float) -> None:
        if not (self._reads_memory or self._reads_gpu) or now < self._next_reading:
            return
        runtime, memory, gpu = self._guard.runtime, self._memory, self._gpu
        if self._reads_memory:
            memory.add(runtime.private())
        if self._reads_gpu:
            gpu.take(runtime.gpu)
        self._next_reading = now + pause_after(runtime.clock() - now)

    def _read_files(self, now: float) -> None:
        for path in self._paths:
            found = self._guard.runtime.fingerprint(path)
            known = self._seen.get(path)
            if known is None or known[0] != found:
                self._seen[path] = (found, now)

    def _change(self, path: Path, found: Fingerprint | None, since: float, now: float) -> FileChange:
        return FileChange(changed=found is not None and found != self._at_load.get(path), quiet=now - since)


def _gauges(generation: Generation[Any] | None) -> Mapping[str, int]:
    model = getattr(generation, "model", None)  # read once: it may be dropped at any moment
    return MappingProxyType({}) if model is None else _adapters.find(model).gauges(model)
