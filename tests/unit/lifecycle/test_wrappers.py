"""Decorated functions: each call runs on one generation, and each function keeps its name, signature and kind."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import pickle
import typing
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from tests.unit.lifecycle.world import Model, World, run

from modelguard import guard, guard_of
from modelguard.errors import InvalidOption

nlp = guard(lambda: "model", reload_on=None, name="nlp")


@nlp
def words(model: str, text: str, *, limit: int = 10) -> list[str]:
    """Split a text."""
    return [model, *text.split()][:limit]


@nlp
async def later(model: str, text: str) -> list[str]:
    return [model, text]


@nlp
def each(model: str, text: str) -> Iterator[str]:
    yield from (model, text)


@nlp
async def each_later(model: str, text: str) -> AsyncIterator[str]:
    for part in (model, text):
        yield part


def _twice(_model: str, value: int) -> int:
    return 2 * value


class Service:
    """Every way to write a guarded method."""

    name = "service"

    @nlp
    def method(self, model: str, text: str) -> list[str]:
        return [self.name, model, text]

    @nlp
    async def later(self, model: str, text: str) -> list[str]:
        return [self.name, model, text]

    @nlp
    def each(self, model: str, text: str) -> Iterator[str]:
        yield from (self.name, model, text)

    @nlp
    async def each_later(self, model: str, text: str) -> AsyncIterator[str]:
        for part in (self.name, model, text):
            yield part

    @classmethod
    @nlp
    def under_classmethod(cls, model: str, text: str) -> list[str]:
        return [cls.name, model, text]

    @nlp
    @classmethod
    def over_classmethod(cls, model: str, text: str) -> list[str]:
        return [cls.name, model, text]

    @staticmethod
    @nlp
    def under_staticmethod(model: str, text: str) -> list[str]:
        return ["service", model, text]

    @nlp
    @staticmethod
    def over_staticmethod(model: str, text: str) -> list[str]:
        return ["service", model, text]


METHODS = ["method", "under_classmethod", "over_classmethod", "under_staticmethod", "over_staticmethod"]
LAZY_METHODS = ["later", "each", "each_later"]


class TestTheModelIsInjected:
    @pytest.mark.parametrize("function", [words, later, each, each_later], ids=operator.attrgetter("__name__"))
    def test_first_into_functions(self, function: Any) -> None:
        """Functions, coroutines, generators and asynchronous generators get the model as their first argument."""
        assert ["model", "a"] == run(function("a"))
        assert ["model", "a"] == run(function(text="a"))

    @pytest.mark.parametrize("name", [*METHODS, *LAZY_METHODS])
    def test_after_self_into_methods(self, name: str) -> None:
        """Methods of every kind get it after ``self`` or ``cls``, in whichever order the decorators stand."""
        assert ["service", "model", "a"] == run(getattr(Service(), name)("a"))

    @pytest.mark.parametrize("name", METHODS)
    def test_through_the_class(self, name: str) -> None:
        """Methods may be called through their class."""
        args = (Service(),) if name == "method" else ()
        assert ["service", "model", "a"] == run(getattr(Service, name)(*args, "a"))

    def test_an_instance_by_name_is_rejected_with_what_to_write(self) -> None:
        """The wrapper does not bind it, and a way around would cost every call."""
        with pytest.raises(
            TypeError, match=r"Service\.method\(\) got its instance by name.*: Service\.method\(instance\)"
        ):
            Service.method(self=Service(), text="a")

    def test_where_python_binds_by_itself(self) -> None:
        """A ``classmethod`` around a guarded function hands in its class like any argument since Python 3.13."""
        function = Service.__dict__["under_classmethod"].__func__
        assert ["service", "model", "a"] == function(Service, "a")

    def test_as_self_into_methods_of_its_own(self, world: World) -> None:
        """A method of the model's class is a function of the model."""
        made = world.guard()
        assert ["a", "b"] == made(Model.words)("a b")
        assert made(Model.unload)() is None

    def test_whatever_is_called_a_function(self, world: World) -> None:
        """Built-ins, partials and objects that can be called may be decorated as well."""
        made = world.guard(lambda: [3, 1, 2])

        class Longest:
            def __call__(self, model: list[int], least: int) -> int:
                return max(*model, least)

        def among(first: int, model: list[int]) -> bool:
            return first in model

        assert [[1, 2, 3], 3, 3, 9, True] == [
            made(sorted)(),
            made(len)(),
            made(max)(),  # has no signature
            made(Longest())(9),
            made(functools.partial(among, 3))(),
        ]

    def test_no_parameter_s_name_is_taken(self, world: World) -> None:
        """Parameters may be called anything, ``self``, ``wrapped``, ``args`` and ``guard`` included."""

        def function(model: Any, /, **kwargs: Any) -> dict[str, Any]:
            return {"model": model.number, **kwargs}

        names = {"self": 1, "wrapped": 2, "instance": 3, "args": 4, "kwargs": 5, "guard": 6, "call": 7, "wrapper": 8}
        assert {"model": 1, **names} == world.guard()(function)(**names)


