"""How a batch is computed, by the kind of its function: called, awaited, or stepped through."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from modelguard import _units
from modelguard.errors import ConsumerTooSlow, WrongResults
from modelguard.serving._batch_options import BatchOptions, Buffer
from modelguard.serving._execution import (
    Answer,
    BatchFunction,
    Computed,
    Part,
    batch_failed,
    check_results,
    compute,
    compute_one,
    error_for_caller,
    joined,
    verdict_of,
    wrap_errors,
)
from modelguard.serving._loops import PrivateLoop, run_on
from modelguard.serving._requests import AllLeft, Callers, Failure, Request, StreamRequest, Waiter, wake
from modelguard.serving.status import Batch, Verdict

# Run one batch of streams: take step after step from the generator, and hand each item's part to its consumer.


#: What :func:`_outcome_of` returns for a part after which others follow.
_NO_OUTCOME: Any = object()


class Steps(Protocol):
    """A batch function that yields: a generator, or what looks like one."""

    def send(self, waiting: list[bool] | None, /) -> Any:
        """Run it to its next ``yield``, with what that returns in it. Returns what it yielded."""

    def close(self) -> object: ...


#: Begins to compute a batch of items, with their keyword arguments, for these callers.
StartSteps = Callable[[list[Any], dict[str, Any], Callers], Steps]


class Stalls:
    """How long each consumer of a batch has kept others waiting, because its buffer was full.

    Args:
        most: Seconds that each may in all.
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

    def exceeded(self, full: Sequence[Request]) -> list[Request]:
        """Those of them that have none left."""
        return [request for request in full if self._seconds.get(request, 0.0) >= self._most]


def compute_stream(
    function: BatchFunction,
    start: StartSteps,
    requests: list[StreamRequest],
    extras: dict[str, Any],
    answer: Answer,
    *,
    slow_after: float,
    others_wait: Callable[[], bool],
    wait: Callable[[Callers, float], object] = lambda callers, seconds: callers.wakeup.wait(seconds),
) -> Computed:
    """Run a batch whose function yields. Never raises: whatever the function does becomes outcomes.

    Args:
        function: What computes it.
        start: Begins the computation.
        requests: Whose items to compute.
        extras: Keyword arguments that all requests share.
        answer: Called with requests that end while others go on, and their outcomes.
        slow_after: Seconds that a consumer with a full buffer may keep others waiting in all.
        others_wait: Whether items wait in the queue.
        wait: Waits for something to change, at most so many seconds.
    """
    run = StreamRun(function, requests, answer, stalls=Stalls(slow_after), others_wait=others_wait, wait=wait)
    try:
        error = run.to_end(start, extras)
        return run.computed(error)
    except BaseException as error:  # noqa: BLE001 - an error that cannot be copied or printed
        failures = [Failure(batch_failed(error, function.name, len(requests))) for _ in requests]
        return Computed(failures, len(requests), "failed", error)


class StreamRun:
    """One batch of streams, from its first step to its end; see :func:`compute_stream`."""

    def __init__(
        self,
        function: BatchFunction,
        requests: list[StreamRequest],
        answer: Answer,
        *,
        stalls: Stalls,
        others_wait: Callable[[], bool],
        wait: Callable[[Callers, float], object],
    ) -> None:
        self._function = function
        self._requests = requests
        self._items = [request.item for request in requests]
        self._answer = answer
        self._stalls = stalls
        self._others_wait = others_wait
        self._wait = wait
        self._callers = Callers([*requests])
        self._failed = self._succeeded = 0
        self._stalled = 0.0

    def to_end(self, start: StartSteps, extras: dict[str, Any]) -> BaseException | None:
        steps: Steps | None = None
        error: BaseException | None = None
        try:
            steps = start(list(self._items), extras, self._callers)
            self._take_steps(steps)
        except AllLeft:
            pass
        except BaseException as raised:  # noqa: BLE001 - not even sys.exit() in a model may end the thread
            error = raised
        if steps is not None:
            try:
                steps.close()
            except AllLeft:
                pass
            except BaseException as raised:  # noqa: BLE001 - as above
                error = raised if error is None else error
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
            self._end(ended, outcomes)

    def _end(self, requests: list[Request], outcomes: list[Any]) -> None:
        failed = sum(type(outcome) is Failure for outcome in outcomes)
        self._failed += failed
        self._succeeded += len(outcomes) - failed
        self._answer(requests, outcomes)

    def wait_for_consumers(self) -> None:
        """Wait until every buffer has room. Who keeps others waiting for too long has to go."""
        clock = self._function.clock
        while full := [one for one in self._requests if one.full and one.state != "done"]:
            if slow := self._stalls.exceeded(full):
                self._drop(slow)
                continue
            began = clock()
            self._wait(self._callers, self._stalls.left(full))
            seconds = clock() - began
            self._stalled += seconds
            if self._others_wait() or len(full) < sum(self._callers.waiting()):
                self._stalls.add(full, seconds)

    def _drop(self, slow: list[Request]) -> None:
        name = self._function.name
        self._answer(slow, [Failure(ConsumerTooSlow(name)) for _ in slow])

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


