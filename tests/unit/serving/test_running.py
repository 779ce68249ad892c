"""``running``: results checked, and each error given to whom it belongs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from modelguard.errors import BatchFailed, GuardClosed, LoadFailed, QueueFull, Reloading, WrongResults
from modelguard.serving.entries import DONE, Entry, Failure
from modelguard.serving.running import Computed, Function, compute


class Model:
    """Squares numbers, fails on those it is told to, and remembers its batches."""

    def __init__(self, *bad: int) -> None:
        self.bad = {*bad}
        self.batches: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        if wrong := self.bad & {*items}:
            raise ValueError(f"cannot square {min(wrong)}")
        return [item * item for item in items]


def ran(run: Callable[..., Any], items: range | list[Any], *, isolate: bool = True, **options: Any) -> Computed:
    return compute(Function(run=run, name="f", isolate=isolate, **options), [Entry(item) for item in items], {})


def errors(computed: Computed) -> list[Any]:
    """For each item its error's text, or its result."""
    return [str(one.error) if isinstance(one, Failure) else one for one in computed.outcomes]


def test_results_are_those_of_the_items_in_their_order() -> None:
    """One each."""
    computed = ran(Model(), range(4))
    assert ([0, 1, 4, 9], "good", None, 0) == (computed.outcomes, computed.verdict, computed.error, computed.reruns)


@pytest.mark.parametrize("at", range(8))
def test_one_bad_item_fails_alone(at: int) -> None:
    """Its neighbours have their results, after two runs for each halving."""
    computed = ran(model := Model(at), range(8))
    expected: list[Any] = [n * n for n in range(8)]
    expected[at] = f"cannot square {at}"
    assert expected == errors(computed)
    assert isinstance(computed.outcomes[at].error, ValueError), "as it was raised"
    assert ("good", 6, 7) == (computed.verdict, computed.reruns, len(model.batches))


def test_several_bad_items_fail_alone() -> None:
    """Each with its own error."""
    computed = ran(Model(1, 6, 30), range(32))
    assert [1, 6, 30] == [n for n, one in enumerate(computed.outcomes) if isinstance(one, Failure)]
    assert "good" == computed.verdict


def test_a_broken_model_is_found_out_soon() -> None:
    """Not after two runs an item: that would make a failure 127 times as long."""
    computed = ran(model := Model(*range(64)), range(64))
    assert len(model.batches) <= 14
    assert "bad" == computed.verdict
    assert all(isinstance(one.error, BatchFailed | ValueError) for one in computed.outcomes)
    assert "f() failed on a batch of" in errors(computed)[63]
    assert isinstance(computed.outcomes[63].error.__cause__, ValueError)


def test_what_expires_meanwhile_is_not_run_again() -> None:
    """It has its answer."""
    entries = [Entry(n) for n in range(4)]

    def run(items: list[int]) -> list[int]:
        seen.append(items)
        entries[0].place = DONE
        if 3 in items:
            raise ValueError("three")
        return items

    seen: list[list[int]] = []
    computed = compute(Function(run=run, name="f", isolate=True), entries, {})
    assert [[0, 1, 2, 3], [1], [2, 3], [2], [3]] == seen
    assert [1, 2, "three"] == errors(computed)[1:]


def test_without_isolation_all_items_of_a_batch_fail() -> None:
    """Each with an error of its own: one object in several threads would mix up their tracebacks."""
    computed = ran(model := Model(1), range(3), isolate=False)
    found = [one.error for one in computed.outcomes]
    assert 1 == len(model.batches)
    assert 3 == len({id(error) for error in found})
    assert all(isinstance(error, BatchFailed) and isinstance(error.__cause__, ValueError) for error in found)
    assert "f() failed on a batch of 3: ValueError: cannot square 1" == str(found[0])


def test_a_lone_item_gets_its_error_as_it_is() -> None:
    """There is nobody to share it with."""
    computed = ran(Model(5), [5])
    assert isinstance(computed.outcomes[0].error, ValueError)
    assert "bad" == computed.verdict, "nobody can tell whether it is the item's fault"


def test_exceptions_among_the_results_belong_to_their_items() -> None:
    """They are the function's own way to pin a failure, and no failure of the model."""
    computed = ran(lambda items: [n or ValueError("zero") for n in items], range(3))
    assert ["zero", 1, 2] == errors(computed)
    assert ("good", None) == (computed.verdict, computed.error)
    assert "neither" == ran(lambda items: [ValueError("zero") for _ in items], range(3)).verdict


WRONG: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "None": (lambda items: None, "it returned None, and a list of 2 results is needed"),
    "a generator": (lambda items: (n for n in items), "it returned a generator"),
    "a dict": (dict.fromkeys, "it returned a dict"),
    "a set": (lambda items: {*items}, "it returned a set"),
    "text": (lambda items: "ab", "it returned a str"),
    "a number": (lambda items: 2, "it returned a int"),
    "too few": (lambda items: items[1:], "it returned 1 results"),
    "too many": (lambda items: [*items, 3], "it returned 3 results"),
    "a short tuple": (lambda items: (1,), "it returned 1 results"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_list_of_results_fails_its_batch_alone(what: str) -> None:
    """By name, with what was needed; nothing is run again, and the model is at fault."""
    function, says = WRONG[what]
    computed = ran(function, range(2))
    assert all(isinstance(one.error, WrongResults) and says in str(one.error) for one in computed.outcomes)
    assert ("bad", 0) == (computed.verdict, computed.reruns)


def test_arrays_are_lists_of_results() -> None:
    """Along their first axis; an array without axes is none."""
    numpy = pytest.importorskip("numpy")
    assert [0, 2] == ran(lambda items: numpy.array(items) * 2, range(2)).outcomes
    rows = ran(lambda items: numpy.eye(2), range(2)).outcomes
    assert [[1.0, 0.0], [0.0, 1.0]] == [row.tolist() for row in rows]
    assert "it returned a ndarray" in str(ran(lambda items: numpy.array(1.0), range(2)).outcomes[0].error)
    assert [1, 2] == ran(lambda items: (1, 2), range(2)).outcomes


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), StopIteration(1)])
def test_what_is_no_error_of_a_call_is_wrapped(error: BaseException) -> None:
    """A model that exits, or is cancelled, must not end its caller's thread or loop."""

    def run(items: list[Any]) -> list[Any]:
        raise error

    (one,) = ran(run, [0]).outcomes
    assert isinstance(one.error, BatchFailed)
    assert error is one.error.__cause__


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (Reloading("nlp", waited=1.0, retry_after=2.0), "neither"),
        (QueueFull("g", queued=3, retry_after=1.0), "neither"),
        (LoadFailed("nlp", "no file"), "bad"),
        (GuardClosed("nlp"), "bad"),
    ],
)
def test_modelguards_own_errors_are_everybodys(error: Any, verdict: str) -> None:
    """The batch was not computed, so it is not run again; each caller gets the error itself, afresh."""
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
    """By the types that the breaker was given."""
    assert "neither" == ran(Model(0, 1), range(2), ignore=(ValueError,)).verdict
    assert "bad" == ran(Model(0, 1), range(2), ignore=(KeyError,)).verdict


def test_the_function_may_change_its_list() -> None:
    """It is the function's own; a second run has all items."""

    def run(items: list[int]) -> list[int]:
        taken = [items.pop(0) for _ in range(len(items))]
        if 1 in taken:
            raise ValueError("one")
        return taken

    assert [0, "one", 2, 3] == errors(ran(run, range(4)))
