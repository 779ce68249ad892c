"""The readings that a policy decides by: memory, files and gauges of the current generation."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from modelguard import telemetry
from modelguard.errors import told
from modelguard.facts._gpu import Gpu
from modelguard.lifecycle import _models
from modelguard.lifecycle._state import Generation, GuardContext
from modelguard.lifecycle.policies import (
    SAMPLES,
    Changed,
    FileChange,
    GpuMemory,
    Level,
    Modified,
    Policy,
    ProbeAnswers,
    Snapshot,
)
from modelguard.lifecycle.system import MAX_ENTRIES, Fingerprint, is_whole
from modelguard.runtime.waiting import resolve
from modelguard.telemetry import logger

if TYPE_CHECKING:
    from modelguard.lifecycle.system import System


# What a probe has returned so far, and whether that is a change. It starts no thread and reads no clock.


#: Stands for a value that no probe has returned.
UNKNOWN = object()

#: A change counts when so many polls in a row have returned the same new value.
FEWEST = 2
#: As many at most, when earlier changes did not last.
MOST = 64
#: A change that was loaded has lasted if so many answers in a row were the same as at the load.
LASTING = 10
#: After so many new values that were not confirmed, the probe counts as unsteady.
UNSTEADY = 5


class ProbedSource:
    """The answers of one probe, compared with that at the load of the current generation."""

    def __init__(self) -> None:
        self._at_load: object = UNKNOWN
        self._latest: object = UNKNOWN
        self._needed = FEWEST
        self._same = self._longest = 0  # answers in a row, since the load, that were the same as at the load
        self._counted = False  # a change since the load
        self._candidate: object = UNKNOWN
        self._in_a_row = 0
        self._unconfirmed = 0

    def loaded(self, value: object) -> None:
        """A generation was loaded, and just before that the probe returned ``value``.

        Args:
            value: ``UNKNOWN`` if the probe did not answer. Then the latest answer counts, or else the next one.
        """
        if self._counted:
            lasted = self._longest >= max(LASTING, 2 * self._needed)
            self._needed = FEWEST if lasted else min(MOST, self._needed * 2)
        self._at_load = self._latest if value is UNKNOWN else value
        self._latest = self._at_load
        self._same = self._longest = 0
        self._counted = False
        self._forget_candidate()

    def answered(self, value: object) -> None:
        """A poll has returned ``value``.

        Raises:
            Exception: The value cannot be compared.
        """
        if self._at_load is UNKNOWN:
            self._at_load = value
        same, as_before = _equal(value, self._at_load), _equal(value, self._candidate)
        self._latest = value
        if same:
            self._same += 1
            self._longest = max(self._longest, self._same)
            self._forget_candidate(steady=self._in_a_row == 0)
        elif as_before:
            self._in_a_row += 1
        else:
            self._same = 0
            self._candidate, self._in_a_row = value, 1
            self._unconfirmed = min(self._unconfirmed + 1, UNSTEADY)
        if self.changed:
            self._counted, self._unconfirmed = True, 0

    @property
    def changed(self) -> bool:
        """Whether the value is another one than at the load, often enough in a row."""
        return self._in_a_row >= self._needed

    @property
    def unsteady(self) -> bool:
        """Whether new values come and go before they count."""
        return self._unconfirmed >= UNSTEADY

    @property
    def expects_confirmation(self) -> bool:
        return 0 < self._in_a_row < self._needed and not self.unsteady

    def _forget_candidate(self, *, steady: bool = True) -> None:
        self._candidate, self._in_a_row = UNKNOWN, 0
        if steady:
            self._unconfirmed = max(0, self._unconfirmed - 1)


def _equal(one: object, other: object) -> bool:
    return one is other or (other is not UNKNOWN and bool(one == other))


# Asks the probes of one guard's policy in threads of their own, and keeps what they return.


#: How many calls of one probe may hang at a time. A thread cannot be stopped, and each has one.
MOST_HANGING = 3
#: The part of ``every`` after which a change is confirmed, and seconds that this takes at least.
_CONFIRM, _SOONEST = 0.1, 1.0
#: So many answers in a row make an error new again.
_SOUND = 10


class Probe:
    """One probe of one guard: when it is asked, what it returned, and how it fails.

    Args:
        guard: The guard's name.
        policy: The probe, and how it is asked.
    """

    def __init__(self, guard: str, policy: Changed) -> None:
        self._guard = guard
        self._policy = policy
        self._source = ProbedSource()
        self._start()

    def _start(self) -> None:
        self._lock = threading.RLock()  # reentrant: values compare by code of their own, and signal handlers interrupt
        self._next = math.inf  # until a model is loaded
        self._newest = -math.inf  # when the latest call was made of those that have returned
        self._running: dict[Future[object], float] = {}  # calls that are awaited, and when they were made
        self._hanging: set[Future[object]] = set()
        self._sound = 0
        self._reported: set[str] = set()

    def after_fork_in_child(self, system: System) -> None:
        """The parent's threads do not exist here. What is known of the source stays true."""
        plan = self._next < math.inf
        self._start()
        if plan:
            self._next = system.clock() + self._pause(system)

    @property
    def answers(self) -> ProbeAnswers:
        with self._lock:
            return ProbeAnswers(changed=self._source.changed, unsteady=self._source.unsteady)

    def loaded(self, value: object, system: System) -> None:
        """A model was loaded; ``value`` is what the probe returned just before."""
        with self._lock:
            self._source.loaded(value)
            self._next = system.clock() + self._pause(system)

    def poll(self, system: System) -> None:
        """Ask, if it is time. Does not wait for the answer."""
        now = system.clock()
        with self._lock:
            late = [call for call, since in self._running.items() if now - since >= self._policy.timeout]
            for call in late:
                self._give_up(call)
            ask = now >= self._next and not self._running
            if ask:
                self._next = now + self._pause(system)
        if late:
            self._report_late()
        if ask:
            self.ask(system)

    def ask(self, system: System) -> Future[object]:
        """Ask now, in a thread; returns what becomes the value, ``UNKNOWN`` if the call fails."""
        call: Future[object] = Future()
        with self._lock:
            if len(self._hanging) + len(self._running) >= MOST_HANGING:
                call.set_result(UNKNOWN)
                return call
            self._running[call] = system.clock()
        try:
            system.start_once(partial(self._call, call, system), f"modelguard-probe-{self._guard}")
        except RuntimeError as error:  # the system gives no thread, or the interpreter is shutting down
            self._failed(call, error)
            call.set_result(UNKNOWN)
        return call

    def wait(self, call: Future[object]) -> object:
        """Wait for a call up to the probe's ``timeout``; returns its value, ``UNKNOWN`` if there is none by then."""
        try:
            return call.result(self._policy.timeout)
        except TimeoutError:
            with self._lock:
                if call.done():  # in this very moment
                    return call.result()
                self._give_up(call)
            self._report_late()
            return UNKNOWN

    def _call(self, call: Future[object], system: System) -> None:
        value: object = UNKNOWN
        try:
            value = resolve(self._policy.probe())
            if value is None:
                raise TypeError("it returned None; return a value that changes with the model, such as an ETag")  # noqa: TRY301 - reported as what it raises is
            self._answered(call, value, system)
        except BaseException as error:  # noqa: BLE001 - whatever a probe raises, it only does not answer
            value = UNKNOWN
            self._failed(call, error)
        finally:
            call.set_result(value)

    def _answered(self, call: Future[object], value: object, system: System) -> None:
        with self._lock:
            made = self._running.get(call)
            if made is None or made < self._newest:  # too late: the value may be an old one
                self._ended(call)
                return
            self._source.answered(value)
            self._newest = made
            self._ended(call)
            self._sound += 1
            if self._sound >= _SOUND:
                self._reported.clear()
            if self._source.expects_confirmation:
                soon = max(_SOONEST, self._policy.every * _CONFIRM)
                self._next = min(self._next, system.clock() + min(soon, self._policy.every))

    def _failed(self, call: Future[object], error: BaseException) -> None:
        with self._lock:
            made = self._ended(call)
        if made is not None:
            self._report(type(error).__name__, told(error))

    def _ended(self, call: Future[object]) -> float | None:
        """When a call was made that has ended; None if it was given up."""
        self._hanging.discard(call)
        return self._running.pop(call, None)

    def _give_up(self, call: Future[object]) -> None:
        if self._running.pop(call, None) is not None:
            self._hanging.add(call)

    def _report_late(self) -> None:
        self._report("late", f"TimeoutError: no answer within {self._policy.timeout:g} s")

    def _report(self, kind: str, error: str) -> None:
        with self._lock:
            self._sound = 0
            if kind in self._reported:
                return
            self._reported.add(kind)
        where = f"{error} (in {self._policy!r})"
        telemetry.emit(telemetry.CallbackErrored(guard=self._guard, callback="probe", error=where))

    def _pause(self, system: System) -> float:
        return self._policy.every * (1 - self._policy.jitter * system.random())


