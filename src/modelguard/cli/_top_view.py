"""Process trees as a table, updated live on a terminal, and as JSON. Secrets are never shown."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from modelguard._units import format_bytes, printable
from modelguard.cli._process_name import process_name
from modelguard.diagnosis import _redact

if TYPE_CHECKING:
    from rich.console import Group

    from modelguard.sharing._reports import ProcessReport, TreeReport

Show: TypeAlias = Callable[[list["TreeReport"]], None]

HEADINGS = (
    "PID",
    "process",
    "threads",
    "malloc",
    "PSS",
    "USS",
    "since birth",
    "since seen",
    "python",
    "heap",
    "mixed",
    "stacks",
    "files",
    "RSS (misleading)",
)
_LEFT = frozenset({"process", "malloc"})

_GAP = "  "

#: The maximum and minimum number of characters of a process's name; the JSON contains the whole command line.
_WIDTH = 36
_NARROWEST = 12


def choose(stream: TextIO, *, live: bool) -> AbstractContextManager[Show]:
    """The live view if it is wanted, rich is installed and ``stream`` is a terminal; otherwise plain text."""
    if live and stream.isatty() and importlib.util.find_spec("rich") is not None:
        return _live(stream)
    return _plain(stream)


@contextmanager
def _plain(stream: TextIO) -> Iterator[Show]:
    def show(trees: list[TreeReport]) -> None:
        stream.write("\n".join(f"{table(tree)}\n{summary(tree)}\n" for tree in trees) + "\n")
        stream.flush()

    yield show


@contextmanager
def _live(stream: TextIO) -> Iterator[Show]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)
    with Live(console=console, auto_refresh=False) as live:
        yield lambda trees: live.update(_rendered(trees, console.width), refresh=True)


def _rendered(trees: Sequence[TreeReport], width: int) -> Group:
    from rich.console import Group
    from rich.text import Text

    parts: list[Text] = []
    for tree in trees:
        shown = Text(table(tree, width), no_wrap=True)
        shown.highlight_regex(r"\A.*", "bold")
        parts += [shown, Text(f"{summary(tree)}\n")]
    return Group(*parts)


def table(tree: TreeReport, width: int | None = None) -> str:
    """One line per process, in aligned columns.

    Args:
        tree: The tree.
        width: Characters of a line. Default: as many as needed. If there is too little space, names are shortened
            first, then the columns on the right are left out.
    """
    cells = [HEADINGS, *rows(tree)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        name, needed = HEADINGS.index("process"), sum(widths) + len(_GAP) * (len(widths) - 1)
        widths[name] = max(_NARROWEST, widths[name] - max(0, needed - width))
    ends = itertools.accumulate(widths, lambda end, column: end + len(_GAP) + column)
    shown = sum(width is None or end <= width for end in ends)
    return "\n".join(_GAP.join(map(_aligned, HEADINGS, row, widths[:shown])).rstrip() for row in cells)


def _aligned(heading: str, cell: str, width: int) -> str:
    cell = cell if len(cell) <= width else f"{cell[: width - 1]}…"
    return cell.ljust(width) if heading in _LEFT else cell.rjust(width)


def rows(tree: TreeReport) -> list[tuple[str, ...]]:
    """The cells of each process; an unknown figure is a dash."""
    depths: dict[int, int] = {}
    for process in tree.processes:
        depths[process.pid] = depths.get(process.parent, -1) + 1
    return [_row(process, depths[process.pid]) for process in tree.processes]


def _row(process: ProcessReport, depth: int) -> tuple[str, ...]:
    name = "  " * depth + process_name(process.command)
    where = process.where
    return (
        str(process.pid),
        name if len(name) <= _WIDTH else f"{name[: _WIDTH - 1]}…",
        str(process.threads),
        process.allocator,
        format_bytes(process.pss),
        format_bytes(process.uss),
        _growth(process.since_birth),
        _growth(process.since_seen),
        "-" if where.python is None else format_bytes(where.python),
        *map(format_bytes, (where.heap, where.mixed, where.stacks, where.files, process.rss)),
    )


def summary(tree: TreeReport) -> str:
    """The memory of the whole tree, and the number of copies, in two or three sentences."""
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
    lines += map(printable, _versions(tree) + _pauses(tree) + _unused_imports(tree))
    swap = sum(process.swap for process in tree.processes)
    if swap:
        lines.append(f"In swap: {format_bytes(swap)}.")
    if tree.unread:
        pids = ", ".join(map(str, tree.unread))
        lines.append(f"Not counted, because they belong to other users: {pids}. Run this as root to see all.")
    return "\n".join(lines)


def _versions(tree: TreeReport) -> list[str]:
    """The versions of the models, each with the processes that have it: during a rollout there are several."""
    having: dict[tuple[str, str], list[int]] = {}
    for process in tree.processes:
        for guard, version in process.versions.items():
            having.setdefault((guard, version), []).append(process.pid)
    shown = (
        f"{guard} is version {version} in {', '.join(map(str, pids))}" for (guard, version), pids in having.items()
    )
    return [f"Models: {'; '.join(shown)}."] if having else []


def _pauses(tree: TreeReport) -> list[str]:
    """The guards that are paused, each with its processes: policies start nothing there."""
    paused: dict[str, list[int]] = {}
    for process in tree.processes:
        for guard in process.paused:
            paused.setdefault(guard, []).append(process.pid)
    shown = (f"{guard} in {', '.join(map(str, pids))}" for guard, pids in paused.items())
    return [f"Paused: {'; '.join(shown)}."] if paused else []


def _unused_imports(tree: TreeReport) -> list[str]:
    """What the owners of isolated functions may have imported for nothing."""
    molds = {
        one.pid: one.parent for one in tree.processes if process_name(one.command).startswith(("isolated ", "broker "))
    }
    return [
        f"Process {one.pid} holds {format_bytes(one.private)} of its own, with {', '.join(one.libraries)}; the models "
        "of its isolated functions are in others. Unless it uses these libraries itself, name the functions instead of "
        "importing them: @isolate(target=...)."
        for one in tree.processes
        if one.libraries and one.pid in molds.values() and one.pid not in molds
    ]


def as_dict(trees: Sequence[TreeReport]) -> dict[str, Any]:
    """The figures for JSON, sizes in bytes and durations in seconds."""
    return {"trees": [_tree(tree) for tree in trees]}


def _tree(tree: TreeReport) -> dict[str, Any]:
    return {
        "root": tree.processes[0].pid,
        "pss": tree.pss,
        "uss": tree.uss,
        "copies": tree.copies,
        "one_copy": tree.one_copy,
        "one_copy_is": "largest process" if tree.model_bytes is None else "model",
        "unread": list(tree.unread),
        "processes": [_process(process) for process in tree.processes],
        "rss_misleading": tree.rss,
    }


def _process(process: ProcessReport) -> dict[str, Any]:
    shown = {"name": process_name(process.command), "command": command(process)}
    figures = dataclasses.asdict(process) | shown
    return figures | {"rss_misleading": figures.pop("rss")}


def command(process: ProcessReport) -> str:
    """A process's command line in one line, without secrets."""
    words = process.command
    # If a program has overwritten its command line with a title, there is a single word with spaces.
    text = _redact.redact(words[0], {}) if len(words) == 1 else _redact.redact_command(words, {})
    return " ".join("".join(char if char.isprintable() else " " for char in text).split()) or "?"


def _growth(count: int | None) -> str:
    return "-" if count is None else f"{'+' if count > 0 else ''}{format_bytes(count)}"
