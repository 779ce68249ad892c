"""``_execution``: results are checked, and each error goes to the item that caused it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.environment.torches import FakeTorch, OutOfMemoryError

from modelguard.errors import BatchFailed, GuardClosed, LoadFailed, QueueFull, Reloading, WrongResults
from modelguard.serving._execution import BatchFunction, Computed, compute
from modelguard.serving._requests import Batch, Failure, Request


class Model:
    """Squares numbers, fails on chosen ones, and remembers its batches."""

    def __init__(self, *bad: int) -> None:
        self.bad = {*bad}
        self.batches: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        if wrong := self.bad & {*items}:
            raise ValueError(f"cannot square {min(wrong)}")
        return [item * item for item in items]


def ran(run: Callable[..., Any], items: range | list[Any], *, isolate: bool = True, **options: Any) -> Computed:
    batch = Batch([Request(item) for item in items], 0.0)
    return compute(BatchFunction(run=run, name="f", isolate=isolate, **options), batch)


def errors(computed: Computed) -> list[Any]:
    """For each item its error's text, or its result."""
    return [str(one.error) if isinstance(one, Failure) else one for one in computed.outcomes]


def test_results_are_those_of_the_items_in_their_order() -> None:
    """One for each item."""
    computed = ran(Model(), range(4))
    assert ([0, 1, 4, 9], "succeeded", None, 0) == (
        computed.outcomes,
        computed.verdict,
        computed.error,
        computed.reruns,
    )


@pytest.mark.parametrize("at", range(8))
def test_one_bad_item_fails_alone(at: int) -> None:
    """Its neighbours get their results, after one run for each halving."""
    computed = ran(model := Model(at), range(8))
    expected: list[Any] = [n * n for n in range(8)]
    expected[at] = f"cannot square {at}"
    assert expected == errors(computed)
    assert isinstance(computed.outcomes[at].error, ValueError), "as it was raised"
    assert ("succeeded", len(model.batches) - 1) == (computed.verdict, computed.reruns)
    assert computed.reruns <= 4, "one for each halving, and one to be sure where a single run had failed"


def test_several_bad_items_fail_alone() -> None:
    """Each with its own error."""
    computed = ran(Model(1, 6, 30), range(32))
    assert [1, 6, 30] == [n for n, one in enumerate(computed.outcomes) if isinstance(one, Failure)]
    assert "succeeded" == computed.verdict


def test_a_broken_model_is_found_soon() -> None:
    """A failing batch of 64 is run at most 14 times, not 127 times."""
    computed = ran(model := Model(*range(64)), range(64))
    assert len(model.batches) <= 14
    assert "failed" == computed.verdict
    assert all(isinstance(one.error, BatchFailed | ValueError) for one in computed.outcomes)
    assert "f() failed on a batch of" in errors(computed)[63]
    assert isinstance(computed.outcomes[63].error.__cause__, ValueError)


def test_what_expires_meanwhile_is_not_run_again() -> None:
    """It has its answer already."""
    requests = [Request(n) for n in range(4)]

    def run(items: list[int]) -> list[int]:
        seen.append(items)
        requests[0].state = "done"
        if 3 in items:
            raise ValueError("three")
        return items

    seen: list[list[int]] = []
    computed = compute(BatchFunction(run=run, name="f", isolate=True), Batch(requests, 0.0))
    assert [[0, 1, 2, 3], [1, 2, 3], [1], [2], [3]] == seen
    assert [1, 2, "three"] == errors(computed)[1:]


def test_without_isolation_all_items_of_a_batch_fail() -> None:
    """Each gets its own error, since one object in several threads would mix up their tracebacks."""
    computed = ran(model := Model(1), range(3), isolate=False)
    found = [one.error for one in computed.outcomes]
    assert 1 == len(model.batches)
    assert 3 == len({id(error) for error in found})
    assert all(isinstance(error, BatchFailed) and isinstance(error.__cause__, ValueError) for error in found)
    assert "f() failed on a batch of 3: ValueError: cannot square 1" == str(found[0])


def test_a_lone_item_gets_its_error_as_it_is() -> None:
    """No other caller shares it."""
    computed = ran(Model(5), [5])
    assert isinstance(computed.outcomes[0].error, ValueError)
    assert "failed" == computed.verdict, "it cannot be known whether the item is at fault"


def test_exceptions_among_the_results_belong_to_their_items() -> None:
    """The function can fail single items in this way; it is not a failure of the model."""
    computed = ran(lambda items: [n or ValueError("zero") for n in items], range(3))
    assert ["zero", 1, 2] == errors(computed)
    assert ("succeeded", None) == (computed.verdict, computed.error)
    assert "inconclusive" == ran(lambda items: [ValueError("zero") for _ in items], range(3)).verdict