class TestADecoratedFunctionKeepsItsFace:
    def test_name_and_documentation(self) -> None:
        """Name, qualified name, module and docstring are those that were written."""
        assert ("words", "words", __name__, "Split a text.") == (
            words.__name__,
            words.__qualname__,
            words.__module__,
            words.__doc__,
        )

    @pytest.mark.parametrize(
        ("function", "signature"),
        [
            (words, "(text: 'str', *, limit: 'int' = 10) -> 'list[str]'"),
            (later, "(text: 'str') -> 'list[str]'"),
            (Service().method, "(text: 'str') -> 'list[str]'"),
            (Service.method, "(self, text: 'str') -> 'list[str]'"),
            (Service.over_classmethod, "(text: 'str') -> 'list[str]'"),
            (Service.under_classmethod, "(text: 'str') -> 'list[str]'"),
            (Service.over_staticmethod, "(text: 'str') -> 'list[str]'"),
            (Service.under_staticmethod, "(text: 'str') -> 'list[str]'"),
            (Service().over_classmethod, "(text: 'str') -> 'list[str]'"),
            (Service().under_classmethod, "(text: 'str') -> 'list[str]'"),
            (Service().over_staticmethod, "(text: 'str') -> 'list[str]'"),
            (Service().under_staticmethod, "(text: 'str') -> 'list[str]'"),
        ],
        ids=range(12),
    )
    def test_signature(self, function: Any, signature: str) -> None:
        """``inspect.signature`` shows what a caller gives: the written signature without the model."""
        assert signature == str(inspect.signature(function))

    def test_signature_of_what_takes_anything(self) -> None:
        """A function that takes the model into ``*args`` shows them as they were written."""
        function = nlp(lambda *args, **kwargs: (args, kwargs))
        assert ("(*args, **kwargs)", (("model", 1), {"a": 2})) == (
            str(inspect.signature(function)),
            function(1, a=2),
        )

    @pytest.mark.parametrize(
        ("is_kind", "kind"),
        [
            (inspect.iscoroutinefunction, "later"),
            (inspect.isgeneratorfunction, "each"),
            (inspect.isasyncgenfunction, "each_later"),
        ],
    )
    def test_kind(self, is_kind: Callable[[object], bool], kind: str) -> None:
        """Frameworks that inspect a function see the kind that was written, on methods too."""
        functions = {"words": words, "later": later, "each": each, "each_later": each_later}
        assert [kind] == [name for name, function in functions.items() if is_kind(function)]
        bound = [name for name in ("method", "later", "each", "each_later") if is_kind(getattr(Service(), name))]
        assert [kind] == bound

    @pytest.mark.parametrize(
        "function", [words, later, each, each_later, Service.over_staticmethod, Service.method], ids=range(6)
    )
    def test_pickled_by_reference(self, function: Any) -> None:
        """It is pickled by its name, as functions are, so that spawned workers find it."""
        found = pickle.loads(pickle.dumps(function))
        assert (function.__qualname__, function.__wrapped__) == (found.__qualname__, found.__wrapped__)
        assert type(function) is type(found)

    @pytest.mark.parametrize("name", [*METHODS[:3], "later"])
    def test_bound_methods_are_pickled(self, name: str) -> None:
        """A bound method is pickled with its instance or class."""
        found = pickle.loads(pickle.dumps(getattr(Service(), name)))
        assert ["service", "model", "a"] == run(found("a"))

    def test_copied_as_functions_are(self) -> None:
        """A copy of a function is the function itself."""
        assert [True, True] == [copied is words for copied in (copy.copy(words), copy.deepcopy(words))]

    def test_the_written_function_is_at_hand(self) -> None:
        """``__wrapped__`` is the function that was written, for tests that pass their own model."""
        assert ["mine", "a"] == words.__wrapped__("mine", "a")  # type: ignore[attr-defined]

    @pytest.mark.parametrize("name", METHODS[:3])
    def test_methods_are_referred_to_weakly(self, name: str) -> None:
        """``weakref.WeakMethod``, as signals keep their receivers, finds a method while its instance lives."""
        service = Service()
        reference = weakref.WeakMethod(getattr(service, name))
        method = reference()
        assert method is not None
        assert ["service", "model", "a"] == run(method("a"))
        assert reference == weakref.WeakMethod(getattr(service, name))
        assert inspect.signature(getattr(service, name)) == inspect.signature(method)
        del service, method
        assert (name == "method") is (reference() is None)

    def test_annotations(self) -> None:
        """The hints are those of the signature: dispatch by the type of the first argument takes no model for it."""
        assert ["text", "limit", "return"] == [*words.__annotations__]
        assert ["text", "return"] == [*Service().method.__annotations__] == [*Service.method.__annotations__]

        @functools.singledispatch
        def doubled(value: object) -> object:
            return value

        doubled.register(nlp(_twice))
        assert ("a", 4) == (doubled("a"), doubled(2))

    def test_attributes_are_its_own(self) -> None:
        """Attributes are read from and written to the function, as other decorators do."""
        words.tags = ["nlp"]  # type: ignore[attr-defined]
        assert ["nlp"] == words.__wrapped__.tags  # type: ignore[attr-defined]


