"""``modelguard doctor``: finds problems in a service's environment, and says how to fix them."""

from __future__ import annotations

import argparse
import os
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

_STYLES = {"subject": "bold", "fault": "bold red", "note": "yellow", "unknown": "dim", "verdict": "bold", "detail": ""}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``modelguard``."""
    parser = commands.add_parser(
        "doctor",
        usage="modelguard doctor [--json] [--pid PID | --gunicorn CONF | -- COMMAND ...]",
        help="find problems in the environment of a service",
        description="Examine this environment, a running process with all its descendants, a gunicorn configuration "
        "(which is executed), or a command (which is not executed). Each finding says what was seen, why it matters "
        "and how to fix it. Secrets are never printed.",
        epilog="exit status: 0 no faults (there may be notes), 1 faults, 2 the examination failed, 127 there is no "
        "such command",
    )
    parser.add_argument("--pid", metavar="PID", help="a running process; for gunicorn, the master")
    parser.add_argument("--gunicorn", metavar="CONF", help="a configuration as for gunicorn's -c; it is executed")
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
        report = examine(_gather(options))
    except CannotRun as error:
        return _fail(error, error.status)
    except ModelGuardError as error:
        return _fail(error, USAGE)
    if options.json:
        print(as_json(report))  # noqa: T201 - the output of the command
    else:
        _show(report, sys.stdout)
    return 0 if report.ok else FAULTS


def _gather(options: argparse.Namespace) -> Facts:
    from modelguard import diagnosis

    given = [name for name in ("pid", "gunicorn") if getattr(options, name) is not None]
    if len(given) + bool(options.command) > 1:
        why = "must be given alone: only one thing can be examined at a time"
        raise InvalidOption(f"--{given[0]}", getattr(options, given[0]), why=why, fix="Remove the others.")
    if options.pid is not None:
        return diagnosis.facts_of_process(options.pid)
    if options.gunicorn is not None:
        return diagnosis.facts_of_gunicorn(options.gunicorn)
    if options.command:
        words = options.command[1:] if options.command[0] == "--" else options.command
        return diagnosis.facts_of_command(words)
    return diagnosis.facts_of_machine()


def _fail(error: ModelGuardError, status: int) -> int:
    from modelguard.diagnosis import _redact

    line = " ".join(_redact.redact(str(error), os.environ).split())
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
