"""How a batch is computed, by the kind of its function: called, awaited, or stepped through."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from modelguard.serving._callers import AllLeft, Callers
from modelguard.serving._execution import Answer, BatchFunction, Computed, Part, compute, compute_one, joined
from modelguard.serving._function_options import FunctionOptions
from modelguard.serving._loops import OwnLoop, PrivateLoop, run_on
from modelguard.serving._requests import Request
from modelguard.serving._stream_requests import StreamRequest
from modelguard.serving._streaming import InlineParts, Steps, compute_stream

__all__ = ["Runner", "runner_of"]

#: Awaits what a function gives, on an event loop, and returns its result to this thread.
_RunOnLoop: TypeAlias = Callable[[Callable[[], Awaitable[Any]]], Any]
_GetLoop: TypeAlias = Callable[[], asyncio.AbstractEventLoop]
_OthersWait: TypeAlias = Callable[[], bool]


class Runner(Protocol):
    """Computes batches of one function."""

    def batch(self, requests: list[Any], extras: dict[str, Any], answer: Answer) -> Computed:
        """Compute a batch. Never raises.

        Args:
            requests: Whose items to compute.
            extras: Keyword arguments that all requests share.
            answer: Called with what has its outcome already while the batch goes on.
        """
        ...

    def inline(self, request: Any) -> None:
        """Compute one request in this thread, and deliver its outcome."""


#: Makes what computes batches on an event loop.
_On: TypeAlias = Callable[[_GetLoop, _OthersWait], Runner]


def runner_of(
    function: BatchFunction, options: FunctionOptions, own_loop: OwnLoop | None, others_wait: _OthersWait
) -> Runner:
    """How to compute the batches of a function.

    Args:
        function: The function.
        options: Its kind, and what functions of its kind need.
        own_loop: The event loop on which it runs; None for those of its callers, and if it is not ``async``.
        others_wait: Whether items wait in the queue.
    """
    if not options.is_async:
        return _Streamed(function, options, None, others_wait) if options.streams else _Called(function)
    on: _On = partial(_Streamed, function, options) if options.streams else partial(_Awaited, function)
    return _ByLoop(on, others_wait) if own_loop is None else on(own_loop.get, others_wait)


class _Called:
    """For plain functions."""

    def __init__(self, function: BatchFunction) -> None:
        self._function = function

    def batch(self, requests: list[Request], extras: dict[str, Any], answer: Answer) -> Computed:
        return compute(self._function, requests, extras, answer)

    def inline(self, request: Request) -> None:
        request.deliver(compute_one(self._function, request))


class _Awaited:
    """For coroutine functions."""

    def __init__(self, function: BatchFunction, loop: _GetLoop, others_wait: _OthersWait) -> None:
        self._function = function
        self._loop = loop
        self._others_wait = others_wait

    def batch(self, requests: list[Request], extras: dict[str, Any], answer: Answer) -> Computed:
        callers = Callers(requests)
        run = self._function.run

        def wait_for(items: list[Any], /, **extras: Any) -> Any:
            if callers.all_left:
                raise AllLeft
            return run_on(self._loop(), lambda: run(items, **extras), callers, self._others_wait)

        return compute(replace(self._function, run=wait_for), requests, extras, answer)

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
        self, function: BatchFunction, options: FunctionOptions, loop: _GetLoop | None, others_wait: _OthersWait
    ) -> None:
        self._function = function
        self._slow_after = options.slow_after
        self._loop = loop
        self._others_wait = others_wait

    def batch(self, requests: list[StreamRequest], extras: dict[str, Any], answer: Answer) -> Computed:
        return compute_stream(
            self._function,
            self._start,
            requests,
            extras,
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

    def batch(self, requests: list[Request], extras: dict[str, Any], answer: Answer) -> Computed:
        by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        for request in requests:
            loop = request.loop or request.home
            assert loop is not None  # noqa: S101 - others are refused when they are queued
            by_loop.setdefault(loop, []).append(request)
        parts: list[Part] = []
        while by_loop:
            loop = next(iter(by_loop))
            part, started = by_loop.pop(loop), time.monotonic()
            runner = self._on(partial(_same, loop), lambda: bool(by_loop) or self._others_wait())
            computed = runner.batch(part, extras, answer)
            parts.append(Part(part, computed, time.monotonic() - started))
            if by_loop:
                answer(part, computed.outcomes)
        return joined(requests, parts)

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
        """Run it to its next ``yield``."""
        try:
            return self._run(lambda: self._generator.asend(waiting))
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End it where it is."""
        self._end(self._generator.aclose)
