"""Policies that must wait: ``pause()`` and ``resume()``, and ``min_lifetime``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.lifecycle.world import MB, World, number, until

from modelguard import TTL, Errors, MemoryLimit, ModelGuard, Policy, Snapshot, Uses
from modelguard.errors import InvalidOption
from modelguard.facts._proc import maps, paused_in
from modelguard.lifecycle.status import Postponed
from modelguard.telemetry import (
    GuardPaused,
    GuardResumed,
    LoadStarted,
    Reason,
    RecycleAsked,
    ReloadDue,
    ReloadPostponed,
)


def check(world: World, guard: ModelGuard[object], seconds: float = 0.0) -> int:
    """Let time pass, ask the policies as the ticker does, and give the generation then."""
    world.tick(seconds)
    guard.check()
    world.join()
    return guard.status().generation


def waits_for_quiet(world: World) -> tuple[ModelGuard[object], threading.Event, threading.Event]:
    """A guard whose next check starts a reload that waits for a moment without calls.

    The first event is set once it waits; setting the second lets it go on.
    """
    waiting, go = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        waiting.set()
        assert go.wait(60)
        world.tick(seconds)

    guard = world.guard(reload_on=TTL("1h", jitter=0), defer="5s", system=replace(world.system, sleep=sleep))
    guard.load()
    world.tick(3600)
    return guard, waiting, go


class TestPause:
    def test_a_policy_that_tells_figures_is_reported_once(self, world: World) -> None:
        """The status has the latest ones; another policy is reported when it is due as well."""

        class Figures(Policy):
            def due(self, now: Snapshot) -> bool:
                return True

            def reasons(self, now: Snapshot) -> tuple[Reason, ...]:
                return (Reason("custom", f"{now.age:.0f} s"), Reason("custom", f"{now.uses} uses"))

        guard = world.guard(reload_on=Figures() | TTL("10s", jitter=0), defer=0)
        guard.load()
        guard.pause()
        for _ in range(12):
            check(world, guard, 1)
        told = [tuple(map(str, event.reasons)) for event in world.seen(ReloadPostponed)]
        assert [("1 s", "0 uses"), ("TTL('10s')",)] == told
        assert "12 s" in map(str, guard.status().postponed.reasons)  # type: ignore[union-attr]

    def test_the_status_says_what_waits(self, world: World) -> None:
        """Which policies are due, why it waits, and for how long: nobody knows."""
        guard = world.guard(reload_on=TTL("1h", jitter=0), defer=0)
        guard.load()
        guard.pause()
        check(world, guard)
        assert (True, None) == (guard.status().paused, guard.status().postponed)
        check(world, guard, 3600)
        reasons = (Reason("ttl", "TTL('1h')"),)
        assert Postponed(reasons=reasons, cause="paused", seconds=None) == guard.status().postponed
        guard.resume()
        assert None is guard.status().postponed

    def test_each_policy_is_reported_once(self, world: World) -> None:
        """A ``MemoryLimit`` too, that becomes due after another policy: the log is not filled."""
        guard = world.guard(reload_on=TTL("1h", jitter=0) | MemoryLimit("200 MB"), defer=0)
        guard.load()
        for _ in range(3):
            check(world, guard, 5)
        guard.pause()
        for _ in range(5):
            check(world, guard, 3600)
        world.memory = 300 * MB
        for _ in range(10):
            check(world, guard, 60)
        seen = [
            ([reason.kind for reason in event.reasons], event.cause, event.seconds)
            for event in world.seen(ReloadPostponed)
        ]
        assert [(["ttl"], "paused", None), (["memory_limit"], "paused", None)] == seen

    def test_what_is_no_longer_due_no_longer_waits(self, world: World) -> None:
        """A call that succeeds ends a row of errors, and nothing happens after ``resume()``."""
        guard = world.guard(reload_on=Errors(1), defer=0)

        def call(*, fails: bool) -> None:
            with guard.lease():
                if fails:
                    raise OSError

        guard.load()
        guard.pause()
        with pytest.raises(OSError):  # noqa: PT011 - the call's own
            call(fails=True)
        assert "paused" == getattr(guard.status().postponed, "cause", None)
        call(fails=False)
        check(world, guard)
        assert None is guard.status().postponed
        guard.resume()
        assert 1 == check(world, guard)

    def test_no_process_is_replaced(self, world: World) -> None:
        """Where a due policy asks the server for a fresh process, it does not ask."""
        guard = world.guard(reload_on=Uses(1))
        asked: list[object] = []
        guard.recycle_here(asked.append)
        guard.load()
        guard.pause()
        number(guard)
        check(world, guard)
        assert ([], []) == (asked, world.seen(RecycleAsked))
        guard.resume()
        check(world, guard)
        assert 1 == len(asked)

    def test_a_failed_reload_is_not_tried_again(self, world: World) -> None:
        """While the old model serves; ``resume()`` goes on with it."""
        guard = world.guard(reload_on=Uses(1), defer=0)
        guard.load()
        world.loader.fails = True
        number(guard)
        check(world, guard)
        world.loader.fails = False
        guard.pause()
        for _ in range(5):
            assert 1 == check(world, guard, 60)
        assert ("degraded", 2) == (guard.status().state, world.loader.calls)
        assert guard.engine.check_interval() >= 1
        guard.resume()
        assert 2 == check(world, guard)

    def test_a_service_without_a_model_comes_up(self, world: World) -> None:
        """Loads that calls need go on: the first one, and the retry of one that failed."""
        guard = world.guard(reload_on=Uses(1), swap="drain_first", defer=0)
        guard.pause()
        assert 1 == number(guard)
        world.loader.fails = world.loader.recovers_after_this = True
        guard.reload(wait=False)
        world.join()
        assert "failed" == guard.status().state
        assert 2 == check(world, guard, 60)

    def test_a_reload_that_waits_for_its_beginning_is_given_up(self, world: World) -> None:
        """It was due before the pause, and waits for a moment without calls: it does not begin afterwards."""
        guard, waiting, go = waits_for_quiet(world)
        assert guard.check()
        assert waiting.wait(60)
        guard.pause()
        go.set()
        world.join()
        assert (1, "ready", 1) == (guard.status().generation, guard.status().state, len(world.seen(LoadStarted)))
        guard.resume()
        assert 2 == check(world, guard)

    def test_a_request_keeps_the_reload_that_waits(self, world: World) -> None:
        """``reload()`` joins the one that is due, which the pause then does not end."""
        guard, waiting, go = waits_for_quiet(world)
        guard.check()
        assert waiting.wait(60)
        guard.reload(wait=False)
        guard.pause()
        go.set()
        world.join()
        assert 2 == guard.status().generation

    def test_a_request_after_the_pause_is_answered(self, world: World) -> None:
        """The reload that was given up and the one that is asked for do not lose each other."""
        guard, waiting, go = waits_for_quiet(world)
        guard.check()
        assert waiting.wait(60)
        guard.pause()
        caller = world.spawn(guard.reload)
        until(lambda: len(guard.engine.state.waiting) == 1)
        go.set()
        caller.result(60)
        assert 2 == guard.status().generation

    def test_an_unload_gives_the_reload_that_waits_up(self, world: World) -> None:
        """``unload()`` waits neither for a pause between calls nor for another model's turn, and loads nothing."""
        guard, waiting, go = waits_for_quiet(world)
        guard.check()
        assert waiting.wait(60)
        unloading = world.spawn(guard.unload)
        until(lambda: getattr(guard.engine.state, "unloads", 0))
        go.set()
        unloading.result(60)
        assert ("idle", 1) == (guard.status().state, len(world.seen(LoadStarted)))
        assert 2 == number(guard)

    def test_a_load_that_has_begun_goes_on(self, world: World) -> None:
        """Its model is installed: to throw it away would cost a second load."""
        guard = world.guard(reload_on=Uses(1), defer=0)
        guard.load()
        world.loader.hold()
        number(guard)
        guard.check()
        world.loader.reached()
        guard.pause()
        world.loader.open.set()
        world.join()
        assert 2 == guard.status().generation

    def test_is_no_counter(self, world: World) -> None:
        """Twice is once, in any state of the guard; each change has one event."""
        guard = world.guard()
        guard.resume()
        for _ in range(3):
            guard.pause()
        guard.resume()
        guard.resume()
        guard.close()
        guard.pause()
        assert (2, 1, True) == (len(world.seen(GuardPaused)), len(world.seen(GuardResumed)), guard.status().paused)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no /proc")
