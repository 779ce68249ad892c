"""What a process and the broker of its isolated function say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from modelguard.isolation._code import Files
from modelguard.isolation._instructions import Origin
from modelguard.isolation._molds import RemoteTraceback
from modelguard.isolation._options import IsolationOptions
from modelguard.lifecycle._options import GuardOptions

__all__ = ["REPORT", "STATE", "Answer", "BrokerOrders", "Identity", "Refusal", "Request", "packed", "unpacked"]

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
