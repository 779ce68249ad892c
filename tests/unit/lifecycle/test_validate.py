"""``validate``: what it sees of the new model and the old one."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
from tests.unit.lifecycle.world import TIMEOUT, World, number, until

from modelguard import Idle, telemetry
from modelguard.errors import InvalidOption, ModelRejected


class Judge:
    """Remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int | None]] = []
        self.answer: object = True

    def __call__(self, new: Any, old: Any) -> object:
        self.seen.append((new.number, None if old is None else old.number))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def judge() -> Judge:
    return Judge()


def test_it_sees_both_models(world: World, judge: Judge) -> None:
    """The one that takes calls now is the second argument; there is none at the first load."""
    guard = world.guard(validate=judge)
    for _ in range(3):
        guard.reload()
        world.join()
    assert [(1, None), (2, 1), (3, 2)] == judge.seen
    guard.close()


def test_after_a_rejection_the_old_one_is_compared_again(world: World, judge: Judge) -> None:
    """The old model keeps taking calls, and is released once, when it is replaced."""
    guard = world.guard(validate=judge)
    guard.load()
    for answer in (False, ValueError("differs"), SystemExit(1)):
        judge.answer = answer
        with pytest.raises(ModelRejected):
            guard.reload()
    judge.answer = True
    world.tick(100)
    guard.reload()
    world.join()
    assert [(1, None), (2, 1), (3, 1), (4, 1), (5, 1)] == judge.seen
    assert 5 == number(guard)
    assert [1] == [event.generation for event in world.seen(telemetry.GenerationReleased) if event.version is None][-1:]


def test_without_an_old_model_it_gets_none(world: World, judge: Judge) -> None:
    """Under ``drain_first`` and after ``Idle`` the old model is gone before the new one is loaded."""
    guard = world.guard(validate=judge, swap="drain_first")
    guard.load()
    guard.reload()
    other = world.guard(validate=judge, reload_on=Idle("1m"))
    other.load()
    other.unload()
    other.load()
    assert [None] * 4 == [old for _, old in judge.seen]


def test_an_async_one_sees_both(world: World) -> None:
    """It is awaited while the old model is kept."""
    seen = []

    async def judge(new: Any, old: Any) -> None:
        seen.append((new.number, old and old.number))

    guard = world.guard(validate=judge)
    guard.load()
    guard.reload()
    assert [(1, None), (2, 1)] == seen


def test_the_old_model_is_not_unloaded_while_it_is_compared(world: World) -> None:
    """Though the guard is closed meanwhile, and its drain is over."""
    entered, over = threading.Event(), threading.Event()
    unloaded: list[bool] = []

    def judge(new: Any, old: Any) -> None:
        if old is not None:
            entered.set()
            assert over.wait(TIMEOUT)
            unloaded.append(old.unloaded)

    guard = world.guard(validate=judge, drain_timeout=0, unload=lambda model: model.unload())
    guard.load()
    guard.reload(wait=False)
    assert entered.wait(TIMEOUT)
    guard.close()
    over.set()
    world.join()
    until(lambda: len(world.seen(telemetry.GenerationReleased)) >= 1)
    assert [False] == unloaded
    assert 1 in [event.generation for event in world.seen(telemetry.GenerationReleased)]


def test_the_comparison_is_no_use(world: World, judge: Judge) -> None:
    """It counts neither as a call nor as an error, and a drain does not wait for it any longer."""
    guard = world.guard(validate=judge)
    guard.load()
    judge.answer = False
    with pytest.raises(ModelRejected):
        guard.reload()
    assert (0, 0) == (guard.status().uses, guard.status().in_flight)


@pytest.mark.parametrize(
    "validate",
    [
        lambda model: model.number,
        lambda model, strict=True: strict is True and model.number,
        lambda *models: len(models) == 1,
        lambda model, *, limit=1: limit == 1,
        functools.partial(lambda limit, model: limit == 1 and model.number, 1),
    ],
    ids=["one", "default", "variadic", "keyword", "partial"],
)
def test_a_parameter_with_a_default_is_left_alone(world: World, validate: Any) -> None:
    """What was written for one model gets one."""
    guard = world.guard(validate=validate)
    guard.load()
    guard.reload()
    world.join()
    assert 2 == number(guard)


@pytest.mark.parametrize(
    "validate",
    [lambda new, old, more: True, lambda new, old, *, key: True, lambda: True],
    ids=["three", "keyword", "none"],
)
def test_other_signatures_are_rejected_at_the_definition(world: World, validate: Any) -> None:
    """It takes one model or two."""
    with pytest.raises(InvalidOption, match=r"validate=.*: is called as a function of one argument"):
        world.guard(validate=validate)
