"""The owner's side of ``Idle(keep="mold")``, without processes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.isolation.test_pause import Process, Supervisor, answer
from tests.unit.lifecycle.world import until

from modelguard import Backoff, Idle, Isolated, Loading, guard, isolate, telemetry
from modelguard.errors import Reloading
from modelguard.isolation import _mold_owner
from modelguard.telemetry import Reason, WorkersReleased

WHY = (Reason("idle", "Idle('1h', keep='mold')"),)

kept = guard(dict, reload_on=Idle("1h", keep="mold"), loading=Loading(backoff=Backoff(0.01, 0.02)), name="model")(
    answer
)


class Mold(Process):
    """Has workers that can end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.go_on = threading.Event()
        self.go_on.set()
        self.called_back = 0
        self.workers.call_back = self.call_back

    def end_workers(self) -> int:
        assert self.go_on.wait(60)
        self.idle, self.workers.presence, self.workers.is_ready = True, "ended", False
        return 3

    def call_back(self) -> None:
        self.called_back += 1
        if self.called_back > 2:
            self.idle, self.workers.presence, self.workers.is_ready = False, "present", True


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Iterator[Isolated[Any, Any]]:
    """Its molds are no processes."""
    supervisor = Supervisor()
    monkeypatch.setattr(_mold_owner, "supervisor", lambda: supervisor)
    monkeypatch.setattr(_mold_owner, "Mold", Mold)
    monkeypatch.setattr(Mold, "made", [], raising=False)
    monkeypatch.setattr(Process, "fails", False)
    Process.gate.set()
    with isolate()(kept) as function:
        yield function


def molds_of(function: Isolated[Any, Any]) -> _mold_owner.MoldGuard:
    molds: _mold_owner.MoldGuard = function._scope._molds  # type: ignore[attr-defined]
    return molds


def end_workers(function: Isolated[Any, Any]) -> Mold:
    molds_of(function).end_workers(WHY)
    (mold,) = Mold.made
    until(lambda: bool(mold.idle))
    return mold  # type: ignore[return-value]


def test_it_is_idle_and_ready(function: Isolated[Any, Any]) -> None:
    """With a mold, and nothing to wait for."""
    assert ("ready", True) == (function.status().state, function.ready)
    end_workers(function)
    assert ("idle", True, 1) == (function.status().state, function.ready, function.status().mold)


def test_a_dead_mold_is_not_ready(function: Isolated[Any, Any]) -> None:
    """Whatever its workers were: a call has to wait for the next mold."""
    mold = end_workers(function)
    mold.died, mold.idle = time.monotonic(), False
    assert (False, "ready", None) == (function.ready, function.status().state, function.status().mold)


def test_one_end_at_a_time_is_reported(function: Isolated[Any, Any]) -> None:
    """However often the policy is asked meanwhile."""
    events: list[WorkersReleased] = []
    remove = telemetry.add_hook(lambda event: events.append(event) if isinstance(event, WorkersReleased) else None)
    (mold,) = Mold.made
    mold.go_on.clear()  # type: ignore[attr-defined]
    for _ in range(10):
        molds_of(function).end_workers(WHY)
    mold.go_on.set()  # type: ignore[attr-defined]
    until(lambda: bool(events))
    remove()
    assert [(3, WHY)] == [(event.workers, event.reasons) for event in events]


def test_where_the_system_gives_no_thread(function: Isolated[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look tries again."""

    def refuse(_work: object, _name: str) -> None:
        raise RuntimeError("can't start new thread")

    engine = molds_of(function).guard.engine
    with monkeypatch.context() as patched:
        patched.setattr(engine, "system", dataclasses.replace(engine.system, start_thread=refuse))
        molds_of(function).end_workers(WHY)
    assert not Mold.made[0].idle
    end_workers(function)


def test_load_waits_for_a_worker(function: Isolated[Any, Any]) -> None:
    """Up to its timeout."""
    mold = end_workers(function)
    with pytest.raises(Reloading):
        function.load(timeout=0)
    function.load()
    assert (True, "ready", False) == (mold.called_back > 2, function.status().state, mold.idle)
