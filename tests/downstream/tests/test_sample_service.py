"""The sample service's suite: one test for each thing that modelguard's plugin hands out."""

from __future__ import annotations

import asyncio
from itertools import count as numbers

import pytest
from sample_service import Counter, count, count_all, counter

from modelguard import TTL, Swap, guard
from modelguard.testing import Clock, Env, Loader, assert_no_growth, assert_shared_after_fork


def test_it_counts(modelguard_off: None) -> None:
    """What is counted is a matter of the function alone."""
    assert (2, 3) == (count("two words"), count_all("three more words"))
    assert 1 == asyncio.run(count_all.aio("one"))


def test_it_is_replaced_every_hour(modelguard_clock: Clock) -> None:
    """The service's own guard, made when its module was imported, reloads after an hour."""
    modelguard_clock.drive(count)
    count("a text")
    before = counter.status().generation
    modelguard_clock.advance("1h")
    assert before + 1 == counter.status().generation


def test_a_failed_reload_changes_nothing(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """While the new weights cannot be loaded the old model answers, and later the new one."""
    model = guard(modelguard_loader, reload_on=TTL("1h"), swap=Swap(defer=0))
    number = model(lambda loaded: loaded.number)
    assert 1 == number()
    modelguard_loader.fail(1)
    modelguard_clock.advance("1h")
    assert (1, "degraded") == (number(), model.status().state)
    modelguard_clock.advance("1s")
    assert (3, 1) == (number(), modelguard_loader.alive)


def test_a_request_leaves_nothing() -> None:
    """Memory does not grow with the requests, however new their words are."""
    assert_no_growth(count, (f"word number {number}" for number in numbers()))


def test_workers_share_the_model() -> None:
    """A worker that is forked from a parent with a ready model reads it without a copy."""
    assert_shared_after_fork(guard(Counter, reload_on=None), lambda model: model.table.count(b"x"))


def test_a_worker_keeps_to_its_part_of_the_cpus(modelguard_env: Env) -> None:
    """Started with the preset, a worker's thread pools have the threads that they should."""
    done = modelguard_env("import os; print(os.environ['OMP_NUM_THREADS'])", preset="torch-cpu")
    assert [done.environ["OMP_NUM_THREADS"]] == done.lines


@pytest.mark.modelguard_memory("20 MB")
def test_a_reload_leaves_no_second_copy() -> None:
    """After ten reloads there is one model and not eleven."""
    count("a text")
    for _ in range(10):
        counter.reload()
