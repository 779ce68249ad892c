"""``modelguard top``: shows how much memory process trees actually use, read from outside."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from modelguard.cli import _output
from modelguard.cli._pid import process_id
from modelguard.errors import InvalidOption, ModelGuardError

if TYPE_CHECKING:
    from modelguard.sharing._reports import TreeReport, TreeWatch

USAGE = 2

#: Seconds between readings; a reading takes 50 - 150 ms for each process with torch or spaCy.
INTERVAL = 2.0
SHORTEST = 0.1


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``modelguard``."""
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
    try:
        _run(options)
    except ModelGuardError as error:
        return _fail(str(error))
    except (ProcessLookupError, PermissionError) as error:
        return _fail(str(error.strerror))
    except KeyboardInterrupt:  # the usual end
        pass
    return 0


def _run(options: argparse.Namespace) -> None:
    from modelguard.cli import _top_view

    interval = _interval(options.interval)
    read = make_reader(None if options.pid is None else process_id(options.pid), _model_bytes(options.model_bytes))
    if options.json:
        _repeat(read, _print_json, None if options.once else interval)
    else:
        with _top_view.choose(sys.stdout, live=not options.once) as show:
            _repeat(read, show, None if options.once else interval)


def make_reader(pid: int | None, model_bytes: int | str | None) -> Callable[[], list[TreeReport]]:
    """Make a function that reads the tree of a process, or all trees of this user's Python processes."""
    from modelguard.sharing import _reports

    if pid is not None:
        watch = _reports.TreeWatch(pid, model_bytes=model_bytes)
        return lambda: [watch.look()]
    watches: dict[int, TreeWatch] = {}

    def read() -> list[TreeReport]:
        found = _reports.python_trees(without=(os.getpid(),))
        for ended in watches.keys() - found:
            del watches[ended]
        trees = []
        for top in found:
            if top not in watches:
                watches[top] = _reports.TreeWatch(top, model_bytes=model_bytes)
            try:
                trees.append(watches[top].look())
            except (ProcessLookupError, PermissionError):  # it has just ended, or is hidden
                del watches[top]
        if not trees:
            raise ProcessLookupError(0, "you have no other running Python process; give the PID of a server")
        return sorted(trees, key=lambda tree: tree.pss, reverse=True)

    return read


def _repeat(
    read: Callable[[], list[TreeReport]], show: Callable[[list[TreeReport]], None], interval: float | None
) -> None:
    show(read())
    while interval is not None and not _output.is_lost():
        time.sleep(interval)
        show(read())


def _print_json(trees: list[TreeReport]) -> None:
    from modelguard.cli import _top_view

    print(json.dumps(_top_view.as_dict(trees)), flush=True)  # noqa: T201 - the output of the command


def _interval(text: str | None) -> float:
    from modelguard import _units

    if text is None:
        return INTERVAL
    try:
        interval = float(text)
    except ValueError:
        interval = _units.seconds(text, "--interval", zero=True)
    if not SHORTEST <= interval < math.inf:
        why = f"must be at least {SHORTEST:g} s, because a reading takes longer than that"
        raise InvalidOption("--interval", text, why=why, fix=f"Write --interval {INTERVAL:g}.")
    return interval


def _model_bytes(text: str | None) -> int | None:
    from modelguard import _units

    if text is None:
        return None
    return _units.size(int(text) if re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) else text, "--model-bytes")


def _fail(why: str) -> int:
    print(f"modelguard top: {why}", file=sys.stderr)  # noqa: T201
    return USAGE
