"""``_functions``: what can be batched, what is rejected when it is decorated, and what the result looks like."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any, get_args

import pytest
from fastapi import Depends, FastAPI
from flask import Flask

from modelguard import Batched, batched, guard
from modelguard.errors import InvalidOption, ItemRefused

nlp = guard(dict, reload_on=None, name="nlp")


def double(items: list[int], *, by: int = 2) -> list[int]:
    """Doubles."""
    return [item * by for item in items]


def rejection(function: Any) -> InvalidOption:
    with pytest.raises(InvalidOption) as rejected:
        batched(max_size=4)(function)
    assert "function" == rejected.value.argument
    return rejected.value


# What is rejected


def nothing() -> list[int]:
    return []


def named(*, items: list[int]) -> list[int]:
    return items


def bounded(items: list[int], timeout: float = 1.0) -> list[int]:
    return items


@pytest.mark.parametrize(
    "function",
    [nothing, named, bounded, 3, None, "f", int, staticmethod(double)],
)
def test_what_cannot_be_batched_is_rejected(function: Any) -> None:
    """When it is decorated, with what to write instead."""
    assert rejection(function).fix


def test_batching_twice_is_rejected() -> None:
    """The error says to use one decorator with all options."""
    error = rejection(batched(max_size=4)(double))
    assert "it is batched already" in str(error)
    assert "once" in error.fix


def of_one(text: str) -> str:
    return text


def of_one_or_none(text: str | None) -> str:
    return text or ""


def of_one_dict(record: dict[str, int]) -> int:
    return len(record)


@pytest.mark.parametrize("function", [of_one, of_one_or_none, of_one_dict])
def test_a_function_of_one_item_is_rejected(function: Any) -> None:
    """By its annotation: a batch function gets a list."""
    assert "not a list of items" in str(rejection(function))


def untyped(texts):  # noqa: ANN001, ANN201 - what is tested
    return texts


def of_any(items: Any) -> Any:
    return items


def unresolvable(items: NameForTypeCheckersOnly) -> Any:  # noqa: F821 - what is tested
    return items


def of_tuple(items: tuple[str, ...]) -> Any:
    return items


def with_more(items: list[str], language: str, *stops: str, limit: int = 3) -> Any:
    return [(item, language, stops, limit) for item in items]


@pytest.mark.parametrize("function", [untyped, of_any, unresolvable, of_tuple, with_more, sorted, double])
def test_annotations_that_say_nothing_certain_are_accepted(function: Any) -> None:
    """Only a certain mistake is an error at definition."""
    assert isinstance(batched(max_size=4)(function), Batched)


def with_item(items: list[str], *, item: str) -> Any:
    return items


def swapped(model: dict[str, int], texts: list[str]) -> list[int]:
    return [len(text) + len(model) for text in texts]


class Service:
    @batched(max_size=4)
    def with_more(self, items: list[str], language: str, *stops: str, limit: int = 3) -> Any:
        return with_more(items, language, *stops, limit=limit)

    def swapped(self, model: dict[str, int], texts: list[str]) -> list[int]:
        return swapped(model, texts)


@pytest.mark.parametrize("function", [swapped, Service.swapped], ids=["function", "method"])
def test_a_batched_function_below_its_guard_is_rejected(function: Any) -> None:
    """With ``@nlp`` above ``@batched``, or without ``@nlp``, the first parameter is the model and not the list."""
    error = rejection(function)
    assert "its first parameter is 'model', and the list of items 'texts' comes after it" in str(error)
    assert "put @batched(...) above the guard's decorator" in error.fix


# Web frameworks


fastapi_app = FastAPI()
flask_app = Flask("app")


@fastapi_app.post("/fastapi")
def fastapi_route(texts: list[str]) -> list[str]:
    return texts


@flask_app.get("/flask")
def flask_route(texts: list[str]) -> list[str]:
    return texts


@pytest.mark.parametrize("function", [fastapi_route, flask_route])
def test_a_route_is_rejected(function: Any) -> None:
    """``@batched`` above ``@app.post`` would leave the route without batches."""
    error = rejection(function)
    assert "it is a route of a web application already" in str(error)
    assert f"return await {function.__name__}.aio(text)" in error.fix


@pytest.mark.parametrize("make", [FastAPI, lambda: Flask("app")])
def test_a_route_in_an_application_factory_is_rejected(make: Callable[[], Any]) -> None:
    """The application may be a local variable."""
    app = make()

    with pytest.raises(InvalidOption, match="it is a route of a web application already"):

        @batched(max_size=4)
        @app.post("/")
        def route(texts: list[str]) -> list[str]:
            return texts


def test_a_batched_function_as_a_route_of_fastapi_is_rejected() -> None:
    """``@app.post`` above ``@batched`` fails when it is written, instead of answering 422; so does ``Depends``."""
    f = batched(max_size=4)(double)
    with pytest.raises(InvalidOption, match=r"cannot be a route or a dependency.*return await double\.aio\(text\)"):
        FastAPI().post("/")(f)

    def depending(found: int = Depends(f)) -> int:
        return found

    with pytest.raises(InvalidOption, match="cannot be a route or a dependency"):
        FastAPI().post("/")(depending)


def test_a_batched_function_as_a_handler_of_litestar_is_rejected() -> None:
    """When the application is made, with what to write; it was a ``NameError`` about a name inside modelguard."""
    litestar = pytest.importorskip("litestar")
    f = batched(max_size=4)(double)
    with pytest.raises(InvalidOption, match=r"cannot be a route or a dependency.*return await double\.aio\(text\)"):
        litestar.Litestar([litestar.get("/", sync_to_thread=True)(f)])
    assert 4 == f.__call__(2) == f(2)


# What it looks like


def test_it_looks_like_the_function() -> None:
    """Name, module and documentation are the function's own."""
    made = batched(max_size=4)(double)
    assert isinstance(made, Batched)
    assert ("double", "Doubles.", double.__module__) == (made.__name__, made.__doc__, made.__module__)
    assert f"{double.__module__}.double" == made.name
    assert "tokens" == batched(max_size=4, name="tokens")(double).name


