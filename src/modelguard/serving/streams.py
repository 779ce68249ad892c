"""Results that come in parts: their consumers, the batch that makes them, and the bounded buffers between the two."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

from modelguard.errors import BatchFailed, ConsumerTooSlow, GuardClosed, WouldDeadlock, WrongResults
from modelguard.runtime.event_loops import AllLeft, RunOnLoop
from modelguard.runtime.fork_hooks import Wakeup
from modelguard.runtime.waiting import OnAsyncio, OnTrio, on_event_loop, sleeper
from modelguard.serving._execution import (
    Answer,
    BatchFunction,
    Computed,
    all_failed,
    check_results,
    error_for_caller,
    verdict_of,
    wrap_errors,
)
from modelguard.serving._requests import Batch, Failure, Request, call_on, count_failures
from modelguard.serving.status import Verdict

__all__ = ["Stream"]

Y_co = TypeVar("Y_co", covariant=True)

# A request whose caller gets its result in parts.


#: What :meth:`StreamRequest.take` returns when there is no part, and when there will be none.
NOTHING_YET: Any = object()
ENDED: Any = object()

#: Who waits for a part.
Waiter: TypeAlias = OnAsyncio | OnTrio | Wakeup


class StreamRequest(Request):
    """One item whose result comes in parts. Each part is taken once, in order; then comes the end, or one error."""

    def __init__(self, item: Any, max_buffer: int) -> None:
        self.item = item
        self.source: Generator[None] | None = None  # makes its parts if it is computed in its consumer's thread
        self._max_buffer = max_buffer
        # Reentrant: the garbage collector may run a consumer's farewell in the middle of a change.
        self._lock = threading.RLock()
        self._parts: deque[Any] = deque()
        self._outcome: Any = NOTHING_YET
        self._waiter: Waiter | None = None

    # The batch's side

    @property
    def full(self) -> bool:
        return len(self._parts) >= self._max_buffer

    def push(self, part: Any) -> Waiter | None:
        """Add a part, unless the stream has ended. Returns who has to be woken."""
        with self._lock:
            if self._outcome is not NOTHING_YET:
                return None
            self._parts.append(part)
            waiter, self._waiter = self._waiter, None
        return waiter

    def deliver(self, outcome: Any) -> None:
        """End the stream after the parts that are there: with an error if the outcome is a failure."""
        with self._lock:
            self._outcome = outcome if type(outcome) is Failure else ENDED
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            wake([waiter])

    # The consumer's side

    def take(self, waiter: Waiter | None = None) -> Any:
        """The next part, ``ENDED``, or ``NOTHING_YET``; then the waiter will be woken.

        Raises:
            BaseException: What the stream ended with. It is raised once.
        """
        if self.source is not None and not self._parts and self._outcome is NOTHING_YET:
            next(self.source, None)
            if self.state == "done":  # another thread has left during the step
                self.leave_source()
        with self._lock:
            if self._parts:
                was_full = self.full
                part = self._parts.popleft()
                if was_full and self.departure is not None:
                    self.departure.set()
                return part
            outcome = self._outcome
            if outcome is NOTHING_YET:
                self._waiter = waiter
            else:
                self._outcome = ENDED
        if outcome is NOTHING_YET or outcome is ENDED:
            return outcome
        try:
            raise outcome.error
        finally:
            del self, outcome  # the error's traceback refers to this frame

    def leave_source(self) -> None:
        """Close what makes its parts; in the middle of a step, whoever computes that does so at its end."""
        self.state = "done"
        if self.source is not None:
            with suppress(ValueError):  # it is being computed
                self.source.close()

    def drop_parts(self) -> None:
        self._parts.clear()


def wake(waiters: Iterable[Waiter]) -> None:
    """Wake consumers. Each event loop is woken once for all that wait on it."""
    on_loops: defaultdict[asyncio.AbstractEventLoop, list[OnAsyncio]] = defaultdict(list)
    for waiter in waiters:
        if isinstance(waiter, OnAsyncio):
            on_loops[waiter.loop].append(waiter)
        elif isinstance(waiter, Wakeup):
            waiter.set()
        else:
            waiter.wake()
    for loop, those in on_loops.items():
        call_on(loop, _wake, those)


def _wake(waiters: Iterable[OnAsyncio]) -> None:
    for waiter in waiters:
        waiter.wake_here()


# The consumer.


class _NotIterable(WouldDeadlock, TypeError):
    """Tells what takes either kind of iterator, as Django's responses do, to iterate asynchronously."""


