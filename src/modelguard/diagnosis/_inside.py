"""Answers questions about the process that it runs in. Put into a running process by ``sys.remote_exec``.

A script, never imported by modelguard, that uses only the standard library. It starts a thread and returns at once,
because the main thread, which runs it, may be serving a request. The thread connects to a socket, answers each line
that it gets, and ends when the other end is closed. The sources of ``_probe`` and ``_census`` come with it, as the
process may have no modelguard, or another one.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def begin(address: str, sources: dict[str, str]) -> None:
    """Start the thread that answers.

    Args:
        address: The path of the socket.
        sources: The source of each script, by name.
    """
    import threading

    threading.Thread(target=_serve, args=(address, sources), name="modelguard-inside", daemon=True).start()


def _serve(address: str, sources: dict[str, str]) -> None:
    import json
    import socket

    scripts: dict[str, dict[str, Any]] = {}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            with connection.makefile(encoding="utf-8") as stream:
                for line in stream:
                    try:
                        if not scripts:
                            scripts.update({name: _run(name, source) for name, source in sources.items()})
                        answer = _ANSWERS[line.strip()](scripts)
                    except Exception as error:  # noqa: BLE001 - what cannot be known is left out
                        answer = {"failed": type(error).__name__}
                    # Without SIGPIPE, whose default the process may have set.
                    connection.sendall(json.dumps(answer).encode() + b"\n", socket.MSG_NOSIGNAL)
    except OSError:  # nobody listens any more
        return


def _run(name: str, source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": f"modelguard{name}"}
    exec(compile(source, f"<modelguard {name}>", "exec", dont_inherit=True), namespace)  # noqa: S102 - modelguard's own
    return namespace


def _describe(scripts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = scripts["_probe"]["describe"]()
    return answer


def _look(scripts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    import sys

    census = scripts["_census"]
    loaded = [name for name in census["LIBRARIES"] if name in sys.modules]
    return {"census": census["count"](), "types": census["types"](), "libraries": loaded}


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


_ANSWERS = {"describe": _describe, "look": _look, "uses": _uses, "trim": _trim}
