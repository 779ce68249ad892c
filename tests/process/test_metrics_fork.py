"""Metrics and forks: a child is never left with a lock that a thread of its parent held."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from modelguard import telemetry
from modelguard.telemetry._metrics import Metric, Recorder

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
]


def test_a_fork_waits_for_a_metric_that_is_being_written() -> None:
    """The child finds every lock of the metrics' library free, and records; the parent's thread goes on."""
    library = threading.Lock()  # as prometheus_client has one for all values of a process
    inside, go_on = threading.Event(), threading.Event()
    told: list[str] = []

    def record(metric: Metric, labels: tuple[str, ...], amount: float) -> None:
        with library:
            if labels == ("slow",):
                inside.set()
                go_on.wait(30)
            told.append(labels[0])

    recorder = Recorder(record)
    thread = threading.Thread(target=recorder, args=(telemetry.CircuitClosed(guard="slow"),))
    thread.start()
    assert inside.wait(30)
    timer = threading.Timer(0.3, go_on.set)
    timer.start()
    child = os.fork()
    if not child:
        signal.alarm(20)  # a child that waits for ever dies of it
        recorder(telemetry.CircuitClosed(guard="child"))
        os._exit(0 if {"slow", "child"} == set(told) else 1)
    thread.join(30)
    timer.join(30)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert {"slow"} == set(told)
