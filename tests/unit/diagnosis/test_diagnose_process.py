"""A running process is watched from outside and from inside, and judged."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest

from modelguard.diagnosis import GrowthReport, diagnose_process
from modelguard.diagnosis._attach import Inside
from modelguard.diagnosis._diagnose_process import Watched
from modelguard.errors import InvalidOption, NotSupported

MB = 10**6


class Process:
    """Answers as a process would whose guard has 100 calls between two questions."""

    pid = os.getpid()

    def __init__(self, *, calls: int = 100, guards: bool = True) -> None:
        self.calls = calls
        self.guards = guards
        self.asked = 0
        self.threads = 1

    def ask(self, question: str) -> dict[str, Any]:
        if question == "uses":
            self.asked += 1
            return {"uses": [["nlp", 1, self.calls * self.asked]] if self.guards else []}
        if question == "look":
            self.threads += 400
            return {"census": {"threads": self.threads}, "types": {}, "libraries": ["torch"]}
        return {}


def watched(process: Process, growth: int, sleep: Callable[[int], None] = lambda _: None) -> GrowthReport:
    """The report on a process that grows by so much between two looks."""
    now, private = [0.0], [100 * MB]

    def wait(seconds: float) -> None:
        now[0] += seconds
        private[0] += growth
        sleep(int(now[0]))

    watching = Watched(cast("Inside", process), lambda: now[0], wait, lambda _: None, private=lambda _: private[0])
    return watching.report("process 7", 24.0)


def test_growth_with_the_calls_of_its_guards() -> None:
    """The cause is what the two looks inside have counted."""
    report = watched(Process(), MB)
    assert ("grows", "threads") == (report.verdict, report.causes[0].name)
    assert ((0, 2400), "calls") == ((report.measured.calls[0], report.measured.calls[-1]), report.measured.per)
    assert "400 more threads after 2,400 calls" == report.causes[0].seen


def test_without_guards_time_is_counted() -> None:
    """Its calls are not known."""
    report = watched(Process(guards=False), MB)
    assert ("grows", "milliseconds", 24_000) == (report.verdict, report.measured.per, report.measured.calls[-1])


def test_without_requests_nothing_is_decided() -> None:
    """The report says what it needs."""
    report = watched(Process(calls=0), MB)
    assert "undecided" == report.verdict
    assert any("send it requests" in sentence for sentence in report.unknown)


def test_steady() -> None:
    """No cause is named."""
    report = watched(Process(), 0)
    assert ("steady", ()) == (report.verdict, report.causes)


@pytest.mark.parametrize(("at", "verdict"), [(3, "undecided"), (15, "grows")])
def test_ctrl_c_keeps_what_there_is(at: int, verdict: str) -> None:
    """What was read until then is judged."""

    def interrupted(now: int) -> None:
        if now >= at:
            raise KeyboardInterrupt

    report = watched(Process(), MB, interrupted)
    assert verdict == report.verdict
    assert "it was interrupted" in report.unknown


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there it is supported")
def test_an_older_python() -> None:
    """The error names the version that it needs."""
    with pytest.raises(NotSupported, match=r"requires Python 3\.14"):
        diagnose_process(os.getpid())


@pytest.mark.parametrize("options", [{"pid": "gunicorn"}, {"pid": -1}, {"pid": 1, "seconds": 0.5}])
def test_bad_input(options: dict[str, Any]) -> None:
    """The error comes before anything is touched."""
    with pytest.raises(InvalidOption):
        diagnose_process(**options)
