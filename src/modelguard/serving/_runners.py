"""How a batch is computed, by the kind of its function: called, awaited on an event loop, or stepped through."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from modelguard._function_kinds import FunctionKind
from modelguard.errors import ConsumerTooSlow, WrongResults
from modelguard.runtime import fork, waiting
from modelguard.runtime.background import start_thread
from modelguard.runtime.fork import WeakRegistry
from modelguard.serving._execution import (
    Answer,
    BatchFunction,
    Computed,
    Part,
    batch_failed,
    check_results,
    compute,
    compute_one,
    count_failures,
    error_for_caller,
    joined,
    verdict_of,
    wrap_errors,
)
from modelguard.serving._requests import (
    AllLeft,
    Batch,
    Callers,
    Failure,
    LoopEnded,
    Request,
    StreamRequest,
    Waiter,
    wake,
)
from modelguard.serving.status import Verdict
from modelguard.telemetry import logger

_Loop: TypeAlias = asyncio.AbstractEventLoop
_OthersWait: TypeAlias = Callable[[], bool]
#: Awaits what a function gives, on an event loop, and returns its result to this thread.
_RunOnLoop: TypeAlias = Callable[[Callable[[], Awaitable[Any]]], Any]


class Runner:
    """Computes batches of one function.

    Args:
        function: The function.
        others_wait: Whether items wait in the queue.
        kind: What a call of it gives.
        own_loop: The event loop on which it runs; None for those of its callers, if it needs one.
        slow_after: Seconds that a consumer of its parts may keep others waiting.
    """

    def __init__(
        self,
        function: BatchFunction,
        others_wait: _OthersWait,
        *,
        kind: FunctionKind,
        own_loop: OwnLoop | None,
        slow_after: float,
    ) -> None:
        self._function = function
        self._others_wait = others_wait
        self._is_async = kind in ("coroutine", "async generator")
        self._streams = kind in ("generator", "async generator")
        self._own_loop = own_loop
        self._slow_after = slow_after

    def batch(self, batch: Batch, answer: Answer) -> Computed:
        """Compute a batch. Never raises.

        Args:
            batch: Its items and the keyword arguments that they share.
            answer: Called with what has its outcome already while the batch goes on.
        """
        if not self._is_async:
            return self._on(None, batch, answer, self._others_wait)
        if self._own_loop is None:
            return self._by_loop(batch, answer)
        return self._on(self._own_loop.get, batch, answer, self._others_wait)

    def _by_loop(self, batch: Batch, answer: Answer) -> Computed:
        """On the event loops of the callers: what a batch has of each loop is computed there."""
        by_loop: dict[_Loop, list[Request]] = {}
        for request in batch.requests:
            loop = request.loop or request.home
            assert loop is not None  # noqa: S101 - others are refused when they are queued
            by_loop.setdefault(loop, []).append(request)
        parts: list[Part] = []
        while by_loop:
            loop = next(iter(by_loop))
            part, started = by_loop.pop(loop), time.monotonic()
            others_wait = lambda: bool(by_loop) or self._others_wait()  # noqa: E731
            computed = self._on(partial(_same, loop), Batch(part, 0.0, batch.started), answer, others_wait)
            parts.append(Part(part, computed, time.monotonic() - started))
            if by_loop:
                answer(part, computed.outcomes)
        return joined(batch.requests, parts)

    def _on(
        self, get_loop: Callable[[], _Loop] | None, batch: Batch, answer: Answer, others_wait: _OthersWait
    ) -> Computed:
        """On that event loop, or on none."""
        run = self._function.run
        if self._streams:

            def start(items: list[Any], extras: dict[str, Any], callers: Callers) -> Steps:
                steps = run(items, **extras)
                if get_loop is None:
                    return steps  # type: ignore[no-any-return]
                context = contextvars.copy_context()
                on_loop = partial(run_on, get_loop(), callers=callers, others_wait=others_wait, context=context)
                return _AsyncSteps(steps, on_loop, partial(on_loop, cancel=False))

            requests, stalls = cast("list[StreamRequest]", batch.requests), Stalls(self._slow_after)
            stream = StreamRun(self._function, requests, answer, stalls=stalls, others_wait=others_wait)
            return stream.compute(start, batch.extras)
        if get_loop is None:
            return compute(self._function, batch, answer)
        callers = Callers(batch.requests)

        def wait_for(items: list[Any], /, **extras: Any) -> Any:
            if callers.all_left:
                raise AllLeft
            return run_on(get_loop(), lambda: run(items, **extras), callers, others_wait)

        return compute(replace(self._function, run=wait_for), batch, answer)

    def inline(self, request: Request) -> None:
        """Compute one request without a batch, in this thread if it may."""
        run = self._function.run
        if isinstance(request, StreamRequest):
            request.source = InlineParts(self._function, request, self._start_inline, contextvars.copy_context().run)
            return
        if not self._is_async:
            request.deliver(compute_one(self._function, request))
            return
        loop = PrivateLoop()
        try:
            function = replace(self._function, run=lambda items, /, **extras: loop.run(lambda: run(items, **extras)))
            outcome = compute_one(function, request)
        finally:
            loop.close()
        request.deliver(outcome)

    def _start_inline(self, items: list[Any], extras: dict[str, Any], _callers: Callers) -> Steps:
        steps = self._function.run(items, **extras)
        if not self._is_async:
            return steps  # type: ignore[no-any-return]
        loop = PrivateLoop()

        def end(start: Callable[[], Awaitable[Any]]) -> None:
            try:
                loop.run(start)
            finally:
                loop.close()

        return _AsyncSteps(steps, loop.run, end)


def _same(loop: _Loop) -> _Loop:
    return loop


# Run one batch of streams: take step after step from the generator, and hand each item's part to its consumer.


#: What :func:`_outcome_of` returns for a part after which others follow.
_NO_OUTCOME: Any = object()
#: Each part gives a consumer so much of ``slow_after`` back: who is a little slower than others may go on.
_CREDIT = 0.01


class Steps(Protocol):
    """A batch function that yields: a generator, or what looks like one."""

    def send(self, waiting: list[bool] | None, /) -> Any:
        """Run it to its next ``yield``, with what that returns in it. Returns what it yielded."""

    def close(self) -> object: ...


#: Begins to compute a batch of items, with their keyword arguments, for these callers.
StartSteps = Callable[[list[Any], dict[str, Any], Callers], Steps]


class _AsyncSteps:
    """An asynchronous generator, as one that a thread can step through.

    Args:
        generator: The generator.
        run: Awaits something on an event loop, from this thread.
        end: The same, for the last time.
    """

    def __init__(self, generator: AsyncGenerator[Any, Any], run: _RunOnLoop, end: _RunOnLoop) -> None:
        self._generator = generator
        self._run = run
        self._end = end

    def send(self, waiting: list[bool] | None) -> Any:
        try:
            return self._run(lambda: self._generator.asend(waiting))
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        self._end(self._generator.aclose)


class Stalls:
    """How long each consumer of a batch has kept others waiting, because its buffer was full.

    Args:
        most: Seconds that each may, beside its credit for the parts that it took.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._seconds: dict[Request, float] = {}

    def left(self, full: Sequence[Request]) -> float:
        """Seconds until the first of these has none left."""
        return max(self._most - max(self._seconds.get(request, 0.0) for request in full), 0.0)

    def add(self, full: Sequence[Request], seconds: float) -> None:
        for request in full:
            self._seconds[request] = self._seconds.get(request, 0.0) + seconds

    def credit(self, request: Request) -> None:
        """It gets another part."""
        if (seconds := self._seconds.get(request)) is not None:
            self._seconds[request] = max(seconds - _CREDIT * self._most, 0.0)

    def exceeded(self, full: Sequence[Request]) -> list[Request]:
        """Those of them that have none left."""
        return [request for request in full if self._seconds.get(request, 0.0) >= self._most]


