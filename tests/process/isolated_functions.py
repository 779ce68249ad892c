"""Functions for the tests of isolation, in a module that a mold can import."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from modelguard import (
    Backoff,
    Bounds,
    Breaker,
    Changed,
    Errors,
    Idle,
    Loaded,
    Loading,
    MemoryGrowth,
    Modified,
    Swap,
    Uses,
    guard,
    isolate,
    pool,
)

if "ISOLATION_WEIGHTS" not in os.environ:  # molds inherit the environment of the process that has made the file
    with tempfile.NamedTemporaryFile(prefix="isolation-weights-", delete=False) as file:
        os.environ["ISOLATION_WEIGHTS"] = file.name
    atexit.register(Path(file.name).unlink, missing_ok=True)

#: Watched by a policy.
WEIGHTS = Path(os.environ["ISOLATION_WEIGHTS"])


class Model:
    """Knows where it was loaded."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.data = list(range(100_000))
        self.leak: list[bytearray] = []


def load() -> Model:
    """Load as the switch says."""
    switch = Path(os.environ.get("ISOLATION_SWITCH", "/dev/null/none"))
    order = switch.read_text() if switch.exists() else ""  # fail, hang or die
    if order == "fail":
        raise OSError("no weights")
    if order == "hang":
        time.sleep(600)
    if order == "die":
        os._exit(7)
    return Model()


QUICK = Loading(backoff=Backoff(0.05, 0.2))

model = guard(load, reload_on=None, warmup=lambda _: None, name="model", loading=QUICK)


@isolate(workers=2, timeout="5s")
@model
def where(loaded: Model, delay: float = 0.0) -> tuple[int, int]:
    """Tell the mold's and the worker's process id."""
    time.sleep(delay)
    return loaded.pid, os.getpid()


@isolate(workers=1, name="of one name")
@guard(load, reload_on=None, unload=lambda _: None, name="of one name")
def of_one_name(loaded: Model) -> int:
    """Tell the mold's process id."""
    return loaded.pid


@isolate(workers=2, timeout="5s", start="spawn")
@guard(load, reload_on=None, loading=QUICK)
def where_spawned(loaded: Model) -> tuple[int, int]:
    """Tell the worker's process id."""
    return loaded.pid, os.getpid()


@isolate(workers=2, timeout="1s", breaker=Breaker(failures=100))
@guard(load, reload_on=None, loading=QUICK)
def ends(_: Model, how: str) -> str:
    """End the worker, or not."""
    if how == "exit":
        os._exit(3)
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    if how == "segfault":
        ctypes.string_at(0)
    if how == "hang":
        time.sleep(600)
    if how == "leaves a child":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(3)
    return how


@isolate(workers=3, timeout="5s", breaker=Breaker(failures=100))
@guard(load, reload_on=None, loading=QUICK)
def notes(_: Model, path: str, number: int) -> int:
    """Write down that the call has run."""
    with Path(path).open("ab", buffering=0) as file:
        file.write(b"%d\n" % number)
    return number


@isolate(workers=3, timeout="1s", breaker=Breaker(failures=100))
@guard(load, reload_on=MemoryGrowth("60 MB"), loading=QUICK)
def storm(loaded: Model, how: str, token: str) -> tuple[str, str]:
    """End the worker, hang, take memory, or only answer."""
    if how in {"exit", "segfault", "hang"} or how.startswith("SIG"):
        ends.isolated_function(how)
    if how == "slow":
        time.sleep(0.3)
    if how == "balloon":
        loaded.leak.append(bytearray(os.urandom(1024)) * 40_000)
    if how == "bubble":
        bytearray(os.urandom(1024)) * 200_000
    return how, token


