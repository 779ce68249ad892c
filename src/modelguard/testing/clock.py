"""``modelguard_clock``: time, memory and chance are what the test says, and background work is done when it looks."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle import forking, keeper, runtime, workers
from modelguard.lifecycle.calls import guard_of
from modelguard.lifecycle.guard import ModelGuard
from modelguard.lifecycle.pool import ModelPool
from modelguard.lifecycle.slot import HOST, Slot
from modelguard.testing import loader

if TYPE_CHECKING:
    import pytest

__all__ = ["Clock"]

#: Time goes in steps that a float holds exactly, so that a TTL of an hour is over after an hour and not just before.
_TICKS = 1024
#: The keeper asks a guard at most twenty times a second; within one ``advance`` at most so often.
_SHORTEST = 0.05
_LOOKS = 1000
#: Real seconds that background work may take before the test is told that it does not end.
_PATIENCE = 10.0
_START = 100_000_000


class Clock:
    """The world of the guards and pools that a test makes: time, memory and chance.

    It begins at no particular time, with 100 MB of private memory, no memory limit and no bound to what may still be
    allocated. Jitter draws 0: a ``TTL`` is due at its very age, and a ``Backoff`` takes half of its wait, the least.

    Policies, ``defer``, backoffs, ``trim_every`` and the ``ttl`` of pools go by this clock. What a caller waits for
    stays real, because threads really wait: ``wait_timeout``, ``load_timeout``, ``drain_timeout``, the timeouts of
    leases, and all of ``batched``.
    """

    def __init__(self, test: str) -> None:
        self._test = test
        self._lock = threading.Lock()
        self._ticks = math.ceil(time.monotonic()) * _TICKS
        self._over = False
        self._ahead = 0.0
        self._memory = _START
        self._limit: int | None = None
        self._headroom: int | None = None
        self._threads: list[threading.Thread] = []
        self._worlds: dict[int, runtime.Runtime] = {}
        self._slot = _Turn(self)

    # What a test says

    @property
    def now(self) -> float:
        """Seconds from any start."""
        return self._clock()

    @property
    def memory(self) -> int:
        """What private memory reads, in bytes. Give bytes or a size such as ``"600 MB"``."""
        return self._memory

    @memory.setter
    def memory(self, value: int | str) -> None:
        self._require_test("memory")
        self._memory = _units.size(value, "memory")

    @property
    def limit(self) -> int | None:
        """The effective memory limit, in bytes; None for none. Guards read it when they are made."""
        return self._limit

    @limit.setter
    def limit(self, value: int | str | None) -> None:
        self._require_test("limit")
        self._limit = None if value is None else _units.size(value, "limit")

    @property
    def headroom(self) -> int | None:
        """What may still be allocated, in bytes; None for unknown. ``swap="auto"`` goes by it."""
        return self._headroom

    @headroom.setter
    def headroom(self, value: int | str | None) -> None:
        self._require_test("headroom")
        self._headroom = None if value is None else _units.size(value, "headroom")

    def advance(self, duration: _units.Duration) -> None:
        """Let time pass, asking the policies on the way as a service's keeper does, and see what is due through.

        A due reload waits for a pause among the calls, up to the guard's ``defer``, and the time that this takes
        passes as well: up to five seconds more for each reload, unless the guard has ``defer=0``.

        Args:
            duration: Seconds, a ``timedelta``, or text such as ``"1h30m"``; 0 asks the policies now.

        Raises:
            InvalidOption: It is no duration.
            TimeoutError: A load did not end within ten real seconds.
        """
        seconds = _units.seconds(duration, "duration", zero=True)
        self._require_test("advance()")
        end, least = self._clock() + seconds, max(_SHORTEST, seconds / _LOOKS)
        self._ask()
        while (left := end - self._clock()) > 0:
            self._sleep(min(max(self._pace(), least), left))
            self._ask()

    def settle(self) -> None:
        """Wait until the reloads that calls have set off (by ``Uses`` or ``Errors``) are done.

        What waits for the test itself is not waited for: a drain whose call the test has still open, and a loader that
        ``modelguard_loader.hold()`` holds up.

        Raises:
            TimeoutError: A load did not end within ten real seconds.
        """
        self._require_test("settle()")
        deadline = time.monotonic() + _PATIENCE
        while running := self._running():
            running[0].join(0.001)
            if self._waits_for_the_test():
                return
            if time.monotonic() > deadline:
                names = ", ".join(thread.name for thread in running)
                raise TimeoutError(f"modelguard_clock: {names} did not end within {_PATIENCE:g} real seconds")

    def drive(self, guarded: ModelGuard[Any] | Callable[..., Any]) -> None:
        """Take a guard that was made before the test, as at the top of a module, into this world.

        Args:
            guarded: The guard, or a function that it decorates.

        Raises:
            InvalidOption: It is neither.
        """
        self._require_test("drive()")
        guard: ModelGuard[Any] = guarded if isinstance(guarded, ModelGuard) else guard_of(guarded)
        keeper.KEEPER.forget(guard)
        with self._lock:  # its model's age must not become negative
            self._ticks = max(self._ticks, math.ceil(guard._runtime.clock()) * _TICKS)  # noqa: SLF001
        world = self._world()
        for part in (guard, guard._judge, guard._judge.watch, guard._trimmer):  # noqa: SLF001 - all that look at it
            if part is not None:
                part._runtime = world  # noqa: SLF001

    # What the fixture calls

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have guards and pools that are made from now on live in this world."""
        patch.setattr(runtime, "default", self._world)

    def end(self) -> None:
        """The test is over: let its threads end, and the guards that outlive it go on in real time."""
        self.settle()
        self._ahead = self._clock() - time.monotonic()
        self._over = True
        for guard in self._guards():
            object.__setattr__(guard._runtime, "kept", True)  # noqa: SLF001 - a frozen world comes to life
            if guard.ready:
                keeper.KEEPER.keep(guard)

    # Asking the policies

    def _guards(self) -> list[ModelGuard[Any]]:
        """The guards of this world, less those inside pools, which no keeper asks either."""
        mine = [(one, id(one._runtime)) for one in forking.alive()]  # noqa: SLF001
        pooled = {world for one, world in mine if isinstance(one, ModelPool)}
        return [
            one for one, world in mine if isinstance(one, ModelGuard) and world in self._worlds and world not in pooled
        ]

    def _ask(self) -> None:
        for guard in self._guards():
            guard.check()
        self.settle()

    def _pace(self) -> float:
        return min((guard.pace() for guard in self._guards()), default=math.inf)

    def _running(self) -> list[threading.Thread]:
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            return [thread for thread in self._threads if thread is not threading.current_thread()]

    def _waits_for_the_test(self) -> bool:
        cores = [one._core for one in forking.alive() if isinstance(one, ModelGuard)]  # noqa: SLF001
        drains = any(old.leases for core in cores for old in tuple(core.draining))
        return drains or loader.any_held()

    # The world

    def _world(self) -> runtime.Runtime:
        # One for each guard, which tells the guards of a pool, that share the pool's, from the others.
        world = runtime.Runtime(
            clock=self._clock,
            sleep=self._sleep,
            private=lambda: runtime.private() if self._over else self._memory,
            headroom=lambda: runtime.headroom() if self._over else self._headroom,
            limit=lambda: runtime.Runtime().limit() if self._over else self._limit,
            trim=lambda: runtime.trim() if self._over else "modelguard_clock",
            in_use=lambda: runtime.in_use() if self._over else None,
            check_trim=lambda: None,
            random=lambda: random.random() if self._over else 0.0,  # noqa: S311 - jitter, not a secret
            start_thread=self._start,
            slot=self._slot,
            kept=False,
        )
        self._worlds[id(world)] = world
        return world

    def _clock(self) -> float:
        return time.monotonic() + self._ahead if self._over else self._ticks / _TICKS

    def _sleep(self, seconds: float) -> None:
        if self._over:
            time.sleep(seconds)
            return
        with self._lock:
            self._ticks += math.ceil(seconds * _TICKS)

    def _start(self, work: Callable[[], None], name: str) -> None:
        if self._over:
            workers.WORKERS.start(work, name)
            return
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _require_test(self, use: str) -> None:
        if self._over:
            raise InvalidOption(
                "modelguard_clock",
                use,
                why=f"it belongs to {self._test}, which has ended",
                fix="Ask for the fixture in the test that uses it, and keep it nowhere else.",
            )


class _Turn(Slot):
    """The turn to hold two copies: at once while the test runs, by turns as ever afterwards."""

    def __init__(self, clock: Clock) -> None:
        self._of = clock

    @contextmanager
    def held(
        self, *, sleep: Callable[[float], None], clock: Callable[[], float], cancelled: Callable[[], bool]
    ) -> Iterator[str]:
        if self._of._over:  # noqa: SLF001 - one thing in two classes
            with HOST.held(sleep=sleep, clock=clock, cancelled=cancelled) as how:
                yield how
        else:
            yield "process"

    def after_fork_in_child(self) -> None:
        """Nothing is held."""
