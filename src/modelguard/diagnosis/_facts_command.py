"""Facts about a command that is not run: what its words, its files and this machine say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from modelguard.diagnosis import _redact
from modelguard.diagnosis._commands import interpreter, resolve
from modelguard.diagnosis._deployment import deployment_of, known_variables
from modelguard.diagnosis._facts import Facts
from modelguard.diagnosis._facts_machine import machine
from modelguard.environment._allocator_kinds import Problem
from modelguard.environment._allocator_problems import preload_entries
from modelguard.errors import InvalidOption

__all__ = ["facts_of_command", "missing_preloads"]


def facts_of_command(
    words: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    cwd: Path | None = None,
    root: Path = Path("/"),
) -> Facts:
    """Examine a command without running it.

    Args:
        words: The command and its arguments.
        environ: The variables that it would get.
        cwd: The folder that it would run in. Default: the current one.
        root: The folder that holds ``proc``, ``sys`` and ``dev``.

    Raises:
        CannotRun: The command was not found, or cannot be executed.
        InvalidOption: The command is empty, or a ``modelguard run`` in it rejects its options.
    """
    if not words:
        raise InvalidOption("command", "", why="must not be empty", fix="Write it after --, with its arguments.")
    launch = resolve(words, environ)
    described = deployment_of(launch, cwd or Path.cwd())
    started_with = known_variables(launch.environ, "the command's environment")
    python = interpreter(launch.program)
    unknown = described.unknown if python else (*described.unknown, "the Python that runs it was not recognised")
    return Facts(
        f"the command: {_redact.redact_command(words, environ)}",
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
    """Find entries of ``LD_PRELOAD`` whose file does not exist. The dynamic linker searches names without a folder."""
    for entry in preload_entries(environ):
        if entry.startswith("/") and "$" not in entry and not (root / entry.lstrip("/")).exists():
            fix = "Correct the path, or use 'modelguard run --allocator auto', which finds it."
            yield Problem("missing", f"LD_PRELOAD names {entry}, but that file does not exist", fix)
