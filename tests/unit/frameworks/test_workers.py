"""``_workers``: when a worker asks to be replaced, and whose turn it is to go. Nothing is forked here."""

from __future__ import annotations

from typing import Any

import pytest

from modelguard import guard, prefork
from modelguard.errors import InvalidOption
from modelguard.frameworks import _workers
from modelguard.frameworks._workers import PreforkOptions, SharedState, Workers
from modelguard.sharing import _prefork


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """A worker of a prepared parent, as it is after the fork."""
    monkeypatch.setattr(PreforkOptions, "prepare", lambda self, guards: None)
    monkeypatch.setattr(_workers.background.TICKER, "stop", lambda: None)
    monkeypatch.setattr(prefork, "in_child", lambda: None)
    one = Workers((guard(dict, reload_on=None, name="nlp"),), PreforkOptions(), min_lifetime="10s", clock=clock)
    one.prepare()
    one.begin()
    return one


def test_a_worker_leaves_once_when_a_policy_has_asked_and_it_is_old_enough(worker: Workers, clock: Clock) -> None:
    """Not before ``min_lifetime``, whatever its policies say; and repeated requests count once."""
    clock.now += 60
    assert not worker.must_end(), "nobody asked"
    worker.begin()
    worker._policy_due(("Uses(5)",))
    assert not worker.must_end()
    clock.now += 10
    assert [True, False] == [worker.must_end(), worker.must_end()]


def test_new_weights_are_a_reason_to_leave_at_any_age(worker: Workers) -> None:
    """The parent has prepared again: workers that were forked before go, though no policy of their own is due."""
    worker._shared.weights_version += 1
    assert worker.must_end()


def test_workers_leave_one_at_a_time(worker: Workers, clock: Clock) -> None:
    """The next one stays until the replacement of the last has arrived, or has failed to for a minute."""
    board = worker._shared
    assert [True, False] == [board.try_leave(clock()), board.try_leave(clock())]
    board.worker_started()
    assert board.try_leave(clock())
    clock.now += 59
    assert not board.try_leave(clock())
    clock.now += 1
    assert board.try_leave(clock()), "nobody comes: the others need not wait for ever"


def test_a_board_begins_with_the_first_edition_and_nobody_gone() -> None:
    """A new board asks no worker to end."""
    board = SharedState()
    assert 0 == board.weights_version
    board.weights_version = 2**40
    assert 2**40 == board.weights_version


@pytest.mark.parametrize("value", [-1, "soon", None])
def test_a_lifetime_that_cannot_be_meant_is_refused(value: Any) -> None:
    """By the name that the caller wrote."""
    with pytest.raises(InvalidOption, match="min_lifetime"):
        Workers((), PreforkOptions(), min_lifetime=value)


def test_new_weights_are_prepared_once_for_each_load(worker: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an unprepared generation is prepared; after a failure the next load is tried, and no worker has to end."""
    monkeypatch.setattr(_prefork, "loading", lambda: None)  # the old generation may still be on its way out
    prepared: list[int] = []
    monkeypatch.setattr(Workers, "log", lambda self, report: None)

    def prepare(self: PreforkOptions, guards: Any) -> str:
        prepared.append(guards[0].status().generation)
        return "a report"

    monkeypatch.setattr(PreforkOptions, "prepare", prepare)
    one = worker._guards[0]
    worker._models.prepared = worker._models._generations()
    worker._renew()
    assert [] == prepared
    one.reload()
    worker._renew()
    worker._renew()
    assert ([one.status().generation], 1) == (prepared, worker._shared.weights_version)

    def refuse(self: PreforkOptions, guards: Any) -> None:
        raise OSError("not now")

    monkeypatch.setattr(PreforkOptions, "prepare", refuse)
    one.reload()
    with pytest.raises(OSError, match="not now"):
        worker._renew()
    worker._renew()
    assert 1 == worker._shared.weights_version


@pytest.mark.parametrize("given", ["nlp", dict, [guard(dict, reload_on=None, name="nlp")]])
def test_what_is_no_guard_is_refused_at_once(given: Any) -> None:
    """The error comes where ``install()`` is written, and not in the log of a worker that does not start."""
    with pytest.raises(InvalidOption, match="must be guards"):
        Workers((given,), PreforkOptions(), min_lifetime="10s")
