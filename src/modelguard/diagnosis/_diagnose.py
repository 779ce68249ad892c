"""Drives a function in a fresh process until its growth is decided, names the causes, and tries remedies."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from modelguard import _units
from modelguard.diagnosis import _child, _counts, _redact
from modelguard.diagnosis._attach import Inside, inside_of
from modelguard.diagnosis._attribution import attribute
from modelguard.diagnosis._child import Progress, Said
from modelguard.diagnosis._counts import Counts, Growing, compiled
from modelguard.diagnosis._facts_process import interpreter_of, named_process, process_number, readable
from modelguard.diagnosis._growth import GrowthReport, Measured, notes_on
from modelguard.diagnosis._holders import Held
from modelguard.diagnosis._trials import Declared, try_remedies
from modelguard.diagnosis._watch import Calls, Look, Observed
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported
from modelguard.facts import _memory, _proc
from modelguard.facts._growth import FEWEST, Judgement

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


def diagnose(
    target: str,
    *,
    inputs: str | None = None,
    generate: str | None = None,
    seconds: float = SECONDS,
    calls: int | None = None,
    trial_seconds: float = 0.0,
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
        if name is not None and not _NAME.fullmatch(name):
            raise InvalidOption(option, name, why="must be module:function", fix="Write for example app:predict.")
    if inputs is not None and generate is not None:
        raise InvalidOption("--inputs", inputs, why="must be given alone", fix="Remove --generate.")
    if not 1 <= seconds <= _DAY:
        raise InvalidOption("--time", seconds, why="must be between 1 s and 1 day", fix="Write --time 30s.")
    if not 0 <= trial_seconds <= _DAY:
        raise InvalidOption("--try", trial_seconds, why="must be between 0 s and 1 day", fix="Write --try 2m.")
    if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int) or calls < _FEWEST_CALLS):
        why = f"must be a whole number of at least {_FEWEST_CALLS}"
        raise InvalidOption("--calls", calls, why=why, fix="Write --calls 1000.")
    if not Path("/proc/self/smaps").exists():
        raise NotSupported("modelguard diagnose", reason="there is no /proc")
    config = {"target": target, "generate": generate, "inputs": read_inputs(inputs), "load": load}
    where, variables = cwd or Path.cwd(), dict(environ)
    patience = min(silence, _MOST_TIMES * seconds)
    said = _child.follow(
        _child.command("_driven"),
        {**config, "seconds": seconds, "calls": calls, "patience": patience, "loading": max(silence, patience)},
        variables,
        where,
        progress=progress,
        silence=silence + max(silence, patience),
    )
    report = _report(target, said, _Asked(seconds, calls, patience, inputs, generate))
    measured = dataclasses.replace(report.measured, inputs=len(config["inputs"] or ()))
    report = dataclasses.replace(report, measured=measured)
    if measured.judged.verdict != "grows" or not trial_seconds or said.end == "interrupted":
        return report
    trials = try_remedies(
        config,
        report.causes,
        report.measured,
        Declared(tuple(bucketed), load),
        seconds=trial_seconds,
        environ=variables,
        cwd=where,
        progress=progress,
        silence=silence,
    )
    return dataclasses.replace(report, trials=trials)


def read_inputs(file: str | None) -> list[Any] | None:
    """Read a file of inputs; None if there is none.

    Raises:
        InvalidOption: It cannot be read, is empty, or a line is not JSON: the message has its number.
    """
    if file is None:
        return None
    fix = 'Write one input in JSON per line, such as ["a text"] or {"text": "a text"}.'
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption("--inputs", file, why=f"cannot be read ({type(error).__name__})", fix=fix) from None
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError:
                raise InvalidOption("--inputs", file, why=f"line {number} is not JSON", fix=fix) from None
    if not found:
        raise InvalidOption("--inputs", file, why="must not be empty", fix=fix)
    return found


class _Asked(NamedTuple):
    """How long the user lets it take."""

    seconds: float
    calls: int | None
    patience: float
    inputs: str | None
    generate: str | None

    def longer(self, factor: float) -> str:
        """The option for so many times as long."""
        if self.calls is not None:
            return f"--calls {math.ceil(factor * self.calls)}"
        return f"--time {_units.format_seconds(math.ceil(factor * self.seconds))}"


def _report(target: str, said: Said, asked: _Asked) -> GrowthReport:
    if (error := said.last("error")) is not None:
        message = _redact.redact(said.last("message"), os.environ)
        why = f"could not be driven: {error}" + (f": {message}" if message else "")
        raise InvalidOption("MODULE:FUNCTION", target, why=why, fix=_fix(said))
    if said.end not in ("done", "interrupted") and not _was_imported(said):
        raise InvalidOption("MODULE:FUNCTION", target, why=f"could not be driven: {_importing(said)}", fix=_fix(said))
    measured = _measured(said)
    judged = measured.judged
    verdict, unknown = judged.verdict, _ended(said, asked)
    unknown += notes_on(judged)
    if verdict == "undecided" and not measured.growing:
        unknown.append(f"{judged.reason}; it needs {_needed(said, judged, len(measured.private), asked)}")
    if measured.failures:
        errors = ", ".join(measured.errors)
        unknown.append(f"{measured.failures:,} of {measured.calls[-1]:,} calls failed ({errors})")
        unknown.append(_to_see(target, measured, asked))
        if measured.failures == measured.calls[-1] and verdict != "grows":
            verdict = "undecided"
            unknown = [one for one in unknown if not one.startswith(judged.reason or "\n")]
            unknown.append("no call succeeded, so nothing is known about those that do")
    causes, rest = attribute(measured) if verdict == "grows" else ((), 0.0)
    if measured.growing:
        verdict = "grows"
    return GrowthReport(target, verdict, causes, rest, measured, tuple(unknown))


def _fix(said: Said) -> str:
    if _was_imported(said):
        return "Check --inputs or --generate."
    return "Check the name and the inputs, and that python -c 'import MODULE' works in this folder."


def _was_imported(said: Said) -> bool:
    return any(line.get("phase") == "warm-up" for line in said.lines)


def _importing(said: Said) -> str:
    """How the import of the function has ended."""
    if said.end == "silent":
        return f"its import has not returned for {said.seconds:.0f} seconds{_where(said)}"
    return f"its process ended with status {said.status} while it was imported"


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
        found = {"calls": [line["calls"] for line in drive]}
        found["private"] = [line["private"] for line in drive]
        found["judged_from"] = drive[-1]["judged_from"] if drive else 0
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    fields["growing"] = tuple(Growing(**each) for each in fields.get("growing", ()))
    fields["held"] = tuple(Held(**each) for each in fields.get("held", ()))
    return Measured(**fields)


def _ended(said: Said, asked: _Asked) -> list[str]:
    if said.end == "silent":
        return [f"a call has not returned for {asked.patience:g} seconds, and was ended{_where(said)}"]
    if said.end == "exited":
        return [f"the process ended with status {said.status} before the diagnosis did{_where(said)}"]
    if said.end == "interrupted":
        return [f"it was interrupted after {said.seconds:.0f} seconds{_where(said)}"]
    return []


def _needed(said: Said, judged: Judgement, count: int, asked: _Asked) -> str:
    """What it needs to be decided."""
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


# Watches a running process until its growth is decided: from outside, and from inside where it can be asked.


_READINGS = 24
_OUTSIDE = "from outside, private memory by kind, the allocator ({}), threads, child processes and open files"
_INSIDE = "and from inside: its objects, what holds those that grow, and the calls on its guards"
#: How to get what was not looked at.
_LISTEN = (
    "call modelguard.control.listen() where its application is made, or use Python 3.14 for both; modelguard.diagnosis."
    "watch() in it, or modelguard diagnose MODULE:FUNCTION, find it too"
)


def diagnose_process(
    pid: str | int,
    *,
    seconds: float = 300.0,
    progress: Progress = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> GrowthReport:
    """Watch a running process, decide whether its memory grows with its calls, and attribute the growth.

    Any process is watched from outside: the kinds of its memory, its threads, children and open files. One that has
    called ``modelguard.control.listen()``, or that runs the same CPython as this one, 3.14 or later, is asked too:
    a thread of it counts objects at the start and at the end, finds what holds those that have become more, and counts
    calls on guards in between. Freed memory is then returned at the start and at the end; nothing else is changed.

    Args:
        pid: The id of the process: of a server with workers, that of one worker.
        seconds: How long to watch it. It has to get requests meanwhile.
        progress: Called at each reading.
        clock: Monotonic seconds.
        sleep: Waits for that many seconds.

    Raises:
        InvalidOption: It is not a process id, the process does not exist, has ended, belongs to another user, or has
            stopped to answer; or the time is not valid.
        NotSupported: There is no ``/proc``.
    """
    number = process_number(pid)
    if not 1 <= seconds <= _DAY:
        raise InvalidOption("--time", seconds, why="must be between 1 s and 1 day", fix="Write --time 5m.")
    if not _proc.is_mounted():
        raise NotSupported("modelguard diagnose --pid", reason="there is no /proc")
    with readable(number), ExitStack() as stack:
        _memory.usage(number)  # raises if there is no such process, or it belongs to another user
        subject, python = named_process(number), interpreter_of(number)
        inside, why = None, "it runs no Python"
        if python is not None:
            try:
                inside = stack.enter_context(inside_of(number, python))
            except ModelGuardError as error:
                why = f"{_reason(error)}; {_LISTEN}"
        return Watched(number, inside, clock, sleep, progress, why=why).report(subject, seconds)


def _reason(error: ModelGuardError) -> str:
    """Why it cannot be asked, as the end of a sentence."""
    if isinstance(error, NotSupported):
        return error.reason
    fix = f". {error.fix}" if isinstance(error, InvalidOption) else ""
    return f"it {str(error).removesuffix(fix).partition(': ')[2]}"


@dataclass(frozen=True)
class Watched:
    """A process that is watched.

    Attributes:
        pid: The process.
        inside: Answers questions in it; None if it is seen from outside only.
        clock: Monotonic seconds.
        sleep: Waits for that many seconds.
        progress: Called at each reading.
        private: Reads the private memory of a process, in bytes.
        why: Why it is seen from outside only.
    """

    pid: int
    inside: Inside | None
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    progress: Progress
    private: Callable[[int], int] = _memory.private_of
    why: str = ""
    _unknown: list[str] = field(default_factory=list)

    def report(self, subject: str, seconds: float) -> GrowthReport:
        """Watch it for so long, and judge."""
        calls, observed = Calls(), Observed()
        self._still_there()
        counts = Counts(self.pid)
        free = self._trim()
        first, kinds = self._look(), _counts.kinds_of(self.pid)
        began = self.clock()
        self._unknown.extend(self._children())
        try:
            for number in range(_READINGS + 1):
                self.sleep(max(0.0, began + number * seconds / _READINGS - self.clock()))
                private = self._still_there()
                total = calls.total(self._ask("uses").get("uses", ()))
                made = total if calls.known else int(1000 * (self.clock() - began))
                observed.add(made, private)
                counts.read(made)
                self.progress({"calls": total, "private": private, "first": observed.first, "phase": "drive"})
        except KeyboardInterrupt:
            self._unknown.append("it was interrupted")
        last, now = self._look(), _counts.kinds_of(self.pid)
        held = self._held(calls)
        trimmed = max(0, self._trim() - free)
        measured = observed.measured(first, last, trimmed, "calls" if calls.known else "milliseconds", held)
        measured = replace(measured, growing=tuple(Growing(**each) for each in counts.growing(0)))
        judged = measured.judged
        self._unknown.extend(notes_on(judged, measured.per))
        if not measured.calls[-1] and len(measured.calls) >= FEWEST:
            self._unknown.append("no call has ended meanwhile; send it requests")
        elif judged.verdict == "undecided":
            longer = _units.format_seconds(math.ceil(judged.more * seconds))
            self._unknown.append(f"{judged.reason}; it needs --time {longer}")
        causes, rest = ((), 1.0) if self.inside is None else attribute(measured)
        if judged.verdict != "grows":
            causes, rest = (), 0.0
        seen = (*self._looked_at(), *self._where(kinds, now))
        verdict = "grows" if measured.growing else judged.verdict
        return GrowthReport(subject, verdict, causes, rest, measured, tuple(self._unknown), seen=seen)

    def _still_there(self) -> int:
        """Its private memory.

        Raises:
            InvalidOption: It has ended.
        """
        private = self.private(self.pid)
        if _proc.stat(self.pid) is None:
            why = "has ended meanwhile"
            raise InvalidOption("--pid", self.pid, why=why, fix="Give the id of a process that goes on.")
        return private

    def _looked_at(self) -> Iterator[str]:
        outside = _OUTSIDE.format(_counts.allocator_of(self.pid) or "unknown")
        if self.inside is not None:
            yield f"looked at: {outside}; {_INSIDE}"
            return
        yield f"looked at: {outside}"
        yield f"not looked at: its Python objects, what holds them, and its calls, because {self.why}"

    def _where(self, first: Mapping[str, int], last: Mapping[str, int]) -> Iterator[str]:
        if moved := _counts.moved(first, last):
            yield f"where private memory grew: {moved}"

    def _children(self) -> list[str]:
        count = sum(1 for _ in _proc.descendants(self.pid, _proc.processes())) - 1
        return [f"it has {count} processes below it, which were not watched"] if count > 0 else []

    def _ask(self, question: str) -> dict[str, Any]:
        return {} if self.inside is None else self.inside.ask(question)

    def _look(self) -> Look:
        said = self._ask("look")
        return Look(said.get("census", {}), said.get("types", {}), compiled(self.pid), tuple(said.get("libraries", ())))

    def _held(self, calls: Calls) -> tuple[Held, ...]:
        """What holds what has become more. Where calls are not known, growth with them cannot be asked for."""
        number = calls.total(()) if calls.known else 0
        return tuple(Held(**each) for each in self._ask(f"held {number}").get("held", ()) if each["path"])

    def _trim(self) -> int:
        """Bytes that a trim gives back."""
        before = self.private(self.pid)
        self._ask("trim")
        return max(0, before - self.private(self.pid))
