"""One thread asks the policies of all guards, and only while there is one to ask."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.unit.lifecycle.world import TIMEOUT, World, until

from modelguard import TTL
from modelguard.errors import LoadFailed
from modelguard.lifecycle import keeper
from modelguard.lifecycle.keeper import Keeper


class Kept:
    """Something to keep; tells when it was asked."""

    def __init__(self, pace: float = 0.05, check: Callable[[], None] = lambda: None) -> None:
        self._pace = pace
        self._check = check
        self.asked = threading.Event()

    def check(self) -> bool:
        self.asked.set()
        self._check()
        return False

    def pace(self) -> float:
        return self._pace

    def is_asked(self) -> bool:
        self.asked.clear()
        return self.asked.wait(TIMEOUT)


def fail() -> None:
    raise OSError("no /proc")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "modelguard-keeper"]


def new(before: list[threading.Thread]) -> list[threading.Thread]:
    """Those started since: a keeper of an earlier test may end its own at any time."""
    return [thread for thread in threads() if thread not in before]


@pytest.fixture
def kept() -> Iterator[Keeper]:
    """A keeper of this test alone, whose thread is gone afterwards."""
    before = threads()
    made = Keeper()
    yield made
    for guard in list(made._guards):
        made.forget(guard)
    until(lambda: [] == new(before))


def test_what_is_kept_is_asked_again_and_again(kept: Keeper) -> None:
    """Each guard is asked in the background, at the pace that it wants."""
    first, second = Kept(), Kept(pace=3600)
    kept.keep(first)
    kept.keep(second)
    assert [True] * 4 == [guard.is_asked() for guard in (first, second, first, second)]


def test_one_thread_serves_all(kept: Keeper) -> None:
    """However many guards there are, one thread keeps them."""
    before = threads()
    guards = [Kept() for _ in range(20)]
    for guard in guards:
        kept.keep(guard)
    assert 1 == len(new(before))
    assert all(guard.is_asked() for guard in guards)


def test_the_thread_ends_with_its_last_guard_and_comes_back_with_the_next(kept: Keeper) -> None:
    """Without guards there is no thread; a new guard brings a new one."""
    before = threads()
    for _ in range(2):
        guard = Kept()
        kept.keep(guard)
        assert guard.is_asked()
        kept.forget(guard)
        until(lambda: [] == new(before))


def test_a_guard_that_nobody_else_refers_to_is_let_go(kept: Keeper) -> None:
    """The keeper keeps no guard alive: one that is dropped without being closed is gone."""
    before = threads()
    guard = Kept()
    kept.keep(guard)
    assert guard.is_asked()
    del guard

    def gone() -> bool:
        gc.collect()
        return [] == new(before)

    until(gone)


def test_one_guard_s_trouble_is_no_other_s(kept: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    """Where one guard cannot be asked the others still are, and the log tells."""
    with caplog.at_level(logging.ERROR, "modelguard"):
        broken, sound = Kept(check=fail), Kept()
        kept.keep(broken)
        kept.keep(sound)
        assert [True] * 4 == [guard.is_asked() for guard in (broken, sound, broken, sound)]
    assert "could not ask the policies of" in caplog.text


def test_a_thread_that_cannot_be_started_is_tried_again(kept: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that gives no thread now may give one later."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    guard = Kept()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            kept.keep(guard)
    kept.keep(guard)
    assert guard.is_asked()


def test_a_guard_may_be_brought_from_within(kept: Keeper) -> None:
    """A lease that the garbage collector finds dropped may bring a guard in the middle of the keeper's own work."""
    guard = Kept()
    with kept._lock:
        kept.keep(guard)
    assert guard.is_asked()


def test_a_child_starts_its_own(kept: Keeper) -> None:
    """After a fork the child's guards are kept by a thread of its own."""
    guard = Kept()
    kept.keep(guard)
    kept.before_fork()
    kept.after_fork_in_parent()
    kept.before_fork()
    kept.after_fork_in_child()  # what the parent's thread is to the child: not there
    assert guard.is_asked()


def test_a_keeper_that_is_dismissed_keeps_its_guards_for_its_children(kept: Keeper) -> None:
    """A process that forks has no such thread from then on; its children have one, and ask the guards it had."""
    before = threads()
    first, second = Kept(), Kept()
    kept.keep(first)
    assert first.is_asked()
    kept.dismiss()
    kept.dismiss()
    kept.keep(second)
    assert [] == new(before)
    kept.before_fork()
    kept.after_fork_in_child()
    assert first.is_asked()
    assert second.is_asked()


class TestGuards:
    def test_are_kept_from_their_first_load(self, world: World, monkeypatch: pytest.MonkeyPatch, kept: Keeper) -> None:
        """A guard that is in use is asked in the background by itself: time passes for idle models too."""
        monkeypatch.setattr(keeper, "KEEPER", kept)
        object.__setattr__(world.runtime, "kept", True)
        guard = world.guard(reload_on=TTL("1h"))
        assert [] == list(kept._guards)
        guard.load()
        world.tick(3600)
        until(lambda: guard.status().generation == 2)
        guard.close()
        assert [] == list(kept._guards)

    def test_fail_by_name_where_no_thread_is_to_be_had(
        self, world: World, monkeypatch: pytest.MonkeyPatch, kept: Keeper
    ) -> None:
        """A guard that cannot be kept leaves nobody waiting, and is tried again in time."""

        class Full:
            keep = staticmethod(lambda _guard: (_ for _ in ()).throw(RuntimeError("can't start new thread")))

        object.__setattr__(world.runtime, "kept", True)
        guard = world.guard()
        monkeypatch.setattr(keeper, "KEEPER", Full)
        with pytest.raises(LoadFailed, match="can't start new thread") as failure:
            guard.load(timeout=TIMEOUT)
        monkeypatch.setattr(keeper, "KEEPER", kept)
        world.tick(failure.value.retry_after)
        guard.load()
        assert guard.ready
        guard.close()
