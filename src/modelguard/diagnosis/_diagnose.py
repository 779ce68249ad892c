"""Drives a function in a fresh process until its growth is decided, names the causes, and tries remedies."""

import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from modelguard import _units
from modelguard.diagnosis import _growth_causes
from modelguard.diagnosis._counts import Growing
from modelguard.diagnosis._growth_causes import Cause, CauseName, GrowthReport, Measured, Round, Trials
from modelguard.diagnosis._target import Progress, Said, command, follow
from modelguard.environment import _allocator, _allocator_files, _launcher, _presets
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported
from modelguard.facts import _redact
from modelguard.facts._growth_judge import FEWEST, LEAST, Judgement, judge
from modelguard.facts._holders import Held
from modelguard.runtime.child_processes import describe_exit

#: Seconds that a function is driven and tested, unless told otherwise.
SECONDS = 30.0

#: Seconds that an import and a call may take at most, and how many times as long as all calls are to take.
_SILENCE, _MOST_TIMES = 120.0, 3

_NAME = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
#: Fewer calls decide nothing: there are 24 readings.
_FEWEST_CALLS = 48
_DAY = 86_400
#: Calls of a stack that are shown.
_FRAMES = 4


def _check_name(option: str, name: str) -> None:
    _units.instance(name, option, str, "text", fix="Write for example app:predict.")
    file, _, function = name.partition(".py:")
    if function:
        path = Path(file)
        module = path.name if path.is_absolute() else ".".join(path.parts).lstrip(".")
        fix = f"Write {module}:{function}."
        raise InvalidOption(option, name, why="names a file, and must be module:function", fix=fix)
    if not _NAME.fullmatch(name):
        raise InvalidOption(option, name, why="must be module:function", fix="Write for example app:predict.")


def diagnose(
    target: str,
    *,
    inputs: str | None = None,
    generate: str | None = None,
    seconds: _units.Duration = SECONDS,
    calls: int | None = None,
    trial_seconds: _units.Duration = 0.0,
    bucketed: Sequence[str] = (),
    load: str | None = None,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    progress: Progress = lambda _: None,
    silence: float = _SILENCE,
) -> GrowthReport:
    """Drive a function, decide whether memory grows with its calls, attribute the growth, and try remedies.

    Args:
        target: The function as ``"module:function"``; sync, async, guarded or batched.
        inputs: A file with one input in JSON per line: a list is positional arguments, an object arguments by name,
            anything else the one argument. Inputs are repeated in turn.
        generate: A function without arguments as ``"module:function"`` that yields inputs without end.
        seconds: How long to drive and test it.
        calls: How many times to call it, instead of ``seconds``, which is then a third of the longest time. The result
            does not depend on how busy the machine is.
        trial_seconds: How long to try remedies if it grows; 0 to try none. The first round is finished in any case.
        bucketed: Names of parameters whose tensors may be padded, which is then tried as a remedy.
        load: A function that makes a model, as ``"module:function"``. ``target`` takes the model as its first argument,
            from a guard, and reloads can be tried.
        environ: The variables of the process.
        cwd: The folder in which the module is looked for. Default: the current one.
        progress: Called with each line that the process says.
        silence: Seconds after which an import or a call that does not return ends the diagnosis; a call at the latest
            after three times ``seconds``.

    Raises:
        InvalidOption: A name, a file, a number or a time is not valid, or the function cannot be imported or called.
        NotSupported: There is no ``/proc``.
    """
    for option, name in (("MODULE:FUNCTION", target), ("--generate", generate), ("--load", load)):
        if name is not None:
            _check_name(option, name)
    if inputs is not None and generate is not None:
        raise InvalidOption("--inputs", inputs, why="must be given alone", fix="Remove --generate.")
    if isinstance(bucketed, str):
        raise InvalidOption("bucketed", bucketed, why="is text and no list of names", fix=f"Write [{bucketed!r}].")
    seconds = within_a_day(seconds, "--time", least=1, example="30s")
    trial_seconds = within_a_day(trial_seconds, "--try", least=0, example="2m")
    if calls is not None:
        _units.whole_number(calls, "--calls", at_least=_FEWEST_CALLS)
    if not Path("/proc/self/smaps").exists():
        raise NotSupported("modelguard diagnose", reason="there is no /proc")
    given = read_inputs(inputs)
    config: dict[str, Any] = {"target": target, "generate": generate, "inputs": given, "load": load}
    config |= {"bucketed": list(bucketed), "patience": silence}
    run = partial(follow, environ=environ, cwd=cwd or Path.cwd())
    patience = min(silence, _MOST_TIMES * seconds)
    drive = {**config, "seconds": seconds, "calls": calls, "patience": patience, "loading": silence}
    said = run(drive, progress=progress, silence=2 * silence)
    report = _report(target, said, _Asked(seconds, calls, patience, inputs, generate), environ)
    measured = dataclasses.replace(report.measured, inputs=len(given or ()))
    report = dataclasses.replace(report, measured=measured)
    if measured.judged.verdict != "grows" or not trial_seconds or said.end == "interrupted":
        return report
    run = partial(run, progress=lambda _: None, silence=silence)
    trials = try_remedies(
        config, report.causes, measured, seconds=trial_seconds, environ=environ, progress=progress, follow=run
    )
    return dataclasses.replace(report, trials=trials)