def _probed(policy: Policy | None) -> tuple[Changed, ...]:
    parts = policy.parts() if policy is not None else ()
    return tuple(dict.fromkeys(part for part in parts if isinstance(part, Changed)))


#: A generation has settled after this many calls or seconds, once its predecessor is gone. By then it has built its
#: lazy buffers, and any further increase is growth.
SETTLE_USES = 10
SETTLE_SECONDS = 5.0

#: A reading walks the page tables (6 ms in a process of 600 MB). Readings take at most this share of the time.
_BUSY = 0.01
_FASTEST, _SLOWEST = 0.1, 10.0


def pause_after(cost: float) -> float:
    """Seconds to wait after a reading that took ``cost`` seconds of processor time."""
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
        if not self._read:
            return None
        found = self._devices.copy().items()
        return tuple(GpuMemory(device, total, used.level, held.level) for device, (total, used, held) in found)

    @property
    def pinned(self) -> Level:
        return self._pinned.level


class AtLoad(NamedTuple):
    """What the source of the model was just before its load."""

    files: dict[Path, Fingerprint | None]  # identity of the watched paths
    answers: Mapping[Changed, object]  # of the probes


class Readings:
    """Takes the readings of one guard. Not thread safe: one thread at a time may ask.

    Attributes:
        generation: The number of the generation that they are of; 0 for none.
    """

    def __init__(self, guard: GuardContext[Any]) -> None:
        self._guard = guard
        self._told: set[Path] = set()  # of which paths it was logged that not all is watched
        self._probes = {part: Probe(guard.name, part) for part in _probed(guard.options.reload_on)}
        self._before: dict[Path, Fingerprint | None] = {}  # the load that is under way
        self._at_load: dict[Path, Fingerprint | None] = {}
        self._idle_since = guard.system.clock()
        self.start(None)

    def decide_by(self, policy: Policy | None, files: Mapping[Path, Fingerprint | None] = MappingProxyType({})) -> None:
        """Read what this policy needs from now on; its ``files`` were so before the load that is under way."""
        parts = policy.parts() if policy is not None else ()
        self._reads_memory = any(part.reads_memory for part in parts)
        self._reads_gpu = any(part.reads_gpu for part in parts)
        self._limit = self._guard.system.limit() if self._reads_memory else None
        self._paths = tuple({part.path for part in parts if isinstance(part, Modified)})
        self._asked = _probed(policy)
        self._before.update(files)

    def start(self, generation: Generation[Any] | None) -> None:
        self.generation = generation.number if generation is not None else 0
        self._memory = _Series()
        self._gpu = _GpuReadings()
        self._next_reading = -math.inf
        self._seen: dict[Path, tuple[Fingerprint | None, float]] = {}
        self._first_gauges = _gauges(generation)
        self._uses = 0

    @property
    def baseline(self) -> int | None:
        """Private memory when the generation had settled, None until then."""
        return self._memory.level.baseline

    @property
    def _polled(self) -> tuple[Changed, ...]:
        return self._asked if self._guard.system.probes else ()

    def after_fork_in_child(self, generation: Generation[Any] | None) -> None:
        """Start the child's own readings. Its model, and so what its source was, is the parent's."""
        for probe in self._probes.values():
            probe.after_fork_in_child(self._guard.system)
        self.start(generation)

    def before_load(self) -> AtLoad:
        """The state of the source. Take it before the loader reads it. Waits for probes, up to their ``timeout``."""
        asked = [(part, self._probes[part].ask(self._guard.system)) for part in self._polled]  # all of them at once
        answers = {part: self._probes[part].wait(call) for part, call in asked}
        found = {path: self._guard.system.fingerprint(path) for path in self._paths}
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
        for part, value in at_load.answers.items():
            self._probes[part].loaded(value, self._guard.system)
        if not replaced:
            self._idle_since = self._guard.system.clock()
        self.start(generation)

    def snapshot(self, generation: Generation[Any], *, settled: bool, sample: bool) -> Snapshot:
        """Everything a policy may read about ``generation`` now.

        Args:
            generation: The current generation.
            settled: Whether all its predecessors are gone.
            sample: Whether there is time to read memory and files; if not, the latest readings are used.
        """
        now = self._guard.system.clock()
        age = now - generation.born
        if sample:
            self._read_files(now)
            for part in self._polled:
                self._probes[part].poll(self._guard.system)
            if settled and (generation.uses >= SETTLE_USES or age >= SETTLE_SECONDS):
                self._read_memory(now)
        # Read once, and copied in one step: the end of a load begins anew, in its own thread.
        memory, gpu, seen = self._memory.level, self._gpu, self._seen.copy()
        answers = [(part.probe, self._probes[part].answers) for part in self._asked]
        answers.sort(key=lambda answer: answer[1].changed)  # of a probe that two policies ask, a change counts
        return Snapshot(
            generation=generation.number,
            age=age,
            began=generation.began,
            idle=self.idle(generation, now),
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
            time=self._guard.system.wall_clock(),
            files=MappingProxyType({path: self._change(path, *found, now) for path, found in seen.items()}),
            probes=MappingProxyType(dict(answers)),
            gauges=_gauges(generation),
            first_gauges=self._first_gauges,
        )

    @property
    def interval(self) -> float:
        reads = self._reads_memory or self._reads_gpu
        return max(0.0, self._next_reading - self._guard.system.clock()) if reads else math.inf

    def idle(self, generation: Generation[Any], now: float) -> float:
        """Seconds for which no call has run or ended, as far as those have seen who have asked.

        Never any for a model that a parent process has loaded: it shares the memory, and to release it would return
        nothing.
        """
        if generation.leases or generation.uses != self._uses or generation.pid != os.getpid():
            self._uses, self._idle_since = generation.uses, now
        return now - self._idle_since

    def _read_memory(self, now: float) -> None:
        if not (self._reads_memory or self._reads_gpu) or now < self._next_reading:
            return
        system, memory, gpu = self._guard.system, self._memory, self._gpu
        started = system.thread_cpu()  # waiting for a processor costs nothing, and then a leak is in a hurry
        if self._reads_memory:
            memory.add(system.private())
        if self._reads_gpu:
            gpu.take(system.gpu)
        self._next_reading = now + pause_after(system.thread_cpu() - started)

    def _read_files(self, now: float) -> None:
        for path in self._paths:
            found = self._guard.system.fingerprint(path)
            known = self._seen.get(path)
            if known is None or known[0] != found:
                self._seen[path] = (found, now)

    def _change(self, path: Path, found: Fingerprint | None, since: float, now: float) -> FileChange:
        return FileChange(changed=found is not None and found != self._at_load.get(path), quiet=now - since)


def _gauges(generation: Generation[Any] | None) -> Mapping[str, int]:
    model = getattr(generation, "model", None)  # read once: it may be dropped at any moment
    return MappingProxyType({}) if model is None else _models.find(model).gauges(model)
