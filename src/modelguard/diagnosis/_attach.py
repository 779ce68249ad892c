"""Asks a running process about itself: through its control socket, or by a script that CPython 3.14 runs in it."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from modelguard.control import _client
from modelguard.diagnosis._facts import Facts, Interpreter
from modelguard.diagnosis._facts_process import (
    above,
    facts_of_tree,
    interpreter_of,
    named_process,
    process_number,
    readable,
)
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported
from modelguard.facts import _proc

_FIRST = (3, 14)
#: Seconds until the process has to run the script, and until it has to answer.
_PATIENCE, _ANSWER = 10.0, 30.0
#: What is put into the process: the first starts it.
_SCRIPTS = ("_inside", "_probe", "_census", "_holders")
_OPTION = "--pid"


class Inside:
    """A process that answers."""

    def __init__(self, pid: int, connection: socket.socket, answers: TextIO) -> None:
        self.pid = pid
        self._connection = connection
        self._answers = answers

    def ask(self, question: str) -> dict[str, Any]:
        """Ask it.

        Args:
            question: ``"describe"``, ``"look"``, ``"held"`` and a number of calls, ``"uses"`` or ``"trim"``.

        Raises:
            InvalidOption: It has ended, or does not answer.
        """
        try:
            self._connection.sendall(f"{question}\n".encode())
            line = self._answers.readline()
        except OSError:
            line = ""
        if not line:
            alive = _proc.stat(self.pid) is not None
            why = f"has not answered for {_ANSWER:g} seconds" if alive else "has ended meanwhile"
            raise InvalidOption(_OPTION, self.pid, why=why, fix="Try again, or look from outside.")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def inside_of(pid: int, interpreter: Interpreter | None) -> Iterator[Inside]:
    """Talk to a process: through its control socket, or else by a script that is put into it.

    The socket needs no right to trace the process, and the two may run different versions of Python.

    Args:
        pid: The process.
        interpreter: Its Python; None if it has none.

    Raises:
        InvalidOption: There is no such process, it is no Python, belongs to another user, or does not answer.
        NotSupported: It has no control socket, and no script can be put into it.
    """
    try:
        connection = _client.inspect(pid)
    except _client.Unreachable:
        require_attachable(pid, interpreter)
        with attached(pid) as inside:
            yield inside
    else:
        with _talk(pid, connection) as inside:
            yield inside


def require_attachable(
    pid: int,
    interpreter: Interpreter | None,
    *,
    version: tuple[int, int] = sys.version_info[:2],
    user: int | None = None,
    root: Path = _proc.ROOT,
) -> None:
    """Check what can be checked before a process is touched.

    Args:
        pid: The process.
        interpreter: Its Python; None if it has none.
        version: The version of this Python.
        user: The user of this process. Default: that of this process.
        root: The folder that holds ``proc``.

    Raises:
        NotSupported: This Python is older than 3.14, or the process runs another version, or in a container.
        InvalidOption: There is no such process, it is no Python, or it belongs to another user.
    """
    mine, text = (os.geteuid() if user is None else user), ".".join(map(str, version))
    if version < _FIRST:
        reason = (
            f"process {pid} has not called modelguard.control.listen(), and without that it requires Python 3.14 "
            f"(this is {text})"
        )
        raise NotSupported("looking inside a running process", reason=reason)
    owner = _proc.if_readable(_proc.owner, pid, root)
    if owner is None:
        raise InvalidOption(_OPTION, pid, why="does not exist", fix="Give the id of a running process of yours.")
    if mine not in (0, owner):
        why = "belongs to another user"
        raise InvalidOption(_OPTION, pid, why=why, fix="Run modelguard as its owner, or as root.")
    if not _same_root(pid, root):
        reason = f"process {pid} runs in a container or a chroot; run modelguard inside of it"
        raise NotSupported("looking inside a running process", reason=reason)
    if interpreter is None or interpreter.name != "CPython":
        raise InvalidOption(_OPTION, pid, why="does not run CPython", fix="Give the id of the Python process itself.")
    if interpreter.version != version:
        reason = f"process {pid} runs on {interpreter}, and this is Python {text}; run modelguard with its Python"
        raise NotSupported("looking inside a running process", reason=reason)


@contextmanager
def attached(pid: int, *, run: Callable[[int, str], None] | None = None) -> Iterator[Inside]:
    """Put a script into a process, and talk to it over a socket. The script ends with the block.

    Args:
        pid: The process; :func:`require_attachable` has checked it.
        run: Runs a script in a process. Default: ``sys.remote_exec``.

    Raises:
        InvalidOption: It does not run the script within 10 seconds.
        NotSupported: This process may not trace it, or it does not allow that.
    """
    with tempfile.TemporaryDirectory(prefix="modelguard-", ignore_cleanup_errors=True) as folder:
        script, address = Path(folder, "script.py"), str(Path(folder, "socket"))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen(1)
            listening.settimeout(_PATIENCE)
            script.write_text(_script(address), encoding="utf-8")
            _give(pid, Path(folder), script, Path(address))
            _execute(pid, str(script), run)
            try:
                connection = listening.accept()[0]
            except TimeoutError:
                why = f"has run no Python code in its main thread for {_PATIENCE:g} seconds"
                raise InvalidOption(_OPTION, pid, why=why, fix="Send it a request, and try again.") from None
        with _talk(pid, connection) as inside:
            yield inside


@contextmanager
def _talk(pid: int, connection: socket.socket) -> Iterator[Inside]:
    connection.settimeout(_ANSWER)
    with connection, connection.makefile("r", encoding="utf-8") as answers:
        yield Inside(pid, connection, answers)


def _script(address: str) -> str:
    """The script, with all that it needs. Its names are those of this package, whose own objects are no finding."""
    here = Path(__file__)
    sources = {name: here.with_name(f"{name}.py").read_text(encoding="utf-8") for name in _SCRIPTS}
    return (
        f"sources = {sources!r}\nnames = {{'__name__': 'modelguard.diagnosis._inside'}}\n"
        f"exec(sources['_inside'], names)\nnames['begin']({address!r}, sources)\n"
    )


def _give(pid: int, *paths: Path) -> None:
    """Let the process's user read them, where root looks at somebody else's process."""
    owner = _proc.owner(pid)
    if owner != os.geteuid():
        for path in paths:
            os.chown(path, owner, -1)


def _execute(pid: int, script: str, run: Callable[[int, str], None] | None) -> None:
    feature = f"looking inside process {pid}"
    execute = run or sys.remote_exec  # type: ignore[attr-defined] # checked by require_attachable
    try:
        execute(pid, script)
    except PermissionError:
        reason = (
            "the kernel does not let this process trace it; run as root, give CAP_SYS_PTRACE to the container, or set "
            "kernel.yama.ptrace_scope to 0"
        )
        raise NotSupported(feature, reason=reason) from None
    except ProcessLookupError:
        raise InvalidOption(_OPTION, pid, why="has ended meanwhile", fix="Give the id of a running process.") from None
    except (RuntimeError, OSError) as error:
        reason = f"its Python does not allow that, or is another build ({error})"
        raise NotSupported(feature, reason=reason) from None


def _same_root(pid: int, root: Path) -> bool:
    """Whether the process sees the same files as this one."""
    try:
        theirs, mine = (Path(_proc.folder(each, root), "root").stat() for each in (pid, None))
    except OSError:  # it has ended, or hides it: what follows will say so
        return True
    return (theirs.st_dev, theirs.st_ino) == (mine.st_dev, mine.st_ino)


# Facts about a running service, from outside and from inside: its processes are asked where that is possible.


def facts_from_inside(pid: str | int) -> Facts:
    """Look at a process and everything that it has started, and ask those that can be asked.

    They have called ``modelguard.control.listen()``, or run the same CPython as this process, 3.14 or later: a short
    script then runs in each of them, in a thread of its own.

    Args:
        pid: The id of the process.

    Raises:
        InvalidOption: It is not a process id, the process does not exist, belongs to another user, or does not answer.
        NotSupported: It has no control socket, and this Python is older than 3.14, the process runs another one, or in
            a container, or this process has no right to trace it.
    """
    number = process_number(pid)
    if not _proc.is_mounted():
        raise NotSupported("modelguard doctor --pid", reason="there is no /proc to read it from")
    with readable(number):
        _proc.maps(number)  # so that of no process that does not exist it is said how it could be asked
    answers: dict[int, Mapping[str, Any]] = {number: _describe(number)}
    unknown: list[str] = ["which variables it has set for itself since it started, cannot be asked"]
    for process in _proc.descendants(number, _proc.processes()):
        if process.pid != number and interpreter_of(process.pid) is not None:
            try:
                answers[process.pid] = _describe(process.pid)
            except ModelGuardError as error:
                unknown.append(f"no answer from inside of {process.pid}: {error}")
    with readable(number):
        facts = facts_of_tree(number, named_process(number), answers)
    return replace(facts, unknown=(*unknown, *facts.unknown, *above(number)))


def _describe(pid: int) -> dict[str, Any]:
    with inside_of(pid, interpreter_of(pid)) as inside:
        return inside.ask("describe")
