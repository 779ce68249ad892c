"""Batched methods of short-lived instances: the threads they use, and what is left of them."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.serving.gated import TIMEOUT, Gated, until

from modelguard import Execution, batched
from modelguard.errors import DeadlineExceeded, ModelGuardWarning

#: The thread of the timer, and those of the instances that are still there.
FEW = 3


class Service:
    """Made for each request."""

    def __init__(self, by: int = 2) -> None:
        self.by = by

    @batched(max_size=4)
    def times(self, items: list[int]) -> list[int]:
        return [item * self.by for item in items]

    @batched(max_size=4, deadline="1h")
    def bounded(self, items: list[int]) -> list[int]:
        return [item * self.by for item in items]


class Slow:
    """Waits for a gate."""

    def __init__(self, model: Gated) -> None:
        self.model = model

    @batched(max_size=1)
    def f(self, items: list[int]) -> list[int]:
        return list(self.model(items))

    @batched(max_size=1, deadline="20ms")
    def late(self, items: list[int]) -> list[int]:
        return list(self.model(items))


def ours() -> int:
    """How many threads modelguard has."""
    return sum(thread.name.startswith("modelguard") for thread in threading.enumerate())


@pytest.mark.parametrize("method", ["times", "bounded"])
@pytest.mark.filterwarnings("ignore::modelguard.errors.ModelGuardWarning")
def test_threads_end_with_their_instances(method: str) -> None:
    """None is left of an instance for each request, long before it has waited in vain; with a deadline as well."""
    gc.collect()
    before = ours()
    for number in range(400):
        assert 2 * number == getattr(Service(), method)(number)
    gc.collect()
    until(lambda: ours() - before <= FEW)


@pytest.mark.filterwarnings("ignore::modelguard.errors.ModelGuardWarning")
def test_instances_side_by_side_leave_few_threads() -> None:
    """Each has a thread of its own, as long as it lives."""
    before = ours()
    with ThreadPoolExecutor(32) as callers:
        assert [2 * n for n in range(640)] == list(callers.map(lambda n: Service().bounded(n), range(640)))
    gc.collect()
    until(lambda: ours() - before <= FEW)


def test_instances_compute_side_by_side(model: Gated) -> None:
    """An instance whose model hangs does not delay the others."""
    hanging = Slow(model)
    stuck = hanging.f.submit(1)
    model.busy()
    assert [4] * 20 == [Service().times(2) for _ in range(20)]
    model.gate.set()
    assert 1 == stuck.result(TIMEOUT)


def test_an_instance_is_not_kept_alive_by_a_thread() -> None:
    """Neither the idle thread nor the timer holds it, however long its deadline is."""
    one = Service()
    assert [2, 2] == [one.times(1), one.bounded(1)]
    gone = weakref.ref(one)
    del one
    until(lambda: _collected(gone))


def _collected(gone: weakref.ref[Service]) -> bool:
    gc.collect()
    return gone() is None


def test_a_long_lived_instance_is_served_again_and_again() -> None:
    """By as many callers as there are, each with its own result."""
    one = Service(3)
    with ThreadPoolExecutor(16) as callers:
        assert [3 * n for n in range(2000)] == list(callers.map(one.times, range(2000)))
        assert [3 * n for n in range(2000)] == list(callers.map(one.bounded, range(2000)))
    assert (2000, 2000) == (one.times.status().answered, one.bounded.status().answered)


def test_deadlines_of_instances_hold(model: Gated) -> None:
    """While the model is stuck, again and again, and beside other instances."""
    slow, other = Slow(model), Slow(model)
    for one in (slow, other, slow):
        with pytest.raises(DeadlineExceeded):
            one.late(1)
    model.gate.set()


def test_a_hung_instance_is_seen(model: Gated) -> None:
    """Its time is looked after without a thread of its own."""

    class Hanging:
        @batched(max_size=1, execution=Execution(hang_after=0.01))
        def f(self, items: list[int]) -> list[int]:
            return list(model(items))

    one = Hanging()
    one.f.submit(1)
    until(lambda: "hung" == one.f.status().state)
    model.gate.set()
    until(lambda: "open" == one.f.status().state)


def test_the_collector_may_use_another_instance_while_one_gets_its_queue() -> None:
    """A finalizer that flushes what it has by a batched method finds no lock that its own thread holds."""
    before, got = gc.get_threshold(), []

    def collected(_phase: str, _info: object) -> None:
        if len(got) < 100:  # some of them while the lock is held
            got.append(Service().times)

    def use() -> None:
        gc.callbacks.append(collected)
        gc.set_threshold(1)
        try:
            got.append(Service().times)
        finally:
            gc.callbacks.remove(collected)
            gc.set_threshold(*before)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert 2 == got[-1](1)


def test_closing_an_instance_s_queue_ends_it() -> None:
    """As for a function: what waits is computed, and nothing more is admitted."""
    one = Service()
    futures = [one.times.submit(n) for n in range(10)]
    one.times.close()
    assert [2 * n for n in range(10)] == [future.result(0) for future in futures]
    assert "closed" == one.times.status().state


def test_short_lived_instances_are_named_in_a_warning() -> None:
    """Once for a method, with the fix: their items never share a batch."""

    class ForEachRequest:
        @batched(max_size=4)
        def f(self, items: list[int]) -> list[int]:
            return items

    def serve() -> None:
        for number in range(400):
            ForEachRequest().f(number)
            gc.collect(0)

    with pytest.warns(ModelGuardWarning, match=r"ForEachRequest\.f\(\): 100 instances .* Keep one instance") as caught:
        serve()
    assert [__file__] == [one.filename for one in caught]


def test_many_long_lived_instances_are_not_warned_of() -> None:
    """One for each of many tenants, say."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelGuardWarning)
        kept = [Service() for _ in range(300)]
        assert [2] * 300 == [one.times(1) for one in kept]
