"""``modelguard top``: shows how much memory process trees actually use, read from outside."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from modelguard import _units
from modelguard._units import format_bytes, printable
from modelguard.cli import _output
from modelguard.cli._output import process_id
from modelguard.errors import InvalidOption
from modelguard.facts import _redact

if TYPE_CHECKING:
    from modelguard.sharing._memory_report import ProcessReport, TreeReport, TreeWatch

#: Seconds between readings; a reading takes 50 - 150 ms for each process with torch or spaCy.
INTERVAL = 2.0
SHORTEST = 0.1


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "top",
        help="show how much memory the processes of a server actually use, and in how many copies",
        description="Show for each process of a tree: its share of the memory (PSS), its private memory (USS), how "
        "much this has grown since the process started and since the first reading, and where private memory is. "
        "python: arenas of Python objects, as far as they can be recognised; heap: memory for malloc; mixed: large "
        "blocks such as tensors, and arenas next to them; stacks; files. Only /proc is read. RSS, which counts shared "
        "memory once for each worker, is shown last.",
        epilog="exit status: 0 success, also when interrupted, 2 there is nothing to show",
    )
    parser.add_argument(
        "pid", nargs="?", metavar="PID", help="the top of the tree, default: all trees of your Python processes"
    )
    parser.add_argument("--once", action="store_true", help="print one reading and exit")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each reading, sizes in bytes")
    parser.add_argument("--interval", metavar="S", help=f"seconds between readings, default: {INTERVAL:g}")
    parser.add_argument("--model-bytes", metavar="SIZE", help="size of one copy of the model, such as '500 MB'")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    interval = None if options.once else _interval(options.interval)
    size = options.model_bytes
    if size is not None:
        size = _units.size(int(size) if re.fullmatch(r"[0-9]{1,18}", size, re.ASCII) else size, "--model-bytes")
    read = make_reader(None if options.pid is None else process_id(options.pid), size)
    show = _show_json if options.json else choose(sys.stdout, live=not options.once)
    with suppress(KeyboardInterrupt):  # the usual end
        show(read())
        while interval is not None and _output.why_lost() is None:
            time.sleep(interval)
            show(read())
    return 0


def make_reader(pid: int | None, model_bytes: int | str | None) -> Callable[[], list[TreeReport]]:
    from modelguard.sharing import _memory_report

    watch = partial(_memory_report.TreeWatch, model_bytes=model_bytes)
    if pid is not None:
        one = watch(pid)
        return lambda: [one.look()]
    watches: dict[int, TreeWatch] = {}

    def read() -> list[TreeReport]:
        nonlocal watches
        before, watches, trees = watches, {}, []
        for top in _memory_report.python_trees(without=(os.getpid(),)):
            each = before.get(top) or watch(top)
            with suppress(ProcessLookupError, PermissionError):  # it has just ended, or is hidden
                trees.append(each.look())
                watches[top] = each
        if not trees:
            raise ProcessLookupError(0, "you have no other running Python process; give the PID of a server")
        return sorted(trees, key=lambda tree: tree.pss, reverse=True)

    return read


def _show_json(trees: Sequence[TreeReport]) -> None:
    print(json.dumps(as_dict(trees)), flush=True)  # noqa: T201 - the output of the command


def _interval(text: str | None) -> float:
    interval = _output.duration("--interval", text, INTERVAL, zero=True)
    if interval < SHORTEST:
        why = f"must be at least {SHORTEST:g} s, because a reading takes longer than that"
        raise InvalidOption("--interval", text, why=why, fix=f"Write --interval {INTERVAL:g}.")
    return interval


# A short name for a process, from its command line: the server and its app.

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?(?:\.exe)?")

#: Options of Python that take a value.
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")

#: Programs that serve an app, each with the options that name the app. For other programs no argument is shown.
_SERVERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("celery", "flask"), ("-A", "--app")),
    **dict.fromkeys(("daphne", "granian", "gunicorn", "hypercorn", "uvicorn"), ()),
    "uwsgi": ("-w", "--module", "--wsgi", "--wsgi-file"),
}

#: ``package.module:app``; unlike in an address, a name follows the colon. ``-c python:module`` of gunicorn names a
#: configuration.
_APP = re.compile(r"(?!python:)[A-Za-z_][\w.]*:[A-Za-z_][\w.]*(?:\(\))?")


def process_name(command: Sequence[str]) -> str:
    if len(command) == 1 and " " in command[0]:
        return _in_one_line(_redact.redact(command[0], {}))
    name, arguments = _program(tuple(_redact.redacted_words(command, {})))
    return _in_one_line(f"{name} {_app(name, arguments)}")


def _in_one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split()) or "?"


def _program(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The name of what runs, behind Python if that runs it, and its arguments."""
    words = iter(command)
    name = PurePath(next(words, "")).name
    if not _PYTHON.fullmatch(name):
        return name, tuple(words)
    for word in words:
        if word == "-m":
            return next(words, name), tuple(words)
        if word == "-c":
            return _behind_program(name, *words), ()
        if word in _PYTHON_VALUES:
            next(words, "")
        elif not word.startswith("-"):
            return PurePath(word).name, tuple(words)
    return name, ()


