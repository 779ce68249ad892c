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
import shutil
import signal
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from modelguard import _units
from modelguard.environment import _allocator, _allocator_files, _knobs
from modelguard.environment._allocator_files import PACKAGES, RUNNING, Kind, is_static, kind_of
from modelguard.environment._allocator_problems import entries
from modelguard.errors import CannotRun, InvalidOption, NotSupported
from modelguard.facts import _proc

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from modelguard.environment._allocator import AllocatorInfo
    from modelguard.environment._allocator_files import AllocatorFile
    from modelguard.environment._presets import Preset


# The program that a command starts: its file, and whether ``LD_PRELOAD`` has an effect in it.

#: A shell's exit statuses for commands that cannot be executed or found (POSIX, Shell Command Language 2.8.2).
NOT_EXECUTABLE = 126
NOT_FOUND = 127

#: How many #! lines the kernel follows (fs/exec.c, exec_binprm), and how long such a line may be (BINPRM_BUF_SIZE).
_SCRIPTS = 5
_LINE = 256


def locate(command: str, environ: Mapping[str, str]) -> str:
    path = os.pathsep.join(folder or os.curdir for folder in os.get_exec_path(environ))
    if (file := shutil.which(command, path=path)) is not None:
        return file
    if (file := shutil.which(command, os.F_OK, path)) is not None:
        fix = f"Make it executable (chmod +x), or start it through its interpreter, such as: python {file}."
        raise CannotRun(command, why="is not executable", fix=fix, status=NOT_EXECUTABLE)
    if os.sep in command and Path(command).is_dir():
        raise CannotRun(command, why="is a folder", fix="Name a program.", status=NOT_EXECUTABLE)
    why = "does not exist" if os.sep in command else "was not found in any folder on PATH"
    raise CannotRun(command, why=why, fix=_fix_missing(command), status=NOT_FOUND)


def ignores_preload(path: str, *, starts_others: bool = False) -> str | None:
    file = binary(path)
    if _is_privileged(file):
        return f"{file} runs with more privileges than its caller, so the dynamic linker ignores LD_PRELOAD"
    if not starts_others and is_static(file):
        return f"{file} is statically linked, so nothing reads LD_PRELOAD"
    return None


def _fix_missing(command: str) -> str:
    first = command.split(maxsplit=1)[:1]
    if first and first[0] != command:
        return f"Write it without quotes around the whole command: -- {command}"
    if re.match(r"[A-Za-z_][A-Za-z0-9_]*=", command):
        return f"To set a variable, write env before it: -- env {command} ..."
    return "Correct the name, install it, or give its path."


def binary(path: str) -> str:
    """The binary that is executed in the end: for a script its interpreter, which may be a script itself."""
    file = path
    for _ in range(_SCRIPTS):
        line = b""
        with suppress(OSError), Path(file).open("rb") as stream:  # a file may be executable without being readable
            line = stream.readline(_LINE)
        if not line.startswith(b"#!"):
            break
        words = re.match(rb"#![ \t]*([^ \t\n]*)", line)  # a carriage return is part of the name, as in the kernel
        interpreter = os.fsdecode(words[1]) if words else ""
        if not Path(interpreter).is_file():
            why = f"names an interpreter that does not exist: {interpreter!r}"
            fix = "Correct its first line, or install the interpreter."
            raise CannotRun(path, why=why, fix=fix, status=NOT_EXECUTABLE)
        file = interpreter
    return file


def _is_privileged(file: str) -> bool:
    state, user = Path(file).stat(), os.getuid()
    if state.st_mode & stat.S_ISUID and state.st_uid != user:
        return True
    # On a file that its group may not execute, the bit means mandatory locking.
    if state.st_mode & stat.S_ISGID and state.st_mode & stat.S_IXGRP and state.st_gid != os.getgid():
        return True
    with suppress(OSError, AttributeError):  # the file has no capabilities, or the system does not support them
        return user != 0 and bool(os.getxattr(file, "security.capability"))
    return False


