"""Background work of one name runs in one thread, as long as that is free."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from tests.unit.lifecycle.world import TIMEOUT, until

from modelguard.runtime import background
from modelguard.runtime.background import KeptThreads


class Job:
    """Work that records its thread, and can be stopped half way."""

    def __init__(self, *, held: bool = False) -> None:
        self.thread: threading.Thread | None = None
        self.go_on = threading.Event()
        self.done = threading.Event()
        if not held:
            self.go_on.set()

    def __call__(self) -> None:
        self.thread = threading.current_thread()
        assert self.go_on.wait(TIMEOUT)
        self.done.set()


class Pool:
    """KeptThreads, and the threads that they made."""

    def __init__(self) -> None:
        self.workers = KeptThreads()
        self.threads: set[threading.Thread] = set()

    def run(self, name: str, job: Job | None = None) -> threading.Thread:
        """Run a job, and let its thread become idle; returns which thread it was."""
        job = Job() if job is None else job
        self.start(name, job)
        assert job.done.wait(TIMEOUT)
        assert job.thread is not None
        until(lambda: self.idle(name) or not job.thread.is_alive())  # type: ignore[union-attr]
        return job.thread

    def start(self, name: str, job: Job) -> None:
        self.workers.start(job, name)
        until(lambda: job.thread is not None)
        self.threads.add(job.thread)  # type: ignore[arg-type]

    def idle(self, name: str) -> bool:
        return name in self.workers._idle


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    made = Pool()
    yield made
    monkeypatch.setattr(background, "_IDLE_THREADS", 0)
    made.workers.end_idle()
    for thread in made.threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_work_of_one_name_runs_in_one_thread(pool: Pool) -> None:
    """Loads of one guard share a thread, and so a heap: memory does not wander."""
    threads = {pool.run("modelguard-load-nlp") for _ in range(5)}
    assert 1 == len(threads)
    (thread,) = threads
    assert ("modelguard-load-nlp", True) == (thread.name, thread.daemon)


def test_names_do_not_share(pool: Pool) -> None:
    """Work of another name has a thread of its own."""
    assert pool.run("load-a") is not pool.run("load-b")


def test_work_that_hangs_holds_up_no_other(pool: Pool) -> None:
    """While a thread is busy, more work of its name gets another."""
    hung = Job(held=True)
    pool.start("load", hung)
    assert pool.run("load") is not hung.thread
    hung.go_on.set()


def test_work_that_is_done_is_not_held_on_to(pool: Pool) -> None:
    """A thread that waits for more keeps nothing of what it did alive, neither the first time nor later."""
    for _ in range(3):
        job = Job()
        pool.run("load", job)
        gone: weakref.ref[Any] = weakref.ref(job)
        del job
        gc.collect()
        assert gone() is None


def test_few_threads_wait(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many names there are, only some threads are kept for later; the others end."""
    monkeypatch.setattr(background, "_IDLE_THREADS", 2)
    for n in range(5):
        pool.run(f"load-{n}")
    assert 2 == len(pool.workers._idle)
    assert 2 == sum(thread.is_alive() for thread in pool.threads)


def test_a_thread_that_waited_long_enough_ends(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread without work is not kept for ever, and its successor does as well."""
    monkeypatch.setattr(background, "_IDLE_SECONDS", 0.001)
    first = pool.run("load")
    first.join(TIMEOUT)
    assert not first.is_alive()
    assert pool.run("load") is not first


def test_threads_without_work_can_be_sent_home(pool: Pool) -> None:
    """Before a fork, threads that only wait are ended; one that works is left alone, and more work gets a new one."""
    waiting = pool.run("a")
    busy = Job(held=True)
    pool.start("b", busy)
    pool.workers.end_idle()
    assert not waiting.is_alive()
    assert busy.thread is not None
    assert busy.thread.is_alive()
    assert pool.run("a") is not waiting
    busy.go_on.set()


def test_work_that_comes_in_the_last_moment_is_done(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that is handed over just when its thread has waited long enough is not lost."""
    second = Job()

    class LastMoment(SimpleQueue):  # type: ignore[type-arg]
        def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: FBT001, FBT002
            if timeout is not None and not second.done.is_set():
                pool.workers.start(second, "load")
                raise Empty
            return super().get(block, timeout)

    monkeypatch.setattr(background, "SimpleQueue", LastMoment)
    first = Job()
    pool.start("load", first)
    assert second.done.wait(TIMEOUT)
    assert first.thread is second.thread


def test_work_that_raises_ends_its_thread_alone(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next work of that name gets a new thread."""
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("bad")

    pool.workers.start(fail, "load")
    assert failed.wait(TIMEOUT)
    assert pool.run("load").is_alive()


def test_the_end_waits_for_work_that_runs(pool: Pool) -> None:
    """And for no longer than it may: work that hangs is left behind."""
    job = Job(held=True)
    pool.start("load", job)
    pool.workers.finish(0)
    assert not job.done.is_set()
    ending = threading.Thread(target=pool.workers.finish, args=(TIMEOUT,))
    ending.start()
    assert ending.is_alive()
    job.go_on.set()
    ending.join(TIMEOUT)
    assert job.done.is_set()
    assert not ending.is_alive()
    pool.workers.finish(TIMEOUT)  # nothing runs


def test_the_end_does_not_wait_for_work_that_failed(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for work that raised, nor for work for which there was no thread."""
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)

    def fail() -> None:
        raise ValueError("bad")

    pool.workers.start(fail, "load")
    pool.workers.finish(TIMEOUT)

    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(RuntimeError, match="can't start"):
        pool.workers.start(Job(), "other")
    pool.workers.finish(TIMEOUT)
    assert 0 == pool.workers._running


def test_a_child_has_threads_of_its_own(pool: Pool) -> None:
    """Threads do not survive a fork: the child starts new ones."""
    parent = KeptThreads()
    parent._idle["load"] = None  # type: ignore[assignment]
    parent.after_fork_in_child()
    pool.workers, mine = parent, pool.workers
    assert "load" == pool.run("load").name
    for name, inbox in parent._idle.items():
        mine._idle[name] = inbox


def test_work_may_be_brought_from_within(pool: Pool) -> None:
    """A lease that the garbage collector finds dropped may bring work in the middle of the bookkeeping."""
    job = Job()
    with pool.workers._lock:
        pool.start("load", job)
    assert job.done.wait(TIMEOUT)
