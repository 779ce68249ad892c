"""Run one batch of streams: take step after step from the generator, and hand each item's part to its consumer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from modelguard.errors import ConsumerTooSlow, WrongResults
from modelguard.serving._batches import Verdict
from modelguard.serving._callers import AllLeft, Callers
from modelguard.serving._execution import Answer, BatchFunction, Computed, verdict_of
from modelguard.serving._outcomes import batch_failed, check_results, error_for_caller, wrap_errors
from modelguard.serving._requests import Failure, Request
from modelguard.serving._stream_requests import StreamRequest, Waiter, wake

__all__ = ["InlineParts", "Stalls", "StartSteps", "Steps", "StreamRun", "compute_stream"]

#: What :func:`_outcome_of` returns for a part after which others follow.
_NO_OUTCOME: Any = object()


class Steps(Protocol):
    """A batch function that yields: a generator, or what looks like one."""

    def send(self, waiting: list[bool] | None, /) -> Any:
        """Run it to its next ``yield``, with what that returns in it. Returns what it yielded."""

    def close(self) -> object:
        """End it where it is."""


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
        """Note that others waited for each of these."""
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
        """Take all steps. Returns what went wrong."""
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
        """The outcome of the batch."""
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
        """Make the next part, or end the request."""
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
        """Make no more."""
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
