"""``keep_previous=True`` and ``rollback()``: back to the previous model, at once, and no policy undoes it."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.lifecycle.sources import kept, released
from tests.unit.lifecycle.world import MB, TIMEOUT, World, number, outcome, until

from modelguard import (
    Idle,
    Loaded,
    MemoryGrowth,
    MemoryLimit,
    ModelGuard,
    Uses,
    replicas,
    telemetry,
)
from modelguard.errors import GuardClosed, InvalidOption, LoadFailed, ModelRejected, NoPreviousModel


def test_it_is_reported_with_versions(world: World) -> None:
    """An event at warning, and the version everywhere is that of the model that answers."""
    guard = kept(world, load=lambda: Loaded(model := world.loader(), version=f"v{model.number}"))
    guard.rollback()
    event = world.last(telemetry.RolledBack)
    assert (1, "v1", 2, "v2") == (event.generation, event.version, event.replaced, event.replaced_version)
    assert "rolled back to generation 1 (version v1), from generation 2 (version v2)" == telemetry.describe(event)
    assert "v1" == guard.version


def test_only_one_is_kept(world: World) -> None:
    """Until the next reload has succeeded, or the guard is closed."""
    guard = kept(world, reloads=3)
    assert [1, 2] == released(world)
    assert 3 == guard.status().previous
    guard.close()
    world.join()
    assert [1, 2, 3, 4] == sorted(released(world))


def test_a_failed_reload_keeps_it(world: World) -> None:
    """The previous model is still that of the last reload that succeeded, and a rollback ends the retries."""
    guard = kept(world)
    world.loader.fails = True
    with pytest.raises(LoadFailed):
        guard.reload()
    guard.rollback()
    assert (1, "ready") == (number(guard), guard.status().state)
    calls = world.loader.calls
    for _ in range(10):
        world.tick(600)
        guard.check()
        world.join()
    assert calls == world.loader.calls


def test_calls_under_way_keep_their_model(world: World) -> None:
    """Calls on either model run to their end, and neither is unloaded under them."""
    guard = world.guard(keep_previous=True, unload=lambda model: model.unload())
    guard.load()
    first = guard.lease()
    with first as one:
        guard.reload(wait=False)
        until(lambda: guard.status().generation == 2)
        with guard.lease() as nested:  # inside a call on the first model
            assert nested is one
        outcome(world.spawn(check_call, guard, 2))
        guard.rollback()
        assert guard.status().in_flight >= 1
        outcome(world.spawn(check_call, guard, 1))
        assert not one.unloaded
    world.join()
    assert [2] == released(world)
    assert 0 == guard.status().in_flight


def check_call(guard: ModelGuard[Any], expected: int) -> None:
    """A call in a thread, and so in a context, of its own."""
    with guard.lease() as model:
        assert expected == model.number
        assert not model.unloaded


def test_a_drain_waits_for_calls_that_began_before_the_rollback(world: World) -> None:
    """A call of the first time that the model was current counts when that model is released at last."""
    guard = world.guard(keep_previous=True, unload=lambda model: model.unload(), drain_timeout=TIMEOUT)
    guard.load()
    entered, over = threading.Event(), threading.Event()

    def long_call() -> bool:
        with guard.lease() as model:
            entered.set()
            assert over.wait(TIMEOUT)
            return bool(model.unloaded)

    call = world.spawn(long_call)
    assert entered.wait(TIMEOUT)
    outcome(world.spawn(guard.reload))
    guard.rollback()
    closing = world.spawn(guard.close)
    until(lambda: guard.status().state == "closed")
    over.set()
    assert outcome(call) is False
    outcome(closing)


def test_without_anything_kept_it_is_a_clear_error(world: World) -> None:
    """The message says why, and what to write."""
    plain = world.guard()
    plain.load()
    with pytest.raises(
        NoPreviousModel, match=r"'model' has no previous model: the guard keeps none. .*keep_previous=True"
    ):
        plain.rollback()
    guard = kept(world, reloads=0)
    with pytest.raises(NoPreviousModel, match=r"no reload has kept one since the first load.*Call reload\(\)"):
        guard.rollback()
    guard.reload()
    guard.rollback()
    with pytest.raises(NoPreviousModel, match="the last rollback"):
        guard.rollback()
    assert 2 == number(guard)  # the first one that it has loaded
    guard.close()
    with pytest.raises(GuardClosed):
        guard.rollback()


def test_a_load_under_way_is_cancelled(world: World) -> None:
    """Its model is discarded, who waits for it gets an error, and the load is not repeated."""
    guard = kept(world)
    world.loader.hold()
    reload = world.spawn(guard.reload)
    world.loader.reached()
    guard.rollback()
    with pytest.raises(LoadFailed, match=r"rollback\(\) was called during the load"):
        outcome(reload)
    world.loader.open.set()
    world.join()
    assert (1, 3) == (number(guard), world.loader.calls)
    assert "rolled_back" == world.last(telemetry.LoadDiscarded).cause
    assert 0 == guard.status().failures
    guard.reload()
    assert 4 == number(guard)


def test_a_reload_that_is_asked_for_after_it_is_done(world: World) -> None:
    """Though the cancelled load is still under way."""
    guard = kept(world)
    world.loader.hold()
    guard.reload(wait=False)
    world.loader.reached()
    guard.rollback()
    later = world.spawn(guard.reload)
    until(lambda: guard.engine.state.requests >= 3)
    world.loader.open.set()
    outcome(later)
    assert (4, False) == (number(guard), guard.status().pinned)


def test_a_load_that_can_be_ended_is_ended(world: World) -> None:
    """Before another one may begin, which it would end instead; who asked for that waits for it."""
    guard = kept(world)
    ended: list[object] = []

    def end_load() -> None:
        job, lock = guard.engine.state.job, guard.engine.state.lock
        ended.append((job is not None and job.cancelled, world.spawn(partial(lock.acquire, blocking=False)).result()))

    guard.engine.end_load = end_load
    guard.rollback()
    assert [] == ended
    guard.reload()
    world.join()
    world.loader.hold()
    guard.reload(wait=False)
    world.loader.reached()
    guard.rollback()
    assert [(True, False)] == ended


def test_a_cancelled_load_that_fails_is_no_failure(world: World) -> None:
    """The model that takes calls is the right one, and nothing is retried."""
    guard = kept(world)
    world.loader.hold()
    world.loader.fails = True
    guard.reload(wait=False)
    world.loader.reached()
    guard.rollback()
    world.loader.open.set()
    world.join()
    assert ("ready", 0, []) == (guard.status().state, guard.status().failures, world.seen(telemetry.LoadErrored))


def test_where_memory_is_short_nothing_is_kept(world: World) -> None:
    """What is kept goes first; if that is not enough, the old model goes before the new one loads."""
    world.model_size = 100 * MB
    guard = kept(world)
    world.headroom = 50 * MB
    guard.reload()
    world.join()
    assert "drain_first" == world.last(telemetry.SwapChosen).swap
    assert [1, 2] == released(world)
    assert 0 == guard.status().previous
    with pytest.raises(NoPreviousModel):
        guard.rollback()


def test_what_is_kept_makes_room_for_a_load(world: World) -> None:
    """With its memory, there is enough for the new model beside the current one, which is kept then."""
    world.model_size = 100 * MB
    guard = kept(world)
    limit = world.memory + 60 * MB
    guard.engine.system = replace(world.system, headroom=lambda: limit - world.memory)
    guard.reload()
    world.join()
    assert "load_first" == world.last(telemetry.SwapChosen).swap
    assert [1] == released(world)
    assert 2 == guard.status().previous


def test_a_reload_that_frees_memory_keeps_nothing(world: World) -> None:
    """A leaking model would go on taking its memory."""
    guard = kept(world, reload_on=MemoryGrowth("50 MB"))
    for _ in range(3):
        world.tick(10)
        guard.check()
    world.memory += 200 * MB
    for _ in range(3):
        world.tick(10)
        guard.check()
    world.join()
    assert 3 == guard.status().generation
    assert ([1, 2], 0) == (sorted(released(world)), guard.status().previous)


def test_a_hook_may_call_it(world: World) -> None:
    """Also one that is called while the policies are asked."""
    guard = kept(world, reload_on=MemoryLimit("50 MB"))

    def undo(event: telemetry.Event) -> None:
        if isinstance(event, telemetry.PolicyIgnored):
            guard.rollback()

    remove = telemetry.add_hook(undo)
    for _ in range(5):
        world.tick(10)
        outcome(world.spawn(guard.check))
    remove()
    assert 1 == number(guard)


def test_calls_stay_fast_after_it(world: World) -> None:
    """The end of a call does not ask the policies each time, with policies and without."""
    for policy in (None, Uses(1000)):
        guard = kept(world, reload_on=policy)
        guard.rollback()
        with guard.lease():
            pass
        generation = guard.engine.state.current
        assert generation is not None
        assert generation.alarm == float("inf")


def test_the_guard_is_ready_at_once(world: World) -> None:
    """Though the loader of the cancelled load still runs."""
    guard = kept(world)
    world.loader.hold()
    guard.reload(wait=False)
    world.loader.reached()
    assert "reloading" == guard.status().state
    guard.rollback()
    assert ("ready", 1) == (guard.status().state, number(guard))


def test_unload_and_idle_release_both(world: World) -> None:
    """A guard that nobody uses takes no memory."""
    guard = kept(world, reload_on=Idle("1m"))
    world.tick(60)
    guard.check()
    world.join()
    assert ("idle", [1, 2]) == (guard.status().state, sorted(released(world)))
    guard.load()
    guard.reload()
    world.join()
    guard.rollback()
    guard.unload()
    assert ("idle", False) == (guard.status().state, guard.status().pinned)


def test_it_is_released_by_reference_count(world: World) -> None:
    """Nothing keeps a model that is not kept any more."""
    guard = kept(world)
    model = weakref.ref(guard.engine.state.previous.model)  # type: ignore[union-attr]
    gc.disable()
    try:
        guard.reload()
        world.join()
        assert None is model()
    finally:
        gc.enable()


def test_a_loader_that_returns_what_is_kept_is_refused(world: World) -> None:
    """A cache in the loader would make one model out of two."""
    models = [world.loader(), world.loader()]
    guard = world.guard(lambda: models[guard.status().generation % 2], keep_previous=True)
    guard.load()
    guard.reload()
    with pytest.raises(ModelRejected, match="has returned before"):
        guard.reload()


def test_the_exit_unloads_both(world: World) -> None:
    """The hook is called for the model that is kept too."""
    unloaded: list[int] = []
    guard = kept(world, unload=lambda model: unloaded.append(model.number))
    guard.engine.unload_at_exit(1.0)
    assert [1, 2] == sorted(unloaded)


def test_a_child_can_roll_back_for_itself(world: World) -> None:
    """What the parent has kept is kept in the child, without the calls of the parent's threads."""
    guard = kept(world)
    guard.engine.state.previous.leases.append(None)  # type: ignore[union-attr]
    guard.engine.after_fork_in_child()
    guard.rollback()
    assert (1, 0) == (number(guard), guard.status().in_flight)


