"""Facts about a running service, read from ``/proc``, and from its processes' own answers where there are any."""

import json
import mmap
import os
import platform
import re
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO, TypeVar

from modelguard import _units
from modelguard.control import _client
from modelguard.diagnosis import _facts, _inside
from modelguard.diagnosis._counts import compiled_in
from modelguard.diagnosis._facts import Facts, Guarded, Inside, Machine, Role, Server, ServiceProcess, Variable
from modelguard.environment import _allocator, _allocator_problems
from modelguard.environment._allocator_files import Problem
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported
from modelguard.facts import _memory, _proc, _redact
from modelguard.facts._proc import Interpreter, interpreter_in, model_libraries

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
        _facts.known_variables(environ, "this environment"),
        python,
        _problems(environ),
        misspelt=tuple(_facts.misspelt_variables(environ, "this environment")),
    )


def machine(root: Path, pid: int | None = None) -> Machine:
    if not _proc.is_mounted(root):
        return Machine(cpus=_memory.available_cpus(root=root))
    limit, figures = _memory.memory_limit(pid, root=root), _proc.if_readable(_proc.meminfo, root) or {}
    swapped = figures["SwapTotal"] - figures["SwapFree"] if {"SwapTotal", "SwapFree"} <= figures.keys() else None
    return Machine(_memory.available_cpus(pid, root=root), limit, swapped, _memory.strain(limit, pid, root=root))


def this_interpreter() -> Interpreter:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    major, minor, micro, *_ = sys.version_info
    return Interpreter((major, minor), platform.python_implementation(), free_threaded, micro)


def _problems(environ: Mapping[str, str]) -> tuple[Problem, ...]:
    with suppress(NotSupported):
        return _allocator.detect(environ=environ).problems
    return ()


# The answers of the probe, as facts. They come from another program, so nothing in them is taken for granted.


T = TypeVar("T")


def _read(kind: type[T], given: Mapping[str, Any]) -> T:
    """What is given of these fields, each made into the type of its default."""
    found = {}
    for field in fields(kind):  # type: ignore[arg-type] # a dataclass
        default: Any = field.default
        if (value := given.get(field.name)) is not None:
            found[field.name] = value if default is None else type(default)(value)
    return kind(**found)


def inside(answer: Mapping[str, Any]) -> Inside:
    return replace(
        _read(Inside, {**answer, "pools": dict(answer.get("pools", {})).items()}),
        gil_for=None if (gil_for := answer.get("gil_for")) is None else tuple(map(str, gil_for)),
        guards=tuple(_read(Guarded, each) for each in answer.get("guards", ())),
        variables=tuple(
            Variable(name, value, "after import" if moment == "after import" else "app", _redact.redact(where, {}))
            for name, value, moment, where in answer.get("variables", ())
        ),
    )


def server_answer(answer: Mapping[str, Any]) -> Server | None:
    """Read the server's own settings; None if the process runs in no server that the probe knows."""
    found = answer.get("server")
    if not isinstance(found, dict):
        return None
    forks = found["kind"] == "gunicorn"
    # gunicorn gives the name of its default file whether or not that exists.
    config = "" if found.get("config") == "./gunicorn.conf.py" else _redact.redact(str(found.get("config") or ""), {})
    given = {"preload": None if forks else False, **found, "forks": forks, "config": config}
    return _read(Server, {"max_requests": 0, **{name: value for name, value in given.items() if value is not None}})


_FIX = "Give the id of a running process of yours, as pgrep prints it."
_AS_OWNER = "Run modelguard as its owner, or as root."

_SERVERS = ("granian", "gunicorn", "hypercorn", "uvicorn")
#: Words of a command line among which the server's name is: ``python -m uvicorn``, ``/usr/bin/python3 bin/gunicorn``.
_FIRST_WORDS = 3

#: What the processes have said of themselves, by their ids.
Answers = Mapping[int, Mapping[str, Any]]

_PYTHON_FILE = re.compile(r"^/.*/(?:python\d[\d.]*t?|libpython\d[\d.]*t?\.so[\d.]*)$")
_TORCH = re.compile(r"/libtorch_cpu\.(?:so|dylib)")
#: From so many files of ended processes on, a scrape takes a twentieth of a second more.
_MANY_METRICS = 100


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
    require_proc(root)
    outside = "what it has set for itself since it started, and its server's settings, cannot be seen from outside"
    return _facts_of(number, {}, [outside], root)


