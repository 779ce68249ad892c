"""What is kept of calls, the bounds of that, and the rule by which answers are judged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.lifecycle.world import TIMEOUT, World

from modelguard import Replay
from modelguard.errors import InvalidOption
from modelguard.lifecycle._replay import Answer, Comparison, RecordedCalls

ENCLOSING: ContextVar[Any] = ContextVar("enclosing", default=None)


class Clock:
    """Moves when it is told, and by what copying is said to cost."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cost = 0.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        self.now += self.cost
        return self.now


def plain(model: Any, value: Any = None) -> Any:
    """What is decorated."""
    return model, value


def recorder(rule: Replay, clock: Callable[[], float] | None = None) -> tuple[RecordedCalls, Callable[..., Any]]:
    """A recorder, and a function that is recorded."""
    calls = RecordedCalls(rule, ENCLOSING) if clock is None else RecordedCalls(rule, ENCLOSING, clock)
    body = calls.recording(lambda wrapped, _, args, kwargs: wrapped("model", *args, **kwargs))
    return calls, lambda *args, **kwargs: body(plain, None, args, kwargs)


def values(calls: RecordedCalls) -> list[Any]:
    """The arguments that are kept."""
    prepared = [call.prepared() for call in calls.snapshot()]
    return [None if one is None else one("new")[1] for one in prepared]


@given(sizes=st.lists(st.integers(0, 8000), max_size=40), count=st.integers(1, 10), limit=st.integers(1000, 20_000))
def test_the_latest_calls_within_both_bounds_are_kept(sizes: list[int], count: int, limit: int) -> None:
    """As many of the latest as the number and the memory allow; one that is too large alone leaves the others."""
    calls, call = recorder(Replay(count, max_memory=limit), Clock())
    for size in sizes:
        call(bytes(size))
    kept = [len(value) for value in values(calls)]
    overhead = 40  # bytes of a pickle with one bytes object, less than this
    fitting = [size for size in sizes if size + overhead <= limit]
    assert count >= len(kept)
    assert limit >= sum(one.size for one in calls.snapshot()) >= sum(kept)
    everything = [size for size in sizes if size <= limit]
    assert (
        len(kept) == 0 or kept == everything[-len(kept) :] or kept == fitting[-len(kept) :] or set(kept) <= set(sizes)
    )
    if fitting and sizes[-1] + overhead <= limit:
        assert sizes[-1] == kept[-1]


def test_later_calls_cost_a_hundredth_of_the_time() -> None:
    """The first ones are all kept; after that, the next copy waits for 99 times as long as the last one took."""
    clock = Clock()
    calls, call = recorder(Replay(3), clock)
    for value in range(3):
        call(value)
    clock.cost = 1.0
    call("copied")
    clock.cost = 0.0
    began = clock.now
    for seconds in (0, 50, 98.5):
        clock.now = began + seconds
        call(f"after {seconds}")
    assert [1, 2, "copied"] == values(calls)
    clock.now = began + 99
    call("in time")
    assert [2, "copied", "in time"] == values(calls)


def test_arguments_that_cannot_be_copied_cost_no_more() -> None:
    """They are tried as seldom as others are copied."""
    clock = Clock()
    _, call = recorder(Replay(3), clock)
    tried = 0

    class Stubborn:
        def __reduce__(self) -> Any:
            nonlocal tried
            tried += 1
            clock.now += 1.0
            raise TypeError("no")

    for _ in range(100):
        call(Stubborn())
    assert 4 == tried


def test_a_large_argument_is_not_copied_whole() -> None:
    """Copying stops at the bound, so that a call does not wait for it."""
    calls, call = recorder(Replay(max_memory="1 MB"))
    written = []

    class Huge:
        def __reduce__(self) -> Any:
            return bytes, (), None, self.parts()

        def parts(self) -> Any:
            for part in range(1000):
                written.append(part)
                yield bytes(100_000)

    call(Huge())
    call("small")
    assert ["small"] == values(calls)
    assert 20 > len(written)


