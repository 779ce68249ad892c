"""Stubs of ``isolate(target=...)``, and what a mold imports for nothing: said where a function is defined."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.unit.isolation import test_options

from modelguard import TTL, Changed, Uses, guard, isolate
from modelguard.errors import InvalidOption
from modelguard.isolation import status
from modelguard.isolation._host import identity_of
from modelguard.isolation._isolation_options import parameters_of
from modelguard.isolation.isolate import stub_of


def empty(text: str) -> list[str]: ...


def documented(text: str) -> list[str]:
    """Have a docstring.

    It has "quotes" and a second paragraph.
    """
    raise NotImplementedError


async def awaited(text: str) -> list[str]: ...


def streamed(text: str) -> Iterator[str]: ...


def astreamed(text: str) -> AsyncIterator[str]: ...


def full(text: str) -> str:
    """Have a body."""
    return "text"


def failing(text: str) -> str:
    raise ValueError(text)


class Service:
    """Has a method."""

    def method(self, text: str) -> str: ...


def nested() -> Callable[..., Any]:
    """Make a stub that has no name of its own."""

    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (empty, "function"),
        (documented, "function"),
        (nested(), "function"),
        (awaited, "coroutine"),
        (streamed, "generator"),
        (astreamed, "async generator"),
    ],
)
def test_a_stub_has_no_body(function: Any, kind: str) -> None:
    """It may have a docstring and stand anywhere; its kind is that of the function that it stands for."""
    isolated = isolate(target="xml.dom.pulldom:parse")(function)
    assert kind == isolated.function_kind
    assert f"{function.__module__}.{function.__qualname__}" == isolated.name
    assert "xml.dom.pulldom" not in sys.modules


@pytest.mark.parametrize("target", ["json", "json:", ":loads", "json.loads", "json:a.b", "json loads:x", 5, None])
def test_a_target_names_a_function_of_a_module(target: Any) -> None:
    """The message shows how."""
    if target is not None:  # which is no target
        with pytest.raises(InvalidOption, match=r"target=.*must name a function of a module.*'pipeline:entities'"):
            isolate(target=target)(empty)


@pytest.mark.parametrize("module", ["no_such_module", "xml.dom.nothing", "zipfile.nothing", "xml.nothing.dom"])
def test_a_module_that_is_not_there_is_refused_at_once(module: str) -> None:
    """Without an import of its package."""
    before = set(sys.modules)
    with pytest.raises(InvalidOption, match=f"there is no module {module}"):
        isolate(target=f"{module}:parse")(empty)
    assert before == sys.modules.keys()


@pytest.mark.parametrize(
    ("function", "options", "why"),
    [
        (full, {}, r"test_target.full \(.*test_target.py:\d+\) has a body of its own"),
        (failing, {}, "has a body of its own"),
        (len, {}, "has a body of its own"),
        (empty, {"target": f"{__name__}:empty"}, "is in a module that this process imports"),
        (empty, {"target": "__main__:empty"}, "is in a module that this process imports"),
        (Service.method, {}, "is a method"),
        (Service, {}, "must be a function"),
        (test_options.predict, {}, "stands for another one by target=, and takes no model"),
        (empty, {"recycle_on": Changed(dict)}, r"recycle_on=Changed.*which the module of target= does not know"),
        (empty, {"recycle_on": 5}, "recycle_on=5: must be a policy"),
    ],
)
def test_what_is_no_stub_is_refused(function: Any, options: dict[str, Any], why: str) -> None:
    """At the definition, where the module is not needed for it."""
    with pytest.raises(InvalidOption, match=why):
        isolate(**{"target": "json:loads", **options})(function)


def test_a_stub_fits_what_takes_each_of_its_calls() -> None:
    """Names, order, kinds and defaults count; what the function takes beyond that must have a default."""
    stub = stub_of(shape, "json:loads", None)
    fitting: list[Any] = [shape, lambda a, b=2, *, c: 0, lambda a, b=2, *, c=3, d=4: 0, lambda a, b=2, *, c, **d: 0]
    others: list[Any] = [
        lambda a, b, *, c: 0,
        lambda b, a=1, *, c: 0,
        lambda a, b=1, c=2: 0,
        lambda a, b=1, *, c, d: 0,
        lambda a, b=1: 0,
    ]
    assert [True] * 4 == [stub.fits(parameters_of(one)) for one in fitting]
    assert [False] * 5 == [stub.fits(parameters_of(one)) for one in others]


def shape(a: int, b: int = 1, *, c: int) -> None: ...


def test_a_host_shares_by_target_and_stub() -> None:
    """Two servers that name the same function share its mold only if their stubs are alike."""
    one = isolate(target="json:loads", scope="host", recycle_on=Uses(5) | TTL("1h"))(empty)
    other = isolate(target="json:loads", scope="host", recycle_on=Uses(6))(empty)
    identities = [identity_of(it._options, it._source.guard.engine.options) for it in (one, one, other)]  # type: ignore[union-attr]
    assert identities[0] == identities[1] != identities[2]
    assert "json.loads" == identities[0]["function"]
    assert one in status.functions


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that has imported two libraries."""
    module = ModuleType("app_of_two")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("keras", "stanza"):
        library = ModuleType(name)
        library.load = dict  # type: ignore[attr-defined]
        vars(module)[name] = library
    return module


def define(module: ModuleType, code: str) -> Any:
    """Run code as that module's own."""
    exec(compile(code, "app_of_two.py", "exec", dont_inherit=True), vars(module))
    return vars(module)


CODE = """
from modelguard import guard, isolate

other = guard(lambda: {other}.load(), reload_on=None, name="other")
own = guard(lambda: keras.load(), reload_on=None)

@isolate()
@own
def predict(model, text): return text

@isolate()
@own
def again(model, text): return text
"""


def test_a_mold_that_imports_another_guards_library_is_told(
    libraries: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for a module, with the library, the guard, and what to do."""
    with caplog.at_level(logging.WARNING, "modelguard"):
        names = define(libraries, CODE.format(other="stanza"))
    told = "predict: its mold imports all of app_of_two, and so stanza, which only the loader of guard 'other' needs"
    assert 1 == len(caplog.messages)
    assert caplog.messages[0].startswith(told)
    assert "@isolate(target='module:function')" in caplog.messages[0]
    assert names["other"] is not None


def test_a_library_that_the_function_needs_too_is_not_told(
    libraries: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two guards of one library cost its import once."""
    monkeypatch.setattr(libraries, "__name__", "app_of_one")
    monkeypatch.setitem(sys.modules, "app_of_one", libraries)
    with caplog.at_level(logging.WARNING, "modelguard"):
        names = define(libraries, CODE.format(other="keras"))
    assert [] == caplog.messages
    assert names["other"] is not None


def test_guards_elsewhere_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """The other guards of this test run are in other modules."""
    held = guard(dict, reload_on=None)
    with caplog.at_level(logging.WARNING, "modelguard"):
        isolate()(full)
    assert [] == caplog.messages
    assert held is not None