def _behind_program(python: str, program: str = "", *arguments: str) -> str:
    if "spawn_main" in program:  # multiprocessing, and with it uvicorn, starts workers like this
        return "python (spawned worker)"
    if "modelguard.isolation" in program and arguments:  # a mold, or a worker, which has its mold's command line
        return f"{'broker' if arguments[0] == 'broker' else 'isolated'} {arguments[-1]}"
    return f"{python} -c"


def _app(program: str, arguments: Sequence[str]) -> str:
    if program not in _SERVERS:
        return ""
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, has_value, joined = option.partition("=")
        if name in _SERVERS[program] and (app := joined if has_value else value):
            return app
    return next(filter(_APP.fullmatch, arguments), "")


# Process trees as a table, updated live on a terminal, and as JSON. Secrets are never shown.

Show: TypeAlias = Callable[[list["TreeReport"]], None]

_LEFT = frozenset({"process", "malloc"})

_GAP = "  "

#: The maximum and minimum number of characters of a process's name; the JSON contains the whole command line.
_WIDTH = 36
_NARROWEST = 12


def choose(stream: TextIO, *, live: bool) -> Show:
    """On a terminal each reading replaces the one before, if that is wanted; otherwise they follow each other."""
    return partial(_replace if live and stream.isatty() and os.environ.get("TERM") != "dumb" else _append, stream)


def _append(stream: TextIO, trees: Sequence[TreeReport]) -> None:
    stream.write("\n".join(f"{table(tree)}\n{summary(tree)}\n" for tree in trees) + "\n")
    stream.flush()


def _replace(stream: TextIO, trees: Sequence[TreeReport]) -> None:
    columns, rows = shutil.get_terminal_size()
    lines = "\n".join(f"{table(tree, columns)}\n{summary(tree)}\n" for tree in trees).splitlines()
    # From the first line on, and what is left of the last reading is cleared.
    stream.write("\x1b[H\x1b[J" + "\n".join(_fitting(lines, columns, rows - 1)) + "\n")
    stream.flush()


