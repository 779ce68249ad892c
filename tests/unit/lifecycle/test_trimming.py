"""``trim_every``: freed memory is returned while traffic goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, World

from modelguard import memory
from modelguard.errors import InvalidOption, NotSupported
from modelguard.lifecycle.system import System, use
from modelguard.memory import Trimming, TrimSchedule, running
from modelguard.runtime import background
from modelguard.telemetry import MemoryTrimmed


@pytest.fixture(autouse=True)
def in_this_world(world: World) -> Iterator[None]:
    """Time and memory of what is trimmed here are the world's; nothing goes on after the test."""
    with use(lambda: world.system):
        yield
    trimming = running()
    if trimming is not None:
        trimming.stop()


def started(every: Any, system: System | None = None) -> Trimming:
    """What `trim_every` starts, in another system than the world's if there is one."""
    if system is None:
        return memory.trim_every(every)
    with use(lambda: system):
        return memory.trim_every(every)


def trims(world: World) -> int:
    """How often memory was returned while traffic went on."""
    return sum(isinstance(event, MemoryTrimmed) for event in world.events)


class TestAnInterval:
    def test_passes_between_two_trims(self, world: World) -> None:
        """With "30s", memory is returned every 30 seconds, and the event says how much and how long it took."""
        trimming = started("30s")
        world.cpu += 1.0
        world.tick(29)
        trimming.tick()
        assert 0 == trims(world)
        world.tick(1)
        trimming.tick()
        trimming.tick()
        assert 1 == trims(world)
        event = world.last(MemoryTrimmed)
        assert ("process", "fake", 0.0) == (event.guard, event.trimmed_by, event.seconds)
        world.cpu += 1.0
        world.tick(30)
        trimming.tick()
        assert 2 == trims(world)

    def test_without_work_is_slept_through(self, world: World) -> None:
        """An idle process frees nothing, so nothing is trimmed."""
        trimming = started(30)
        world.cpu += 1.0
        for _ in range(5):
            world.tick(30)
            trimming.tick()
        assert 1 == trims(world)

    def test_with_little_work_just_after_a_trim_is_not(self, world: World) -> None:
        """A call that a trim comes in the middle of may free all that it holds within 10 ms: that is returned too."""
        trimming = started(30)
        world.cpu += 1.0
        for _ in range(5):
            world.tick(30)
            trimming.tick()
            world.cpu += 0.001
        assert 2 == trims(world)

    def test_is_passed_to_the_ticker(self, world: World) -> None:
        """The ticker wakes when the next trim is due."""
        trimming = started("30s")
        world.tick(0.5)
        trimming.tick()
        assert 29.5 == trimming.check_interval()


class TestGrowth:
    def test_by_the_bound_is_what_is_waited_for(self, world: World) -> None:
        """With "100 MB", memory is returned at first, to know what is in use, and then after that much growth."""
        trimming = started("100 MB")
        world.cpu += 1.0
        world.tick(1)
        trimming.tick()
        for grown in (60, 30, 20, 50):
            world.memory += grown * MB
            world.cpu += 1.0
            world.tick(1)
            trimming.tick()
        assert 2 == trims(world)

    def test_is_counted_from_the_lowest_reading(self, world: World) -> None:
        """What is released in between lowers the mark from which growth counts."""
        trimming = started("100 MB")
        world.cpu += 1.0
        for change in (0, -50, 99, 1):
            world.memory += change * MB
            world.cpu += 1.0
            world.tick(1)
            trimming.tick()
        assert 2 == trims(world)

    def test_is_of_what_is_not_in_use(self, world: World) -> None:
        """What a call holds at the moment of a reading is not a floor: when it is freed, it is returned."""
        trimming = started("100 MB")
        world.cpu += 1.0
        world.memory, world.in_use = 300 * MB, 200 * MB
        for in_use in (200, 200, 20):
            world.in_use = in_use * MB
            world.cpu += 1.0
            world.tick(1)
            trimming.tick()
        assert 2 == trims(world)

    def test_is_also_of_what_a_call_frees_during_a_trim(self, world: World) -> None:
        """What is freed between a trim and the reading after it is returned later."""

        def trim() -> str:
            world.in_use = 20 * MB
            return world.trim()

        trimming = started("100 MB", replace(world.system, trim=trim))
        world.cpu += 1.0
        world.memory, world.in_use = 300 * MB, 200 * MB
        for _ in range(2):
            world.cpu += 1.0
            world.tick(1)
            trimming.tick()
        assert 2 == trims(world)

    def test_readings_take_a_hundredth_of_the_time(self, world: World) -> None:
        """A reading that took 10 ms is not repeated within the next second."""
        taken = []

        def slow() -> int:
            taken.append(world.now)
            world.tick(0.01)
            return world.memory

        trimming = started("100 MB", replace(world.system, private=slow))
        world.cpu += 1.0
        world.tick(1)
        trimming.tick()
        taken.clear()
        for _ in range(25):
            world.cpu += 1.0
            trimming.tick()
            world.tick(0.1)
        assert 2 == len(taken)