def within_a_day(given: _units.Duration, option: str, *, least: int, example: str) -> float:
    seconds = _units.seconds(given, option, zero=True)
    if not least <= seconds <= _DAY:
        why = f"must be between {least} s and 1 day"
        raise InvalidOption(option, given, why=why, fix=f"Write {option} {example}.")
    return seconds


def read_inputs(file: str | None) -> list[Any] | None:
    if file is None:
        return None
    found, number, why = [], 0, "must not be empty"
    try:
        for number, line in enumerate(Path(file).read_text(encoding="utf-8").split("\n"), start=1):  # noqa: B007
            if line.strip():
                found.append(json.loads(line))
    except (OSError, UnicodeDecodeError, TypeError) as error:
        why = f"cannot be read ({type(error).__name__})"
    except ValueError:
        why = f"line {number} is not JSON"
    else:
        if found:
            return found
    fix = 'Write one input in JSON per line, such as ["a text"] or {"text": "a text"}.'
    raise InvalidOption("--inputs", file, why=why, fix=fix)


class _Asked(NamedTuple):
    seconds: float
    calls: int | None
    patience: float
    inputs: str | None
    generate: str | None

    def longer(self, factor: float) -> str:
        if self.calls is not None:
            return f"--calls {math.ceil(factor * self.calls)}"
        return f"--time {_units.format_seconds(math.ceil(factor * self.seconds))}"


def _report(target: str, said: Said, asked: _Asked, environ: Mapping[str, str]) -> GrowthReport:
    _require_driven(target, said, environ)
    measured = _measured(said)
    judged, verdict = measured.judged, measured.judged.verdict
    unknown = [*_ended(said, asked), *_growth_causes.notes_on(judged)]
    none_succeeded = bool(measured.failures) and measured.failures == measured.calls[-1] and verdict != "grows"
    if verdict == "steady" and (none_succeeded or said.end != "done"):
        verdict = "undecided"  # it may have ended because of what it keeps, and in fewer calls less is seen
    if verdict == "undecided" and not measured.growing and not none_succeeded:
        reason = judged.reason or "until then no growth could be told"
        unknown.append(f"{reason}; it needs {_needed(said, judged, len(measured.private), asked)}")
    if measured.failures:
        errors = ", ".join(measured.errors)
        unknown.append(f"{measured.failures:,} of {measured.calls[-1]:,} calls failed ({errors})")
        unknown.append(_to_see(target, measured, asked))
    if none_succeeded:
        unknown.append("no call succeeded, so nothing is known about those that do")
    causes, rest = _growth_causes.attribute(measured) if verdict == "grows" else ((), 0.0)
    return GrowthReport(target, "grows" if measured.growing else verdict, causes, rest, measured, tuple(unknown))


def _require_driven(target: str, said: Said, environ: Mapping[str, str]) -> None:
    imported = any(line.get("phase") == "warm-up" for line in said.lines)
    if (error := said.last("error")) is not None:
        message = _redact.redact(said.last("message"), environ)
        why = error + (f": {message}" if message else "")
    elif imported or said.end in ("done", "interrupted"):
        return
    elif said.end == "silent":
        why = f"its import has not returned for {said.seconds:.0f} seconds{_where(said)}"
    else:
        why = f"its process ended while it was imported: {describe_exit(said.status or 0)}"
    name = "Check the name and the inputs, and that python -c 'import MODULE' works in this folder."
    fix = "Check --inputs or --generate." if imported else name
    raise InvalidOption("MODULE:FUNCTION", target, why=f"could not be driven: {why}", fix=fix)


def _where(said: Said) -> str:
    """Where a process stood, as the end of a sentence: the innermost calls."""
    return f"; it stands in {', called from '.join(said.stack[:_FRAMES])}" if said.stack else ""


