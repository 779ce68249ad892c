"""Become another program that has the right environment from its start.

A program cannot set the variables that are read at exec for itself, above all ``LD_PRELOAD`` and glibc's ``MALLOC_``
variables. :func:`plan` decides what the program gets, and :func:`become` replaces this process by it: process id,
parent, open files, limits and working directory stay, and signals and the exit status are the program's own.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from modelguard.environment import _capacities, _preload, _proc
from modelguard.environment._allocator_kinds import Kind, kind_of
from modelguard.environment._preload import PRELOAD, Allocator
from modelguard.environment._program import NOT_EXECUTABLE, locate
from modelguard.errors import CannotRun, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from modelguard.environment._presets import Preset

__all__ = ["Allocator", "Plan", "become", "inherited", "plan"]

#: Python ignores both signals from its start (Py_InitializeFromConfig), and an exec would keep them ignored.
_IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFSZ")

#: The readers of presets' variables that are allocators.
_ALLOCATORS: dict[str, Kind] = {"glibc's malloc": "glibc", "jemalloc": "jemalloc"}

_FIXES = {
    errno.ENOEXEC: "Give it a first line such as #!/bin/sh, or use a program that was built for this machine.",
    errno.ENOENT: "Its interpreter or dynamic linker is missing; install it.",
    errno.E2BIG: "Give it fewer or shorter arguments and variables.",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A program to execute, and its environment.

    Attributes:
        program: The file to execute.
        argv: Its arguments, with the command's own name first.
        environ: Its whole environment.
        added: The variables that are missing from the caller's environment, or have another value there.
        notes: What the user should know, one sentence each.
        kind: The allocator that serves ``malloc``, as far as the variables tell.
    """

    program: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    added: Mapping[str, str]
    notes: tuple[str, ...]
    kind: Kind = "glibc"

    @property
    def in_force(self) -> str:
        """What is in force, in one line."""
        settings = [f"{name}={value}" for name, value in self.added.items()]
        allocator = "the C library" if self.kind == "glibc" else self.kind
        return f"in force: {' '.join(settings) or 'nothing added'}; malloc is served by {allocator}"

    def __str__(self) -> str:
        """The plan as a shell command: ``env NAME=VALUE ... COMMAND``."""
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
    """Decide how a program is started, without changing anything.

    Args:
        command: The program, to be found on ``PATH``, and its arguments.
        preset: Variables for the program; those that the caller's environment already has stay.
        allocator: What serves its ``malloc``. ``"auto"`` preloads the best allocator that is installed. If there is
            none, it makes glibc return freed memory, as ``"glibc"`` does. ``"none"`` changes nothing.
        environ: The caller's environment. Default: that of this process, as it was inherited.
        choose: Chooses the variables that give the program its allocator.

    Returns:
        The plan.

    Raises:
        CannotRun: The command was not found, or cannot be executed.
        InvalidOption: The command is empty or contains a NUL byte, the allocator is not available, or a variable of the
            preset is set in the caller's environment to a value on which its reader crashes.
        NotSupported: An allocator was named, but nothing can be preloaded here.
    """
    _require_command(command)
    before = inherited() if environ is None else dict(environ)
    program = locate(command[0], before)
    _require_usable(before)
    settings = preset.environment(before) if preset else {}
    preloading, notes = choose(allocator, program, before | settings, arguments=command[1:])
    kind = _kind({**before, **settings, **preloading})
    read = {name: value for name, value in settings.items() if _is_read(name, preset, kind)}
    added = read | preloading
    return Plan(program, tuple(command), before | added, added, (*_kept(preset, before), *notes), kind)


def become(plan: Plan) -> NoReturn:
    """Replace this process by the program of a plan. This must be called in the main thread.

    No ``finally`` block, no ``atexit`` function and no other thread of this process continues, and nothing is flushed.
    ``SIGPIPE`` and ``SIGXFSZ``, which Python ignores from its start, are reset to their default: whether this process
    inherited them as ignored, as from systemd, is not known. All other signals stay as inherited.

    Args:
        plan: The result of :func:`plan`.

    Raises:
        CannotRun: The system refused. This process continues as before.
    """
    before = _reset_signals()
    try:
        os.execve(plan.program, plan.argv, dict(plan.environ))  # noqa: S606 - a shell would change the command
    except OSError as error:
        for number, handler in before.items():
            signal.signal(number, handler)
        fix = _FIXES.get(error.errno or 0, "execve(2) lists the possible reasons.")
        raise CannotRun(plan.program, why=str(error.strerror), fix=fix, status=NOT_EXECUTABLE) from error


def inherited(environ: Mapping[str, str] = os.environ, *, root: Path = _proc.ROOT) -> dict[str, str]:
    """The environment, without the variables that Python itself has added.

    In the C locale Python sets ``LC_CTYPE`` at its start (PEP 538), and the program would inherit it.

    Args:
        environ: The current variables of this process.
        root: The folder that holds ``proc``.
    """
    initial = _proc.if_readable(_proc.environment, None, root)
    if initial is None:  # not Linux
        return dict(environ)
    kept = {name: value for name, value in environ.items() if name != "LC_CTYPE"}
    return kept | ({"LC_CTYPE": initial["LC_CTYPE"]} if "LC_CTYPE" in initial else {})


def _kind(environ: Mapping[str, str]) -> Kind:
    """The allocator that serves ``malloc``: the first that is preloaded, otherwise the C library's."""
    for entry in re.split(r"[\s:]+", environ.get(PRELOAD, "")):
        kind = kind_of(entry)
        if kind is not None:
            return kind
    return "glibc"


def _is_read(name: str, preset: Preset | None, kind: Kind) -> bool:
    """Whether a preset's variable is one that this allocator reads, or that is no allocator's."""
    reader = next(knob.reader for knob in (preset.knobs if preset else ()) if knob.name == name)
    return reader not in _ALLOCATORS or _ALLOCATORS[reader] == kind


def _require_usable(environ: Mapping[str, str]) -> None:
    value = environ.get(_capacities.IDEEP)
    if value is not None and (crash := _capacities.why_unusable(_capacities.IDEEP, value)) is not None:
        raise InvalidOption(_capacities.IDEEP, value, why=crash, fix="Remove it, or set it to 1 or more, such as 256.")


def _require_command(command: Sequence[str]) -> None:
    if not command:
        raise InvalidOption("command", "", why="must not be empty", fix="Write it after --, with its arguments.")
    for word in command:
        if "\0" in word:
            raise InvalidOption("command", word, why="must not contain a NUL byte", fix="Remove it.")


def _kept(preset: Preset | None, environ: Mapping[str, str]) -> list[str]:
    """Notes on variables of the preset that have another value in the caller's environment."""
    return [
        f"your {knob.name}={environ[knob.name]} stays; the preset has {knob.value}"
        for knob in (preset.knobs if preset else ())
        if environ.get(knob.name, knob.value) != knob.value
    ]


def _reset_signals() -> dict[int, signal._HANDLER]:
    """Undo what Python's start did to signals, and return the handlers that they had.

    The exec itself resets signals that have a handler. From here on a Ctrl-C ends this process immediately: one that
    Python has received but not yet raised would be lost.
    """
    changed = [getattr(signal, name) for name in _IGNORED_BY_PYTHON]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        changed.append(signal.SIGINT)
    return {number: signal.signal(number, signal.SIG_DFL) for number in changed}
