"""The threads that make submitted calls: no call waits for another one while a thread could make it."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Iterator

import pytest

from modelguard.errors import DeadlineExceeded, GuardClosed, QueueFull
from modelguard.isolation._submitted import Submitted

PATIENCE = 10.0


@pytest.fixture
def without_switches() -> Iterator[None]:
    """A thread runs until it waits for something, so that calls arrive before a thread has taken the first."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE)
    yield
    sys.setswitchinterval(before)


def nothing() -> str:
    return "done"


@pytest.mark.usefixtures("without_switches")
def test_calls_that_come_together_run_together() -> None:
    """A call that hangs holds up no other one while there are workers for both."""
    for _ in range(20):
        submitted = Submitted("f", threads=2, max_queue=10)
        assert "done" == submitted.submit(nothing, math.inf).result(PATIENCE)
        go_on = threading.Event()
        hangs = submitted.submit(go_on.wait, math.inf)
        assert "done" == submitted.submit(nothing, math.inf).result(PATIENCE)
        go_on.set()
        assert hangs.result(PATIENCE)
        submitted.close()


def test_many_calls_keep_all_threads() -> None:
    """However calls and threads race for the queue, as many calls run at a time as there are workers."""
    submitted = Submitted("f", threads=4, max_queue=10_000)
    for _ in range(20):
        quick = [submitted.submit(nothing, math.inf) for _ in range(200)]
        together = threading.Barrier(4)
        slow = [submitted.submit(functools.partial(together.wait, PATIENCE), math.inf) for _ in range(4)]
        assert {0, 1, 2, 3} == {one.result(PATIENCE) for one in slow}
        assert {"done"} == {one.result(PATIENCE) for one in quick}
    submitted.close()


def test_a_call_that_waited_too_long_is_not_made() -> None:
    """Its caller has given up."""
    submitted = Submitted("f", threads=1, max_queue=10)
    with pytest.raises(DeadlineExceeded):
        submitted.submit(nothing, 0.0).result(PATIENCE)
    submitted.close()


def test_the_queue_is_bounded_and_is_emptied_by_close() -> None:
    """More calls than may wait are refused at once, and those that wait when it is closed get an error."""
    submitted = Submitted("f", threads=1, max_queue=1)
    started, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        go_on.wait(PATIENCE)

    first = submitted.submit(hang, math.inf)
    assert started.wait(PATIENCE)
    second = submitted.submit(nothing, math.inf)
    with pytest.raises(QueueFull):
        submitted.submit(nothing, math.inf)
    submitted.close()
    with pytest.raises(GuardClosed):
        second.result(PATIENCE)
    go_on.set()
    assert first.result(PATIENCE) is None


def test_a_thread_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One moment without a thread does not leave all later calls waiting; the call that failed is not made later."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    submitted, late = Submitted("f", threads=1, max_queue=10), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            submitted.submit(late.set, math.inf)
    assert "done" == submitted.submit(nothing, math.inf).result(PATIENCE)
    assert not late.is_set()
    submitted.close()


def test_a_callback_that_exits_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    """sys.exit() in a callback of one call leaves the next ones answered."""
    submitted, go_on = Submitted("f", threads=1, max_queue=10), threading.Event()
    future = submitted.submit(lambda: go_on.wait(PATIENCE), math.inf)
    future.add_done_callback(lambda _: sys.exit(3))
    go_on.set()
    assert "done" == submitted.submit(nothing, math.inf).result(PATIENCE)
    assert "a callback of a submitted call failed" in caplog.text
    submitted.close()
