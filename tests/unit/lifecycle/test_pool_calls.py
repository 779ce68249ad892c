"""Functions whose arguments select the model of a pool."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from modelguard import ModelPool, guard_of, pool
from modelguard.errors import GuardClosed, InvalidOption, UnhashableKey

if TYPE_CHECKING:
    from tests.unit.lifecycle.world import Model, World

voices = pool(lambda key: f"model of {key}", max_memory="1 GB", name="voices")


@voices(key="voice")
def speak(model: str, text: str, voice: str = "anna") -> list[str]:
    """Say a text."""
    return [model, text]


@voices(key=lambda text, voice="anna": voice)
def speak_by_function(model: str, text: str, voice: str = "anna") -> list[str]:
    return [model, text]


class Service:
    @voices(key="voice")
    def method(self, model: str, text: str, voice: str = "anna") -> list[str]:
        return [type(self).__name__, model, text]

    @classmethod
    @voices(key="voice")
    def under_classmethod(cls, model: str, text: str, voice: str = "anna") -> list[str]:
        return [cls.__name__, model, text]

    @voices(key="voice")
    @classmethod
    def over_classmethod(cls, model: str, text: str, voice: str = "anna") -> list[str]:
        return [cls.__name__, model, text]

    @voices(key="voice")
    @staticmethod
    def over_staticmethod(model: str, text: str, voice: str = "anna") -> list[str]:
        return ["Service", model, text]


class TestTheKey:
    @pytest.mark.parametrize(
        ("args", "kwargs", "voice"),
        [(("hi",), {}, "anna"), (("hi", "bert"), {}, "bert"), (("hi",), {"voice": "carl"}, "carl")],
    )
    def test_may_be_a_parameter(self, args: tuple[str, ...], kwargs: dict[str, str], voice: str) -> None:
        """``key="voice"`` takes that argument of the call, however it is given, defaults included."""
        assert [f"model of {voice}", "hi"] == speak(*args, **kwargs)

    @pytest.mark.parametrize("name", ["method", "under_classmethod", "over_classmethod", "over_staticmethod"])
    def test_may_be_a_parameter_of_a_method(self, name: str) -> None:
        """The same on methods of every kind."""
        assert ["Service", "model of bert", "hi"] == getattr(Service(), name)("hi", "bert")

    def test_may_be_a_parameter_of_a_function_of_any_number_of_arguments(self) -> None:
        """The model is the first of them, and the caller's follow it."""

        @voices(key="voice")
        def say(*words: str, voice: str) -> tuple[str, ...]:
            return words

        assert ("model of bert", "hi", "you") == say("hi", "you", voice="bert")

    def test_may_be_told_by_a_function(self) -> None:
        """``key=function`` asks a function of the call's arguments, without the model."""

        @voices(key=lambda text, **_: text.split()[0])
        def first_word(model: str, text: str, *, shout: bool = False) -> str:
            return model.upper() if shout else model

        assert ("model of bert", "MODEL OF CARL") == (first_word("bert says"), first_word("carl", shout=True))

    def test_that_cannot_be_hashed_is_refused(self) -> None:
        """A call whose key cannot be hashed is rejected by name."""
        with pytest.raises(UnhashableKey):
            speak("hi", ["anna"])  # type: ignore[arg-type]

    def test_that_cannot_be_told_is_the_caller_s_error(self) -> None:
        """Arguments that do not fit raise what they raise without a decorator."""
        with pytest.raises(TypeError, match="missing a required argument: 'text'"):
            speak()  # type: ignore[call-arg]

    @pytest.mark.parametrize("key", [None, 3, ["voice"]])
    def test_has_to_be_a_name_or_a_function(self, key: Any) -> None:
        """Anything else is rejected where it is given."""
        with pytest.raises(
            InvalidOption, match=r"must be a parameter's name or a plain function.*Name a parameter"
        ) as refusal:
            voices(key=key)
        assert "key" == refusal.value.argument

    @pytest.mark.parametrize("name", ["vioce", "model"])
    def test_has_to_be_there(self, name: str) -> None:
        """A parameter that does not exist, or that takes the model, is rejected with a list of the possible ones."""
        with pytest.raises(
            InvalidOption, match=r"is not a parameter of .* besides the model. Choose one of 'text', 'voice'"
        ):

            @voices(key=name)
            def function(model: str, text: str, voice: str) -> None: ...


