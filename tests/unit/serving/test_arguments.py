"""``_arguments``: wrong calls fail before anything is queued, with what to write instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from modelguard import Batched, batched, guard
from modelguard.errors import ItemRefused

nlp = guard(dict, reload_on=None, name="nlp")


@batched(max_size=4)
@nlp
def guarded(model: dict[str, int], texts: list[str]) -> list[int]:
    return [len(text) + len(model) for text in texts]


@batched(max_size=4)
def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


CALLS: dict[str, Callable[..., Any]] = {
    "call": lambda f, *args, **extras: f(*args, **extras),
    "aio": lambda f, *args, **extras: asyncio.run(_awaited(f, *args, **extras)),
    "submit": lambda f, *args, **extras: f.submit(*args, **extras).result(20),
    "map": lambda f, first, *args, **extras: next(f.map([first], *args, **extras)),
}

every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


async def _awaited(f: Any, *args: Any, **extras: Any) -> Any:
    return await f.aio(*args, **extras)


# Passing the model


@every_call
def test_a_model_passed_by_hand_is_an_error(call: Callable[..., Any]) -> None:
    """The error names the parameter that the guard passes."""
    with pytest.raises(
        TypeError, match=r"guarded\(\) takes one item by position, and got 2.*Leave out 'model', which the guard passes"
    ):
        call(guarded, {}, "tea")
    with pytest.raises(TypeError, match=r"'model'\. Leave out 'model', which the guard passes"):
        call(guarded, "tea", model={})
    assert 3 == call(guarded, "tea")


@every_call
def test_several_items_by_position_are_an_error(call: Callable[..., Any]) -> None:
    """The error says that everything but the item is passed by keyword."""
    with pytest.raises(TypeError, match=r"by position, and got 3\. Pass everything else by keyword"):
        call(lengths, "tea", "milk", "sugar")


# Passing a list


@every_call
def test_a_list_in_place_of_an_item_is_an_error(call: Callable[..., Any]) -> None:
    """Where the annotation says what an item is; without this check ``lengths(["a", "b"])`` would be 2."""
    with pytest.raises(
        ItemRefused, match=r"one item \(str\) is needed, not a list; for many items, write f\.map\(items\)"
    ):
        call(lengths, ["tea", "milk"])
    assert 3 == call(lengths, "tea")


def of_rows(rows: list[list[int]]) -> list[int]:
    return [sum(row) for row in rows]


def of_points(points: list[tuple[int, int]]) -> list[int]:
    return [x + y for x, y in points]


def of_any(items: list[Any]) -> list[int]:
    return [sum(item) for item in items]


def of_either(items: list[int | list[int]]) -> list[int]:
    return [sum(item) if isinstance(item, list) else item for item in items]


@every_call
@pytest.mark.parametrize("function", [of_rows, of_points, of_any, of_either])
def test_items_that_are_lists_are_accepted(call: Callable[..., Any], function: Any) -> None:
    """A list is rejected only if it is certainly a mistake."""
    assert 3 == call(batched(max_size=4)(function), [1, 2])


class Service:
    @batched(max_size=4)
    def lengths(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


def test_methods_are_checked_like_functions() -> None:
    """The item's type is that of the list after ``self``."""
    with pytest.raises(ItemRefused, match=r"one item \(str\) is needed, not a list"):
        Service().lengths(["tea"])  # type: ignore[arg-type]


# As a route


def test_a_call_without_an_item_says_how_to_write_a_route() -> None:
    """Flask calls a view without positional arguments."""
    app = Flask("app")
    app.testing = True
    view: Any = lengths
    app.get("/")(view)
    with pytest.raises(TypeError, match=r"by position, and got none.*return await lengths\.aio\(text\)"):
        app.test_client().get("/")
    with pytest.raises(TypeError, match="by position, and got none"):
        view(texts=["tea"])


def test_a_call_as_an_asgi_application_says_how_to_write_a_route() -> None:
    """Starlette takes an object as a route for an ASGI application."""
    route: Batched[str, int] = lengths
    app = Starlette(routes=[Route("/", route)])
    with pytest.raises(TypeError, match=r"by position, and got 3.*return await lengths\.aio\(text\)"):
        TestClient(app).get("/")
