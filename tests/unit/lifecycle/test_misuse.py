"""Likely mistakes around decorated functions: each gets a message that says what to write."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from flask import Flask
from starlette.applications import Starlette
from starlette.routing import Route

from modelguard import TTL, Errors, ModelGuard, Modified, batched, guard, guard_of, pool, replicas
from modelguard.errors import InvalidOption, WouldDeadlock

if TYPE_CHECKING:
    from tests.unit.lifecycle.world import World


@pytest.fixture
def nlp(world: World) -> ModelGuard[Any]:
    made = world.guard()
    made.load()
    return made


def functions(nlp: ModelGuard[Any]) -> list[Callable[..., Any]]:
    """One decorated function of each kind, all of the same signature."""

    @nlp
    def function(_model: Any, text: str) -> str:
        return text

    @nlp
    async def coroutine(_model: Any, text: str) -> str:
        return text

    class Service:
        @nlp
        def method(self, _model: Any, text: str) -> str:
            return text

        @nlp
        async def async_method(self, _model: Any, text: str) -> str:
            return text

    return [function, coroutine, Service().method, Service().async_method]


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


class TestWrongArguments:
    @pytest.mark.parametrize("kind", range(4))
    @pytest.mark.parametrize(
        ("args", "kwargs", "says"),
        [
            ((), {}, "missing a required argument: 'text'"),
            (("model by hand", "a"), {}, "too many positional arguments"),
            (("a",), {"txet": 1}, "unexpected keyword argument 'txet'"),
        ],
    )
    def test_are_explained_as_the_caller_sees_the_function(
        self, nlp: ModelGuard[Any], kind: int, args: Any, kwargs: Any, says: str
    ) -> None:
        """The message shows the signature without the model, and says that the guard passes the model."""
        with pytest.raises(TypeError, match=rf"\(text: 'str'\).*: .*{says}.*The guard passes the model") as error:
            call(functions(nlp)[kind], *args, **kwargs)
        assert error.value.__cause__ is None

    @pytest.mark.parametrize("kind", range(4))
    def test_a_misspelt_keyword_is_named_before_what_is_missing(self, nlp: ModelGuard[Any], kind: int) -> None:
        """As Python does: the argument that is missing is the one that was misspelt."""
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'txet'"):
            call(functions(nlp)[kind], txet="a")

    @pytest.mark.parametrize("kind", range(4))
    def test_do_not_count_against_the_model(self, nlp: ModelGuard[Any], kind: int) -> None:
        """A call that never reached the function does not count for the policy ``Errors``."""
        with pytest.raises(TypeError):
            call(functions(nlp)[kind])
        current = nlp.engine.state.current
        assert current is not None
        assert (0, 0) == (current.errors, nlp.status().in_flight)

    def test_of_a_function_without_a_parameter_for_the_model(self, nlp: ModelGuard[Any]) -> None:
        """It says that the function needs one."""
        with pytest.raises(TypeError, match="give the function a parameter for it"):
            nlp(lambda text: text)("a")

    @pytest.mark.parametrize("kind", range(4))
    def test_of_a_call_inside_the_function_are_its_own(self, nlp: ModelGuard[Any], kind: int) -> None:
        """A TypeError that the function raises passes unchanged, and counts as its failure."""

        def fails(_model: Any, text: str) -> str:
            return text + 1  # type: ignore[operator]

        async def fails_later(_model: Any, text: str) -> str:
            return text + 1  # type: ignore[operator]

        with pytest.raises(TypeError, match="can only concatenate"):
            call(nlp(fails if kind % 2 == 0 else fails_later), "a")
        current = nlp.engine.state.current
        assert current is not None
        assert 1 == current.errors

    def test_of_a_function_of_any_number_of_arguments(self, nlp: ModelGuard[Any]) -> None:
        """What is missing is named, and none of the arguments is said to be too many."""

        @nlp
        def shout(*words: Any, end: str) -> Any:
            return words, end

        with pytest.raises(TypeError, match=r"missing a required argument: 'end'"):
            shout("hi")  # type: ignore[call-arg]

    def test_of_a_built_in_function_are_its_own(self, nlp: ModelGuard[Any]) -> None:
        """What has no signature keeps the message that Python gives it."""
        with pytest.raises(TypeError, match=r"^(?!.*guard passes)"):
            nlp(iter)()


class TestDecorators:
    def test_twice_by_one_guard(self, nlp: ModelGuard[Any]) -> None:
        """Two decorations by one guard would pass the model twice."""
        with pytest.raises(InvalidOption, match="is decorated by this guard already"):
            nlp(nlp(lambda model: model))

    def test_by_two_guards_is_meant(self, world: World) -> None:
        """A function may need two models: the inner guard passes the first one."""
        first, second = world.guard(lambda: "first"), world.guard(lambda: "second")
        assert ("first", "second", "text") == second(first(lambda *args: args))("text")

    def test_above_batched(self, nlp: ModelGuard[Any]) -> None:
        """A batched function takes one item: the guard belongs below."""
        with pytest.raises(InvalidOption, match=r"Put @batched\(...\) or @isolate\(...\) above"):
            nlp(batched(max_size=2)(lambda items: items))


apps: list[Any] = []


def fastapi(path: str) -> Callable[[Any], Any]:
    from fastapi import FastAPI

    app = FastAPI()
    apps.append(app)
    route: Callable[[Any], Any] = app.get(path)
    return route


def flask(path: str) -> Callable[[Any], Any]:
    app = Flask("app")
    apps.append(app)
    route: Callable[[Any], Any] = app.get(path)
    return route


def starlette(path: str) -> Callable[[Any], Any]:
    app = Starlette()
    apps.append(app)

    def route(function: Any) -> Any:
        app.router.routes.append(Route(path, function))
        return function

    return route


class TestRoutes:
    @pytest.mark.parametrize("framework", [fastapi, flask, starlette])
    def test_below_the_guard_are_found(self, nlp: ModelGuard[Any], framework: Callable[[str], Any]) -> None:
        """A route that is registered below the guard would call the function without a model."""
        name = re.escape(framework.__name__)
        with pytest.raises(InvalidOption, match=f"registered with {name}.*below the route's"):

            @nlp
            @framework("/words")
            def words(model: Any, request: Any) -> str:
                return ""

    @pytest.mark.parametrize("kind", ["pool", "replicas"])
    def test_below_pools_and_replicas_are_found(self, world: World, kind: str) -> None:
        """As below a guard."""
        decorator: Any = world.pool()(key="request") if kind == "pool" else replicas(world.guard(), 2)
        with pytest.raises(InvalidOption, match=r"registered with flask.*below the route's"):

            @decorator
            @flask("/words")
            def words(model: Any, request: Any) -> str:
                return ""

    @pytest.mark.parametrize("framework", [fastapi, flask, starlette])
    def test_above_the_guard_are_right(self, nlp: ModelGuard[Any], framework: Callable[[str], Any]) -> None:
        """The other order is the way to do it, also for a function that a module has by its name."""

        def length(_model: Any, text: str) -> int:
            return len(text)

        assert 3 == framework("/length")(nlp(length))("abc")


class TestTheGuardIsNotTheModel:
    @pytest.mark.parametrize("name", ["pipe", "predict", "vocab", "__wrapped__"])
    def test_what_it_lacks_is_explained(self, nlp: ModelGuard[Any], name: str) -> None:
        """``nlp.pipe`` is the model's: the error says how to reach the model."""
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': it is the guard, not the model"):
            getattr(nlp, name)
        assert not hasattr(nlp, name)

    def test_a_model_instead_of_a_loader(self, world: World) -> None:
        """A model of a known library is rejected as a loader, although it is callable."""
        torch = pytest.importorskip("torch")
        with pytest.raises(InvalidOption, match="is a model itself; the guard needs a function that makes one"):
            world.guard(torch.nn.Linear(2, 2))