def test_no_call_waits_for_the_copy_of_another() -> None:
    """It is left out instead."""
    calls, call = recorder(Replay(10))
    copying, over = threading.Event(), threading.Event()

    class Slow:
        def __reduce__(self) -> Any:
            copying.set()
            assert over.wait(TIMEOUT)
            return str, ("slow",)

    thread = threading.Thread(target=call, args=(Slow(),))
    thread.start()
    assert copying.wait(TIMEOUT)
    call("beside")
    over.set()
    thread.join(TIMEOUT)
    assert ["slow"] == values(calls)


def test_a_child_records_though_another_thread_was_recording() -> None:
    """A fork copies the lock that the other thread held."""
    calls, call = recorder(Replay(10))
    call(1)
    calls._lock.acquire()
    calls.exclusion._turn.acquire()
    calls.after_fork_in_child()
    call(2)
    assert [1, 2] == values(calls)
    with calls.exclusion.turn(TIMEOUT) as mine:
        assert mine


def test_calls_inside_others_are_not_recorded() -> None:
    """The enclosing call repeats them."""
    calls, call = recorder(Replay(10))
    token = ENCLOSING.set(["a generation", 1])
    call(1)
    ENCLOSING.reset(token)
    call(2)
    assert [2] == values(calls)


# Turns


def plain_body(*_: Any) -> bool:
    """What a decorated function does."""
    return True


def test_calls_that_overlap_take_no_turns() -> None:
    """The model is one for several threads then, and nobody waits."""
    calls, _ = recorder(Replay(10))
    exclusion = calls.exclusion
    inner = exclusion.taking_turns(plain_body)
    outer = exclusion.taking_turns(lambda *_: inner(plain, None, (), {}))
    assert outer(plain, None, (), {})
    with exclusion.turn(0) as mine:
        assert mine
        assert inner(plain, None, (), {})


def test_a_call_waits_for_the_recorded_one() -> None:
    """And runs when that has ended."""
    calls, _ = recorder(Replay(10))
    call = calls.exclusion.taking_turns(plain_body)
    done: list[bool] = []
    with calls.exclusion.turn(TIMEOUT):
        thread = threading.Thread(target=lambda: done.append(call(plain, None, (), {})))
        thread.start()
        thread.join(0.01)
        assert [] == done
    thread.join(TIMEOUT)
    assert [True] == done
    with calls.exclusion.turn(0) as mine:
        assert mine


def test_a_recorded_call_that_waits_for_a_thread_is_no_deadlock() -> None:
    """A call in a thread of its own goes on after ``timeout``."""
    calls, _ = recorder(Replay(10, timeout=0.01))
    call = calls.exclusion.taking_turns(plain_body)
    done: list[bool] = []
    with calls.exclusion.turn(TIMEOUT):
        thread = threading.Thread(target=lambda: done.append(call(plain, None, (), {})))
        thread.start()
        thread.join(TIMEOUT)
    assert [True] == done


def test_a_recorded_call_does_not_wait_for_ever() -> None:
    """If the model is in use until time is up, it is left out."""
    calls, _ = recorder(Replay(10))
    mine: list[bool] = []

    def body(*_: Any) -> None:
        def replay() -> None:
            with calls.exclusion.turn(0.01) as free:
                mine.append(free)

        thread = threading.Thread(target=replay)
        thread.start()
        thread.join(TIMEOUT)

    calls.exclusion.taking_turns(body)(plain, None, (), {})
    assert [False] == mine


# The rule


@given(
    answers=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=120),
    share=st.integers(0, 1000).map(lambda thousandths: thousandths / 1000),
)
def test_a_model_is_rejected_if_and_only_if_too_few_answers_agree(
    answers: list[tuple[bool, bool, bool]], share: float
) -> None:
    """Answers that the current model does not give count for nothing."""
    found = Comparison(Replay(min_agreement=share, max_slowdown=None), len(answers))
    for agrees, new_raises, current_raises in answers:
        new = Answer(int(agrees), "ValueError" if new_raises else None, 1.0)
        found.add(new, Answer(1, "KeyError" if current_raises else None, 1.0))
    compared = [(agrees and not new_raises) for agrees, new_raises, current_raises in answers if not current_raises]
    assert (len(compared), sum(compared)) == (found.compared, found.agreed)
    enough = sum(compared) >= share * len(compared) - 1e-6
    assert enough == (found.objection is None)


