"""A world for guards in which time, memory, files and chance are what a test says they are."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from contextvars import Context
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.unit.lifecycle.gpus import FakeGpu

from modelguard import ModelGuard, ModelPool, Swap, guard, pool, telemetry
from modelguard.lifecycle.system import Fingerprint, System, use
from modelguard.runtime.host_lock import HostLock

T = TypeVar("T")
E = TypeVar("E", bound=telemetry.Event)

MB = 10**6

#: Bounds every wait for another thread. A test that comes near it has failed.
TIMEOUT = 60.0


class Model:
    """A model that takes memory of its world while it lives, and knows whether it was unloaded."""

    def __init__(self, world: World, number: int, key: object = None) -> None:
        self.number = number
        self.key = key
        self.unloaded = False
        self._world = world
        self._size = world.model_size
        world.memory += self._size

    def __del__(self) -> None:
        self._world.memory -= self._size

    def unload(self) -> None:
        self.unloaded = True

    def words(self, text: str) -> list[str]:
        assert not self.unloaded, "a call saw an unloaded model"
        return text.split()


class Loader:
    """Makes models with rising numbers; can be stopped half way, and made to fail."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.calls = 0
        self.fails = False
        self.recovers_after_this = False
        self.running = threading.Event()  # set by each call
        self.open = threading.Event()  # lets calls go on
        self.open.set()
        world.loaders.append(self)

    def __call__(self) -> Model:
        return self.load(None)

    def load(self, key: object) -> Model:
        """Make the model of a key, for pools."""
        self.calls += 1
        number = self.calls
        self.running.set()
        assert self.open.wait(TIMEOUT)
        if self.fails:
            self.fails = not self.recovers_after_this
            raise OSError("no weights")
        return Model(self._world, number, key)

    def hold(self) -> None:
        """Let calls from now on wait until ``open`` is set."""
        self.running.clear()
        self.open.clear()

    def reached(self) -> None:
        """Wait until a call is under way."""
        assert self.running.wait(TIMEOUT)


_RULES = tuple(field.name for field in fields(Swap) if field.name != "mode")