def test_other_processes_can_see_a_pause(world: World) -> None:
    """``modelguard top`` reads it from ``/proc``, as long as it lasts."""
    guard, other = (world.guard(name=f"{name}-{os.getpid()}") for name in ("=paused\n", "other"))

    def shown() -> list[str]:
        return [name for name in paused_in(maps()) if name.endswith(f"-{os.getpid()}")]

    for _ in range(2):
        guard.pause()
    assert [rf"=paused\n-{os.getpid()}"] == shown()
    guard.resume()
    pool = world.pool(name=f"pool-{os.getpid()}")
    pool.pause()
    assert [f"pool-{os.getpid()}"] == shown()
    pool.resume()
    other.resume()
    assert [] == shown()


class TestMinLifetime:
    def test_a_young_model_is_not_replaced(self, world: World) -> None:
        """A policy that is due at once after each load causes one reload each time, not a storm."""
        guard = world.guard(reload_on=Uses(1), min_lifetime="1m", defer=0)
        guard.load()
        for _ in range(600):
            number(guard)
            check(world, guard, 1)
        assert 11 == guard.status().generation

    def test_the_status_says_how_long_it_waits(self, world: World) -> None:
        """And the event, once."""
        guard = world.guard(reload_on=Uses(1), min_lifetime="1m", defer=0)
        guard.load()
        check(world, guard, 10)
        number(guard)
        check(world, guard, 20)
        waits = guard.status().postponed
        assert waits is not None
        assert ("min_lifetime", 30) == (waits.cause, waits.seconds)
        assert [50] == [event.seconds for event in world.seen(ReloadPostponed)]
        assert guard.engine.check_interval() <= 1
        assert 2 == check(world, guard, 30)
        assert None is guard.status().postponed

    def test_memory_waits_too(self, world: World) -> None:
        """A limit that the fresh model is soon above again is what makes storms."""
        guard = world.guard(reload_on=MemoryLimit("200 MB"), min_lifetime="10m", defer=0)
        guard.load()
        for _ in range(4):
            check(world, guard, 5)
        world.memory = 300 * MB
        for _ in range(4):
            assert 1 == check(world, guard, 10)
        assert ["memory_limit"] == [reason.kind for event in world.seen(ReloadPostponed) for reason in event.reasons]
        assert 2 == check(world, guard, 600)

    def test_reload_and_unload_by_hand_do_not_wait(self, world: World) -> None:
        """The bound is on policies."""
        guard = world.guard(reload_on=Uses(1), min_lifetime="1m")
        guard.load()
        guard.reload()
        guard.unload()
        assert ("idle", 1) == (guard.status().state, guard.status().reloads)

    def test_a_failed_load_waits_for_its_backoff_alone(self, world: World) -> None:
        """The bound concerns models that serve."""
        guard = world.guard(reload_on=Uses(1), min_lifetime="1h", defer=0)
        world.loader.fails = world.loader.recovers_after_this = True
        with pytest.raises(Exception, match="no weights"):
            guard.load()
        world.join()
        assert 1 == check(world, guard, 2)

    @given(st.lists(st.tuples(st.sampled_from(["call", "check", "pause", "resume"]), st.floats(0, 30)), max_size=60))
    @settings(max_examples=60)
    def test_models_live_at_least_that_long(
        self, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, float]]
    ) -> None:
        """Whatever happens, two loads by policies are a minute apart, and none begins while the guard is paused."""
        world = World(tmp_path_factory.mktemp("world"))
        world.inline = True
        loads: list[float] = []

        def load() -> object:
            loads.append(world.now)
            return object()

        guard = world.guard(load, reload_on=Uses(2) | Errors(1), min_lifetime="1m", defer=0)
        guard.load()
        paused = False
        for step, seconds in steps:
            world.tick(seconds)
            before = len(loads)
            if step == "call":
                with guard.lease():
                    pass
            elif step == "check":
                guard.check()
            else:
                paused = step == "pause"
                (guard.pause if paused else guard.resume)()
            assert not (paused and len(loads) > before)
        assert all(later - earlier >= 60 for earlier, later in pairwise(loads))

    @pytest.mark.parametrize("policy", [TTL("30s"), Uses(5) | TTL("30s")])
    def test_longer_than_a_ttl_is_rejected(self, world: World, policy: Policy) -> None:
        """That ``TTL`` could never mean what it says."""
        with pytest.raises(InvalidOption, match=r"min_lifetime='1m': is longer than TTL\('30s'\).*at most '30s'"):
            world.guard(reload_on=policy, min_lifetime="1m")

    def test_together_with_a_ttl_in_a_combination(self, world: World) -> None:
        """Where the ``TTL`` only restricts another policy, any length is accepted."""
        assert world.guard(reload_on=TTL("30s") & Uses(5), min_lifetime="1m").reload_on is not None


@pytest.mark.parametrize("act", [ModelGuard.pause, ModelGuard.resume])
def test_a_guard_without_policies(world: World, act: Callable[[ModelGuard[object]], None]) -> None:
    """Pausing it changes nothing and starts no thread."""
    guard = world.guard()
    guard.load()
    act(guard)
    assert (1, []) == (check(world, guard), world.seen(ReloadDue))