def _to_see(target: str, measured: Measured, asked: _Asked) -> str:
    """How to see the message of an error. It may hold personal data, so no report has it."""
    module, _, name = target.partition(":")
    given = "with no argument"
    if asked.inputs or asked.generate:
        given = f"with input {measured.failed:,} of {asked.inputs or asked.generate}"
    return (
        f"messages may hold personal data and are not shown: to see one, call {name} {given} yourself, as in "
        f"python -c 'import {module}; {module}.{name}(...)'"
    )


def _measured(said: Said) -> Measured:
    """What was measured, or what readings there are if the process has not come to its end."""
    found: dict[str, Any] | None = said.last("measured")
    if found is None:
        drive = [line for line in said.lines if line.get("phase") == "drive"]
        found = {name: [line[name] for line in drive] for name in ("calls", "private")}
        found["judged_from"] = drive[-1]["judged_from"] if drive else 0
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    fields["growing"] = tuple(Growing(**each) for each in fields.get("growing", ()))
    fields["held"] = tuple(Held(**each) for each in fields.get("held", ()))
    return Measured(**fields)


def _ended(said: Said, asked: _Asked) -> list[str]:
    how = {
        "silent": f"a call has not returned for {asked.patience:g} seconds, and was ended",
        "exited": f"the process ended before the diagnosis did: {describe_exit(said.status or 0)}",
        "interrupted": f"it was interrupted after {said.seconds:.0f} seconds",
    }
    return [f"{how[said.end]}{_where(said)}"] if said.end in how else []


def _needed(said: Said, judged: Judgement, count: int, asked: _Asked) -> str:
    if said.end == "silent":
        longer = _units.format_seconds(math.ceil(2 * asked.patience))
        return f"calls that return; if they are only slow, {longer} or more for --time"
    if said.end == "exited":
        return "calls that return"
    if said.end == "interrupted":
        return f"more time than the {said.seconds:.0f} seconds that it had"
    if count < FEWEST:
        asked = asked._replace(calls=None)  # readings take time, however many calls they have
    return asked.longer(judged.more)


# The remedies that may help against a cause, each tried in fresh processes with the same inputs, in rounds.

#: What is changed: variables alone, by a preset or by the allocator; freed memory is returned; spaCy's memory zones;
#: inputs are padded; the model is reloaded; the function runs in worker processes that are replaced.
Kind = Literal["low-memory", "torch-cpu-dynamic", "allocators", "trim", "zones", "bucketed", "reload", "isolate"]

#: Which remedies can help against which cause, the simplest first. All others are mended in the program, and only
#: contained by fresh models and processes.
AGAINST: dict[CauseName, tuple[Kind, ...]] = {
    "retention": ("low-memory", "allocators", "trim", "isolate"),
    "onednn plans": ("torch-cpu-dynamic", "allocators", "bucketed", "isolate"),
    "spacy strings": ("zones", "reload", "isolate"),
    "native memory": ("low-memory", "allocators", "trim", "reload", "isolate"),
    "arrow pool": ("allocators", "trim", "isolate"),
}
_ALWAYS: tuple[Kind, ...] = ("reload", "isolate")

#: Remedies against causes with a smaller share are not tried, unless no cause has a larger one.
_MAIN = 0.3

#: Growth after which freed memory is returned: small enough to happen several times in a trial.
_TRIM = "10 MB"


@dataclass(slots=True)
class Candidate:
    """A remedy to try, with its runs, each beside the run without it of the same round, and why no more are run."""

    name: str
    act: str
    lines: tuple[str, ...] = ()
    environ: Mapping[str, str] | None = None
    rounds: list[tuple[Round, Round]] = dataclasses.field(default_factory=list)
    stopped: str = ""

    def add(self, said: Said, nothing: Said, base: Round) -> None:
        self.stopped = _failure(said, nothing)
        if said.last("readings") is None:
            return
        own = _round(said, max(1.0, _growth_causes.SOLVES * base.growth * said.lines[-1]["calls"]))
        if base.undecided:
            own = own._replace(undecided=f"without a remedy, {base.undecided}")
        self.rounds.append((own, base))
        grows = own.growth > _LOSER * base.growth and not own.undecided
        if not self.stopped and grows and own.cpu > _LOSER * base.cpu:
            self.stopped = "it leaves the growth as it is"

    def trial(self) -> _growth_causes.Trial:
        return _growth_causes.trial(self.name, self.lines, self.rounds, self.stopped)