class World:
    """Makes guards and pools that live in it, records their events, and waits for their threads."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.wall = 1.7e9
        self.cpu = 0.0
        self.memory = 100 * MB
        self.model_size = 0
        self.headroom: int | None = None
        self.in_use: int | None = None
        self.python_in_use: int | None = None
        self.held: int | None = None
        self.limit: int | None = None
        self.draw = 0.0
        self.trims = 0
        self.files: dict[Path, Fingerprint | None] = {}
        self.inline = False  # run background work at once, in the thread that asks for it
        self.events: list[telemetry.Event] = []
        self.loaders: list[Loader] = []
        self.loader = Loader(self)
        self.threads: list[threading.Thread] = []
        self._own: set[threading.Thread] = set()
        self.gpu = FakeGpu()
        self.system = System(
            clock=lambda: self.now,
            wall_clock=lambda: self.wall,
            cpu=lambda: self.cpu,
            thread_cpu=lambda: self.now,
            sleep=self.tick,
            private=lambda: self.memory,
            headroom=lambda: self.headroom,
            limit=lambda: self.limit,
            trim=self.trim,
            in_use=lambda: self.in_use,
            python_in_use=lambda: self.python_in_use,
            returning=nullcontext,
            held=lambda: self.held,
            check_trim=lambda: None,
            gpu=self.gpu,
            fingerprint=self.files.get,
            random=lambda: self.draw,
            start_thread=self.start,
            start_once=self.start,
            host_lock=HostLock(lambda: folder),
            ticks=False,
        )

    def guard(
        self, load: Callable[[], Any] | None = None, system: System | None = None, **options: Any
    ) -> ModelGuard[Any]:
        """Make a guard of this world. By default it loads numbered models and reloads only on request.

        What a ``Swap`` takes may stand among the options.
        """
        rules = {name: options.pop(name) for name in _RULES if name in options}
        if rules:
            options["swap"] = Swap(options.get("swap", "auto"), **rules)
        with use(lambda: system or self.system):
            made = guard(self.loader if load is None else load, **{"reload_on": None, "name": "model", **options})
        made.load = partial(self._load, made, made.load)  # type: ignore[method-assign]
        return made

    def _load(self, made: ModelGuard[Any], load: Callable[..., None], timeout: float | None = None) -> None:
        """Load, and let the load's own thread end: it sets the policies up after it has notified callers."""
        ready = made.ready
        load(timeout)
        for thread in () if ready else [one for one in self.threads if one.name == f"modelguard-load-{made.name}"]:
            thread.join(TIMEOUT)

    def pool(self, load: Callable[[Any], Any] | None = None, **options: Any) -> ModelPool[Any, Any]:
        """Make a pool of this world, with room for ten models of 10 MB."""
        with use(lambda: self.system):
            return pool(
                self.loader.load if load is None else load, **{"max_memory": 100 * MB, "name": "pool", **options}
            )

    def tick(self, seconds: float) -> None:
        """Let time pass. Sleeping is the same thing here."""
        self.now += seconds
        self.wall += seconds

    def trim(self) -> str:
        self.trims += 1
        return "fake"

    def record(self, event: telemetry.Event) -> None:
        """The hook. A guard of an earlier test may still be released, in a thread that is not of this world."""
        thread = threading.current_thread()
        if thread in self._own or not thread.name.startswith("modelguard-"):
            self.events.append(event)

    def seen(self, kind: type[E]) -> list[E]:
        """All events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[E]) -> E:
        """The latest event of one kind."""
        return self.seen(kind)[-1]

    def reasons(self, kind: type[E]) -> tuple[str, ...]:
        """The texts of the reasons of the latest event of one kind."""
        return tuple(str(reason) for reason in self.last(kind).reasons)  # type: ignore[attr-defined]

    # Threads

    def start(self, work: Callable[[], None], name: str) -> None:
        if self.inline:
            work()
            return
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._own.add(thread)
        thread.start()  # before another thread can find it, and join it
        self.threads.append(thread)

    def spawn(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Call ``work`` in a thread; ask for its outcome with :func:`outcome`."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args))
            except BaseException as error:  # noqa: BLE001 - it is raised where the outcome is asked for
                future.set_exception(error)

        # No part of a call that runs here, on free-threaded interpreters too.
        thread = threading.Thread(target=Context().run, args=[run], name="test", daemon=True)
        thread.start()
        self.threads.append(thread)
        return future

    def end(self) -> None:
        """Release everything that was stopped, and wait for it."""
        for loader in self.loaders:
            loader.open.set()
        self.join()

    def join(self) -> None:
        """Wait until all background work is done."""
        while self.threads:
            thread = self.threads.pop()
            thread.join(TIMEOUT)
            assert not thread.is_alive(), f"{thread.name} did not end"


def outcome(future: Future[T]) -> T:
    """What a spawned call returned or raised."""
    return future.result(TIMEOUT)


#: Free-threaded interpreters give a thread the context of whoever starts it: a warm-up's threads belong to it.
own_context = pytest.mark.skipif(
    bool(getattr(sys.flags, "thread_inherit_context", 0)), reason="the executor's threads are part of the warm-up here"
)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline, pause = time.monotonic() + TIMEOUT, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        pause.wait(0.001)


def number(guard: ModelGuard[Any]) -> int:
    """The number of the model that a call runs on now."""
    with guard.lease() as model:
        return int(model.number)


def run(result: Any) -> list[str]:
    """The outcome of a call, for any kind of function."""

    async def collect() -> list[str]:
        if inspect.isawaitable(result):
            return list(await result)
        return [part async for part in result]

    if inspect.isawaitable(result) or hasattr(result, "__aiter__"):
        return asyncio.run(collect())
    return list(result)


def look(world: World, guard: ModelGuard[Any], times: int = 1) -> bool:
    """Let the ticker check, a second apart; true if it began a reload."""
    begun = False
    for _ in range(times):
        world.tick(1)
        begun = guard.check() or begun
    return begun
