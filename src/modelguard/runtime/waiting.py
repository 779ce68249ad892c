"""How a caller waits: for how long at most, on an event loop or off it, in a line, and for work in another thread.

What is waited for is a future. Whoever waits writes it once, as a generator that yields each :class:`Wait` (or
:class:`Work` that blocks); :func:`block` runs it in a thread, :func:`suspend` in a coroutine, under asyncio or trio.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from modelguard import _units
from modelguard.errors import NotSupported, Overloaded, WouldDeadlock, of_a_signal
from modelguard.runtime.fork_hooks import Wakeup


class Timeout:
    """A bound on all the attempts of one caller together. It starts at once; None means no bound."""

    def __init__(self, timeout: _units.Duration | None) -> None:
        self._started = time.monotonic()
        self.seconds = None if timeout is None else _units.seconds(timeout, "timeout", zero=True)  # all of it

    def waited(self) -> float:
        return time.monotonic() - self._started

    def left(self) -> float | None:
        return None if self.seconds is None else max(0.0, self.seconds - self.waited())


#: Seconds between two looks of one who waits for what nobody tells.
PATIENCE = 0.5


def on_event_loop() -> bool:
    return asyncio._get_running_loop() is not None  # noqa: SLF001 - the public one raises where there is none


def raise_on_event_loop(name: str, action: str, instead: str) -> None:
    """Refuse to block a running event loop, which the awaited work may need.

    Args:
        name: The guard's or pool's name.
        action: What would block.
        instead: The expression to write in its place.

    Raises:
        WouldDeadlock: This thread runs an event loop.
    """
    if on_event_loop():
        raise WouldDeadlock(name, why=f"{action}() would block the running event loop", fix=f"Write: {instead}.")


# Blocking work for coroutines, in a thread of its own and in the caller's context.
#
# ``asyncio.to_thread`` shares its few threads with the whole application. When they all wait for a model, whatever
# would end their wait queues behind them.


T = TypeVar("T")

StartThread = Callable[[Callable[[], None], str], object]


def promise() -> Future[Any]:
    """Make a future that a waiter's cancellation cannot touch."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def start(work: Callable[[], T], name: str, start_thread: StartThread, future: Future[T] | None = None) -> Future[T]:
    """Begin ``work`` in a thread of that name; the future gets its result or error, or that the system gives none."""
    future = promise() if future is None else future
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(error)

    try:
        start_thread(run, name)
    except RuntimeError as error:  # the system gives none
        future.set_exception(Overloaded(f"cannot start a thread: {error}"))
    return future


def off_loop(work: Callable[[], T], name: str, start_thread: StartThread) -> T:
    """Do ``work`` in this thread; in another one if an event loop runs here, since a thread has one at most."""
    return start(work, name, start_thread).result() if on_event_loop() else work()


_INSTEAD = "Load the model before the loop starts (guard.load()), or use the plain function or method in a thread"


def require_loop(doing: str, instead: str = _INSTEAD) -> None:
    """Check that a coroutine that is about to wait runs on an event loop of asyncio or trio.

    Args:
        doing: What is not possible elsewhere.
        instead: What to write where neither runs.

    Raises:
        NotSupported: It does not.
    """
    if not on_any_loop():
        raise NotSupported(doing, reason=f"no asyncio event loop runs here, and none of trio. {instead}")


def on_any_loop() -> bool:
    """Whether this thread runs an event loop, of asyncio or trio, so that its tasks share it."""
    return on_event_loop() or _on_trio()


def _on_trio() -> bool:
    # Read once: another thread may be in the middle of the import.
    in_trio_task: Callable[[], bool] | None = getattr(
        getattr(sys.modules.get("trio"), "lowlevel", None), "in_trio_task", None
    )
    return in_trio_task is not None and in_trio_task()


async def run(work: Callable[[], T], name: str, start_thread: StartThread) -> T:
    """Await ``work``, which is done in a thread of that name. If its caller is cancelled, it goes on.

    Raises:
        NotSupported: The event loop is neither asyncio's nor trio's.
    """
    require_loop("waiting in a coroutine")
    return await result(start(work, name, start_thread))


