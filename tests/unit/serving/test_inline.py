"""``_inline``: inside the block each item is computed at once, in its caller's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT

from modelguard import Breaker, Weight, batched, deadline
from modelguard.errors import BatchFailed, GuardClosed, ItemRefused, ItemTooHeavy, WouldDeadlock, WrongResults
from modelguard.runtime.call_context import inline
from modelguard.serving import left


@pytest.fixture(autouse=True)
def _inline() -> Iterator[None]:
    with inline():
        yield


def where(items: list[int], *, plus: int = 0) -> list[Any]:
    return [(threading.current_thread().name, len(items), item + plus) for item in items]


def test_all_kinds_of_calls_run_in_their_own_thread() -> None:
    """Each item is its own batch, and no thread is started."""
    before = {*threading.enumerate()}
    f = batched(max_size=8, max_wait="1h")(where)
    me = threading.current_thread().name
    assert (me, 1, 3) == f(1, plus=2) == asyncio.run(f.aio(1, plus=2)) == f.submit(1, plus=2).result(0)
    assert [(me, 1, 1), (me, 1, 2)] == list(f.map([1, 2]))
    assert before >= {*threading.enumerate()}  # those of earlier tests end
    assert (0, 0) == (f.status().answered, f.status().batches), "nothing is counted"


def test_other_threads_compute_inline_as_well() -> None:
    """The switch is for the whole process: a web framework may call from a thread pool."""
    f = batched(max_size=8)(where)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(f(1)), name="pool")
    thread.start()
    thread.join(TIMEOUT)
    assert [("pool", 1, 1)] == found


def test_there_is_no_deadline_and_no_breaker() -> None:
    """A test is not refused because it is slow, or because earlier calls failed."""
    seen: list[float | None] = []

    @batched(max_size=4, deadline="1ms", breaker=Breaker(failures=1))
    def f(items: list[int]) -> list[int]:
        seen.append(left())
        raise OSError("no device")

    with deadline(0):
        for _ in range(3):
            with pytest.raises(OSError, match="no device"):
                f(1, timeout=0)
    assert [None] * 3 == seen


def test_arguments_and_results_are_checked() -> None:
    """A wrong call or a wrong result fails in a test as it does in the service."""
    f = batched(max_size=4, weight=Weight(of=len, most=3))(lambda items: [1, 2])
    with pytest.raises(WrongResults):
        f("a")
    with pytest.raises(ItemTooHeavy):
        f("long")
    with pytest.raises(ItemRefused):
        f(3)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        f("a", colour="red")


def give_back(error: BaseException) -> Any:
    return error


def throw(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("fail", [give_back, throw])
def test_errors_are_those_of_the_item(fail: Any) -> None:
    """Raised or returned: a future carries the error, and StopIteration, which futures reject, is wrapped."""
    f = batched(max_size=4)(lambda items: [fail(item) for item in items])
    with pytest.raises(ValueError, match="mine"):
        f(ValueError("mine"))
    assert "mine" == str(f.submit(ValueError("mine")).exception(0))
    with pytest.raises(BatchFailed, match="StopIteration"):
        asyncio.run(f.aio(StopIteration()))
    with pytest.raises(KeyboardInterrupt if fail is throw else BatchFailed):
        f.submit(KeyboardInterrupt()).result(0)


def test_a_call_that_fails_takes_nothing_out_of_the_queue() -> None:
    """Nor does one that is cancelled: nothing is counted, and the function can be closed at once."""
    f = batched(max_size=4)(lambda items: [throw(item) for item in items])
    for call in (lambda: f(OSError("full")), lambda: asyncio.run(f.amap([OSError("full")] * 2))):
        with pytest.raises(OSError, match="full"):
            call()
    f.submit(OSError()).cancel()
    assert (0, 0) == (f.status().waiting, f.status().cancelled)
    f.close(timeout=0)
    assert "closed" == f.status().state


def test_a_closed_function_stays_closed() -> None:
    """It refuses calls as always."""
    f = batched(max_size=4)(where)
    f.close()
    with pytest.raises(GuardClosed):
        f(1)


def test_the_batch_function_cannot_call_itself() -> None:
    """The mistake is found in a test already, although it would not deadlock there."""

    @batched(max_size=4)
    def f(items: list[Any]) -> list[Any]:
        return [f(item) for item in items]

    with pytest.raises(WouldDeadlock, match="its batch function calls it"):
        f(1)


def test_blocks_can_be_nested() -> None:
    """The outer block still holds when an inner one has ended."""
    f = batched(max_size=4)(where)
    with inline():
        pass
    assert threading.current_thread().name == f(1)[0]
