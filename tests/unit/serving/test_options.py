"""``_options``: invalid options are rejected where they are written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from modelguard import AutoSize, Breaker, Buffer, Execution, Fair, Weight, batched
from modelguard.errors import InvalidOption
from modelguard.serving import Limits

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
    ({"max_size": 4, "threads": 0}, "threads"),
    ({"max_size": 4, "weight": 3}, "weight"),
    ({"max_size": 4, "on_error": "ignore"}, "on_error"),
    ({"max_size": 4, "breaker": 5}, "breaker"),
    ({"max_size": 4, "fair_by": "tenant"}, "fair_by"),
    ({"max_size": 4, "max_queue": 8, "fair_by": Fair(quota=9)}, "quota"),
    ({"max_size": "auto"}, "max_size"),
    ({"max_size": AutoSize(slo="1s"), "max_wait": "1s"}, "slo"),
    ({"max_size": AutoSize(slo="1s"), "deadline": "500ms"}, "slo"),
    ({"max_size": 4, "execution": "own"}, "execution"),
    ({"max_size": 4, "buffer": 0}, "buffer"),
    ({"max_size": 4, "buffer": "8"}, "buffer"),
]


@pytest.mark.parametrize(("options", "argument"), BAD, ids=str)
def test_an_invalid_option_is_rejected(options: dict[str, Any], argument: str) -> None:
    """The error names it and gives a fix, before anything is decorated."""
    with pytest.raises(InvalidOption) as rejected:
        batched(**options)
    assert argument == rejected.value.argument
    assert rejected.value.fix


BAD_PARTS: list[tuple[Any, dict[str, Any], str]] = [
    (Weight, {"of": 3}, "of"),
    (Weight, {"of": len, "most": 0}, "most"),
    (Weight, {"of": len, "most": math.inf}, "most"),
    (Weight, {"of": len, "padded": 1}, "padded"),
    (Fair, {"by": "tenant"}, "by"),
    (Fair, {"shares": ["gold"]}, "shares"),
    *((Fair, {"shares": {"gold": share}}, "shares") for share in (0, -1, math.nan, math.inf, True, "4")),
    (Fair, {"quota": 0}, "quota"),
    (Fair, {"quota": 2.5}, "quota"),
    (Fair, {"ageing": 0}, "ageing"),
    (Fair, {"ageing": "soon"}, "ageing"),
    (AutoSize, {"slo": 0}, "slo"),
    (Execution, {"loop": "mine"}, "loop"),
    (Execution, {"hang_after": 0}, "hang_after"),
    (Buffer, {"parts": 0}, "parts"),
    (Buffer, {"slow_after": -1}, "slow_after"),
]


@pytest.mark.parametrize(("kind", "fields", "argument"), BAD_PARTS, ids=str)
def test_an_invalid_part_of_the_options_is_rejected(kind: Any, fields: dict[str, Any], argument: str) -> None:
    """The error names the field and gives a fix, where the part is made."""
    with pytest.raises(InvalidOption) as rejected:
        kind(**fields)
    assert argument == rejected.value.argument
    assert rejected.value.fix


def test_the_limits_are_shown_in_base_units() -> None:
    """``limits`` gives the bounds of a batched function as it uses them, in items and seconds."""
    f = batched(
        max_size=4,
        max_wait="10ms",
        deadline="2m",
        threads=2,
        weight=Weight(of=len, most=50, padded=True),
        fair_by=Fair(by=len, shares={1: 4}, quota=8, ageing="1m"),
        name="f",
    )(sorted)
    expected = Limits(
        name="f",
        max_size=4,
        max_queue=256,
        max_wait=0.01,
        max_weight=50,
        deadline=120,
        threads=2,
        hang_after=1200,
        weighed=True,
        padded=True,
        fair=True,
        shares={1: 4},
        quota=8,
        ageing=60,
    )
    assert expected == f.limits
    assert Limits(name="g", max_size=4, max_queue=256) == batched(max_size=4, name="g")(sorted).limits


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
def test_an_invalid_breaker_is_rejected(options: dict[str, Any], argument: str) -> None:
    """The error names the argument, where the breaker is made."""
    with pytest.raises(InvalidOption) as rejected:
        Breaker(**options)
    assert argument == rejected.value.argument


async def _later(item: object) -> object:
    return item


@pytest.mark.parametrize("argument", ["weight", "fair_by"])
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda: 1, "is called as a function of one item: too many positional arguments"),
        (lambda item, other: 1, "is called as a function of one item: missing a required argument: 'other'"),
        (_later, "must be a plain function of one item, not a coroutine function"),
    ],
)
def test_a_function_of_an_item_that_cannot_be_called_with_one(argument: str, given: object, why: str) -> None:
    """It is refused where it is given, not at the first call; and no coroutine becomes a key of its own."""
    with pytest.raises(InvalidOption, match=f"{argument}=.*{why}"):
        batched(max_size=2, **{argument: given})(list)  # type: ignore[arg-type]