def candidates(
    causes: Sequence[Cause], measured: Measured, config: Mapping[str, Any], environ: Mapping[str, str], uses: int
) -> tuple[list[Candidate], list[str]]:
    """The remedies to try, and those that cannot be tried, with the reason."""
    guarded, replaced = measured.guarded or config["load"], f"guard(load, reload_on=Uses({uses:_}))"
    no_guard = "the function has no guard; --load MODULE:FUNCTION names what makes its model, which it takes first"
    no_zones = "" if measured.zones else "no spaCy pipeline with memory zones was found"
    zoned = "from modelguard.adapters.spacy import IndexGrowth, zoned"
    in_zones = (zoned, '@zoned(guard(load, reload_on=IndexGrowth("16 MB")))')
    padded = ", ".join(f'"{name}"' for name in config["bucketed"])
    no_padding = "" if padded else "--bucketed NAME declares a parameter that may be padded"
    buckets = ("from modelguard.adapters.torch import bucketed", f"@bucketed({padded}, cut=None)")
    no_import = "" if measured.importable else "a worker process cannot import the function by its name"
    isolated: tuple[str, ...] = ("@isolate()  # above the guard's decorator", replaced)
    isolated = isolated if guarded else (f"@isolate(recycle_on=Uses({uses:_}))",)
    # Each with what it lacks, if that is not there, and what to write.
    in_process: dict[Kind, tuple[str, str, tuple[str, ...]]] = {
        "trim": ("trim_every", "", ("from modelguard import memory", f'memory.trim_every("{_TRIM}")')),
        "zones": ("zoned", no_zones, in_zones),
        "bucketed": ("bucketed", no_padding, buckets),
        "reload": ("reload_on", "" if guarded else no_guard, ("from modelguard import Uses, guard", replaced)),
        "isolate": ("isolate", no_import, ("from modelguard import Uses, isolate", *isolated)),
    }
    main = [cause for cause in causes if cause.share >= _MAIN] or causes[:1]
    found: list[Candidate] = []
    left_out = []
    kinds: dict[Kind, None] = dict.fromkeys(kind for cause in main for kind in AGAINST.get(cause.name, _ALWAYS))
    for kind in kinds:
        name, missing, lines = in_process.get(kind, ("", "", ()))
        if kind == "allocators" and "LD_PRELOAD" in environ:
            missing = "LD_PRELOAD is set"
        if missing:
            left_out.append(f"{kind}: {missing}")
        else:
            found += [Candidate(name, kind, lines)] if name else _variables(kind, environ)
    return found, left_out


def _variables(kind: Kind, environ: Mapping[str, str]) -> Iterator[Candidate]:
    """Remedies that are nothing but variables; none where the environment has them already."""
    allocators: list[Any] = []
    if _allocator.detect().how != "preloaded" and "LD_PRELOAD" not in environ:
        allocators = list(dict.fromkeys(file.kind for file in _allocator_files.find(None, environ=os.environ)))
    preset = None if kind == "allocators" else _presets.get(kind)
    if preset is not None:  # caps bound what oneDNN holds, and glibc keeps the holes between
        allocators = ["none", *(allocators[:1] if kind == "torch-cpu-dynamic" else [])]
    for allocator in allocators:
        options = [] if preset is None else ["--preset", kind]
        options += [] if allocator == "none" else ["--allocator", allocator]
        with suppress(ModelGuardError):
            plan = _launcher.plan(command(), preset=preset, allocator=allocator, environ=dict(environ))
            if plan.added:
                line = f"modelguard run {' '.join(options)} -- COMMAND"
                yield Candidate(" + ".join(options[1::2]), "variables", (line,), environ=plan.environ)


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
_FEWEST_IN_RUN, _SHORTEST, _LONGEST = 48, 1.0, 300.0
#: How many times a run may take as long as the one without a remedy. Processes that start take long for themselves.
_MOST_SLOWER, _START = 3.0, 30.0
#: A remedy that leaves more than this share of the growth in its first round is not tried again.
_LOSER = 0.9
#: A model, or a worker, is replaced this often in a run: so many teeth tell whether what is below them grows.
_REPLACED = 4
#: Runs for which the time has to be enough: two rounds of eight.
_RUNS = 16
#: A remedy with which a larger share of the calls fails is none.
_FAILURES = 0.01


