"""Guards across ``os.fork``, from threads, in the middle of loads, leases and reloads."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import in_child, run_python, wait_until

from modelguard import TTL, Changed, Swap, Uses, batched, guard, pool, replicas, telemetry
from modelguard.lifecycle.guard import guards
from modelguard.lifecycle.system import System, use
from modelguard.runtime import fork_hooks
from modelguard.telemetry import Event, Reason, RecycleAsked

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork"),
]


class Model:
    """Knows who loaded it."""

    def __init__(self) -> None:
        self.pid = os.getpid()


@pytest.fixture(autouse=True)
def events() -> Iterator[list[Event]]:
    """What happens in the test, whose guards are closed afterwards: policies would go on, and report to other tests."""
    seen: list[Event] = []
    telemetry.set_hooks([seen.append])
    before = set(guards)
    yield seen
    telemetry.set_hooks(None)
    for one in set(guards) - before:
        one.close(timeout=0)


def test_a_ready_generation_is_carried_over_and_the_child_is_its_own_master() -> None:
    """The child serves the parent's model at once, counts for itself, and reloads and closes alone."""
    guarded = guard(Model, reload_on=Uses(100), swap=Swap(defer=0))
    who = guarded(lambda model: model.pid)
    parent = os.getpid()
    for _ in range(7):
        who()

    def child() -> None:
        assert 0 == guarded.status().uses
        assert parent == who()
        assert 1 == guarded.status().uses
        guarded.reload()
        assert os.getpid() == who()
        guarded.close()

    in_child(child)
    assert parent == who()
    assert 8 == guarded.status().uses


def test_the_childs_policies_go_on() -> None:
    """A policy becomes due in the child by the child's own calls, and its ticker thread runs."""
    guarded = guard(Model, reload_on=Uses(3) | TTL("200ms"), swap=Swap(defer=0))
    who = guarded(lambda model: model.pid)
    who()

    def child() -> None:
        deadline = time.monotonic() + 10
        while guarded.status().generation == 1:
            assert time.monotonic() < deadline, "the time to live never ended in the child"
            time.sleep(0.02)
        assert os.getpid() == who()
        generation = guarded.status().generation
        for _ in range(3):
            who()
        while guarded.status().generation == generation:
            assert time.monotonic() < deadline, "the uses were never over in the child"
            time.sleep(0.02)

    in_child(child)


def test_a_child_that_gets_no_thread_does_all_else_that_a_fork_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ticker cannot start, and what servers do in a new worker is done all the same."""

    class Server(fork_hooks.Forkable):
        fork_rank = fork_hooks.Rank.SERVER
        told = False

        def after_fork_in_child(self) -> None:
            self.told = True

    server = Server()
    fork_hooks.register(server)
    guarded = guard(Model, reload_on=TTL("1h"))
    guarded.load()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def child() -> None:
        assert server.told

    monkeypatch.setattr(threading.Thread, "start", refuse)
    in_child(child)


def test_the_childs_probes_start_anew() -> None:
    """A probe that hangs in the parent while it forks is asked by the child in a thread of the child's own."""
    parent, value = os.getpid(), ["a"]
    hang, hangs, over = threading.Event(), threading.Event(), threading.Event()

    def probe() -> str:
        if os.getpid() == parent and hang.is_set():
            hangs.set()
            over.wait(60)
        return value[0]

    guarded = guard(Model, reload_on=Changed(probe, every="50ms"), swap=Swap(defer=0))
    who = guarded(lambda model: model.pid)
    assert parent == who()
    hang.set()
    assert hangs.wait(20)

    def child() -> None:
        assert parent == who(), "it has the parent's model"
        value[0] = "b"
        deadline = time.monotonic() + 15
        while who() == parent:
            assert time.monotonic() < deadline, "the child's probe was never asked"
            time.sleep(0.02)
        assert 1 == guarded.status().reloads
        guarded.close()

    in_child(child)
    over.set()
    guarded.close()


def test_a_fork_during_a_load_leaves_the_child_free_to_load() -> None:
    """The parent's load goes on in the parent; the child, which has no such thread, loads for itself."""
    inside, go_on = threading.Event(), threading.Event()
    parent = os.getpid()

    def load() -> Model:
        inside.set()
        if os.getpid() == parent:
            assert go_on.wait(30)
        return Model()

    guarded = guard(load, reload_on=None)
    who = guarded(lambda model: model.pid)
    caller = threading.Thread(target=who)
    caller.start()
    assert inside.wait(10)

    def child() -> None:
        assert "new" == guarded.status().state
        assert os.getpid() == who()

    in_child(child)
    go_on.set()
    caller.join(10)
    assert parent == who()


