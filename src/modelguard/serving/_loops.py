"""Where batch functions that are ``async`` run: on an event loop of their own, or on that of their callers."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from modelguard.errors import NotSupported
from modelguard.runtime import fork
from modelguard.runtime.background import start_thread
from modelguard.runtime.fork import WeakRegistry
from modelguard.serving._requests import AllLeft, Callers, Failure, LoopEnded, Request
from modelguard.telemetry import logger

#: Seconds after which a thread that waits for an event loop looks whether that still runs.
_LOOK = 1.0
#: So many looks in a row have to find that it does not: a loop may stop for a moment and go on.
_LOOKS = 2


class OwnLoop:
    """An event loop in a thread of its own. The thread starts with the first use, and ends when the object is dropped.

    It stays while nothing runs on it: what a function keeps between its calls, such as a client with open connections,
    belongs to one event loop.

    Args:
        name: Of the batched function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        _own_loops.add(self)

    def get(self) -> asyncio.AbstractEventLoop:
        """The running event loop.

        Raises:
            RuntimeError: No thread can be started.
        """
        with self._lock:
            if self._loop is None:
                # In no context: a loop keeps the one in which it was made, and with it whose batch that was.
                loop = self._loop = contextvars.Context().run(self._start)
                self._finalizer = weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
                self._finalizer.atexit = False  # batches that run at the end of the interpreter need it
            return self._loop

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        try:
            start_thread(partial(_run, loop), f"modelguard-loop-{self._name}")
        except BaseException:
            loop.close()
            raise
        return loop

    def renew_in_child(self) -> None:
        """In a forked child: the loop's thread is the parent's."""
        self._lock = threading.Lock()
        if self._loop is not None:
            _of_parents.append(self._loop)
            self._loop = None
        if self._finalizer is not None:
            self._finalizer.detach()


_own_loops: WeakRegistry[OwnLoop] = WeakRegistry()
#: Kept, because a loop that is dropped without being closed warns, and one that seems to run cannot be closed.
_of_parents: list[asyncio.AbstractEventLoop] = []


def _renew_all() -> None:
    for loop in tuple(_own_loops):
        loop.renew_in_child()


fork.at_fork(fork.Rank.LOCKS, in_child=_renew_all)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        while not _runs_to_its_end(loop):
            pass
    finally:
        loop.run_until_complete(_end_tasks(asyncio.all_tasks(loop)))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _runs_to_its_end(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt) as error:  # of a task or callback; other batches run here too
        logger.warning("modelguard: %s in a task of a batch ends only that task", type(error).__name__)
        return False
    return True


async def _end_tasks(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel what a function has left behind on its loop."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run_on(
    loop: asyncio.AbstractEventLoop,
    start: Callable[[], Awaitable[Any]],
    callers: Callers,
    others_wait: Callable[[], bool],
    context: contextvars.Context | None = None,
    *,
    cancel: bool = True,
) -> Any:
    """Run something on an event loop, from another thread, and wait for its end.

    A loop that has stopped may go on later. It is waited for unless that keeps others waiting.

    Args:
        loop: The loop, which another thread runs.
        start: Makes what is awaited; called on the loop.
        callers: Those who wait for it.
        others_wait: Whether others wait for its end.
        context: To run it in. Default: a copy of this thread's.
        cancel: Whether it is cancelled when all of them have left.

    Raises:
        AllLeft: It was cancelled, or the loop has ended and nobody waits.
        LoopEnded: The loop was closed, cancelled its tasks as it ended, or has stopped while others wait.
        BaseException: What it raised.
    """
    job = _Job(start, callers)
    try:
        _wait_for(job, loop, callers, others_wait, context or contextvars.copy_context(), cancel=cancel)
        return job.outcome()
    except LoopEnded:
        if callers.all_left:
            raise AllLeft from None
        raise
    finally:
        del job  # the error's traceback refers to this frame


def _wait_for(
    job: _Job,
    loop: asyncio.AbstractEventLoop,
    callers: Callers,
    others_wait: Callable[[], bool],
    context: contextvars.Context,
    *,
    cancel: bool,
) -> None:
    _call_on(loop, job.begin, loop, context)
    cancelled = False
    stopped = 0
    while not job.ended:
        if cancel and callers.all_left and not cancelled:
            cancelled = True
            _call_on(loop, job.cancel)
        if callers.wakeup.wait(_LOOK) or job.ended:
            continue
        stopped = 0 if loop.is_running() else stopped + 1
        if loop.is_closed() or (stopped >= _LOOKS and (callers.all_left or others_wait())):
            _call_on(loop, job.cancel)  # for when it goes on
            raise LoopEnded


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        raise LoopEnded from None