def _fitting(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """The first lines that fit into this many rows, and how many more there are. Long ones take several rows."""
    ends = list(itertools.accumulate(-(-len(line) // columns) or 1 for line in lines))
    if not ends or ends[-1] <= rows:
        return list(lines)
    shown = [line for line, end in zip(lines, ends, strict=True) if end < rows]
    hidden = sum(map(bool, lines[len(shown) :]))
    return [*shown, _cut(f"{hidden} more line{'' if hidden == 1 else 's'}; --once prints all", columns)]


def table(tree: TreeReport, width: int | None = None) -> str:
    cells = [HEADINGS, *rows(tree)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        name, needed = HEADINGS.index("process"), sum(widths) + len(_GAP) * (len(widths) - 1)
        widths[name] = max(_NARROWEST, widths[name] - max(0, needed - width))
    ends = itertools.accumulate(widths, lambda end, column: end + len(_GAP) + column)
    shown = sum(width is None or end <= width for end in ends)
    return "\n".join(_GAP.join(map(_aligned, HEADINGS, row, widths[:shown])).rstrip() for row in cells)


def _aligned(heading: str, cell: str, width: int) -> str:
    cell = _cut(cell, width)
    return cell.ljust(width) if heading in _LEFT else cell.rjust(width)


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 1]}…"


def rows(tree: TreeReport) -> list[tuple[str, ...]]:
    """The cells of each process; an unknown figure is a dash."""
    depths: dict[int, int] = {}
    found = []
    for process in tree.processes:
        depth = depths[process.pid] = depths.get(process.parent, -1) + 1
        found.append(tuple(_cut(cell(process, "  " * depth), _WIDTH) for _, cell in _COLUMNS))
    return found


def _size(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _growth(count: int | None) -> str:
    return f"{'+' if count and count > 0 else ''}{_size(count)}"


#: What stands in each column, of a process and the indent of its name.
_COLUMNS: tuple[tuple[str, Callable[[ProcessReport, str], str]], ...] = (
    ("PID", lambda one, _: str(one.pid)),
    ("process", lambda one, indent: indent + process_name(one.command)),
    ("threads", lambda one, _: str(one.threads)),
    ("malloc", lambda one, _: one.allocator),
    ("PSS", lambda one, _: _size(one.pss)),
    ("USS", lambda one, _: _size(one.uss)),
    ("since birth", lambda one, _: _growth(one.since_birth)),
    ("since seen", lambda one, _: _growth(one.since_seen)),
    ("python", lambda one, _: _size(one.where.python)),
    ("heap", lambda one, _: _size(one.where.heap)),
    ("mixed", lambda one, _: _size(one.where.mixed)),
    ("stacks", lambda one, _: _size(one.where.stacks)),
    ("files", lambda one, _: _size(one.where.files)),
    ("RSS (misleading)", lambda one, _: _size(one.rss)),
)
HEADINGS = tuple(heading for heading, _ in _COLUMNS)


def summary(tree: TreeReport) -> str:
    count = len(tree.processes)
    who = "1 process uses" if count == 1 else f"{count} processes use"
    copy = format_bytes(tree.one_copy)
    copies = (
        f"{tree.copies:.2f} times what the largest, {tree.largest.pid}, would use alone ({copy})"
        if tree.model_bytes is None
        else f"{tree.copies:.2f} times the model ({copy}), including all their other memory"
    )
    lines = [
        f"{who} {format_bytes(tree.pss)}: {copies}.",
        f"Private: {format_bytes(tree.uss)}. RSS adds up to {format_bytes(tree.rss)}: it counts shared pages N times.",
    ]
    guards = ((one, guard) for one in tree.processes for guard in one.versions)
    versions = ((f"{guard} is version {one.versions[guard]}", one.pid) for one, guard in guards)
    paused = ((guard, one.pid) for one in tree.processes for guard in one.paused)
    # During a rollout a model has several versions. Where a guard is paused, policies start nothing.
    found = [*_by_process("Models", versions), *_by_process("Paused", paused), *_unused_imports(tree)]
    lines += map(printable, found)
    swap = sum(process.swap for process in tree.processes)
    if swap:
        lines.append(f"In swap: {format_bytes(swap)}.")
    if tree.unread:
        pids = ", ".join(map(str, tree.unread))
        lines.append(f"Not counted, because they belong to other users: {pids}. Run this as root to see all.")
    return "\n".join(lines)


def _by_process(head: str, pairs: Iterable[tuple[str, int]]) -> list[str]:
    having: dict[str, list[str]] = {}
    for what, pid in pairs:
        having.setdefault(what, []).append(str(pid))
    shown = "; ".join(f"{what} in {', '.join(pids)}" for what, pids in having.items())
    return [f"{head}: {shown}."] if having else []


def _unused_imports(tree: TreeReport) -> list[str]:
    """What the owners of isolated functions may have imported for nothing."""
    names = "isolated ", "broker "
    molds = {one.pid: one.parent for one in tree.processes if process_name(one.command).startswith(names)}
    return [
        f"Process {one.pid} holds {format_bytes(one.private)} of its own, with {', '.join(one.libraries)}; the models "
        "of its isolated functions are in others. Unless it uses these libraries itself, name the functions instead of "
        "importing them: @isolate(target=...)."
        for one in tree.processes
        if one.libraries and one.pid in molds.values() and one.pid not in molds
    ]


def as_dict(trees: Sequence[TreeReport]) -> dict[str, Any]:
    found = []
    for tree in trees:
        told = {name: getattr(tree, name) for name in ("pss", "uss", "copies", "one_copy")}
        told |= {"root": tree.processes[0].pid, "unread": list(tree.unread)}
        told["one_copy_is"] = "largest process" if tree.model_bytes is None else "model"
        told["processes"] = [
            dataclasses.asdict(one) | {"name": process_name(one.command), "command": command(one)}
            for one in tree.processes
        ]
        for one in told["processes"]:
            one["rss_misleading"] = one.pop("rss")
        found.append(told | {"rss_misleading": tree.rss})
    return {"trees": found}


def command(process: ProcessReport) -> str:
    """A process's command line in one line, without secrets."""
    words = process.command
    # If a program has overwritten its command line with a title, there is a single word with spaces.
    return _in_one_line(_redact.redact(words[0], {}) if len(words) == 1 else _redact.redact_command(words, {}))
