"""``modelguard ctl``: commands for the guards, pools and isolated functions of a running process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelguard import _units
from modelguard.cli._output import process_id
from modelguard.errors import InvalidOption

if TYPE_CHECKING:
    from modelguard.control._client import Request

USAGE = 2

#: Seconds to wait for reloads and releases.
TIMEOUT = 300.0
COMMANDS = ("status", "reload", "unload", "pause", "resume")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``modelguard``."""
    parser = commands.add_parser(
        "ctl",
        help="show, reload, unload, pause or resume the guards, pools and isolated functions of a running process",
        description="Sends a command to a process that has called modelguard.control.listen(), as the same user. "
        "status: show the guards, pools and isolated functions; reload: replace their models; unload: release them "
        "until their next use; pause: let policies start nothing; resume: end that.",
        epilog="exit status: 0 success, 1 one of them could not do it, 2 the process takes no commands",
    )
    parser.add_argument("pid", metavar="PID", help="the process, such as a worker; or a server, with --all")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the guard, pool or isolated function, default: all of the process"
    )
    parser.add_argument("--all", action="store_true", help="all processes below PID that take commands, one by one")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the models are reloaded")
    parser.add_argument("--timeout", metavar="T", help="how long to wait for a process, default: 5m")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each process")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from modelguard.control import _client

    try:
        timeout = TIMEOUT if options.timeout is None else _units.seconds(options.timeout, "--timeout", zero=True)
        pid = process_id(options.pid)
        pids = _processes(pid, every=options.all or options.command == "status")
    except (InvalidOption, _client.Unreachable) as error:
        return _fail(str(error))
    except ProcessLookupError as error:
        return _fail(str(error.strerror))
    waits = options.command in {"reload", "unload"}
    request = _client.Request(options.command, options.name, not options.no_wait, timeout if waits else 0.0)
    status = 0
    for each in pids:
        code, brokers = _run(each, request, as_json=options.json, may_end=each != pid)
        status = max(status, code)
        # What several processes share is reloaded once. Each of them is shown.
        request = replace(request, brokers=request.brokers | brokers)
    return status


def _processes(pid: int, *, every: bool) -> list[int]:
    """The processes that get the command.

    Raises:
        Unreachable: The process takes no commands; the message names those below it that do.
        ProcessLookupError: There is no such process.
    """
    from modelguard.control import _client

    found = _client.listening_below(pid)
    if every and found:
        return found
    if pid not in found:
        others = [str(each) for each in found]
        below = f"; these processes below it do: {' '.join(others)} (--all for all of them)" if others else ""
        why = "; call modelguard.control.listen() where its application is made" if not others else ""
        raise _client.Unreachable(f"process {pid} takes no commands{below}{why}")
    return [pid]


def _run(pid: int, request: Request, *, as_json: bool, may_end: bool) -> tuple[int, frozenset[int]]:
    """Send the command to one process, and print what it answers.

    Args:
        pid: The process.
        request: The command.
        as_json: Whether to print JSON.
        may_end: Whether it does not matter if the process has ended since it was found.

    Returns:
        The exit status, and the process ids of brokers that have done it.
    """
    from modelguard.control import _client

    try:
        answer = _client.ask(pid, request)
    except _client.Unreachable as error:
        return 0 if may_end and not _client.runs(pid) else _fail(str(error)), frozenset()
    if as_json:
        content = {"pid": pid, "error": answer.error, "guards": answer.guards}
        print(json.dumps(content), flush=True)  # noqa: T201 - the output of the command
    elif answer.error is None:
        print("\n".join(map(_units.printable, _lines(pid, answer.guards))), flush=True)  # noqa: T201
    else:
        _fail(f"process {pid}: {answer.error}")
    return int(answer.failed), answer.brokers


def _lines(pid: int, guards: Iterable[dict[str, Any]]) -> list[str]:
    rows = [_row(guard) for guard in guards]
    width = max((len(name) for name, _ in rows), default=0)
    return (
        [f"{pid}", *(f"  {name:{width}}  {text}" for name, text in rows)]
        if rows
        else [f"{pid}  no guards, pools or isolated functions"]
    )


def _row(guard: dict[str, Any]) -> tuple[str, str]:
    status = guard["status"]
    parts = [f"{status['state']}{', paused' if status['paused'] else ''}"]
    if guard["kind"] == "pool":
        parts.append(_room(status))
    elif status["generation"]:
        age = _units.format_seconds(round(status["age"]))
        parts.append(f"generation {status['generation']}, {age} old, {_use(guard)}")
    if status["in_flight"]:
        parts.append(f"{status['in_flight']} in flight")
    waits = status.get("postponed")
    if waits is not None:
        until = "" if waits["seconds"] is None else f" for {waits['seconds']:.0f} s"
        parts.append(f"due, waits{until} ({waits['cause']}): {', '.join(waits['reasons'])}")
    if status.get("last_error") is not None:
        parts.append(f"failed: {status['last_error']}")
    if guard["error"] is not None:
        parts.append(f"error: {guard['error']}")
    return guard["name"], "; ".join(parts)


def _room(status: dict[str, Any]) -> str:
    models, idle = len(status["models"]), len(status["idle"])
    used, budget = (_units.format_bytes(status[name]) for name in ("used", "max_memory"))
    return f"{models} model{'' if models == 1 else 's'}, {used} of {budget}{f', {idle} idle' if idle else ''}"


def _use(guard: dict[str, Any]) -> str:
    status = guard["status"]
    if guard["kind"] == "guard":
        return f"{status['uses']} calls"
    workers = len(status["workers"])
    shared = "" if status["broker"] is None else f", shared by {len(status['clients'])} processes"
    mold = "" if status["mold"] is None else f"mold {status['mold']}, "
    return f"{mold}{workers} worker{'' if workers == 1 else 's'}{shared}"


def _fail(why: str) -> int:
    print(_units.printable(f"modelguard ctl: {why}"), file=sys.stderr)  # noqa: T201
    return USAGE
