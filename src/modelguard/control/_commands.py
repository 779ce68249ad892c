"""What can be asked of the guards of a process, whichever way the command comes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from modelguard.errors import InvalidOption, ModelGuardError
from modelguard.lifecycle._waiting import Timeout
from modelguard.lifecycle.model_guard import ModelGuard, guards
from modelguard.telemetry import logger

__all__ = ["COMMANDS", "Command", "Result", "run"]

Command = Literal["status", "reload", "unload", "pause", "resume"]
COMMANDS: tuple[Command, ...] = get_args(Command)


@dataclass(frozen=True)
class Result:
    """What a command did to one guard.

    Attributes:
        name: The guard's name.
        error: Why it did not work; None if it did.
        status: The guard's figures afterwards, as JSON.
    """

    name: str
    error: str | None
    status: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def _find(name: str | None) -> list[ModelGuard[Any]]:
    """The guards of this process with this name, or all of them, in the order of their names.

    Raises:
        InvalidOption: There is none with this name.
    """
    known = sorted(guards(), key=lambda guard: guard.name)
    found = [guard for guard in known if name in (None, guard.name)]
    if name is not None and not found:
        listed = ", ".join(repr(guard.name) for guard in known) or "none"
        raise InvalidOption("name", name, why="is not a guard of this process", fix=f"Its guards are: {listed}.")
    return found


def run(command: Command, name: str | None, *, wait: bool, timeout: float | None) -> list[Result]:
    """Do it to each guard, one after another, so that replicas and guards are not replaced at the same time.

    Without a name, guards that have never loaded in this process, or are closed, are not reloaded or unloaded.

    Args:
        command: What to do.
        name: The guard; None for all guards of this process.
        wait: Whether a reload is awaited.
        timeout: Seconds for all of them together, None for no bound. What has begun goes on.

    Raises:
        InvalidOption: There is none with this name.
    """
    found, limit = _find(name), Timeout(timeout)
    if command != "status":
        logger.info("modelguard: %s, asked of %s", command, ", ".join(guard.name for guard in found) or "no guard")
    return [Result(guard.name, _run(command, guard, name, wait, limit), _status(guard)) for guard in found]


def _run(command: Command, guard: ModelGuard[Any], name: str | None, wait: bool, limit: Timeout) -> str | None:  # noqa: FBT001
    """Do it to one guard; returns why it did not work."""
    state = guard.status().state
    if command in {"reload", "unload"} and state in {"new", "closed"} and name is None:
        return None
    if command == "reload" and state == "new":
        return "was never loaded in this process, so there is nothing to replace"
    try:
        if command == "reload":
            guard.reload(wait=wait, timeout=limit.left())
        elif command == "unload":
            guard.unload(timeout=limit.left())
        elif command == "pause":
            guard.pause()
        elif command == "resume":
            guard.resume()
    except ModelGuardError as refusal:
        return str(refusal)
    return None


def _status(guard: ModelGuard[Any]) -> dict[str, Any]:
    status = guard.status()
    waits = status.postponed
    return {
        "state": status.state,
        "ready": guard.ready,
        "paused": status.paused,
        "postponed": None
        if waits is None
        else {"reasons": [str(reason) for reason in waits.reasons], "cause": waits.cause, "seconds": waits.seconds},
        "generation": status.generation,
        "age": status.age,
        "uses": status.uses,
        "in_flight": status.in_flight,
        "reloads": status.reloads,
        "failures": status.failures,
        "last_error": status.last_error,
        "model_bytes": status.model_bytes,
        "load_seconds": status.load_seconds,
        "reload_on": None if guard.reload_on is None else repr(guard.reload_on),
    }
