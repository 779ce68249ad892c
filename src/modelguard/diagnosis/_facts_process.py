"""Facts about a running service, read from ``/proc``, and from its processes' own answers where there are any."""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from modelguard.control import _client
from modelguard.diagnosis import _redact
from modelguard.diagnosis._counts import compiled_in
from modelguard.diagnosis._facts import (
    Facts,
    Guarded,
    Inside,
    Interpreter,
    Machine,
    Moment,
    Role,
    Server,
    ServiceProcess,
    Variable,
    known_variables,
    misspelt_variables,
)
from modelguard.environment import _allocator, _allocator_problems
from modelguard.environment._allocator_files import Problem
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported
from modelguard.facts import _memory, _proc
from modelguard.facts._proc import MemoryMapping, model_libraries

# Facts about this machine and this environment: everything there is where no service was named.


def facts_of_machine(environ: Mapping[str, str] = os.environ, *, root: Path = _proc.ROOT) -> Facts:
    """Look at this process's own environment: its variables, its allocator, its limits.

    Args:
        environ: The variables.
        root: The folder that holds ``proc``, ``sys`` and ``dev``.
    """
    python = this_interpreter()
    return Facts(
        f"this environment, {python} in {sys.prefix}",
        machine(root),
        known_variables(environ, "this environment"),
        python,
        _problems(),
        misspelt=tuple(misspelt_variables(environ, "this environment")),
    )


def machine(root: Path, pid: int | None = None) -> Machine:
    if not _proc.is_mounted(root):
        return Machine(cpus=_memory.available_cpus(root=root))
    limit = _memory.memory_limit(pid, root=root)
    return Machine(
        cpus=_memory.available_cpus(pid, root=root),
        limit=limit,
        swapped=_swapped(root),
        strain=_memory.strain(limit, pid, root=root),
    )


def this_interpreter() -> Interpreter:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    version = sys.version_info
    return Interpreter((version[0], version[1]), platform.python_implementation(), free_threaded, version[2])


def _problems() -> tuple[Problem, ...]:
    with suppress(NotSupported):
        return _allocator.detect().problems
    return ()


def _swapped(root: Path) -> int | None:
    figures = _proc.if_readable(_proc.meminfo, root) or {}
    if "SwapTotal" not in figures or "SwapFree" not in figures:
        return None
    return figures["SwapTotal"] - figures["SwapFree"]


# Which patch of a Python a file holds, where only the minor version is in its name.


def patch_level(file: Path, version: tuple[int, int]) -> int | None:
    """The last number of an interpreter's version, from the text of it in its program or library; None if unknown."""
    text = "\\.".join(map(str, version)).encode()
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = re.search(rb"(?<![\d.])" + text + rb"\.(\d{1,3})\+?\x00", content)
            return int(found[1]) if found else None
    except (OSError, ValueError):  # not there, not readable, or empty
        return None


# The answers of the probe, as facts. They come from another program, so nothing in them is taken for granted.


def inside(answer: Mapping[str, Any]) -> Inside:
    version = (*(int(each) for each in answer.get("version", ())), 0, 0, 0)[:3]
    return Inside(
        version=(version[0], version[1], version[2]),
        free_threaded=bool(answer.get("free_threaded")),
        gil_for=None if (gil_for := answer.get("gil_for")) is None else tuple(map(str, gil_for)),
        huge_pages=bool(answer.get("huge_pages")),
        malloc=answer.get("malloc"),
        frozen=int(answer.get("frozen", 0)),
        tracked=int(answer.get("tracked", 0)),
        pools=tuple((str(name), int(count)) for name, count in dict(answer.get("pools", {})).items()),
        cuda=bool(answer.get("cuda")),
        guards=tuple(_guard(each) for each in answer.get("guards", ())),
        variables=tuple(_variable(*each) for each in answer.get("variables", ())),
        asgi=answer.get("asgi"),
    )


