"""The thread that supervises molds: a descriptor's number may come back for another one."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from modelguard.isolation import _mold_owner, _supervisor
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._mold_owner import Mold, MoldGuard
from modelguard.isolation._mold_workers import Worker
from modelguard.isolation._supervisor import Supervisor
from modelguard.runtime import child_processes

PATIENCE = 10.0


def watch(supervisor: Supervisor, end: socket.socket, work: Callable[[], object]) -> None:
    supervisor.call(lambda: supervisor.watch(end.fileno(), work))
    supervisor.flush(PATIENCE)


def test_a_descriptor_that_was_closed_while_it_was_watched() -> None:
    """The next one with its number is watched as if there had been none."""
    supervisor = Supervisor()
    first, other = socket.socketpair()
    number = first.fileno()
    watch(supervisor, first, lambda: None)
    first.close()
    second = socket.socket(fileno=other.detach())
    third, fourth = socket.socketpair()
    ends = [end for end in (second, third, fourth) if end.fileno() == number]
    assert ends  # the system gives the lowest free number
    heard = threading.Event()
    peer = fourth if ends[0] is third else third
    watch(supervisor, ends[0], lambda: (ends[0].recv(1), heard.set()))
    peer.send(b"!")
    assert heard.wait(PATIENCE)
    for end in (second, third, fourth):
        supervisor.call(lambda end=end: supervisor.forget(end.fileno()))  # type: ignore[misc]
        supervisor.flush(PATIENCE)
        end.close()


def test_work_that_raises_stops_nothing(caplog: object) -> None:
    """The fault of one mold does not end the supervision of the others."""
    supervisor = Supervisor()
    supervisor.call(lambda: 1 / 0)
    done = threading.Event()
    supervisor.call(done.set)
    assert done.wait(PATIENCE)


def test_timers_run_in_their_order() -> None:
    """A later timer does not hold up an earlier one."""
    supervisor = Supervisor()
    order: list[str] = []
    done = threading.Event()
    supervisor.later(0.02, lambda: (order.append("second"), done.set()))
    supervisor.later(0.0, lambda: order.append("first"))
    assert done.wait(PATIENCE)
    assert ["first", "second"] == order


def refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One moment without a thread does not leave all later loads waiting; what failed is not done later."""
    supervisor = Supervisor()
    late, done = threading.Event(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            supervisor.call(late.set)
    supervisor.call(done.set)
    assert done.wait(PATIENCE)
    assert not late.is_set()


def test_the_collector_may_call_in_while_the_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may find a dropped function at any point, whose processes are ended by this thread; there is still one."""
    supervisor = Supervisor()
    done = threading.Event()
    made: list[threading.Thread] = []

    class Interrupted(threading.Thread):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)
            supervisor.call(done.set)

    caller = threading.Thread(target=supervisor.call, args=(lambda: None,), daemon=True)
    monkeypatch.setattr(threading, "Thread", Interrupted)
    caller.start()
    caller.join(PATIENCE)
    assert not caller.is_alive(), "it waits for a lock that it holds"
    assert done.wait(PATIENCE)
    assert 1 == len(made)


def test_the_collector_may_ask_for_it_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that ask in a process get the same one."""
    inner: list[Supervisor] = []

    class Interrupted(Supervisor):
        def __init__(self) -> None:
            super().__init__()
            if not inner:
                inner.append(self)
                inner[0] = _supervisor.supervisor()

    monkeypatch.setattr(_supervisor, "Supervisor", Interrupted)
    monkeypatch.setattr(_supervisor, "_supervisor", None)
    made: list[Supervisor] = []
    caller = threading.Thread(target=lambda: made.append(_supervisor.supervisor()), daemon=True)
    caller.start()
    caller.join(PATIENCE)
    assert inner == made == [_supervisor.supervisor()]
    made[0].abandon()


def test_a_worker_s_descriptor_is_not_closed_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another process's by then, which would be killed in its place."""
    reading, writing = os.pipe()  # stands for the process's descriptor
    os.close(writing)
    worker = Worker(1)
    worker.channel = Channel(socket.socket())
    worker.pidfd = reading
    ended = threading.Thread(target=worker.has_exited, args=("it was killed",))

    def kill(descriptor: int) -> None:
        ended.start()
        ended.join(0.1)
        os.fstat(descriptor)

    monkeypatch.setattr(child_processes, "send_kill", kill)
    worker.kill()
    ended.join(PATIENCE)
    assert worker.pidfd is None
    worker.channel.close()


def test_a_mold_that_has_ended_is_held_by_no_worker_that_has_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a program that the model has started holds that worker's connection open: it is heeded no more."""
    monkeypatch.setattr(Mold, "_collect", lambda *_: "it was killed")
    monkeypatch.setattr(child_processes, "reap", lambda _: None)
    supervisor, worker = Supervisor(), Worker(1)
    ours, theirs = socket.socketpair()
    mold = Mold.__new__(Mold)
    mold._supervisor, mold._running, mold._programs, mold._ending = supervisor, {}, {}, True
    mold._loaded, mold.ended = Future(), threading.Event()
    mold._loaded.set_result(None)
    workers: Any = SimpleNamespace(is_starting=lambda _: True, mold_ended=lambda _: None)
    mold.workers = workers
    program: Any = SimpleNamespace(process=SimpleNamespace(pid=0))
    supervisor.call(lambda mold=mold: mold._add_worker(worker, ours))  # type: ignore[misc]
    supervisor.call(lambda mold=mold: mold._gone(program))  # type: ignore[misc]
    supervisor.flush(PATIENCE)
    watch = weakref.ref(mold)
    del mold
    assert watch() is None
    assert -1 == ours.fileno()
    theirs.close()


def test_a_mold_is_not_held_while_its_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes long, and another thread may release it meanwhile."""
    owner = MoldGuard.__new__(MoldGuard)
    held: list[Any] = []

    def make() -> None:
        mold: Any = Mold.__new__(Mold)
        mold.owner, mold.instructions = owner, SimpleNamespace(owner=os.getpid())
        mold.pids = lambda: [1, 2]
        held.append(mold)

    # In a thread that has ended: without the GIL, what others let go is freed when the thread that made it runs on.
    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    _mold_owner._molds.add(held[0])
    watch = weakref.ref(held[0])
    found: list[object] = []

    def read(_pid: int) -> int:
        held.clear()
        found.append(watch())
        return 5

    monkeypatch.setattr(_mold_owner, "_share", read)
    assert (10, [None, None]) == (owner._private(), found)


def test_a_report_that_cannot_be_read_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Where no descriptor is free for a worker's, the end of another one is heard all the same, and at once."""
    heard: list[tuple[object, ...]] = []
    mold: Any = SimpleNamespace(
        _heed=lambda _control, *report: heard.append(report),
        instructions=SimpleNamespace(options=SimpleNamespace(name="f")),
    )
    ours, theirs = map(Channel, pair())
    theirs.send_pickled(b"no pickle", [])
    theirs.send(("exit", 1, 0))
    Mold._hear(mold, ours, lambda: None)
    assert [("exit", 1, 0)] == heard
    assert "f: a report of its mold is lost" in caplog.text
    ours.close()
    theirs.close()
