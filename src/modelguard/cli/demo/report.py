"""What is left behind: ``demo.json``, ``demo.png`` and ``report.md``."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from modelguard.cli.demo import plot, table, traffic
from modelguard.cli.demo.compare import GUARDED, UNGUARDED, Settings
from modelguard.cli.demo.record import Record, differing

_PACKAGES = ("spacy", "ja-ginza", "fastapi", "uvicorn")

_REPORT = """\
# modelguard demo

Two uvicorn servers, each with a FastAPI service around ja_ginza. One of them guards the model, with
`MemoryGrowth("{growth}")`. Both got the same requests at the same moments for {seconds:.0f} seconds.

{comparison}

{reloads}

![Private memory of both servers, and latency around each reload](demo.png)

{answers}

## How to read it

- **The words are made up, to compress days into minutes.** Each text holds {words} random katakana names that no server
  has seen before, and spaCy keeps every one of them: here {per_word:.1f} KB per word. Real texts bring new words far
  more rarely, so a real service takes hours or days for the same curve, and its guard has a higher bound.
- Requests go to `/tokens`, which runs only the tokenizer, as in the report of a growing service that this demo follows.
  That is where the growth comes from: the whole pipeline keeps the same words, and takes far longer over each.
- The steps in the curves are hash tables of spaCy that double when they are full.
- Traffic comes in bursts: {burst:g} s with a request every {spacing:.0f} ms, then {gap:g} s of quiet. A due reload
  waits for a quiet moment, at most 5 s. One that begins late in a gap meets the next burst, whose first requests wait.
- Private memory is what the process alone holds and has written to. It leaves out what it shares with other processes.
- Latency counts from the moment a request was due, so a server that stalls is charged for all whom it kept waiting.

{machine}
"""


def as_dict(settings: Settings, records: Mapping[str, Record]) -> dict[str, Any]:
    """Everything that was seen, fit for JSON: bytes and seconds."""
    return {
        "settings": {"seconds": settings.seconds, "growth": settings.growth, "seed": settings.seed},
        "machine": machine(),
        "differing_answers": differing(records[GUARDED], records[UNGUARDED]),
        "servers": {name: _server(record) for name, record in records.items()},
    }


def write(folder: Path, settings: Settings, records: Mapping[str, Record]) -> None:
    """Write all three files into ``folder``, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_dict(settings, records), indent=1)
    (folder / "demo.json").write_text(text + "\n", encoding="utf-8")
    plot.draw(records, folder / "demo.png", growth=settings.growth)
    (folder / "report.md").write_text(_report(settings, records), encoding="utf-8")


def machine() -> dict[str, str]:
    """What it ran on, as far as it matters to the figures."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        **{package: metadata.version(package) for package in _PACKAGES},
    }


def _server(record: Record) -> dict[str, Any]:
    summary = record.summary()
    return {
        "private_start": summary.start,
        "private_end": summary.end,
        "private_highest": summary.highest,
        "growth": summary.growth,
        "requests": summary.requests,
        "errors": record.errors(),
        "latency": {"p50": _number(summary.p50), "p99": _number(summary.p99), "slowest": _number(summary.slowest)},
        "reloads": [
            {"began": reload.began, "ended": reload.ended, "freed": reload.freed, "reasons": reload.reasons}
            for reload in summary.reloads
        ],
        "private_over_time": [(round(sample.time, 3), sample.private) for sample in record.samples],
        "latency_over_time": [
            (round(answer.due, 3), round(answer.latency, 6)) for answer in sorted(record.answers, key=lambda a: a.due)
        ],
        "events": record.events,
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _report(settings: Settings, records: Mapping[str, Record]) -> str:
    unguarded = records[UNGUARDED].summary()
    wrong = differing(records[GUARDED], records[UNGUARDED])
    return _REPORT.format(
        growth=settings.growth,
        seconds=settings.seconds,
        comparison=table.markdown(table.comparison(records)),
        reloads=table.markdown(table.reloads(records[GUARDED])),
        answers="Both servers gave the same answers." if not wrong else f"**{wrong} answers differ.**",
        words=traffic.WORDS,
        per_word=unguarded.growth / 1e3 / max(1, unguarded.requests * traffic.WORDS),
        burst=traffic.BURST,
        gap=traffic.GAP,
        spacing=traffic.SPACING * 1e3,
        machine=", ".join(f"{name} {version}" for name, version in machine().items()),
    )
