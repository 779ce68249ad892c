"""``_options``: invalid options are rejected where they are written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from modelguard import Breaker, batched
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
    ({"max_size": 4, "max_weight": 10}, "max_weight"),
    ({"max_size": 4, "weight": len, "max_weight": 0}, "max_weight"),
    ({"max_size": 4, "weight": len, "max_weight": math.inf}, "max_weight"),
    ({"max_size": 4, "on_error": "ignore"}, "on_error"),
    ({"max_size": 4, "breaker": 5}, "breaker"),
    ({"max_size": 4, "padded": True}, "padded"),
    ({"max_size": 4, "weight": len, "padded": 1}, "padded"),
    ({"max_size": 4, "fair_by": "tenant"}, "fair_by"),
    ({"max_size": 4, "shares": ["gold"]}, "shares"),
    ({"max_size": 4, "shares": {"gold": 0}}, "shares"),
    ({"max_size": 4, "shares": {"gold": -1}}, "shares"),
    ({"max_size": 4, "shares": {"gold": math.nan}}, "shares"),
    ({"max_size": 4, "shares": {"gold": math.inf}}, "shares"),
    ({"max_size": 4, "shares": {"gold": True}}, "shares"),
    ({"max_size": 4, "shares": {"gold": "4"}}, "shares"),
    ({"max_size": 4, "quota": 0}, "quota"),
    ({"max_size": 4, "quota": 2.5}, "quota"),
    ({"max_size": 4, "max_queue": 8, "quota": 9}, "quota"),
    ({"max_size": 4, "ageing": 0}, "ageing"),
    ({"max_size": 4, "ageing": "soon"}, "ageing"),
]


@pytest.mark.parametrize(("options", "argument"), BAD, ids=str)
def test_an_invalid_option_is_rejected(options: dict[str, Any], argument: str) -> None:
    """The error names it and gives a fix, before anything is decorated."""
    with pytest.raises(InvalidOption) as rejected:
        batched(**options)
    assert argument == rejected.value.argument
    assert rejected.value.fix


def test_the_limits_are_shown_in_base_units() -> None:
    """``limits`` gives the bounds of a batched function as it uses them, in items and seconds."""
    f = batched(
        max_size=4,
        max_wait="10ms",
        deadline="2m",
        threads=2,
        weight=len,
        max_weight=50,
        padded=True,
        fair_by=len,
        shares={1: 4},
        quota=8,
        ageing="1m",
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