def test_replicas_roll_back_together(world: World) -> None:
    """Or not at all, if one of them keeps nothing."""
    pair = replicas(world.guard(keep_previous=True), 2)
    pair.load()
    world.join()
    first, second = pair._guards
    first.reload()
    world.join()
    with pytest.raises(NoPreviousModel):
        pair.rollback()
    assert [2, 1] == [status.generation for status in pair.status()]
    second.reload()
    world.join()
    pair.rollback()
    assert [1, 1] == [status.generation for status in pair.status()]
    pair.close()


def test_validation_compares_with_the_model_that_came_back(world: World) -> None:
    """After a rollback, the old model is the previous one."""
    seen = []
    guard = kept(world, reloads=0, validate=lambda new, old: seen.append(old and old.number))
    guard.reload()
    world.join()
    guard.rollback()
    guard.reload()
    assert [None, 1, 1] == seen


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep_previous": "yes"}, r"keep_previous='yes': must be True or False"),
        ({"keep_previous": True, "swap": "drain_first"}, r"keep_previous=True: needs two models in memory"),
    ],
)
def test_bad_options_are_rejected_at_the_definition(world: World, options: dict[str, Any], says: str) -> None:
    """The message names the argument and the fix."""
    with pytest.raises(InvalidOption, match=says):
        world.guard(**options)


