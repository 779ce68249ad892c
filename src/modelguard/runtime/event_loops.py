"""Event loops for functions: in a thread of its own, that of a caller, or one for a call that stays in its thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeAlias

from modelguard.runtime import fork_hooks, waiting
from modelguard.runtime.background import start_thread
from modelguard.runtime.fork_hooks import Wakeup

Loop: TypeAlias = asyncio.AbstractEventLoop
#: Awaits what a function gives, on an event loop, and returns its result to this thread.
RunOnLoop: TypeAlias = Callable[[Callable[[], Awaitable[Any]]], Any]

#: Seconds after which a thread that waits for an event loop looks whether that still runs.
_LOOK = 1.0
#: So many looks in a row have to find that it does not: a loop may stop for a moment and go on.
_LOOKS = 2


class AllLeft(Exception):
    """Nobody waits for it any more, so it was stopped."""


class LoopEnded(RuntimeError):
    """The event loop on which it runs does not run any more."""

    def __init__(self) -> None:
        super().__init__("the event loop on which it runs has ended")


class Waiting(Protocol):
    """Those who wait for what runs on a loop."""

    wakeup: Wakeup  # set when one of them leaves, and when it has ended

    @property
    def all_left(self) -> bool: ...


class OwnLoop(fork_hooks.Forkable):
    """An event loop in a thread of its own. The thread starts with the first use, and ends when the object is dropped.

    It stays while nothing runs on it: what a function keeps between its calls, such as a client with open connections,
    belongs to one event loop.

    Args:
        name: Of the batched function.
    """

    fork_rank = fork_hooks.Rank.LOCKS

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: Loop | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        fork_hooks.register(self)

    def get(self) -> Loop:
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

    def _start(self) -> Loop:
        loop = asyncio.new_event_loop()
        try:
            start_thread(partial(_run, loop), f"modelguard-loop-{self._name}")
        except BaseException:
            loop.close()
            raise
        return loop

    def after_fork_in_child(self) -> None:
        """The loop's thread is the parent's."""
        self._lock = threading.Lock()
        if self._loop is not None:
            _of_parents.append(self._loop)
            self._loop = None
        if self._finalizer is not None:
            self._finalizer.detach()


#: Kept, because a loop that is dropped without being closed warns, and one that seems to run cannot be closed.
_of_parents: list[Loop] = []


def _run(loop: Loop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # at its end, it cancels what a function has left there
        while True:
            try:
                runner.get_loop().run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of a task or callback; other batches run here too
                logger = logging.getLogger("modelguard")
                logger.warning("modelguard: %s in a task of a batch ends only that task", type(error).__name__)
            else:
                return


def run_on(
    get_loop: Callable[[], Loop],
    start: Callable[[], Awaitable[Any]],
    *,
    callers: Waiting,
    others_wait: Callable[[], bool],
    context: contextvars.Context | None = None,
    cancel: bool = True,
) -> Any:
    """Run something on an event loop, from another thread, and wait for its end.

    A loop that has stopped may go on later. It is waited for unless that keeps others waiting.

    Args:
        get_loop: Gives the loop, which another thread runs.
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
    if cancel and callers.all_left:
        raise AllLeft
    job = _Job(start, callers)
    try:
        loop = get_loop()
        _call_on(loop, job.begin, loop, context or contextvars.copy_context())
        cancelled, stopped = False, 0
        while not job.ended:
            if cancel and callers.all_left and not cancelled:
                cancelled = True
                _call_on(loop, job.cancel)
            if callers.wakeup.wait(_LOOK) or job.ended:
                continue
            stopped = 0 if loop.is_running() else stopped + 1
            if loop.is_closed() or (stopped >= _LOOKS and (callers.all_left or others_wait())):
                _call_on(loop, job.cancel)  # for when it goes on
                raise LoopEnded  # noqa: TRY301
        if job.error is None:
            return job.result
        raise AllLeft() if cancelled else job.error  # whatever it makes of being cancelled says nothing
    except LoopEnded:
        if callers.all_left:
            raise AllLeft from None
        raise
    finally:
        del job  # the error's traceback refers to this frame


def _call_on(loop: Loop, callback: Callable[..., object], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        raise LoopEnded from None


class _Job:
    """Something that runs on an event loop. It never fails there: not even sys.exit() in a model may end the loop."""

    def __init__(self, start: Callable[[], Awaitable[Any]], callers: Waiting) -> None:
        self._start = start
        self._callers = callers
        self._task: asyncio.Task[None] | None = None
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None

    # On the loop

    def begin(self, loop: Loop, context: contextvars.Context) -> None:
        self._task = loop.create_task(self._run(), context=context)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            self.result = await self._start()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            # Asked only now: a task that its closed loop never ran again is dropped outside of any loop.
            task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
            self.error = LoopEnded() if task is not None and task.cancelling() else error
            del self, task  # the error's traceback refers to this frame

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before its first step
            self.error = LoopEnded()
        self._task = None
        self.ended = True
        self._callers.wakeup.set()


class PrivateLoop:
    """An event loop that runs only while somebody waits for it, in that thread if it may: for calls without a batch."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    def run(self, start: Callable[[], Awaitable[Any]]) -> Any:
        """Run something, and wait for its end.

        Raises:
            BaseException: What it raised.
        """

        async def awaited() -> Any:
            return await start()

        run = partial(self._runner.run, context=contextvars.copy_context())
        return waiting.off_loop(lambda: run(awaited()), "modelguard-loop", start_thread)

    def end(self, start: Callable[[], Awaitable[Any]]) -> None:
        """:meth:`run` for the last time."""
        with contextlib.closing(self):
            self.run(start)

    def close(self) -> None:
        """End it. Asynchronous generators that are still open on it are closed."""
        waiting.off_loop(self._runner.close, "modelguard-loop", start_thread)
