"""``modelguard_clock``: the test sets time and memory, jitter is fixed, and background work ends while it waits."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any

from modelguard import _units, memory
from modelguard.errors import InvalidOption
from modelguard.facts._gpu import DeviceMemory, Gpu
from modelguard.lifecycle import system
from modelguard.lifecycle._engine import Engine, engines
from modelguard.lifecycle._pool_engine import pool_engines
from modelguard.lifecycle.guard import ModelGuard, guard_of, guards
from modelguard.lifecycle.handle import Handle
from modelguard.runtime import clock
from modelguard.runtime.background import TICKER, Ticked
from modelguard.runtime.host_lock import Held, HostLock
from modelguard.serving import _batcher
from modelguard.testing._loader import OfTest, any_held, let_all_go

# A GPU whose use a test sets, for policies on machines that have none.


#: Bytes that it has.
TOTAL = 80_000_000_000


class OneGpu(Gpu):
    """One device, on which this process has what the test says."""

    def __init__(self) -> None:
        self.allocated = 0

    def missing(self, *, loaded: bool) -> str | None:  # noqa: ARG002 - as in the real one
        return None

    def devices(self) -> tuple[DeviceMemory, ...]:
        return (DeviceMemory(0, self.allocated, self.allocated, TOTAL),)

    def pinned(self) -> int | None:
        return None

    def room(self, device: int) -> int | None:  # noqa: ARG002 - there is one
        return None

    def empty_cache(self) -> None:
        pass


#: Time moves in steps that a float represents exactly, so that a TTL of an hour ends after exactly one hour.
_TICKS = 1024
#: The ticker checks a guard at most twenty times a second; one ``advance`` checks at most this often.
_SHORTEST = 0.05
_CHECKS = 1000
#: Real seconds that background work may take before the test fails.
_TIMEOUT = 10.0
_START = 100_000_000


class Clock(OfTest):
    """Time, memory and randomness for the guards and pools that a test makes.

    It begins at an arbitrary time, with 100 MB of private memory, no memory limit, unlimited headroom, and nothing on
    its one GPU. Random jitter is always 0: a ``TTL`` is due exactly at its age, and a ``Backoff`` takes its shortest
    wait, which is half.

    Policies, ``defer``, backoffs, and ``memory.trim_every`` use this clock. Timeouts of callers stay in real time,
    because threads actually wait: ``wait_timeout``, the timeout of ``Loading``, ``drain_timeout`` and the timeouts of
    leases. For everything in ``batched`` real time goes on, and :meth:`advance` adds to it.
    """

    def __init__(self, test: str) -> None:
        super().__init__("modelguard_clock", test)
        self._lock = threading.Lock()
        self._ticks = math.ceil(time.monotonic()) * _TICKS
        self._wall_at_zero = time.time() - self._clock()
        self._probed = False
        self._memory = _START
        self._gpu = OneGpu()
        self._limit: int | None = None
        self._headroom: int | None = None
        self._threads: list[threading.Thread] = []
        self._system = system.System(
            clock=self._clock,
            wall_clock=lambda: self._wall_at_zero + self._clock(),
            cpu=self._clock,
            thread_cpu=self._clock,
            sleep=self._sleep,
            private=lambda: self._memory,
            headroom=lambda: self._headroom,
            limit=lambda: self._limit,
            trim=lambda: "modelguard_clock",
            in_use=lambda: None,
            python_in_use=lambda: None,
            returning=nullcontext,
            held=lambda: None,
            check_trim=lambda: None,
            gpu=self._gpu,
            random=lambda: 0.0,
            start_thread=self._start,
            start_once=self._start_probe,
            host_lock=_FreeLock(),
            ticks=False,
        )

    # What a test sets

    @property
    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return self._clock()

    @property
    def wall(self) -> datetime:
        """The time of day in UTC, for ``Between`` and ``Cron``. Set it to a ``datetime``; it goes on with ``now``."""
        return datetime.fromtimestamp(self._wall_at_zero + self._clock(), UTC)

    @wall.setter
    def wall(self, value: datetime) -> None:
        self._require_test("wall")
        if not isinstance(value, datetime) or value.tzinfo is None:
            fix = "Write datetime(2026, 1, 10, 2, 30, tzinfo=UTC)."
            raise InvalidOption("wall", value, why="must be a datetime with a time zone", fix=fix)
        self._wall_at_zero = value.timestamp() - self._clock()

    @property
    def memory(self) -> int:
        """Private memory in bytes, as guards read it. Set it to bytes or a size such as ``"600 MB"``."""
        return self._memory

    @memory.setter
    def memory(self, value: int | str) -> None:
        self._require_test("memory")
        self._memory = _units.size(value, "memory")

    @property
    def gpu_memory(self) -> int:
        """Bytes in tensors on the one GPU of 80 GB, as guards read them. Set it to bytes or text such as ``"2 GB"``."""
        return self._gpu.allocated

    @gpu_memory.setter
    def gpu_memory(self, value: int | str) -> None:
        self._require_test("gpu_memory")
        self._gpu.allocated = _units.size(value, "gpu_memory")

    @property
    def limit(self) -> int | None:
        """The effective memory limit in bytes; None for no limit. Guards read it when they are made."""
        return self._limit

    @limit.setter
    def limit(self, value: int | str | None) -> None:
        self._require_test("limit")
        self._limit = None if value is None else _units.size(value, "limit")

    @property
    def headroom(self) -> int | None:
        """Bytes that may still be allocated; None for unknown. ``swap="auto"`` uses it."""
        return self._headroom

    @headroom.setter
    def headroom(self, value: int | str | None) -> None:
        self._require_test("headroom")
        self._headroom = None if value is None else _units.size(value, "headroom")

    def advance(self, duration: _units.Duration) -> None:
        """Let time pass, evaluate the policies meanwhile, like a service's ticker, and finish the due reloads.

        Then deadlines of batched calls expire, batches that are due begin, and those that overstay count as hung.

        A due reload waits for a pause between calls, up to the guard's ``defer``. This time passes too: up to five more
        seconds for each reload, unless the guard has ``swap=Swap(defer=0)``.

        Args:
            duration: Seconds, a ``timedelta``, or text such as ``"1h30m"``; 0 evaluates the policies now.

        Raises:
            InvalidOption: It is not a duration.
            TimeoutError: A load did not end within ten real seconds.
        """
        seconds = _units.seconds(duration, "duration", zero=True)
        self._require_test("advance()")
        end, least = self._clock() + seconds, max(_SHORTEST, seconds / _CHECKS)
        self._evaluate()
        while (left := end - self._clock()) > 0:
            due = min((ticked.check_interval() for ticked in self._ticked()), default=math.inf)
            self._sleep(min(max(due, least), left))
            self._evaluate()
        clock.advance(seconds)
        for batcher in _batcher.batchers:
            batcher.check_time()

    def settle(self) -> None:
        """Wait until the reloads that calls have started (because of ``Uses`` or ``Errors``) have ended.

        It does not wait for work that itself waits for the test: a drain with a call that the test keeps open, or a
        loader that ``modelguard_loader.hold()`` has stopped.

        Raises:
            TimeoutError: A load did not end within ten real seconds.
        """
        self._require_test("settle()")
        deadline = time.monotonic() + _TIMEOUT
        while running := self._running():
            running[0].join(0.001)
            if self._waits_for_the_test():
                return
            if time.monotonic() > deadline:
                names = ", ".join(thread.name for thread in running)
                raise TimeoutError(f"modelguard_clock: {names} did not end within {_TIMEOUT:g} real seconds")

    def drive(self, guarded: ModelGuard[Any] | Callable[..., Any]) -> None:
        """Move a guard that was made before the test, such as one at the top of a module, to this clock.

        Args:
            guarded: The guard, or a function that it decorates.

        Raises:
            InvalidOption: It is neither of them.
        """
        self._require_test("drive()")
        if isinstance(guarded, Handle) and not isinstance(guarded, ModelGuard):
            fix = "Make it in the test, where it gets this clock by itself."
            raise InvalidOption("guarded", guarded, why="is neither a guard nor a function that one decorates", fix=fix)
        guard: ModelGuard[Any] = guarded if isinstance(guarded, ModelGuard) else guard_of(guarded)
        TICKER.remove(guard.engine)
        with self._lock:  # its model's age must not become negative
            self._ticks = max(self._ticks, math.ceil(guard.engine.system.clock()) * _TICKS)
        guard.engine.system = self._system
        if (current := guard.engine.state.current) is not None:
            current.jitter = 0.0  # it was drawn when the model was loaded

    # What the fixture calls

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Use this clock for guards and pools that are made in the block.

        At its end, wait for the test's threads, and move guards that outlive the test to real time.
        """
        with system.use(lambda: self._system):
            yield
            try:
                let_all_go()  # what they sleep passes on this clock
                self.settle()
            finally:  # a load that hangs leaves the next tests alone
                self._return()
                self.end()

    def _return(self) -> None:
        trimming = memory.running()
        if trimming is not None and trimming.system is self._system:
            trimming.stop()
        ahead = self._clock() - time.monotonic()
        real = system.System(clock=lambda: time.monotonic() + ahead)
        outliving = self._ticked()
        both: tuple[Any, ...] = (*engines, *pool_engines)
        for engine in both:
            if engine.system is self._system:
                engine.system = real
        for one in outliving:
            if not isinstance(one, Engine) or one.state.current is not None:
                TICKER.add(one)  # a pool until it finds no model

    # Evaluating the policies

    def _ticked(self) -> list[Ticked]:
        """What the ticker would check: guards, ``memory.trim_every`` and pools, but not the models in these."""
        trimming = memory.running()
        all_ = (*(guard.engine for guard in guards), *([trimming] if trimming else ()), *pool_engines)
        return [one for one in all_ if one.system is self._system]

    def _evaluate(self) -> None:
        self._probed = True
        while self._probed:  # what a probe has returned is evaluated at the same time
            self._probed = False
            for ticked in self._ticked():
                look = ticked.check if isinstance(ticked, Engine) else ticked.tick  # policies have no thread here
                look()
                self.settle()  # one after the other, as replicas are replaced

    def _running(self) -> list[threading.Thread]:
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            return [thread for thread in self._threads if thread is not threading.current_thread()]

    def _waits_for_the_test(self) -> bool:
        own = [engine for engine in engines if engine.system is self._system]  # not those of earlier tests
        return any(old.leases for engine in own for old in tuple(engine.state.draining)) or any_held()

    # The system

    def _clock(self) -> float:
        return self._ticks / _TICKS

    def _sleep(self, seconds: float) -> None:
        with self._lock:
            self._ticks += math.ceil(seconds * _TICKS)

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()  # first: one that has not begun looks as if it had ended; until then settle() sees who starts it
        with self._lock:
            self._threads.append(thread)

    def _start_probe(self, work: Callable[[], None], name: str) -> None:
        self._probed = True
        self._start(work, name)


class _FreeLock(HostLock):
    def __init__(self) -> None:
        """Make the lock without a folder, since it has no file."""

    @contextmanager
    def held(self, **_: object) -> Iterator[Held]:
        yield "process"
