"""``_processes``: how others are scheduled while a model loads and an old one ends."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator

import pytest

from modelguard.isolation import _processes


@pytest.fixture
def other() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_a_thread_that_ends_meanwhile_leaves_no_other_on_its_cpu(monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    """All others of its process, and other processes, get their CPUs back."""
    cpus = set(sorted(os.sched_getaffinity(0))[:2])
    if len(cpus) < 2:
        pytest.skip("one CPU")
    with subprocess.Popen(["sleep", "60"]) as second:
        for pid in (other, second.pid):
            os.sched_setaffinity(pid, cpus)
        ended = threading.Thread(target=int)
        ended.start(), ended.join()
        tasks, bound = _processes._tasks, []
        with _processes.on_cpus_of_their_own([other, second.pid]):
            bound = [os.sched_getaffinity(pid) for pid in (other, second.pid)]
            monkeypatch.setattr(_processes, "_tasks", lambda pid: [ended.native_id, *tasks(pid)])
        assert [{cpu} for cpu in sorted(cpus)] == bound
        assert [cpus, cpus] == [os.sched_getaffinity(pid) for pid in (other, second.pid)]
        second.kill()


def test_a_process_that_others_bind_meanwhile_stays_so(other: int) -> None:
    """By ``taskset -p``, say. The others get their CPUs back."""
    cpus = set(sorted(os.sched_getaffinity(0))[:2])
    if len(cpus) < 2:
        pytest.skip("one CPU")
    with subprocess.Popen(["sleep", "60"]) as second:
        for pid in (other, second.pid):
            os.sched_setaffinity(pid, cpus)
        with _processes.on_cpus_of_their_own([other, second.pid]):
            os.sched_setaffinity(other, {max(cpus)})  # while it keeps to the other one
        assert [{max(cpus)}, cpus] == [os.sched_getaffinity(pid) for pid in (other, second.pid)]
        second.kill()