@isolate(workers=1, retry=True)
@guard(load, reload_on=None, loading=QUICK)
def crashes_once(_: Model, marker: str) -> int:
    """Crash at the first call with this marker."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        os._exit(9)
    return os.getpid()


@isolate(workers=1, timeout="1s", breaker=Breaker(failures=2, cooldown=0.5))
@guard(load, reload_on=None, loading=QUICK)
def breaks(_: Model, how: str) -> str:
    """Crash, or hang, if asked to."""
    if how == "crash":
        os._exit(1)
    if how == "hang":
        time.sleep(600)
    return how


def sifting(**options: Any) -> Any:
    """Isolate a function that is not patient with bad items."""

    def decorate(function: Any) -> Any:
        isolated = isolate(workers=1, timeout="1s", breaker=Breaker(failures=2), **options)
        return isolated(guard(load, reload_on=Errors(2), loading=QUICK)(function))

    return decorate


class Text(str):  # noqa: SLOT000 - it needs room for the references
    """One that can be referred to weakly."""


def sifted(items: list[str]) -> list[int]:
    """Crash, hang or raise, if an item asks for it."""
    if "crash" in items:
        os._exit(1)
    if "hang" in items:
        time.sleep(60)
    if "raise" in items:
        raise ValueError("bad item")
    return [os.getpid()] * len(items)


@sifting()
def sifts(_: Model, items: list[str]) -> list[int]:
    """Sift them."""
    return sifted(items)


@sifting()
async def asifts(_: Model, items: list[str]) -> list[int]:
    """Sift them on a loop."""
    return sifted(items)


@sifting(retry=True)
def sifts_again(_: Model, items: list[str]) -> list[int]:
    """Sift them a second time after a crash."""
    return sifted(items)


@sifting(scope="host")
def sifts_for_host(_: Model, items: list[str]) -> list[int]:
    """Sift them for all processes."""
    return sifted(items)


@isolate(workers=1)
@guard(load, reload_on=Idle("300ms"))
def sleepy(loaded: Model) -> int:
    """Be needed now and then."""
    return loaded.pid


@isolate(workers=2)
@guard(load, reload_on=Uses(5))
def counted(_: Model) -> int:
    """Wear out."""
    return os.getpid()


@isolate(workers=1)
@guard(load, reload_on=MemoryGrowth("20 MB"))
def leaks(loaded: Model) -> int:
    """Leak a megabyte."""
    loaded.leak.append(bytearray(os.urandom(1024)) * 1024)
    return os.getpid()


@isolate(workers=1)
@guard(load, reload_on=Errors(3))
def failing(_: Model, fail: bool) -> int:  # noqa: FBT001 - as a user would write it
    """Raise if asked to."""
    if fail:
        raise KeyError("missing")
    return os.getpid()


@isolate(workers=1)
@guard(load, reload_on=Modified(WEIGHTS, atomic=True), loading=QUICK)
def watching(loaded: Model) -> int:
    """Be replaced when the switch changes."""
    return loaded.pid


#: Processes that have asked, beside the revision that they got.
ASKED = Path(f"{WEIGHTS}.asked")


def revision() -> str:
    """The version of the weights; says who has asked."""
    with ASKED.open("a") as asked:
        asked.write(f"{os.getpid()}\n")
    return WEIGHTS.read_text()


def load_revision() -> Loaded[Model]:
    """Load the weights with their version."""
    return Loaded(load(), version=f"revision {WEIGHTS.read_text()}")


@isolate(workers=1)
@guard(load_revision, reload_on=Changed(revision, every="100ms"), loading=QUICK)
def revised(loaded: Model) -> int:
    """Be replaced when the weights have another revision."""
    return loaded.pid


@isolate(workers=1)
@guard(load_revision, reload_on=Changed(revision, every="100ms"), swap=Swap(keep_previous=True), loading=QUICK)
def undoable(loaded: Model) -> int:
    """The same, with the previous mold kept."""
    return loaded.pid


@isolate(workers=1, start="spawn")
@guard(load_revision, reload_on=Changed(revision, every="100ms"), loading=QUICK)
def revised_by_spawn(loaded: Model) -> int:
    """The same in fresh interpreters."""
    return loaded.pid


@isolate(workers=1)
@guard(load, reload_on=None, loading=Loading("1s", backoff=QUICK.backoff))
def impatient(loaded: Model) -> int:
    """Load in time or not at all."""
    return loaded.pid


class Unpicklable(Exception):
    """An error that cannot be rebuilt elsewhere."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@isolate(workers=1, bounds=Bounds(transfer="30 MB"))
def echo(value: Any = None, do: str = "") -> Any:
    """Give the value back, or do something else."""
    return ACTIONS[do](value)


@isolate(workers=2)
def late_echo(value: int, seconds: float) -> int:
    """Give the value back after a while."""
    time.sleep(seconds)
    return value


@isolate(workers=1, scope="host")
def shared_echo(value: Any = None, do: str = "") -> Any:
    """The same, for the host."""
    return ACTIONS[do](value)


class Exits:
    """Calls sys.exit() as it is rebuilt in the process that has made it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__.update(state)
        if self.pid == os.getpid():
            self.end()

    def end(self) -> None:
        """End it."""
        sys.exit(3)


class Signals(Exits):
    """Sends itself a signal then."""

    def end(self) -> None:
        """Send it."""
        os.kill(self.pid, signal.SIGUSR1)


def raise_unpicklable(_: Any) -> None:
    """Raise."""
    raise Unpicklable(1, 2)


class Refused(ValueError):
    """An error to which weak references are possible."""


class Unread(ValueError):
    """An error that makes its text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"cannot read {text}")


