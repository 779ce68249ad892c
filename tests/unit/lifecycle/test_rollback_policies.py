"""After ``rollback()`` no policy undoes it, until the source of the model has changed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.lifecycle.sources import Source, kept, polls
from tests.unit.lifecycle.world import World, number

from modelguard import TTL, Between, Changed, Errors, Idle, MemoryLimit, Modified, Uses
from modelguard.lifecycle.policies import source_part


@pytest.mark.parametrize(
    "policy", [TTL("1m"), Uses(3), Errors(1), Idle("1m"), MemoryLimit("50 MB"), TTL("1m") & Uses(1)], ids=repr
)
def test_no_policy_undoes_it(world: World, policy: Any) -> None:
    """The loader would load the bad version again; ``Idle`` too, by the next call."""
    guard = kept(world, reload_on=policy)
    guard.rollback()
    for _ in range(20):
        with pytest.raises(OSError, match="bad input"), guard.lease():
            raise OSError("bad input")
        world.tick(60)
        guard.check()
        world.join()
    assert (1, 2) == (number(guard), world.loader.calls)


def test_a_reload_by_hand_ends_it(world: World) -> None:
    """And policies decide again from then on."""
    guard = kept(world, reload_on=Uses(3))
    guard.rollback()
    guard.reload()
    world.join()
    assert (3, False) == (guard.status().generation, guard.status().pinned)
    for _ in range(3):
        number(guard)
    world.join()
    assert 4 == guard.status().generation


def test_a_new_change_of_the_source_ends_it(world: World, tmp_path: Path) -> None:
    """What was rolled back is not loaded again; what comes after it is."""
    source = Source()
    guard = kept(world, reloads=0, reload_on=Changed(source) | TTL("1h"))
    source.value = "bad"
    assert 2 == polls(world, guard, 3)
    guard.rollback()
    assert 1 == polls(world, guard, 100)
    source.value = "better"
    assert 3 == polls(world, guard, 5)
    assert not guard.status().pinned


def test_a_source_that_goes_back_is_a_change_too(world: World) -> None:
    """Whoever sets the registry's alias back gets the old version from there."""
    source = Source()
    guard = kept(world, reloads=0, reload_on=Changed(source))
    source.value = "bad"
    assert 2 == polls(world, guard, 3)
    guard.rollback()
    source.value = "a"
    assert 3 == polls(world, guard, 5)


def test_a_new_file_ends_it(world: World, tmp_path: Path) -> None:
    """The file of the version that was rolled back stays, and is not loaded again."""
    path = tmp_path / "model.bin"
    path.touch()
    world.files[path] = (("", 1, 1, 1, 1, 1),)
    guard = kept(world, reloads=0, reload_on=Modified(path, atomic=True))

    def checks(count: int) -> int:
        for _ in range(count):
            world.tick(5)
            guard.check()
            world.join()
        return guard.status().generation

    world.files[path] = (("", 1, 2, 2, 2, 2),)
    assert 2 == checks(2)
    guard.rollback()
    assert 1 == checks(20)
    world.files[path] = (("", 1, 3, 3, 3, 3),)
    assert 3 == checks(2)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, "None"),
        (TTL("1h"), "None"),
        (Changed(len), "Changed(len)"),
        (Changed(len) | Uses(3) | Errors(2), "Changed(len)"),
        (Changed(len) & Between("02:00", "05:00"), "Changed(len) & Between('02:00', '05:00')"),
        ((Changed(len) | TTL("1h")) & Between("02:00", "05:00"), "Changed(len) & Between('02:00', '05:00')"),
        (TTL("1h") & Between("02:00", "05:00"), "None"),
        (Idle("1h") | (Modified("/x") & TTL("1h")), "Modified('/x') & TTL('1h')"),
    ],
    ids=repr,
)
def test_the_part_of_a_policy_that_ends_it(policy: Any, expected: str) -> None:
    """Only what needs a change of the source."""
    assert expected == repr(source_part(policy))
