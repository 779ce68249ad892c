"""Answers questions about the process that it runs in.

A script, never imported by modelguard, as the process may have no modelguard, or another one. It uses only the standard
library, and imports nothing at its start that Python has not imported already. It is put into a process by
``sys.remote_exec`` or run by its control socket (``begin``, ``answer``), or stands in ``PYTHONPATH`` as the
``sitecustomize`` of a service that the doctor starts.
"""

from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any

# Questions that come over a socket.


#: What it needs, beside itself: the files, from the package on.
SCRIPTS = {
    "_census": "diagnosis/_census.py",
    "_holders": "facts/_holders.py",
    "_loaded_files": "environment/_loaded_files.py",
}


def begin(address: str, sources: dict[str, str]) -> None:
    """Start the thread that answers: the main thread, which runs this, may be serving a request."""
    import threading

    threading.Thread(target=_serve, args=(address, sources), name="modelguard-inside", daemon=True).start()


def _serve(address: str, sources: dict[str, str]) -> None:
    import socket

    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            answer(connection, sources)
    except OSError:  # nobody listens any more
        return


def answer(connection: Any, sources: dict[str, str]) -> None:
    """Answer until the other end is closed."""
    import json
    import socket

    scripts: dict[str, dict[str, Any]] = {}
    with connection.makefile(encoding="utf-8") as stream:
        for line in stream:
            try:
                if not scripts:
                    scripts.update({name: _run(name, sources[name]) for name in SCRIPTS})
                question, *words = line.split()
                said = _ANSWERS[question](scripts, *words)
            except Exception as error:  # noqa: BLE001 - what cannot be known is left out
                said = {"failed": type(error).__name__}
            # Without SIGPIPE, whose default the process may have set.
            connection.sendall(json.dumps(said).encode() + b"\n", socket.MSG_NOSIGNAL)


