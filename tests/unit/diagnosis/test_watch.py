"""``watch``: decides, names the cause, rests a hundred times as long as it computes, and tells guards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from modelguard import Swap, guard, telemetry
from modelguard.diagnosis import watch
from modelguard.diagnosis._watch import Look, Observed, Watch, World
from modelguard.errors import InvalidOption
from modelguard.lifecycle import system
from modelguard.lifecycle.guard import ModelGuard
from modelguard.telemetry import Event, GrowthFound

MB = 10**6


@dataclass
class Service:
    """A process that is not there: it grows by so much between two looks, and something in it is counted."""

    growth: int = MB
    threads: int = 0
    cost: float = 0.0
    trimmed: int = 0
    free: int = 0
    calls: int = 0
    private: int = 100 * MB
    cpu: float = 0.0
    looks: int = 0
    left: int = 0
    events: list[Event] = field(default_factory=list)

    def world(self) -> World:
        return World(
            clock=lambda: 0.0,
            cpu=self._cpu,
            private=self._read,
            look=self._look,
            trim=lambda: self.trimmed + self.left * self.looks,
            free=lambda: self.free * self.calls + self.left * self.looks,
        )

    def _cpu(self) -> float:
        self.cpu += self.cost
        return self.cpu

    def _read(self) -> int:
        self.calls += 100
        self.private += self.growth
        return self.private

    def _look(self) -> Look:
        self.looks += 1
        return Look({"threads": 1 + self.threads * self.calls})

    def watch(self) -> Watch:
        return Watch("service", 10.0, lambda: self.calls, self.world())


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    yield
    system.note(None)


@pytest.fixture
def seen() -> Iterator[list[Event]]:
    events: list[Event] = []
    telemetry.set_hooks([events.append])
    yield events
    telemetry.set_hooks(None)


def test_the_cause_is_named_once(seen: list[Event]) -> None:
    """After 24 readings an event has the cause, and it is not repeated as long as it stays the same."""
    service = Service(threads=1)
    watching = service.watch()
    for _ in range(23):
        watching.step()
    assert [] == seen
    for _ in range(100):
        watching.step()
    assert ["threads"] == [event.cause for event in seen if isinstance(event, GrowthFound)]
    assert watching.found is not None
    assert (1.0, 23 * MB) == (watching.found.share, watching.found.growth)
    assert "2,400 more threads after 2,300 calls" == watching.found.seen


def test_guards_show_it_until_memory_is_steady_again(seen: list[Event]) -> None:
    """``status().growth`` is the event; it is gone when memory no longer grows, or when the watch is stopped."""
    nlp = guard(object, reload_on=None)
    service = Service(threads=1)
    watching = service.watch()
    for _ in range(24):
        watching.step()
    assert nlp.status().growth is watching.found
    service.growth = 0
    for _ in range(50):
        watching.step()
    assert (None, None) == (nlp.status().growth, watching.found)


def test_stopping_forgets(seen: list[Event]) -> None:
    """Nobody watches, so nothing is known."""
    service = Service(threads=1)
    with service.watch() as watching:
        for _ in range(24):
            watching.step()
    assert system.found() is None


def test_steady_memory_is_no_event(seen: list[Event]) -> None:
    """Nothing is looked at closely, except once at the start."""
    service = Service(growth=0)
    watching = service.watch()
    for _ in range(200):
        watching.step()
    assert ([], 1) == (seen, service.looks)


def test_without_calls_nothing_is_decided(seen: list[Event]) -> None:
    """Memory that grows while no call ends does not grow with the calls."""
    service = Service(threads=1)
    watching = Watch("service", 10.0, lambda: 7, service.world())
    for _ in range(100):
        watching.step()
    assert [] == seen


def test_guards_of_one_name_are_counted_each_for_itself(seen: list[Event]) -> None:
    """Two are on different generations, and no call ends: so nothing grows with the calls."""
    pair = [guard(object, reload_on=None, name="nlp") for _ in range(2)]
    for one in (*pair, pair[0]):
        one.reload()
        with one.lease():
            pass
    watching = Watch("service", 10.0, None, Service(threads=1).world())
    for _ in range(30):
        watching.step()
    assert [] == [event for event in seen if isinstance(event, GrowthFound)]


def test_a_rollback_counts_no_call_twice(seen: list[Event]) -> None:
    """The model that serves again goes on with the calls that it has had."""
    nlp = guard(object, reload_on=None, swap=Swap(keep_previous=True))
    watching = Watch("service", 10.0, None, Service(threads=1).world())
    for number in range(24):
        if number == 8:
            nlp.reload()
        if number == 16:
            nlp.rollback()
        for _ in range(5):
            with nlp.lease():
                pass
        watching.step()
    assert [5 * 23] == [event.calls for event in seen if isinstance(event, GrowthFound)]


def test_a_guard_that_is_made_later(seen: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth is found by the time, which was counted before, and then by the calls: never by both at once."""
    # Those of other tests may still be there.
    monkeypatch.setattr("modelguard.lifecycle.guard.guards._references", set())
    service, now = Service(threads=1), [0.0]
    watching = Watch("service", 10.0, None, replace(service.world(), clock=lambda: now[0]))
    made: list[ModelGuard[object]] = []
    for number in range(50):
        now[0] += 10.0
        if number == 10:
            made.append(guard(object, reload_on=None))
        for nlp in made:
            with nlp.lease():
                pass
        watching.step()
        if watching.found is not None:
            assert watching.found.calls == (230_000 if number < 47 else 23)
    assert watching.found is not None