class Stream(Iterator[Y_co], AsyncIterator[Y_co]):
    """The parts of one item's result. Made by :meth:`BatchedStream.stream`.

    ``async for part in stream`` does not block the event loop, asyncio's or Trio's; ``for part in stream`` blocks the
    thread. Each part comes once, in order; then the stream ends, or raises what its item failed with, once.

    It has one consumer at a time. When that leaves, the item drops out of its batch: on :meth:`close`, at the end of a
    ``with`` or ``async with`` block, when the task that waits for a part is cancelled, and when the stream is dropped.
    """

    def __init__(
        self, name: str, request: StreamRequest, leave: Callable[[Request], object], drop: Callable[[Request], object]
    ) -> None:
        self._name = name
        self._request = request
        self._leave = leave
        self._drop = drop
        self._process = os.getpid()
        self._waited_for = False
        self._open = True

    # Parts

    def __iter__(self) -> Self:
        self._refuse_to_block(_NotIterable)
        return self

    def __next__(self) -> Y_co:
        """The next part. Blocks.

        Raises:
            StopIteration: There are no more.
            DeadlineExceeded: The time ran out.
            ConsumerTooSlow: This consumer took its parts so slowly that others had to wait for it.
            BatchFailed: The batch failed, and no single item was at fault.
            WouldDeadlock: On a running event loop (use ``async for``).
            Exception: What the function raised, or yielded, for this item.
        """
        self._refuse_to_block(WouldDeadlock)
        while (part := self._take(None)) is NOTHING_YET:
            waiter = Wakeup()
            if (part := self._take(waiter)) is not NOTHING_YET:
                break
            with self._waiting():
                waiter.wait(threading.TIMEOUT_MAX)
        if part is ENDED:
            raise StopIteration
        return part  # type: ignore[no-any-return]

    def _refuse_to_block(self, kind: type[WouldDeadlock]) -> None:
        if on_event_loop():
            why = "waiting for the next part would block the running event loop"
            raise kind(self._name, why=why, fix="Write: async for part in f.stream(item).")

    async def __anext__(self) -> Y_co:
        """The next part, without blocking the event loop. Cancelling it closes the stream.

        Raises:
            StopAsyncIteration: There are no more.
            Exception: As for ``next(stream)``.
        """
        while (part := self._take(None)) is NOTHING_YET:
            waiter = sleeper("async for part in f.stream(item)", "Iterate in a thread, without async")
            if (part := self._take(waiter)) is not NOTHING_YET:
                break
            with self._waiting():
                await waiter.sleep()
        if part is ENDED:
            raise StopAsyncIteration
        return part  # type: ignore[no-any-return]

    def _take(self, waiter: Waiter | None) -> Any:
        if not self._open:
            return ENDED
        if self._waited_for:
            raise RuntimeError(f"somebody else waits for the next part of this stream of {self._name}()")
        try:
            part = self._request.take(waiter)
        except BaseException:
            self._open = False
            raise
        if part is ENDED:
            self._open = False
        return part

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Wait for a part inside the block. Whoever is interrupted there, by Ctrl-C or as a task, has left."""
        if self._process != os.getpid():
            self._open = False
            raise BatchFailed(self._name, "the stream belongs to the process from which this one was forked", size=1)
        if sys.is_finalizing():  # the threads that would bring the part do not run any more
            raise GuardClosed(self._name)
        self._waited_for = True
        try:
            yield
        except BaseException:
            self.close()
            raise
        finally:
            self._waited_for = False

    # Its end

    def close(self) -> None:
        """Leave: no more parts come, and those that nobody has taken are dropped. Closing twice does nothing.

        Whoever waits for a part in another thread or task gets the end.
        """
        if self._open:
            self._end(self._leave)
            self._request.deliver(None)

    def _end(self, leave: Callable[[Request], object]) -> None:
        self._open = False
        request = self._request
        if request.source is not None:
            request.leave_source()
        elif self._process == os.getpid():
            leave(request)
        request.drop_parts()

    async def aclose(self) -> None:
        """:meth:`close` for coroutines. It does not wait either."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not sys.is_finalizing():
            self._end(self._drop)

    def __repr__(self) -> str:
        return f"<Stream of {self._name!r}, {'open' if self._open else 'ended'}>"


# The batch: it takes step after step from the generator, and hands each item's part to its consumer.


#: Each part gives a consumer so much of ``slow_after`` back: who is a little slower than others may go on.
_CREDIT = 0.01


@dataclass(slots=True)
class AsyncSteps:
    """An asynchronous generator, as one that a thread can step through."""

    generator: AsyncGenerator[Any, Any]
    run: RunOnLoop
    end: RunOnLoop  # the same, for the last time

    def send(self, waiting: list[bool] | None) -> Any:
        try:
            return self.run(lambda: self.generator.asend(waiting))
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        self.end(self.generator.aclose)


