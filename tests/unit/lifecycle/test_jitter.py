"""Replicas that are started together, and do the same work, do not reload together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, World

from modelguard import TTL, Errors, MemoryGrowth, MemoryLimit, Modified, Policy, Snapshot, Uses
from modelguard.errors import InvalidOption
from modelguard.lifecycle.policies import FileChange
from modelguard.serving._execution import BatchFunction
from modelguard.serving._execution import compute as compute_batch
from modelguard.serving._requests import Batch, Request

#: Memory that a generation held when it settled.
SETTLED = 100 * MB

#: Each policy with a bound of 100.
POLICIES: dict[str, Callable[..., Policy]] = {
    "TTL": lambda **jitter: TTL(100, **jitter),
    "Uses": lambda **jitter: Uses(100, **jitter),
    "MemoryGrowth": lambda **jitter: MemoryGrowth("100 MB", **jitter),
    "MemoryLimit": lambda **jitter: MemoryLimit("200 MB", **jitter),
}
every_policy = pytest.mark.parametrize("name", list(POLICIES))


def due_at(policy: Policy, draw: float, *, first: bool = False) -> int:
    """How many seconds, calls and megabytes of growth make it due."""

    def reached(at: int) -> Snapshot:
        memory = (SETTLED + at * MB,) * 3
        return Snapshot(age=at, uses=at, memory=memory, baseline=SETTLED, jitter=draw, first=first)

    return next(at for at in range(1, 101) if policy.due(reached(at)))


@every_policy
def test_a_bound_comes_earlier_by_up_to_a_tenth(name: str) -> None:
    """Each process reaches its bound at 90 to 100 % of it, as its draw decides."""
    assert [100, 95, 91] == [due_at(POLICIES[name](), draw) for draw in (0.0, 0.5, 0.9)]


@every_policy
def test_the_first_model_of_a_process_spreads_over_half_of_the_bound(name: str) -> None:
    """Replicas that were started together are far apart after their first reload."""
    assert [100, 75, 60] == [due_at(POLICIES[name](), draw, first=True) for draw in (0.0, 0.5, 0.8)]


@every_policy
@pytest.mark.parametrize(("jitter", "due"), [(0, 100), (0.05, 80), (0.8, 36), (1, 20)])
def test_a_wider_jitter_is_never_narrowed(name: str, jitter: float, due: int) -> None:
    """A first model gets five times the jitter, at most half of the bound, or the jitter itself if that is more."""
    assert due == due_at(POLICIES[name](jitter=jitter), 0.8, first=True)


@every_policy
@pytest.mark.parametrize("jitter", [-0.1, 1.1, True, "10%", None, float("nan")], ids=repr)
def test_a_jitter_that_is_no_share_is_refused(name: str, jitter: object) -> None:
    """A jitter is a number from 0 to 1; the error names the argument."""
    with pytest.raises(InvalidOption, match="jitter"):
        POLICIES[name](jitter=jitter)


def test_few_calls_are_exact() -> None:
    """Up to ten calls there is no tenth to take away; of those of the first model, up to half."""
    assert list(range(1, 11)) == [due_at(Uses(count), 0.999) for count in range(1, 11)]
    assert [1, 2, 2, 3, 6] == [due_at(Uses(count), 0.999, first=True) for count in (1, 2, 3, 5, 10)]


def test_uses_are_counted_down_to_the_bound_with_its_jitter() -> None:
    """Calls look at the policy again exactly when it becomes due."""
    assert 15 == Uses(100).next_check(Snapshot(uses=80, jitter=0.5)).uses


def test_a_limit_below_the_fresh_model_stays_ignored_with_jitter() -> None:
    """Jitter takes a part of the room for growth: where there is none, nothing changes."""
    now = Snapshot(memory=(SETTLED + 60 * MB,) * 3, baseline=SETTLED, jitter=0.9, first=True)
    assert not MemoryLimit("90 MB").due(now)
    assert not MemoryLimit("300 MB").due(now)  # 110 MB of growth
    assert MemoryLimit("200 MB").due(now)  # 55 MB of growth


def test_a_change_waits_for_its_spread() -> None:
    """Replicas that see new weights at the same moment load them one after the other."""
    path = Path("/models/weights.bin")

    def due_after(draw: float, **options: Any) -> int:
        policy = Modified(path, **options)
        return next(
            at
            for at in range(200)
            if policy.due(Snapshot(files={path: FileChange(changed=True, quiet=at)}, jitter=draw))
        )

    assert [2, 52, 92] == [due_after(draw, spread=100) for draw in (0.0, 0.5, 0.9)]
    assert [0, 50] == [due_after(draw, spread="100s", atomic=True) for draw in (0.0, 0.5)]
    assert 2 == due_after(0.9)


def test_only_what_a_process_loaded_itself_is_its_first_model(world: World) -> None:
    """Workers that share their parent's model are replaced anew all the time, each with a narrow jitter."""
    seen: list[bool] = []

    class Looking(Policy):
        def due(self, now: Snapshot) -> bool:
            seen.append(now.first)
            return False

    guard = world.guard(reload_on=Looking())
    guard.load()
    guard.check()
    guard.engine.after_fork_in_child()
    guard.check()
    assert (True, False) == (seen[0], seen[-1])
    seen.clear()
    guard.reload()
    world.join()
    guard.check()
    assert {False} == set(seen)


