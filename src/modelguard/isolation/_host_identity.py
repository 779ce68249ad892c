"""What processes must have in common to share the molds of an isolated function, and under which name they meet."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Never

from modelguard.errors import InvalidOption
from modelguard.isolation import _launch, _supervisor
from modelguard.isolation._launch import Files, Origin
from modelguard.isolation._molds import RemoteTraceback
from modelguard.isolation._options import IsolationOptions
from modelguard.lifecycle._options import GuardOptions
from modelguard.lifecycle._policy import subset
from modelguard.lifecycle.policies import Changed

# What a process and the broker of its isolated function say to each other.


#: What a client asks on one of its connections:
#:
#: * ``join`` (token, identity, code; with a socket for reports): become a client. The connection stands for the
#:   process.
#: * ``call`` (token): this connection is for calls of that client.
#: * ``take`` (), ``withdraw`` (), ``release`` (worn), ``lose`` (cause, blame): one worker.
#: * ``load`` (), ``reload`` (wait), ``unload`` (), ``pause`` (whether to pause or to resume), ``status`` ().
#: * ``leave`` (): be a client no more.
Request = Literal[
    "join", "call", "take", "withdraw", "release", "lose", "load", "reload", "unload", "pause", "status", "leave"
]

#: What the broker answers:
#:
#: * ``welcome`` (its pid) and ``unwelcome`` (refusal, text) to ``join``.
#: * ``loading`` (), ``waiting`` (), ``granted`` (worker's pid; with its socket), ``withdrawn`` () to ``take``.
#: * ``ended`` (how) to ``lose``, ``done`` (value) to the others, ``failed`` (error, cause, text) to all of them.
Answer = Literal["welcome", "unwelcome", "loading", "waiting", "granted", "withdrawn", "ended", "done", "failed"]

#: Why a broker does not take a client. ``identity``: the names are equal by accident; ``code``: a file is not as
#: it was for the process that has started it, or for its mold.
Refusal = Literal["identity", "code"]

#: How a message on a client's socket for reports starts: with what follows.
REPORT, STATE = b"r", b"s"

#: What must be equal for processes to share molds: words for people, and values.
Identity = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class BrokerOrders:
    """What a new broker is told by the process that starts it.

    Attributes:
        starter: That process's id.
        folder: Where it listens.
        socket: The socket's name there.
        identity: What its clients must have in common.
        code: The files of that process's modules, which its molds must find unchanged.
        options: Of the isolated function.
        source: Of the guard that lends the model in the molds.
        origin: What the molds resemble.
        paused: Whether the function is paused, as after the end of a broker that was.
    """

    starter: int
    folder: str
    socket: str
    identity: Identity
    code: Files
    options: IsolationOptions
    source: GuardOptions[Any]
    origin: Origin
    paused: bool


def packed(error: BaseException) -> tuple[BaseException, BaseException | None, str | None]:
    """An error with its cause, and the traceback of that in another process: pickles drop both."""
    cause = error.__cause__
    trace = cause.__cause__ if cause is not None else None
    return error, cause, str(trace.args[0]) if isinstance(trace, RemoteTraceback) else None


def unpacked(error: BaseException, cause: BaseException | None, text: str | None) -> BaseException:
    """Undo :func:`packed`."""
    if cause is not None and text is not None:
        cause.__cause__ = RemoteTraceback(text)
    error.__cause__ = cause
    return error


#: Characters of the digest in a name.
_DIGEST = 24

#: The names of sockets: a digest of the identity, and a number.
NAME = re.compile(rf"[0-9a-f]{{{_DIGEST}}}\.[0-9]+")

#: Where each function was decorated: working directory and ``sys.path``.
_places: dict[_launch.Reference, tuple[str, str]] = {}


def check_shareable(source: GuardOptions[Any], option: str = "scope", value: str = "host") -> None:
    """Check that a broker, or an owner, that does not import the application can decide when a mold is replaced.

    Args:
        source: Of the guard.
        option: Of ``isolate``, because of which it is not imported.
        value: Of that option.

    Raises:
        InvalidOption: A policy that asks for new weights is a class of the application's own, or has a function of its
            own; or the guard keeps its previous model.
    """
    if source.swap.keep_previous and option == "scope":
        why = "cannot be used with keep_previous=True: the broker keeps no previous mold"
        raise InvalidOption("scope", "host", why=why, fix="Leave keep_previous out, or write scope='process'.")
    renewing = subset(source.reload_on, renews=True, unloads=True)
    for part in () if renewing is None else renewing.parts():
        if isinstance(part, Changed):
            why = "cannot be used with Changed, whose probe is a function of your own"
            fix = "Use TTL or Modified, or call reload() when it is time."
            raise InvalidOption(option, value, why=why, fix=fix)
        if type(part).__module__.partition(".")[0] != "modelguard":
            why = f"cannot be used with {type(part).__qualname__}, which asks for new models and is a class of your own"
            fix = "Use TTL or Modified, or call reload() when it is time."
            raise InvalidOption(option, value, why=why, fix=fix)


def identity_of(options: IsolationOptions, source: GuardOptions[Any]) -> Identity:
    """What must be equal. Not the environment and not the files of the code: these are compared one by one.

    Arguments count only where the function stands in the main script: those of a server are its own. Paths are those of
    the first call of this, when the function is decorated: later on, processes may change theirs.
    """
    module, name = options.function
    if options.function not in _places:
        _places[options.function] = os.getcwd(), repr(sys.path)  # noqa: PTH109 - as text
        _launch.note_imported()
    folder, path = _places[options.function]
    return {
        "function": f"{module}.{name}",
        "file": str(getattr(sys.modules.get(module), "__file__", None)),
        "version": str(options.version),
        "options": repr(_without_code(options)),
        "guard": repr(replace(for_broker(source), load=str)),  # whose repr is the same in each process
        "arguments": repr(sys.argv) if module == "__main__" else "",
        "working directory": folder,
        "sys.path": path,
        "interpreter": f"{sys.executable} {sys.version}",
        "modelguard": _version(),
        # A folder that containers share must not make them share processes.
        "container": f"{os.stat('/proc/self/ns/mnt').st_ino} {os.stat('/proc/self/ns/pid').st_ino}",  # noqa: PTH116
    }


def prefix_of(identity: Identity) -> str:
    """How the names of the sockets start under which processes of this identity meet."""
    return f"{hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:_DIGEST]}."


def orders_for(
    folder: Path,
    socket: str,
    identity: Identity,
    options: IsolationOptions,
    source: GuardOptions[Any],
    *,
    paused: bool,
) -> BrokerOrders:
    """Make the orders of a broker that this process starts."""
    return BrokerOrders(
        starter=os.getpid(),
        folder=str(folder.absolute()),
        socket=socket,
        identity=identity,
        code=_launch.imported,
        options=_without_code(options),
        source=for_broker(source),
        origin=Origin(_launch.preparation(), _supervisor.levels()),
        paused=paused,
    )


@functools.cache  # a call must not need a descriptor for it
def _version() -> str:
    try:
        return metadata.version("modelguard-lifecycle")
    except metadata.PackageNotFoundError:  # it runs from its sources
        return ""


def _without_code(options: IsolationOptions) -> IsolationOptions:
    """The options without what would need the application's modules, and does not apply to workers."""
    return replace(options, breaker=replace(options.breaker, ignore=(), reload=None))


def for_broker(source: GuardOptions[Any]) -> GuardOptions[Any]:
    """The options of a guard without what would need the application's modules."""
    return replace(
        source,
        family=None,
        load=_never_called,
        reload_on=subset(source.reload_on, renews=True, unloads=True),
        warmup=None,
        validate=None,
        unload=None,
    )


def _never_called() -> Never:
    raise AssertionError("it has no model")
