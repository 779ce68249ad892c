"""What becomes a generation: a model that was loaded in time, is valid, and is warm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from modelguard import Loading
from modelguard.errors import InvalidOption, LoadFailed, LoadTimeout, ModelRejected
from modelguard.telemetry import LoadDiscarded

if TYPE_CHECKING:
    from tests.unit.lifecycle.world import World


class TestARejectedModel:
    def test_none(self, world: World) -> None:
        """A loader that returns None forgot to return the model: the error says so."""
        with pytest.raises(ModelRejected, match="the loader returned None; return the model"):
            world.guard(lambda: None).load()

    def test_a_generator(self, world: World) -> None:
        """A loader that yields its model instead of returning it is refused, or its model if only the call shows it."""

        def load() -> Any:
            yield world.loader()

        with pytest.raises(InvalidOption, match=r"is a generator function, .* Return the value instead of yielding it"):
            world.guard(load)
        with pytest.raises(ModelRejected, match="a generator; return the model instead of yielding it"):
            world.guard(partial(next, iter([load()]))).load()

    def test_a_verdict_that_is_neither(self, world: World) -> None:
        """A verdict without a truth value, such as an array, rejects the model."""

        class Array:
            def __bool__(self) -> bool:
                raise ValueError("the truth value of an array is ambiguous")

        with pytest.raises(ModelRejected, match="validate raised ValueError: the truth value of an array"):
            world.guard(validate=lambda _model: Array()).load()

    @pytest.mark.parametrize("verdict", [False, 0, ""])
    def test_a_false_verdict(self, world: World, verdict: object) -> None:
        """A model that ``validate`` rejects never serves; it is unloaded and dropped."""
        unloaded: list[int] = []
        guard = world.guard(validate=lambda _model: verdict, unload=lambda model: unloaded.append(model.number))
        with pytest.raises(ModelRejected, match=f"validate returned {verdict!r}"):
            guard.load()
        assert ([1], False) == (unloaded, guard.ready)
        assert "rejected" == world.last(LoadDiscarded).cause

    def test_a_false_verdict_that_cannot_be_written(self, world: World) -> None:
        """It rejects the model like any other."""

        class Report(list[str]):
            def __repr__(self) -> str:
                raise LookupError("nothing to show")

        with pytest.raises(ModelRejected, match="validate returned <Report instance"):
            world.guard(validate=lambda _model: Report()).load()

    def test_a_raised_verdict(self, world: World) -> None:
        """``validate`` may raise as well; what it raised is the cause."""

        def validate(model: Any) -> None:
            assert model.words("a b") == ["b"], "wrong words"

        with pytest.raises(ModelRejected, match="validate raised AssertionError: wrong words") as failure:
            world.guard(validate=validate).load()
        assert isinstance(failure.value.__cause__, AssertionError)

    @pytest.mark.parametrize("verdict", [None, True, 1, "fine"])
    def test_no_verdict_is_a_good_one(self, world: World, verdict: object) -> None:
        """``validate`` may return nothing, or anything true; it may be ``async``."""

        async def validate(_model: object) -> object:
            return verdict

        guard = world.guard(validate=validate)
        guard.load()
        assert guard.ready

    def test_a_failed_warmup(self, world: World) -> None:
        """A model whose warm-up fails does not serve."""

        def warmup(_model: object) -> None:
            raise ValueError("no such word")

        with pytest.raises(LoadFailed, match="ValueError: no such word"):
            world.guard(warmup=warmup).load()


class TestLoadTimeout:
    def test_a_hanging_loader_is_left_behind(self, world: World) -> None:
        """A loader that hangs past its timeout fails for all waiting callers."""
        guard = world.guard(loading=Loading("10ms"))
        world.loader.hold()
        with pytest.raises(LoadTimeout, match=r"did not end within Loading\(timeout=0.01\) and was") as failure:
            guard.load()
        assert isinstance(failure.value, TimeoutError)
        assert "failed" == guard.status().state

    def test_a_model_that_comes_late_is_released(self, world: World) -> None:
        """If the loader returns after all, its model is unloaded, dropped, and reported as discarded."""
        unloaded: list[int] = []
        guard = world.guard(loading=Loading("10ms"), unload=lambda model: unloaded.append(model.number))
        world.loader.hold()
        with pytest.raises(LoadTimeout):
            guard.load()
        world.loader.open.set()
        world.join()
        assert ([1], ["late"]) == (unloaded, [event.cause for event in world.seen(LoadDiscarded)])
        assert not guard.ready

    def test_a_loader_in_time_is_not_disturbed(self, world: World) -> None:
        """Within the bound a loader returns or fails as it does without one."""
        guard = world.guard(loading=Loading("1h"))
        guard.load()
        world.loader.fails = True
        with pytest.raises(LoadFailed, match="OSError: no weights"):
            guard.reload()
        assert 1 == guard.status().generation

    def test_a_timeout_of_the_loader_s_own_is_its_failure(self, world: World) -> None:
        """A ``TimeoutError`` raised by the loader, for example by a download, is not taken for that of the load."""

        def load() -> object:
            raise TimeoutError("the mirror does not answer")

        with pytest.raises(LoadFailed, match="the mirror does not answer") as failure:
            world.guard(load, loading=Loading("1h")).load()
        assert LoadFailed is type(failure.value)


class TestWarmup:
    def test_runs_decorated_functions_on_the_new_model(self, world: World) -> None:
        """Guarded functions that ``validate`` and ``warmup`` call run on the new model, before it serves."""
        ran_on: list[tuple[str, int, int]] = []

        def note(step: str) -> Callable[[Any], None]:
            return lambda model: ran_on.append((step, number(), model.number))

        guard = world.guard(validate=note("validate"), warmup=note("warmup"))

        @guard
        def number(model: Any) -> int:
            return int(model.number)

        guard.load()
        guard.reload()
        assert [("validate", 1, 1), ("warmup", 1, 1), ("validate", 2, 2), ("warmup", 2, 2)] == ran_on
        assert (2, 2) == (number(), guard.status().generation)

    def test_is_not_counted_as_use(self, world: World) -> None:
        """A generation's uses and age begin when it serves."""
        guard = world.guard(warmup=lambda _model: (words("a"), world.tick(5)))

        @guard
        def words(model: Any, text: str) -> list[str]:
            return list(model.words(text))

        guard.load()
        assert (0, 0.0) == (guard.status().uses, guard.status().age)

    def test_may_be_async(self, world: World) -> None:
        """``warmup`` may be a coroutine function."""
        warm = []

        async def warmup(model: Any) -> None:
            warm.append(model.number)

        world.guard(warmup=warmup).load()
        assert [1] == warm
