"""What is refused where a function is isolated, and what each message says to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelguard import TTL, Isolated, Uses, batched, guard, guard_of, isolate, pool
from modelguard.errors import InvalidOption
from modelguard.frameworks._answers import WebOptions
from modelguard.isolation import _registry
from modelguard.lifecycle.guard import guards

model = guard(dict, reload_on=None, name="model")
many = pool(dict, max_memory="1 GB")


@model
def predict(loaded: dict[str, int], text: str) -> str:
    """Use the model."""
    return text * len(loaded)


def plain(texts: list[str]) -> list[str]:
    """Use none."""
    return texts


@many(key="text")
def pooled(loaded: dict[str, int], text: str) -> str:
    """Use one of many."""
    return text * len(loaded)


class Service:
    """Has a method."""

    def method(self) -> None:
        """Do nothing."""


def inner() -> Callable[[], None]:
    """Make a function that has no name of its own."""

    def hidden() -> None: ...

    return hidden


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda: 1, "is a lambda"),
        (inner(), "is defined inside another function"),
        (Service.method, "is a method"),
        (Service, "must be a function"),
        ("text", "must be a function"),
        (batched(max_size=2)(plain), "is batched or isolated already"),
        (pooled, "takes its model from a pool"),
    ],
)
def test_what_a_worker_could_not_import_is_refused(function: Any, why: str) -> None:
    """At the definition, with what to write instead, and not at the first call."""
    with pytest.raises(InvalidOption, match=why):
        isolate()(function)


def test_a_notebook_cell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a notebook exists in no file."""
    import sys
    import types

    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))

    def cell() -> None: ...

    cell.__module__, cell.__qualname__ = "__main__", "cell"
    with pytest.raises(InvalidOption, match=r"notebook.*writefile"):
        isolate()(cell)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": 1.5},
        {"timeout": "soon"},
        {"timeout": 0},
        {"start": "thread"},
        {"max_queue": 0},
        {"max_transfer": "big"},
        {"retry": 1},
        {"breaker": 5},
        {"name": " "},
        {"recycle_on": 5},
        {"scope": "cluster"},
        {"scope": None},
        {"version": "2"},
        {"version": 2, "scope": "host"},
    ],
)
def test_invalid_options_are_named(options: dict[str, Any]) -> None:
    """The error says which option, and what to write."""
    with pytest.raises(InvalidOption, match=next(iter(options))):
        isolate(**options)(plain)


def test_a_broker_takes_no_policy_of_the_application() -> None:
    """It imports nothing of it, so such a policy could not be asked there."""

    class OnSundays(TTL):
        pass

    with pytest.raises(InvalidOption, match=r"scope.*OnSundays.*Use TTL or Modified"):
        isolate(scope="host", recycle_on=OnSundays("1h") | Uses(5))(plain)


def test_a_guards_own_policy_decides() -> None:
    """recycle_on beside a guard would be a second answer to one question."""
    with pytest.raises(InvalidOption, match="recycle_on"):
        isolate(recycle_on=TTL("1h"))(predict)


def test_the_decorator_needs_its_parentheses() -> None:
    """@isolate without them gets a message that shows them."""
    with pytest.raises(InvalidOption, match=r"@isolate\(\)"):
        isolate(predict)  # type: ignore[arg-type]


def test_a_guard_above_is_refused() -> None:
    """The order of the decorators is told."""
    with pytest.raises(InvalidOption, match="above the guard's decorator"):
        model(isolate()(plain))


class TestReadiness:
    def test_its_guards_are_no_guards_of_this_process(self) -> None:
        """A readiness probe must not wait for a model that is never loaded here."""
        isolated: Isolated[Any, Any] = isolate()(predict)
        assert guard_of(predict) not in guards()
        assert isolated in _registry.live()
        assert not isolated.ready

    def test_status_before_the_first_call(self) -> None:
        """Nothing has been started."""
        status = isolate(name="early")(predict).status()
        assert ("early", "new", None, ()) == (status.name, status.state, status.mold, status.workers)

    def test_the_probe_waits_for_it(self) -> None:
        """/readyz is false while no worker can answer, and names the function."""
        isolated = isolate(name="slow to load")(predict)
        probe = WebOptions(detail=True).probe("GET", "/readyz")
        assert probe is not None
        assert b"slow to load" in probe.body
        assert not isolated.ready
