"""One queued item and how its caller gets the answer; and batches of items."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextvars import Context
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from modelguard.runtime.event_loops import LoopEnded
from modelguard.runtime.fork_hooks import Wakeup
from modelguard.telemetry import logger

#: ``"done"``: it has its answer, or its caller does not wait any more.
State = Literal["waiting", "running", "done"]

#: Keyword arguments as ``(name, type, value)``: True and 1 are different arguments. See :func:`on_loop` for None.
Group: TypeAlias = tuple[tuple[str | None, type, Any], ...]


class Failure:
    """An outcome that is an error."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def count_failures(outcomes: Sequence[Any]) -> int:
    return sum(type(outcome) is Failure for outcome in outcomes)


class Request:
    """One item, what bounds it, and who gets its answer: a thread that waits, an event loop, or a future.

    Defaults are class attributes, because a request is made for every call. Times are those of the batcher's clock.
    """

    arrived = 0.0
    deadline = math.inf
    weight: float = 1
    group: Group | None = None
    state: State = "waiting"  # changed by the queue alone
    enclosing: frozenset[object] = frozenset()  # the batchers that wait for it, if a batch function made it
    loop: asyncio.AbstractEventLoop | None = None  # on which its caller awaits the future
    future: Any = None
    answered: threading.Lock | None = None  # for a thread that waits: let go with the answer
    line: Any = None  # in which it waits; None for that without keyword arguments. Set by the lines alone
    timer: list[Any] | None = None  # its entry among the deadlines, set by these alone
    departure: Wakeup | None = None  # set when it is dropped while its batch runs, if that can be stopped
    key: Hashable = None  # whose it is: keys share fairly
    priority: int = 0
    flow: Any = None  # the requests of its key that wait with it. Set by the fairness alone, as is its rank
    rank = 0.0  # when it would have come to be where its priority puts it
    patient_until = -math.inf  # so long it waits for a fuller batch, by its arrival not at all. Set by the lines
    _outcome: Any = None

    def __init__(self, item: Any, future: Any = None, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.item = item
        if future is not None:
            self.future = future
            self.loop = loop

    @property
    def calls_back(self) -> bool:
        """Whether its answer runs callbacks, which are other people's code."""
        return self.future is not None and self.loop is None

    def deliver(self, outcome: Any) -> None:
        """Hand the outcome to the caller. Called once and without any lock held; on its event loop, if it has one."""
        if self.loop is not None:
            _complete([self], [outcome])
        elif self.future is not None:  # in no context: its callbacks are no part of the batch or call that delivers it
            Context().run(self.future.complete, outcome)
        elif self.answered is not None:
            self._outcome = outcome
            self.answered.release()

    def wait(self) -> Any:
        """Block this thread until the outcome is there. Raises what the item failed with."""
        assert self.answered is not None  # noqa: S101 - for the checkers
        self.answered.acquire()
        outcome = self._outcome
        if type(outcome) is Failure:
            try:
                raise outcome.error
            finally:
                del self, outcome  # the error's traceback refers to this frame
        return outcome


#: The first instance has all attributes: then others have theirs side by side, and no dict each, which takes long.
_first = Request(None)
for _name in Request.__annotations__:
    setattr(_first, _name, None)


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

    def complete(self, outcome: Any) -> None:
        """Set the outcome. If it was cancelled, tell those who wait in ``concurrent.futures.wait``."""
        self.on_cancel = None  # it refers to the request, which refers to this
        if not self.set_running_or_notify_cancel():
            return
        if type(outcome) is Failure:
            self.set_exception(outcome.error)
        else:
            self.set_result(outcome)


# Requests of functions that run on the event loops of their callers: each loop has batches of its own.


def on_loop(group: Group | None, loop: asyncio.AbstractEventLoop) -> Group:
    return ((None, type(loop), weakref.ref(loop)), *(group or ()))


def loop_of(group: Group | None) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop | None = None if group is None else group[0][2]()
    if loop is None:
        raise LoopEnded
    return loop


def deliver(requests: Sequence[Request], outcomes: Sequence[Any]) -> None:
    """Hand each request its outcome. Each event loop is woken once for all of its requests. Never raises.

    Futures come last: their callbacks are other people's code, and nobody else should wait for it.
    """
    loops = {request.loop for request in requests}
    if len(loops) > 1:
        for loop in sorted(loops, key=lambda one: one is None):
            its = [at for at, request in enumerate(requests) if request.loop is loop]
            deliver([requests[at] for at in its], [outcomes[at] for at in its])
    elif None not in loops:
        for loop in loops:  # one, or none where there are no requests
            call_on(loop, _complete, requests, outcomes)
    else:
        for request, outcome in sorted(zip(requests, outcomes, strict=True), key=lambda pair: pair[0].calls_back):
            try:
                request.deliver(outcome)
            except BaseException:  # noqa: BLE001 - whatever a callback raises, the others get their outcomes
                with contextlib.suppress(BaseException):  # a log handler that raises must not stop them either
                    logger.exception("modelguard: a callback of a submitted call failed")


def call_on(loop: asyncio.AbstractEventLoop | None, act: Callable[..., object], *args: Any) -> None:
    """Have it called on an event loop, unless that is closed: nobody waits there any more."""
    try:  # noqa: SIM105 - contextlib.suppress takes half a microsecond
        loop.call_soon_threadsafe(act, *args)  # type: ignore[union-attr]
    except RuntimeError:
        pass


def _complete(requests: Sequence[Request], outcomes: Sequence[Any]) -> None:
    """Runs on the event loop."""
    for request, outcome in zip(requests, outcomes, strict=True):
        future = request.future
        if future.done():  # cancelled meanwhile
            continue
        if type(outcome) is Failure:
            future.set_exception(outcome.error)
        else:
            future.set_result(outcome)


class Batch:
    """Requests that are computed together, in this order."""

    weight = padding = 0.0  # the weight has the padding in it; 0 if nothing is weighed
    hung = False  # whether it has run for longer than hang_after
    wakeup: Wakeup  # set when one of their callers leaves, after watch(); its own steps may set it too

    def __init__(self, requests: list[Request], started: float) -> None:
        self.group = requests[0].group
        self.extras: dict[str, Any] = {name: value for name, _, value in self.group or () if name is not None}
        self.requests = requests
        self.count = len(requests)
        self.oldest = requests[0].arrived  # when the first of them arrived
        self.started = started

    @property
    def items(self) -> list[Any]:
        return [request.item for request in self.requests]

    def weigh(self, *, padded: bool) -> None:
        """Put the heaviest request first, and set the weight. If padded, each item costs as much as the heaviest."""
        requests = self.requests
        requests.sort(key=_weight_of, reverse=True)
        self.weight = math.fsum(map(_weight_of, requests))
        if padded:
            weight = requests[0].weight * len(requests)
            self.padding, self.weight = max(weight - self.weight, 0.0), weight

    # Who still waits: asked by what can be stopped half way, a coroutine or a generator

    def watch(self) -> None:
        """Be told when one of the callers leaves."""
        self.wakeup = Wakeup()
        for request in self.requests:
            request.departure = self.wakeup

    def waiting(self) -> list[bool]:
        return [request.state != "done" for request in self.requests]

    @property
    def all_left(self) -> bool:
        return all(request.state == "done" for request in self.requests)


_weight_of = attrgetter("weight")
