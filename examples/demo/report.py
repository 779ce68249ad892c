"""What the demo leaves behind: ``demo.json``, ``demo.png`` and ``report.md``."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from examples._driver import megabytes
from examples.demo import plot, traffic
from examples.demo.record import Record, Records, differing

Row = tuple[str, ...]

_PACKAGES = ("spacy", "ja-ginza", "fastapi", "uvicorn")

_REPORT = """\
# modelguard demo

Three uvicorn servers, each with a FastAPI service around ja_ginza. One guards the model, with
`MemoryGrowth("{growth}")`; one isolates it as well, so that the same policy replaces a worker process. All got the
same requests at the same moments for {seconds:.0f} seconds.

{comparison}

{reloads}

{replaced}

![Private memory of the servers, and latency around each reload](demo.png)

{answers}

## How to read it

- **The words are made up, to compress days into minutes.** Each text holds {words} random katakana names that no server
  has seen before, and spaCy keeps every one of them: here {per_word:.1f} KB per word. Real texts bring new words far
  more rarely, so a real service takes hours or days for the same curve, and its guard has a higher bound.
- Requests go to `/tokens`, which runs only the tokenizer, as in the report of a growing service that this demo follows.
  That is where the growth comes from: the whole pipeline keeps the same words, and takes far longer over each.
- The steps in the curves are hash tables of spaCy that double when they are full.
- A request comes every {spacing:.0f} ms, without any pause. The guarded server has the one copy of its model replaced
  in place, and requests that come meanwhile wait. Traffic with pauses would hide that: a due reload waits for one, at
  most 5 s. The isolated server forks a fresh worker beside the old one, and nothing waits.
- Private memory is what a server's processes have written to; what they share among themselves counts once.
- Latency counts from the moment a request was due, so a server that stalls is charged for all that it kept waiting.

{machine}
"""


def write(folder: Path, growth: str, records: Records) -> None:
    """Write all three files into ``folder``, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_dict(growth, records), indent=1)
    (folder / "demo.json").write_text(text + "\n", encoding="utf-8")
    plot.draw(records, folder / "demo.png", growth=growth)
    figures, different = records.unguarded.figures(), differing(*records)
    text = _REPORT.format(
        growth=growth,
        seconds=records.guarded.samples[-1].time,
        comparison=comparison(records),
        reloads=reloads(records.guarded),
        replaced=replaced(records.isolated),
        answers=f"**{different} answers differ.**" if different else "All servers gave the same answers.",
        words=traffic.WORDS,
        per_word=figures["growth"] / 1e3 / max(1, figures["requests"] * traffic.WORDS),
        spacing=traffic.SPACING * 1e3,
        machine=", ".join(f"{name} {version}" for name, version in machine().items()),
    )
    (folder / "report.md").write_text(text, encoding="utf-8")


def as_dict(growth: str, records: Records) -> dict[str, Any]:
    """Everything that was seen, fit for JSON: bytes and seconds."""
    servers = {
        record.name: record.figures()
        | {
            "errors": record.errors(),
            "private_over_time": [(round(time, 3), private) for time, private in record.samples],
            "latency_over_time": sorted((round(one.due, 3), round(one.latency, 6)) for one in record.outcomes),
            "events": record.events,
        }
        for record in records
    }
    different = differing(*records)
    return {"growth": growth, "machine": machine(), "differing_answers": different, "servers": servers}


def machine() -> dict[str, str]:
    """What it ran on, as far as it matters to the figures."""
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    packages = {package: metadata.version(package) for package in _PACKAGES}
    return {"python": platform.python_version(), "system": system} | packages


def comparison(records: Records) -> str:
    """A table with a column for each server."""
    every = [record.figures() for record in records]
    rows = [(title, *(show(figures[name]) for figures in every)) for title, (name, show) in _ROWS.items()]
    return markdown([("", *(record.name for record in records)), *rows])


def reloads(record: Record) -> str:
    """A table with a line for each reload."""
    heading = ("reload", "at", "took", "gave back", "slowest request meanwhile", "because of")
    rows = [
        (
            str(number),
            f"{reload.began:.1f} s",
            f"{reload.ended - reload.began:.2f} s",
            "not known" if reload.freed is None else megabytes(reload.freed),
            milliseconds(reload.slowest(record.outcomes)),
            ", ".join(reload.reasons),
        )
        for number, reload in enumerate(record.reloads(), start=1)
    ]
    return markdown([heading, *rows]) if rows else "There was no reload: the guard had no reason for one yet."


def replaced(record: Record) -> str:
    """A sentence on the workers that were replaced."""
    times = record.replaced()
    if not times:
        return "No worker was replaced: no policy was due in one yet."
    return f"Workers were replaced at {', '.join(f'{time:.1f} s' for time in times)}."


def markdown(rows: Sequence[Row]) -> str:
    """A table that reads well as plain text too: the first column to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruler = ("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:]))
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (rows[0], ruler, *rows[1:]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds; a dash if there are none."""
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


#: The lines of the comparison: which figure, and how it is shown.
_ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "private memory at the start": ("private_start", megabytes),
    "private memory at the end": ("private_end", megabytes),
    "growth": ("growth", lambda count: f"{count / 1e6:+,.0f} MB"),
    "highest": ("private_highest", megabytes),
    "requests": ("requests", "{:,}".format),
    "failed": ("failed", "{:,}".format),
    "latency, median": ("p50", milliseconds),
    "latency, 99th percentile": ("p99", milliseconds),
    "latency, slowest": ("slowest", milliseconds),
    "reloads": ("reloads", lambda found: str(len(found))),
    "workers replaced": ("replaced", lambda found: str(len(found))),
}