class StreamRun:
    """One batch of streams, from its first step to its end.

    Args:
        function: What computes it.
        requests: Whose items to compute.
        answer: Called with requests that end while others go on, and their outcomes.
        stalls: How long a consumer with a full buffer may keep others waiting.
        others_wait: Whether items wait in the queue.
        wait: Waits for something to change, at most so many seconds.
    """

    def __init__(
        self,
        function: BatchFunction,
        requests: list[StreamRequest],
        answer: Answer,
        *,
        stalls: Stalls,
        others_wait: _OthersWait,
        wait: Callable[[Callers, float], object] = lambda callers, seconds: callers.wakeup.wait(seconds),
    ) -> None:
        self._function = function
        self._requests = requests
        self._items = [request.item for request in requests]
        self._answer = answer
        self._stalls = stalls
        self._others_wait = others_wait
        self._wait = wait
        self._callers = Callers(requests)
        self._failed = self._succeeded = 0
        self._stalled = 0.0

    def compute(self, start: StartSteps, extras: dict[str, Any]) -> Computed:
        """Run it to its end. Never raises: whatever the function does becomes outcomes.

        Args:
            start: Begins the computation.
            extras: Keyword arguments that all requests share.
        """
        try:
            return self.computed(self._to_end(start, extras))
        except BaseException as error:  # noqa: BLE001 - an error that cannot be copied or printed
            failures = [Failure(batch_failed(error, self._function.name, len(self._items))) for _ in self._items]
            return Computed(failures, len(failures), "failed", error)

    def _to_end(self, start: StartSteps, extras: dict[str, Any]) -> BaseException | None:
        steps: Steps | None = None
        error: BaseException | None = None
        try:
            steps = start(list(self._items), extras, self._callers)
            self._take_steps(steps)
        except AllLeft:
            pass
        except BaseException as raised:  # noqa: BLE001 - not even sys.exit() in a model may end the thread
            error = raised
        try:
            if steps is not None:
                steps.close()
        except AllLeft:
            pass
        except BaseException as raised:  # noqa: BLE001 - as above
            error = error or raised
        return error

    def _take_steps(self, steps: Steps) -> None:
        waiting: list[bool] | None = None
        while not self._callers.all_left:
            parts = _step(steps, waiting, self._function.name, len(self._items))
            if parts is None:
                return
            self.hand_out(parts)
            del parts
            self.wait_for_consumers()
            waiting = self._callers.waiting()

    def hand_out(self, parts: list[Any]) -> None:
        """Hand each consumer that is left its part, or its end."""
        waiters: list[Waiter] = []
        ended: list[Request] = []
        outcomes: list[Any] = []
        for request, item, part in zip(self._requests, self._items, parts, strict=True):
            if request.state == "done":
                continue
            outcome = _outcome_of(part, self._function.name, item)
            if outcome is not _NO_OUTCOME:
                ended.append(request)
                outcomes.append(outcome)
            elif (waiter := request.push(part)) is not None:
                waiters.append(waiter)
        if waiters:
            wake(waiters)
        if ended:
            failed = count_failures(outcomes)
            self._failed += failed
            self._succeeded += len(outcomes) - failed
            self._answer(ended, outcomes)

    def wait_for_consumers(self) -> None:
        """Wait until every buffer has room. Who keeps others waiting for too long has to go."""
        clock = self._function.clock
        while full := [one for one in self._requests if one.full and one.state != "done"]:
            if slow := self._stalls.exceeded(full):
                self._answer(slow, [Failure(ConsumerTooSlow(self._function.name)) for _ in slow])
                continue
            began = clock()
            self._wait(self._callers, self._stalls.left(full))
            seconds = clock() - began
            self._stalled += seconds
            if self._others_wait() or len(full) < sum(self._callers.waiting()):
                self._stalls.add(full, seconds)
                for request in full:
                    if not request.full:
                        self._stalls.credit(request)

    def computed(self, error: BaseException | None) -> Computed:
        live = self._callers.waiting()
        if error is None:
            self._succeeded += sum(live)
            verdict: Verdict = "succeeded" if self._succeeded else "inconclusive"
            whole = bool(self._succeeded or self._failed)  # else it was cut short, and its time says nothing
            return Computed([None] * len(live), self._failed, verdict, whole=whole, stalled=self._stalled)
        left = [item for item, waits in zip(self._items, live, strict=True) if waits]
        outcomes = [Failure(error_for_caller(error, self._function.name, left)) if waits else None for waits in live]
        failed, verdict = self._failed + len(left), verdict_of([error], self._function.ignore)
        return Computed(outcomes, failed, verdict, error, stalled=self._stalled)


