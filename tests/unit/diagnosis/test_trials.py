"""Remedies are tried in rounds against doing nothing, losers are stopped, and the cheapest that solves it is named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from modelguard.diagnosis import _growth_page
from modelguard.diagnosis._diagnose import calls_of_a_run, candidates, seconds_needed, try_remedies
from modelguard.diagnosis._growth_causes import (
    Cause,
    CauseName,
    GrowthReport,
    Measured,
    Round,
    Trial,
    Trials,
    front,
    recommend,
    trial,
)
from modelguard.diagnosis._target import End, Said, settled_workers
from modelguard.isolation.status import IsolationStatus, WorkerStatus

MB = 10**6
DECLARED: Mapping[str, Any] = {"load": None, "bucketed": []}
NOTHING = Round(growth=1e5, cpu=1e-3, p99=1e-3, held=500 * MB)


def cause(name: CauseName) -> Cause:
    return Cause(name, 1.0, "seen", "fix")


def measured(**fields: Any) -> Measured:
    """100 kB per call, in 1,000 calls of a millisecond."""
    return Measured(calls=(0, 1000), private=(0, 100 * MB), seconds=1.0, **fields)


def tried(name: str, growth: float, cpu: float = 1.0, p99: float = 1.0, stopped: str = "") -> Trial:
    own = Round(NOTHING.growth * growth, NOTHING.cpu * cpu, NOTHING.p99 * p99, 100 * MB)
    return trial(name, [f"use {name}"], [(own, NOTHING)], stopped)


class Machine:
    """Runs programs that only say figures, by what is done to the function; a run takes ten seconds."""

    def __init__(self, **figures: Mapping[str, Any]) -> None:
        self.figures = figures
        self.acts: list[str] = []
        self.now = 0.0
        self.interrupt_at = 10**6
        self.interrupt_before = 10**6

    def follow(self, config: Mapping[str, Any], *_: object, **__: object) -> Said:
        self.now += 10
        self.acts.append(config["act"])
        if len(self.acts) > self.interrupt_at:
            return Said((), "interrupted")
        plain = {
            "growth": 1e5,
            "cpu": 1e-3,
            "p99": 1e-3,
            "held": 5 * MB,
            "failures": 0,
            "errors": [],
            "whole": True,
        }
        line = {**plain, "calls": config["calls"], "done": True, **self.figures.get(config["act"], {})}
        if (growth := line.pop("growth")) is not None:
            at = [round(share * config["calls"] / 24) for share in range(25)]
            line.setdefault("readings", [at, [5 * MB + growth * calls for calls in at]])
        end: End = line.pop("end", "done")
        return Said(({"phase": "try"},) if end != "done" else (line,), end, 3)

    def run(self, causes: Sequence[CauseName], seconds: float = 1000, **fields: Any) -> Trials | None:
        return try_remedies(
            {"target": "app:f", **DECLARED},
            [cause(name) for name in causes],
            measured(**fields),
            seconds=seconds,
            environ={"LD_PRELOAD": "x.so"},
            progress=self._progress,
            follow=self.follow,
            clock=lambda: self.now,
        )

    def _progress(self, _phase: object) -> None:
        if len(self.acts) >= self.interrupt_before:
            raise KeyboardInterrupt


def test_rounds_are_interleaved_and_losers_are_stopped() -> None:
    """Doing nothing comes first in each round, the order of the others rotates, and a loser has one round."""
    machine = Machine(zones={"growth": 1e3}, isolate={"growth": 2e3, "cpu": 2e-3})
    trials = machine.run(["spacy strings"], zones=True, guarded=True, importable=True)
    assert trials is not None
    first = ["variables", "zones", "reload", "isolate"]
    assert [*first, "variables", "isolate", "zones", "variables", "zones", "isolate"] == machine.acts
    assert {"zoned": 3, "reload_on": 1, "isolate": 3} == {one.name: one.rounds for one in trials.tried}
    assert ("zoned", "it leaves the growth as it is") == (trials.recommended, trials.tried[1].stopped)


def test_the_time_is_kept() -> None:
    """A round that would end too late is not begun."""
    machine = Machine(zones={"growth": 1e3}, isolate={"growth": 1e3})
    assert machine.run(["spacy strings"], seconds=79, zones=True, importable=True) is not None
    assert 6 == len(machine.acts)


def test_ctrl_c_keeps_what_there_is() -> None:
    """The rounds that were finished are reported."""
    machine = Machine(zones={"growth": 1e3})
    machine.interrupt_at = 2
    trials = machine.run(["spacy strings"], zones=True, importable=True)
    assert trials is not None
    assert (["zoned"], 3) == ([one.name for one in trials.tried], len(machine.acts))
    assert "the other rounds: they were interrupted" in trials.left_out


def test_ctrl_c_between_two_runs_keeps_what_they_have_shown() -> None:
    """The report has what was tried, as after a Ctrl-C in the middle of a run."""
    machine = Machine(zones={"growth": 1e3})
    machine.interrupt_before = 2
    trials = machine.run(["spacy strings"], zones=True, importable=True)
    assert trials is not None
    assert ["zoned"] == [one.name for one in trials.tried]
    assert "the other rounds: they were interrupted" in trials.left_out


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"error": "TypeError", "growth": None}, "it failed (TypeError)"),
        ({"end": "exited"}, "its process ended: exit status 3"),
        ({"end": "silent"}, "a call did not return"),
        ({"end": "late"}, "it took more than 3 times as long"),
        ({"whole": False}, "it took more than 3 times as long"),
        ({"failures": 99, "errors": ["KeyError"]}, "99 of 1,000 calls failed (KeyError)"),
    ],
)
def test_a_remedy_that_fails(figures: Mapping[str, Any], says: str) -> None:
    """It is not recommended, and the report says why."""
    trials = Machine(isolate=figures).run(["tasks"], importable=True)
    assert trials is not None
    assert "" == trials.recommended
    assert says in "\n".join(_growth_page.as_text(GrowthReport("app:f", "grows", trials=trials)))


def test_memory_is_read_when_the_spare_worker_is_there() -> None:
    """A fresh worker alone has less than the two that there are most of the time: the next reading would have grown."""
    worn, fresh = (WorkerStatus(pid=pid, state="idle", worn=pid == 1, calls=0, age=0.0) for pid in (1, 2))
    starting, spare = (WorkerStatus(pid=3, state=state, worn=False, calls=0, age=0.0) for state in ("starting", "idle"))
    looks = iter([(worn,), (fresh,), (fresh, starting), (fresh, spare), (fresh, spare)])

    class Function:
        def status(self) -> IsolationStatus:
            return IsolationStatus(name="f", state="ready", workers=next(looks))

    assert [2, 3] == settled_workers([Function()], math.inf, lambda _: None)


def test_teeth_of_replaced_processes_are_no_growth() -> None:
    """Four teeth on a floor that stays: what is left of the growth is nothing, however steep they are."""
    teeth = [list(range(0, 1000, 40)), [50 * MB + 100_000 * (calls % 250) for calls in range(0, 1000, 40)]]
    trials = Machine(isolate={"readings": teeth}).run(["tasks"], importable=True)
    assert trials is not None
    assert ("isolate", "", 0) == (trials.recommended, trials.tried[0].undecided, trials.tried[0].growth.median)


def test_too_short_a_trial_is_undecided() -> None:
    """It is neither stopped nor recommended, and the report says why, and which time is likely to be enough."""
    peak = [list(range(0, 1000, 40)), [*[50 * MB] * 4, *(50 * MB + 100_000 * calls for calls in range(0, 840, 40))]]
    peak[1][14:] = [size - 40 * MB for size in peak[1][14:]]  # one worker has been replaced, as it were
    machine = Machine(isolate={"readings": peak})
    trials = machine.run(["tasks"], importable=True, seconds=30)
    assert trials is not None
    assert ("", "", "1m30s") == (trials.recommended, trials.tried[0].stopped, trials.needed)
    text = "\n".join(_growth_page.as_text(GrowthReport("app:f", "grows", trials=trials)))
    assert "Undecided, as the runs were too short: isolate. --try 1m30s is likely to be enough." in text
    assert "Undecided: isolate, because memory rises and falls too slowly" in text
    assert "Undecided: isolate, because memory rises and falls" in _growth_page.as_html(
        GrowthReport("app:f", "grows", trials=trials)
    )


def test_without_growth_nothing_is_decided() -> None:
    """Where the function itself has not grown by enough in so few calls, no remedy is judged by that."""
    trials = Machine(variables={"growth": 1.0}).run(["tasks"], importable=True)
    assert trials is not None
    assert "without a remedy, memory grows by less than 1 MB in so few calls" == trials.tried[0].undecided


def test_a_function_that_cannot_be_run_again() -> None:
    """Nothing is reported."""
    assert Machine(variables={"error": "OSError", "growth": None}).run(["tasks"], importable=True) is None


def test_what_cannot_be_tried_is_said() -> None:
    """Each with what would make it possible."""
    found, left_out = candidates([cause("onednn plans")], measured(), DECLARED, {"LD_PRELOAD": "x.so"}, 5)
    assert ["torch-cpu-dynamic"] == [one.name for one in found]
    assert {"allocators", "bucketed", "isolate"} == {line.partition(":")[0] for line in left_out}
    found, _ = candidates([cause("tasks")], measured(), {**DECLARED, "load": "app:load"}, {}, 5)
    assert ["reload_on"] == [one.name for one in found]
    assert "guard(load, reload_on=Uses(5))" in found[0].lines


def test_the_cheapest_that_solves_it_is_recommended() -> None:
    """A fifth of the growth may stay. Of two whose figures differ by less than noise, the simpler one is."""
    base = tried("nothing", 1.0)
    assert "b" == recommend(base, [tried("a", 0.01, 1.5), tried("b", 0.15, 1.0), tried("c", 0.5, 0.9)])
    assert "a" == recommend(base, [tried("a", 0.02, 1.01), tried("b", 0.01, 1.0)])
    assert "c" == recommend(base, [tried("c", 0.5, 0.9), tried("d", 0.6)])
    assert "" == recommend(base, [tried("a", 0.9)])
    assert "" == recommend(base, [tried("a", 0.01, stopped="it failed")])


def test_the_front() -> None:
    """What another one beats in one figure, and matches in the others, is not on it."""
    assert {"a", "b"} == front(
        tried("nothing", 1.0), [tried("a", 0.1, 2.0), tried("b", 0.5, 1.0), tried("c", 0.5, 1.1)]
    )


def test_what_was_stopped_is_no_remedy() -> None:
    """It has no star, however small its figures are, and takes none from another."""
    base, other = tried("nothing", 1.0), tried("b", 0.5, 2.0)
    assert {"b"} == front(base, [tried("a", 0.01, 0.5, stopped="its calls fail"), other])
    assert "b" == recommend(base, [tried("a", 0.01, 0.5, stopped="its calls fail"), other])


def test_calls_of_a_run() -> None:
    """Enough for 100 MB, at most for 150 MB, and at least 48."""
    assert 1000 == calls_of_a_run(measured(), 1000)
    slow = Measured(calls=(0, 100), private=(0, 1 * MB), seconds=100.0)
    assert 48 == calls_of_a_run(slow, 60)


def test_runs_that_are_too_short_say_how_long_they_need() -> None:
    """The time with which memory grows by 30 MB in each run, and several times as much if it has."""
    assert pytest.approx(4.8) == seconds_needed(measured(), 100, 1.0)
    assert 300 == seconds_needed(measured(), 1000, 100.0)


REPORT = GrowthReport(
    "app:f",
    "grows",
    (cause("retention"),),
    trials=Trials(
        300,
        tried("nothing", 1.0),
        (tried("jemalloc", 0.01, 0.5), tried("<low>", 0.95, 1.1, stopped="it leaves the growth as it is")),
        "jemalloc",
        ("reload: no guard",),
    ),
)


def test_the_table() -> None:
    """Each remedy with its figures, the recommended one with its lines, and what was not tried."""
    text = "\n".join(_growth_page.as_text(REPORT))
    assert (
        "Recommended: jemalloc, with which 1.00 MB per 1,000 calls are left, at 0.50x the CPU time.\n  use jem" in text
    )
    assert "Not tried: reload: no guard" in text
    page = _growth_page.as_html(REPORT)
    assert "&lt;low&gt;" in page
    assert '<tr class="best"><td data-of="remedy">jemalloc</td>' in page
    assert "Stopped: &lt;low&gt;, because it leaves the growth as it is" in page
    assert REPORT.as_dict()["trials"]["tried"][0]["growth"] == (1000.0 * 1e3, 1000.0 * 1e3, 1000.0 * 1e3)
