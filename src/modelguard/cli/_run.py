"""``modelguard presets``, ``run`` and ``ctl``: what a service gets at its start, and what it is told while it runs."""

from __future__ import annotations

import argparse
import functools
import json
import operator
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from modelguard import _units
from modelguard.cli import _output
from modelguard.cli._output import fail, process_id
from modelguard.environment import _presets
from modelguard.environment._presets import Format, Preset
from modelguard.errors import InvalidOption
from modelguard.facts import _proc

if TYPE_CHECKING:
    from modelguard.control._client import Request


#: The numbers of a preset, read by what needs them: argparse prints errors of several lines.
_SIZES = (
    ("--workers N", "processes that share the CPUs, default: 1"),
    ("--distinct-shapes N", "how many different input shapes the traffic has, if known"),
)


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        usage="modelguard run [--preset NAME]... [--allocator NAME] [options] -- COMMAND ...",
        help="start a command with presets and an allocator in force from its start",
        description="Set the variables that a program needs at its start, and become the command: the process id "
        "stays, and signals and the exit status are the command's own. Variables that are already set win.",
        epilog="exit status: the command's own, or 2 usage, 126 the command cannot be executed, 127 it was not found",
    )
    allocators = (
        "auto (the best that is installed), jemalloc, mimalloc, tcmalloc, glibc (made to return freed memory), or none "
        "(no change), default: none"
    )
    _output.add_options(
        parser,
        ("--preset NAME...", "may be given several times"),
        ("--allocator NAME", allocators),
        *_SIZES,
        ("--print", "print the command as a shell command, and exit"),
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command")
    parser.set_defaults(run=_run, allocator="none", typed={"name": "--preset"})


def _combined(names: Iterable[str], options: argparse.Namespace) -> Preset:
    workers = _output.whole_number("--workers", options.workers, 4, default=1)
    shapes = _output.whole_number("--distinct-shapes", options.distinct_shapes, 4, default=None)
    cpus: Any = getattr(options, "cpus", None)
    with suppress(ValueError, TypeError):  # the preset rejects what is no number
        cpus = float(cpus)
    made = (_presets.get(name, workers=workers, distinct_shapes=shapes, cpus=cpus) for name in names)
    return functools.reduce(operator.or_, made)


def _run(options: argparse.Namespace) -> int:
    from modelguard.environment import _launcher

    for name in options.preset:
        if "," in name:
            fix = f"Write {' '.join(f'--preset {each}' for each in name.split(','))}."
            raise InvalidOption("--preset", name, why="must be one name", fix=fix)
    if not options.preset:
        fix = "Add one, such as --preset torch-cpu."
        _output.refuse(options, ("workers", "distinct_shapes"), "requires a preset", fix)
    preset = _combined(options.preset, options) if options.preset else None
    plan = _launcher.plan(_output.behind(options), preset=preset, allocator=options.allocator)
    something = options.preset or options.allocator != "none"
    nothing = [] if something else ["nothing is set, because neither --preset nor --allocator is given"]
    for note in plan.notes or nothing:
        _say(note)
    if not options.print:
        if something:
            _say(plan.in_force)
        _launcher.become(plan)
    # As bytes: arguments and variables do not have to be valid text.
    sys.stdout.buffer.write(os.fsencode(f"{plan}\n"))
    return 0


def _say(line: str) -> None:
    with suppress(OSError):  # if stderr is closed, the command should still start
        print(f"modelguard run: {line}", file=sys.stderr, flush=True)  # noqa: T201


# ``modelguard presets``: shows the variables of presets, or writes them in the format of a configuration file.


def add_presets(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "presets",
        help="list and explain presets of environment variables, or write them for a Dockerfile, a unit, ...",
        description="Without a name, list the presets. With names, explain every variable that they set: its value, "
        "when it is read, what it does and what it costs. If two presets set the same variable, the later one wins.",
        epilog="exit status: 0 success, 2 there is no such preset or format, or a number is out of range",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets, combined in this order")
    cpus = ("--cpus N", "CPUs that they share, default: what this process may use")
    written = ("--format F", f"write the variables instead, for: {', '.join(get_args(Format))}")
    _output.add_options(parser, *_SIZES, cpus, written)
    parser.set_defaults(run=_show_presets, typed={"name": "NAME"})


def _show_presets(options: argparse.Namespace) -> int:
    if options.names:
        preset = _combined(options.names, options)
        text = f"{preset.explain()}\n" if options.format is None else preset.render(options.format)
    else:
        needs = ("format", "workers", "distinct_shapes", "cpus")
        _output.refuse(options, needs, "requires the name of a preset", "Add one, such as torch-cpu.")
        width = max(map(len, _presets.names()))
        lines = [f"{name:{width}}  {_presets.describe(name)}" for name in _presets.names()]
        text = "\n".join([*lines, "", "modelguard presets NAME... explains what they set.\n"])
    print(text, end="")  # noqa: T201 - the output of the command
    return 0


# ``modelguard ctl``: commands for the guards, pools and isolated functions of a running process.

#: Seconds to wait for reloads and releases.
TIMEOUT = 300.0
COMMANDS = ("status", "reload", "unload", "pause", "resume")
#: Characters of a name that are shown at most.
_WIDEST = 60


def add_ctl(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    _output.add_options(
        parser,
        ("--all", "all processes below PID that take commands, one by one"),
        ("--no-wait", "do not wait until the models are reloaded"),
        ("--timeout T", "how long to wait for a process, default: 5m"),
        ("--json", "print a line of JSON for each process"),
    )
    parser.set_defaults(run=_ctl)


def _ctl(options: argparse.Namespace) -> int:
    from modelguard.control import _client

    timeout = _output.duration("--timeout", options.timeout, TIMEOUT, zero=True)
    pid = process_id(options.pid)
    waits = options.command in {"reload", "unload"}
    request = _client.Request(options.command, options.name, not options.no_wait, timeout if waits else 0.0)
    status = 0
    for each in _processes(pid, every=options.all or options.command == "status"):
        code, brokers = _tell(each, request, as_json=options.json, may_end=each != pid)
        status = max(status, code)
        # What several processes share is reloaded once. Each of them is shown.
        request = replace(request, brokers=request.brokers | brokers)
    return status


def _processes(pid: int, *, every: bool) -> list[int]:
    from modelguard.control import _client

    found = _client.listening_below(pid)
    if every and found:
        return found
    if pid not in found:
        below = f"these processes below it do: {' '.join(map(str, found))} (--all for all of them)"
        listen = "call modelguard.control.listen() where its application is made"
        raise _client.Unreachable(f"process {pid} takes no commands; {below if found else listen}")
    return [pid]


def _tell(pid: int, request: Request, *, as_json: bool, may_end: bool) -> tuple[int, frozenset[int]]:
    from modelguard.control import _client

    try:
        answer = _client.ask(pid, request)
    except _client.Unreachable as error:
        return 0 if may_end and not _proc.runs(pid) else fail("ctl", error), frozenset()
    if as_json:
        content = {"pid": pid, "error": answer.error, "guards": answer.guards}
        print(json.dumps(content), flush=True)  # noqa: T201 - the output of the command
    elif answer.error is None:
        print("\n".join(map(_units.printable, _ctl_lines(pid, answer.guards))), flush=True)  # noqa: T201
    else:
        fail("ctl", f"process {pid}: {answer.error}")
    return int(answer.failed), answer.brokers


def _ctl_lines(pid: int, guards: Iterable[dict[str, Any]]) -> list[str]:
    rows = [_ctl_row(guard) for guard in guards]
    if not rows:
        return [f"{pid}  no guards, pools or isolated functions"]
    width = max(len(name) for name, _ in rows)
    return [f"{pid}", *(f"  {name:{width}}  {text}" for name, text in rows)]


def _shortened(name: str) -> str:
    """Both ends of a long name: names of functions begin alike. In JSON it is whole."""
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST // 2]}…{name[1 - _WIDEST // 2 :]}"


def _ctl_row(guard: dict[str, Any]) -> tuple[str, str]:
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
    return _shortened(guard["name"]), "; ".join(parts)


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
