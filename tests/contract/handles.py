"""The handles of models as their contract sees them: how each is made, used, watched, and what it does not have.

``tests/contract/test_handles.py`` has the promises, and runs them on the handles of this process;
``tests/process/test_handles.py`` runs the same promises on those whose models live in processes of their own.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from modelguard import TTL, Backoff, Idle, Loading, Swap, guard, pool, replicas
from modelguard.errors import GuardClosed

if TYPE_CHECKING:
    import pytest  # molds import this module, and need no pytest

T = TypeVar("T")

#: Bounds every wait for another thread or process. A test that comes near it has failed.
TIMEOUT = 60.0

#: What a test asks for: no policy; one that renews the model; ``Idle``; the previous model is kept.
Variant = Literal["plain", "due", "idle", "kept"]

#: A verb and its twin for coroutines.
How = Literal["plain", "async"]


class Loader(Protocol):
    """What makes the models, as ``modelguard_loader`` does."""

    calls: int

    @property
    def alive(self) -> int: ...

    def fail(self, times: int | None = 1) -> None: ...

    def hold(self) -> None: ...

    def reached(self) -> None: ...

    def let_go(self) -> None: ...


@dataclass(frozen=True)
class Times:
    """How long the policies of the variants take, and the wait after a load that has failed."""

    due: str
    idle: str
    backoff: Backoff


#: Of handles whose time is that of ``modelguard_clock``.
CLOCKED = Times(due="1h", idle="10m", backoff=Backoff("8s"))


@dataclass
class Running:
    """A call that runs in another thread until it is told to end."""

    answer: Future[int]
    let_go: Callable[[], object]

    def end(self) -> int:
        """End it; the number of the model that it has run on."""
        self.let_go()
        return self.answer.result(TIMEOUT)


def spawn(work: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """Call ``work`` in a thread that is no part of any call."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    Thread(target=Context().run, args=[run], name="test", daemon=True).start()
    return future


def until(condition: Callable[[], object], what: str, look: Callable[[], object] | None = None) -> None:
    """Wait for what another thread or process is about to do."""
    deadline, pause = time.monotonic() + TIMEOUT, Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited for {TIMEOUT:.0f} s: {what}"
        pause.wait(0.002)
        if look is not None:
            look()