def test_it_rests_a_hundred_times_as_long_as_it_computes() -> None:
    """At most 1 % of the time, whatever a look costs."""
    assert 10.0 == Service().watch().step()
    assert 400.0 == pytest.approx(Service(cost=4.0).watch().step())


def test_memory_that_was_free_from_the_start_is_no_cause(seen: list[Event]) -> None:
    """A trim gives some memory back in any process; only what has become free meanwhile counts."""
    watching = Service(threads=1, trimmed=20 * MB).watch()
    retaining = Service(threads=0, trimmed=20 * MB, free=9000).watch()
    for _ in range(24):
        watching.step()
        retaining.step()
    assert watching.found is not None
    assert retaining.found is not None
    assert ("threads", "retention") == (watching.found.cause, retaining.found.cause)


def test_what_a_look_has_left_is_not_what_the_service_has_freed(seen: list[Event]) -> None:
    """A census of many objects needs memory and frees it again: the trim comes before it, and counts no earlier one."""
    watching = Service(threads=1, left=20 * MB).watch()
    for _ in range(48):  # two decisions
        watching.step()
    assert watching.found is not None
    assert ("threads", 1.0) == (watching.found.cause, watching.found.share)


@pytest.mark.parametrize(("role", "threads"), [("owner", 1), ("mold", 0), ("importing", 0)])
def test_a_mold_only_forks(monkeypatch: pytest.MonkeyPatch, role: str, threads: int) -> None:
    """No thread is started in a mold, since its workers are watched; ``stop`` ends the thread."""
    monkeypatch.setattr("modelguard.isolation._processes.role", role)
    with watch(every="1h"):
        assert threads == len([thread for thread in threading.enumerate() if thread.name == "modelguard-watch"])
    for thread in threading.enumerate():
        if thread.name == "modelguard-watch":
            thread.join(10)
            assert not thread.is_alive()


def test_few_readings_cover_any_time() -> None:
    """A day of readings every ten seconds is kept as at most 48, which go back to the first."""
    observed = Observed("calls")
    for number in range(8640):
        observed.add(number, number * 1000)
    measured = observed.measured(Look(), Look(), 0)
    assert 24 <= len(measured.calls) < 48
    assert (0, "grows") == (measured.calls[0], observed.verdict())
    assert measured.calls[-1] > 8000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": "0.001s"}, "must be at least 0.05 s"),
        ({"every": "soon"}, "is not a valid duration"),
        ({"calls": 7}, "must be a function of no arguments, not an int"),
        ({"name": " "}, "must be text that is not empty"),
    ],
)
def test_bad_input(options: dict[str, object], says: str) -> None:
    """The error names the argument and the fix."""
    with pytest.raises(InvalidOption, match=says):
        watch(**options)  # type: ignore[arg-type]
