"""A program of this package that runs in a process of its own, and says lines of JSON in a file."""

from __future__ import annotations

import json
import os
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

__all__ = ["End", "Progress", "Said", "command", "follow"]

_PAUSE = 0.1

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
    """

    lines: tuple[Mapping[str, Any], ...]
    end: End
    status: int | None = None

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
    """Run a program, and kill it with all that it has started as soon as it is done.

    Args:
        words: The command, as :func:`command` makes it.
        config: What the program is to do.
        environ: Its variables.
        cwd: The folder that it runs in.
        progress: Called with each line that it says.
        silence: Seconds without a line after which it is ended.
        limit: Seconds after which it is ended in any case. Default: none.
    """
    with tempfile.TemporaryDirectory(prefix="modelguard-") as folder:
        answer, given = Path(folder, "answer"), Path(folder, "config")
        answer.touch()
        # In a file: the words of a command are limited to 128 kB each.
        given.write_text(json.dumps({**config, "answer": str(answer)}), encoding="utf-8")
        process = subprocess.Popen(  # noqa: S603 - this very Python, and a module of this package
            [*words, str(given)],
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return _follow(process, answer, progress, silence, limit)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _follow(
    process: subprocess.Popen[bytes], answer: Path, progress: Progress, silence: float, limit: float | None
) -> Said:
    lines: list[Mapping[str, Any]] = []
    began = heard = time.monotonic()
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
            if now > heard + silence:
                return Said(tuple(lines), "silent")
            if limit is not None and now > began + limit:
                return Said(tuple(lines), "late")
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return Said(tuple(lines), "interrupted")