@given(st.lists(st.floats(1e-6, 1e6), min_size=10, max_size=50), st.floats(1, 100))
def test_a_model_is_rejected_if_the_median_call_is_too_slow(ratios: list[float], bound: float) -> None:
    """By the factor of the rule, however long the calls take."""
    found = Comparison(Replay(max_slowdown=bound), len(ratios))
    for number, ratio in enumerate(ratios):
        current = 10.0 ** (number % 5 - 3)
        found.add(Answer(1, None, ratio * current), Answer(1, None, current))
    slower = sum(ratio > bound * (1 + 1e-6) for ratio in ratios)
    if slower > len(ratios) / 2:
        assert found.objection is not None
    elif sum(ratio > bound * (1 - 1e-6) for ratio in ratios) < len(ratios) / 2:
        assert found.objection is None


@given(st.floats(0.01, 1000), st.floats(1, 100), st.booleans())
def test_a_call_that_was_cut_off_counts_if_it_took_too_long_already(ratio: float, bound: float, late: bool) -> None:  # noqa: FBT001
    """What it would have answered is not known, so it counts neither way otherwise."""
    found = Comparison(Replay(max_slowdown=bound), 1, cut_short=True)
    found.add(Answer(None, None, ratio, ended=False), Answer(1, None, 1.0, ended=not late))
    assert (0, not late and ratio > bound) == (found.compared, found.objection is not None)


# Options


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Replay(0), r"count=0: must be a whole number of at least 1"),
        (lambda: Replay(True), r"count=True: must be a whole number"),  # noqa: FBT003 - the mistake itself
        (
            lambda: Replay(min_agreement=95),
            r"min_agreement=95: must be a number of at least 0 and at most 1. Write min_agreement=0.95",
        ),
        (lambda: Replay(min_agreement=-0.1), r"min_agreement=-0.1: must be a number of at least 0 and at most 1"),
        (lambda: Replay(min_agreement=float("nan")), r"min_agreement=nan: must be a number"),
        (lambda: Replay(min_agreement="95%"), r"min_agreement='95%': must be a number"),  # type: ignore[arg-type]
        (lambda: Replay(max_slowdown=0.5), r"max_slowdown=0.5: must be a number of at least 1.*or None"),
        (lambda: Replay(max_slowdown=float("inf")), r"max_slowdown=inf: must be a number"),
        (lambda: Replay(max_slowdown="2x"), r"max_slowdown='2x': must be a number"),  # type: ignore[arg-type]
        (lambda: Replay(same="=="), r"same='==': must be a function of two answers, not a str"),  # type: ignore[arg-type]
        (lambda: Replay(max_memory=0), r"max_memory=0: must not be zero"),
        (lambda: Replay(timeout=0), r"timeout=0: must not be zero"),
    ],
)
def test_a_bad_rule_is_refused(made: Callable[[], object], message: str) -> None:
    """When it is written, with its name, its value and the fix."""
    with pytest.raises(InvalidOption, match=message):
        made()


@pytest.mark.parametrize("value", [True, False, 0, -1, 1.5, "100", [Replay()]])
def test_a_guard_takes_a_number_or_a_rule(world: World, value: object) -> None:
    """And nothing else."""
    with pytest.raises(InvalidOption, match=r"replay=.*: must be a whole number of at least 1"):
        world.guard(replay=value)


def test_one_model_at_a_time_has_nothing_to_compare(world: World) -> None:
    """``drain_first`` is refused."""
    with pytest.raises(InvalidOption, match=r"replay=Replay\(.*: needs two models"):
        world.guard(replay=5, swap="drain_first")


def test_a_rule_is_a_value() -> None:
    """Equal if all of it is equal, and shown as it was written."""
    assert Replay(5, timeout="1m") == Replay(5, timeout=60)
    assert "Replay(100)" == repr(Replay())
    assert "Replay(5, min_agreement=0.5, timeout=60.0)" == repr(Replay(5, min_agreement=0.5, timeout="1m"))