def test_under_load_no_call_sees_an_unloaded_model(world: World) -> None:
    """Calls, reloads, rollbacks and unloads at random, from many threads."""
    guard = kept(world, drain_timeout=TIMEOUT)
    over = threading.Event()
    calls = [0]

    def use() -> None:
        while not over.is_set():
            with guard.lease() as model:
                assert ["a", "b"] == model.words("a b")
                calls[0] += 1

    users = [world.spawn(use) for _ in range(4)]
    for step in range(30):
        if step % 10 == 9:
            guard.unload()
        elif step % 3:
            guard.reload(wait=step % 2 == 0) if step % 5 else world.spawn(guard.reload)
        else:
            with suppress(NoPreviousModel):
                guard.rollback()
    before = calls[0]
    until(lambda: calls[0] > before + 10)
    over.set()
    for user in users:
        outcome(user)
    world.end()
    guard.close()
    assert 0 == guard.status().in_flight
    loads = len(world.seen(telemetry.LoadFinished))
    assert loads == len(world.seen(telemetry.GenerationReleased)), "each model was released once"


class Machine(RuleBasedStateMachine):
    """Loads, reloads, rollbacks, calls, unloads and closes in any order, against a simple model of them."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(Path("/nonexistent"))
        self.world.inline = True
        self.world.model_size = MB
        self.guard = kept(self.world, reloads=0)
        self.current: int | None = 1
        self.previous: int | None = None
        self.failed = False  # a reload has, of a model that serves on

    def loaded(self) -> int:
        return self.world.loader.calls

    @rule()
    def reload(self) -> None:
        self.guard.reload()
        self.replaced()

    def replaced(self) -> None:
        self.previous, self.current, self.failed = self.current, self.loaded(), False

    @rule()
    def rollback(self) -> None:
        if self.previous is None or self.current is None:
            with pytest.raises(NoPreviousModel):
                self.guard.rollback()
            return
        self.guard.rollback()
        self.current, self.previous, self.failed = self.previous, None, False

    @rule()
    def unload(self) -> None:
        self.guard.unload()
        self.current, self.previous, self.failed = None, None, False  # also if a reload had failed before

    @rule()
    def call(self) -> None:
        self.world.tick(120)  # the backoff of loads that have failed is over
        self.guard.check()
        if self.failed:
            self.replaced()
        before = self.current
        got = number(self.guard)
        self.current = self.loaded() if before is None else before
        assert self.current == got

    @rule()
    def fail(self) -> None:
        self.world.loader.fails = True
        try:
            with pytest.raises(LoadFailed):
                self.guard.reload()
        finally:
            self.world.loader.fails = False
        self.failed = self.current is not None

    @invariant()
    def the_status_agrees(self) -> None:
        status = self.guard.status()
        assert (self.previous is not None) == (status.previous != 0)
        assert (self.current is not None) == (status.generation != 0)

    def teardown(self) -> None:
        self.guard.close()
        assert 0 == self.world.memory - 100 * MB, "each model was released"


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestMachine = Machine.TestCase