#: Awaits what a function gives, on an event loop, and returns its result to this thread.
_RunOnLoop: TypeAlias = Callable[[Callable[[], Awaitable[Any]]], Any]
_GetLoop: TypeAlias = Callable[[], asyncio.AbstractEventLoop]
_OthersWait: TypeAlias = Callable[[], bool]


class Runner(Protocol):
    """Computes batches of one function."""

    def batch(self, batch: Batch, answer: Answer) -> Computed:
        """Compute a batch. Never raises.

        Args:
            batch: Its items and the keyword arguments that they share.
            answer: Called with what has its outcome already while the batch goes on.
        """
        ...

    def inline(self, request: Any) -> None: ...


#: Makes what computes batches on an event loop.
_On: TypeAlias = Callable[[_GetLoop, _OthersWait], Runner]


def runner_of(function: BatchFunction, options: BatchOptions, others_wait: _OthersWait) -> Runner:
    """How to compute the batches of a function.

    Args:
        function: The function.
        options: Its kind, and what functions of its kind need.
        others_wait: Whether items wait in the queue.
    """
    if not options.is_async:
        return _Streamed(function, options, None, others_wait) if options.streams else _Called(function)
    on: _On = partial(_Streamed, function, options) if options.streams else partial(_Awaited, function)
    return _ByLoop(on, others_wait) if options.own_loop is None else on(options.own_loop.get, others_wait)


class _Called:
    """For plain functions."""

    def __init__(self, function: BatchFunction) -> None:
        self._function = function

    def batch(self, batch: Batch, answer: Answer) -> Computed:
        return compute(self._function, batch, answer)

    def inline(self, request: Request) -> None:
        request.deliver(compute_one(self._function, request))


class _Awaited:
    """For coroutine functions."""

    def __init__(self, function: BatchFunction, loop: _GetLoop, others_wait: _OthersWait) -> None:
        self._function = function
        self._loop = loop
        self._others_wait = others_wait

    def batch(self, batch: Batch, answer: Answer) -> Computed:
        callers = Callers(batch.requests)
        run = self._function.run

        def wait_for(items: list[Any], /, **extras: Any) -> Any:
            if callers.all_left:
                raise AllLeft
            return run_on(self._loop(), lambda: run(items, **extras), callers, self._others_wait)

        return compute(replace(self._function, run=wait_for), batch, answer)

    def inline(self, request: Request) -> None:
        run = self._function.run
        loop = PrivateLoop()
        try:
            function = replace(self._function, run=lambda items, /, **extras: loop.run(lambda: run(items, **extras)))
            outcome = compute_one(function, request)
        finally:
            loop.close()
        request.deliver(outcome)


class _Streamed:
    """For generator functions of both kinds."""

    def __init__(
        self, function: BatchFunction, options: BatchOptions, loop: _GetLoop | None, others_wait: _OthersWait
    ) -> None:
        self._function = function
        self._slow_after = _units.seconds((options.buffer or Buffer()).slow_after, "slow_after", zero=True)
        self._loop = loop
        self._others_wait = others_wait

    def batch(self, batch: Batch, answer: Answer) -> Computed:
        return compute_stream(
            self._function,
            self._start,
            cast("list[StreamRequest]", batch.requests),
            batch.extras,
            answer,
            slow_after=self._slow_after,
            others_wait=self._others_wait,
        )

    def _start(self, items: list[Any], extras: dict[str, Any], callers: Callers) -> Steps:
        steps = self._function.run(items, **extras)
        if self._loop is None:
            return steps  # type: ignore[no-any-return]
        context = contextvars.copy_context()
        run = partial(run_on, self._loop(), callers=callers, others_wait=self._others_wait, context=context)
        return _AsyncSteps(steps, run, partial(run, cancel=False))

    def inline(self, request: StreamRequest) -> None:
        request.source = InlineParts(self._function, request, self._start_inline, contextvars.copy_context().run)

    def _start_inline(self, items: list[Any], extras: dict[str, Any], _callers: Callers) -> Steps:
        steps = self._function.run(items, **extras)
        if self._loop is None:
            return steps  # type: ignore[no-any-return]
        loop = PrivateLoop()

        def end(start: Callable[[], Awaitable[Any]]) -> None:
            try:
                loop.run(start)
            finally:
                loop.close()

        return _AsyncSteps(steps, loop.run, end)


class _ByLoop:
    """For functions that run on the event loops of their callers: what a batch has of each loop is computed there."""

    def __init__(self, on: _On, others_wait: _OthersWait) -> None:
        self._on = on
        self._others_wait = others_wait

    def batch(self, batch: Batch, answer: Answer) -> Computed:
        by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        for request in batch.requests:
            loop = request.loop or request.home
            assert loop is not None  # noqa: S101 - others are refused when they are queued
            by_loop.setdefault(loop, []).append(request)
        parts: list[Part] = []
        while by_loop:
            loop = next(iter(by_loop))
            part, started = by_loop.pop(loop), time.monotonic()
            runner = self._on(partial(_same, loop), lambda: bool(by_loop) or self._others_wait())
            computed = runner.batch(Batch(part, 0.0, batch.started), answer)
            parts.append(Part(part, computed, time.monotonic() - started))
            if by_loop:
                answer(part, computed.outcomes)
        return joined(batch.requests, parts)

    def inline(self, request: Any) -> None:
        self._on(asyncio.get_running_loop, self._others_wait).inline(request)


def _same(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    return loop


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
