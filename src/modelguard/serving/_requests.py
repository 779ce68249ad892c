"""One queued item and how its caller gets the answer: one class for each kind of caller; and batches of items."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from operator import itemgetter
from typing import Any, Literal, Protocol, TypeAlias

from modelguard.errors import CallerGone, NotSupported
from modelguard.runtime.fork import Wakeup
from modelguard.telemetry import logger

#: ``"done"``: it has its answer, or its caller does not wait any more.
State = Literal["waiting", "running", "done"]

#: Keyword arguments as ``(name, type, value)``: True and 1 are different arguments.
Group: TypeAlias = tuple[tuple[str, type, Any], ...]


class Failure:
    """An outcome that is an error."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Request:
    """One item and what bounds it.

    Defaults are class attributes, because a request is made for every call.

    Attributes:
        item: What the caller passed.
        arrived: Seconds on the batcher's clock.
        deadline: Seconds on the same clock; infinity for none.
        weight: What it counts for against ``max_weight``; 1 if nothing is weighed.
        group: Its keyword arguments; None for none. Only requests with equal groups share a batch.
        state: Changed by the queue alone.
        enclosing: The batchers that wait for this request, if a batch function made it.
        loop: The event loop on which its caller waits, None for a thread.
        line: The line in which it waits; None for the line without keyword arguments. Set by the lines alone.
        timer: Its entry among the deadlines; None for no deadline. Set by the deadlines alone.
        departure: Set when it is dropped while its batch runs; None if the batch could not be stopped anyway.
        home: The event loop from which it was made, where that matters and ``loop`` does not say it.
        key: Whose request it is: keys share fairly.
        priority: Requests of the same key that have a higher one go first.
        flow: The requests of its key that wait with it. Set by the fairness alone, as is ``rank``.
        rank: When it would have come, in seconds, to be where its priority puts it.
    """

    arrived = 0.0
    deadline = math.inf
    weight: float = 1
    group: Group | None = None
    state: State = "waiting"
    enclosing: frozenset[object] = frozenset()
    loop: asyncio.AbstractEventLoop | None = None
    line: Any = None
    timer: list[Any] | None = None
    departure: Wakeup | None = None
    home: asyncio.AbstractEventLoop | None = None
    key: Hashable = None
    priority: int = 0
    flow: Any = None
    rank = 0.0

    def __init__(self, item: Any) -> None:
        self.item = item

    @property
    def extras(self) -> dict[str, Any]:
        return {name: value for name, _, value in self.group or ()}

    def deliver(self, outcome: Any) -> None:
        """Hand the outcome, a result or a :class:`Failure`, to the caller. Called once and without any lock held."""
        raise NotImplementedError


class ThreadRequest(Request):
    """A request whose caller is a blocked thread."""

    _outcome: Any

    def __init__(self, item: Any) -> None:
        self.item = item
        self._delivered = threading.Lock()
        self._delivered.acquire()

    def deliver(self, outcome: Any) -> None:
        self._outcome = outcome
        self._delivered.release()

    def wait(self) -> Any:
        """Block until the outcome is there.

        Raises:
            BaseException: What the item failed with.
        """
        self._delivered.acquire()
        outcome = self._outcome
        if type(outcome) is Failure:
            try:
                raise outcome.error
            finally:
                del self, outcome  # the error's traceback refers to this frame
        return outcome


class LoopRequest(Request):
    """A request whose caller is a coroutine, on any event loop.

    Args:
        item: What the caller passed.
        loop: The event loop.
        future: What the caller awaits.
    """

    def __init__(self, item: Any, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any] | None = None) -> None:
        self.item = item
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future() if future is None else future

    def deliver(self, outcome: Any) -> None:
        """Complete the coroutine's future. Called on its loop."""
        _complete([self.future], [outcome])


#: A call on an event loop with nothing but an item: the item, what the caller awaits, its loop, when it came, and the
#: item's weight. It has no request of its own as long as nothing happens to it but a batch.
PlainCall: TypeAlias = tuple[Any, asyncio.Future[Any], asyncio.AbstractEventLoop, float, float]


