"""``modelguard doctor`` and ``modelguard diagnose``: what is wrong with a service, and what makes its memory grow."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from modelguard.cli._output import USAGE, add_options, behind, duration, fail, refuse, whole_number
from modelguard.errors import InvalidOption
from modelguard.facts import _redact

if TYPE_CHECKING:
    from modelguard.diagnosis import DoctorReport, Facts, GrowthReport
    from modelguard.diagnosis._target import Progress

FAULTS = 1

#: What only a command that is started can be given.
_OF_COMMANDS = ("request", "count", "wait")
#: How a terminal is told to show each: in bold, dim, or a colour.
_STYLES = {"subject": "1", "fault": "1;31", "note": "33", "unknown": "2", "fix": "32", "verdict": "1"}


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    inside = "also ask the process itself: it has called modelguard.control.listen(), or runs on Python 3.14"
    known = "report only what is not in this file; if it does not exist, write it with what is found, and exit with 0"
    add_options(
        parser,
        ("--pid PID", "a running process; for gunicorn, the master"),
        ("--inside", inside),
        ("--request URL", "a path or address to request while the command is examined"),
        ("--count N", "the number of requests, default: 100"),
        ("--wait S", "seconds to wait until the command serves, default: 120"),
        ("--ignore NUMBER...", "a check to leave out; may be given several times"),
        ("--baseline FILE", known),
        ("--json", "print the findings as JSON"),
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command that starts the service"
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from modelguard.diagnosis._doctor_report import as_json, examine, without_accepted

    try:
        report = examine(_gather(options), ignore=options.ignore)
    except KeyboardInterrupt:
        return fail("doctor", "interrupted; the command was stopped")
    if options.baseline is not None:
        report = without_accepted(report, options.baseline)
    if options.json:
        print(as_json(report))  # noqa: T201 - the output of the command
    else:
        _show(report, sys.stdout)
    if report.faults:
        return FAULTS
    return 0 if report.served else USAGE


def _gather(options: argparse.Namespace) -> Facts:
    from modelguard import diagnosis

    words = behind(options)
    if options.command:
        refuse(options, ["pid"], "must be given alone: only one thing can be examined at a time", "Remove the others.")
    else:
        refuse(options, _OF_COMMANDS, "requires a command, which is started", "Write it after --.")
    if options.inside and options.pid is None:
        fix = "Remove it: a command that is started is asked anyway."
        raise InvalidOption("--inside", "", why="requires --pid", fix=fix)
    if options.pid is not None:
        return (diagnosis.facts_from_inside if options.inside else diagnosis.facts_of_process)(options.pid)
    if not options.command:
        return diagnosis.facts_of_machine()
    count = whole_number("--count", options.count, 100, default=diagnosis.REQUESTS)
    patience = whole_number("--wait", options.wait, 100, default=diagnosis.PATIENCE)
    return diagnosis.facts_of_command(words, request=options.request, count=count, patience=patience)


def _show(report: DoctorReport, stream: TextIO) -> None:
    from modelguard.diagnosis._doctor_report import as_text

    live = stream.isatty()
    plain = not live or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    for style, line in as_text(report, width=shutil.get_terminal_size().columns if live else None):
        code = "" if plain else _STYLES.get(style)
        print(f"\x1b[{code}m{line}\x1b[0m" if code else line, file=stream)


# ``modelguard diagnose``: drives a function and names what makes its memory grow.

#: The exit status of each verdict.
_STATUS = {"steady": 0, "grows": 1, "undecided": 3}

#: Seconds to drive a function, to try remedies, and to watch a process.
SECONDS, TRIAL_SECONDS, PROCESS_SECONDS = 30.0, 120.0, 300.0


def add_diagnose(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "diagnose",
        usage="modelguard diagnose (MODULE:FUNCTION | --pid PID) [--inputs FILE | --generate MODULE:FUNCTION] "
        "[--time T | --calls N] [--try T] [--bucketed NAME]... [--load MODULE:FUNCTION] [--json] [--report DIR]",
        help="drive a function, name what makes its memory grow, and try what helps",
        description="Call a function in a fresh process until it is decided whether its memory grows with its calls, "
        "and name the causes, each with its share of the growth and its evidence. If it grows, try the remedies that "
        "may help in fresh processes, and recommend one.",
        epilog="exit status: 0 nothing grows, 1 memory, open files, threads or child processes grow, 2 it could not be "
        "driven, 3 undecided",
    )
    parser.add_argument("target", metavar="MODULE:FUNCTION", nargs="?", help="the function, such as app:predict")
    add_options(
        parser,
        ("--pid PID", "a running process to watch instead"),
        ("--inputs FILE", "one input in JSON per line: a list, an object, or one argument"),
        ("--generate MODULE:FUNCTION", "a function that yields inputs without end"),
        ("--time T", "how long to drive it, default: 30s; with --pid, to watch it, default: 5m"),
        ("--calls N", "how many times to call it, instead of --time"),
        ("--try T", "how long to try remedies if memory grows, 0 for not at all; default: 2m"),
        ("--bucketed NAME...", "a parameter whose tensors may be padded; may be given several times"),
        ("--load MODULE:FUNCTION", "what makes the model, which the function takes as its first argument"),
        ("--json", "print the report as JSON"),
        ("--report DIR", "also write report.json and report.html into this folder"),
    )
    parser.set_defaults(run=_diagnose)


def _diagnose(options: argparse.Namespace) -> int:
    from modelguard.diagnosis import _growth_page

    live = sys.stderr.isatty()
    try:
        progress = _show_progress if live else lambda _: None
        report = (_of_function if options.pid is None else _of_process)(options, progress)
    finally:
        if live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # noqa: T201 - the report's line is its own
    report = dataclasses.replace(report, about=_about(options, report))
    if options.report is not None:
        _write(report, options.report)
    text = json.dumps(report.as_dict(), indent=2) if options.json else "\n".join(_growth_page.as_text(report))
    print(text)  # noqa: T201 - the output of the command
    return _STATUS[report.verdict]


def _of_process(options: argparse.Namespace, progress: Progress) -> GrowthReport:
    from modelguard import diagnosis

    if options.target is not None:
        why = "must be given alone: a running process gets its own requests"
        raise InvalidOption("--pid", options.pid, why=why, fix=f"Remove {options.target}.")
    why = "is for a function that is called, and a running process gets its own requests"
    refuse(options, ("inputs", "generate", "calls", "try", "bucketed", "load"), why, "Remove it.")
    seconds = duration("--time", options.time, PROCESS_SECONDS)
    return diagnosis.diagnose_process(options.pid, seconds=seconds, progress=progress)


def _of_function(options: argparse.Namespace, progress: Progress) -> GrowthReport:
    from modelguard import diagnosis

    if options.target is None:
        why = "must be given, unless --pid is"
        raise InvalidOption("MODULE:FUNCTION", "", why=why, fix="Write for example app:predict.")
    return diagnosis.diagnose(
        options.target,
        inputs=options.inputs,
        generate=options.generate,
        seconds=duration("--time", options.time, SECONDS),
        calls=whole_number("--calls", options.calls, 1000, default=None),
        trial_seconds=duration("--try", getattr(options, "try"), TRIAL_SECONDS, zero=True),
        bucketed=options.bucketed,
        load=options.load,
        progress=progress,
    )


def _about(options: argparse.Namespace, report: GrowthReport) -> dict[str, str]:
    import platform
    from datetime import datetime

    from modelguard import allocator

    measured = report.measured
    found = {
        "made": datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": _redact.redact_command(["modelguard", *options.words], os.environ),
        "modelguard": version(),
        "Python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
    }
    if options.pid is None:  # the function has run with the variables and the packages of this process
        info = allocator.detect()
        found["allocator"] = f"{info.kind} {info.version or ''}".strip()
        found |= {name: version(name) for name in measured.libraries}
        generated = f"generated by {options.generate}" if options.generate is not None else "none"
        found["inputs"] = f"{measured.inputs:,}, in turn" if measured.inputs else generated
    if measured.per == "calls" and measured.calls:
        found["calls"] = f"{measured.calls[-1]:,} at {len(measured.calls)} readings"
    return found


def version(package: str = "modelguard-lifecycle") -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree, or named otherwise than its module
        return "(not installed)"


def _show_progress(line: Mapping[str, Any]) -> None:
    from modelguard._units import format_bytes

    text = str(line.get("phase", ""))
    if "private" in line:
        text = f"{line['calls']:,} calls, {format_bytes(line['private'] - line['first'])} more memory"
    if text:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)  # noqa: T201


def _write(report: GrowthReport, folder: str) -> None:
    from modelguard.diagnosis import _growth_page

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "report.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
        Path(folder, "report.html").write_text(_growth_page.as_html(report), encoding="utf-8")
    except OSError as error:
        fix = "Name a folder that can be written to."
        raise InvalidOption("--report", folder, why=f"cannot be written ({error.strerror})", fix=fix) from None