def try_remedies(
    config: Mapping[str, Any],
    causes: Sequence[Cause],
    measured: Measured,
    *,
    seconds: float,
    environ: Mapping[str, str],
    progress: Progress,
    follow: Callable[..., Said],
    clock: Callable[[], float] = time.monotonic,
) -> Trials | None:
    began, calls = clock(), calls_of_a_run(measured, seconds)
    uses = max(1, calls // _REPLACED)
    found, left_out = candidates(causes, measured, config, environ, uses)
    given = {**config, "calls": calls, "warm": int(_WARM * calls), "uses": uses, "trim_every": _TRIM}
    nothing, interrupted = Candidate("nothing", "variables"), list[str]()

    def run(number: int, candidate: Candidate, limit: float | None = None) -> Said:
        progress({"phase": f"round {number + 1} of {_ROUNDS}: {candidate.name}"})
        asked = {**given, "act": candidate.act, "limit": limit or _LONGEST * _MOST_SLOWER}
        variables = environ if candidate.environ is None else candidate.environ
        said = follow(asked, environ=variables, limit=limit + _START if limit else math.inf)
        if said.end == "interrupted":
            raise KeyboardInterrupt
        return said

    try:
        for number in range(_ROUNDS):
            left = [candidate for candidate in found if not candidate.stopped]
            order = left[number:] + left[:number] if number < len(left) else left  # another one each time
            late = number and (clock() - began) * (1 + 1 / number) > seconds
            if not order or late or not _one_round(partial(run, number), nothing, order, clock):
                break
    except KeyboardInterrupt:
        interrupted.append("the other rounds: they were interrupted")
    if not nothing.rounds:
        return None if not left_out or found else Trials(calls, None, left_out=tuple(left_out))
    base, tried = nothing.trial(), [candidate.trial() for candidate in found if candidate.rounds]
    front, best = _growth_causes.front(base, tried), _growth_causes.recommend(base, tried)
    tried = [dataclasses.replace(one, front=one.name in front) for one in tried]
    left_out += [*(f"{one.name}: {one.stopped}" for one in found if one.stopped and not one.rounds), *interrupted]
    needed = ""
    if any(one.undecided for one in tried):
        needed = _units.format_seconds(seconds_needed(measured, calls, max(seconds, clock() - began)))
    contains = not any(cause.name in AGAINST for cause in causes)
    return Trials(calls, base, tuple(tried), best, tuple(left_out), needed, contains)


def _one_round(
    run: Callable[..., Said], nothing: Candidate, order: Sequence[Candidate], clock: Callable[[], float]
) -> bool:
    """Run the function as it is, then with each remedy; returns whether it could be run as it is."""
    began = clock()
    said = run(nothing)
    if said.last("readings") is None:
        return False
    base = _round(said, LEAST)
    if not base.undecided and base.growth * said.lines[-1]["calls"] < LEAST:
        base = base._replace(undecided="memory grows by less than 1 MB in so few calls")
    nothing.rounds.append((base, base))
    limit = _MOST_SLOWER * (clock() - began) + _START
    for candidate in order:
        candidate.add(run(candidate, limit), said, base)
    return True


def calls_of_a_run(measured: Measured, seconds: float) -> int:
    each = max(1e-6, measured.seconds / max(1, measured.calls[-1]))
    growth = max(1.0, measured.per_call)
    wanted = min(max(_GROWTH / growth, _SHORTEST / each), _MOST_GROWTH / growth)
    longest = min(_LONGEST, max(_SHORTEST, seconds / _RUNS - measured.imported))
    return int(max(_FEWEST_IN_RUN, min(wanted, longest / each)))


def seconds_needed(measured: Measured, calls: int, seconds: float) -> float:
    """The time that trials need so that memory grows by 30 MB in each run; if it has, several times as much."""
    wanted = _ENOUGH * _GROWTH / max(1.0, measured.per_call)
    if calls >= wanted:
        return _MORE * seconds
    each = measured.seconds / max(1, measured.calls[-1])
    return max(_RUNS * (measured.imported + wanted * each), 2 * seconds)


def _round(said: Said, least: float) -> Round:
    """One run, in which growth by less than so many bytes does not count."""
    last = said.lines[-1]
    calls, private = last["readings"]
    judged = judge(calls, private, least=least)
    growth = max(0.0, judged.growth) / max(1, calls[-1] - calls[0])
    return Round(growth, float(last["cpu"]), float(last["p99"]), int(last["held"]), judged.reason)


def _failure(said: Said, nothing: Said) -> str:
    last: Mapping[str, Any] = said.lines[-1] if said.lines else {}
    if "error" in last:
        return f"it failed ({last['error']})"
    if said.end == "exited":
        return f"its process ended: {describe_exit(said.status or 0)}"
    if said.end == "silent":
        return "a call did not return"
    if said.end == "late" or not last["whole"]:
        return f"it took more than {_MOST_SLOWER:g} times as long"
    more = last["failures"] - nothing.lines[-1]["failures"]
    if more > _FAILURES * last["calls"]:
        return f"{more:,} of {last['calls']:,} calls failed ({', '.join(last['errors'])})"
    return ""