def test_a_fork_from_inside_a_call_keeps_that_calls_lease() -> None:
    """In the child the forking call still holds its model; calls of other threads hold nothing there."""
    other_inside, other_out = threading.Event(), threading.Event()
    unloaded: list[int] = []
    guarded = guard(
        Model, reload_on=None, unload=lambda model: unloaded.append(model.pid), swap=Swap(drain_timeout="300ms")
    )

    @guarded
    def other(model: Model) -> None:
        other_inside.set()
        assert other_out.wait(30)

    @guarded
    def forks(model: Model) -> None:
        def child() -> None:
            assert 1 == guarded.status().in_flight
            guarded.reload(wait=False)
            deadline = time.monotonic() + 10
            while guarded.status().generation == 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.5)  # past the drain timeout
            assert [] == unloaded, "unloaded under the call that forked"

        in_child(child)

    thread = threading.Thread(target=other)
    thread.start()
    assert other_inside.wait(10)
    forks()
    other_out.set()
    thread.join(10)
    assert 0 == guarded.status().in_flight


def test_a_shared_model_is_recycled_instead_of_reloaded(events: list[Event]) -> None:
    """In a prepared parent's child a due policy asks the server for a fresh worker, once; the model serves on."""
    asked: list[tuple[Reason, ...]] = []
    guarded = guard(Model, reload_on=Uses(3), swap=Swap(defer=0))
    who = guarded(lambda model: model.pid)
    who()
    guarded.recycle_in_children(asked.append)
    parent = os.getpid()

    def child() -> None:
        for _ in range(9):
            assert parent == who()
        assert [(Reason("uses", "Uses(3)"),)] == asked
        assert 0 == guarded.status().reloads
        assert 1 == len([event for event in events if isinstance(event, RecycleAsked)])

    in_child(child)
    for _ in range(9):
        who()
    deadline = time.monotonic() + 10
    while guarded.status().generation == 1:
        assert time.monotonic() < deadline, "the parent itself reloads as always"
        time.sleep(0.01)
    assert [] == asked


def test_multiprocessing_children_use_the_parents_model() -> None:
    """Multiprocessing's fork context carries a guard over like any other fork."""
    guarded = guard(Model, reload_on=None)
    who = guarded(lambda model: model.pid)
    who()
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sending.send((os.getpid(), who())))
    child.start()
    assert receiving.poll(20)
    pid, loaded_by = receiving.recv()
    child.join(10)
    assert (child.pid, os.getpid()) == (pid, loaded_by)


def test_a_child_may_cancel_what_its_parent_has_queued() -> None:
    """A future, or a loop over ``f.map``, may end there: neither the parent's queue nor the child's own is changed."""
    parent, gate = os.getpid(), threading.Event()

    @batched(max_size=2)
    def f(items: list[int]) -> list[int]:
        assert os.getpid() != parent or gate.wait(20)
        return items

    waiting = [f.submit(number) for number in range(6)]

    def child() -> None:
        assert [True] * 6 == [one.cancel() for one in waiting]
        assert (0, 0, 0) == (f.status().waiting, f.status().running, f.status().cancelled)
        assert 7 == f(7)
        f.close(timeout=10)
        assert "closed" == f.status().state
        assert 0 == f.status().waiting

    in_child(child)
    gate.set()
    assert [*range(6)] == [one.result(20) for one in waiting]
    f.close()


def test_workers_of_a_fork_server_load_a_model_of_their_own(tmp_path: Path) -> None:
    """It is the default start method from CPython 3.14 on; its workers have no memory of the process."""
    app = (
        "import os\nfrom modelguard import guard\n@guard(os.getpid, reload_on=None)\ndef loader(pid):\n    return pid\n"
    )
    (tmp_path / "app.py").write_text(app)
    # In a process of its own: the fork server stays as long as the process that started it.
    program = """
        import json, multiprocessing, os
        from concurrent.futures import ProcessPoolExecutor
        import app
        own = app.loader()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as workers:
            worker, loader = workers.submit(os.getpid).result(60), workers.submit(app.loader).result(60)
        print(json.dumps([own == os.getpid(), worker == loader != own]))
    """
    assert [True, True] == run_python(program, 90, PYTHONPATH=str(tmp_path))


def test_a_batched_function_that_is_closed_can_be_reopened_in_a_child() -> None:
    """The parent's threads, which may still be ending, are not counted as the child's."""
    f = batched(max_size=2)(lambda items: items)
    with f:
        assert "a" == f("a")

    def serve() -> None:
        for _ in range(2):
            with f:
                assert ["a", "b"] == list(f.map(["a", "b"], timeout=10))

    in_child(serve)
    serve()