def _run(name: str, source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": f"modelguard.diagnosis.{name}"}
    exec(compile(source, f"<modelguard {name}>", "exec", dont_inherit=True), namespace)  # noqa: S102 - modelguard's own
    return namespace


def _look(scripts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    census = scripts["_census"]
    if "moment so far" not in census:
        census["moment so far"] = census["moment"]()
    counted, types = census["look"]()
    return {"census": counted, "types": types, "libraries": census["loaded"]()}


def _held(scripts: dict[str, dict[str, Any]], calls: str) -> dict[str, Any]:
    """The containers that have grown since the first look, with what holds them."""
    census, holders = scripts["_census"], scripts["_holders"]
    grown = census["grown"](census["moment so far"], int(calls))
    return {"held": [each._asdict() for each in holders["of_growth"](grown)]}


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "describe": lambda scripts: describe(scripts["_loaded_files"]),
    "look": _look,
    "held": _held,
    "uses": lambda scripts: {"uses": scripts["_census"]["guard_uses"]()},
    "trim": lambda scripts: _trim(scripts["_loaded_files"]),
}


# What a process says of itself.

#: Loading one of these loads a library that reads the thread variables.
_NATIVE = ("jax", "numpy", "scipy", "sklearn", "spacy", "tensorflow", "torch", "transformers")

#: What is asked of a server's settings, by what it is called here. No other one is looked at: some hold secrets.
_GUNICORN = {
    "config": "config", "grace": "graceful_timeout", "jitter": "max_requests_jitter", "max_requests": "max_requests",
    "preload": "preload_app", "reload": "reload", "threads": "threads", "timeout": "timeout",
    "worker_class": "worker_class_str",
}  # fmt: skip
_UVICORN = {
    "jitter": "limit_max_requests_jitter", "max_requests": "limit_max_requests", "reload": "should_reload",
    "workers": "workers",
}  # fmt: skip

#: Libraries of thread pools, each with the functions that return the number of threads.
_POOLS = {
    "libgomp": ("omp_get_max_threads",),
    "libiomp5": ("omp_get_max_threads",),
    "libomp": ("omp_get_max_threads",),
    "openblas": ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads"),
}

_COROUTINE = 0x80  # inspect.CO_COROUTINE, without the import


def _trim(script: dict[str, Any]) -> dict[str, Any]:
    import ctypes

    program = ctypes.CDLL(None)
    if "libc.so" in _malloc(script) and hasattr(program, "malloc_trim"):
        program.malloc_trim(0)
    return {}


def describe(script: dict[str, Any]) -> dict[str, Any]:
    """What can be seen of this process at any time, with the script that finds the file that serves ``malloc``."""

    def _allocator() -> dict[str, Any]:
        return {"malloc": _malloc(script)}

    answer: dict[str, Any] = {}
    for question in (_allocator, _python, _objects, _pools, _guards, _server):
        try:
            answer.update(question())
        except Exception as error:  # noqa: BLE001 - what cannot be known is left out
            answer.setdefault("failed", []).append(f"{question.__name__[1:]}: {type(error).__name__}")
    return answer


def _python() -> dict[str, Any]:
    import sysconfig

    return {"gil_for": _gil_for(), "huge_pages": bool(sysconfig.get_config_var("PYMALLOC_USE_HUGEPAGES"))}


def _gil_for() -> list[str] | None:
    """The module for which a Python without the GIL has switched it on, if it says so; None if it has not."""
    if "t" not in sys.abiflags or not sys._is_gil_enabled() or sys.flags.gil:  # type: ignore[attr-defined,unused-ignore]  # noqa: SLF001
        return None
    # It warns once, and Python keeps what was warned of beside the code that has warned: here, the import itself.
    warned = vars(sys.modules["_frozen_importlib"]).get("__warningregistry__") or {}
    said = " ".join(str(key[0]) for key in warned if isinstance(key, tuple))
    _, found, after = said.partition("(GIL) has been enabled to load module '")
    return [after.partition("'")[0]] if found else []


def _malloc(script: dict[str, Any]) -> str:
    return os.path.realpath(str(script["file_of"]("malloc")[1]))


def _objects() -> dict[str, Any]:
    import gc

    return {"frozen": gc.get_freeze_count(), "tracked": len(gc.get_objects())}


def _pools() -> dict[str, Any]:
    import ctypes

    pools = {}
    torch = sys.modules.get("torch")
    if torch is not None:
        pools["torch"] = int(torch.get_num_threads())
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as stream:  # noqa: PTH123
        files = {line[line.index("/") :].rstrip("\n") for line in stream if "/" in line and ".so" in line}
    for file in files:
        name = os.path.basename(file)  # noqa: PTH119
        functions = next((functions for library, functions in _POOLS.items() if library in name), ())
        library = ctypes.CDLL(file, mode=os.RTLD_NOLOAD | os.RTLD_LAZY) if functions else None
        for each in reversed(functions):
            if hasattr(library, each):
                pools[name] = int(getattr(library, each)())
    cuda = getattr(torch, "cuda", None)
    return {"pools": pools, "cuda": bool(cuda is not None and cuda.is_initialized())}


def _guards() -> dict[str, Any]:
    module = sys.modules.get("modelguard.lifecycle.guard")
    prepared = sys.modules.get("modelguard.sharing._prefork")
    shares = prepared is not None and prepared.current() is not None
    found = []
    for guard in module.guards if module is not None else ():
        policy = None if guard.reload_on is None else repr(guard.reload_on)
        told = {"name": guard.name, "unshared": guard.prefork and not shares, "policy": policy}
        found.append({**told, "load_seconds": guard.status().load_seconds})
    return {"guards": found}


def _server() -> dict[str, Any]:
    import threading

    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented
    owners = list(_owners(frame))
    for owner in owners:
        if _module(owner) == "gunicorn.arbiter":
            booted = next((each.booted for each in owners if isinstance(getattr(each, "booted", None), bool)), None)
            return {"server": _gunicorn(owner), "asgi": _asgi(owner, owners), "booted": booted}
    for owner in owners:
        if _module(owner).startswith("uvicorn.") and hasattr(owner, "config"):
            return {"server": {"kind": "uvicorn", **_settings(owner.config, _UVICORN)}}
        if _module(owner) == "hypercorn.config":
            return {"server": {"kind": "hypercorn", "workers": owner.workers, "reload": owner.use_reloader}}
    return {}


def _owners(frame: FrameType | None) -> Iterator[Any]:
    while frame is not None:
        for name in ("self", "config"):
            if name in frame.f_locals:
                yield frame.f_locals[name]
        frame = frame.f_back


def _module(owner: object) -> str:
    return str(getattr(type(owner), "__module__", ""))


def _gunicorn(arbiter: Any) -> dict[str, Any]:
    classes = getattr(sys.modules.get("gunicorn.workers"), "SUPPORTED_WORKERS", {})
    known = {"workers": arbiter.num_workers, "asgi_worker": "asgi" if "asgi" in classes else ""}
    return {"kind": "gunicorn", **_settings(arbiter.cfg, _GUNICORN), **known}


def _settings(holder: Any, names: dict[str, str]) -> dict[str, Any]:
    found = {name: getattr(holder, theirs, None) for name, theirs in names.items()}
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float | str)}