@dataclass
class Handle(ABC):
    """One handle under test.

    Attributes:
        it: The public object.
        loader: Makes its models, and numbers them.
        wait: Lets so many seconds pass.
        pass_time: Lets so much time pass that the policy of the variant is due.
        unloaded: The numbers of the models that the hook has got.
        look: What background work needs to go on, where a test drives the time.
    """

    #: Its name in test ids.
    kind: ClassVar[str]
    #: What it has beside the rest: see :func:`needs`.
    has: ClassVar[frozenset[str]]
    #: Verbs that it does not have, each with the error that says so and a pattern of its text.
    lacks: ClassVar[Mapping[str, tuple[type[Exception], str]]] = {}
    #: How many models it keeps.
    copies: ClassVar[int] = 1

    it: Any
    loader: Loader
    wait: Callable[[float], object]
    pass_time: Callable[[], object]
    unloaded: Callable[[], list[int]]
    look: Callable[[], object] | None = None

    def __post_init__(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare what the tests call."""

    # Use

    @abstractmethod
    def call(self) -> int:
        """Call the decorated function; the number of the model that answers."""

    @abstractmethod
    async def acall(self) -> int:
        """:meth:`call` from a coroutine."""

    @abstractmethod
    def doors(self) -> dict[str, Callable[[], int]]:
        """Every way to use it."""

    @contextmanager
    @abstractmethod
    def busy(self) -> Iterator[Running]:
        """A call that runs during the block."""

    # Verbs

    def do(self, verb: str, how: How = "plain", **options: Any) -> None:
        """Run a verb, or its twin for coroutines on an event loop."""
        if how == "plain":
            getattr(self.it, verb)(**options)
        else:
            asyncio.run(self._await(verb, options))

    async def _await(self, verb: str, options: dict[str, Any]) -> None:
        await getattr(self.it, f"a{verb}")(**options)

    def on_loop(self, work: Callable[[], T]) -> T:
        """Run something that does not await on a running event loop."""

        async def main() -> T:
            return work()

        return asyncio.run(main())

    def inside(self, work: Callable[[], object]) -> int:
        """Run something inside a call."""
        raise NotImplementedError

    @contextmanager
    def entered(self, how: How) -> Iterator[None]:
        """Enter it, by ``with`` or ``async with``."""
        if how == "plain":
            with self.it:
                yield
            return
        asyncio.run(self.it.__aenter__())
        try:
            yield
        finally:
            asyncio.run(self.it.__aexit__(None, None, None))

    def verbs(self) -> list[Callable[[], object]]:
        """Every verb that needs it to be open, and its twin."""
        names = ["reload", "unload", *({"load", "rollback"} & self.has)]
        twins = [verb for verb in names if verb != "rollback"]
        now = [partial(self.it.reload, wait=False)] if "refuses late reloads" in self.has else []
        return [*now, *(getattr(self.it, verb) for verb in names), *(partial(self.do, verb, "async") for verb in twins)]

    def bounded(self) -> list[str]:
        """Verbs that take a ``timeout``."""
        all_of_them = {"load": "load", "reload": "reload waits", "unload": "", "close": "close timeout"}
        return [verb for verb, ability in all_of_them.items() if not ability or ability in self.has]

    def try_lacking(self, verb: str) -> None:
        """Run a verb that it does not have."""
        getattr(self.it, verb)()

    def load(self) -> int:
        """Have all models loaded; how many loads there were."""
        self.it.load()
        return self.loader.calls

    # What it says of itself

    def statuses(self) -> Sequence[Any]:
        """The status of each of its models."""
        return (self.it.status(),)

    def states(self) -> set[str]:
        """The words for what it does now."""
        return {one.state for one in self.statuses()}

    def ready(self) -> bool:
        """Whether calls get a model."""
        return bool(self.it.ready)

    def idle(self) -> bool:
        """Whether it has released what it had loaded."""
        return "idle" in self.states() and self.states() <= {"idle", "new"}

    def postponed(self) -> list[Any]:
        """What policies ask for, and must wait."""
        return [one.postponed for one in self.statuses() if one.postponed is not None]

    def in_flight(self) -> int:
        """Calls that run."""
        return sum(one.in_flight for one in self.statuses())

    def paused(self) -> bool:
        """Whether all of it is paused."""
        (paused,) = {one.paused for one in self.statuses()}
        return bool(paused)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for what goes on in the background."""
        until(condition, what, self.look)

    def alive(self) -> int:
        """How many of its models are in memory."""
        return self.loader.alive

    def closed(self) -> bool:
        """Whether its end has begun."""
        return "closed" in self.states()

    def gone(self) -> None:
        """Check, after ``close()``, that none of its models is left."""
        assert 0 == self.alive()

    def refuses(self) -> bool:
        """Whether a call is refused, because it is closed."""
        try:
            self.call()
        except GuardClosed:
            return True
        return False

    def end(self) -> None:
        """After the test."""
        self.loader.let_go()
        self.it.resume()
        self.it.close()


# Handles whose models live in this process.


class _InProcess(Handle):
    def __post_init__(self) -> None:
        @self._decorate
        def use(model: Any, work: Callable[[], object] | None = None, key: str = "a") -> int:
            del key
            if work is not None:
                work()
            return int(model.number)

        @self._decorate
        async def ause(model: Any, key: str = "a") -> int:
            del key
            return int(model.number)

        @self._decorate
        def stream(model: Any, key: str = "a") -> Iterator[int]:
            del key
            yield int(model.number)

        self._use, self._ause, self._stream = use, ause, stream

    @property
    def _decorate(self) -> Callable[[Any], Any]:
        decorator: Callable[[Any], Any] = self.it
        return decorator

    def lease(self, **options: Any) -> Any:
        """A lease for a block."""
        return self.it.lease(**options)

    def call(self) -> int:
        return int(self._use())

    async def acall(self) -> int:
        return int(await self._ause())

    def inside(self, work: Callable[[], object]) -> int:
        """Run something inside a call."""
        return int(self._use(work))

    def doors(self) -> dict[str, Callable[[], int]]:
        def by_lease() -> int:
            with self.lease() as model:
                return int(model.number)

        async def by_alease() -> int:
            async with self.lease() as model:
                return int(model.number)

        return {
            "function": self.call,
            "coroutine": lambda: asyncio.run(self.acall()),
            "generator": lambda: next(iter(list(self._stream()))),
            "lease": by_lease,
            "async lease": lambda: asyncio.run(by_alease()),
        }

    @contextmanager
    def busy(self) -> Iterator[Running]:
        begun, over = Event(), Event()

        def work() -> None:
            begun.set()
            assert over.wait(TIMEOUT)

        running = Running(spawn(self._use, work), over.set)
        assert begun.wait(TIMEOUT)
        try:
            yield running
        finally:
            over.set()
            running.answer.result(TIMEOUT)


EVERYTHING = frozenset(
    {
        "in process",  # its model is in this process
        "load",  # load() loads
        "ready",
        "state",
        "reload waits",  # until the new model takes calls, and the old one takes them meanwhile
        "rollback",
        "retries",  # a load that failed, without being asked
        "close timeout",
        "postponed",
        "unload at exit",
        "refuses late reloads",  # that nobody waits for
        "closes at once",  # and refuses calls while it waits for those that run
    }
)


class GuardHandle(_InProcess):
    kind = "guard"
    has = EVERYTHING


class ReplicasHandle(_InProcess):
    kind = "replicas"
    has = EVERYTHING
    copies = 2

    def statuses(self) -> Sequence[Any]:
        return tuple(self.it.status())


class PoolHandle(_InProcess):
    kind = "pool"
    has = frozenset({"in process", "close timeout", "unload at exit", "closes at once"})
    lacks: ClassVar[Mapping[str, tuple[type[Exception], str]]] = {
        verb: (AttributeError, f"'ModelPool' object has no attribute '{verb}'")
        for verb in ("load", "aload", "areload", "rollback")
    }

    @property
    def _decorate(self) -> Callable[[Any], Any]:
        decorator: Callable[[Any], Any] = self.it(key="key")
        return decorator

    def lease(self, **options: Any) -> Any:
        return self.it.lease("a", **options)

    def load(self) -> int:
        self.call()
        return self.loader.calls

    def states(self) -> set[str]:
        status = self.it.status()
        return {"closed" if self.it.closed else "ready" if status.models else "idle" if status.idle else "new"}

    def do(self, verb: str, how: How = "plain", **options: Any) -> None:
        if verb == "reload" and how == "async":  # it waits for nothing, so there is no areload()
            self.on_loop(self.it.reload)
        else:
            super().do(verb, how, **options)


IN_PROCESS: dict[str, type[Handle]] = {one.kind: one for one in (GuardHandle, ReplicasHandle, PoolHandle)}


def make_in_process(kind: str, variant: Variant, load: Callable[..., Any], times: Times, **options: Any) -> Any:
    """The public object of a handle whose models live in this process."""
    name, loading = "handle", Loading(backoff=times.backoff)
    if kind == "pool":
        policies = {"due": TTL(times.due), "idle": Idle(times.idle)}
        return pool(load, max_memory="1 GB", reload_on=policies.get(variant), loading=loading, name=name, **options)
    policies = {"due": TTL(times.due, jitter=0), "idle": Idle(times.idle), "kept": TTL(times.due, jitter=0)}
    made = guard(
        load,
        reload_on=policies.get(variant),
        swap=Swap(defer=0, keep_previous=variant == "kept"),
        loading=loading,
        name=name,
        **options,
    )
    return made if kind == "guard" else replicas(made, ReplicasHandle.copies)


# Which tests are for which handles.


def needs(*abilities: str) -> Callable[[T], T]:
    """Run a test, or the tests of a class, on the handles that have this; the others are in ``Handle.lacks``."""

    def mark(tests: T) -> T:
        tests.needs = abilities  # type: ignore[attr-defined]
        return tests

    return mark


def parametrize(metafunc: pytest.Metafunc, handles: Mapping[str, type[Handle]]) -> None:
    """For ``pytest_generate_tests`` of a module: a test that takes a ``kind`` runs on each handle that it is for."""
    if "kind" not in metafunc.fixturenames:
        return
    if getattr(metafunc.cls, "everywhere", False):
        handles = {**IN_PROCESS, **handles}
    needed = {*getattr(metafunc.function, "needs", ()), *getattr(metafunc.cls, "needs", ())}
    if "lacking" in metafunc.fixturenames:
        cases = [(kind, verb) for kind, one in handles.items() for verb in one.lacks]
        metafunc.parametrize(("kind", "lacking"), cases)
    else:
        metafunc.parametrize("kind", [kind for kind, one in handles.items() if needed <= one.has])