class TestADecoratedFunction:
    def test_keeps_its_face(self) -> None:
        """Name, documentation, signature and pickling are those of the written function, without the model."""
        assert ("speak", "Say a text.", "(text: 'str', voice: 'str' = 'anna') -> 'list[str]'") == (
            speak.__name__,
            speak.__doc__,
            str(inspect.signature(speak)),
        )
        assert speak is pickle.loads(pickle.dumps(speak))

    def test_has_no_guard_of_its_own(self) -> None:
        """Each key has its own guard; the function itself has none."""
        with pytest.raises(InvalidOption, match="is not decorated by a guard"):
            guard_of(speak)

    def test_can_be_of_every_kind(self, world: World) -> None:
        """Coroutines, generators and asynchronous generators hold their lease as long as they run."""
        made = world.pool()

        def in_flight() -> int:
            return made.status().in_flight

        @made(key="key")
        async def coroutine(model: Model, key: str) -> tuple[Any, int]:
            return model.key, in_flight()

        @made(key="key")
        def generator(model: Model, key: str) -> Iterator[tuple[Any, int]]:
            yield model.key, in_flight()

        @made(key="key")
        async def async_generator(model: Model, key: str) -> AsyncIterator[tuple[Any, int]]:
            yield model.key, in_flight()

        async def collect() -> list[tuple[Any, int]]:
            return [item async for item in async_generator("c")]

        assert [("a", 1), ("b", 1), ("c", 1)] == [
            asyncio.run(coroutine("a")),
            *generator("b"),
            *asyncio.run(collect()),
        ]
        assert (True, 0) == (inspect.iscoroutinefunction(coroutine), in_flight())

    def test_may_return_a_lazy_iterator(self, world: World) -> None:
        """A plain function's lazy result keeps its model until it ends."""
        made = world.pool()
        words = made(key="key")(lambda model, key: map(str, model.words("a b")))("k")
        assert ("a", 1, ["b"], 0) == (
            next(words),
            made.status().in_flight,
            list(words),
            made.status().in_flight,
        )

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_gives_its_lease_back_when_it_raises(self, world: World, error: type[BaseException]) -> None:
        """However a call ends, its model is free afterwards."""
        made = world.pool()

        @made(key="key")
        def fail(_model: Model, key: str) -> None:
            raise error

        with pytest.raises(error):
            fail("a")
        assert 0 == made.status().in_flight

    def test_joins_the_outer_call_of_the_same_key(self, world: World) -> None:
        """A nested call with the same key runs on the same model, one with another key on that key's."""
        made = world.pool()

        @made(key="key")
        def inner(model: Model, key: str) -> tuple[Any, int]:
            return model.key, model.number

        @made(key="key")
        def outer(model: Model, key: str) -> list[tuple[Any, int]]:
            return [(model.key, model.number), inner(key), inner("other")]

        assert [("a", 1), ("a", 1), ("other", 2)] == outer("a")

    def test_is_refused_after_close(self, world: World) -> None:
        """A closed pool serves no calls."""
        made = world.pool()
        function = made(key="key")(lambda model, key: model)
        made.close()
        with pytest.raises(GuardClosed, match="'pool'"):
            function("a")


class TestMistakes:
    def test_arguments_that_do_not_fit_are_explained(self) -> None:
        """The message names the function, shows its signature without the model, and says who passes the model."""
        with pytest.raises(
            TypeError, match=r"speak\(text: 'str', voice.*too many positional.*The pool passes the model"
        ):
            speak("model", "hi", "anna")
        with pytest.raises(TypeError, match=r"speak\(text.*missing a required argument: 'text'"):
            speak()

    def test_a_key_function_gets_all_arguments(self) -> None:
        """A key function that does not accept the call's arguments is named, with its signature."""
        assert ["model of bert", "hi"] == speak_by_function("hi", "bert")
        with pytest.raises(TypeError, match=r"speak_by_function\(\).*key function\(text, voice='anna'\).*'tone'"):
            speak_by_function("hi", tone="low")  # type: ignore[call-arg]

    def test_an_error_of_the_key_function_is_its_own(self) -> None:
        """What the key function raises passes unchanged."""

        @voices(key=lambda text: {}[text])
        def fails(model: str, text: str) -> str:
            return text

        with pytest.raises(KeyError):
            fails("hi")

    @pytest.mark.parametrize("key", [None, 5])
    def test_the_key_is_passed_by_name(self, key: Any) -> None:
        """``@voices`` and ``@voices("voice")`` are rejected with what to write."""
        with pytest.raises(InvalidOption, match=r"Write @pool\(key='voice'\)"):
            voices(len)  # type: ignore[misc, call-arg]
        with pytest.raises(InvalidOption, match=r"Write @pool\(key='voice'\)"):
            voices("voice")  # type: ignore[misc, call-arg]
        with pytest.raises(InvalidOption, match="key='voice'"):
            voices(key=key)

    def test_what_is_decorated_is_checked_before_its_key(self) -> None:
        """A class is rejected as a class, and the error for a function without parameters names the one it needs."""
        with pytest.raises(InvalidOption, match="must be a function, not a class"):
            voices(key="voice")(Service)
        with pytest.raises(InvalidOption, match=r"Give .*\(\) that parameter"):
            voices(key="voice")(lambda model: model)

    def test_a_pool_is_made_by_its_function(self) -> None:
        """``ModelPool(...)`` says what to write instead."""
        with pytest.raises(TypeError, match=r"ModelPool is not called directly. Write: pool\(load, max_memory=...\)"):
            ModelPool(len, max_memory="1 GB")  # type: ignore[arg-type, call-arg]

    def test_a_pool_does_not_pickle(self) -> None:
        """The error says how each process gets its pool."""
        with pytest.raises(TypeError, match="pool 'voices' cannot be pickled: import the module"):
            pickle.dumps(voices)