def _asgi(arbiter: Any, owners: list[Any]) -> bool | None:
    """Whether the app that gunicorn serves is an ASGI application; None where it is not loaded."""
    served = [getattr(owner, "wsgi", None) for owner in owners]
    app = next((each for each in (*served, getattr(arbiter.app, "callable", None)) if each is not None), None)
    if app is None:
        return None
    app = app.func if type(app).__module__ == "functools" else app  # a partial
    called = app if hasattr(app, "__code__") else type(app).__call__
    return bool(getattr(getattr(called, "__code__", None), "co_flags", 0) & _COROUTINE)


# As ``sitecustomize`` of a service that the doctor starts: it copies this file to a folder of its own, puts that folder
# first in ``PYTHONPATH``, and names it in ``MODELGUARD_PROBE``; without that variable nothing is done. It notes where
# known variables are set, by an audit hook. On its signal, a short-lived thread writes what it sees to a file:
# a signal handler that takes a lock could wait for the code that it has interrupted.


class _Probe:
    def __init__(self, folder: str, names: frozenset[str]) -> None:
        self._folder = folder
        self._names = names
        self._set: list[tuple[str, str, str, str]] = []

    def install(self, number: int) -> None:
        import signal

        sys.addaudithook(self._note)
        # Not threading's, whose start takes locks and waits: a handler may have interrupted the thread that holds them.
        signal.signal(number, lambda *_: _thread.start_new_thread(self._answer, ()))
        signal.siginterrupt(number, False)  # noqa: FBT003 - the system call's own argument
        os.register_at_fork(after_in_child=self._announce)
        self._announce()

    def _announce(self) -> None:
        """From now on the signal may be sent to this process."""
        try:
            with open(os.path.join(self._folder, f"{os.getpid()}.ready"), "w"):  # noqa: PTH118, PTH123 - no imports
                pass
        except OSError:  # the service runs as another user
            pass

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.putenv":
            return
        name, value = (os.fsdecode(each) for each in arguments)
        if name in self._names and len(self._set) < 1000:  # noqa: PLR2004 - a loop that sets variables
            moment = "after import" if any(native in sys.modules for native in _NATIVE) else "app"
            self._set.append((name, value, moment, _place(sys._getframe(1))))  # noqa: SLF001 - CPython's own

    def _answer(self) -> None:
        import json

        path = os.path.join(self._folder, f"{os.getpid()}.json")  # noqa: PTH118
        with open(os.path.join(self._folder, "malloc"), encoding="utf-8") as stream:  # noqa: PTH118, PTH123
            script = _run("_loaded_files", stream.read())
        answer = {"variables": self._set, **describe(script)}
        new = f"{path}.{_thread.get_ident()}"  # it may be asked again meanwhile
        with open(new, "w", encoding="utf-8") as stream:  # noqa: PTH123
            json.dump(answer, stream)
        os.replace(new, path)  # noqa: PTH105


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not file.endswith(("/os.py", "/dotenv/main.py")):
            return f"{file} line {frame.f_lineno}"
        frame = frame.f_back
    return "the program"


def _chain(folder: str) -> None:
    own = sys.modules.get("sitecustomize")
    sys.path[:] = [path for path in sys.path if path != folder]
    sys.path_importer_cache.pop(folder, None)
    del sys.modules["sitecustomize"]
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401 - the next one, if any
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


def _main() -> None:
    folder = os.path.dirname(__file__)  # noqa: PTH120
    try:
        # multiprocessing's tracker waits in a read that no signal ends: it would never answer.
        waits = "multiprocessing.resource_tracker" in "".join(sys.orig_argv)
        if os.environ.get("MODELGUARD_PROBE") == folder and not waits:
            with open(os.path.join(folder, "names"), encoding="utf-8") as stream:  # noqa: PTH118, PTH123
                number, *names = stream.read().split()
            _Probe(folder, frozenset(names)).install(int(number))
    finally:
        _chain(folder)


if __name__ == "sitecustomize":
    _main()
