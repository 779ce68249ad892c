"""Drives a function in a fresh process until its growth is decided, and names the causes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from modelguard.diagnosis import _redact
from modelguard.diagnosis._attribution import attribute
from modelguard.diagnosis._growth import GrowthReport, Measured, judge
from modelguard.errors import InvalidOption, NotSupported

__all__ = ["SECONDS", "diagnose", "read_inputs"]

#: Seconds that a function is driven and tested, unless told otherwise.
SECONDS = 30.0

#: Seconds without a word after which a call is taken to hang: loading a model and the slowest reading take less.
_SILENCE = 120.0
_PAUSE = 0.1

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

Progress = Callable[[Mapping[str, Any]], None]


def diagnose(
    target: str,
    *,
    inputs: str | None = None,
    generate: str | None = None,
    seconds: float = SECONDS,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    progress: Progress = lambda _: None,
    silence: float = _SILENCE,
) -> GrowthReport:
    """Drive a function, decide whether memory grows with its calls, and attribute the growth.

    Args:
        target: The function as ``"module:function"``; sync, async, guarded or batched.
        inputs: A file with one input in JSON per line: a list is positional arguments, an object arguments by name,
            anything else the one argument. Inputs are repeated in turn.
        generate: A function without arguments as ``"module:function"`` that yields inputs without end.
        seconds: How long to drive and test it.
        environ: The variables of the process.
        cwd: The folder in which the module is looked for. Default: the current one.
        progress: Called with each line that the process says.
        silence: Seconds after which a call that does not return ends the diagnosis.

    Raises:
        InvalidOption: A name, a file or a time is not valid, or the function cannot be imported or called.
        NotSupported: There is no ``/proc``.
    """
    for option, name in (("MODULE:FUNCTION", target), ("--generate", generate)):
        if name is not None and not _NAME.fullmatch(name):
            raise InvalidOption(option, name, why="must be module:function", fix="Write for example app:predict.")
    if inputs is not None and generate is not None:
        raise InvalidOption("--inputs", inputs, why="must be given alone", fix="Remove --generate.")
    if not 1 <= seconds <= 86_400:  # noqa: PLR2004 - a day
        raise InvalidOption("--time", seconds, why="must be between 1 s and 1 day", fix="Write --time 30s.")
    if not Path("/proc/self/smaps").exists():
        raise NotSupported("modelguard diagnose", reason="there is no /proc")
    config = {"target": target, "generate": generate, "inputs": read_inputs(inputs), "seconds": seconds}
    lines, unknown = _run(config, dict(environ), cwd or Path.cwd(), progress, silence)
    return _report(target, lines, unknown)


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


def _run(
    config: dict[str, Any], environ: dict[str, str], cwd: Path, progress: Progress, silence: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns what the process has said, and what could not be determined."""
    with tempfile.TemporaryDirectory(prefix="modelguard-") as folder:
        answer = Path(folder, "answer")
        answer.touch()
        command = [sys.executable, "-m", "modelguard.diagnosis._driven", json.dumps({**config, "answer": str(answer)})]
        process = subprocess.Popen(  # noqa: S603 - this very Python, and a module of this package
            command,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return _follow(process, answer, progress, silence)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _follow(
    process: subprocess.Popen[bytes], answer: Path, progress: Progress, silence: float
) -> tuple[list[dict[str, Any]], list[str]]:
    lines: list[dict[str, Any]] = []
    heard = time.monotonic()
    try:
        while True:
            ended = process.poll() is not None
            text = answer.read_text(encoding="utf-8").splitlines(keepends=True)
            said = [json.loads(line) for line in text[len(lines) :] if line.endswith("\n")]
            for line in said:
                progress(line)
            lines += said
            heard = time.monotonic() if said else heard
            if ended:
                if not lines or not (lines[-1].get("done") or "error" in lines[-1]):
                    return lines, [f"the process ended with status {process.returncode} before the diagnosis did"]
                return lines, []
            if time.monotonic() > heard + silence:
                return lines, [f"a call has not returned for {silence:g} seconds, and was ended"]
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return lines, ["it was interrupted"]


def _report(target: str, lines: list[dict[str, Any]], unknown: list[str]) -> GrowthReport:
    for line in lines:
        if "error" in line:
            message = _redact.redact(line["message"], os.environ)
            why = f"could not be driven: {line['error']}" + (f": {message}" if message else "")
            raise InvalidOption("MODULE:FUNCTION", target, why=why, fix="Try python -c 'import MODULE' first.")
    said = next((line["measured"] for line in reversed(lines) if "measured" in line), None)
    if said is None:
        drive = [line for line in lines if line.get("phase") == "drive"]
        said = {"calls": [0, *(line["calls"] for line in drive)], "private": [each["first"] for each in drive[:1]]}
        said["private"] += [line["private"] for line in drive]
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}
    measured = Measured(**fields)
    verdict = judge(measured.calls, measured.private) if measured.private else "undecided"
    if verdict == "undecided":
        needed = "more time: --time 120s, or more" if len(measured.private) > 1 else "calls that return"
        unknown = [*unknown, f"there are {len(measured.private)} readings, which is too few; it needs {needed}"]
    if measured.failures:
        errors = ", ".join(measured.errors)
        unknown = [*unknown, f"{measured.failures:,} of {measured.calls[-1]:,} calls failed ({errors})"]
    causes, rest = attribute(measured) if verdict == "grows" else ((), 0.0)
    return GrowthReport(target, verdict, causes, rest, measured, tuple(unknown))