def test_generators_are_called_at_their_first_step(nlp: ModelGuard[Any]) -> None:
    """What does not fit is explained there, and does not count against the model either."""

    @nlp
    def numbers(_model: Any, count: int) -> Iterator[int]:
        yield from range(count)

    @nlp
    async def later(_model: Any, count: int) -> AsyncIterator[int]:
        yield count

    with pytest.raises(TypeError, match=r"numbers\(count: 'int'\).*missing a required argument: 'count'"):
        list(numbers())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"later\(count: 'int'\).*too many positional arguments"):
        asyncio.run(anext(later(nlp, 1)))  # type: ignore[call-arg, arg-type]
    current = nlp.engine.state.current
    assert current is not None
    assert (0, 0) == (current.errors, nlp.status().in_flight)


def test_arguments_that_do_not_fit_do_not_count_against_a_replica() -> None:
    """As in a guard: they are explained, and the policy ``Errors`` does not hear of them."""
    pair = replicas(guard(dict, reload_on=Errors(2)), 2)

    @pair
    def shout(_model: Any, text: str) -> str:
        return text.upper()

    with pair:
        for _ in range(3):
            with pytest.raises(TypeError, match=r"shout\(text: 'str'\).*missing a required argument: 'text'"):
                shout()  # type: ignore[call-arg]
        assert [(1, 0), (1, 0)] == [(status.generation, status.reloads) for status in pair.status()]
        assert {0} == {engine.state.current.errors for engine in pair._engines if engine.state.current}


def test_arguments_that_do_not_fit_a_function_of_a_pool_are_explained() -> None:
    """Also where a function of its own gives the key."""

    @pool(lambda _key: {}, max_memory="1 GB")(key=lambda *_, **__: "ja")
    def shout(_model: Any, text: str) -> str:
        return text.upper()

    with pytest.raises(TypeError, match=r"shout\(text: 'str'\).*too many positional arguments"):
        shout("a", "b")  # type: ignore[call-arg]


def test_parameters_may_have_any_name() -> None:
    """Also those of modelguard's own functions."""

    @replicas(guard(dict, reload_on=None))
    def shout(_model: Any, self: str, work: str) -> str:
        return self + work

    assert "ab" == shout(self="a", work="b")


