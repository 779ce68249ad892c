"""Answers questions about the process that it runs in: put there by ``sys.remote_exec``, or run by its control socket.

A script, never imported by modelguard, that uses only the standard library. ``begin`` starts a thread and returns at
once, because the main thread, which runs it, may be serving a request. The thread connects to a socket, answers each
line that it gets, and ends when the other end is closed. The sources of all that it needs come with it, as the process
may have no modelguard, or another one. Through the control socket the process runs its own.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


#: What it needs, beside itself.
SCRIPTS = ("_probe", "_census", "_holders")


def begin(address: str, sources: dict[str, str]) -> None:
    """Start the thread that answers.

    Args:
        address: The path of the socket.
        sources: The source of each script, by name.
    """
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
    """Answer until the other end is closed.

    Args:
        connection: The socket.
        sources: The source of each script, by name.

    Raises:
        OSError: The other end is gone.
    """
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


def _describe(scripts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = scripts["_probe"]["describe"]()
    return found


def _look(scripts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Count objects. The first look is the moment with which :func:`_held` compares."""
    import sys

    census = scripts["_census"]
    loaded = [name for name in census["LIBRARIES"] if name in sys.modules]
    if "moment so far" not in census:
        census["moment so far"] = census["moment"]()
    counted, types = census["look"]()
    return {"census": counted, "types": types, "libraries": loaded}


def _held(scripts: dict[str, dict[str, Any]], calls: str) -> dict[str, Any]:
    """The containers that have grown since the first look, with what holds them."""
    census, holders = scripts["_census"], scripts["_holders"]
    grown = census["grown"](census["moment so far"], int(calls))
    return {"held": [each._asdict() for each in holders["named"](grown)]}


def _uses(scripts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {"uses": scripts["_census"]["guard_uses"]()}


def _trim(scripts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return freed memory to the system, if glibc serves ``malloc``."""
    import ctypes

    program = ctypes.CDLL(None)
    served = scripts["_probe"]["malloc_file"]() or ""
    if "libc.so" in served and hasattr(program, "malloc_trim"):
        program.malloc_trim(0)
    return {}


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "describe": _describe,
    "look": _look,
    "held": _held,
    "uses": _uses,
    "trim": _trim,
}
