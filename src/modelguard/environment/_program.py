"""The program that a command starts: its file, and whether ``LD_PRELOAD`` has an effect in it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from modelguard.environment import _elf
from modelguard.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NOT_EXECUTABLE", "NOT_FOUND", "binary", "ignores_preload", "is_static", "locate"]

#: A shell's exit statuses for commands that cannot be executed or found (POSIX, Shell Command Language 2.8.2).
NOT_EXECUTABLE = 126
NOT_FOUND = 127

#: How many #! lines the kernel follows (fs/exec.c, exec_binprm), and how long such a line may be (BINPRM_BUF_SIZE).
_SCRIPTS = 5
_LINE = 256


def locate(command: str, environ: Mapping[str, str]) -> str:
    """Find the file of a command, as a shell does.

    Args:
        command: A path if it has a slash in it, otherwise a name to search in the folders of ``PATH``.
        environ: The variables, for ``PATH``.

    Returns:
        The file.

    Raises:
        CannotRun: There is none, or it is not executable.
    """
    # Strings, not Paths, which would change "./run" to "run": a script sees the name by which it was called.
    candidates = (
        [command] if os.sep in command else [f"{folder or '.'}/{command}" for folder in os.get_exec_path(environ)]
    )
    # Skip folders, and files that are not executable if an executable one follows.
    files = [candidate for candidate in candidates if Path(candidate).is_file()]
    for file in files:
        if os.access(file, os.X_OK):
            return file
    if files:
        fix = f"Make it executable (chmod +x), or start it through its interpreter, such as: python {files[0]}."
        raise CannotRun(command, why="is not executable", fix=fix, status=NOT_EXECUTABLE)
    if os.sep in command and Path(command).is_dir():
        raise CannotRun(command, why="is a folder", fix="Name a program.", status=NOT_EXECUTABLE)
    why = "does not exist" if os.sep in command else "was not found in any folder on PATH"
    raise CannotRun(command, why=why, fix=_fix_missing(command), status=NOT_FOUND)


def ignores_preload(
    path: str, *, starts_others: bool = False, user: int | None = None, group: int | None = None
) -> str | None:
    """Find out why ``LD_PRELOAD`` would have no effect in a program.

    Args:
        path: An executable file. For a script, its interpreter is checked.
        starts_others: Whether the effect in the programs that this one starts counts too. A static program ignores the
            variable, but passes it on.
        user: The id of the user that starts it. Default: that of this process.
        group: The id of the group. Default: that of this process.

    Returns:
        The reason as a clause; None if ``LD_PRELOAD`` works, or if the file cannot be read.

    Raises:
        CannotRun: The interpreter of a script is missing.
    """
    file = binary(path)
    if _is_privileged(file, os.getuid() if user is None else user, os.getgid() if group is None else group):
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
    """The binary that is executed in the end: for a script its interpreter, which may be a script itself.

    Args:
        path: An executable file.

    Raises:
        CannotRun: The interpreter of a script is missing.
    """
    file = path
    for _ in range(_SCRIPTS):
        line = _first_line(file)
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


def _first_line(file: str) -> bytes:
    try:
        with Path(file).open("rb") as stream:
            return stream.readline(_LINE)
    except OSError:  # a file may be executable without being readable
        return b""


def _is_privileged(file: str, user: int, group: int) -> bool:
    """Whether the kernel starts it in what ld.so(8) calls secure-execution mode."""
    state = Path(file).stat()
    if state.st_mode & stat.S_ISUID and state.st_uid != user:
        return True
    # On a file that its group may not execute, the bit means mandatory locking.
    if state.st_mode & stat.S_ISGID and state.st_mode & stat.S_IXGRP and state.st_gid != group:
        return True
    return user != 0 and _has_capabilities(file)


def _has_capabilities(file: str) -> bool:
    try:
        return bool(os.getxattr(file, "security.capability"))
    except (OSError, AttributeError):  # the file has none, or the system does not support them
        return False


def is_static(file: str) -> bool:
    """Whether a binary names no dynamic linker; False for what is not an ELF file, or cannot be read."""
    try:
        with _elf.opened(file) as program:
            return program.interpreter is None
    except (_elf.NotElf, OSError):
        return False