class _Job:
    """Something that runs on an event loop. It never fails there: not even sys.exit() in a model may end the loop."""

    def __init__(self, start: Callable[[], Awaitable[Any]], callers: Callers) -> None:
        self._start = start
        self._callers = callers
        self._task: asyncio.Task[None] | None = None
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None

    def outcome(self) -> Any:
        """Its result, once it has ended.

        Raises:
            BaseException: What it raised.
        """
        if self.error is None:
            return self.result
        try:
            raise self.error
        finally:
            del self  # the error's traceback refers to this frame

    # On the loop

    def begin(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        self._task = loop.create_task(self._run(), context=context)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            self.result = await self._start()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            task = asyncio.current_task()
            stopped = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
            self.error = LoopEnded() if stopped else error

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before its first step
            self.error = LoopEnded()
        self._task = None
        self.ended = True
        self._callers.wakeup.set()


class PrivateLoop:
    """An event loop that runs only while somebody waits for it, in that thread if it may: for calls without a batch."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, start: Callable[[], Awaitable[Any]]) -> Any:
        """Run something, and wait for its end.

        Raises:
            BaseException: What it raised.
        """

        async def outcome() -> tuple[Any, BaseException | None]:
            try:
                return await start(), None
            except BaseException as error:  # noqa: BLE001 - raised below
                return None, error

        result, error = self._run(outcome)
        if error is not None:
            raise error
        return result

    def _run(self, outcome: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        if asyncio._get_running_loop() is None:  # noqa: SLF001 - the public one raises where there is none
            return self._loop.run_until_complete(outcome())  # type: ignore[no-any-return]
        found: list[tuple[Any, BaseException | None]] = []
        context = contextvars.copy_context()  # a thread has one running loop at most

        def work() -> None:
            found.append(context.run(lambda: self._loop.run_until_complete(outcome())))

        start_thread(work, "modelguard-loop").join()
        return found[0]

    def close(self) -> None:
        """End it. Asynchronous generators that are still open on it are closed."""
        if not self._loop.is_closed():
            self.run(self._loop.shutdown_asyncgens)
            self._loop.close()


# Callers on Trio instead of asyncio, as under Hypercorn's Trio workers. Trio is never imported here.


class TrioRequest(Request):
    """A request whose caller is a coroutine on Trio.

    Raises:
        NotSupported: No event loop runs, or it is neither asyncio's nor Trio's.
    """

    _outcome: Any

    def __init__(self, item: Any) -> None:
        trio = _running_trio()
        self.item = item
        self._token = trio.lowlevel.current_trio_token()
        self._run_finished: type[Exception] = trio.RunFinishedError
        self._delivered = trio.Event()

    def deliver(self, outcome: Any) -> None:
        self._outcome = outcome
        try:
            self._token.run_sync_soon(self._delivered.set)
        except self._run_finished:
            return  # nobody waits there any more

    async def wait(self) -> Any:
        """Wait until the outcome is there.

        Raises:
            BaseException: What the item failed with.
        """
        await self._delivered.wait()
        outcome = self._outcome
        if type(outcome) is Failure:
            try:
                raise outcome.error
            finally:
                del self, outcome  # the error's traceback refers to this frame
        return outcome


class TrioWaiter:
    """A coroutine on Trio that waits for a part of a stream.

    Raises:
        NotSupported: No event loop runs, or it is neither asyncio's nor Trio's.
    """

    def __init__(self) -> None:
        trio = _running_trio("async for part in f.stream(item)", "Iterate in a thread, without async")
        self._token = trio.lowlevel.current_trio_token()
        self._run_finished: type[Exception] = trio.RunFinishedError
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the coroutine, from any thread."""
        with contextlib.suppress(self._run_finished):
            self._token.run_sync_soon(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()


async def call(request: TrioRequest, put: Callable[[Request], object], cancel: Callable[[Request], object]) -> Any:
    """Queue a request and await its outcome; nothing of it is left in the queue if that is interrupted."""
    put(request)
    try:
        return await request.wait()
    except BaseException:  # Trio's cancellation is one
        cancel(request)  # nothing if this is the answer
        raise
    finally:
        del request  # the error's traceback refers to this frame


async def run_in_thread(function: Callable[[], Any]) -> None:
    await _running_trio().to_thread.run_sync(function)


def _running_trio(call: str = "await f.aio(item)", instead: str = "Call the function without .aio, in a thread") -> Any:
    trio: Any = sys.modules.get("trio")
    try:
        trio.lowlevel.current_trio_token()
    except (AttributeError, RuntimeError):
        raise NotSupported(call, reason=f"neither asyncio nor Trio runs here. {instead}") from None
    return trio
