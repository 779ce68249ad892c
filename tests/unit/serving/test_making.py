"""``batched``: what cannot be meant is refused where it is written."""

from __future__ import annotations

import inspect
import math
import pickle
from typing import Any

import pytest

from modelguard import Batched, Breaker, batched, guard
from modelguard.errors import InvalidOption


def double(items: list[int], *, by: int = 2) -> list[int]:
    """Doubles."""
    return [item * by for item in items]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_size": 0}, "max_size"),
    ({"max_size": -1}, "max_size"),
    ({"max_size": 2.5}, "max_size"),
    ({"max_size": True}, "max_size"),
    ({"max_size": 4, "max_wait": -1}, "max_wait"),
    ({"max_size": 4, "max_wait": math.nan}, "max_wait"),
    ({"max_size": 4, "max_wait": "soon"}, "max_wait"),
    ({"max_size": 4, "deadline": 0}, "deadline"),
    ({"max_size": 4, "deadline": math.nan}, "deadline"),
    ({"max_size": 4, "deadline": -1}, "deadline"),
    ({"max_size": 4, "max_queue": 0}, "max_queue"),
    ({"max_size": 4, "max_queue": 3}, "max_queue"),
    ({"max_size": 512}, "max_queue"),
    ({"max_size": 4, "workers": 0}, "workers"),
    ({"max_size": 4, "weight": 3}, "weight"),
    ({"max_size": 4, "max_weight": 10}, "max_weight"),
    ({"max_size": 4, "weight": len, "max_weight": 0}, "max_weight"),
    ({"max_size": 4, "weight": len, "max_weight": math.inf}, "max_weight"),
    ({"max_size": 4, "on_error": "ignore"}, "on_error"),
    ({"max_size": 4, "breaker": 5}, "breaker"),
]


@pytest.mark.parametrize(("options", "argument"), BAD, ids=str)
def test_an_option_that_cannot_be_meant_is_refused(options: dict[str, Any], argument: str) -> None:
    """By its name, before anything is decorated."""
    with pytest.raises(InvalidOption) as refused:
        batched(**options)
    assert argument == refused.value.argument
    assert refused.value.fix


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"failures": 0}, "failures"),
        ({"failures": True}, "failures"),
        ({"cooldown": 0}, "cooldown"),
        ({"cooldown": "2m", "max_cooldown": "1m"}, "max_cooldown"),
        ({"ignore": ValueError}, "ignore"),
        ({"ignore": (3,)}, "ignore"),
        ({"reload": "nlp"}, "reload"),
    ],
)
def test_a_breaker_that_cannot_be_meant_is_refused(options: dict[str, Any], argument: str) -> None:
    """Where it is made."""
    with pytest.raises(InvalidOption) as refused:
        Breaker(**options)
    assert argument == refused.value.argument


async def coroutine(items: list[int]) -> list[int]:
    return items


def generator(items: list[int]) -> Any:
    yield from items


async def async_generator(items: list[int]) -> Any:
    for item in items:
        yield item


def nothing() -> list[int]:
    return []


def named(*, items: list[int]) -> list[int]:
    return items


def bounded(items: list[int], timeout: float = 1.0) -> list[int]:
    return items


@pytest.mark.parametrize(
    "function",
    [coroutine, generator, async_generator, nothing, named, bounded, 3, None, "f", int, staticmethod(double)],
)
def test_what_cannot_run_batches_is_refused(function: Any) -> None:
    """When it is decorated, with what to write instead."""
    with pytest.raises(InvalidOption) as refused:
        batched(max_size=4)(function)
    assert "function" == refused.value.argument


def test_it_looks_like_the_function() -> None:
    """Name, module and documentation are the function's own."""
    made = batched(max_size=4)(double)
    assert isinstance(made, Batched)
    assert ("double", "Doubles.", double.__module__) == (made.__name__, made.__doc__, made.__module__)
    assert f"{double.__module__}.double" == made.name
    assert "tokens" == batched(max_size=4, name="tokens")(double).name
    assert "by" in inspect.signature(made).parameters


def test_nothing_runs_before_the_first_item() -> None:
    """No thread is started by a decorator."""
    import threading

    before = {*threading.enumerate()}
    made = batched(max_size=4)(double)
    assert before == {*threading.enumerate()}
    assert ("open", 0) == (made.status().state, made.status().batches)


def test_built_in_functions_can_be_batched() -> None:
    """Anything that takes a list and returns as many results."""
    assert 3 == batched(max_size=4)(sorted)(3)


module_level = batched(max_size=4)(double)
module_level.__qualname__ = "module_level"


def test_it_is_pickled_by_its_name() -> None:
    """As functions are, so that spawned workers find it."""
    assert pickle.loads(pickle.dumps(module_level)) is module_level


def test_a_guard_goes_under_it() -> None:
    """The batch function is called without the model, and each batch is one call on the guard."""
    nlp = guard(dict, reload_on=None)

    @batched(max_size=4)
    @nlp
    def lengths(model: dict[str, int], items: list[str]) -> list[int]:
        return [len(item) + len(model) for item in items]

    assert 3 == lengths("abc")
    assert 1 == nlp.status().uses
