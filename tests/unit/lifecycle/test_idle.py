"""Models that are released until their next use: ``Idle`` and ``unload()``."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, World, number, outcome, until

from modelguard import TTL, Between, Idle, ModelGuard, Policy, Uses, replicas
from modelguard.errors import InvalidOption, LoadFailed, PolicyNeverFires, Reloading, WouldDeadlock
from modelguard.lifecycle import _engine
from modelguard.lifecycle._lease import Lease
from modelguard.lifecycle.policies import subset
from modelguard.telemetry import GenerationReleased, IdleEnded, LoadStarted, Reason, ReloadDue, UnloadStarted


def idle_for(world: World, guard: ModelGuard[object], seconds: float) -> None:
    """Let time pass as the ticker does, which checks every second."""
    world.join()  # what the last call has started may still be evaluating, and two do not at once
    guard.check()
    for _ in range(int(seconds)):
        world.tick(1.0)
        guard.check()
        world.join()


class TestIdle:
    def test_releases_the_model_once_nobody_has_used_it(self, world: World) -> None:
        """Not earlier, and its memory comes back; an event says why."""
        world.model_size = 50 * MB
        guard = world.guard(reload_on=Idle("10s"))
        guard.load()
        number(guard)
        guard.check()
        before = world.memory
        idle_for(world, guard, 9)
        assert ("ready", 50 * MB) == (guard.status().state, world.memory - before + 50 * MB)
        idle_for(world, guard, 1)
        assert ("idle", before - 50 * MB) == (guard.status().state, world.memory)
        assert ("Idle('10s')",) == world.reasons(UnloadStarted)
        assert 1 == len(world.seen(GenerationReleased))

    def test_ends_with_the_guard(self, world: World) -> None:
        """An event says so, once: a closed guard waits for no next use."""
        guard = world.guard(reload_on=Idle("10s"))
        guard.load()
        guard.close()
        assert [] == world.seen(IdleEnded)
        with guard:
            idle_for(world, guard, 11)
        guard.close()
        assert 1 == len(world.seen(IdleEnded))

    def test_the_next_call_loads_it_again(self, world: World) -> None:
        """One load, whose reason says that it was woken; it counts as no reload."""
        guard = world.guard(reload_on=Idle("10s"))
        assert 1 == number(guard)
        idle_for(world, guard, 11)
        assert 2 == number(guard)
        assert (("next use",), 0, "ready") == (
            world.reasons(LoadStarted),
            guard.status().reloads,
            guard.status().state,
        )

    def test_every_call_starts_the_time_anew(self, world: World) -> None:
        """A call each nine seconds keeps the model for as long as they come."""
        guard = world.guard(reload_on=Idle("10s"))
        for _ in range(10):
            assert 1 == number(guard)
            idle_for(world, guard, 9)
        idle_for(world, guard, 2)
        assert "idle" == guard.status().state

    def test_a_call_that_has_just_begun_keeps_the_model(self, world: World) -> None:
        """It begins between the check and the release: nobody waits, and the model stays."""
        calls: list[Lease[Any]] = []

        def start(work: Callable[[], None], name: str) -> None:
            if calls:
                calls[0].__enter__()
            world.start(work, name)

        guard = world.guard(reload_on=Idle("10s"), system=dataclasses.replace(world.system, start_thread=start))
        guard.load()
        number(guard)
        guard.check()
        world.tick(11)
        calls.append(guard.lease())
        guard.check()
        world.join()
        assert ("ready", []) == (guard.status().state, world.seen(UnloadStarted))
        calls.pop().__exit__(None, None, None)
        idle_for(world, guard, 12)
        assert "idle" == guard.status().state

    def test_a_reload_that_comes_before_a_release_is_not_lost(self, world: World) -> None:
        """Also where a call that begins in that moment keeps the model: ``reload()`` would wait for ever."""
        waiting: list[Future[None]] = []

        def start(work: Callable[[], None], name: str) -> None:
            if calls:
                calls.pop().__enter__()
                waiting.append(world.spawn(guard.reload))
                until(lambda: bool(guard.engine.state.waiting))
            world.start(work, name)

        guard = world.guard(
            reload_on=Idle("10s"), defer=0, system=dataclasses.replace(world.system, start_thread=start)
        )
        calls: list[Lease[Any]] = []
        guard.load()
        number(guard)
        guard.check()
        world.tick(11)
        lease = guard.lease()
        calls.append(lease)
        guard.check()
        until(lambda: 2 == guard.engine.state.generations)
        lease.__exit__(None, None, None)
        outcome(waiting[0])
        assert [] == world.seen(UnloadStarted)

    def test_a_reload_that_comes_before_a_release_that_cannot_start(self, world: World) -> None:
        """The system gives no thread for the release, and one for the load that was requested meanwhile."""
        waiting: list[Future[None]] = []

        def start(work: Callable[[], None], name: str) -> None:
            if idle and not waiting:
                waiting.append(world.spawn(guard.reload))
                until(lambda: bool(guard.engine.state.waiting))
                raise RuntimeError("can't start new thread")
            world.start(work, name)

        guard = world.guard(
            reload_on=Idle("10s"), defer=0, system=dataclasses.replace(world.system, start_thread=start)
        )
        idle = False
        guard.load()
        number(guard)
        guard.check()
        idle = True
        world.tick(11)
        guard.check()
        outcome(waiting[0])
        assert 2 == number(guard)

    def test_beside_other_policies(self, world: World) -> None:
        """They replace the model while it is used; what nobody uses is released and not replaced."""
        guard = world.guard(reload_on=Uses(2) | TTL("4s", jitter=0) | Idle("10s"), defer=0)
        assert [1, 1] == [number(guard), number(guard)]
        world.join()
        assert 2 == number(guard)
        idle_for(world, guard, 11)
        assert ("idle", ["Uses(2)", "TTL('4s')", "TTL('4s')"]) == (
            guard.status().state,
            [str(event.reasons[0]) for event in world.seen(ReloadDue)],
        )

    def test_joined_by_and(self, world: World) -> None:
        """``Idle(...) & Uses(3)``: released when it is idle after three calls, never replaced."""
        guard = world.guard(reload_on=Idle("10s") & Uses(3))
        number(guard)
        idle_for(world, guard, 20)
        assert "ready" == guard.status().state
        number(guard), number(guard)
        idle_for(world, guard, 20)
        assert ("idle", []) == (guard.status().state, world.seen(ReloadDue))

    def test_beside_another_one_that_is_restricted_too(self, world: World) -> None:
        """``(Idle(...) | TTL(...)) & Between(...)``: a model that is too old and in use is replaced, not released."""
        day = Between("00:00", "23:59", tz="UTC")
        guard = world.guard(reload_on=(Idle("10s") | TTL("4s", jitter=0)) & day, defer=0)
        for _ in range(5):
            number(guard)
            idle_for(world, guard, 1)
        assert (("TTL('4s') & Between('00:00', '23:59')",), 2) == (world.reasons(ReloadDue), number(guard))
        idle_for(world, guard, 11)
        assert ("idle", 1) == (guard.status().state, len(world.seen(UnloadStarted)))

    @pytest.mark.parametrize("ready", [True, False])
    def test_readiness_is_chosen(self, world: World, ready: bool) -> None:  # noqa: FBT001 - a parameter of the test
        """Ready while idle by default, since no load balancer would ever send a call that wakes it otherwise."""
        guard = world.guard(reload_on=Idle("10s", ready=ready))
        assert not guard.ready
        number(guard)
        idle_for(world, guard, 11)
        assert ("idle", ready) == (guard.status().state, guard.ready)

    def test_a_failed_wake_up_is_a_failed_load(self, world: World) -> None:
        """The caller gets its error, the guard is not ready, and a retry follows the backoff."""
        guard = world.guard(reload_on=Idle("10s"))
        number(guard)
        idle_for(world, guard, 11)
        world.loader.fails = world.loader.recovers_after_this = True
        with pytest.raises(LoadFailed):
            number(guard)
        world.join()
        assert ("failed", False) == (guard.status().state, guard.ready)
        idle_for(world, guard, 3)
        assert ("ready", True) == (guard.status().state, guard.ready)

    def test_many_callers_wake_it_with_one_load(self, world: World) -> None:
        """All wait for the same load."""
        guard = world.guard(reload_on=Idle("10s"))
        number(guard)
        idle_for(world, guard, 11)
        world.loader.hold()
        callers = [world.spawn(number, guard) for _ in range(16)]
        world.loader.reached()
        assert "loading" == guard.status().state
        world.loader.open.set()
        assert {2} == {outcome(one) for one in callers}

    def test_a_caller_during_the_release_gets_a_model_loaded_after_it(self, world: World) -> None:
        """Never two copies at a time: the load begins when the memory is back."""
        releasing, release = threading.Event(), threading.Event()

        def unload(_: object) -> None:
            releasing.set()
            assert release.wait(60)

        guard = world.guard(reload_on=Idle("10s"), unload=unload)
        guard.load()
        number(guard)
        guard.check()
        world.tick(11)
        guard.check()
        assert releasing.wait(60)
        caller = world.spawn(number, guard)
        assert 1 == world.loader.calls
        release.set()
        assert 2 == outcome(caller)

    def test_a_forked_worker_keeps_what_it_shares(self, world: World) -> None:
        """In children that share their parent's model the policy is never due."""
        guard = world.guard(reload_on=Idle("10s") | Uses(5))
        number(guard)
        guard.recycle_in_children(lambda _: None)
        guard.engine.before_fork()
        guard.engine.after_fork_in_parent()
        guard.engine.after_fork_in_child()
        idle_for(world, guard, 60)
        assert "ready" == guard.status().state

    def test_a_forked_process_keeps_what_its_parent_has_loaded(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where nothing was prepared. The parent releases its model."""
        guard = world.guard(reload_on=Idle("10s"))
        number(guard)
        guard.engine.before_fork()
        guard.engine.after_fork_in_child()
        monkeypatch.setattr("os.getpid", lambda: 1)
        idle_for(world, guard, 60)
        assert ("ready", 1) == (guard.status().state, guard.status().generation)
        monkeypatch.undo()
        idle_for(world, guard, 12)
        assert "idle" == guard.status().state

    @pytest.mark.parametrize("after", [0, -1, "soon", None, True])
    def test_a_bad_time_is_rejected(self, after: object) -> None:
        """The message names ``after``."""
        with pytest.raises(InvalidOption, match="after"):
            Idle(after)  # type: ignore[arg-type]

    def test_a_bad_ready_is_rejected(self) -> None:
        """The message names ``ready``."""
        with pytest.raises(InvalidOption, match="ready='yes': must be True or False"):
            Idle("1m", ready="yes")  # type: ignore[arg-type]


class Workers:
    """Stands for the worker processes of a mold."""

    def __init__(self) -> None:
        self.workers_ended = False
        self.told: list[tuple[str, ...]] = []

    def end_workers(self, reasons: tuple[Reason, ...]) -> None:
        self.workers_ended = True
        self.told.append(tuple(map(str, reasons)))


def of_molds(world: World, policy: Policy, **options: Any) -> tuple[ModelGuard[Any], Workers]:
    """A guard whose model has workers, as that of an isolated function."""
    guard, workers = world.guard(reload_on=policy, defer=0, **options), Workers()
    own = dataclasses.replace(guard.engine.options, workers=workers)
    return ModelGuard(own, world.system), workers


class TestKeep:
    def test_only_the_workers_end(self, world: World) -> None:
        """Once, as long as no call brings them back; the model stays."""
        guard, workers = of_molds(world, Idle("10s", keep="mold"))
        number(guard)
        idle_for(world, guard, 9)
        assert [] == workers.told
        idle_for(world, guard, 60)
        assert ([("Idle('10s', keep='mold')",)], 1, []) == (workers.told, number(guard), world.seen(UnloadStarted))
        workers.workers_ended = False
        idle_for(world, guard, 12)
        assert 2 == len(workers.told)

    def test_a_resting_guard_is_asked_seldom(self, world: World) -> None:
        """Until then the policy is not due again, so nothing has to look twenty times a second."""
        guard, workers = of_molds(world, Idle("10s", keep="mold"))
        number(guard)
        idle_for(world, guard, 12)
        assert (True, True) == (workers.workers_ended, guard.engine.check_interval() >= 1)

    def test_a_rest_ends_with_the_guard(self, world: World) -> None:
        """As for a model that was released; one that was never loaded does not rest."""
        guard, workers = of_molds(world, Idle("10s", keep="mold"))
        workers.workers_ended = True
        guard.close()
        assert [] == world.seen(IdleEnded)
        with guard:
            pass
        assert 1 == len(world.seen(IdleEnded))

    def test_a_plain_one_beside_it_releases_the_model(self, world: World) -> None:
        """Later: first the workers, then all."""
        guard, workers = of_molds(world, Idle("10s", keep="mold") | Idle("1m"))
        number(guard)
        idle_for(world, guard, 50)
        assert ("ready", 1) == (guard.status().state, len(workers.told))
        idle_for(world, guard, 12)
        assert "idle" == guard.status().state

    def test_new_weights_come_first(self, world: World) -> None:
        """A model that is kept for the next call is as new as others."""
        guard, workers = of_molds(world, Idle("10s", keep="mold") | TTL("10s", jitter=0))
        number(guard)
        idle_for(world, guard, 11)
        assert 2 == guard.status().generation
        assert [("Idle('10s', keep='mold')",)] == workers.told  # a reload is no use, so these end at once

    def test_joined_by_and(self, world: World) -> None:
        """``Idle(..., keep="mold") & Uses(2)``: the workers end when it is idle after two calls."""
        guard, workers = of_molds(world, Idle("10s", keep="mold") & Uses(2))
        number(guard)
        idle_for(world, guard, 20)
        assert [] == workers.told
        number(guard)
        idle_for(world, guard, 20)
        assert (1, "ready") == (len(workers.told), guard.status().state)

    def test_a_pause_holds_it_back(self, world: World) -> None:
        """It is shown as postponed, and begins after ``resume()``."""
        guard, workers = of_molds(world, Idle("10s", keep="mold"))
        number(guard)
        guard.pause()
        idle_for(world, guard, 20)
        assert ([], "paused") == (workers.told, guard.status().postponed.cause)  # type: ignore[union-attr]
        guard.resume()
        idle_for(world, guard, 1)
        assert (1, None) == (len(workers.told), guard.status().postponed)

    @pytest.mark.parametrize(
        "use", [ModelGuard.load, ModelGuard.reload, number, lambda guard: asyncio.run(guard.aload())]
    )
    def test_without_isolate_is_rejected(self, world: World, use: Callable[[ModelGuard[Any]], object]) -> None:
        """At the first load, however it begins: before, an ``isolate`` may still come above the decorator."""
        guard = world.guard(reload_on=Idle("10s", keep="mold"))
        with pytest.raises(
            InvalidOption, match=r"keep='mold': is for the workers of an isolated function.*@isolate\(\)"
        ):
            use(guard)
        assert ("new", 0) == (guard.status().state, world.loader.calls)

    def test_in_replicas_is_rejected(self, world: World) -> None:
        """Copies are in this process."""
        with pytest.raises(InvalidOption, match="keep='mold': is for isolated functions"):
            replicas(world.guard(reload_on=Idle("10s", keep="mold")), 2)

    @pytest.mark.parametrize("keep", ["workers", True, ""])
    def test_anything_else_is_rejected(self, keep: Any) -> None:
        """The message names ``keep``."""
        with pytest.raises(InvalidOption, match=r"keep=.*Write keep='mold', or leave it out"):
            Idle("1m", keep=keep)

    @pytest.mark.parametrize("plain", ["5s", "10s"])
    def test_one_that_a_plain_one_precedes_never_fires(self, world: World, plain: str) -> None:
        """A warning says so."""
        with pytest.warns(PolicyNeverFires, match="ends its mold before"):
            world.guard(reload_on=Idle("10s", keep="mold") | Idle(plain))

    def test_is_a_value(self) -> None:
        """It is pickled for the broker of a host, and its repr says what is kept."""
        policy = Idle("10m", keep="mold")
        assert (policy, False) == (pickle.loads(pickle.dumps(policy)), policy == Idle("10m"))
        assert "Idle('10m', keep='mold')" == repr(policy)
        assert (None, policy) == (subset(policy, renews=False), subset(policy, renews=True, unloads=True))


class TestUnload:
    def test_waits_for_the_calls_that_run(self, world: World) -> None:
        """They end on their model; calls that come meanwhile get the next one."""
        guard = world.guard()
        lease = guard.lease()
        model = lease.__enter__()
        unloading = world.spawn(guard.unload)
        while guard.engine.state.current is not None:
            pass
        other = world.spawn(number, guard)
        assert (1, 1) == (model.number, world.loader.calls)
        lease.__exit__(None, None, None)
        outcome(unloading)
        assert 2 == outcome(other)

    def test_waits_for_a_load_under_way(self, world: World) -> None:
        """And releases what it has loaded."""
        guard = world.guard()
        number(guard)
        world.loader.hold()
        reloading = world.spawn(guard.reload)
        world.loader.reached()
        unloading = world.spawn(guard.unload)
        world.loader.open.set()
        outcome(reloading), outcome(unloading)
        assert ("idle", 2) == (guard.status().state, world.loader.calls)

    def test_waits_for_a_first_load(self, world: World) -> None:
        """And releases what it has loaded, as after ``drain_first``: nobody may find a model after ``unload()``."""
        guard = world.guard()
        world.loader.hold()
        loading = world.spawn(guard.load)
        world.loader.reached()
        unloading = world.spawn(guard.unload)
        until(lambda: 2 == len({wait.thread for wait in _engine.waits}))
        world.loader.open.set()
        outcome(loading), outcome(unloading)
        assert "idle" == guard.status().state

    def test_a_bounded_wait(self, world: World) -> None:
        """``Reloading`` after ``timeout``; the load goes on."""
        guard = world.guard()
        number(guard)
        world.loader.hold()
        guard.reload(wait=False)
        world.loader.reached()
        with pytest.raises(Reloading):
            guard.unload(timeout=0)
        world.loader.open.set()
        world.join()
        assert "ready" == guard.status().state

    def test_by_its_own_loader_is_refused(self, world: World) -> None:
        """A loader that waits for its own end would hang."""
        errors: list[BaseException] = []

        def load() -> object:
            try:
                guard.unload()
            except WouldDeadlock as error:
                errors.append(error)
            return world.loader()

        guard = world.guard(load)
        assert 1 == number(guard)
        guard.reload()
        assert 2 == len(errors)

    def test_ends_the_retries_of_a_reload_that_has_failed(self, world: World) -> None:
        """Nothing loads before the next use, and that waits for no retry."""
        guard = world.guard()
        number(guard)
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            guard.reload()
        world.loader.fails = False
        guard.unload()
        idle_for(world, guard, 60)
        assert ("idle", None, 2) == (guard.status().state, guard.status().last_error, world.loader.calls)
        assert 3 == number(guard)

    def test_a_reload_wakes_it(self, world: World) -> None:
        """``reload()`` loads a model, used or not."""
        guard = world.guard()
        number(guard)
        guard.unload()
        guard.reload()
        assert ("ready", 2) == (guard.status().state, world.loader.calls)
