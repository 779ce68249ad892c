"""Streams under any order of events: steps, consumers that take and leave, deadlines. No threads, no clock."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from modelguard.errors import ConsumerTooSlow, DeadlineExceeded
from modelguard.serving import Limits
from modelguard.serving._execution import BatchFunction
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import Batch, Request
from modelguard.serving.streams import ENDED, NOTHING_YET, StreamRequest, StreamRun

#: What a function yields for an item: mostly a part, else its end or its error.
PARTS = st.sampled_from(["part", "part", "part", "part", "end", "error"])
#: So many parts wait for their consumer.
BUFFER = 3


class OwnError(Exception):
    """What the function yields for one item."""


class BatchError(Exception):
    """What the function raises."""


class Consumer:
    """One consumer, what it got, and what it has to get."""

    def __init__(self, request: StreamRequest) -> None:
        self.request = request
        self.got: list[Any] = []
        self.sent: list[int] = []
        self.end: type[BaseException] | str | None = "none yet"
        self.left = False

    def take(self) -> None:
        try:
            part = self.request.take()
        except Exception as error:  # noqa: BLE001 - it is what the consumer gets
            self.got.append(type(error.__cause__ or error))
        else:
            if part is not NOTHING_YET:
                self.got.append(None if part is ENDED else part)

    def check(self) -> None:
        """It got a part of what it had to get: in order, each once, and the end or one error once, after the parts."""
        parts = [part for part in self.got if isinstance(part, int)]
        ends = self.got[len(parts) :]
        assert parts == self.sent[: len(parts)]
        if ends:
            assert parts == self.sent
            assert self.end == ends[0]
            assert {None} >= {*ends[1:]}, "after the first one there is only the end"


class Streams(RuleBasedStateMachine):
    """One batch of streams after another."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.queue = BatchQueue(Limits(name="f", max_size=3, max_queue=6))
        self.consumers: dict[Request, Consumer] = {}
        self.batch: Batch | None = None

    @initialize()
    def begin(self) -> None:
        self.function = BatchFunction(run=lambda items: items, name="f", isolate=True, clock=lambda: self.now)

    # What the batcher does

    def settle(self) -> None:
        pairs, self.queue.undelivered = self.queue.undelivered, []
        for request, outcome in pairs:
            consumer = self.consumers[request]
            if not consumer.left:
                consumer.end = type(outcome.error)
            request.deliver(outcome)

    def answer(self, requests: list[Request], outcomes: list[Any]) -> None:
        for request, outcome in zip(*self.queue.answer(requests, outcomes), strict=True):
            self.consumers[request].end = None if outcome is None else type(outcome.error)
            request.deliver(outcome)

    @property
    def live(self) -> list[Consumer]:
        assert self.batch is not None
        return [self.consumers[request] for request in self.batch.requests if request.state != "done"]

    @rule(bound=st.sampled_from([math.inf, math.inf, 2.0, 5.0]))
    def admit(self, bound: float) -> None:
        if self.queue.waiting < 6:
            request = StreamRequest(0, BUFFER)
            request.deadline = self.now + bound
            self.consumers[request] = Consumer(request)
            self.queue.admit(request, self.now)
            self.settle()

    @precondition(lambda self: self.batch is None and self.queue.waiting)
    @rule()
    def start(self) -> None:
        found = self.queue.next_batch(self.now)
        self.settle()
        if isinstance(found, Batch):
            self.batch = found
            self.run = StreamRun(
                self.function,
                found,
                self.answer,
                slow_after=0.0,
                others_wait=lambda: True,
                wait=lambda _seconds: None,
            )

    @precondition(lambda self: self.batch is not None)
    @rule(kinds=st.lists(PARTS, min_size=3, max_size=3))
    def step(self, kinds: list[str]) -> None:
        """One step of the function."""
        assert self.batch is not None
        parts: list[Any] = []
        for request, kind in zip(self.batch.requests, kinds, strict=False):
            self.number += 1
            if kind == "part" and request.state != "done":
                self.consumers[request].sent.append(self.number)
            parts.append({"part": self.number, "end": StopIteration, "error": OwnError()}[kind])
        self.run.hand_out(parts)
        for consumer in self.live:  # the batch waits for nobody here: who is full has to go
            if consumer.request.full:
                consumer.end = ConsumerTooSlow
        self.run.wait_for_consumers()

    @precondition(lambda self: self.batch is not None)
    @rule(error=st.sampled_from([None, None, BatchError]))
    def end(self, error: type[Exception] | None) -> None:
        """The function returns or raises."""
        assert self.batch is not None
        computed = self.run.computed(None if error is None else error())
        for consumer in self.live:
            consumer.end = error
        for request, outcome in zip(*self.queue.finish(self.batch, computed.outcomes, computed.failed), strict=True):
            request.deliver(outcome)
        self.batch = None

    # What the consumers do, and time

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), times=st.integers(1, 4))
    def take(self, data: st.DataObject, times: int) -> None:
        consumer = data.draw(st.sampled_from([*self.consumers.values()]))
        for _ in range(times):
            consumer.take()
            consumer.check()

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from([*self.consumers.values()]))
        if self.queue.cancel(consumer.request):
            consumer.left = True
            consumer.end = "left"
            consumer.sent = consumer.sent[: len(consumer.got) + len(consumer.request._parts)]
        self.settle()

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.queue.expire(self.now)
        self.settle()

    def teardown(self) -> None:
        if self.batch is not None:
            self.end(None)
        while self.queue.waiting:
            self.start()
            if self.batch is not None:
                self.end(None)
        for consumer in self.consumers.values():
            for _ in range(BUFFER + 2):
                consumer.take()
            consumer.check()
            if not consumer.left:
                assert consumer.end in (None, OwnError, BatchError, ConsumerTooSlow, DeadlineExceeded)
                assert consumer.sent == [part for part in consumer.got if isinstance(part, int)], "every part came"
                assert consumer.end == consumer.got[len(consumer.sent)], "then the end, or the one error"
        counters = self.queue.counters
        total = counters.answered + counters.failed + counters.expired + counters.cancelled
        assert len(self.consumers) == total, "each item is counted once"
        assert self.queue.idle


@pytest.mark.timeout(300)
class TestStreams(Streams.TestCase):
    """Every consumer gets its parts in order, each once, and then the end or one error."""

    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