class StreamRun:
    """One batch of streams, from its first step to its end.

    Args:
        function: What begins it: its ``run`` gives the steps.
        batch: Its items and the keyword arguments that they share.
        answer: Called with requests that end while others go on, and their outcomes.
        slow_after: How long a consumer with a full buffer may keep others waiting, beside its credit for the parts that
            it took.
        others_wait: Whether items wait in the queue.
        wait: Waits for something to change, at most so many seconds. Default: until a consumer leaves or has made room.
    """

    def __init__(
        self,
        function: BatchFunction,
        batch: Batch,
        answer: Answer,
        *,
        slow_after: float,
        others_wait: Callable[[], bool],
        wait: Callable[[float], object] | None = None,
    ) -> None:
        batch.watch()
        self._function = function
        self._batch = batch
        self._requests: list[Any] = batch.requests
        self._answer = answer
        self._slow_after = slow_after
        self._others_wait = others_wait
        self._wait = batch.wakeup.wait if wait is None else wait
        self._error: BaseException | None = None
        self._error_at_end: BaseException | None = None  # it is reported, and says nothing about the model
        self._failed = self._succeeded = 0
        self._stalled = 0.0
        self._stalled_by: dict[Request, float] = {}

    def compute(self) -> Computed:
        """Run it to its end. Never raises: whatever the function does becomes outcomes."""
        try:
            for _ in self._steps():
                pass
            return self.computed(self._error)
        except BaseException as error:  # noqa: BLE001 - an error that cannot be copied or printed
            return all_failed(self._function, self._batch, error)

    def on_demand(self, context: contextvars.Context) -> Generator[None]:
        """Run the batch of a single request in its consumer's thread, but in the call's context: a step each time."""
        steps, (request,) = self._steps(), self._requests
        try:
            while context.run(next, steps, steps) is None and request.state != "done":
                yield
            if request.state != "done":
                self._answer([request], self.computed(self._error).outcomes)
        finally:
            context.run(steps.close)

    def _steps(self) -> Generator[None]:
        """Make all parts and hand them out, with a pause after each step."""
        steps: Any = None  # a generator, or what looks like one
        try:
            steps = self._function.run(self._batch.items, **self._batch.extras)
            waiting: list[bool] | None = None
            while not self._batch.all_left and (parts := self._step(steps, waiting)) is not None:
                self.hand_out(parts)
                del parts
                yield
                self.wait_for_consumers()
                waiting = self._batch.waiting()
        except AllLeft:
            pass
        except self._function.caught as raised:
            self._error = raised
        finally:
            try:
                if steps is not None:
                    steps.close()
            except AllLeft:
                pass
            except self._function.caught as raised:
                self._error_at_end = raised

    def _step(self, steps: Any, waiting: list[bool] | None) -> list[Any] | None:
        """Run one step. Returns a part for each item; None at the end."""
        name, count = self._function.name, self._batch.count
        try:
            parts = steps.send(waiting)
        except StopIteration:
            if waiting is not None:
                return None
            why = "it ended before it had yielded anything; for an item without parts, yield StopIteration"
            raise WrongResults(name, why, size=count) from None
        return check_results(parts, name, count, how="yielded")

    def hand_out(self, parts: list[Any]) -> None:
        """Hand each consumer that is left its part, or its end."""
        waiters: list[Waiter] = []
        ended: list[Request] = []
        outcomes: list[Any] = []
        for request, part in zip(self._requests, parts, strict=True):
            if request.state == "done":
                continue
            outcome = _outcome_of(part, self._function.name)
            if outcome is not NOTHING_YET:
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
        clock, most = self._function.clock, self._slow_after
        while full := [one for one in self._requests if one.full and one.state != "done"]:
            left = {one: most - self._stalled_by.get(one, 0.0) for one in full}
            if slow := [one for one in full if left[one] <= 0]:
                self._answer([*slow], [Failure(ConsumerTooSlow(self._function.name)) for _ in slow])
                continue
            began = clock()
            self._wait(min(left.values()))
            seconds = clock() - began
            self._stalled += seconds
            if self._others_wait() or len(full) < sum(self._batch.waiting()):
                for one in full:
                    credit = 0.0 if one.full else _CREDIT * most
                    self._stalled_by[one] = max(most - left[one] + seconds - credit, 0.0)

    def computed(self, error: BaseException | None) -> Computed:
        live = self._batch.waiting()
        if error is None:
            self._succeeded += sum(live)
            verdict: Verdict = "succeeded" if self._succeeded else "inconclusive"
            whole = bool(self._succeeded or self._failed)  # else it was cut short, and its time says nothing
            none: list[Any] = [None] * len(live)
            return Computed(none, self._failed, verdict, self._error_at_end, whole=whole, stalled=self._stalled)
        # The error may also be that of an item whose consumer has left, but of none that has ended.
        name, count = self._function.name, len(live) - self._succeeded - self._failed
        outcomes = [Failure(error_for_caller(error, name, count)) if waits else None for waits in live]
        failed, verdict = self._failed + sum(live), verdict_of([error], self._function.ignore)
        return Computed(outcomes, failed, verdict, error, stalled=self._stalled)


def _outcome_of(part: Any, name: str) -> Any:
    """How a part ends its item: with None or a failure; ``NOTHING_YET`` if the item goes on."""
    if part is StopIteration or part is StopAsyncIteration or isinstance(part, StopIteration | StopAsyncIteration):
        return None
    return wrap_errors([part], name)[0] if isinstance(part, BaseException) else NOTHING_YET