async def result(future: Future[T]) -> T:
    """Await what a future gets. It is cancelled if its caller is, unless it cannot be: see :func:`promise`."""
    try:
        await Wait(future, Timeout(None)).suspend()
        return future.result()
    finally:
        future.cancel()  # which does nothing to one that is done
        del future  # it refers to the error, and that to this frame


def resolve(result: Any) -> Any:
    """The result itself; of a coroutine, what it returns when it is run to its end on an event loop of its own."""
    # Coroutines only: a model may have an __await__ of its own.
    return asyncio.run(result) if inspect.iscoroutine(result) else result


# One way to wait.


class Wait(NamedTuple):
    """One wait for a future; it ends early when the time is over."""

    #: What is waited for. Whoever is cancelled leaves it alone.
    future: Future[Any]
    limit: Timeout  # for how long
    #: Called every so often: what nobody tells, and time alone brings about. What it raises ends the wait.
    look: Callable[[], object] | None = None
    #: The same, in a thread only: the search for deadlocks, which reads the stacks of other threads.
    search: Callable[[], object] | None = None
    every: float = PATIENCE  # how often, in seconds

    def block(self) -> None:
        woken = Wakeup()
        self.future.add_done_callback(lambda _: woken.set())
        while (pause := self._pause()) != 0:
            if sys.is_finalizing():  # called by a finalizer, and the threads that would answer do not run any more
                raise RuntimeError("the interpreter is shutting down")
            if woken.wait(pause):
                return
            for look in (self.look, self.search):
                if look is not None:
                    look()

    async def suspend(self) -> None:
        asleep = sleeper()
        self.future.add_done_callback(asleep.wake)
        while (pause := self._pause()) != 0:
            await asleep.sleep(pause)
            if self.look is not None:
                self.look()

    def _pause(self) -> float | None:
        """How long to sleep until the next look; 0 for the end."""
        # Looked at after the callback was added: the collector may have answered in the middle of that.
        if self.future.done() or (left := self.limit.left()) == 0:
            return 0
        looks = self.look is not None or self.search is not None
        return left if not looks else self.every if left is None else min(left, self.every)


class Work(NamedTuple):
    """Work that blocks: done at once in a thread, and in a thread of its own for a coroutine."""

    work: Callable[[], Any]
    name: str
    start_thread: StartThread

    def block(self) -> Any:
        return self.work()

    async def suspend(self) -> Any:
        return await run(self.work, self.name, self.start_thread)


class Step(Protocol):
    """What one who waits has to do next."""

    def block(self) -> Any: ...

    async def suspend(self) -> Any: ...


Steps = Generator[Step, Any, T]


def block(steps: Steps[T]) -> T:
    """Go through the steps of who waits, in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                done = step.block()
            except BaseException as error:  # noqa: BLE001 - it is for the steps to handle
                step = steps.throw(error)
            else:
                step = steps.send(done)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except BaseException:  # of a signal handler: its traceback keeps them
        steps.close()
        raise


async def suspend(steps: Steps[T]) -> T:
    """:func:`block` without blocking the event loop."""
    require_loop("waiting in a coroutine")  # before anything begins
    try:
        step = next(steps)
        while True:
            try:
                done = await step.suspend()
            except BaseException as error:  # noqa: BLE001 - as above
                step = steps.throw(error)
            else:
                step = steps.send(done)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except BaseException:  # as above
        steps.close()
        raise


class OnAsyncio:
    """A coroutine that sleeps until it is woken, from any thread. ``wake`` does nothing once its loop has ended."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.woken: asyncio.Future[None] = self.loop.create_future()

    def wake(self, _future: object = None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.wake_here)

    def wake_here(self) -> None:
        if not self.woken.done():  # woken already, or cancelled
            self.woken.set_result(None)

    async def sleep(self, seconds: float | None = None) -> None:
        if seconds is None:
            await self.woken
        else:
            await asyncio.wait([self.woken], timeout=seconds)


class OnTrio:
    """The same on trio."""

    def __init__(self) -> None:
        self._trio = sys.modules["trio"]
        self._woken = self._trio.Event()
        self._token = self._trio.lowlevel.current_trio_token()

    def wake(self, _future: object = None) -> None:
        with suppress(self._trio.RunFinishedError):
            self._token.run_sync_soon(self._woken.set)

    async def sleep(self, seconds: float | None = None) -> None:
        with self._trio.move_on_after(float("inf") if seconds is None else seconds):
            await self._woken.wait()


