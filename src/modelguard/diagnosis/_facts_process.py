"""Facts about a running service, read from ``/proc``. Nothing runs in the process, and nothing in it is changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from modelguard.diagnosis import _redact
from modelguard.diagnosis._commands import resolve
from modelguard.diagnosis._deployment import Deployment, deployment_of, known_variables
from modelguard.diagnosis._facts import Facts, Interpreter, Role, Server, ServiceProcess
from modelguard.diagnosis._facts_machine import machine
from modelguard.diagnosis._patch_level import patch_level
from modelguard.environment import _memory, _proc, _remote
from modelguard.environment._proc import MemoryMapping
from modelguard.errors import InvalidOption, NotSupported

__all__ = ["facts_of_process"]

_ARGUMENT = "--pid"
_FIX = "Give the id of a running process of yours, as pgrep prints it."

#: Compiled parts of the standard library have the interpreter's version in their names: ``.cpython-313t-``.
_VERSION = re.compile(r"\.(cpython|pypy)-?(\d)(\d+)(t?)[-.]|libpython(\d)\.(\d+)(t?)\.so")
_PROGRAM = re.compile(r"/python(\d)\.(\d+)(t?)$")
_PYTHON_FILE = re.compile(r"^/.*/(?:python\d[\d.]*t?|libpython\d[\d.]*t?\.so[\d.]*)$")
_TORCH = re.compile(r"/libtorch_cpu\.(?:so|dylib)")


def facts_of_process(pid: str | int, *, root: Path = _proc.ROOT) -> Facts:
    """Look at a process and everything that it has started, as one service.

    Args:
        pid: The id of the process.
        root: The folder that holds ``proc``, ``sys`` and ``dev``.

    Raises:
        InvalidOption: It is not a process id, the process does not exist, or it belongs to another user.
        NotSupported: There is no ``/proc``, or it hides what has to be read.
    """
    number = _number(pid)
    try:
        return _facts(number, root)
    except ProcessLookupError:
        raise InvalidOption(_ARGUMENT, number, why="does not exist", fix=_FIX) from None
    except PermissionError:
        why = "belongs to another user, or /proc is hidden from this user"
        raise InvalidOption(_ARGUMENT, number, why=why, fix="Run modelguard doctor as its owner, or as root.") from None


def _facts(pid: int, root: Path) -> Facts:
    if not _proc.is_mounted(root):
        raise NotSupported("modelguard doctor --pid", reason="there is no /proc; examine the command: -- COMMAND")
    seen = _remote.observe(pid, root=root)
    words, environ = _words(pid, root), _proc.if_readable(_proc.environment, pid, root) or {}
    deployment = _deployment(pid, words, environ, root)
    processes = tuple(_tree(pid, root))
    return Facts(
        f"process {pid}: {_redact.redact_command(words, environ)}",
        machine(root, pid),
        (*known_variables(environ, f"the environment that process {pid} was started with"), *deployment.variables),
        _with_patch(_interpreter(_proc.maps(pid, root)), pid, root),
        seen.problems,
        _with_running_workers(deployment.server, words, processes),
        processes,
        deployment.app,
        deployment.config,
        (*deployment.unknown, *_unreadable(pid, environ), *_above(pid, root)),
    )


def _number(pid: str | int) -> int:
    text = str(pid)
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) < 1:
        raise InvalidOption(_ARGUMENT, pid, why="must be a process id", fix=_FIX)
    return int(text)


def _deployment(pid: int, words: Sequence[str], environ: Mapping[str, str], root: Path) -> Deployment:
    """What the command line says, where the program has not written a title over it."""
    if not words or re.match(r"gunicorn: ", words[0]):
        return Deployment(unknown=("the process has overwritten its command line, so its options are not known",))
    cwd = _proc.if_readable(_proc.working_directory, pid, root)
    if cwd is None:
        return Deployment(unknown=("the folder that it runs in is hidden, so its source was not read",))
    return deployment_of(resolve(words, environ, look_up=False), cwd)


def _with_running_workers(
    server: Server | None, words: Sequence[str], processes: tuple[ServiceProcess, ...]
) -> Server | None:
    """The server with the workers that really run, which count more than what was asked for."""
    if server is None and words and words[0].startswith("gunicorn: master"):
        server = Server("gunicorn", workers=None, forks=True, preload=None, max_requests=None)
    running = [process for process in processes if process.role == ("forked" if server and server.forks else "spawned")]
    if server is None or not running:
        return server
    return replace(server, workers=len(running), workers_by="the running processes")


def _tree(pid: int, root: Path) -> Iterator[ServiceProcess]:
    """The process and everything that it has started. What ends meanwhile is left out."""
    main = _words(pid, root)
    yield _process(pid, "main", root)
    for process in _proc.descendants(pid, _proc.processes(root)):
        if process.pid != pid:
            with suppress(OSError):
                yield _process(process.pid, _role(_words(process.pid, root), main), root)


def _role(words: Sequence[str], main: Sequence[str]) -> Role:
    if words == main or _is_gunicorn_worker(words):
        return "forked"
    return "spawned" if any("spawn_main" in word for word in words) else "other"


def _is_gunicorn_worker(words: Sequence[str]) -> bool:
    """Recognised by the title that it gives itself where setproctitle is installed."""
    return bool(words) and words[0].startswith("gunicorn: worker")


def _process(pid: int, role: Role, root: Path) -> ServiceProcess:
    usage = _memory.usage(pid, root=root)
    mappings = _proc.if_readable(_proc.maps, pid, root) or []
    status = _proc.if_readable(_proc.status, pid, root) or {}
    swap = int(status.get("VmSwap", "0 kB").split()[0]) * 1024
    return ServiceProcess(
        pid,
        role,
        private=(usage.private_dirty or 0) + swap,
        shared=usage.shared_dirty or 0,
        swap=swap,
        threads=int(status.get("Threads", "1")),
        torch=any(_TORCH.search(mapping.name) for mapping in mappings),
        cuda=any(mapping.name.startswith("/dev/nvidia") for mapping in mappings),
        compiled=sum(mapping.end - mapping.start for mapping in mappings if _is_compiled_at_run_time(mapping)),
    )


def _is_compiled_at_run_time(mapping: MemoryMapping) -> bool:
    """Whether it is executable memory without a file: machine code that a library has made, such as oneDNN."""
    return "x" in mapping.access and not mapping.is_file and not mapping.name.startswith("[v")  # [vdso], [vsyscall]


def _interpreter(mappings: Iterable[MemoryMapping]) -> Interpreter | None:
    names = [mapping.name for mapping in mappings]
    for name in names:
        if found := _VERSION.search(name):
            major, minor, free_threaded = found.group(2, 3, 4) if found[2] else found.group(5, 6, 7)
            name_of_kind = "PyPy" if found[1] == "pypy" else "CPython"
            return Interpreter((int(major), int(minor)), name_of_kind, bool(free_threaded))
    # Where no part of the standard library is loaded from a file of its own, the program's name has to do.
    for name in names:
        if found := _PROGRAM.search(name):
            return Interpreter((int(found[1]), int(found[2])), free_threaded=bool(found[3]))
    return None


def _with_patch(python: Interpreter | None, pid: int, root: Path) -> Interpreter | None:
    """The interpreter with its patch, which is in the program or in its library, as the process sees them."""
    if python is None:
        return None
    files = (mapping.name for mapping in _proc.maps(pid, root) if _PYTHON_FILE.search(mapping.name))
    levels = (patch_level(root / f"proc/{pid}/root{name}", python.version) for name in dict.fromkeys(files))
    return replace(python, micro=next((level for level in levels if level is not None), None))


def _above(pid: int, root: Path) -> Iterator[str]:
    """Where the process is itself a worker, its parent is the one to examine."""
    known = _proc.stat(pid, root)
    words = _words(pid, root)
    parent = known.parent if known else 0
    if parent and words and (words == _words(parent, root) or _is_gunicorn_worker(words)):
        yield f"it is a worker of process {parent}; --pid {parent} examines the whole service"


def _unreadable(pid: int, environ: Mapping[str, str]) -> Iterator[str]:
    yield "variables that the program has set for itself since it started cannot be seen from outside"
    if not environ:
        yield f"process {pid} has overwritten the environment that it was started with"


def _words(pid: int, root: Path) -> tuple[str, ...]:
    return _proc.if_readable(_proc.command_line, pid, root) or ()