def test_forks_while_threads_use_guards_and_pools_never_hang() -> None:
    """Children forked at random moments of calls, reloads and pool leases can all use guard and pool."""
    order_alone = System(private=lambda: 0, headroom=lambda: None, trim=lambda: "none")
    with use(lambda: order_alone):
        guarded = guard(Model, reload_on=Uses(20), swap=Swap(defer=0))
        voices = pool(lambda key: Model(), max_memory="1 GB", max_models=2)
    who = guarded(lambda model: model.pid)
    done = threading.Event()

    def busy(key: int) -> None:
        while not done.is_set():
            who()
            with voices.lease(key):
                done.wait(0.002)

    threads = [threading.Thread(target=busy, args=(key,)) for key in range(3)]
    for thread in threads:
        thread.start()

    def child() -> None:
        assert who()
        guarded.reload()
        assert os.getpid() == who()
        for key in range(4):
            with voices.lease(key) as model:
                assert model.pid
        guarded.close()
        voices.close()

    try:
        for _ in range(10):
            in_child(child)
    finally:
        done.set()
        for thread in threads:
            thread.join(20)
    guarded.close()
    voices.close()


def held_by_another_thread(lock: Any) -> Callable[[], None]:
    """Have another thread hold a lock, until the function that this returns is called."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(60)

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(60)
    return over.set


def test_replicas_are_free_in_a_child_whatever_the_parents_threads_do() -> None:
    """A thread that was just taking a replica does not exist in the child, which takes calls."""
    both = replicas(guard(Model, reload_on=None, name="pair"), 2)
    both.load()
    name = both(lambda model: model.pid)
    release = held_by_another_thread(both._free.line._turn)
    try:
        in_child(lambda: name() and None)
    finally:
        release()
        both.close()


def test_a_child_asks_the_policies_of_replicas_whatever_the_parents_threads_do() -> None:
    """A thread that was just deciding which replica is replaced does not exist in the child."""
    both = replicas(guard(Model, reload_on=Uses(1), swap=Swap(defer=0), name="pair"), 2)
    both.load()
    name = both(lambda model: model.pid)
    release = held_by_another_thread(both._free._deciding)

    def child() -> None:
        assert os.getppid() == name()
        wait_until(lambda: [2, 1] == [status.generation for status in both.status()], "the reload")

    try:
        in_child(child)
    finally:
        release()
        both.close()


def test_replicas_can_be_replaced_in_a_child_whatever_the_parents_threads_do() -> None:
    """A thread that was just replacing them does not exist in the child, which can do it by itself."""
    both = replicas(guard(Model, reload_on=None, name="pair"), 2)
    both.load()
    release = held_by_another_thread(both._free.rolling)
    try:
        in_child(both.reload)
    finally:
        release()
        both.close()


A_POOL_THAT_ENDS_MODELS = """
    import os, threading
    from modelguard import pool

    voices = pool(lambda key: [key], max_memory="1 GB")
    with voices.lease("a"):
        pass
    forking, inside = threading.Event(), threading.Event()

    def reload():
        with voices._engine._lock:  # as inside of reload(), which then asks for checks
            inside.set()
            forking.wait(60)
            threading.Event().wait(0.5)
            voices.reload()

    thread = threading.Thread(target=reload)
    thread.start()
    inside.wait(60)
    os.register_at_fork(before=forking.set)
    child = os.fork()
    if child == 0:
        os._exit(7)
    thread.join()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_while_a_pool_ends_models_does_not_freeze_the_parent() -> None:
    """The fork and reload() of a pool each wait for locks, and never for each other."""
    assert 7 == run_python(A_POOL_THAT_ENDS_MODELS, 20)


def test_a_batched_function_answers_in_a_child_whatever_the_parents_threads_do() -> None:
    """A thread that was just noting a bad item does not exist in the child, which finds bad items by itself."""
    parent, reached, go_on = os.getpid(), threading.Event(), threading.Event()

    class SlowError(ValueError):
        def __copy__(self) -> SlowError:
            if os.getpid() == parent:
                reached.set()
                go_on.wait(60)
            return SlowError(*self.args)

    @batched(max_size=8, max_wait=0.05)
    def double(items: list[int]) -> list[int]:
        if -1 in items:
            raise SlowError("bad")
        return [2 * item for item in items]

    def child() -> None:
        assert [2, "SlowError", 4] == outcomes()

    def outcomes() -> list[object]:
        futures = [double.submit(item) for item in (1, -1, 2)]
        return [
            type(error).__name__ if (error := future.exception(20)) is not None else future.result()
            for future in futures
        ]

    threading.Thread(target=outcomes, daemon=True).start()
    assert reached.wait(60)
    try:
        in_child(child)
    finally:
        go_on.set()
        double.close()