# Choose the allocator of a program that is about to be started, and the variables that select it.

#: ``"auto"``: the best one that is installed, otherwise the same as ``"glibc"``. ``"glibc"``: nothing is preloaded, and
#: glibc is set to return freed memory. ``"none"``: nothing is changed.
Allocator = Literal["auto", "jemalloc", "mimalloc", "tcmalloc", "glibc", "none"]

PRELOAD = "LD_PRELOAD"

_ARGUMENT = "allocator"

#: For reloads and CPU time see ``docs/environment.md``, "The allocator".
_KEEPS = (
    "mimalloc keeps most of the memory that reloads free; MIMALLOC_RESET_DELAY=0 (from 2.1 on MIMALLOC_PURGE_DELAY=0) "
    "makes it return this memory, at up to 1.6 times the CPU time; jemalloc returns it without that: "
    f"apt install {PACKAGES['jemalloc']}"
)

#: The settings that make mimalloc return freed pages immediately: of 2.0 and earlier, and of 2.1 and later.
_RETURNING = ("MIMALLOC_RESET_DELAY", "MIMALLOC_DECOMMIT_DELAY", "MIMALLOC_PURGE_DELAY")

_NONE_USABLE = (
    "no other allocator can be preloaded, so glibc stays and is set to return freed memory, at some cost of CPU time; "
    f"to use jemalloc instead: apt install {PACKAGES['jemalloc']}"
)