def test_its_signature_is_that_of_a_call() -> None:
    """One item by position; the timeout and the function's other parameters by keyword."""

    def parameters(function: Any) -> list[tuple[str, str]]:
        return [(one.name, one.kind.description) for one in inspect.signature(function).parameters.values()]

    keywords = [(name, "keyword-only") for name in ("timeout", "priority", "by")]
    assert [("item", "positional-only"), *keywords] == parameters(batched(max_size=4)(double))
    names = ["item", "timeout", "priority", "language", "limit"]
    assert names == [name for name, _ in parameters(batched(max_size=4)(with_more))]
    assert ["item_", "timeout", "priority", "item"] == [name for name, _ in parameters(batched(max_size=4)(with_item))]
    assert names == [name for name, _ in parameters(Service().with_more)]
    assert int is get_args(inspect.signature(batched(max_size=4)(double)).parameters["item"].annotation)[0]


def test_nothing_runs_before_the_first_item() -> None:
    """No thread is started by a decorator."""
    import threading

    before = {*threading.enumerate()}
    made = batched(max_size=4)(double)
    assert before >= {*threading.enumerate()}  # those of other tests may end meanwhile
    assert ("open", 0) == (made.status().state, made.status().batches)


def test_built_in_functions_can_be_batched() -> None:
    """Anything works that takes a list and returns as many results."""
    assert 3 == batched(max_size=4)(sorted)(3)


module_level = batched(max_size=4)(double)
module_level.__qualname__ = "module_level"


def test_it_is_pickled_by_its_name() -> None:
    """As functions are, so that spawned workers find it."""
    assert pickle.loads(pickle.dumps(module_level)) is module_level


def test_a_guard_goes_below_it() -> None:
    """The batch function is called without the model, and each batch is one call of the guard."""
    pipeline = guard(dict, reload_on=None)

    @batched(max_size=4)
    @pipeline
    def lengths(model: dict[str, int], items: list[str]) -> list[int]:
        return [len(item) + len(model) for item in items]

    assert 3 == lengths("abc")
    assert 1 == pipeline.status().uses


# Mistakes around the decorator


def test_options_are_passed_by_keyword() -> None:
    """``batched(32)`` and ``@batched`` are rejected with what to write, or with what is missing."""
    with pytest.raises(InvalidOption, match=r"Write @batched\(max_size=32\)"):
        batched(32, max_size=32)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"is passed by position. Write batched\(max_size=\.\.\.\)"):
        batched(double)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("name", ["", " ", 5])
def test_a_name_is_text(name: Any) -> None:
    """Events and metrics show the name, so it must be text that is not empty."""
    with pytest.raises(InvalidOption, match=r"name=.*must be text that is not empty"):
        batched(max_size=4, name=name)


def test_one_text_is_not_many_items() -> None:
    """``f.map("abc")`` would compute three items of one letter each, so it is an error."""
    f = batched(max_size=4)(double)
    with pytest.raises(ItemRefused, match=r"a str is one; write f\(item\), or f.map\(\[item\]\)"):
        f.map("abc")
    assert [2, 4] == list(f.map([1, 2]))


def test_a_decorator_above_batched_takes_the_instance_away() -> None:
    """``@classmethod`` above ``@batched`` calls it without an instance: the error says so."""

    class Service:
        @classmethod
        @batched(max_size=4)
        def double(cls, items: list[int]) -> list[int]:
            return items

    with pytest.raises(
        TypeError, match=r"it is a method: call it on an instance, and put no other decorator.*@classmethod"
    ):
        Service.double(3)


def test_a_decorator_of_ones_own_above_batched_is_named() -> None:
    """``functools.wraps`` above a batched method passes the instance as an item: the error says what is above."""

    def timed(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args)

        return wrapper

    class Service:
        @timed
        @batched(max_size=4)
        def double(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match=r"no other decorator above @batched.*functools\.wraps"):
        Service().double(3)