class TestErrorsThatAReloadDoesNotEnd:
    """An input or a dependency that makes every call fail does not make the service load all the time."""

    @staticmethod
    def failing(world: World) -> tuple[Any, Callable[[], None]]:
        guard = world.guard(reload_on=Errors(2), defer=0)
        fail = [True]

        @guard
        def compute(_model: Any) -> None:
            if fail[0]:
                raise ValueError("cannot be computed")

        def calls(count: int = 2, *, bad: bool = True) -> None:
            fail[0] = bad
            for _ in range(count):
                with suppress(ValueError):
                    compute()
            world.join()

        guard.load()
        return guard, calls

    def test_the_first_reload_comes_at_once_and_the_next_ones_wait(self, world: World) -> None:
        """Then the model has to be a minute old, then two, then four; with the least draw half of that."""
        guard, calls = self.failing(world)
        calls()
        ages = []
        for _ in range(3):
            loads, loaded = world.loader.calls, world.now
            while world.loader.calls == loads:
                world.tick(1)
                calls(1)
            ages.append(round(world.now - loaded))
        assert ([30, 60, 120], 5) == (ages, guard.status().generation)

    def test_a_call_that_succeeds_ends_the_wait(self, world: World) -> None:
        """What fails later may well be the model again, and is replaced at once."""
        _, calls = self.failing(world)
        calls()
        calls(1, bad=False)
        calls()
        assert 3 == world.loader.calls

    def test_other_reloads_do_not_wait(self, world: World) -> None:
        """A reload on request goes through, and the errors of the model that it loads count from the beginning."""
        guard, calls = self.failing(world)
        calls()
        guard.reload()
        calls()
        assert 4 == world.loader.calls

    def test_it_never_waits_longer_than_an_hour(self) -> None:
        """However often reloads have not helped, one comes every hour."""
        now = Snapshot(consecutive_errors=5, fruitless_reloads=500, jitter=0.999)
        assert not Errors().due(now)
        assert Errors().due(replace(now, age=3600))


class TestErrorsOfABatch:
    """A poison input in a batch does not look like a broken model."""

    @staticmethod
    def batch(world: World, bad: set[int], *, times: int = 1) -> int:
        """Compute the same 32 items so many times; returns how many failed the last time."""
        guard = world.guard(reload_on=Errors(2), defer=0)

        @guard
        def compute(_model: Any, items: list[int]) -> list[int]:
            if bad.intersection(items):
                raise ValueError("cannot be computed")
            return items

        guard.load()
        function = BatchFunction(run=compute, name="compute", isolate=True)
        failed = [
            compute_batch(function, Batch([Request(item) for item in range(32)], 0.0)).failed for _ in range(times)
        ]
        world.join()
        return failed[-1]

    @pytest.mark.parametrize("bad", [{0}, {31}, {0, 1}, {0, 17}, {15, 16}], ids=str)
    def test_bad_items_do_not_reload_the_model(self, world: World, bad: set[int]) -> None:
        """The runs that look for them raise up to five times in a row, and count once."""
        assert (len(bad), 1) == (self.batch(world, bad), world.loader.calls)

    def test_known_bad_items_do_not_either(self, world: World) -> None:
        """Items that failed before run alone and raise alone, which says nothing about the model."""
        assert (2, 1) == (self.batch(world, {0, 17}, times=4), world.loader.calls)

    @pytest.mark.parametrize(("times", "loads"), [(1, 1), (2, 2)])
    def test_a_model_that_fails_for_everybody_counts_once_for_each_batch(
        self, world: World, times: int, loads: int
    ) -> None:
        """As the breaker does, errors count batches: a broken model is replaced all the same."""
        assert (32, loads) == (self.batch(world, set(range(32)), times=times), world.loader.calls)
