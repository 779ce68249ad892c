"""Facts about a running service, read from ``/proc``. Nothing is executed in it, and nothing of it is changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from modelguard.diagnosis import secrecy
from modelguard.diagnosis.describing import Described, describe, inherited
from modelguard.diagnosis.facts import Facts, Interpreter, Process, Role, Server
from modelguard.diagnosis.gathering_machine import fields, machine
from modelguard.diagnosis.launches import follow
from modelguard.environment import allocator, memory
from modelguard.errors import InvalidOption, NotSupported

__all__ = ["gather_process"]

_ARGUMENT = "--pid"
_FIX = "Give the number of a running process of yours, as pgrep tells it."

#: Compiled parts of the standard library have the interpreter's version in their names: ``.cpython-313t-``.
_VERSION = re.compile(r"\.(cpython|pypy)-?(\d)(\d+)(t?)[-.]|libpython(\d)\.(\d+)(t?)\.so")
_TORCH = re.compile(r"/libtorch_cpu\.(?:so|dylib)")


def gather_process(pid: str | int, *, root: Path = Path("/")) -> Facts:
    """Look at a process and all below it, as one service.

    Args:
        pid: The number of the process.
        root: Where ``/proc``, ``/sys`` and ``/dev`` are found.

    Raises:
        InvalidOption: It is no number, there is no such process, or it belongs to someone else.
        NotSupported: There is no ``/proc``, or it hides what has to be read.
    """
    number = _number(pid)
    try:
        return _gather(number, root)
    except ProcessLookupError:
        raise InvalidOption(_ARGUMENT, number, why="there is no such process", fix=_FIX) from None
    except PermissionError:
        why = "the process belongs to someone else, or /proc is hidden from this user"
        raise InvalidOption(_ARGUMENT, number, why=why, fix="Run modelguard doctor as its user, or as root.") from None


def _gather(pid: int, root: Path) -> Facts:
    proc = root / "proc"
    if not (proc / "self").exists():
        raise NotSupported("modelguard doctor --pid", reason="there is no /proc; judge the command instead: -- COMMAND")
    seen = allocator.observe(pid, root)
    words, environ = _words(proc / str(pid)), _environ(proc / str(pid))
    described = _describe(words, environ, proc / str(pid))
    processes = tuple(_tree(pid, root))
    unknown = [*described.unknown, *_unreadable(pid, environ), *_above(pid, proc)]
    maps = _text(proc / str(pid) / "maps")
    return Facts(
        f"process {pid}: {secrecy.clean_command(words, environ)}",
        machine(root, pid),
        (*inherited(environ, f"the environment that process {pid} was started with"), *described.variables),
        _interpreter(maps),
        seen.problems,
        _with_running_workers(described.server, words, processes),
        processes,
        described.app,
        described.config,
        tuple(unknown),
    )


def _number(pid: str | int) -> int:
    text = str(pid)
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) < 1:
        raise InvalidOption(_ARGUMENT, pid, why="it is not the number of a process", fix=_FIX)
    return int(text)


def _describe(words: list[str], environ: Mapping[str, str], folder: Path) -> Described:
    """What the command line says, where the program has not written a title over it."""
    if not words or re.match(r"gunicorn: ", words[0]):
        return Described(unknown=("the process has overwritten its command line, so its options are not known",))
    try:
        cwd = (folder / "cwd").readlink()
    except OSError:
        return Described(unknown=("the folder that it runs in is hidden, so its source was not read",))
    return describe(follow(words, environ, look_up=False), cwd)


def _with_running_workers(server: Server | None, words: list[str], processes: tuple[Process, ...]) -> Server | None:
    """What runs counts more than what was asked for."""
    if server is None and words and words[0].startswith("gunicorn: master"):
        server = Server("gunicorn", workers=None, forks=True, preload=None, max_requests=None)
    running = [process for process in processes if process.role == ("forked" if server and server.forks else "spawned")]
    if server is None or not running:
        return server
    return replace(server, workers=len(running), workers_by="the processes that run")


def _tree(pid: int, root: Path) -> Iterator[Process]:
    """The process and all below it. What ends while it is looked at is left out."""
    parents = dict(_parents(root / "proc"))
    main = _words(root / "proc" / str(pid))
    yield _process(pid, "main", root)
    waiting = [pid]
    while waiting:
        parent = waiting.pop(0)
        for child in sorted(child for child, above in parents.items() if above == parent):
            with suppress(OSError):
                words = _words(root / "proc" / str(child))
                yield _process(child, _role(words, main), root)
            waiting.append(child)


def _role(words: list[str], main: list[str]) -> Role:
    if words == main or _is_gunicorn_worker(words):
        return "forked"
    return "spawned" if any("spawn_main" in word for word in words) else "other"


def _is_gunicorn_worker(words: list[str]) -> bool:
    """By the title that it gives itself where setproctitle is installed."""
    return bool(words) and words[0].startswith("gunicorn: worker")


def _process(pid: int, role: Role, root: Path) -> Process:
    folder = root / "proc" / str(pid)
    usage = memory.usage(pid, root=root)
    maps = _text(folder / "maps")
    status = fields(folder / "status")
    swap = int(status.get("VmSwap", "0 kB").split()[0]) * 1024
    return Process(
        pid,
        role,
        private=(usage.private_dirty or 0) + swap,
        shared=usage.shared_dirty or 0,
        swap=swap,
        threads=int(status.get("Threads", "1")),
        torch=_TORCH.search(maps) is not None,
        cuda="/dev/nvidia" in maps,
        compiled=_compiled(maps),
    )


def _compiled(maps: str) -> int:
    """Bytes of executable memory that comes from no file: machine code made at run time."""
    total = 0
    for line in maps.splitlines():
        span, rights, _, _, inode, *name = line.split(maxsplit=5)
        if "x" in rights and inode == "0" and not (name and name[0].startswith("[v")):
            start, end = (int(part, 16) for part in span.split("-"))
            total += end - start
    return total


def _interpreter(maps: str) -> Interpreter | None:
    found = _VERSION.search(maps)
    if found is None:
        return _named_after(maps)
    kind, *numbers = (found[1], found[2], found[3], found[4]) if found[2] else (None, found[5], found[6], found[7])
    return Interpreter((int(numbers[0]), int(numbers[1])), "PyPy" if kind == "pypy" else "CPython", bool(numbers[2]))


def _named_after(maps: str) -> Interpreter | None:
    """By the program's own file, where no part of the standard library is loaded from one."""
    found = re.search(r"/python(\d)\.(\d+)(t?)$", maps, re.MULTILINE)
    return Interpreter((int(found[1]), int(found[2])), free_threaded=bool(found[3])) if found else None


def _parents(proc: Path) -> Iterator[tuple[int, int]]:
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            # "12 (a name) S 11 ...": the name may have blanks and brackets of its own.
            rest = _text(folder / "stat").rpartition(")")[2].split()
            if len(rest) > 1:
                yield int(folder.name), int(rest[1])


def _above(pid: int, proc: Path) -> Iterator[str]:
    """Where the process is itself a copy, its parent is the one to ask about."""
    parent = dict(_parents(proc)).get(pid)
    words = _words(proc / str(pid))
    if parent and words and (words == _words(proc / str(parent)) or _is_gunicorn_worker(words)):
        yield f"it is a worker of process {parent}; --pid {parent} judges the whole service"


def _unreadable(pid: int, environ: Mapping[str, str]) -> Iterator[str]:
    yield "what the program has set for itself since it started cannot be seen from outside"
    if not environ:
        yield f"the environment that process {pid} was started with is not there: it has overwritten it"


def _words(folder: Path) -> list[str]:
    text = _text(folder / "cmdline").rstrip("\0")
    return text.split("\0") if text else []


def _environ(folder: Path) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in _text(folder / "environ").split("\0"))
    return {name: value for name, has_value, value in pairs if has_value}


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    return ""
