"""One thread asks the policies of all guards, and exists only while there are guards."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from tests.unit.interrupts import interrupted_everywhere, traces_instructions
from tests.unit.lifecycle.world import TIMEOUT, World, until

from modelguard import TTL, guard
from modelguard.errors import LoadFailed
from modelguard.lifecycle import _engine
from modelguard.lifecycle.policies import Policy, Snapshot
from modelguard.lifecycle.system import use
from modelguard.runtime.background import Ticker


class Ticked:
    """Something to check; records when it was checked."""

    def __init__(self, interval: float = 0.05, check: Callable[[], None] = lambda: None) -> None:
        self._interval = interval
        self._check = check
        self.asked = threading.Event()

    def tick(self) -> None:
        self.asked.set()
        self._check()

    def check_interval(self) -> float:
        return self._interval

    def is_asked(self) -> bool:
        self.asked.clear()
        return self.asked.wait(TIMEOUT)


class Owner:
    """Part of a cycle, so that only the garbage collector finds it dropped."""

    def __init__(self) -> None:
        self.me = self


def fail() -> None:
    raise OSError("no /proc")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "modelguard-ticker"]


def new(before: list[threading.Thread]) -> list[threading.Thread]:
    """Those started since: a ticker of an earlier test may end its own at any time."""
    return [thread for thread in threads() if thread not in before]


@pytest.fixture
def ticker() -> Iterator[Ticker]:
    """A ticker for this test only, whose thread is gone afterwards."""
    before = threads()
    made = Ticker()
    yield made
    for one in list(made._guards):
        made.remove(one)
    until(lambda: [] == new(before))


def test_what_is_ticker_is_asked_again_and_again(ticker: Ticker) -> None:
    """Each guard is asked in the background, at the pace that it wants."""
    first, second = Ticked(), Ticked(interval=3600)
    ticker.add(first)
    ticker.add(second)
    assert [True] * 4 == [guard.is_asked() for guard in (first, second, first, second)]


def test_one_thread_serves_all(ticker: Ticker) -> None:
    """However many guards there are, one thread checks them."""
    before = threads()
    guards = [Ticked() for _ in range(20)]
    for one in guards:
        ticker.add(one)
    assert 1 == len(new(before))
    assert all(guard.is_asked() for guard in guards)


def test_the_thread_ends_with_its_last_guard_and_comes_back_with_the_next(ticker: Ticker) -> None:
    """Without guards there is no thread; a new guard brings a new one."""
    before = threads()
    for _ in range(2):
        guard = Ticked()
        ticker.add(guard)
        assert guard.is_asked()
        ticker.remove(guard)
        until(lambda: [] == new(before))


def test_a_guard_that_nobody_else_refers_to_is_let_go(ticker: Ticker) -> None:
    """The ticker keeps no guard alive: one that is dropped without being closed is gone."""
    before = threads()
    guard = Ticked()
    ticker.add(guard)
    assert guard.is_asked()
    del guard

    def gone() -> bool:
        gc.collect()
        return [] == new(before)

    until(gone)


def test_one_guard_s_trouble_is_no_other_s(ticker: Ticker, caplog: pytest.LogCaptureFixture) -> None:
    """If one guard cannot be checked the others still are, and the log reports it."""
    with caplog.at_level(logging.ERROR, "modelguard"):
        broken, sound = Ticked(check=fail), Ticked()
        ticker.add(broken)
        ticker.add(sound)
        assert [True] * 4 == [guard.is_asked() for guard in (broken, sound, broken, sound)]
    assert "could not ask the policies of" in caplog.text


def test_a_guard_that_does_not_know_its_pace_is_no_other_s(ticker: Ticker, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever fails about one guard, the thread goes on."""

    class Paceless(Ticked):
        def check_interval(self) -> float:
            raise OSError("no clock")

    with caplog.at_level(logging.ERROR, "modelguard"):
        broken, sound = Paceless(), Ticked()
        ticker.add(broken)
        ticker.add(sound)
        assert [True] * 4 == [guard.is_asked() for guard in (broken, sound, broken, sound)]
    assert "could not ask the policies of" in caplog.text