def server_answer(answer: Mapping[str, Any]) -> Server | None:
    """Read the server's own settings; None if the process runs in no server that the probe knows."""
    found = answer.get("server")
    if not isinstance(found, dict):
        return None
    return Server(
        str(found["kind"]),
        workers=int(found.get("workers") or 1),
        forks=found["kind"] == "gunicorn",
        preload=found.get("preload_app", False if found["kind"] != "gunicorn" else None),
        config=_config(found.get("config")),
        worker_class=str(found.get("worker_class_str", "")),
        asgi_worker=str(found.get("asgi_worker", "")),
        threads=int(found.get("threads") or 1),
        max_requests=int(found.get("max_requests") or found.get("limit_max_requests") or 0),
        jitter=int(found.get("max_requests_jitter") or found.get("limit_max_requests_jitter") or 0),
        reload=bool(found.get("reload") or found.get("should_reload")),
        timeout=float(found.get("timeout") or 0),
        grace=float(found.get("graceful_timeout") or 0),
    )


def _config(name: object) -> str:
    """The configuration's name: gunicorn gives that of its default file whether or not it exists."""
    text = str(name or "")
    return "" if text == "./gunicorn.conf.py" else _redact.redact(text, {})


def _guard(given: Mapping[str, Any]) -> Guarded:
    policy = given.get("policy")
    loaded = float(given.get("load_seconds") or 0)
    unshared = bool(given.get("unshared"))
    return Guarded(str(given.get("name", "?")), None if policy is None else str(policy), loaded, unshared)


def _variable(name: str, value: str, moment: str, where: str) -> Variable:
    kind: Moment = "after import" if moment == "after import" else "app"
    return Variable(name, value, kind, _redact.redact(where, {}))


_ARGUMENT = "--pid"
_FIX = "Give the id of a running process of yours, as pgrep prints it."

#: Compiled parts of the standard library have the interpreter's version in their names: ``.cpython-313t-``.
_VERSION = re.compile(r"\.(cpython|pypy)-?(\d)(\d+)(t?)[-.]|libpython(\d)\.(\d+)(t?)\.so")
_PROGRAM = re.compile(r"/python(\d)\.(\d+)(t?)$")
_SERVERS = ("granian", "gunicorn", "hypercorn", "uvicorn")
#: Words of a command line among which the server's name is: ``python -m uvicorn``, ``/usr/bin/python3 bin/gunicorn``.
_FIRST_WORDS = 3

#: What the processes have said of themselves, by their ids.
Answers = Mapping[int, Mapping[str, Any]]

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
    number = process_number(pid)
    with readable(number, root):
        return _facts(number, root)


@contextmanager
def readable(pid: int, root: Path = _proc.ROOT) -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        raise InvalidOption(_ARGUMENT, pid, why=_proc.absence(pid, root), fix=_FIX) from None
    except PermissionError:
        why = "belongs to another user, or /proc is hidden from this user"
        raise InvalidOption(_ARGUMENT, pid, why=why, fix="Run this command as its owner, or as root.") from None


def named_process(pid: int, root: Path = _proc.ROOT) -> str:
    environ = _proc.if_readable(_proc.environment, pid, root) or {}
    return f"process {pid}: {_redact.redact_command(_words(pid, root), environ)}"


def interpreter_of(pid: int, root: Path = _proc.ROOT) -> Interpreter | None:
    """The Python that a process runs on; None if it runs on none."""
    return _interpreter(_proc.if_readable(_proc.maps, pid, root) or ())


def _facts(pid: int, root: Path) -> Facts:
    if not _proc.is_mounted(root):
        raise NotSupported("modelguard doctor --pid", reason="there is no /proc to read it from")
    facts = facts_of_tree(pid, named_process(pid, root), root=root)
    outside = "what it has set for itself since it started, and its server's settings, cannot be seen from outside"
    return replace(facts, unknown=(outside, *facts.unknown, *above(pid, root)))


def facts_of_tree(pid: int, subject: str, answers: Answers = MappingProxyType({}), *, root: Path = _proc.ROOT) -> Facts:
    seen = _allocator_problems.observe(pid, root=root)
    environ = _proc.if_readable(_proc.environment, pid, root) or {}
    processes = tuple(_tree(pid, root, answers))
    unknown = () if environ else (f"process {pid} has overwritten the environment that it was started with",)
    where = f"the environment that process {pid} was started with"
    return Facts(
        subject,
        machine(root, pid),
        (*known_variables(environ, where), *_set_later(processes)),
        _with_patch(_interpreter(_proc.maps(pid, root)), pid, root),
        seen.problems,
        _server(_words(pid, root), processes, answers),
        processes,
        tuple(_stale_metrics(environ, root)),
        unknown=unknown,
        misspelt=tuple(misspelt_variables(environ, where)),
    )


