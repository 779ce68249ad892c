"""``modelguard demo``: a guarded service and the same service unguarded, side by side under the same traffic."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelguard.cli.demo.record import Record

INTERRUPTED = 130

SECONDS = 105.0
SHORTEST = 5.0
GROWTH = "45 MB"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``modelguard``."""
    parser = commands.add_parser(
        "demo",
        help="run a guarded service beside the same service unguarded",
        description="Runs two uvicorn servers with ja_ginza, one guarded, under the same traffic of ever-new words, "
        "for about two minutes. Leaves a picture, the figures and a report behind.",
        epilog="exit status: 0 success, 1 a server died or the guarded one failed a request, 2 it could not run",
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=_seconds, default=SECONDS, metavar="N", help="length of the traffic, default: %(default)g"
    )
    parser.add_argument(
        "--growth", default=GROWTH, metavar="SIZE", help="growth at which the guard reloads, default: %(default)s"
    )
    parser.add_argument(
        "--app-dir",
        type=Path,
        default=Path("examples/fastapi_spacy"),
        metavar="DIR",
        help="where app.py and unguarded.py are, default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from modelguard.cli.demo.failure import DemoFailed

    try:
        with _signals_interrupt():
            return _run(options)
    except DemoFailed as failure:
        print(failure, file=sys.stderr)  # noqa: T201
        return failure.status
    except KeyboardInterrupt:
        print("Interrupted; both servers have been stopped.", file=sys.stderr)  # noqa: T201
        return INTERRUPTED


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let a request to end act like a Ctrl-C, so that every ``finally`` which stops a server runs."""
    # Not every system has both.
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:  # nohup has SIGHUP ignored, and means it
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(options: argparse.Namespace) -> int:
    from modelguard.cli.demo import compare, report, view
    from modelguard.cli.demo.failure import DemoFailed, require_apps, require_modules

    require_modules()
    require_apps(options.app_dir, compare.APPS.values())
    settings = compare.Settings(folder=options.app_dir, seconds=options.seconds, growth=_size(options.growth))
    with view.choose(sys.stderr) as show:
        records = compare.compare(settings, show)
        show("drawing the picture", 1.0, list(records.values()))
        report.write(options.out, settings, records)
    if options.json:
        print(json.dumps(report.as_dict(settings, records)))  # noqa: T201
    else:
        _print_tables(records, options.out)
    guarded = records[compare.GUARDED]
    if errors := guarded.errors():
        tail = "".join(f"\n  {line}" for line in guarded.last_lines)
        count = f"{len(errors)} of {len(guarded.answers)} requests"
        raise DemoFailed(f"The guarded server failed {count}, the first {errors[0]}{tail}")
    return 0


def _print_tables(records: Mapping[str, Record], out: Path) -> None:
    from modelguard.cli.demo import compare, table

    print(f"\n{table.markdown(table.comparison(records))}\n")  # noqa: T201
    print(f"{table.markdown(table.reloads(records[compare.GUARDED]))}\n")  # noqa: T201
    print(f"Picture: {out / 'demo.png'}   Report: {out / 'report.md'}   Figures: {out / 'demo.json'}")  # noqa: T201


def _seconds(text: str) -> float:
    seconds = float(text)
    if not SHORTEST <= seconds <= 24 * 3600:
        raise argparse.ArgumentTypeError(f"give from {SHORTEST:g} seconds to a day")
    return seconds


def _size(text: str) -> str:
    from modelguard import MemoryGrowth
    from modelguard.cli.demo.failure import CANNOT_RUN, DemoFailed
    from modelguard.errors import InvalidOption

    try:
        MemoryGrowth(text)
    except InvalidOption as error:
        raise DemoFailed(f"--growth: {error}", status=CANNOT_RUN) from error
    return text