def test_a_thread_that_cannot_be_started_is_tried_again(ticker: Ticker, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started now, it is tried again later."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    guard = Ticked()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            ticker.add(guard)
    ticker.add(guard)
    assert guard.is_asked()


@traces_instructions
def test_a_signal_handler_that_raises_before_it_has_begun_is_not_its_end() -> None:
    """As Celery's time limits do: else no policy of this process would be asked any more. The next guard starts it."""
    before = threads()
    for ticker, where in interrupted_everywhere(Ticker, lambda made: made.add(Ticked())):
        guard = Ticked()
        ticker.add(guard)
        assert guard.is_asked(), where
        ticker.remove(guard)
    gc.collect()  # the last one's guard, which frames that were traced refer to
    until(lambda: [] == new(before))


def test_a_guard_may_be_brought_from_within(ticker: Ticker) -> None:
    """A lease that the garbage collector finds dropped may add a guard in the middle of the ticker's own work."""
    guard = Ticked()
    with ticker._lock:
        ticker.add(guard)
    assert guard.is_asked()


def test_a_child_starts_its_own(ticker: Ticker) -> None:
    """After a fork the child's guards are checked by its own thread."""
    guard = Ticked()
    ticker.add(guard)
    ticker.before_fork()
    ticker.after_fork_in_parent()
    ticker.before_fork()
    ticker.after_fork_in_child()  # what the parent's thread is to the child: not there
    assert guard.is_asked()


def test_a_stopped_ticker_keeps_its_guards_for_its_children(ticker: Ticker) -> None:
    """A process that forks has no such thread from then on; its children have one, and check its guards."""
    before = threads()
    first, second = Ticked(), Ticked()
    ticker.add(first)
    assert first.is_asked()
    ticker.stop()
    ticker.stop()
    ticker.add(second)
    assert [] == new(before)
    ticker.before_fork()
    ticker.after_fork_in_child()
    ticker.start_again()
    assert first.is_asked()
    assert second.is_asked()


def test_goes_on_while_guards_come_and_go(ticker: Ticker) -> None:
    """Other threads make and drop guards at any moment, also while it goes through them."""
    many = [Ticked() for _ in range(2000)]
    for one in many:
        ticker.add(one)
    interval, until_then = sys.getswitchinterval(), time.monotonic() + 1
    sys.setswitchinterval(1e-6)
    try:
        while time.monotonic() < until_then:
            another = Ticked()
            ticker.add(another)
            ticker.remove(another)
    finally:
        sys.setswitchinterval(interval)
    assert many[0].is_asked()


@pytest.mark.timeout(60)
def test_the_collector_may_drop_guards_in_the_middle_of_its_work(ticker: Ticker) -> None:
    """Whatever code the collector interrupts, it never waits for a lock that this very code holds."""
    kept = Ticked()
    ticker.add(kept)
    until_then = time.monotonic() + 2

    def come_and_go() -> None:
        while time.monotonic() < until_then:
            owner, checked = Owner(), Ticked()
            ticker.add(checked)
            weakref.finalize(owner, ticker.remove, checked).atexit = False
            del owner, checked

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(1)
    passing = [threading.Thread(target=come_and_go, daemon=True) for _ in range(2)]
    try:
        for thread in passing:
            thread.start()
        for thread in passing:
            thread.join(30)
    finally:
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in passing), "the collector waits for a lock"
    assert kept.is_asked()


class TestGuards:
    def test_are_ticker_from_their_first_load(
        self, world: World, monkeypatch: pytest.MonkeyPatch, ticker: Ticker
    ) -> None:
        """A guard that is in use is asked in the background by itself: time passes for idle models too."""
        monkeypatch.setattr(_engine, "TICKER", ticker)
        object.__setattr__(world.system, "ticks", True)
        guarded = world.guard(reload_on=TTL("1h"))
        assert guarded.engine not in list(ticker._guards)  # others of this process may be
        guarded.load()
        world.tick(3600)
        until(lambda: guarded.status().generation == 2)
        guarded.close()
        assert guarded.engine not in list(ticker._guards)  # others of this process may be

    def test_a_dropped_guard_reloads_no_more(
        self, world: World, monkeypatch: pytest.MonkeyPatch, ticker: Ticker
    ) -> None:
        """Although the garbage collector has not run yet."""
        monkeypatch.setattr(_engine, "TICKER", ticker)
        object.__setattr__(world.system, "ticks", True)
        with use(lambda: world.system):
            guarded = guard(dict, reload_on=TTL("1h"))
        guarded.load()
        engine = weakref.ref(guarded.engine)
        assert [engine()] == list(ticker._guards)
        gc.disable()
        try:
            del guarded
            assert [] == list(ticker._guards)
            assert engine() is not None
        finally:
            gc.enable()

    def test_a_dropped_guard_that_its_loader_refers_to_is_freed(self, world: World) -> None:
        """As where an object's method loads the model of its guard; it was kept for ever."""

        class Service:
            def __init__(self) -> None:
                self.guard = guard(self.load, reload_on=None)

            def load(self) -> dict[str, str]:
                return {}

        with use(lambda: world.system):
            service = Service()
        service.guard.load()
        world.join()  # the thread of the load may still refer to it
        dropped = weakref.ref(service)
        del service
        gc.collect()
        assert dropped() is None

    def test_a_policy_of_ones_own_is_asked_again_after_no_thread_was_to_be_had(self, world: World) -> None:
        """One moment without a thread does not end the checks of a guard."""

        class Counted(Policy):
            asked = 0

            def due(self, now: Snapshot) -> bool:
                self.asked += 1
                return False

        policy = Counted()
        guarded = world.guard(reload_on=policy)
        guarded.load()
        start = world.system.start_thread

        def refuse(_work: Callable[[], None], _name: str) -> None:
            raise RuntimeError("can't start new thread")

        object.__setattr__(world.system, "start_thread", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            guarded.engine.tick()
        object.__setattr__(world.system, "start_thread", start)
        before = policy.asked
        guarded.engine.tick()
        world.join()
        assert before < policy.asked

    def test_fail_by_name_where_no_thread_is_to_be_had(
        self, world: World, monkeypatch: pytest.MonkeyPatch, ticker: Ticker
    ) -> None:
        """A guard that cannot be checked leaves no caller waiting, and is checked again later."""

        class Full:
            add = staticmethod(lambda _guard: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
            remove = staticmethod(lambda _guard: None)

        object.__setattr__(world.system, "ticks", True)
        guarded = world.guard()
        monkeypatch.setattr(_engine, "TICKER", Full)
        with pytest.raises(LoadFailed, match="can't start new thread") as failure:
            guarded.load(timeout=TIMEOUT)
        monkeypatch.setattr(_engine, "TICKER", ticker)
        world.tick(failure.value.retry_after)
        guarded.load()
        assert guarded.ready
        guarded.close()
