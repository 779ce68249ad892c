"""The program that a command starts: where it is, and whether ``LD_PRELOAD`` is in force in it."""

from __future__ import annotations

import os
import re
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from modelguard.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NOT_EXECUTABLE", "NOT_FOUND", "ignores_preload", "locate"]

#: The exit statuses that a shell gives for these (POSIX, Shell Command Language 2.8.2).
NOT_EXECUTABLE = 126
NOT_FOUND = 127

#: How many #! lines the kernel follows (fs/exec.c, exec_binprm), and the bytes of a file that are read here: the
#: program headers stand at its beginning.
_SCRIPTS = 5
_HEAD = 4096

_PT_INTERP = 3  # elf.h


def locate(command: str, environ: Mapping[str, str]) -> str:
    """Find the file that a command stands for, as a shell does.

    Args:
        command: A path if it has a slash in it, otherwise a name to search in the folders of ``PATH``.
        environ: Where ``PATH`` is.

    Returns:
        The file.

    Raises:
        CannotRun: There is none, or it is not executable.
    """
    # Text and not a Path, which would make "./run" to "run": a script is told its own name.
    candidates = (
        [command] if os.sep in command else [f"{folder or '.'}/{command}" for folder in os.get_exec_path(environ)]
    )
    # A folder on the way is passed over, and so is a file that is not executable while another one may follow.
    files = [candidate for candidate in candidates if Path(candidate).is_file()]
    for file in files:
        if os.access(file, os.X_OK):
            return file
    if files:
        fix = f"Make it executable (chmod +x), or start it through its interpreter, such as: python {files[0]}."
        raise CannotRun(command, why="the file is not executable", fix=fix, status=NOT_EXECUTABLE)
    if os.sep in command and Path(command).is_dir():
        raise CannotRun(command, why="it is a folder", fix="Name a program.", status=NOT_EXECUTABLE)
    where = "there is no such file" if os.sep in command else "no folder on PATH has a program of this name"
    raise CannotRun(command, why=where, fix=_fix_missing(command), status=NOT_FOUND)


def ignores_preload(path: str, *, user: int | None = None, group: int | None = None) -> str | None:
    """Tell why ``LD_PRELOAD`` would do nothing in a program.

    Args:
        path: An executable file. For a script it is the interpreter of its first line that counts.
        user: The user id that starts it, by default this process's.
        group: Likewise the group id.

    Returns:
        The reason as a clause, None if nothing speaks against it or the file cannot be read.

    Raises:
        CannotRun: The interpreter of a script is missing.
    """
    file = _interpreter(path)
    if _is_privileged(file, os.getuid() if user is None else user, os.getgid() if group is None else group):
        return f"{file} runs with more rights than its caller, so the dynamic linker ignores LD_PRELOAD in it"
    if _is_static(_head(file)):
        return f"{file} is statically linked, so nothing reads LD_PRELOAD in it"
    return None


def _fix_missing(command: str) -> str:
    first = command.split(maxsplit=1)[:1]
    if first and first[0] != command:
        return f"Write its words apart, without quotes around them all: -- {command}"
    return "Correct the name, install it, or give its path."


def _interpreter(path: str) -> str:
    """The file that is executed in the end: the script's interpreter, and of that, if it is a script, its own."""
    file = path
    for _ in range(_SCRIPTS):
        head = _head(file)
        if not head.startswith(b"#!"):
            break
        words = re.match(rb"#![ \t]*([^ \t\n]*)", head)  # a carriage return belongs to the name, as for the kernel
        interpreter = os.fsdecode(words[1]) if words else ""
        if not Path(interpreter).is_file():
            why = f"its first line names the interpreter {interpreter!r}, which is not there"
            raise CannotRun(path, why=why, fix="Correct that line, or install it.", status=NOT_EXECUTABLE)
        file = interpreter
    return file


def _head(file: str) -> bytes:
    try:
        with Path(file).open("rb") as stream:
            return stream.read(_HEAD)
    except OSError:  # executable, and not readable: nothing can be told
        return b""


def _is_privileged(file: str, user: int, group: int) -> bool:
    """Whether the kernel starts it in what ld.so(8) calls secure-execution mode."""
    about = Path(file).stat()
    if about.st_mode & stat.S_ISUID and about.st_uid != user:
        return True
    # Without the right to execute, the bit means mandatory locking.
    if about.st_mode & stat.S_ISGID and about.st_mode & stat.S_IXGRP and about.st_gid != group:
        return True
    return user != 0 and _has_capabilities(file)


def _has_capabilities(file: str) -> bool:
    try:
        return bool(os.getxattr(file, "security.capability"))
    except (OSError, AttributeError):  # it has none, or this system has no such thing
        return False


def _is_static(head: bytes) -> bool:
    """Whether an ELF file names no dynamic linker (elf(5), e_phoff to e_phnum and PT_INTERP)."""
    if not head.startswith(b"\x7fELF"):
        return False
    wide, order = head[4:5] == b"\2", "<" if head[5:6] == b"\1" else ">"
    try:
        (offset,) = struct.unpack_from(f"{order}Q", head, 32) if wide else struct.unpack_from(f"{order}I", head, 28)
        size, count = struct.unpack_from(f"{order}HH", head, 54 if wide else 42)
        kinds = [struct.unpack_from(f"{order}I", head, offset + size * number)[0] for number in range(count)]
    except struct.error:  # the headers stand elsewhere: nothing can be told
        return False
    return _PT_INTERP not in kinds