def choose_preload(
    wanted: Allocator, program: str, environ: Mapping[str, str], *, arguments: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    _units.one_of(wanted, _ARGUMENT, get_args(Allocator), what="allocator")
    if wanted == "none":
        return {}, []
    obstacle: str | None = f"LD_PRELOAD requires Linux, and this is {sys.platform}"
    if sys.platform.startswith("linux"):
        obstacle = ignores_preload(program, starts_others=bool(arguments))
    if obstacle:
        return _without(wanted, obstacle)
    if (current := _preloaded()) is not None:
        return {}, [f"{current.path} is preloaded already and serves malloc; it stays, and nothing is added"]
    file = binary(program)
    static = f"{file} is statically linked, so the allocator changes only in the programs that it starts"
    passed_on = [static] if is_static(file) else []
    if wanted == "glibc":
        return _glibc(environ), passed_on
    kind = None if wanted == "auto" else wanted
    # Which program a static one starts is unknown; most probably it is one like this.
    target = RUNNING if passed_on else Path(file)
    suitable = _allocator_files.find(kind, environ=environ, program=target)
    if not suitable and (unsuitable := _allocator_files.find(kind, environ=environ)):
        return _without(wanted, f"{file} cannot load {unsuitable[0].path}, which is for another C library or machine")
    variables, notes = _preload(wanted, environ, suitable, target)
    return variables, [*passed_on, *notes]


def _without(wanted: Allocator, reason: str) -> tuple[dict[str, str], list[str]]:
    """Continue without a preload, unless the user has named a library."""
    if wanted in PACKAGES:
        raise NotSupported(f"preloading {wanted}", reason=reason)
    return {}, [f"the allocator is not changed: {reason}"]


def _preload(
    wanted: Allocator, environ: Mapping[str, str], candidates: Sequence[AllocatorFile], target: Path
) -> tuple[dict[str, str], list[str]]:
    rejections: list[InvalidOption] = []
    for library in candidates:
        try:
            _allocator_files.check_preload(library.path, argument=_ARGUMENT, program=target)
        except InvalidOption as rejection:
            rejections.append(rejection)
            continue
        keeps = library.kind == "mimalloc" and not any(name in environ for name in _RETURNING)
        own = environ.get(PRELOAD)  # the caller's own come first
        variables = {PRELOAD: f"{own}:{library.path}" if own else library.path}
        return variables, [*map(str, rejections), *([_KEEPS] if keeps else ())]
    if wanted == "auto":
        return _glibc(environ), [*map(str, rejections), _NONE_USABLE]
    fix = f'Install it (Debian, Ubuntu: apt install {PACKAGES[wanted]}), or write "auto".'
    raise rejections[0] if rejections else InvalidOption(_ARGUMENT, wanted, why="is not installed", fix=fix)


def _glibc(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make glibc return freed memory; the user's own values take precedence."""
    return {knob.name: knob.value for knob in _knobs.GLIBC_MEMORY if knob.name not in environ}


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
    program: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    added: Mapping[str, str]
    notes: tuple[str, ...]
    kind: Kind = "glibc"

    @property
    def settings(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.added.items()]

    @property
    def in_force(self) -> str:
        allocator = {"glibc": "the C library", "unknown": "the library that is preloaded"}.get(self.kind, self.kind)
        return f"in force: {' '.join(self.settings) or 'nothing added'}; malloc is served by {allocator}"

    def __str__(self) -> str:
        return shlex.join(["env", *self.settings, *self.argv])


def plan(
    command: Sequence[str],
    *,
    preset: Preset | None = None,
    allocator: Allocator = "none",
    environ: Mapping[str, str] | None = None,
    choose: Callable[..., tuple[dict[str, str], list[str]]] = choose_preload,
) -> Plan:
    """Decide how a program is started, without changing anything."""
    _units.command(command)
    before = inherited() if environ is None else dict(environ)
    program = locate(command[0], before)
    _knobs.require_usable(_knobs.IDEEP, before.get(_knobs.IDEEP, "1"))
    settings = preset.environment(before) if preset else {}
    preloading, notes = choose(allocator, program, before | settings, arguments=command[1:])
    kind = _kind(preloading)
    knobs = preset.knobs if preset else ()
    unread = {knob.name for knob in knobs if _ALLOCATORS.get(knob.reader, kind) != kind}
    added = {name: value for name, value in settings.items() if name not in unread} | preloading
    kept = [
        f"your {knob.name}={before[knob.name]} stays; the preset has {knob.value}"
        for knob in knobs
        if before.get(knob.name, knob.value) != knob.value
    ]
    return Plan(program, tuple(command), before | added, added, (*kept, *notes), kind)


def become(plan: Plan) -> NoReturn:
    """Replace this process by the program of a plan. This must be called in the main thread.

    No ``finally`` block, no ``atexit`` function and no other thread of this process continues, and nothing is flushed.
    ``SIGPIPE`` and ``SIGXFSZ``, which Python ignores from its start, are reset to their default: whether this process
    inherited them as ignored, as from systemd, is not known. All other signals stay as inherited.
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
    """
    initial = _proc.if_readable(_proc.environment, None, root)
    if initial is None:  # not Linux
        return dict(environ)
    kept = {name: value for name, value in environ.items() if name != "LC_CTYPE"}
    return kept | ({"LC_CTYPE": initial["LC_CTYPE"]} if "LC_CTYPE" in initial else {})


def _preloaded() -> AllocatorInfo | None:
    """The allocator that is preloaded into this process, and so into the program, which gets the same entries."""
    current = _allocator.detect() if sys.platform.startswith("linux") else None
    return current if current is not None and current.how == "preloaded" else None


def _kind(preloading: Mapping[str, str]) -> Kind:
    """The allocator that will serve ``malloc``: not any that an entry only names, as that may be missing."""
    if (current := _preloaded()) is not None:
        return current.kind
    added = entries(preloading.get(PRELOAD, ""))[-1:]  # behind the caller's own
    return (kind_of(added[0]) if added else None) or "glibc"


def _reset_signals() -> dict[int, signal._HANDLER]:
    """Undo what Python's start did to signals, and return the handlers that they had.

    The exec itself resets signals that have a handler. From here on a Ctrl-C ends this process immediately: one that
    Python has received but not yet raised would be lost.
    """
    changed = [getattr(signal, name) for name in _IGNORED_BY_PYTHON]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        changed.append(signal.SIGINT)
    return {number: signal.signal(number, signal.SIG_DFL) for number in changed}
