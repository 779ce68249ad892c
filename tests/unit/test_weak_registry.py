"""A set of weak references that any thread may change."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from modelguard.runtime.fork_hooks import WeakRegistry


class Thing:
    """Something that is listed."""


def test_lists_what_lives() -> None:
    """Each thing once, and none that nobody refers to."""
    registry: WeakRegistry[Thing] = WeakRegistry()
    assert not registry
    first, second = Thing(), Thing()
    for one in (first, first, second):
        registry.add(one)
    assert {first, second} == set(registry)
    del first, one
    assert [second] == list(registry)
    registry.discard(second)
    registry.discard(second)
    assert [] == list(registry)
    assert not registry


@pytest.mark.timeout(60)
def test_other_threads_add_and_drop_things_meanwhile() -> None:
    """A loop over it never fails, and always has those that were there all the time."""
    registry: WeakRegistry[Thing] = WeakRegistry()
    kept = [Thing() for _ in range(1000)]
    for one in kept:
        registry.add(one)
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            passing = [Thing() for _ in range(10)]
            for each in passing:
                registry.add(each)
            registry.discard(passing[0])

    interval, until = sys.getswitchinterval(), time.monotonic() + 1
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        while time.monotonic() < until:
            assert set(kept) <= set(registry)
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        thread.join()
