"""When policies are asked, and how rarely."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from tests.unit.lifecycle.world import TIMEOUT, World, outcome, until

from modelguard import TTL, Backoff, Errors, Loading, ModelGuard, Policy, Snapshot, Uses
from modelguard.errors import LoadFailed
from modelguard.telemetry import ReloadDue


def use(guard: ModelGuard[Any], times: int = 1) -> None:
    for _ in range(times):
        with guard.lease():
            pass


class Counting(Policy):
    """Due never; counts how often it is asked."""

    def __init__(self, uses: float = math.inf, seconds: float = math.inf) -> None:
        self._next_check = uses, seconds
        self.asked = 0

    def due(self, now: Snapshot) -> bool:
        self.asked += 1
        return False

    def next_check(self, now: Snapshot) -> Any:
        return type(super().next_check(now))(*self._next_check)


def test_calls_pass_by_until_the_answer_may_change(world: World) -> None:
    """A policy that wants to be asked in ten calls is asked once in ten calls, not at each."""
    policy = Counting(uses=10)
    guard = world.guard(reload_on=policy)
    guard.load()
    use(guard, 35)
    assert 3 == policy.asked


def test_errors_are_looked_at_at_once(world: World) -> None:
    """After a call that raises, the policy is asked whatever it wanted."""
    policy = Counting()
    guard = world.guard(reload_on=policy)
    guard.load()
    world.join()  # while a load ends, nobody is asked
    use(guard, 5)
    with pytest.raises(ValueError, match="bad"), guard.lease():
        raise ValueError("bad")
    assert 1 == policy.asked


def test_a_ttl_passes_for_idle_guards(world: World) -> None:
    """The ticker checks policies in time, so an unused model is replaced as well."""
    guard = world.guard(reload_on=TTL("1h", jitter=0))
    guard.load()
    assert (False, 1.0) == (guard.check(), min(guard.engine.check_interval(), 1.0))
    world.tick(3600)
    assert guard.check()
    world.join()
    assert (2, ("TTL('1h')",)) == (guard.status().generation, world.reasons(ReloadDue))


def test_each_generation_draws_its_own_chance(world: World) -> None:
    """Jitter is drawn anew at each load."""
    guard = world.guard(reload_on=TTL("1h"))
    drawn = []
    for world.draw in (0.25, 0.5):
        guard.reload()
        assert guard.engine.state.current is not None
        drawn.append(guard.engine.state.current.jitter)
    assert [0.25, 0.5] == drawn


@pytest.mark.parametrize(("loads", "draw", "seconds"), [(1, 0.0, 100), (1, 0.5, 75), (2, 0.0, 100), (2, 0.5, 95)])
def test_a_draw_shortens_the_ttl_of_a_guard(world: World, loads: int, draw: float, seconds: float) -> None:
    """Processes that loaded together do not reload together, and are far apart from the first reload on."""
    world.draw = draw
    guard = world.guard(reload_on=TTL("100s"))
    for _ in range(loads):
        guard.reload()
        world.join()
    world.tick(seconds - 0.1)
    assert not guard.check()
    world.tick(0.2)
    assert guard.check()


def test_nothing_is_asked_without_a_generation(world: World) -> None:
    """A guard that has not loaded, or loads for the first time, has no policies to check."""
    policy = Counting()
    guard = world.guard(reload_on=policy)
    assert (False, math.inf, 0) == (guard.check(), guard.engine.check_interval(), policy.asked)
    world.loader.hold()
    world.spawn(guard.load)
    world.loader.reached()
    assert (False, 0) == (guard.check(), policy.asked)


def test_nothing_is_asked_while_a_reload_is_under_way(world: World) -> None:
    """The verdict has been reached already."""
    policy = Counting()
    guard = world.guard(reload_on=policy)
    guard.load()
    world.loader.hold()
    guard.reload(wait=False)
    world.loader.reached()
    assert (False, 0) == (guard.check(), policy.asked)


def test_two_threads_do_not_ask_at_once(world: World) -> None:
    """While one thread asks, others pass by without waiting: one verdict is enough."""
    asking, go_on = threading.Event(), threading.Event()

    class Slow(Policy):
        def due(self, now: Snapshot) -> bool:
            asking.set()
            assert go_on.wait(TIMEOUT)
            return False

    guard = world.guard(reload_on=Slow())
    guard.load()
    first = world.spawn(use, guard)
    assert asking.wait(TIMEOUT)
    assert not guard.check()
    go_on.set()
    assert outcome(first) is None


def test_a_guard_without_a_policy_needs_no_keeping(world: World) -> None:
    """With ``reload_on=None`` nothing is ever due, whatever happens."""
    guard = world.guard()
    use(guard, 5)
    world.join()
    world.tick(10**9)
    assert (False, math.inf, 1) == (guard.check(), guard.engine.check_interval(), guard.status().generation)


@pytest.mark.parametrize("swap", ["load_first", "drain_first"])
def test_a_failed_guard_is_asked_when_its_retry_is_due(world: World, swap: str) -> None:
    """After a failure the ticker checks again when the backoff has passed, whether a generation serves or not."""
    guard = world.guard(swap=swap, loading=Loading(backoff=Backoff("8s")))
    guard.load()
    world.loader.fails = True
    with pytest.raises(LoadFailed):
        guard.reload()
    world.join()
    world.tick(1)
    assert (False, 3.0) == (guard.check(), guard.engine.check_interval())


def test_the_end_of_a_call_retries_as_well(world: World) -> None:
    """A degraded guard with traffic does not depend on the ticker: the end of a call may begin the retry."""
    guard = world.guard(reload_on=Uses(2), loading=Loading(backoff=Backoff("8s")))
    guard.load()
    world.loader.fails = True
    use(guard, 2)
    world.join()
    assert "degraded" == guard.status().state
    world.loader.fails = False
    use(guard, 3)
    assert "degraded" == guard.status().state
    world.tick(4)
    use(guard)
    world.join()
    assert ("ready", 2) == (guard.status().state, guard.status().generation)


def test_a_fault_after_a_load_loses_no_request(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the policies cannot be checked after a load, callers waiting for the next one get it; the log reports it."""
    guard = world.guard()

    def fail() -> None:
        raise OSError("no clock")

    monkeypatch.setattr(guard.engine.checks, "_begin_with_current", fail)
    world.loader.hold()
    first = world.spawn(guard.load)
    world.loader.reached()
    second = world.spawn(guard.reload)
    until(lambda: len(guard.engine.state.waiting) == 2)
    world.loader.open.set()
    assert (None, None) == (outcome(first), outcome(second))
    world.join()
    assert 2 == guard.status().generation
    assert "could not ask the policies of guard 'model'" in caplog.text


def test_joined_policies_name_all_that_are_due(world: World) -> None:
    """The event lists each policy that is due at that moment."""
    world.inline = True
    guard = world.guard(reload_on=Uses(2) | TTL("1m", jitter=0) | Errors(consecutive=1))
    use(guard)
    world.tick(60)
    with pytest.raises(ValueError, match="bad"), guard.lease():
        raise ValueError("bad")
    assert ("Uses(2)", "TTL('1m')", "Errors(consecutive=1)") == world.reasons(ReloadDue)


def test_a_call_that_ends_as_a_load_ends_does_not_lose_what_is_due(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has seen the load under way, and the load's thread cannot ask while the call does: one asks again."""
    guard = world.guard(reload_on=Uses(3))
    guard.load()
    world.join()
    checks = guard.engine.checks
    evaluate = checks._due_now

    def while_the_load_ends(*, sample: bool) -> Any:
        monkeypatch.setattr(checks, "_due_now", evaluate)
        assert not checks.ask(sample=False, insist=True)  # as the load's thread does
        return None  # there was a load

    monkeypatch.setattr(checks, "_due_now", while_the_load_ends)
    use(guard, 3)
    world.join()
    assert 2 == guard.status().generation
