"""Facts about a command that is not run: what its words, its files and this machine say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from modelguard.diagnosis import secrecy
from modelguard.diagnosis.describing import describe, inherited
from modelguard.diagnosis.facts import Facts
from modelguard.diagnosis.gathering_machine import machine
from modelguard.diagnosis.launches import follow, interpreter
from modelguard.environment.allocator import Problem
from modelguard.errors import InvalidOption

__all__ = ["gather_command", "missing_preloads"]


def gather_command(
    words: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    cwd: Path | None = None,
    root: Path = Path("/"),
) -> Facts:
    """Judge a command without running it.

    Args:
        words: The command and its arguments.
        environ: The variables that it would be given.
        cwd: Where it would run, by default here.
        root: Where ``/proc``, ``/sys`` and ``/dev`` are found.

    Raises:
        CannotRun: The command was not found, or cannot be executed.
        InvalidOption: There is no command, or a ``modelguard run`` in it refuses its options.
    """
    if not words:
        raise InvalidOption("command", "", why="there is no command", fix="Write it after --, with its arguments.")
    launch = follow(words, environ)
    described = describe(launch, cwd or Path.cwd())
    started_with = inherited(launch.environ, "the command's environment")
    python = interpreter(launch.program)
    unknown = described.unknown if python else (*described.unknown, "which Python runs it could not be told")
    return Facts(
        f"the command: {secrecy.clean_command(words, environ)}",
        machine(root),
        (*started_with, *described.variables),
        python,
        tuple(missing_preloads(launch.environ, root)),
        described.server,
        (),
        described.app,
        described.config,
        unknown,
    )


def missing_preloads(environ: Mapping[str, str], root: Path) -> Iterator[Problem]:
    """Find entries of ``LD_PRELOAD`` that name no file. Names without a folder are the dynamic linker's to search."""
    for entry in re.split(r"[\s:]+", environ.get("LD_PRELOAD", "")):
        if entry.startswith("/") and "$" not in entry and not (root / entry.lstrip("/")).exists():
            fix = "Correct the path, or leave it to 'modelguard run --allocator auto', which finds it."
            yield Problem("missing", f"LD_PRELOAD names {entry}, and there is no such file", fix)