def unread(_: Any) -> None:
    """Raise."""
    raise Unread("this")


def refuse(_: Any) -> None:
    """Raise."""
    raise Refused


class Lazy:
    """Stands for another object, which cannot be found, as a lazy one of Django may."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Fail."""
        raise OSError("no database")

    def __reduce__(self) -> str:
        """Fail as well."""
        raise OSError("no database")


def fork(value: Any) -> Any:
    """Return twice."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return value


def trace_id(_: Any) -> int:
    """Tell the trace that this call belongs to."""
    from opentelemetry import trace

    return trace.get_current_span().get_span_context().trace_id


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "refuse": refuse,
    "unpicklable error": raise_unpicklable,
    "error with a text": unread,
    "lock": lambda _: threading.Lock(),
    "iterator": lambda _: iter(range(3)),
    "lazy": lambda _: Lazy(),
    "exit": lambda _: sys.exit(4),
    "large": lambda _: bytes(40_000_000),
    "log": lambda value: logging.getLogger("isolated").warning("seen %s", value),
    "fork": fork,
    "self": echo,
    "trace": trace_id,
    "other": lambda _: where(),
}


@isolate(workers=1, recycle_on=Uses(2))
def plain() -> int:
    """Have no guard."""
    return os.getpid()


class Service:
    """Has functions that belong to it, and no text."""

    def __str__(self) -> str:
        raise ValueError("no text")

    @isolate(workers=1)
    @guard(load, reload_on=None)
    @staticmethod
    def static(loaded: Model, value: int) -> tuple[int, int]:
        """Be called by way of the class, or of an object."""
        return loaded.pid, value


@isolate(workers=2)
@guard(load, reload_on=None)
async def coroutine(_: Model, value: int, delay: float = 0.0) -> int:
    """Await in the worker."""
    await asyncio.sleep(delay)
    return value + 1


@isolate(workers=1, timeout="2s")
@guard(load, reload_on=None, loading=QUICK)
def items(_: Model, count: int, end: str = "") -> Iterator[int]:
    """Yield some numbers."""
    yield from range(count)
    if end == "raise":
        raise ValueError("at the end")
    if end == "exit":
        raise SystemExit(Service())
    if end == "die":
        os._exit(5)


@isolate(workers=1)
@guard(load, reload_on=None)
async def aitems(_: Model, count: int) -> AsyncIterator[int]:
    """Yield some numbers."""
    for number in range(count):
        await asyncio.sleep(0)
        yield number


@isolate(workers=2, timeout="5s")
@guard(load, reload_on=None)
def doubled(_: Model, numbers: list[int]) -> list[int]:
    """Compute a batch."""
    return [2 * number for number in numbers]


@isolate(workers=2, timeout="5s")
@guard(load, reload_on=None)
async def adoubled(_: Model, numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


@isolate(workers=1, timeout="5s")
@guard(load, reload_on=None)
def counted_up(_: Model, numbers: list[int]) -> Iterator[list[int]]:
    for step in range(3):
        yield [number + step for number in numbers]


@isolate(workers=1, timeout="5s")
@guard(load, reload_on=None)
async def acounted_up(_: Model, numbers: list[int]) -> AsyncIterator[list[int]]:
    for step in range(3):
        yield [number + step for number in numbers]


@isolate(workers=2, timeout="2s", start="spawn")
@guard(load, reload_on=Uses(20), loading=QUICK)
def spawned(loaded: Model, how: str = "") -> tuple[int, int]:
    """Run in a process that has loaded for itself."""
    if how == "crash":
        os._exit(3)
    if how == "hang":
        time.sleep(600)
    return loaded.pid, os.getpid()


def note_unload() -> None:
    """Write down that a model was unloaded."""
    path = os.environ.get("ISOLATION_UNLOADED")
    if path is not None:
        with Path(path).open("a") as file:
            file.write(f"{os.getpid()}\n")


class Voice(Model):
    """The model of one key."""

    def __init__(self, name: str) -> None:
        super().__init__()
        if name == "broken":
            raise OSError("no such voice")
        self.name = name


voices = pool(Voice, max_memory="2 GB", max_models=2, loading=QUICK, unload=lambda _: note_unload())


@isolate(workers=2, timeout="5s", recycle_on=Uses(30))
@voices(key="voice")
def speak(loaded: Voice, voice: str, do: str = "") -> tuple[str, int, int]:
    """Tell which model computes, where it was loaded, and where this is."""
    if do == "crash":
        os._exit(3)
    if do == "hang":
        time.sleep(600)
    if do == "same":
        return speak(voice)
    if do == "other":
        return speak(voice + "!")
    return loaded.name, loaded.pid, os.getpid()


def until_there(path: str) -> str:
    """Wait for a file; an empty name is no file."""
    until = time.monotonic() + 60
    while path and not Path(path).exists() and time.monotonic() < until:
        time.sleep(0.005)
    return path


@isolate(workers=1, timeout="60s", bounds=Bounds(queue=10))
@guard(load, reload_on=None, loading=QUICK)
def held(_: Model, path: str = "") -> str:
    """Keep the only worker until the file is there."""
    return until_there(path)


@isolate(workers=1, timeout="60s", bounds=Bounds(queue=10), scope="host")
@guard(load, reload_on=None, loading=QUICK)
def shared_held(_: Model, path: str = "") -> str:
    """The same, for the host."""
    return until_there(path)


async def _ticks(_: Model, count: int, path: str = "") -> AsyncIterator[int]:
    for number in range(count):
        until_there(path)
        await asyncio.sleep(0)
        yield number


@isolate(workers=2, timeout=None)
@guard(load, reload_on=None, loading=QUICK)
async def ticks(loaded: Model, count: int, path: str = "") -> AsyncIterator[int]:
    """Yield numbers, each when the file is there."""
    async for number in _ticks(loaded, count, path):
        yield number


@isolate(workers=2, timeout=None, scope="host")
@guard(load, reload_on=None, loading=QUICK)
async def shared_ticks(loaded: Model, count: int, path: str = "") -> AsyncIterator[int]:
    """The same, for the host."""
    async for number in _ticks(loaded, count, path):
        yield number


class NothingLeft(StopIteration):
    """An error of the application's own."""


