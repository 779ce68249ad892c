"""``modelguard doctor``: finds problems in a service's environment, and says how to fix them."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from modelguard.errors import InvalidOption, ModelGuardError

if TYPE_CHECKING:
    from modelguard.diagnosis._facts import Facts
    from modelguard.diagnosis._report import DoctorReport

FAULTS = 1
USAGE = 2

_STYLES = {
    "subject": "bold",
    "fault": "bold red",
    "note": "yellow",
    "unknown": "dim",
    "fix": "green",
    "verdict": "bold",
    "detail": "",
}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``modelguard``."""
    parser = commands.add_parser(
        "doctor",
        usage="modelguard doctor [--json] [--ignore NUMBER]... [--baseline FILE] [--request URL [--count N]] "
        "[--wait S] [--pid PID [--inside] | -- COMMAND ...]",
        help="find problems in the environment of a service",
        description="Examine this environment, a running process with all its descendants, or a command: it is "
        "started, examined from outside and inside once it serves, and stopped. Each finding says what was seen, why "
        "it matters and how to fix it. Secrets are never printed.",
        epilog="exit status: 0 no faults (there may be notes), 1 faults, 2 the examination failed or the command did "
        "not serve, 126 it cannot be executed, 127 there is no such command",
    )
    parser.add_argument("--pid", metavar="PID", help="a running process; for gunicorn, the master")
    parser.add_argument(
        "--inside",
        action="store_true",
        help="also ask the process itself: it has called modelguard.control.listen(), or runs on Python 3.14",
    )
    parser.add_argument("--request", metavar="URL", help="a path or address to request while the command is examined")
    parser.add_argument("--count", metavar="N", help="the number of requests, default: 100")
    parser.add_argument("--wait", metavar="S", help="seconds to wait until the command serves, default: 120")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NUMBER",
        help="a check to leave out; may be given several times",
    )
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        help="report only what is not in this file; if it does not exist, write it with what is found, and exit with 0",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command that starts the service"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from modelguard.diagnosis._report import as_json, examine
    from modelguard.errors import CannotRun

    try:
        report = _compared(examine(_gather(options), ignore=options.ignore), options.baseline)
    except CannotRun as error:
        return _fail(error, error.status)
    except ModelGuardError as error:
        return _fail(error, USAGE)
    except KeyboardInterrupt:
        return _say("interrupted; the command was stopped", USAGE)
    if options.json:
        print(as_json(report))  # noqa: T201 - the output of the command
    else:
        _show(report, sys.stdout)
    if report.faults:
        return FAULTS
    return 0 if report.served else USAGE


def _gather(options: argparse.Namespace) -> Facts:
    from modelguard import diagnosis

    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.pid is not None and options.command:
        why = "must be given alone: only one thing can be examined at a time"
        raise InvalidOption("--pid", options.pid, why=why, fix="Remove the others.")
    for name in ("request", "count", "wait"):
        if getattr(options, name) is not None and not options.command:
            why = "requires a command, which is started"
            raise InvalidOption(f"--{name}", getattr(options, name), why=why, fix="Write it after --.")
    if options.inside and options.pid is None:
        fix = "Remove it: a command that is started is asked anyway."
        raise InvalidOption("--inside", "", why="requires --pid", fix=fix)
    if options.pid is not None:
        return (diagnosis.facts_from_inside if options.inside else diagnosis.facts_of_process)(options.pid)
    if options.command:
        count, wait = _number("--count", options.count), _number("--wait", options.wait)
        return diagnosis.facts_of_command(
            words,
            request=options.request,
            count=diagnosis.REQUESTS if count is None else count,
            patience=diagnosis.PATIENCE if wait is None else wait,
        )
    return diagnosis.facts_of_machine()


def _number(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise InvalidOption(option, text, why="must be a whole number of at least 1", fix=f"Write {option} 100.")
    return int(text)


def _compared(report: DoctorReport, baseline: str | None) -> DoctorReport:
    """The report without the findings that the baseline file contains. A missing file is written."""
    if baseline is None:
        return report
    from modelguard.diagnosis._report import known_findings, write_baseline

    known = known_findings(baseline)
    if known is None:
        write_baseline(baseline, report)
        known = frozenset(finding.number for finding in report.findings)
    return report.without(known)


def _fail(error: ModelGuardError, status: int) -> int:
    from modelguard.diagnosis import _redact

    return _say(" ".join(_redact.redact(str(error), os.environ).split()), status)


def _say(line: str, status: int) -> int:
    print(f"modelguard doctor: {line}", file=sys.stderr)  # noqa: T201
    return status


def _show(report: DoctorReport, stream: TextIO) -> None:
    from modelguard.diagnosis._report import as_text

    if not stream.isatty():
        encoding = stream.encoding or "utf-8"
        for _, line in as_text(report):
            print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream)
        return
    lines = as_text(report, width=shutil.get_terminal_size().columns)
    colours = None if os.environ.get("NO_COLOR") else _colours(stream)
    for style, line in lines:
        if colours:
            colours(line, style)
        else:
            print(line, file=stream)


def _colours(stream: TextIO) -> Callable[[str, str], None] | None:
    """Make a function that prints a line in a style; None if rich is not installed."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return None
    console = Console(file=stream)
    return lambda line, style: console.print(Text(line, style=_STYLES[style]), soft_wrap=True)