def _facts_of(pid: int, answers: Answers, unknown: Sequence[str], root: Path = _proc.ROOT) -> Facts:
    with readable(pid, root):
        facts = facts_of_tree(pid, named_process(pid, root), answers, root=root)
        return replace(facts, unknown=(*unknown, *facts.unknown, *above(pid, root)))


@contextmanager
def readable(pid: int, root: Path = _proc.ROOT) -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        raise _refused(pid, _proc.absence(pid, root)) from None
    except PermissionError:
        raise _refused(pid, "belongs to another user, or /proc is hidden from this user", _AS_OWNER) from None


def _refused(pid: object, why: str, fix: str = _FIX) -> InvalidOption:
    return InvalidOption("--pid", pid, why=why, fix=fix)


def named_process(pid: int, root: Path = _proc.ROOT) -> str:
    environ = _proc.if_readable(_proc.environment, pid, root) or {}
    return f"process {pid}: {_redact.redact_command(_words(pid, root), environ)}"


def interpreter_of(pid: int, root: Path = _proc.ROOT) -> Interpreter | None:
    """The Python that a process runs on; None if it runs on none."""
    return interpreter_in(_proc.if_readable(_proc.maps, pid, root) or ())


def require_proc(root: Path = _proc.ROOT) -> None:
    if not _proc.is_mounted(root):
        raise NotSupported("looking at a process", reason="there is no /proc to read it from")


def facts_of_tree(pid: int, subject: str, answers: Answers = MappingProxyType({}), *, root: Path = _proc.ROOT) -> Facts:
    seen = _allocator_problems.observe(pid, root=root)
    environ = _proc.if_readable(_proc.environment, pid, root) or {}
    processes = tuple(_tree(pid, root, answers))
    python = _with_patch(interpreter_in(_proc.maps(pid, root)), pid, root)
    unknown = [] if environ else [f"process {pid} has overwritten the environment that it was started with"]
    if python is None:
        unknown.append(
            f"process {pid} runs no Python, or one that was not recognised: most checks have nothing to look at"
        )
    where = f"the environment that process {pid} was started with"
    set_later = (variable for process in _workers(processes) or processes for variable in process.said.variables)
    variables = (*_facts.known_variables(environ, where), *dict.fromkeys(set_later))
    return Facts(
        subject,
        machine(root, pid),
        variables,
        python,
        seen.problems,
        _server(_words(pid, root), processes, answers),
        processes,
        tuple(_stale_metrics({each.name: each.value for each in variables}, pid, root)),
        unknown=tuple(unknown),
        misspelt=tuple(_facts.misspelt_variables(environ, where)),
    )


def _stale_metrics(environ: Mapping[str, str], pid: int, root: Path) -> Iterator[str]:
    """Files of processes that do not exist, as far as prometheus_client should not read them, or not so many.

    What a worker has counted stays in the sums when it has ended. So counters and histograms of this run belong there.
    """
    folder = environ.get("PROMETHEUS_MULTIPROC_DIR")
    # In the process's own folder: the variable may be relative.
    files = sorted((_proc.folder(pid, root) / "cwd" / folder).glob("*.db")) if folder else []
    owners = ((file, re.fullmatch(r".+_(\d+)\.db", file.name)) for file in files)
    ended = [file for file, owner in owners if owner and not _proc.folder(int(owner[1]), root).exists()]
    started = _started(pid, root)
    for file in ended:
        with suppress(OSError):  # it has just been removed, or given to a new worker
            earlier = started is None or file.stat().st_mtime < started
            if earlier or file.name.startswith("gauge_live") or len(ended) >= _MANY_METRICS:
                yield file.name


def _started(pid: int, root: Path) -> float | None:
    """When a process has started, in seconds since the epoch; None if that is not known."""
    known, up = _proc.stat(pid, root), _proc.if_readable((root / "proc" / "uptime").read_text)
    if known is None or up is None:
        return None
    age = float(up.split()[0]) - known.started / os.sysconf("SC_CLK_TCK")
    return time.time() - age if age >= 0 else None  # a container may have an uptime of its own


def process_number(pid: str | int) -> int:
    return _units.process_id(_units.as_number(str(pid)), "--pid", fix=_FIX)


def _workers(processes: Iterable[ServiceProcess]) -> list[ServiceProcess]:
    return [process for process in processes if process.role in ("forked", "spawned")]