class TestTheProcess:
    def test_a_forked_one_starts_anew(self, world: World) -> None:
        """A worker trims at its own intervals, whatever its parent had read by then."""
        trimming = memory.trim_every("30s")
        world.tick(29)
        trimming.after_fork_in_child()
        world.tick(1)
        trimming.tick()
        assert 0 == trims(world)
        world.tick(29)
        trimming.tick()
        assert 1 == trims(world)

    def test_has_one_interval(self) -> None:
        """The same line again changes nothing; another interval is refused, by name, until the first is stopped."""
        first = memory.trim_every("1m30s")
        assert first is memory.trim_every(90)
        with pytest.raises(InvalidOption, match="every 1m30s already"):
            memory.trim_every("100 MB")
        assert "Trimming('1m30s', runs)" == repr(first)
        first.stop()
        first.stop()
        assert "Trimming('1m30s', stopped)" == repr(first)
        with memory.trim_every("100 MB") as second:
            first.stop()
            assert "Trimming('100 MB', runs)" == repr(second)
        assert running() is None

    @pytest.mark.parametrize("value", ["often", "0s", 0, -1, "0 MB", "-3 MB", math.nan, True, "ten MB", None])
    def test_what_is_no_interval_is_refused(self, value: Any) -> None:
        """A value that is neither a duration nor a size is rejected, and nothing starts."""
        with pytest.raises(InvalidOption, match="trim_every"):
            memory.trim_every(value)
        assert running() is None

    def test_is_refused_where_nothing_can_be_given_back(self, world: World) -> None:
        """On macOS, and with an unknown allocator, it says why, instead of doing nothing."""

        def refuse() -> None:
            raise NotSupported("returning freed memory to the system", reason="it requires Linux, and this is darwin")

        with use(lambda: replace(world.system, check_trim=refuse)), pytest.raises(NotSupported, match="darwin"):
            memory.trim_every("30s")

    def test_without_a_thread_is_not_said_to_run(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the system gives no thread the error comes through, and the next call tries again."""

        def refuse(_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(background.TICKER, "add", refuse)
        with use(lambda: replace(world.system, ticks=True)), pytest.raises(RuntimeError, match="new thread"):
            memory.trim_every("30s")
        assert running() is None


def test_text_that_ends_in_b_is_a_size() -> None:
    """Seconds, text and sizes are distinguished by their units."""
    assert TrimSchedule(seconds=90.0) == TrimSchedule.parse("1m30s")
    assert TrimSchedule(seconds=5.0) == TrimSchedule.parse(5)
    assert TrimSchedule(growth=100_000_000) == TrimSchedule.parse("100 MB")
    assert TrimSchedule(growth=2**30) == TrimSchedule.parse("1 GiB")
