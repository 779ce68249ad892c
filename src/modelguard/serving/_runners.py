"""How a batch is computed, by the kind of its function: called, awaited, or stepped through."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from modelguard.serving._callers import AllLeft, Callers
from modelguard.serving._execution import Answer, BatchFunction, Computed, compute, compute_one
from modelguard.serving._function_options import FunctionOptions
from modelguard.serving._loops import OwnLoop, PrivateLoop, run_on
from modelguard.serving._requests import Request
from modelguard.serving._stream_requests import StreamRequest
from modelguard.serving._streaming import InlineParts, Steps, compute_stream

__all__ = ["Runner", "runner_of"]

#: Awaits what a function gives, on an event loop, and returns its result to this thread.
_RunOnLoop: TypeAlias = Callable[[Callable[[], Awaitable[Any]]], Any]


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


def runner_of(
    function: BatchFunction, options: FunctionOptions, own_loop: OwnLoop | None, others_wait: Callable[[], bool]
) -> Runner:
    """How to compute the batches of a function.

    Args:
        function: The function.
        options: Its kind, and what functions of its kind need.
        own_loop: The event loop on which it runs; None for that of its callers, and if it is not ``async``.
        others_wait: Whether items wait in the queue.
    """
    if options.streams:
        return _Streamed(function, options, own_loop, others_wait)
    return _Awaited(function, own_loop) if options.is_async else _Called(function)


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

    def __init__(self, function: BatchFunction, own_loop: OwnLoop | None) -> None:
        self._function = function
        self._own_loop = own_loop

    def batch(self, requests: list[Request], extras: dict[str, Any], answer: Answer) -> Computed:
        callers = Callers(requests)
        run = self._function.run

        def wait_for(items: list[Any], /, **extras: Any) -> Any:
            if callers.all_left:
                raise AllLeft
            return run_on(_loop_for(callers, self._own_loop), lambda: run(items, **extras), callers)

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
        self,
        function: BatchFunction,
        options: FunctionOptions,
        own_loop: OwnLoop | None,
        others_wait: Callable[[], bool],
    ) -> None:
        self._function = function
        self._slow_after = options.slow_after
        self._is_async = options.is_async
        self._own_loop = own_loop
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
        if not self._is_async:
            return steps  # type: ignore[no-any-return]
        run = partial(run_on, _loop_for(callers, self._own_loop), callers=callers, context=contextvars.copy_context())
        return _AsyncSteps(steps, run, partial(run, cancel=False))

    def inline(self, request: StreamRequest) -> None:
        request.source = InlineParts(self._function, request, self._start_inline, contextvars.copy_context().run)

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


def _loop_for(callers: Callers, own_loop: OwnLoop | None) -> asyncio.AbstractEventLoop:
    """The event loop on which a batch runs: its own, or that of the first of its callers."""
    if own_loop is not None:
        return own_loop.get()
    return next(loop for request in callers.requests if (loop := request.loop or request.home) is not None)
