"""Tries remedies: each in fresh processes with the same inputs, in rounds, against doing nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelguard import _units
from modelguard.diagnosis import _child, _trial_results
from modelguard.diagnosis._candidates import AGAINST, Candidate, Declared, candidates
from modelguard.diagnosis._child import Progress, Said
from modelguard.diagnosis._growth import Cause, Measured
from modelguard.diagnosis._trial_results import SOLVES, Round, Trials
from modelguard.facts.growth import LEAST, judge

__all__ = ["try_remedies"]

_ROUNDS = 3
#: Bytes by which memory is to grow in one run without a remedy: several times what it moves by without any leak, and
#: not so much that it endangers the machine.
_GROWTH, _MOST_GROWTH = 100_000_000, 150_000_000
#: The share of that growth with which runs are most often decided.
_ENOUGH = 0.3
#: How many times the time is likely to decide what long runs have left undecided.
_MORE = 3
#: Calls before the readings begin, as a share of the calls between them.
_WARM = 0.2
#: Of a run: the fewest calls, so that there is a p99, and the shortest and the longest time in seconds.
_FEWEST_CALLS, _SHORTEST, _LONGEST = 48, 1.0, 300.0
#: How many times a run may take as long as the one without a remedy. Processes that start take long for themselves.
_MOST_TIMES, _START = 3.0, 30.0
#: A remedy that leaves more than this share of the growth in its first round is not tried again.
_LOSER = 0.9
#: A model, or a worker, is replaced this often in a run: so many teeth tell whether what is below them grows.
_REPLACED = 4
#: Runs for which the time has to be enough: two rounds of eight.
_RUNS = 16
#: A remedy with which a larger share of the calls fails is none.
_FAILURES = 0.01

_NOTHING = "nothing"

Clock = Callable[[], float]
Follow = Callable[..., Said]


def try_remedies(
    config: Mapping[str, Any],
    causes: Sequence[Cause],
    measured: Measured,
    declared: Declared,
    *,
    seconds: float,
    environ: Mapping[str, str],
    cwd: Path,
    progress: Progress,
    silence: float,
    follow: Follow = _child.follow,
    clock: Clock = time.monotonic,
) -> Trials | None:
    """Try the remedies that may help.

    Args:
        config: The target and its inputs.
        causes: What makes memory grow.
        measured: What was measured.
        declared: What the user says about the function.
        seconds: How long it may take. The first round is finished in any case.
        environ: The variables of the function's process.
        cwd: The folder that it runs in.
        progress: Called with what is being tried.
        silence: Seconds without a word after which a process is ended.
        follow: Runs a program in a process of its own.
        clock: Monotonic seconds.

    Returns:
        The results; None if there is nothing to try, or if the function could not be run again.
    """
    began = clock()
    calls = calls_of_a_run(measured, seconds)
    found, left_out = candidates(causes, measured, declared, environ, max(1, calls // _REPLACED))
    given = {**config, "calls": calls, "warm": int(_WARM * calls), "load": declared.load}

    def run(own: Mapping[str, Any], variables: Mapping[str, str], limit: float | None) -> Said:
        words = _child.command("_tried")
        return follow(words, {**given, **own}, variables, cwd, progress=lambda _: None, silence=silence, limit=limit)

    rounds = _Rounds(run, progress, clock)
    if found:
        rounds.run(Candidate(_NOTHING, "variables", (), environ, {}), found, seconds)
    trials = rounds.results(calls, found, left_out, mends=any(cause.name in AGAINST for cause in causes))
    if trials is None or not any(one.undecided for one in trials.tried):
        return trials
    needed = seconds_needed(measured, calls, max(seconds, clock() - began))
    return dataclasses.replace(trials, needed=_units.format_seconds(needed))


def calls_of_a_run(measured: Measured, seconds: float) -> int:
    """How many calls a run needs to show the growth, and caps on it, within what the time allows."""
    each = max(1e-6, measured.seconds / max(1, measured.calls[-1]))
    growth = max(1.0, measured.per_call)
    wanted = min(max(_GROWTH / growth, _SHORTEST / each), _MOST_GROWTH / growth)
    longest = min(_LONGEST, max(_SHORTEST, seconds / _RUNS - measured.imported))
    return int(max(_FEWEST_CALLS, min(wanted, longest / each)))


def seconds_needed(measured: Measured, calls: int, seconds: float) -> float:
    """The time that trials need so that memory grows by 30 MB in each run; if it has, several times as much.

    Args:
        measured: What was measured.
        calls: Of each run that has been tried.
        seconds: What these took.
    """
    wanted = _ENOUGH * _GROWTH / max(1.0, measured.per_call)
    if calls >= wanted:
        return _MORE * seconds
    each = measured.seconds / max(1, measured.calls[-1])
    return max(_RUNS * (measured.imported + wanted * each), 2 * seconds)


@dataclasses.dataclass
class _Tried:
    """The rounds of one remedy: each with the run without it of the same round."""

    rounds: list[tuple[Round, Round]] = dataclasses.field(default_factory=list)
    stopped: str = ""


class _Rounds:
    """Runs rounds: doing nothing first, then each remedy, in another order each time."""

    def __init__(self, run: Callable[..., Said], progress: Progress, clock: Clock) -> None:
        self._run = run
        self._progress = progress
        self._clock = clock
        self._nothing: list[Round] = []
        self._tried: dict[str, _Tried] = {}
        self._over = self._interrupted = False

    def run(self, nothing: Candidate, found: Sequence[Candidate], seconds: float) -> None:
        """Run all rounds, or as many as the time allows."""
        self._tried = {candidate.name: _Tried() for candidate in found}
        began = self._clock()
        for number in range(_ROUNDS):
            left = [candidate for candidate in found if not self._tried[candidate.name].stopped]
            order = left[number:] + left[:number] if number < len(left) else left
            if not order or self._over or (number and _too_late(self._clock() - began, number, seconds)):
                return
            self._one_round(number, nothing, order)

    def _one_round(self, number: int, nothing: Candidate, order: Sequence[Candidate]) -> None:
        began = self._clock()
        said = self._one(number, nothing, None)
        if said.last("readings") is None:
            self._over = True
            return
        base = _round(said, LEAST)
        if not base.undecided and base.growth * said.lines[-1]["calls"] < LEAST:
            base = base._replace(undecided="memory grows by less than 1 MB in so few calls")
        self._nothing.append(base)
        limit = _MOST_TIMES * (self._clock() - began) + _START
        for candidate in order:
            if not self._over:
                self._add(candidate, self._one(number, candidate, limit), said, base)

    def _one(self, number: int, candidate: Candidate, limit: float | None) -> Said:
        self._progress({"phase": f"round {number + 1} of {_ROUNDS}: {candidate.name}"})
        config: dict[str, Any] = {"act": candidate.act, "options": dict(candidate.options)}
        config["limit"] = _LONGEST * _MOST_TIMES if limit is None else limit
        said = self._run(config, candidate.environ, limit=None if limit is None else limit + _START)
        self._over = self._interrupted = said.end == "interrupted"
        return said

    def _add(self, candidate: Candidate, said: Said, nothing: Said, base: Round) -> None:
        tried = self._tried[candidate.name]
        if said.end == "interrupted":
            return
        tried.stopped = _failure(said, nothing)
        if said.last("readings") is None:
            return
        own = _round(said, max(1.0, SOLVES * base.growth * said.lines[-1]["calls"]))
        if base.undecided:
            own = own._replace(undecided=f"without a remedy, {base.undecided}")
        tried.rounds.append((own, base))
        grows = own.growth > _LOSER * base.growth and not own.undecided
        if not tried.stopped and grows and own.cpu > _LOSER * base.cpu:
            tried.stopped = "it leaves the growth as it is"

    def results(self, calls: int, found: Sequence[Candidate], left_out: Sequence[str], *, mends: bool) -> Trials | None:
        """What came of it; None if there is nothing to say."""
        if not self._nothing:
            return None if not left_out or found else Trials(calls, None, left_out=tuple(left_out))
        nothing = _trial_results.trial(_NOTHING, (), [(each, each) for each in self._nothing])
        failed = [
            f"{candidate.name}: {tried.stopped}"
            for candidate in found
            if not (tried := self._tried[candidate.name]).rounds and tried.stopped
        ]
        made = [
            _trial_results.trial(candidate.name, candidate.lines, tried.rounds, tried.stopped)
            for candidate in found
            if (tried := self._tried[candidate.name]).rounds
        ]
        if self._interrupted:
            failed.append("the other rounds: they were interrupted")
        names = _trial_results.front(nothing, made)
        made = [dataclasses.replace(one, front=one.name in names) for one in made]
        best = _trial_results.recommend(nothing, made)
        return Trials(calls, nothing, tuple(made), best, (*left_out, *failed), contains=not mends)


def _too_late(took: float, number: int, seconds: float) -> bool:
    """Whether another round, which takes as long as those before it, would end too late."""
    return took + took / number > seconds


def _round(said: Said, least: float) -> Round:
    """One run, in which growth by less than so many bytes does not count."""
    last = said.lines[-1]
    calls, private = last["readings"]
    judged = judge(calls, private, least=least)
    growth = max(0.0, judged.growth) / max(1, calls[-1] - calls[0])
    return Round(growth, float(last["cpu"]), float(last["p99"]), int(last["held"]), judged.reason)


def _failure(said: Said, nothing: Said) -> str:
    """Why a run counts as a failure; empty if it does not."""
    last: Mapping[str, Any] = said.lines[-1] if said.lines else {}
    if "error" in last:
        return f"it failed ({last['error']})"
    if said.end == "exited":
        return f"its process ended with status {said.status}"
    if said.end == "silent":
        return "a call did not return"
    if said.end == "late" or not last["whole"]:
        return f"it took more than {_MOST_TIMES:g} times as long"
    more = last["failures"] - nothing.lines[-1]["failures"]
    if more > _FAILURES * last["calls"]:
        return f"{more:,} of {last['calls']:,} calls failed ({', '.join(last['errors'])})"
    return ""
