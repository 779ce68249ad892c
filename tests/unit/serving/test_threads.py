"""``_threads``: when threads start, wait and end, and what happens if one of them fails."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, until
from tests.unit.serving.queues import queue_of, request

from modelguard.runtime.fork import Wakeup
from modelguard.serving import _shared_threads
from modelguard.serving._requests import Request
from modelguard.serving._shared_threads import BatchThreads, LockedQueue, Work
from modelguard.serving.status import Batch


class Computing:
    """Threads that compute batches by remembering their items; the next steps may be faults."""

    def __init__(self, most: int = 1) -> None:
        self.locked = LockedQueue(queue_of(max_size=1), lambda: None)
        self.items: list[Any] = []
        self.faults: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()
        self.threads = BatchThreads("f", self.locked, self._take, self._compute, most=most, lingers=True)

    def put(self, one: Request) -> None:
        with self.locked.lock:
            self.locked.queue.admit(one, 0.0)
            wakeup = self.threads.find()
        if wakeup is not None:
            wakeup.set()

    def _take(self) -> Work:
        if self.faults:
            raise self.faults.pop()
        return self.locked.queue.next_batch(0.0)

    def _compute(self, batch: Batch) -> None:
        self.items += [one.item for one in batch.requests]
        assert self.gate.wait(TIMEOUT)
        with self.locked.lock:
            self.locked.queue.finish(batch, [None] * len(batch.requests))


@pytest.fixture(autouse=True)
def _short_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads without work end at once, and are not left to other tests."""
    monkeypatch.setattr(_shared_threads, "_LINGER", 0.001)


def test_threads_start_with_work_and_end_without() -> None:
    """There are never more of them than allowed, and none is left."""
    computing = Computing(most=2)
    computing.gate.clear()
    for number in range(4):
        computing.put(request(number))
    until(lambda: len(computing.items) == 2)
    assert 2 == computing.threads.count
    computing.gate.set()
    until(lambda: not computing.threads.count)
    assert [0, 1, 2, 3] == sorted(computing.items)
    assert [] == computing.threads.idle


def test_a_thread_that_goes_on_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a call comes just when it was about to end: else another thread would compute beside it."""
    computing = Computing()

    class Inbox:
        """A call fills it between two looks of the thread."""

        looks = 0

        def __len__(self) -> int:
            self.looks += 1
            return self.looks > 1

    monkeypatch.setattr(computing.locked.queue, "inbox", Inbox())
    computing.threads.count = 1
    goes_on = computing.threads._wait_for_work(Wakeup(), None)
    assert goes_on == (computing.threads.count == 1)


def test_a_thread_that_fails_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """A fault of the library costs a line in the log, and no caller waits for ever."""
    computing = Computing()
    computing.faults.append(RuntimeError("fault"))
    computing.put(request("item"))
    until(lambda: not computing.threads.count)
    assert ["item"] == computing.items
    assert "a thread of f() failed" in caplog.text


def test_a_thread_that_fails_while_it_is_idle_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call starts another thread, and does not wait for one that is gone."""
    computing = Computing()

    def settle() -> None:
        raise RuntimeError("fault")

    with monkeypatch.context() as patch:
        patch.setattr(computing.locked, "settle", settle)
        computing.locked.deferred.append((request(), False))
        with computing.locked.lock:
            computing.threads.start()
        until(lambda: not computing.threads.count)
    computing.put(request("item"))
    until(lambda: computing.items == ["item"])