def _server(words: Sequence[str], processes: tuple[ServiceProcess, ...], answers: Answers) -> Server:
    """The server as it says itself, with the workers that really run; from outside only its kind is known."""
    names = [Path(word).name for word in words[:_FIRST_WORDS]]
    if words and words[0].startswith("gunicorn: master"):
        names = ["gunicorn"]
    known = (Server(name, forks=name == "gunicorn") for name in names if name in _SERVERS)
    said = (server_answer(answers[process.pid]) for process in processes if process.pid in answers)
    server, workers = next(filter(None, (*said, *known)), Server()), _workers(processes)
    if not server.kind or not workers:
        return server
    return replace(server, workers=len(workers), forks=any(worker.role == "forked" for worker in workers))


def _tree(pid: int, root: Path, answers: Answers) -> Iterator[ServiceProcess]:
    main = _words(pid, root)
    found = [(one, _words(one.pid, root)) for one in _proc.tree(pid, root)]
    molds = {one.pid: one.parent for one, words in found if _is_isolated(words)}
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


def _is_isolated(words: Sequence[str]) -> bool:
    """Whether it is a mold, a worker or the broker of isolated functions."""
    return any("modelguard.isolation._" in word for word in words)


def _is_gunicorn_worker(words: Sequence[str]) -> bool:
    return bool(words) and words[0].startswith("gunicorn: worker")


def _process(pid: int, role: Role, root: Path, answers: Answers, owners: Container[int]) -> ServiceProcess:
    mappings = _proc.if_readable(_proc.smaps, pid, root) or _proc.if_readable(_proc.maps, pid, root) or []
    status = _proc.if_readable(_proc.status, pid, root) or {}
    return ServiceProcess(
        pid,
        role,
        private=_memory.private_of(pid, root),
        shared=_memory.usage(pid, root=root).shared_dirty or 0,
        swap=int(status.get("VmSwap", "0 kB").split()[0]) * 1024,
        torch=any(_TORCH.search(mapping.name) for mapping in mappings),
        libraries=model_libraries(mappings),
        isolates=pid in owners,
        cuda=any(mapping.name.startswith("/dev/nvidia") for mapping in mappings),
        compiled=compiled_in(mappings),
        inside=inside(answers[pid]) if pid in answers else None,
    )


