"""``pool(reload_on=Idle(...))``: the model of a key that nobody uses is released until its next use."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.lifecycle.pools import Sizes, in_use, loaded, use
from tests.unit.lifecycle.world import MB, World, outcome, until

from modelguard import TTL, Changed, Idle, Policy, pool, telemetry
from modelguard.errors import InvalidOption, LoadFailed
from modelguard.lifecycle import system
from modelguard.runtime import background
from modelguard.telemetry import GenerationReleased, LoadStarted, UnloadStarted


def pass_time(world: World, pool: Any, seconds: float) -> None:
    """Let time pass as the ticker does, which looks once a second."""
    for _ in range(int(seconds)):
        world.tick(1.0)
        pool._engine.tick()
        world.join()


class TestIdleKeys:
    def test_only_the_model_that_nobody_uses_is_released(self, world: World) -> None:
        """Not earlier than after ``idle``, with its memory, and with an event that names key and reason."""
        pool = world.pool(Sizes(world, a=10, b=20), reload_on=Idle("10s"))
        use(pool, "a", "b")
        pass_time(world, pool, 9)
        use(pool, "b")
        assert {"a": 10, "b": 20} == loaded(pool)
        pass_time(world, pool, 2)
        assert ({"b": 20}, 120 * MB) == (loaded(pool), world.memory)
        event = world.last(UnloadStarted)
        assert ("pool['a']", ("Idle('10s')",)) == (event.guard, tuple(map(str, event.reasons)))
        assert ("pool['a']", False) == (world.last(GenerationReleased).guard, world.last(GenerationReleased).alive)

    def test_the_next_call_loads_it_again(self, world: World) -> None:
        """One load, whose reason says that it was woken; the key counts as idle until then."""
        pool = world.pool(reload_on=Idle("10s"))
        use(pool, "a", "b")
        pass_time(world, pool, 11)
        status = pool.status()
        assert ({}, ("a", "b"), 2, 0, 2, 0) == (
            status.models,
            status.idle,
            status.unloads,
            status.evictions,
            status.loads,
            status.used,
        )
        assert ["a"] == use(pool, "a")
        assert (("b",), 3, ("next use",)) == (pool.status().idle, pool.status().loads, world.reasons(LoadStarted))

    def test_by_default_a_model_stays(self, world: World) -> None:
        """Until its room is needed."""
        pool = world.pool(Sizes(world, a=10))
        use(pool, "a")
        pass_time(world, pool, 100)
        assert ({"a": 10}, ()) == (loaded(pool), pool.status().idle)

    def test_a_load_is_use(self, world: World) -> None:
        """However long it takes; the time begins at its end."""
        pool = world.pool(reload_on=Idle("10s"))
        world.loader.hold()
        caller = world.spawn(use, pool, "a")
        world.loader.reached()
        pass_time_beside(world, pool, 60)
        assert [("a",), ()] == [tuple(pool._engine._models), pool.status().idle]
        world.loader.open.set()
        assert ["a"] == outcome(caller)
        pass_time(world, pool, 11)
        assert ("a",) == pool.status().idle

    def test_one_that_is_shorter_than_a_load_serves_all_the_same(self, world: World) -> None:
        """Each call waits for its load and gets its model."""
        pool = world.pool(reload_on=Idle("10ms"))
        for number in range(1, 4):
            with pool.lease("a") as model:
                pass_time(world, pool, 3)
                assert number == model.number
            pass_time(world, pool, 2)
        assert (3, 3) == (pool.status().loads, pool.status().unloads)


class TestUse:
    def test_a_call_that_runs_is_use(self, world: World) -> None:
        """However long it takes, and its end begins the time anew."""
        pool = world.pool(reload_on=Idle("10s"))
        with in_use(world, pool, "a"):
            pass_time_beside(world, pool, 60)
            assert () == pool.status().idle
        pass_time(world, pool, 9)
        assert () == pool.status().idle
        pass_time(world, pool, 2)
        assert ("a",) == pool.status().idle

    def test_a_stream_is_use(self, world: World) -> None:
        """A generator that is half way keeps its model, though no step runs."""
        pool = world.pool(reload_on=Idle("10s"))

        @pool(key="key")
        def items(model: Any, key: str) -> Iterator[int]:
            del key
            yield from (model.number, model.number)

        steps = items(key="a")
        assert 1 == next(steps)
        pass_time(world, pool, 60)
        assert [1] == list(steps)
        pass_time(world, pool, 11)
        assert ("a",) == pool.status().idle

    def test_coroutines_use_and_wake(self, world: World) -> None:
        """``async with`` keeps the model for its block, and a task on an idle key has it loaded beside the loop."""
        pool = world.pool(reload_on=Idle("10s"))

        async def work() -> list[int]:
            async with pool.lease("a") as model:
                await asyncio.to_thread(pass_time_beside, world, pool, 60)
                first = model.number
                del model
            await asyncio.to_thread(pass_time, world, pool, 11)
            async with pool.lease("a") as model:
                return [first, model.number]

        assert [1, 2] == asyncio.run(work())

    def test_many_callers_wake_a_key_with_one_load(self, world: World) -> None:
        """They share it."""
        pool = world.pool(reload_on=Idle("10s"))
        use(pool, "a")
        pass_time(world, pool, 11)
        world.loader.hold()
        callers = [world.spawn(use, pool, "a") for _ in range(16)]
        world.loader.reached()
        world.loader.open.set()
        assert [["a"]] * 16 == [outcome(caller) for caller in callers]
        assert 2 == world.loader.calls

    def test_a_wake_that_fails_is_a_failed_load(self, world: World) -> None:
        """The caller gets its error; after the backoff the key is loaded."""
        pool = world.pool(reload_on=Idle("10s"))
        use(pool, "a")
        pass_time(world, pool, 11)
        world.loader.fails = world.loader.recovers_after_this = True
        with pytest.raises(LoadFailed):
            use(pool, "a")
        assert () == pool.status().idle
        world.tick(60)
        assert ["a"] == use(pool, "a")


class TestReleases:
    def test_none_beside_a_load(self, world: World) -> None:
        """A release would make the model that is loaded look smaller. The load releases it at its end."""
        held, go_on = threading.Event(), threading.Event()

        def load(key: str) -> Any:
            if key == "b":
                held.set()
                assert go_on.wait(60)
            return sizes(key)

        sizes = Sizes(world, a=40, b=30)
        pool = world.pool(load, reload_on=Idle("10s"))
        use(pool, "a")
        caller = world.spawn(use, pool, "b")
        assert held.wait(60)
        before = world.memory
        pass_time_beside(world, pool, 11)
        assert (("a",), before) == (pool.status().idle, world.memory)
        go_on.set()
        outcome(caller)
        assert ({"b": 30}, before - 10 * MB) == (loaded(pool), world.memory)

    def test_a_load_waits_for_one_under_way(self, world: World) -> None:
        """Of the same key too, so there are never two copies; and it happens in no thread that asks for models."""
        releasing, release = threading.Event(), threading.Event()

        def unload(_: Any) -> None:
            assert threading.current_thread().name == "modelguard-release-pool"
            releasing.set()
            assert release.wait(60)

        pool = world.pool(reload_on=Idle("10s"), unload=unload)
        use(pool, "a")
        pool._engine.tick()
        world.tick(11)
        pool._engine.tick()
        assert releasing.wait(60)
        caller = world.spawn(use, pool, "a")
        until(lambda: 0 < len(pool._engine._models))
        assert 1 == world.loader.calls
        release.set()
        assert ["a"] == outcome(caller)

    def test_close_waits_for_one_under_way(self, world: World) -> None:
        """After ``close()`` no hook runs any more."""
        releasing, release, over = threading.Event(), threading.Event(), threading.Event()

        def unload(_: Any) -> None:
            releasing.set()
            assert release.wait(60)
            over.set()

        pool = world.pool(reload_on=Idle("10s"), unload=unload)
        use(pool, "a")
        pool._engine.tick()
        world.tick(11)
        pool._engine.tick()
        assert releasing.wait(60)
        closing = world.spawn(pool.close)
        until(lambda: pool._engine.closed)
        assert not closing.done()
        release.set()
        outcome(closing)
        assert (True, ()) == (over.is_set(), pool.status().idle)

    def test_without_a_thread_it_is_tried_again(self, world: World) -> None:
        """Where the system gives none, at the next look or the next load."""
        refused = [True]

        def start(work: Any, name: str) -> None:
            if name.startswith("modelguard-release") and refused and refused.pop():
                raise RuntimeError("can't start new thread")
            world.start(work, name)

        with system.use(lambda: dataclasses.replace(world.system, start_thread=start)):
            made = pool(Sizes(world, a=40), max_memory=100 * MB, reload_on=Idle("10s"), name="pool")
        use(made, "a")
        before = world.memory
        pass_time(world, made, 12)
        assert ([], ("a",), before - 40 * MB) == (refused, made.status().idle, world.memory)

    def test_a_hook_that_raises_is_reported(self, world: World) -> None:
        """The key is idle all the same, and the pool goes on."""

        def unload(_: Any) -> None:
            raise OSError("gone")

        pool = world.pool(reload_on=Idle("10s"), unload=unload)
        use(pool, "a")
        pass_time(world, pool, 11)
        assert (("a",), "OSError: gone") == (pool.status().idle, world.last(GenerationReleased).error)
        assert ["a"] == use(pool, "a")

    def test_beside_probes_and_age(self, world: World) -> None:
        """An idle key is not asked about, and a wake loads the newest."""
        asked: list[str] = []
        pool = world.pool(reload_on=Idle("10s") | TTL("1h") | Changed(asked.append))
        use(pool, "a")
        pass_time(world, pool, 11)
        asked.clear()
        pass_time(world, pool, 200)
        assert [] == asked
        assert ["a"] == use(pool, "a")

    def test_in_a_forked_child_what_the_parent_has_loaded_stays(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To release it there would return nothing."""
        pool = world.pool(reload_on=Idle("10s"))
        use(pool, "a")
        pool._engine.after_fork_in_child()
        monkeypatch.setattr("os.getpid", lambda: 1)
        pass_time(world, pool, 60)
        assert () == pool.status().idle

    def test_an_empty_pool_needs_no_ticker(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that forks should have few threads; the next load asks for it again."""
        asked: list[str] = []

        def note(what: str) -> Any:
            return lambda ticked: asked.append(what) if ticked is made._engine else None

        monkeypatch.setattr(background.TICKER, "add", note("add"))
        monkeypatch.setattr(background.TICKER, "remove", note("remove"))
        with system.use(lambda: dataclasses.replace(world.system, ticks=True)):
            made = pool(world.loader.load, max_memory=100 * MB, reload_on=Idle("10s"), name="pool")
        use(made, "a")
        assert ["add"] == asked
        pass_time(world, made, 12)
        assert ("remove", ("a",)) == (asked[-1], made.status().idle)
        use(made, "a")
        assert "add" == asked[-1]


@pytest.mark.parametrize("policy", [Idle("10m", ready=False), Idle("10m", keep="mold")], ids=repr)
def test_what_says_nothing_of_one_key_is_rejected(world: World, policy: Policy) -> None:
    """A pool is ready while a key has no model, and keeps nothing of it: the message says what to write."""
    with pytest.raises(InvalidOption, match=r"reload_on=Idle.*Write Idle\('10m'\)"):
        world.pool(reload_on=policy)


def pass_time_beside(world: World, pool: Any, seconds: float) -> None:
    """Let time pass while calls of other threads run, which must not be waited for."""
    for _ in range(int(seconds)):
        world.tick(1.0)
        pool._engine.tick()


class PoolMachine(RuleBasedStateMachine):
    """Three keys in a pool with room for two, used, left alone, evicted, and idle, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(Path(tempfile.gettempdir()))
        self.world.inline = True
        telemetry.set_hooks([self.world.record])
        self.sizes = Sizes(self.world, a=40, b=40, c=40)
        self.pool = self.world.pool(self.sizes, reload_on=Idle("10s"), wait_timeout=0)
        self.leases: dict[str, list[Any]] = {"a": [], "b": [], "c": []}
        self.unused = dict.fromkeys("abc", 0.0)
        self.held = dict.fromkeys("abc", 0)

    @rule(key=st.sampled_from("abc"))
    def take(self, key: str) -> None:
        in_use = {one for one, leases in self.leases.items() if leases}
        if key not in in_use and len(in_use) == 2:
            return  # no room
        lease = self.pool.lease(key)
        model = lease.__enter__()
        assert (key, False) == (model.key, model.unloaded)
        self.leases[key].append((lease, model))
        self.unused[key] = 0.0

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key, leases in self.leases.items() if leases]))
        lease, model = self.leases[key].pop()
        del model
        lease.__exit__(None, None, None)
        self.pool._engine.tick()  # the regular looks notice when calls end
        self.unused[key] = 0.0

    @rule(seconds=st.floats(0.5, 12))
    def pass_time(self, seconds: float) -> None:
        self.world.tick(seconds)
        for key, leases in self.leases.items():
            self.unused[key] = 0.0 if leases else self.unused[key] + seconds
        self.pool._engine.tick()

    @invariant()
    def what_is_used_stays_and_what_nobody_uses_goes(self) -> None:
        status = self.pool.status()
        for key, leases in self.leases.items():
            if leases:
                assert key in status.models
            if self.unused[key] >= 10:
                assert key not in status.models
        assert not set(status.models) & set(status.idle)

    @invariant()
    def every_release_returns_its_memory(self) -> None:
        status = self.pool.status()
        assert 100 * MB + 40 * MB * len(status.models) == self.world.memory
        assert 40 * MB * len(status.models) == status.used
        assert status.loads == len(status.models) + status.evictions + status.unloads

    def teardown(self) -> None:
        for leases in self.leases.values():
            while leases:
                lease, model = leases.pop()
                del model
                lease.__exit__(None, None, None)
        self.pool.close()
        assert 100 * MB == self.world.memory
        telemetry.set_hooks([])


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
