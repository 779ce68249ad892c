"""What can be asked of the guards, pools and isolated functions of a process, whichever way the command comes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from modelguard.control import _targets
from modelguard.errors import ModelGuardError
from modelguard.isolation.status import IsolationStatus
from modelguard.lifecycle._waiting import Timeout
from modelguard.lifecycle.pool import ModelPool
from modelguard.telemetry import logger

__all__ = ["COMMANDS", "Command", "Result", "run"]

Command = Literal["status", "reload", "unload", "pause", "resume"]
COMMANDS: tuple[Command, ...] = get_args(Command)


@dataclass(frozen=True)
class Result:
    """What a command did to one guard, pool or isolated function.

    Attributes:
        name: Its name.
        kind: What it is.
        error: Why it did not work; None if it did.
        status: Its figures afterwards, as JSON.
    """

    name: str
    kind: _targets.Kind
    error: str | None
    status: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def run(
    command: Command, name: str | None, *, wait: bool, timeout: float | None, brokers: Collection[int] = ()
) -> list[Result]:
    """Do it to each target, one after another, so that replicas and guards are not replaced at the same time.

    Without a name, those that have never loaded in this process, or are closed, are not reloaded or unloaded.

    Args:
        command: What to do.
        name: The guard, pool or isolated function; None for all of this process.
        wait: Whether a reload is awaited.
        timeout: Seconds for all of them together, None for no bound. What has begun goes on.
        brokers: Process ids of brokers that have done it already, for another process: what these own is only shown.

    Raises:
        InvalidOption: There is none with this name.
    """
    found, limit = _targets.find(name), Timeout(timeout)
    if command != "status":
        logger.info("modelguard: %s, asked of %s", command, ", ".join(target.name for target in found) or "no guard")
    results = []
    for target in found:
        left_alone = command == "status" or _is_left_alone(command, target, brokers, by_name=name is not None)
        error = None if left_alone else _do(command, target, limit, wait=wait)
        results.append(Result(target.name, _targets.kind_of(target), error, _targets.figures(target)))
    return results


def _is_left_alone(command: Command, target: _targets.Target, brokers: Collection[int], *, by_name: bool) -> bool:
    status = target.status()
    if isinstance(status, IsolationStatus) and status.broker in brokers:
        return True
    return command in {"reload", "unload"} and _targets.state_of(target) in {"new", "closed"} and not by_name


def _do(command: Command, target: _targets.Target, limit: Timeout, *, wait: bool) -> str | None:
    """Do it to one target; returns why it did not work."""
    if command == "reload" and _targets.state_of(target) == "new":
        return "was never loaded in this process, so there is nothing to replace"
    try:
        if command == "reload":
            _reload(target, limit, wait=wait)
        elif command == "unload":
            target.unload(timeout=limit.left())
        elif command == "pause":
            target.pause()
        elif command == "resume":
            target.resume()
    except ModelGuardError as refusal:
        return str(refusal)
    return None


def _reload(target: _targets.Target, limit: Timeout, *, wait: bool) -> None:
    if isinstance(target, ModelPool):
        target.reload()  # each model at its next use, so there is nothing to wait for
    else:
        target.reload(wait=wait, timeout=limit.left())