class InlineParts:
    """The parts of one item that has no batch: each is made when its consumer asks for it, in that thread.

    Args:
        function: What computes them.
        request: Gets the parts and the end.
        start: Begins the computation, of that item alone.
        run: Runs a step in the context of the call.
    """

    def __init__(
        self, function: BatchFunction, request: StreamRequest, start: StartSteps, run: Callable[..., Any]
    ) -> None:
        self._function = function
        self._request = request
        self._run = run
        self._waiting: list[bool] | None = None
        self._steps: Steps = run(start, [request.item], request.extras, Callers([]))

    def advance(self) -> None:
        function, request = self._function, self._request
        part: Any = StopIteration
        try:
            parts = self._run(_step, self._steps, self._waiting, function.name, 1)
            if parts is not None:
                (part,) = parts
            outcome = _outcome_of(part, function.name, request.item)
        except Exception as error:  # noqa: BLE001 - the consumer raises it
            outcome = Failure(error_for_caller(error, function.name, [request.item]))
        self._waiting = [True]
        if outcome is _NO_OUTCOME:
            request.push(part)
            return
        request.deliver(outcome)
        self.close()

    def close(self) -> None:
        self._request.source = None
        self._run(self._steps.close)


def _step(steps: Steps, waiting: list[bool] | None, name: str, count: int) -> list[Any] | None:
    """Run one step. Returns a part for each item; None at the end.

    Raises:
        WrongResults: It yielded something else, or nothing at all.
        BaseException: Whatever the function raises.
    """
    try:
        parts = steps.send(waiting)
    except StopIteration:
        if waiting is not None:
            return None
        why = "it ended before it had yielded anything; for an item without parts, yield StopIteration"
        raise WrongResults(name, why, size=count) from None
    return check_results(parts, name, count, how="yielded")