WRONG: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "None": (
        lambda items: None,
        "it returned None instead of a list of 2 results, one for each item in order; is its return statement missing?",
    ),
    "a generator": (lambda items: (n for n in items), "it returned a generator"),
    "a dict": (dict.fromkeys, "it returned a dict"),
    "a set": (lambda items: {*items}, "it returned a set"),
    "text": (lambda items: "ab", "it returned a str"),
    "a number": (lambda items: 2, "it returned an int instead of a list of 2 results"),
    "too few": (lambda items: items[1:], "it returned a list of 1 instead of 2 results"),
    "too many": (lambda items: [*items, 3], "it returned a list of 3 instead of 2 results"),
    "a short tuple": (lambda items: (1,), "it returned a list of 1 instead of 2 results"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_results_fail_their_batch_alone(what: str) -> None:
    """The error says what was returned and what is needed; nothing is run again, and it counts as the model's fault."""
    function, message = WRONG[what]
    computed = ran(function, range(2))
    assert all(isinstance(one.error, WrongResults) and message in str(one.error) for one in computed.outcomes)
    assert ("failed", 0) == (computed.verdict, computed.reruns)


def test_arrays_are_lists_of_results() -> None:
    """Along their first axis; an array without axes is not a list."""
    numpy = pytest.importorskip("numpy")
    assert [0, 2] == ran(lambda items: numpy.array(items) * 2, range(2)).outcomes
    rows = ran(lambda items: numpy.eye(2), range(2)).outcomes
    assert [[1.0, 0.0], [0.0, 1.0]] == [row.tolist() for row in rows]
    assert "it returned a ndarray" in str(ran(lambda items: numpy.array(1.0), range(2)).outcomes[0].error)
    assert [1, 2] == ran(lambda items: (1, 2), range(2)).outcomes


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), StopIteration(1), StopAsyncIteration()]
)
def test_errors_that_would_end_the_caller_are_wrapped(error: BaseException) -> None:
    """A model that exits or is cancelled does not end its caller's thread or event loop."""

    def run(items: list[Any]) -> list[Any]:
        raise error

    (one,) = ran(run, [0]).outcomes
    assert isinstance(one.error, BatchFailed)
    assert error is one.error.__cause__


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (Reloading("nlp", waited=1.0, retry_after=2.0), "inconclusive"),
        (QueueFull("g", queued=3, retry_after=1.0), "inconclusive"),
        (LoadFailed("nlp", "no file"), "failed"),
        (GuardClosed("nlp"), "failed"),
    ],
)
def test_modelguards_own_errors_go_to_all_callers(error: Any, verdict: str) -> None:
    """The batch was not computed, so it is not run again; each caller gets a copy of the error."""
    calls = []

    def run(items: list[Any]) -> list[Any]:
        calls.append(items)
        raise error from OSError("why")

    computed = ran(run, range(3))
    found = [one.error for one in computed.outcomes]
    assert ({type(error)}, {str(error)}) == ({type(one) for one in found}, {str(one) for one in found})
    assert error not in found
    assert all(isinstance(one.__cause__, OSError) for one in found)
    assert (1, verdict) == (len(calls), computed.verdict)


def test_ignored_errors_are_not_the_models_fault() -> None:
    """The types that the breaker ignores do not count."""
    assert "inconclusive" == ran(Model(0, 1), range(2), ignore=(ValueError,)).verdict
    assert "failed" == ran(Model(0, 1), range(2), ignore=(KeyError,)).verdict


def test_the_function_may_change_its_list() -> None:
    """The list is the function's own; a second run gets all items."""

    def run(items: list[int]) -> list[int]:
        taken = [items.pop(0) for _ in range(len(items))]
        if 1 in taken:
            raise ValueError("one")
        return taken

    assert [0, "one", 2, 3] == errors(ran(run, range(4)))


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_that_cannot_be_printed_is_answered_too(raised: type[BaseException]) -> None:
    """Whatever its ``__str__`` raises, nobody waits for ever."""

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise raised

    def run(items: list[Any]) -> list[Any]:
        raise Unprintable

    for isolate in (True, False):
        assert 3 == ran(run, range(3), isolate=isolate).failed


class TestGpuMemory:
    """Batches that are too large for the device, with a torch that the test makes."""

    @pytest.fixture(autouse=True)
    def torch(self, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
        """The module torch of this process."""
        made = FakeTorch()
        monkeypatch.setitem(sys.modules, "torch", made)
        return made

    @staticmethod
    def up_to(most: int, batches: list[list[int]]) -> Callable[[list[int]], list[int]]:
        """A function that runs out of memory with more items than these."""

        def square(items: list[int]) -> list[int]:
            batches.append(items)
            if len(items) > most:
                raise OutOfMemoryError
            return [item * item for item in items]

        return square

    def test_both_halves_are_run(self, torch: FakeTorch) -> None:
        """A batch that is up to twice too large is answered, with the cache emptied before."""
        computed = ran(self.up_to(4, batches := []), range(8))
        assert [n * n for n in range(8)] == computed.outcomes
        assert ([8, 4, 4], 2, "succeeded") == ([*map(len, batches)], computed.reruns, computed.verdict)
        assert 1 == torch.used.count("empty_cache")

    def test_no_item_is_looked_for(self) -> None:
        """A model that never gets its memory costs two more runs, and no item is remembered as bad."""
        computed = ran(self.up_to(0, batches := []), range(64))
        assert ([64, 32, 32], 64, "failed") == ([*map(len, batches)], computed.failed, computed.verdict)
        assert all(isinstance(one.error, BatchFailed | OutOfMemoryError) for one in computed.outcomes)

    def test_one_half_may_fail(self) -> None:
        """The other one is answered."""

        def square(items: list[int]) -> list[int]:
            if len(items) > 4 or 7 in items:
                raise OutOfMemoryError
            return [item * item for item in items]

        computed = ran(square, range(8))
        assert [0, 1, 4, 9] == computed.outcomes[:4]
        assert 4 == computed.failed

    def test_isolate_false_runs_nothing_again(self) -> None:
        """Who asked for one run gets one."""
        computed = ran(self.up_to(4, batches := []), range(8), isolate=False)
        assert (1, 8) == (len(batches), computed.failed)

    def test_it_ends_the_search_for_another_error(self) -> None:
        """An item at fault is looked for no further in a part that the device cannot hold."""

        def fails(items: list[int]) -> list[int]:
            if len(items) == 8:
                raise ValueError
            raise OutOfMemoryError

        computed = ran(fails, range(8))
        assert 8 == computed.failed
        assert computed.reruns <= 4
