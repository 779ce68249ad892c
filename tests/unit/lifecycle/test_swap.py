"""How one generation takes another's place, and how the old one's last calls end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, TIMEOUT, Loader, World, number, outcome, until

from modelguard import Backoff, Loading
from modelguard.errors import LoadFailed, Reloading
from modelguard.telemetry import (
    Event,
    GenerationAbandoned,
    GenerationReleased,
    LoadFinished,
    LoadStarted,
    SwapChosen,
)


def order(world: World, *kinds: type[Event]) -> list[type[Event]]:
    """The kinds of events, of those asked for, in the order in which they came."""
    return [type(event) for event in world.events if isinstance(event, kinds)]


class TestLoadFirst:
    def test_the_old_generation_serves_until_the_new_one_is_ready(self, world: World) -> None:
        """The old generation serves while the new one loads, is validated and warms up, and is released after that."""
        served: list[tuple[str, int]] = []

        def note(step: str) -> None:
            if guard.ready:  # the first model has none to serve for it
                served.append((step, outcome(world.spawn(number, guard))))

        guard = world.guard(
            swap="load_first", validate=lambda _model: note("validate"), warmup=lambda _model: note("warmup")
        )
        guard.load()
        guard.reload()
        world.join()
        assert ([("validate", 1), ("warmup", 1)], 2) == (served, number(guard))
        assert [LoadFinished, LoadFinished, GenerationReleased] == order(world, LoadFinished, GenerationReleased)

    def test_two_copies_are_held_for_a_while(self, world: World) -> None:
        """The price is memory for both."""
        world.model_size = 100 * MB
        at_load: list[int] = []
        guard = world.guard(swap="load_first", validate=lambda _model: at_load.append(world.memory))
        guard.load()
        guard.reload()
        world.join()
        assert [200 * MB, 300 * MB] == at_load
        assert 200 * MB == world.memory


class TestDrainFirst:
    def test_the_old_generation_goes_before_the_new_one_loads(self, world: World) -> None:
        """The old generation ends its calls, is unloaded and gives its memory back; only then the new one loads."""
        world.model_size = 100 * MB
        at_load: list[int] = []
        guard = world.guard(swap="drain_first", validate=lambda _model: at_load.append(world.memory))
        guard.load()
        guard.reload()
        world.join()
        assert ([200 * MB, 200 * MB], 2) == (at_load, number(guard))
        assert [LoadStarted, GenerationReleased, LoadStarted] == order(world, LoadStarted, GenerationReleased)
        assert "drain_first" == world.last(LoadFinished).swap

    def test_calls_wait_meanwhile(self, world: World) -> None:
        """Calls under way end on the old model, new ones wait for the new one."""
        guard = world.guard(swap="drain_first")
        guard.load()
        with guard.lease() as old:
            reload = world.spawn(guard.reload)
            until(lambda: guard.status().state == "draining")
            late = world.spawn(number, guard)
            until(lambda: len(guard.engine.state.waiting) == 2)
            assert (["a"], 1, False) == (old.words("a"), guard.status().in_flight, guard.ready)
            del old
        assert (None, 2) == (outcome(reload), outcome(late))

    def test_nested_calls_do_not_wait_for_their_outer_call(self, world: World) -> None:
        """A call that was let in may call guarded functions on its model although the guard drains: no deadlock."""
        guard = world.guard(swap="drain_first", wait_timeout=0)

        @guard
        def inner(model: Any) -> int:
            return int(model.number)

        @guard
        def outer(model: Any) -> tuple[int, int]:
            world.spawn(guard.reload)
            until(lambda: guard.status().state == "draining")
            return model.number, inner()

        @guard
        async def aouter(model: Any) -> tuple[int, int]:
            return await asyncio.to_thread(outer)

        assert (1, 1) == outer()
        world.join()
        assert (2, 2) == asyncio.run(aouter())
        world.join()
        assert 3 == number(guard)

    def test_waiting_time_is_told(self, world: World) -> None:
        """The event says how long no generation served."""

        def load() -> Any:
            world.tick(4)
            return world.loader()

        guard = world.guard(load, swap="drain_first", unload=lambda _model: world.tick(3))
        guard.load()
        guard.reload()
        assert (7, 4) == (world.last(LoadFinished).waited_seconds, world.last(LoadFinished).seconds)

    def test_a_failed_load_leaves_none_to_serve(self, world: World) -> None:
        """If the new model cannot be loaded then none serves; calls fail at once, until a retry succeeds."""
        guard = world.guard(swap="drain_first", loading=Loading(backoff=Backoff("8s")))
        guard.load()
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            guard.reload()
        with pytest.raises(LoadFailed, match="no weights"):
            number(guard)
        assert ("failed", 2, False) == (guard.status().state, world.loader.calls, guard.ready)
        world.loader.fails = False
        world.tick(4)
        assert guard.check()
        world.join()
        assert ("ready", 3) == (guard.status().state, number(guard))


class TestAuto:
    def reload(self, world: World, *, size: int, headroom: int | None) -> SwapChosen:
        world.model_size, world.headroom = size, headroom
        guard = world.guard(swap="auto")
        guard.load()
        guard.reload()
        world.join()
        assert world.last(LoadFinished).swap == world.last(SwapChosen).swap
        return world.last(SwapChosen)

    @pytest.mark.parametrize(
        ("headroom", "swap"), [(None, "load_first"), (125 * MB, "load_first"), (124 * MB, "drain_first")]
    )
    def test_measures_and_chooses(self, world: World, headroom: int | None, swap: str) -> None:
        """It loads first if there is room for a second copy and for loading it, otherwise it drains first."""
        assert swap == self.reload(world, size=100 * MB, headroom=headroom).swap

    def test_says_what_it_chose_and_why(self, world: World) -> None:
        """The event carries the figures behind the choice."""
        chosen = self.reload(world, size=400 * MB, headroom=300 * MB)
        assert (400 * MB, 300 * MB) == (chosen.model_bytes, chosen.headroom)
        assert "a second copy needs 500 MB while it loads, and 300 MB is free" == chosen.why

    def test_says_where_it_does_not_know(self, world: World) -> None:
        """If free memory is unknown, the event says so."""
        assert "an unknown amount is free" in self.reload(world, size=1, headroom=None).why

    def test_remembers_the_largest_size(self, world: World) -> None:
        """A model that was loaded into memory kept from before seems small; the largest measurement counts."""
        world.model_size = 100 * MB
        guard = world.guard()
        guard.load()
        world.model_size = 1
        guard.reload()
        assert 100 * MB == guard.status().model_bytes

    @pytest.mark.parametrize("swap", ["load_first", "drain_first"])
    def test_does_not_overrule_the_author(self, world: World, swap: str) -> None:
        """An explicit ``swap`` is used whatever the room."""
        world.model_size = 100 * MB
        world.headroom = 0 if swap == "load_first" else 10**12
        guard = world.guard(swap=swap)
        guard.load()
        guard.reload()
        assert (swap, "it is fixed for this guard") == (world.last(SwapChosen).swap, world.last(SwapChosen).why)


class TestDraining:
    def test_ends_with_the_last_call(self, world: World) -> None:
        """The old generation is released when its last call has ended, and not before."""
        guard = world.guard()
        guard.load()
        with guard.lease() as old:
            outcome(world.spawn(guard.reload))
            assert (2, 1, []) == (
                outcome(world.spawn(number, guard)),
                guard.status().in_flight,
                world.seen(GenerationReleased),
            )
            assert ["a"] == old.words("a")
            del old
        world.join()
        assert [(1, False)] == [(event.generation, event.alive) for event in world.seen(GenerationReleased)]

    @pytest.mark.parametrize("drain_timeout", [0, "1ms"])
    @pytest.mark.parametrize("swap", ["load_first", "drain_first"])
    def test_ends_with_the_drain_timeout(self, world: World, swap: str, drain_timeout: Any) -> None:
        """After ``drain_timeout`` the old generation is abandoned to its calls, reported, and the new one serves."""
        guard = world.guard(swap=swap, drain_timeout=drain_timeout)
        guard.load()
        with guard.lease() as old:
            outcome(world.spawn(guard.reload))
            world.join()
            abandoned = world.last(GenerationAbandoned)
            assert (1, 1) == (abandoned.generation, abandoned.in_flight)
            assert 2 == outcome(world.spawn(number, guard))
            assert (["a"], 1) == (old.words("a"), guard.status().in_flight)
            assert [] == world.seen(GenerationReleased)
            del old
        world.join()
        assert [(1, False)] == [(event.generation, event.alive) for event in world.seen(GenerationReleased)]
        assert 0 == guard.status().in_flight

    def test_of_an_abandoned_generation_ends_with_its_very_last_call(self, world: World) -> None:
        """With several calls left, the last of them releases the model, nested ones included."""
        guard = world.guard(drain_timeout=0)
        nested = guard(lambda model: model.number)
        first, second = guard.lease(), guard.lease()
        with first:
            with second:
                outcome(world.spawn(guard.reload))
                world.join()
                assert 1 == nested()
            assert [] == world.seen(GenerationReleased)
            assert 1 == nested()
        world.join()
        assert [1] == [event.generation for event in world.seen(GenerationReleased)]

    def test_holds_up_no_other_guard(self, world: World) -> None:
        """A guard whose calls never end does not keep others from reloading."""
        stuck, other = world.guard(drain_timeout=0, name="stuck"), world.guard(Loader(world), name="other")
        other.load()
        with stuck.lease():
            outcome(world.spawn(stuck.reload))
            outcome(world.spawn(other.reload))
            assert 2 == other.status().generation

    def test_memory_is_not_judged_before_it_is_over(self, world: World) -> None:
        """While a predecessor still has calls, the new generation has not settled."""
        guard = world.guard(drain_timeout="1h")
        guard.load()
        with guard.lease():
            outcome(world.spawn(guard.reload))
            assert 1 == len(guard.engine.state.draining)
        world.join()
        assert 0 == len(guard.engine.state.draining)


def test_a_call_that_enters_in_the_moment_of_the_swap_is_served(world: World) -> None:
    """A call that finds its generation retired in the very moment it enters runs on the next one."""
    guard = world.guard(drain_timeout=0)
    guard.load()
    core = guard.engine.state
    old = core.current
    assert old is not None
    call = guard(lambda model: model.number)

    class Leases(list[None]):
        """Makes a swap happen between finding the generation and taking the lease."""

        def append(self, lease: None) -> None:
            if not old.retired:
                outcome(world.spawn(guard.reload))
            super().append(lease)

    old.leases = Leases()
    assert (2, 0) == (call(), len(old.leases))
    world.join()
    assert [1] == [event.generation for event in world.seen(GenerationReleased)]


def test_reloading_tells_how_long_it_waited(world: World) -> None:
    """A call whose deadline passes during a swap gets an error that a web service can turn into an answer."""
    guard = world.guard(swap="drain_first", wait_timeout=0)
    guard.load()
    world.loader.hold()
    guard.reload(wait=False)
    world.loader.reached()
    with pytest.raises(Reloading) as late:
        number(guard)
    assert ("model", 1.0) == (late.value.guard, late.value.retry_after)
    assert 0 <= late.value.waited < TIMEOUT