class TestGuardOf:
    @pytest.mark.parametrize(
        "function",
        [words, later, *(getattr(Service(), name) for name in METHODS), *(getattr(Service, name) for name in METHODS)],
        ids=range(12),
    )
    def test_finds_the_guard_of_a_function(self, function: Any) -> None:
        """The guard of a decorated function or method can be found, for its status and its reloads."""
        assert nlp is guard_of(function)

    @pytest.mark.parametrize("function", [len, lambda: None, Service, None])
    def test_refuses_what_is_not_decorated(self, function: Any) -> None:
        """An undecorated function has no guard: the error says so."""
        with pytest.raises(InvalidOption, match="is not decorated by a guard"):
            guard_of(function)

    def test_of_the_one_line_form(self, world: World) -> None:
        """In the one-line form it is the only way to the guard."""

        @world.guard(name="one")
        def number(model: Any) -> int:
            return int(model.number)

        assert (1, "one", 1) == (number(), guard_of(number).name, guard_of(number).status().uses)


class TestWhatCannotBeDecorated:
    @pytest.mark.parametrize("value", [Service, 3, None, "words"])
    def test_what_is_no_function(self, value: Any) -> None:
        """Classes and values are rejected at decoration."""
        with pytest.raises(InvalidOption, match="must be a function"):
            nlp(value)

    @pytest.mark.parametrize("function", [lambda: None, lambda *, model: model], ids=["none", "keyword only"])
    def test_what_cannot_take_the_model(self, function: Any) -> None:
        """A function without a positional parameter has no place for the model."""
        with pytest.raises(InvalidOption, match=r"no positional parameter to take the model.*def predict"):
            nlp(function)


def test_a_guard_is_not_pickled() -> None:
    """A guard holds a model and locks: each process makes its own, and the error says how."""
    with pytest.raises(TypeError, match="guard 'nlp' cannot be pickled: import the module that makes it"):
        pickle.dumps(nlp)


class TestOneGuardOnManyFunctions:
    def test_shares_one_model(self, world: World) -> None:
        """Functions decorated by one guard run on one model, and count as its uses together."""
        made = world.guard()
        first, second = made(lambda model: model.number), made(lambda model, by: model.number * by)
        assert [1, 10, 1] == [first(), second(10), first()]
        assert (3, 1) == (made.status().uses, world.loader.calls)

    def test_two_guards_may_decorate_one_function(self, world: World) -> None:
        """Guards may be stacked; the outer one's model comes first."""
        outer, inner = world.guard(lambda: "outer"), world.guard(lambda: "inner")

        @inner
        @outer
        def both(*models: str) -> tuple[str, ...]:
            return models

        assert ("outer", "inner") == both()


def test_frameworks_that_read_the_hints_of_call_find_those_of_the_function() -> None:
    """Litestar takes the hints of ``__call__`` where that is a method, and refuses a handler whose hints it misses."""
    nlp = guard(dict, reload_on=None)

    @nlp
    def words(_model: dict[str, str], text: str) -> str:
        return text.upper()

    read = words.__call__ if inspect.ismethod(words.__call__) else words
    hints = typing.get_type_hints(read)
    assert {"text": str, "return": str} == {name: hints[name] for name in ("text", "return")}
    assert "A" == words.__call__("a") == words("a")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Litestar's, of parameters that are found by their names
def test_litestar_serves_guarded_handlers() -> None:
    """Functions and methods of controllers, plain and asynchronous."""
    litestar = pytest.importorskip("litestar")
    from litestar.testing import TestClient

    nlp = guard(dict, reload_on=None)

    @nlp
    def plain(_model: dict[str, str], text: str) -> str:
        return text.upper()

    @nlp
    async def asynchronous(_model: dict[str, str], text: str) -> str:
        return text.lower()

    class Words(litestar.Controller):  # type: ignore[misc, name-defined]
        @litestar.get("/method/{text:str}")
        @nlp
        async def method(self, _model: dict[str, str], text: str) -> str:
            return text.title()

    handlers = [
        litestar.get("/plain/{text:str}", sync_to_thread=False)(plain),
        litestar.get("/async/{text:str}")(asynchronous),
        Words,
    ]
    with TestClient(litestar.Litestar(handlers)) as client:
        assert ["AB", "ab", "Ab"] == [client.get(f"/{kind}/aB").text for kind in ("plain", "async", "method")]
