"""The figures in words: the same rows for the terminal and for the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from modelguard.cli.demo.record import Record, Summary, slowest_beside

Row = tuple[str, ...]


def comparison(records: Mapping[str, Record]) -> list[Row]:
    """One column per server, the heading first."""
    summaries = [record.summary() for record in records.values()]
    lines: list[tuple[str, Callable[[Summary], str]]] = [
        ("private memory at the start", lambda s: megabytes(s.start)),
        ("private memory at the end", lambda s: megabytes(s.end)),
        ("growth", lambda s: megabytes(s.growth, sign=True)),
        ("highest", lambda s: megabytes(s.highest)),
        ("requests", lambda s: f"{s.requests:,}"),
        ("failed", lambda s: f"{s.errors:,}"),
        ("latency, median", lambda s: milliseconds(s.p50)),
        ("latency, 99th percentile", lambda s: milliseconds(s.p99)),
        ("latency, slowest", lambda s: milliseconds(s.slowest)),
        ("reloads", lambda s: str(len(s.reloads))),
    ]
    return [("", *records), *((title, *map(tell, summaries)) for title, tell in lines)]


def reloads(record: Record) -> list[Row]:
    """One row per reload, the heading first; no row at all if there was none."""
    rows: list[Row] = [("reload", "at", "took", "gave back", "slowest request meanwhile", "because of")]
    found = record.reloads()
    for number, reload in enumerate(found, start=1):
        slowest = slowest_beside(reload, record.answers)
        rows.append(
            (
                str(number),
                f"{reload.began:.1f} s",
                f"{reload.seconds:.2f} s",
                "not told" if reload.freed is None else megabytes(reload.freed),
                "none came" if math.isnan(slowest) else milliseconds(slowest),
                ", ".join(reload.reasons),
            )
        )
    return rows if found else []


def markdown(rows: Sequence[Row]) -> str:
    """A table that reads well as plain text too: the first column to the left, figures to the right."""
    if not rows:
        return "There was no reload: the guard had no reason for one yet."
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    ruler = tuple("-" * widths[0] if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths))
    return "\n".join(_line(row, widths) for row in (rows[0], ruler, *rows[1:]))


def _line(row: Row, widths: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return f"| {' | '.join(cells)} |"


def megabytes(count: int, *, sign: bool = False) -> str:
    """Bytes as whole megabytes (10**6)."""
    return f"{count / 1e6:+,.0f} MB" if sign else f"{count / 1e6:,.0f} MB"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds; a dash if there are none."""
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:,.1f} ms"
