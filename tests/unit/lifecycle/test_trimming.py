"""``trim_every``: freed memory is returned while traffic goes on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, World

from modelguard.errors import InvalidOption, NotSupported
from modelguard.lifecycle._options import TrimSchedule
from modelguard.telemetry import MemoryTrimmed


def call(guard: Any, times: int = 1) -> None:
    """Use the guarded model."""
    for _ in range(times):
        with guard.lease():
            pass


def trims(world: World) -> int:
    """How often memory was returned while traffic went on."""
    return sum(isinstance(event, MemoryTrimmed) for event in world.events)


class TestAnInterval:
    def test_passes_between_two_trims(self, world: World) -> None:
        """With "30s", memory is returned every 30 seconds, and the event says how much and how long it took."""
        guard = world.guard(trim_every="30s")
        call(guard)
        world.tick(29)
        guard.check()
        assert 0 == trims(world)
        world.tick(1)
        guard.check()
        guard.check()
        assert 1 == trims(world)
        event = world.last(MemoryTrimmed)
        assert ("model", "fake", 0.0) == (event.guard, event.trimmed_by, event.seconds)
        call(guard)
        world.tick(30)
        guard.check()
        assert 2 == trims(world)

    def test_without_calls_is_slept_through(self, world: World) -> None:
        """A process without calls frees nothing, so nothing is trimmed."""
        guard = world.guard(trim_every=30)
        call(guard)
        for _ in range(5):
            world.tick(30)
            guard.check()
        assert 1 == trims(world)

    def test_is_passed_to_the_ticker(self, world: World) -> None:
        """The ticker wakes when the next trim is due."""
        guard = world.guard(trim_every="30s")
        call(guard)
        world.tick(0.5)
        guard.check()
        assert 0 < guard.engine.check_interval() <= 30
        assert math.inf == world.guard().engine.check_interval()

    def test_before_the_first_load_is_slept_through(self, world: World) -> None:
        """A guard that has loaded nothing trims nothing."""
        guard = world.guard(trim_every="1s")
        world.tick(10)
        guard.check()
        assert 0 == trims(world)


class TestGrowth:
    def test_by_the_bound_is_what_is_waited_for(self, world: World) -> None:
        """With "100 MB", memory is returned at first, to know what is in use, and then after that much growth."""
        guard = world.guard(trim_every="100 MB")
        call(guard)
        world.tick(1)
        guard.check()
        for grown in (60, 30, 20, 50):
            world.memory += grown * MB
            call(guard)
            world.tick(1)
            guard.check()
        assert 2 == trims(world)

    def test_is_counted_from_the_lowest_reading(self, world: World) -> None:
        """What is released in between lowers the mark from which growth counts."""
        guard = world.guard(trim_every="100 MB")
        call(guard)
        for change in (0, -50, 99, 1):
            world.memory += change * MB
            call(guard)
            world.tick(1)
            guard.check()
        assert 2 == trims(world)

    def test_is_of_what_is_not_in_use(self, world: World) -> None:
        """What a call holds at the moment of a reading is not a floor: when it is freed, it is returned."""
        guard = world.guard(trim_every="100 MB")
        call(guard)
        world.memory, world.in_use = 300 * MB, 200 * MB
        for in_use in (200, 200, 20):
            world.in_use = in_use * MB
            call(guard)
            world.tick(1)
            guard.check()
        assert 2 == trims(world)

    def test_is_also_of_what_a_call_frees_during_a_trim(self, world: World) -> None:
        """What is freed between a trim and the reading after it is returned later."""

        def trim() -> str:
            world.in_use = 20 * MB
            return world.trim()

        guard = world.guard(trim_every="100 MB", runtime=replace(world.runtime, trim=trim))
        call(guard)
        world.memory, world.in_use = 300 * MB, 200 * MB
        for _ in range(2):
            call(guard)
            world.tick(1)
            guard.check()
        assert 2 == trims(world)

    def test_readings_take_a_hundredth_of_the_time(self, world: World) -> None:
        """A reading that took 10 ms is not repeated within the next second."""
        taken = []

        def slow() -> int:
            taken.append(world.now)
            world.tick(0.01)
            return world.memory

        guard = world.guard(trim_every="100 MB", runtime=replace(world.runtime, private=slow))
        call(guard)
        world.tick(1)
        guard.check()
        taken.clear()
        for _ in range(25):
            guard.check()
            world.tick(0.1)
        assert 2 == len(taken)


class TestWhatCannotBeMeant:
    @pytest.mark.parametrize("value", ["often", "0s", 0, -1, "0 MB", "-3 MB", math.nan, True, "ten MB"])
    def test_is_refused_where_it_is_written(self, world: World, value: Any) -> None:
        """A value that is neither a duration nor a size is rejected by name."""
        with pytest.raises(InvalidOption, match="trim_every"):
            world.guard(trim_every=value)

    def test_is_refused_where_nothing_can_be_given_back(self, world: World) -> None:
        """With an unknown allocator, the option is rejected instead of doing nothing."""

        def refuse() -> None:
            raise NotSupported("trim_every", reason="malloc is served by an unknown allocator (musl)")

        with pytest.raises(NotSupported, match="musl"):
            world.guard(trim_every="30s", runtime=replace(world.runtime, check_trim=refuse))


def test_text_that_ends_in_b_is_a_size() -> None:
    """Seconds, text and sizes are distinguished by their units."""
    assert TrimSchedule(seconds=90.0) == TrimSchedule.parse("1m30s")
    assert TrimSchedule(seconds=5.0) == TrimSchedule.parse(5)
    assert TrimSchedule(growth=100_000_000) == TrimSchedule.parse("100 MB")
    assert TrimSchedule(growth=2**30) == TrimSchedule.parse("1 GiB")