def _stale_metrics(environ: Mapping[str, str], root: Path) -> Iterator[str]:
    """Files that prometheus_client has written for processes that do not exist."""
    folder = environ.get("PROMETHEUS_MULTIPROC_DIR")
    names = sorted(file.name for file in Path(folder).glob("*.db")) if folder else []
    for name in names:
        owner = re.fullmatch(r".+_(\d+)\.db", name)
        if owner and not _proc.folder(int(owner[1]), root).exists():
            yield name


def process_number(pid: str | int) -> int:
    text = str(pid)
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) < 1:
        raise InvalidOption(_ARGUMENT, pid, why="must be a process id", fix=_FIX)
    return int(text)


def _set_later(processes: Iterable[ServiceProcess]) -> Iterator[Variable]:
    processes = tuple(processes)
    workers = [process for process in processes if process.role in ("forked", "spawned")]
    seen: dict[Variable, None] = {}
    for process in workers or processes:
        seen.update(dict.fromkeys(process.inside.variables if process.inside else ()))
    yield from seen


def _server(words: Sequence[str], processes: tuple[ServiceProcess, ...], answers: Answers) -> Server | None:
    """The server as it says itself, with the workers that really run; from outside only its kind is known."""
    said = (server_answer(answers[process.pid]) for process in processes if process.pid in answers)
    server = next((each for each in said if each is not None), None) or _from_outside(words)
    workers = [process for process in processes if process.role in ("forked", "spawned")]
    if server is None or not workers:
        return server
    return replace(server, workers=len(workers), forks=any(worker.role == "forked" for worker in workers))


def _from_outside(words: Sequence[str]) -> Server | None:
    first = [Path(word).name for word in words[:_FIRST_WORDS]]
    if words and words[0].startswith("gunicorn: master"):
        first = ["gunicorn"]
    return next((Server(name, forks=name == "gunicorn") for name in first if name in _SERVERS), None)


def _tree(pid: int, root: Path, answers: Answers) -> Iterator[ServiceProcess]:
    main = _words(pid, root)
    found = [(one, _words(one.pid, root)) for one in _proc.tree(pid, root)]
    molds = {one.pid: one.parent for one, words in found if any("modelguard.isolation._" in word for word in words)}
    owners = set(molds.values()) - molds.keys()
    yield _process(pid, "main", root, answers, owners)
    for one, words in found:
        if one.pid != pid:
            with suppress(OSError):
                yield _process(one.pid, _role(words, main), root, answers, owners)


def _role(words: Sequence[str], main: Sequence[str]) -> Role:
    if words == main or _is_gunicorn_worker(words):
        return "forked"
    return "spawned" if any("spawn_main" in word for word in words) else "other"


def _is_gunicorn_worker(words: Sequence[str]) -> bool:
    return bool(words) and words[0].startswith("gunicorn: worker")


def _process(pid: int, role: Role, root: Path, answers: Answers, owners: Container[int]) -> ServiceProcess:
    usage = _memory.usage(pid, root=root)
    mappings = _proc.if_readable(_proc.smaps, pid, root) or _proc.if_readable(_proc.maps, pid, root) or []
    status = _proc.if_readable(_proc.status, pid, root) or {}
    swap = int(status.get("VmSwap", "0 kB").split()[0]) * 1024
    return ServiceProcess(
        pid,
        role,
        private=_memory.private_of(pid, root),
        shared=usage.shared_dirty or 0,
        swap=swap,
        threads=int(status.get("Threads", "1")),
        torch=any(_TORCH.search(mapping.name) for mapping in mappings),
        libraries=model_libraries(mappings),
        isolates=pid in owners,
        cuda=any(mapping.name.startswith("/dev/nvidia") for mapping in mappings),
        compiled=compiled_in(mappings),
        inside=inside(answers[pid]) if pid in answers else None,
    )


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
    if python is None:
        return None
    files = (mapping.name for mapping in _proc.maps(pid, root) if _PYTHON_FILE.search(mapping.name))
    levels = (patch_level(root / f"proc/{pid}/root{name}", python.version) for name in dict.fromkeys(files))
    return replace(python, micro=next((level for level in levels if level is not None), None))


