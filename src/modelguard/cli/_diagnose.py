"""``modelguard diagnose``: drives a function and names what makes its memory grow."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelguard.errors import InvalidOption, ModelGuardError

if TYPE_CHECKING:
    from modelguard.diagnosis import GrowthReport

GROWS = 1
USAGE = 2
UNDECIDED = 3

#: Seconds to drive a function, and to watch a process.
SECONDS, PROCESS_SECONDS = 30.0, 300.0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``modelguard``."""
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
    parser.add_argument("--pid", metavar="PID", help="a running process to watch instead")
    parser.add_argument(
        "--inputs", metavar="FILE", help="one input in JSON per line: a list, an object, or one argument"
    )
    parser.add_argument("--generate", metavar="MODULE:FUNCTION", help="a function that yields inputs without end")
    parser.add_argument(
        "--time", metavar="T", help="how long to drive it, default: 30s; with --pid, to watch it, default: 5m"
    )
    parser.add_argument("--calls", metavar="N", help="how many times to call it, instead of --time")
    parser.add_argument(
        "--try",
        dest="trial",
        metavar="T",
        default="2m",
        help="how long to try remedies if memory grows, 0 for not at all; default: %(default)s",
    )
    parser.add_argument(
        "--bucketed",
        action="append",
        default=[],
        metavar="NAME",
        help="a parameter whose tensors may be padded; may be given several times",
    )
    parser.add_argument(
        "--load", metavar="MODULE:FUNCTION", help="what makes the model, which the function takes as its first argument"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--report", metavar="DIR", help="also write report.json and report.html into this folder")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from modelguard.diagnosis import _growth_page, _redact

    try:
        report = _report(options)
        report = dataclasses.replace(report, about=_about(options, report))
        if options.report is not None:
            _write(report, options.report)
    except KeyboardInterrupt:  # between two processes: what runs in one is ended, and reported
        print("modelguard diagnose: interrupted", file=sys.stderr)  # noqa: T201
        return USAGE
    except ModelGuardError as error:
        line = " ".join(_redact.redact(str(error), os.environ).split())
        print(f"modelguard diagnose: {line}", file=sys.stderr)  # noqa: T201
        return USAGE
    text = json.dumps(report.as_dict(), indent=2) if options.json else "\n".join(_growth_page.as_text(report))
    print(text)  # noqa: T201 - the output of the command
    return {"steady": 0, "grows": GROWS, "undecided": UNDECIDED}[report.verdict]


def _report(options: argparse.Namespace) -> GrowthReport:
    progress = _Progress() if sys.stderr.isatty() else lambda _: None
    return _of_function(options, progress) if options.pid is None else _of_process(options, progress)


def _of_process(options: argparse.Namespace, progress: Callable[[Mapping[str, Any]], None]) -> GrowthReport:
    from modelguard import _units, diagnosis

    if options.target is not None:
        why = "must be given alone: a running process gets its own requests"
        raise InvalidOption("--pid", options.pid, why=why, fix=f"Remove {options.target}.")
    for name in ("inputs", "generate", "calls", "load"):
        if getattr(options, name) is not None:
            why = "is for a function that is called, and a running process gets its own requests"
            raise InvalidOption(f"--{name}", getattr(options, name), why=why, fix="Remove it.")
    seconds = PROCESS_SECONDS if options.time is None else _units.seconds(options.time, "--time")
    return diagnosis.diagnose_process(options.pid, seconds=seconds, progress=progress)


def _of_function(options: argparse.Namespace, progress: Callable[[Mapping[str, Any]], None]) -> GrowthReport:
    from modelguard import _units, diagnosis

    target: str | None = options.target
    if target is None:
        why = "must be given, unless --pid is"
        raise InvalidOption("MODULE:FUNCTION", "", why=why, fix="Write for example app:predict.")
    return diagnosis.diagnose(
        target,
        inputs=options.inputs,
        generate=options.generate,
        seconds=SECONDS if options.time is None else _units.seconds(options.time, "--time"),
        calls=None if options.calls is None else _whole_number(options.calls),
        trial_seconds=0.0 if options.trial == "0" else _units.seconds(options.trial, "--try", zero=True),
        bucketed=options.bucketed,
        load=options.load,
        progress=progress,
    )


def _about(options: argparse.Namespace, report: GrowthReport) -> dict[str, str]:
    """When, with what and of how many inputs the report was made."""
    import platform
    from datetime import datetime

    from modelguard import allocator
    from modelguard.diagnosis import _redact

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
    """The installed version of a package."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree, or named otherwise than its module
        return "(not installed)"


def _whole_number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InvalidOption("--calls", text, why="must be a whole number", fix="Write --calls 1000.")
    return int(text)


class _Progress:
    """One line on a terminal, which is written over."""

    def __call__(self, line: Mapping[str, Any]) -> None:
        from modelguard._units import format_bytes

        if "private" in line:
            text = f"{line['calls']:,} calls, {format_bytes(line['private'] - line['first'])} more memory"
        elif "phase" in line:
            text = str(line["phase"])
        else:
            return
        print(f"\r\x1b[K{text}", end="" if not line.get("done") else "\n", file=sys.stderr, flush=True)  # noqa: T201


def _write(report: GrowthReport, folder: str) -> None:
    from modelguard.diagnosis import _growth_page

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "report.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
        Path(folder, "report.html").write_text(_growth_page.as_html(report), encoding="utf-8")
    except OSError as error:
        fix = "Name a folder that can be written to."
        raise InvalidOption("--report", folder, why=f"cannot be written ({error.strerror})", fix=fix) from None
