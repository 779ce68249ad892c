"""Become another program whose environment is right from its first instruction.

What is read at exec, above all ``LD_PRELOAD`` and glibc's ``MALLOC_`` variables, cannot be set by a program for itself.
:func:`plan` decides what the program gets and :func:`become` turns this process into it: process id, parent, open
files, limits and working directory stay, and signals and the exit status are the program's own.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from modelguard.environment import _preload
from modelguard.environment._preload import Allocator
from modelguard.environment._program import NOT_EXECUTABLE, locate
from modelguard.errors import CannotRun, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from modelguard.environment.presets import Preset

__all__ = ["Allocator", "Plan", "become", "plan"]

#: What Python's start changes and an exec would hand on: both are ignored from then on (Py_InitializeFromConfig).
_IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFSZ")

_FIXES = {
    errno.ENOEXEC: "Give it a first line such as #!/bin/sh, or take a program that was built for this machine.",
    errno.ENOENT: "What it needs to be started, its interpreter or dynamic linker, is missing; install that.",
    errno.E2BIG: "Give it fewer or shorter arguments and variables.",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A program to become, and the environment that it gets.

    Attributes:
        program: The file to execute.
        argv: Its arguments, the command's own name first.
        environ: Its whole environment.
        added: The part of it that the caller's environment has not, or has otherwise.
        notes: What the user ought to know, a sentence each.
    """

    program: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    added: Mapping[str, str]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """The same as a line for a shell: ``env NAME=VALUE ... COMMAND``."""
        settings = (f"{name}={value}" for name, value in self.added.items())
        return shlex.join(["env", *settings, *self.argv])


def plan(
    command: Sequence[str],
    *,
    preset: Preset | None = None,
    allocator: Allocator = "none",
    environ: Mapping[str, str] | None = None,
    choose: Callable[..., tuple[dict[str, str], list[str]]] = _preload.choose,
) -> Plan:
    """Decide what a program is started with. Nothing is changed by that.

    Args:
        command: The program, which is searched on ``PATH``, and its arguments.
        preset: Settings that it gets, unless the caller's environment has its own.
        allocator: What serves its ``malloc``. ``"auto"`` preloads the best that is installed, and otherwise sets glibc
            to give memory back, as ``"glibc"`` does; ``"none"`` leaves all of that alone.
        environ: The caller's environment, by default this process's as it was inherited.
        choose: Decides which variables give the program its allocator.

    Returns:
        The plan.

    Raises:
        CannotRun: The command was not found, or cannot be executed.
        InvalidOption: There is no command, it holds a NUL byte, or the allocator cannot be had.
        NotSupported: Nothing can be preloaded here, and an allocator was named.
    """
    _require_command(command)
    before = inherited() if environ is None else dict(environ)
    program = locate(command[0], before)
    settings = preset.environment(before) if preset else {}
    preloading, notes = choose(allocator, program, before | settings)
    added = settings | preloading
    return Plan(program, tuple(command), before | added, added, (*_kept(preset, before), *notes))


def become(plan: Plan) -> NoReturn:
    """Turn this process into the program of a plan. Only the main thread can.

    No ``finally``, no ``atexit`` and no other thread of this process runs on, and nothing is flushed. ``SIGPIPE`` and
    ``SIGXFSZ``, which every Python ignores from its start, are at their default in the program; whether this process
    inherited them ignored, as from systemd, can no longer be told. All other signals are as they were inherited.

    Args:
        plan: What :func:`plan` has made.

    Raises:
        CannotRun: The system refused, and this process goes on.
    """
    before = _reset_signals()
    try:
        os.execve(plan.program, plan.argv, dict(plan.environ))  # noqa: S606 - no shell, as it must be
    except OSError as error:
        for number, handler in before.items():
            signal.signal(number, handler)
        fix = _FIXES.get(error.errno or 0, "execve(2) tells what the reason may be.")
        raise CannotRun(plan.program, why=str(error.strerror), fix=fix, status=NOT_EXECUTABLE) from error


def inherited(initial: Path = Path("/proc/self/environ"), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what Python itself has put there.

    In the C locale Python sets ``LC_CTYPE`` for itself as it starts (PEP 538), and the program would inherit it.
    """
    result = dict(environ)
    try:
        entries = initial.read_bytes().split(b"\0")
    except OSError:  # not Linux
        return result
    result.pop("LC_CTYPE", None)
    for entry in entries:
        if entry.startswith(b"LC_CTYPE="):
            result["LC_CTYPE"] = os.fsdecode(entry.removeprefix(b"LC_CTYPE="))
    return result


def _require_command(command: Sequence[str]) -> None:
    if not command:
        raise InvalidOption("command", "", why="there is no command", fix="Write it after --, with its arguments.")
    for word in command:
        if "\0" in word:
            raise InvalidOption("command", word, why="no argument can hold a NUL byte", fix="Leave it out.")


def _kept(preset: Preset | None, environ: Mapping[str, str]) -> list[str]:
    """Settings of the preset to which the caller's environment has another value."""
    return [
        f"your {knob.name}={environ[knob.name]} stays; the preset has {knob.value}"
        for knob in (preset.knobs if preset else ())
        if environ.get(knob.name, knob.value) != knob.value
    ]


def _reset_signals() -> dict[int, signal._HANDLER]:
    """Undo what Python's start did to signals, and give what they were until then.

    What has a handler falls back to its default by the exec itself. A Ctrl-C is still set to end this process from
    here on: one that Python has noted, and not yet raised, would be lost with it.
    """
    changed = [getattr(signal, name) for name in _IGNORED_BY_PYTHON]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        changed.append(signal.SIGINT)
    return {number: signal.signal(number, signal.SIG_DFL) for number in changed}