def _outcome_of(part: Any, name: str, item: Any) -> Any:
    """How a part ends its item: with None or a failure; ``_NO_OUTCOME`` if the item goes on."""
    if part is StopIteration or part is StopAsyncIteration or isinstance(part, StopIteration | StopAsyncIteration):
        return None
    return wrap_errors([part], name, [item])[0] if isinstance(part, BaseException) else _NO_OUTCOME


# Event loops: one of the function's own, that of a caller, and one for calls without a batch.


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
        self._loop: _Loop | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        _own_loops.add(self)

    def get(self) -> _Loop:
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

    def _start(self) -> _Loop:
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
_of_parents: list[_Loop] = []


def _renew_all() -> None:
    for loop in tuple(_own_loops):
        loop.renew_in_child()


fork.at_fork(fork.Rank.LOCKS, in_child=_renew_all)


def _run(loop: _Loop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # at its end, it cancels what a function has left there
        while not _runs_to_its_end(runner.get_loop()):
            pass


def _runs_to_its_end(loop: _Loop) -> bool:
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt) as error:  # of a task or callback; other batches run here too
        logger.warning("modelguard: %s in a task of a batch ends only that task", type(error).__name__)
        return False
    return True


def run_on(
    loop: _Loop,
    start: Callable[[], Awaitable[Any]],
    callers: Callers,
    others_wait: _OthersWait,
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
        raise job.error
    except LoopEnded:
        if callers.all_left:
            raise AllLeft from None
        raise
    finally:
        del job  # the error's traceback refers to this frame


def _call_on(loop: _Loop, callback: Callable[..., object], *args: Any) -> None:
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

    # On the loop

    def begin(self, loop: _Loop, context: contextvars.Context) -> None:
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
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    def run(self, start: Callable[[], Awaitable[Any]]) -> Any:
        """Run something, and wait for its end.

        Raises:
            BaseException: What it raised.
        """

        async def awaited() -> Any:
            return await start()

        return self._here(lambda: self._runner.run(awaited(), context=contextvars.copy_context()))

    def close(self) -> None:
        """End it. Asynchronous generators that are still open on it are closed."""
        self._here(self._runner.close)

    def _here(self, work: Callable[[], Any]) -> Any:
        """Do it in this thread, unless an event loop runs here already: a thread has one at most."""
        if not waiting.on_event_loop():
            return work()
        return waiting.start(work, "modelguard-loop", start_thread).result()
