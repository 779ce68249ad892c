"""``_processes``: how others are scheduled while a model loads and an old one ends."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from modelguard.isolation import _processes


@pytest.fixture
def other() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def two(other: int) -> Iterator[tuple[list[int], set[int]]]:
    """Two processes that may use two CPUs, and these."""
    cpus = set(sorted(os.sched_getaffinity(0))[:2])
    if len(cpus) < 2:
        pytest.skip("one CPU")
    with subprocess.Popen(["sleep", "60"]) as second:
        pids = [other, second.pid]
        for pid in pids:
            os.sched_setaffinity(pid, cpus)
        yield pids, cpus
        second.kill()


def test_a_thread_that_ends_meanwhile_leaves_no_other_on_its_cpu(
    monkeypatch: pytest.MonkeyPatch, two: tuple[list[int], set[int]]
) -> None:
    """All others of its process, and other processes, get their CPUs back."""
    pids, cpus = two
    ended = threading.Thread(target=int)
    ended.start(), ended.join()
    tasks, bound = _processes._tasks, []
    with _processes.on_cpus_of_their_own(pids):
        bound = [os.sched_getaffinity(pid) for pid in pids]
        monkeypatch.setattr(_processes, "_tasks", lambda pid: [ended.native_id, *tasks(pid)])
    assert [{cpu} for cpu in sorted(cpus)] == bound
    assert [cpus, cpus] == [os.sched_getaffinity(pid) for pid in pids]


@pytest.mark.parametrize("chosen", [min, max])
def test_processes_that_are_bound_with_the_whole_service_stay_so(
    two: tuple[list[int], set[int]], chosen: Callable[[set[int]], int]
) -> None:
    """Also the one whose own CPU it is."""
    (pids, cpus), before = two, os.sched_getaffinity(0)
    try:
        with _processes.on_cpus_of_their_own(pids):
            for pid in (0, *pids):
                os.sched_setaffinity(pid, {chosen(cpus)})
        assert 2 * [{chosen(cpus)}] == [os.sched_getaffinity(pid) for pid in pids]
    finally:
        os.sched_setaffinity(0, before)


def test_a_process_that_others_bind_meanwhile_stays_so(two: tuple[list[int], set[int]]) -> None:
    """By ``taskset -p``, say. The others get their CPUs back."""
    pids, cpus = two
    with _processes.on_cpus_of_their_own(pids):
        os.sched_setaffinity(pids[0], {max(cpus)})  # while it keeps to the other one
    assert [{max(cpus)}, cpus] == [os.sched_getaffinity(pid) for pid in pids]