def _with_patch(python: Interpreter | None, pid: int, root: Path) -> Interpreter | None:
    """With the last number of its version, from the text of it in its program or library."""
    if python is None:
        return None
    whole = re.compile(rb"(?<![\d.])%d\.%d\.(\d{1,3})\+?\x00" % python.version)
    for name in dict.fromkeys(mapping.name for mapping in _proc.maps(pid, root) if _PYTHON_FILE.search(mapping.name)):
        with (
            suppress(OSError, ValueError),  # not there, not readable, or empty
            (root / f"proc/{pid}/root{name}").open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if found := whole.search(content):
                return python._replace(micro=int(found[1]))
    return python


def above(pid: int, root: Path = _proc.ROOT) -> Iterator[str]:
    known = _proc.stat(pid, root)
    words = _words(pid, root)
    parent = known.parent if known else 0
    if parent and words and (words == _words(parent, root) or _is_gunicorn_worker(words)):
        yield f"it is a worker of process {parent}; --pid {parent} examines the whole service"


def _words(pid: int, root: Path) -> tuple[str, ...]:
    return _proc.if_readable(_proc.command_line, pid, root) or ()


# The same from inside: a process is asked through its control socket, or by a script that CPython 3.14 runs in it.

_FIRST, _THIS = (3, 14), sys.version_info[:2]
#: Seconds until the process has to run the script, and until it has to answer.
_PATIENCE, _ANSWER = 10.0, 30.0


#: Asks a process a question about itself.
Ask = Callable[[str], dict[str, Any]]


@contextmanager
def inside_of(pid: int, interpreter: Interpreter | None) -> Iterator[Ask]:
    """Talk to a process: through its control socket, or else by a script that is put into it.

    The socket needs no right to trace the process, and the two may run different versions of Python.
    """
    try:
        connection = _client.inspect(pid)
    except _client.Busy as error:
        raise NotSupported("looking inside a running process", reason=str(error)) from None
    except _client.Unreachable as error:
        require_attachable(pid, interpreter, str(error))
        connection = attached(pid)
    connection.settimeout(_ANSWER)
    with connection, connection.makefile("r", encoding="utf-8") as answers:
        yield partial(_ask, pid, connection, answers)


def _ask(pid: int, connection: socket.socket, answers: TextIO, question: str) -> dict[str, Any]:
    line = ""
    with suppress(OSError):
        connection.sendall(f"{question}\n".encode())
        line = answers.readline()
    if not line:
        why = "no longer answers" if _proc.runs(pid) else "has ended meanwhile"
        raise _refused(pid, why, "Try again, or look from outside.")
    answer: dict[str, Any] = json.loads(line)
    return answer


def require_attachable(pid: int, interpreter: Interpreter | None, unreachable: str, *, root: Path = _proc.ROOT) -> None:
    text = ".".join(map(str, _THIS))
    owner, reason = _proc.if_readable(_proc.owner, pid, root), ""
    if _THIS < _FIRST:
        reason = f"{unreachable}; otherwise it requires Python 3.14 (this is {text})"
    elif owner is None:
        raise _refused(pid, "does not exist")
    elif os.geteuid() not in (0, owner):
        raise _refused(pid, "belongs to another user", _AS_OWNER)
    elif not _same_root(pid, root):
        reason = f"process {pid} runs in a container or a chroot; run modelguard inside of it"
    elif interpreter is None or interpreter.name != "CPython":
        raise _refused(pid, "does not run CPython", "Give the id of the Python process itself.")
    elif interpreter.version != _THIS:
        reason = f"process {pid} runs on {interpreter}, and this is Python {text}; run modelguard with its Python"
    if reason:
        raise NotSupported("looking inside a running process", reason=reason)


def attached(pid: int) -> socket.socket:
    """The connection to the script that is put into a process."""
    with tempfile.TemporaryDirectory(prefix="modelguard-", ignore_cleanup_errors=True) as folder:
        script, address = Path(folder, "script.py"), str(Path(folder, "socket"))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen(1)
            listening.settimeout(_PATIENCE)
            script.write_text(_script(address), encoding="utf-8")
            if (owner := _proc.owner(pid)) != os.geteuid():
                for path in (folder, script, address):
                    os.chown(path, owner, -1)
            _execute(pid, str(script))
            try:
                return listening.accept()[0]
            except TimeoutError:
                why = f"has run no Python code in its main thread for {_PATIENCE:g} seconds"
                raise _refused(pid, why, "Send it a request, and try again.") from None


def _script(address: str) -> str:
    package = Path(__file__).parents[1]
    files = {"_inside": "diagnosis/_inside.py", **_inside.SCRIPTS}  # the first starts the others
    sources = {name: (package / file).read_text(encoding="utf-8") for name, file in files.items()}
    return (
        f"sources = {sources!r}\nnames = {{'__name__': 'modelguard.diagnosis._inside'}}\n"
        f"exec(sources['_inside'], names)\nnames['begin']({address!r}, sources)\n"
    )


def _execute(pid: int, script: str) -> None:
    try:
        sys.remote_exec(pid, script)  # type: ignore[attr-defined] # checked by require_attachable
    except ProcessLookupError:
        raise _refused(pid, "has ended meanwhile") from None
    except (RuntimeError, OSError) as error:
        reason = f"its Python does not allow that, or is another build ({error})"
        if isinstance(error, PermissionError):
            reason = (
                "the kernel does not let this process trace it; run as root, give CAP_SYS_PTRACE to the container, or "
                "set kernel.yama.ptrace_scope to 0"
            )
        raise NotSupported(f"looking inside process {pid}", reason=reason) from None


def _same_root(pid: int, root: Path) -> bool:
    with suppress(OSError):  # it has ended, or hides it: what follows will say so
        return (_proc.folder(pid, root) / "root").samefile(_proc.folder(None, root) / "root")
    return True


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
            a container, or this process has no right to trace it; or too many others wait at its socket.
    """
    number = process_number(pid)
    require_proc()
    with readable(number):
        # Of what does not exist, or has ended, it is not said how it could be asked.
        if not _proc.runs(number) or not _proc.maps(number):
            raise ProcessLookupError
    answers: dict[int, Mapping[str, Any]] = {}
    isolated: list[str] = []
    unknown: list[str] = ["which variables it has set for itself since it started, cannot be asked"]
    for each in dict.fromkeys([number, *(process.pid for process in _proc.tree(number))]):
        if (python := interpreter_of(each)) is None and each != number:
            continue
        try:
            with inside_of(each, python) as ask:
                answers[each] = ask("describe")
        except ModelGuardError as error:
            if each == number:
                raise
            if _THIS < _FIRST and _is_isolated(_words(each, _proc.ROOT)):  # listen() does nothing there
                isolated.append(str(each))
                continue
            unknown.append(f"no answer from inside of {each}: {error}")
    if isolated:
        unknown.append(f"processes of isolated functions take no commands, and were not asked: {', '.join(isolated)}")
    return _facts_of(number, answers, unknown)
