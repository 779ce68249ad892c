"""A program of this package that runs in a process of its own, and says lines of JSON in a file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from modelguard.facts import _proc
from modelguard.isolation._processes import die_with_parent, ending_signals

__all__ = ["End", "Progress", "Said", "command", "follow"]

_PAUSE = 0.1
#: Seconds in which a process writes down where it stands.
_ANSWER = 1.0
#: Looks at which it runs on, with its stack written down: so it has not crashed.
_STUCK = 5
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
#: Where the driven program enters the code of the user.
_CALLED = re.compile(r'_target\.py", line \d+ in (?:_call|_awaited|next_input|load)\b')
_PACKAGE = Path(__file__).parents[1]

Progress = Callable[[Mapping[str, Any]], None]

#: How a program ended: it said that it is done, its process ended before that, a call did not return, it took longer
#: than it may, or the user has interrupted it.
End = Literal["done", "exited", "silent", "late", "interrupted"]


@dataclass(frozen=True, slots=True)
class Said:
    """What a program has said.

    Attributes:
        lines: Its lines.
        end: How it ended.
        status: The exit status of its process; None if it was ended from here.
        stack: Where it stood when it did not return, crashed or was interrupted: the call first, as ``app.py:3 in f``.
        seconds: How long it ran.
    """

    lines: tuple[Mapping[str, Any], ...]
    end: End
    status: int | None = None
    stack: tuple[str, ...] = ()
    seconds: float = 0.0

    def last(self, name: str) -> Any:
        """The latest value of this name; None if there is none."""
        return next((line[name] for line in reversed(self.lines) if name in line), None)


def command(module: str) -> list[str]:
    """The command that runs a module of this package; the file of its configuration follows."""
    return [sys.executable, "-m", f"modelguard.diagnosis.{module}"]


def follow(
    words: Sequence[str],
    config: Mapping[str, Any],
    environ: Mapping[str, str],
    cwd: Path,
    *,
    progress: Progress,
    silence: float,
    limit: float | None = None,
) -> Said:
    """Run a program, and kill it with all that it has started as soon as it is done, or a signal ends this process.

    Where this process is killed, the kernel kills the program.

    Args:
        words: The command, as :func:`command` makes it.
        config: What the program is to do.
        environ: Its variables.
        cwd: The folder that it runs in.
        progress: Called with each line that it says.
        silence: Seconds without a line after which it is ended.
        limit: Seconds after which it is ended in any case. Default: none.
    """
    parent = os.getpid()
    with ending_signals(), tempfile.TemporaryDirectory(prefix="modelguard-") as folder:
        answer, given = Path(folder, "answer"), Path(folder, "config")
        stack = Path(folder, "stack")
        for file in (answer, stack):
            file.touch()
        # In a file: the words of a command are limited to 128 kB each.
        given.write_text(json.dumps({**config, "answer": str(answer), "stack": str(stack)}), encoding="utf-8")
        process = subprocess.Popen(  # noqa: S603 - this very Python, and a module of this package
            [*words, str(given)],
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent, signal.SIGKILL),  # noqa: PLW1509 - it takes no lock
        )
        began = time.monotonic()
        try:
            said = _follow(process, answer, progress, silence, limit)
            if said.end in ("interrupted", "silent") and not stack.stat().st_size:
                _ask(process, stack)
            seconds = time.monotonic() - began
            return dataclasses.replace(said, stack=_frames(stack.read_text(encoding="utf-8"), cwd), seconds=seconds)
        finally:
            _end(process)


def _ask(process: subprocess.Popen[bytes], stack: Path) -> None:
    """Let it write down where it stands; faulthandler's handler needs no lock of the interpreter."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGRTMIN + 9)
    until = time.monotonic() + _ANSWER
    while not stack.stat().st_size and process.poll() is None and time.monotonic() < until:
        time.sleep(_PAUSE / 2)
    time.sleep(_PAUSE / 2)  # the rest of it


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and all that it has started, also what has left its group."""
    started = [each.pid for each in _proc.descendants(process.pid, _proc.processes())]
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in started:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _frames(text: str, cwd: Path) -> tuple[str, ...]:
    """The frames above those of this package, from what faulthandler has written: the thread that calls comes last."""
    *_, last = re.split(r"^(?:Current thread|Thread|Stack) .*$", text, flags=re.MULTILINE)
    if str(_PACKAGE) in last and not _CALLED.search(last):
        return ()  # it was reading, and not in a call
    found: list[str] = []
    for file, line, name in _FRAME.findall(last):
        path = Path(file)
        if path.is_relative_to(_PACKAGE):
            if found:
                break
            continue
        shown = path.relative_to(cwd) if path.is_relative_to(cwd) else path
        found.append(f"{shown}:{line} in {name}")
    return tuple(found)


def _follow(
    process: subprocess.Popen[bytes], answer: Path, progress: Progress, silence: float, limit: float | None
) -> Said:
    lines: list[Mapping[str, Any]] = []
    began = heard = time.monotonic()
    stuck, stack = 0, answer.with_name("stack")
    try:
        while True:
            ended = process.poll() is not None
            text = answer.read_text(encoding="utf-8").splitlines(keepends=True)
            new = [json.loads(line) for line in text[len(lines) :] if line.endswith("\n")]
            lines += new
            for line in new:
                progress(line)
            now = time.monotonic()
            heard = now if new else heard
            if lines and (lines[-1].get("done") or "error" in lines[-1]):
                return Said(tuple(lines), "done", process.returncode)
            if ended:
                return Said(tuple(lines), "exited", process.returncode)
            stuck += bool(stack.stat().st_size)  # once: it may also be crashing
            if now > heard + silence or stuck > _STUCK:
                return Said(tuple(lines), "silent")
            if limit is not None and now > began + limit:
                return Said(tuple(lines), "late")
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return Said(tuple(lines), "interrupted")
