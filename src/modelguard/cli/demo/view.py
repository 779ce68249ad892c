"""What is seen while it runs: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TextIO

from modelguard.cli.demo.record import Record, Sample
from modelguard.cli.demo.table import megabytes, milliseconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Group

    from modelguard.cli.demo.compare import Show

#: Seconds between two plain lines.
PACE = 10.0

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40


def choose(stream: TextIO, clock: Callable[[], float] = time.monotonic) -> AbstractContextManager[Show]:
    """The live display where rich is installed and ``stream`` is a terminal, else plain lines."""
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        return _live(stream)
    return _plain(stream, clock)


@contextmanager
def _plain(stream: TextIO, clock: Callable[[], float]) -> Iterator[Show]:
    last_doing, next_line = "", 0.0

    def show(doing: str, done: float, records: Sequence[Record]) -> None:
        nonlocal last_doing, next_line
        now = clock()
        if doing == last_doing and now < next_line:
            return
        last_doing, next_line = doing, now + PACE
        stream.write(f"{done:4.0%} {doing}{''.join(map(_sentence, records))}\n")
        stream.flush()

    yield show


def _sentence(record: Record) -> str:
    if not record.samples:
        return ""
    summary = record.summary()
    private = megabytes(record.samples[-1].private)
    return (
        f"; {record.name}: {private}, {summary.requests} requests, p50 {milliseconds(summary.p50)}, "
        f"p99 {milliseconds(summary.p99)}, {len(summary.reloads)} reloads"
    )


@contextmanager
def _live(stream: TextIO) -> Iterator[Show]:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=stream), refresh_per_second=4) as live:
        yield lambda doing, done, records: live.update(_picture(doing, done, records))


def _picture(doing: str, done: float, records: Sequence[Record]) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "private memory", "now", "since start", "requests", "failed", "p50", "p99", "reloads"):
        table.add_column(heading, justify="left" if heading in {"", "private memory"} else "right", no_wrap=True)
    samples = [sample.private for record in records for sample in record.samples]
    for record, colour in zip(records, ("green", "red"), strict=True):
        summary = record.summary()
        if not record.samples:
            table.add_row(record.name)
            continue
        now = record.samples[-1].private
        table.add_row(
            record.name,
            f"[{colour}]{sparkline(record.samples, min(samples), max(samples))}",
            megabytes(now),
            megabytes(now - summary.start, sign=True),
            f"{summary.requests:,}",
            str(summary.errors),
            milliseconds(summary.p50),
            milliseconds(summary.p99),
            str(len(summary.reloads)),
        )
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=1.0, completed=done, width=_WIDTH), f"{done:.0%}", f"[bold]{doing}[/bold]")
    return Group(bar, table)


def sparkline(samples: Sequence[Sample], low: int, high: int, width: int = _WIDTH) -> str:
    """The whole curve in ``width`` characters, between the same bounds for every curve."""
    span = max(1, high - low)
    chosen = [samples[position * len(samples) // width].private for position in range(width)]
    return "".join(_BARS[(value - low) * (len(_BARS) - 1) // span] for value in chosen)