def request_of(call: PlainCall, timeout: float) -> LoopRequest:
    item, future, loop, arrived, weight = call
    request = LoopRequest(item, loop, future)
    request.arrived, request.deadline, request.weight = arrived, arrived + timeout, weight
    return request


class CancellableFuture(Future[Any]):
    """A future whose ``cancel`` also takes the item out of its queue."""

    on_cancel: Callable[[], object] | None = None

    def cancel(self) -> bool:
        """Drop the item if it waits, and its result if it is being computed; false if there is an answer already."""
        cancelled = super().cancel()
        on_cancel = self.on_cancel  # read once: the answer may clear it at any point
        if cancelled and on_cancel is not None:
            on_cancel()
        return cancelled


class FutureRequest(Request):
    """A request whose caller got a future."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self.future = CancellableFuture()

    def deliver(self, outcome: Any) -> None:
        """Complete the future. Of one that was cancelled, tell those who wait in ``concurrent.futures.wait``."""
        self.future.on_cancel = None  # it refers to this request, which refers to the future
        if not self.future.set_running_or_notify_cancel():
            return
        if type(outcome) is Failure:
            self.future.set_exception(outcome.error)
        else:
            self.future.set_result(outcome)


class QueuedCall:
    """A queued request, as its web request sees it.

    Args:
        request: The request.
        cancel: Takes it out of its queue; with ``notify`` its caller gets ``CallerGone``.
    """

    __slots__ = ("_cancel", "_request")

    def __init__(self, request: Request, cancel: Callable[..., object]) -> None:
        self._request = request
        self._cancel = cancel

    @property
    def done(self) -> bool:
        return self._request.state == "done"

    def cancel(self) -> None:
        self._cancel(self._request, notify=True)


def caller_gone(function: str) -> Failure:
    return Failure(CallerGone(function))


def deliver(requests: list[Request], outcomes: list[Any]) -> None:
    """Hand each request its outcome. Each event loop is woken once for all of its requests. Never raises.

    Futures come last: their callbacks are other people's code, and nobody else should wait for it.
    """
    awaited: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Any]] = []
    futures: list[tuple[Request, Any]] = []
    for request, outcome in zip(requests, outcomes, strict=True):
        if isinstance(request, LoopRequest):
            awaited.append((request.loop, request.future, outcome))  # type: ignore[arg-type]
        elif isinstance(request, FutureRequest):
            futures.append((request, outcome))
        else:
            request.deliver(outcome)
    if awaited:
        deliver_on_loops(*zip(*awaited, strict=True))
    for request, outcome in futures:
        try:
            request.deliver(outcome)
        except BaseException:  # noqa: BLE001 - whatever a callback raises, the others get their outcomes
            with contextlib.suppress(BaseException):  # a log handler that raises must not stop them either
                logger.exception("modelguard: a callback of a submitted call failed")


def deliver_pairs(pairs: list[tuple[Request, Any]]) -> None:
    if pairs:
        deliver([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def deliver_on_loops(
    loops: Sequence[asyncio.AbstractEventLoop], futures: Sequence[asyncio.Future[Any]], outcomes: Sequence[Any]
) -> None:
    """Complete futures, each on its loop. Each loop is woken once."""
    if loops.count(loop := loops[0]) == len(loops):
        _deliver_on_loop(loop, futures, outcomes)
        return
    by_loop: dict[asyncio.AbstractEventLoop, list[int]] = {}
    for at, loop in enumerate(loops):
        by_loop.setdefault(loop, []).append(at)
    for loop, its in by_loop.items():
        _deliver_on_loop(loop, [futures[at] for at in its], [outcomes[at] for at in its])


def _deliver_on_loop(
    loop: asyncio.AbstractEventLoop, futures: Sequence[asyncio.Future[Any]], outcomes: Sequence[Any]
) -> None:
    try:  # noqa: SIM105 - contextlib.suppress takes half a microsecond
        loop.call_soon_threadsafe(_complete, futures, outcomes)
    except RuntimeError:  # the loop is closed, so nobody waits there any more
        pass


def _complete(futures: Sequence[asyncio.Future[Any]], outcomes: Sequence[Any]) -> None:
    """Runs on the event loop."""
    for future, outcome in zip(futures, outcomes, strict=True):
        if future.done():  # cancelled meanwhile
            continue
        if type(outcome) is Failure:
            future.set_exception(outcome.error)
        else:
            future.set_result(outcome)


# Requests that are computed together.


class Batch:
    """Requests that are computed together.

    Attributes:
        extras: Keyword arguments that they share.
        requests: In the order in which they are computed.
        count: How many these are.
        group: Those, as the key of their line; None for none.
        weight: Their total weight, with padding; 0 if nothing is weighed.
        padding: How much of it is padding.
        started: When it was taken from the queue, in seconds on the batcher's clock.
        hung: Whether it has run for longer than ``hang_after``.
        oldest: When the first of them arrived.
    """

    padding = 0.0
    hung = False

    def __init__(self, requests: list[Request], weight: float, started: float) -> None:
        self.group = requests[0].group
        self.extras: dict[str, Any] = {} if self.group is None else requests[0].extras
        self.requests = requests
        self.count = len(requests)
        self.oldest = requests[0].arrived
        self.weight = weight
        self.started = started

    @property
    def items(self) -> list[Any]:
        return [request.item for request in self.requests]

    def weigh(self, *, padded: bool) -> None:
        """Put the heaviest request first, and set the weight.

        Args:
            padded: Whether each item costs as much as the heaviest one.
        """
        requests = self.requests
        requests.sort(key=lambda request: request.weight, reverse=True)
        self.weight = math.fsum(request.weight for request in requests)
        if padded:
            weight = requests[0].weight * len(requests)
            self.padding, self.weight = max(weight - self.weight, 0.0), weight


class PlainBatch(Batch):
    """Plain calls that are computed together. They get requests when something happens to one of them.

    Args:
        calls: The calls.
        timeout: Seconds that each of them has.
        started: As of any batch.
        weighed: Whether items have weights of their own.
    """

    group = None

    def __init__(self, calls: list[PlainCall], timeout: float, started: float, *, weighed: bool) -> None:
        self.oldest = calls[0][3]
        if weighed:
            calls.sort(key=_weight_of, reverse=True)
        self._columns = tuple(zip(*calls, strict=True))
        self._timeout = timeout
        self.made: dict[str, list[Request]] = {}
        self.extras = {}
        self.count = len(calls)
        self.weight = math.fsum(self._columns[4]) if weighed else 0.0
        self.started = started

    @property
    def items(self) -> list[Any]:
        return list(self._columns[0])

    def has(self, future: asyncio.Future[Any]) -> bool:
        return any(one is future for one in self._columns[1])

    @property
    def requests(self) -> list[Request]:  # type: ignore[override]
        made = self.made.get("requests")
        return self.made.setdefault("requests", self._make()) if made is None else made  # one step: any thread asks

    def _make(self) -> list[Request]:
        requests: list[Request] = [request_of(call, self._timeout) for call in zip(*self._columns, strict=True)]
        for request in requests:
            request.state = "running"
        return requests

    def deliver(self, outcomes: list[Any]) -> None:
        _, futures, loops, _, _ = self._columns
        deliver_on_loops(loops, futures, outcomes)


_weight_of = itemgetter(4)


def is_plain(batch: Batch) -> bool:
    """Whether its calls have no requests, since nothing has happened to any of them."""
    return isinstance(batch, PlainBatch) and not batch.made


# A request whose caller gets its result in parts: a bounded buffer between the batch and one consumer.


#: What :meth:`StreamRequest.take` returns when there is no part, and when there will be none.
NOTHING_YET: Any = object()
ENDED: Any = object()

_RUNNING: Any = object()


class LoopWaiter:
    """A coroutine that waits for a part."""

    __slots__ = ("future", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()

    async def wait(self) -> None:
        await self.future


class TrioWaiter:
    """A coroutine on Trio, as under Hypercorn's Trio workers. Trio is never imported here.

    Raises:
        NotSupported: No event loop runs, or it is neither asyncio's nor Trio's.
    """

    def __init__(self, call: str = "await f.aio(item)", instead: str = "Call the function without .aio, in a thread"):
        trio: Any = sys.modules.get("trio")
        try:
            self._token = trio.lowlevel.current_trio_token()
        except (AttributeError, RuntimeError):
            raise NotSupported(call, reason=f"neither asyncio nor Trio runs here. {instead}") from None
        self._run_finished: type[Exception] = trio.RunFinishedError
        self._event = trio.Event()

    def set(self) -> None:
        """Wake it, from any thread; if its loop has ended, nobody waits there any more."""
        with contextlib.suppress(self._run_finished):
            self._token.run_sync_soon(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()

    async def result(self, future: Future[Any]) -> Any:
        """What a future gets, which is cancelled if this is interrupted."""
        future.add_done_callback(lambda _done: self.set())
        try:
            await self.wait()
            return future.result()
        except BaseException:  # Trio's cancellation is one
            future.cancel()
            raise
        finally:
            del future  # the error's traceback refers to this frame


Waiter: TypeAlias = LoopWaiter | TrioWaiter | Wakeup


class PartSource(Protocol):
    """What makes the parts of a request that has no batch, in the thread of its consumer."""

    def advance(self) -> None:
        """Make the next part, or end the request."""

    def close(self) -> None:
        """Make no more."""


class StreamRequest(Request):
    """One item whose result comes in parts. Each part is taken once, in order; then comes the end, or one error.

    Args:
        item: What the caller passed.
        max_buffer: Most parts that wait for the consumer.

    Attributes:
        source: Makes its parts if it is computed in its consumer's thread.
    """

    def __init__(self, item: Any, max_buffer: int) -> None:
        self.item = item
        self.source: PartSource | None = None
        self._max_buffer = max_buffer
        # Reentrant: the garbage collector may run a consumer's farewell in the middle of a change.
        self._lock = threading.RLock()
        self._parts: deque[Any] = deque()
        self._outcome: Any = _RUNNING
        self._waiter: Waiter | None = None

    # The batch's side

    @property
    def full(self) -> bool:
        """Whether the consumer has to take a part before there is room for another."""
        return len(self._parts) >= self._max_buffer

    def push(self, part: Any) -> Waiter | None:
        """Add a part, unless the stream has ended. Returns who has to be woken."""
        with self._lock:
            if self._outcome is not _RUNNING:
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
        if self.source is not None and not self._parts and self._outcome is _RUNNING:
            self.source.advance()
        with self._lock:
            if self._parts:
                was_full = self.full
                part = self._parts.popleft()
                if was_full and self.departure is not None:
                    self.departure.set()
                return part
            outcome = self._outcome
            if outcome is _RUNNING:
                self._waiter = waiter
                return NOTHING_YET
            self._outcome = ENDED
        if outcome is ENDED:
            return ENDED
        try:
            raise outcome.error
        finally:
            del self, outcome  # the error's traceback refers to this frame

    def drop_parts(self) -> None:
        self._parts.clear()


def wake(waiters: Iterable[Waiter]) -> None:
    """Wake consumers. Each event loop is woken once for all that wait on it."""
    on_loops: list[LoopWaiter] = []
    for waiter in waiters:
        if isinstance(waiter, LoopWaiter):
            on_loops.append(waiter)
        else:
            waiter.set()
    if on_loops:
        futures = [waiter.future for waiter in on_loops]
        deliver_on_loops([waiter.loop for waiter in on_loops], futures, [None] * len(futures))


class AllLeft(Exception):
    """Nobody waits for the batch any more, so it was stopped."""


class LoopEnded(RuntimeError):
    """The event loop on which the batch runs does not run any more."""

    def __init__(self) -> None:
        super().__init__("the event loop on which it runs has ended")


class Callers:
    """Who of a batch still waits. What can be stopped half way, a coroutine or a generator, asks here.

    Attributes:
        wakeup: Set when one of them leaves; the batch's own steps may set it as well.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.wakeup = Wakeup()
        for request in requests:
            request.departure = self.wakeup

    def waiting(self) -> list[bool]:
        return [request.state != "done" for request in self.requests]

    @property
    def all_left(self) -> bool:
        """Whether nobody waits: all have left, or have their answers."""
        return all(request.state == "done" for request in self.requests)
