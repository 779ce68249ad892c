"""Memory that ``load_first`` leaves behind: ``auto`` returns it by a ``drain_first`` now and then."""

from __future__ import annotations

import pytest
from tests.unit.lifecycle.world import MB, World

from modelguard.lifecycle._state import LeftBehind
from modelguard.telemetry import SwapChosen


def crept(*readings: int) -> LeftBehind:
    """A count of these readings, in MB, all after ``load_first``."""
    left_behind = LeftBehind()
    for reading in readings:
        left_behind.record(reading * MB, one_copy=False)
    return left_behind


@pytest.mark.parametrize(
    ("readings", "amount"),
    [
        ((), 0),
        ((270, 300), 0),
        ((270, 300, 300), 0),
        ((270, 300, 310, 305), 30),
        ((270, 300, 310, 305, 272), 2),
        ((300, 280, 270), 0),
    ],
)
def test_the_lowest_of_three_readings_counts(readings: tuple[int, ...], amount: int) -> None:
    """One high reading is the heap of one load, not left_behind."""
    assert amount * MB == crept(*readings).amount


def test_a_tenth_of_the_model_is_too_much() -> None:
    """And for small models, more than a load's own heap."""
    assert not crept(270, 297, 297, 297).is_too_much(280 * MB)
    assert crept(270, 299, 299, 299).is_too_much(280 * MB)
    assert not crept(20, 36, 36, 36).is_too_much(10 * MB)
    assert crept(20, 37, 37, 37).is_too_much(10 * MB)


def test_counting_begins_anew_with_one_copy_at_a_time() -> None:
    """What that leaves is the new floor."""
    left_behind = crept(270, 300, 300, 300)
    left_behind.record(275 * MB, one_copy=True)
    assert 0 == left_behind.amount
    for _ in range(3):
        left_behind.record(310 * MB, one_copy=False)
    assert 35 * MB == left_behind.amount


def test_what_grows_for_another_reason_is_tolerated_more_and_more() -> None:
    """A service that leaks by itself does not make every few reloads wait: the tolerance doubles each time."""
    left_behind, memory, chosen = LeftBehind(), 300, []
    for number in range(100):
        one_copy = left_behind.is_too_much(100 * MB)
        memory += 5
        left_behind.record(memory * MB, one_copy=one_copy)
        if one_copy:
            chosen.append(number)
    assert 5 >= len(chosen)
    assert all(later - former > earlier for former, later, earlier in zip(chosen[1:], chosen[2:], chosen, strict=False))


def test_auto_returns_what_crept(world: World) -> None:
    """Reloads that each leave 10 MB behind: after a few, one is drain_first, and memory is where it began."""
    world.inline = True
    world.model_size = 100 * MB
    world.headroom = 1000 * MB
    left_behind = 0

    def load() -> object:
        nonlocal left_behind
        two_copies = guard.engine.state.current is not None
        world.memory += 10 * MB if two_copies else -left_behind
        left_behind = left_behind + 10 * MB if two_copies else 0
        return world.loader()

    guard = world.guard(load=load, swap="auto")
    guard.load()
    first = world.memory
    for _ in range(20):
        guard.reload()
    swaps = [event.swap for event in world.seen(SwapChosen)]
    assert 3 <= swaps.count("drain_first") <= 6
    assert first + 70 * MB >= world.memory
    assert "left 20 MB behind" in next(event.why for event in world.seen(SwapChosen) if event.swap == "drain_first")