def above(pid: int, root: Path = _proc.ROOT) -> Iterator[str]:
    known = _proc.stat(pid, root)
    words = _words(pid, root)
    parent = known.parent if known else 0
    if parent and words and (words == _words(parent, root) or _is_gunicorn_worker(words)):
        yield f"it is a worker of process {parent}; --pid {parent} examines the whole service"


def _words(pid: int, root: Path) -> tuple[str, ...]:
    return _proc.if_readable(_proc.command_line, pid, root) or ()


# The same from inside: a process is asked through its control socket, or by a script that CPython 3.14 runs in it.

_FIRST = (3, 14)
#: Seconds until the process has to run the script, and until it has to answer.
_PATIENCE, _ANSWER = 10.0, 30.0
#: What is put into the process: the first starts it.
_SCRIPTS = ("_inside", "_census", "_holders")


class Connection:
    def __init__(self, pid: int, connection: socket.socket, answers: TextIO) -> None:
        self.pid = pid
        self._connection = connection
        self._answers = answers

    def ask(self, question: str) -> dict[str, Any]:
        try:
            self._connection.sendall(f"{question}\n".encode())
            line = self._answers.readline()
        except OSError:
            line = ""
        if not line:
            alive = _proc.stat(self.pid) is not None
            why = f"has not answered for {_ANSWER:g} seconds" if alive else "has ended meanwhile"
            raise InvalidOption(_ARGUMENT, self.pid, why=why, fix="Try again, or look from outside.")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def inside_of(pid: int, interpreter: Interpreter | None) -> Iterator[Connection]:
    """Talk to a process: through its control socket, or else by a script that is put into it.

    The socket needs no right to trace the process, and the two may run different versions of Python.
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
    mine, text = (os.geteuid() if user is None else user), ".".join(map(str, version))
    if version < _FIRST:
        reason = (
            f"process {pid} has not called modelguard.control.listen(), and without that it requires Python 3.14 "
            f"(this is {text})"
        )
        raise NotSupported("looking inside a running process", reason=reason)
    owner = _proc.if_readable(_proc.owner, pid, root)
    if owner is None:
        raise InvalidOption(_ARGUMENT, pid, why="does not exist", fix="Give the id of a running process of yours.")
    if mine not in (0, owner):
        why = "belongs to another user"
        raise InvalidOption(_ARGUMENT, pid, why=why, fix="Run modelguard as its owner, or as root.")
    if not _same_root(pid, root):
        reason = f"process {pid} runs in a container or a chroot; run modelguard inside of it"
        raise NotSupported("looking inside a running process", reason=reason)
    if interpreter is None or interpreter.name != "CPython":
        raise InvalidOption(_ARGUMENT, pid, why="does not run CPython", fix="Give the id of the Python process itself.")
    if interpreter.version != version:
        reason = f"process {pid} runs on {interpreter}, and this is Python {text}; run modelguard with its Python"
        raise NotSupported("looking inside a running process", reason=reason)


@contextmanager
def attached(pid: int, *, run: Callable[[int, str], None] | None = None) -> Iterator[Connection]:
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
                raise InvalidOption(_ARGUMENT, pid, why=why, fix="Send it a request, and try again.") from None
        with _talk(pid, connection) as inside:
            yield inside


@contextmanager
def _talk(pid: int, connection: socket.socket) -> Iterator[Connection]:
    connection.settimeout(_ANSWER)
    with connection, connection.makefile("r", encoding="utf-8") as answers:
        yield Connection(pid, connection, answers)


def _script(address: str) -> str:
    here = Path(__file__)
    sources = {name: here.with_name(f"{name}.py").read_text(encoding="utf-8") for name in _SCRIPTS}
    return (
        f"sources = {sources!r}\nnames = {{'__name__': 'modelguard.diagnosis._inside'}}\n"
        f"exec(sources['_inside'], names)\nnames['begin']({address!r}, sources)\n"
    )


def _give(pid: int, *paths: Path) -> None:
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
        raise InvalidOption(
            _ARGUMENT, pid, why="has ended meanwhile", fix="Give the id of a running process."
        ) from None
    except (RuntimeError, OSError) as error:
        reason = f"its Python does not allow that, or is another build ({error})"
        raise NotSupported(feature, reason=reason) from None


def _same_root(pid: int, root: Path) -> bool:
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
    for process in _proc.tree(number):
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