#: What ends an iteration, a generator, a task or a process, if it is not an answer of another process.
SIGNALS: dict[str, Callable[[], BaseException]] = {
    "StopIteration": lambda: StopIteration(3),
    "a subclass": lambda: NothingLeft(3),
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "the future's CancelledError": concurrent.futures.CancelledError,
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
}


@isolate(workers=1, timeout="20s")
@guard(load, reload_on=None, loading=QUICK)
def signalling(_: Model, which: str) -> None:
    """Raise what ``next()`` on an empty iterator raises, or the like."""
    error = SIGNALS[which]()
    raise error


patient_voices = pool(until_there, max_memory="2 GB", loading=QUICK)


@isolate(workers=1, timeout="60s", bounds=Bounds(queue=50))
@patient_voices(key="path")
def loads_when_there(loaded: str, path: str) -> str:
    """Have a model that loads when the file is there."""
    assert loaded == path
    return loaded


@isolate(workers=1, timeout="60s")
@guard(lambda: until_there(os.environ.get("ISOLATION_LOADS_AT", "")), reload_on=None, loading=QUICK)
def loads_late(_: str) -> str:
    """Have a model that loads when the file is there."""
    return "answer"


@isolate(workers=1, timeout="60s", scope="host")
@guard(lambda: until_there(os.environ.get("ISOLATION_LOADS_AT", "")), reload_on=None, loading=QUICK)
def shared_loads_late(_: str) -> str:
    """The same, for the host."""
    return "answer"


@isolate(workers=1)
@guard(load, reload_on=None, loading=QUICK, warmup=lambda _: os._exit(7))
def dies_warming(_: Model) -> None:
    """Never be called."""


@isolate(workers=1, timeout="100ms", breaker=Breaker(failures=2))
@guard(load, reload_on=None, loading=QUICK)
def hopeless(_: Model) -> None:
    """Take longer than the timeout."""
    time.sleep(1.0)


def load_with_few_forks() -> Model:
    """Have this process fork no more once the file names it, as where the system has no process left."""
    fork = os.fork

    def limited() -> int:
        path = Path(os.environ["ISOLATION_NO_FORKS"])
        if path.exists() and path.read_text() == str(os.getpid()):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    os.fork = limited
    return load()


@isolate(workers=1)
@guard(load_with_few_forks, reload_on=None, loading=QUICK)
def forks(loaded: Model) -> int:
    """Tell the mold."""
    return loaded.pid


@isolate(workers=2)
@guard(load_with_few_forks, reload_on=None, loading=QUICK)
def two_forks(loaded: Model, until: str = "") -> int:
    """Tell the mold, once this path is there."""
    while until and not Path(until).exists():
        time.sleep(0.01)
    return loaded.pid