def sleeper(doing: str = "waiting in a coroutine", instead: str = _INSTEAD) -> OnAsyncio | OnTrio:
    """Of the loop that runs here; :func:`require_loop` raises if there is none."""
    require_loop(doing, instead)
    return OnTrio() if _on_trio() else OnAsyncio()


@contextmanager
def turn(lock: Any) -> Iterator[bool]:
    """Whether this thread has ``lock`` in the block: nobody waits for it."""
    mine: list[bool] = []
    try:
        mine.extend(map(lock.acquire, (False,)))  # one step: no signal handler raises between the lock and its note
        yield mine[0]
    finally:
        if mine and mine[0]:  # no call here
            lock.release()


Q = TypeVar("Q")

_GONE: Any = object()


class TimeIsOver(Exception):
    """Nothing was given in time. No ``TimeoutError``, which a source may raise too."""


class Line(Generic[Q, T]):
    """Those who wait for what a source gives, oldest first.

    Nobody ever waits for the line itself: who finds it busy leaves a note, and whoever is busy with it looks again. So
    the garbage collector and signal handlers may give something back at any point. And what a handler raises loses
    nothing, since what is given returns by itself when nobody refers to it any more.

    Args:
        take: Gives what fits a request, or None: then its caller waits. What it raises is for that caller. It may be
            interrupted by itself, in the same thread.
        give_back: Takes back at once what was given to a caller that has gone meanwhile.
    """

    def __init__(self, take: Callable[[Q], T | None], give_back: Callable[[T], object]) -> None:
        self._take = take
        self._give_back = give_back
        self.renew()

    def renew(self) -> None:
        """Forget all who wait: in a forked child they are the parent's."""
        # Who takes a future out of this answers it. Changed in single steps, so it needs no lock.
        self._waiting: dict[Future[T], Q] = {}
        self._turn = threading.RLock()
        self._again = False

    def __len__(self) -> int:
        return len(self._waiting)

    def serve(self) -> None:
        """Give those who wait what there is."""
        try:
            self._serve()
        except BaseException:  # of a signal handler
            self._serve()
            raise

    def _serve(self) -> None:
        self._again, mine = True, True
        while self._again and self._waiting and mine:
            with turn(self._turn) as mine:
                if mine:
                    self._again = False
                    for future, request in self._waiting.copy().items():
                        self._offer(future, request)

    def _offer(self, future: Future[T], request: Q) -> None:
        if future not in self._waiting:
            return
        try:
            given = self._take(request)
        except Exception as error:
            if of_a_signal(error):
                raise
            if self._claim(future):
                future.set_exception(error)
            return
        if given is None:
            return
        try:
            if self._claim(future):
                future.set_result(given)
            else:
                self._give_back(given)
        except BaseException:  # of a signal handler: whoever waits is told yet, or waits on
            if future.done():
                future._invoke_callbacks()  # type: ignore[attr-defined]  # noqa: SLF001 - they tell only once
            else:
                self._waiting[future] = request
            raise

    def wait(
        self,
        request: Q,
        limit: Timeout,
        *,
        look: Callable[[], object] | None = None,
        search: Callable[[], object] | None = None,
        every: float = PATIENCE,
    ) -> Steps[T]:
        """Wait for what fits ``request``.

        Raises:
            TimeIsOver: It is.
            Exception: What the source raised.
        """
        future: Future[T] = promise()
        self._waiting[future] = request
        try:
            self.serve()
            if not future.done():
                yield Wait(future, limit, look, search, every)
            if self._claim(future):
                raise TimeIsOver  # noqa: TRY301 - what a signal handler raises here is handled as well
            return future.result()  # of an instant ago, or of this very moment
        except BaseException:
            if not self._claim(future):
                future.add_done_callback(self._return_unwanted)
            raise

    def _claim(self, future: Future[T]) -> bool:
        """Take it out of the line, in one step; false if somebody else has, who answers it."""
        return self._waiting.pop(future, _GONE) is not _GONE

    def _return_unwanted(self, future: Future[T]) -> None:
        if future.exception() is None:
            self._give_back(future.result())
