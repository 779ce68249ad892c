"""When the threads of a function start, wait and end, and what happens if one of them fails."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, Gated, queued, until

from modelguard import Batched, batched
from modelguard.runtime.fork_hooks import Wakeup
from modelguard.serving import _batcher


@pytest.fixture(autouse=True)
def _short_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads without work end at once, and are not left to other tests."""
    monkeypatch.setattr(_batcher, "LINGER", 0.001)


def has_no_thread(f: Batched[Any, Any]) -> bool:
    return not f._batcher._wakeups


def test_threads_start_with_work_and_end_without(model: Gated) -> None:
    """There are never more of them than allowed, and none is left."""
    f = batched(max_size=1, threads=2)(model)
    futures = queued(f, model, 4)
    until(lambda: f.status().running == 2)
    assert 2 == len(f._batcher._wakeups)
    model.gate.set()
    assert [future.result(TIMEOUT) for future in futures]
    until(lambda: has_no_thread(f))
    assert [] == f._batcher._idle


def test_a_thread_that_goes_on_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a call comes just when it was about to end: else another thread would compute beside it."""
    batcher = batched(max_size=1)(sorted)._batcher

    class Inbox:
        """A call fills it between two looks of the thread."""

        looks = 0

        def __len__(self) -> int:
            self.looks += 1
            return self.looks > 1

    monkeypatch.setattr(batcher._queue, "inbox", Inbox())
    thread = Wakeup()
    batcher._wakeups.add(thread)
    goes_on = batcher.turn(thread, expired=True) is not None
    assert goes_on == (thread in batcher._wakeups)


def test_a_thread_that_fails_is_replaced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the library costs a line in the log, and no caller waits for ever."""
    f = batched(max_size=1, name="f")(lambda items: items)
    take, faults = f._batcher._queue.next_batch, [RuntimeError("fault")]

    def next_batch(now: float) -> Any:
        if faults:
            raise faults.pop()
        return take(now)

    monkeypatch.setattr(f._batcher._queue, "next_batch", next_batch)
    assert "item" == f.submit("item").result(TIMEOUT)
    until(lambda: has_no_thread(f))
    assert "a thread of f() failed" in caplog.text


def test_a_thread_that_fails_while_it_is_idle_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call starts another thread, and does not wait for one that is gone."""
    f = batched(max_size=1, name="f")(lambda items: items)
    batcher = f._batcher

    def settle() -> None:
        raise RuntimeError("fault")

    with monkeypatch.context() as patch:
        patch.setattr(batcher, "_settle", settle)
        batcher._queue.undelivered.append(None)  # type: ignore[arg-type]
        with batcher._lock:
            batcher._start_thread()
        until(lambda: has_no_thread(f))
        batcher._queue.undelivered.clear()
    assert "item" == f("item")