class TestHandles:
    def test_a_guard_is_made_by_its_function(self) -> None:
        """``ModelGuard(...)`` says what to write instead."""
        with pytest.raises(TypeError, match=r"ModelGuard is not called directly. Write: guard\(load, reload_on=...\)"):
            ModelGuard(dict, reload_on=None)  # type: ignore[arg-type, call-arg]
        with pytest.raises(TypeError, match="is not called directly"):
            ModelGuard(dict)  # type: ignore[arg-type, call-arg]

    def test_a_lease_is_not_the_model(self, nlp: ModelGuard[Any]) -> None:
        """``nlp.lease().pipe`` says that the model is inside the block."""
        lease = nlp.lease()
        with pytest.raises(AttributeError, match=r"a lease has no attribute 'pipe'.*with guard.lease\(\) as model"):
            lease.pipe  # type: ignore[attr-defined]  # noqa: B018 - it is looked up
        with pytest.raises(RuntimeError, match="has a model only inside its block"):
            lease.model  # noqa: B018 - it is looked up

    def test_wait_is_no_duration(self, nlp: ModelGuard[Any]) -> None:
        """``reload(wait=5)`` probably intends a timeout, and says how to write it."""
        with pytest.raises(InvalidOption, match="To bound the wait, give timeout='5s'"):
            nlp.reload(wait=5)  # type: ignore[arg-type]

    @pytest.mark.parametrize("method", ["recycle_here", "recycle_in_children"])
    def test_what_asks_a_server_can_be_called(self, nlp: ModelGuard[Any], method: str) -> None:
        """A policy that becomes due hours later must not be the first to notice."""
        with pytest.raises(InvalidOption, match=r"ask=.*must be a function of the reasons"):
            getattr(nlp, method)("restart")

    def test_guard_of_says_which_guard(self, nlp: ModelGuard[Any]) -> None:
        """For a guard itself and for a batched function the error says what to write."""
        with pytest.raises(InvalidOption, match="It is the guard itself"):
            guard_of(nlp)
        with pytest.raises(InvalidOption, match=r"guard_of\(function.__wrapped__\)"):
            guard_of(batched(max_size=2)(nlp(lambda _model, items: items)))

    def test_closing_inside_a_call_has_one_fix(self, nlp: ModelGuard[Any]) -> None:
        """``close()`` inside a call can only be moved; ``reload()`` can also be asked not to wait."""
        with nlp.lease():
            with pytest.raises(WouldDeadlock) as close:
                nlp.close()
            with pytest.raises(WouldDeadlock) as reload:
                nlp.reload()
        assert ("Call it outside.", True) == (close.value.fix, "wait=False" in reload.value.fix)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: guard(dict, TTL("1h")), "reload_on=TTL\\('1h'\\): is passed by position"),  # type: ignore[call-overload]
        (lambda: pool(list, "2 GB"), "max_memory='2 GB': is passed by position"),  # type: ignore[call-overload]
    ],
    ids=["guard", "pool"],
)
def test_an_option_that_is_passed_by_position_is_named(make: Callable[[], object], option: str) -> None:
    """And the message says how to write it."""
    with pytest.raises(InvalidOption, match=rf"{option}\. Write "):
        make()


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: guard(dict), "reload_on= is missing"),  # type: ignore[call-overload]
        (lambda: pool(list), "max_memory= is missing"),  # type: ignore[call-overload]
    ],
    ids=["guard", "pool"],
)
def test_a_required_option_that_is_missing_is_named(make: Callable[[], object], option: str) -> None:
    """As by Python, with what to write."""
    with pytest.raises(TypeError, match=rf"{option}\. Write "):
        make()


@pytest.mark.filterwarnings("ignore:Default value")  # pydantic's, of a schema that nobody asks for here
def test_a_guard_that_is_a_dependency_says_what_to_write() -> None:
    """FastAPI takes it for a function, and calls it for each request: the log names the block that lends the model."""
    from fastapi import Depends, FastAPI
    from fastapi.testclient import TestClient

    app, nlp = FastAPI(), guard(dict, reload_on=None)

    @app.get("/")
    def home(model: Any = Depends(nlp)) -> None: ...  # noqa: B008, FAST002 - as it is often written

    with pytest.raises(TypeError, match=r"write with guard\.lease\(\) as model, in a FastAPI dependency too"):
        TestClient(app).get("/")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (["a", "b"], "must be one path, not a list. Join policies: "),
        (("a",), "must be one path, not a tuple. Join policies: "),
        (None, "must be text or a path, not None"),
        (b"x", "must be text or a path, not a bytes"),
        (3, "must be text or a path, not an int"),
        ("", "must be a path that is not empty"),
    ],
    ids=str,
)
def test_what_is_no_path_is_named(path: Any, says: str) -> None:
    """By its kind; and several paths are several policies."""
    with pytest.raises(InvalidOption, match=re.escape(says)):
        Modified(path)
