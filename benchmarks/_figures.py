"""The page of figures: made of the JSON files that a run of the benchmarks leaves behind.

What was promised stands in :data:`PROMISES`, one entry for each figure, and is looked up among the rows that the
benchmarks wrote. A figure without a row is said to be missing: nothing on the page is written by hand.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common


class NoFigures(Exception):
    """There is nothing to make a page of, or it must not be made of this."""


@dataclass(frozen=True)
class Promise:
    """One figure that the project set out to reach.

    Attributes:
        what: The figure, in words.
        target: What was to be reached, in words.
        benchmark: Which benchmark measures it, None if none does.
        rows: Which of its rows, as a regular expression that matches from the beginning.
        missed: Where the page says why, if it is missed for a known reason: a link below docs/.
        otherwise: What to say in place of a figure that nothing measures.
    """

    what: str
    target: str
    benchmark: str | None
    rows: str = ""
    missed: str | None = None
    otherwise: str = "not in this run"


_LATER = "not measured: isolate is still to be built"

PROMISES = (
    Promise(
        "a guarded call over a bare wrapt decorator",
        "at most 400 ns more",
        "call_overhead",
        r"guarded (function|method|async) over bare wrapt",
        missed="decisions.md#a-guarded-function-costs-300-ns-a-method-600-a-coroutine-2300",
    ),
    Promise(
        "import modelguard over importing its three dependencies",
        "at most 15 ms",
        "import_cost",
        r"import modelguard, after its dependencies",
    ),
    Promise(
        "50 reloads of ja_ginza: memory between copies over the bare process",
        "at most 50 MB, and no trend",
        "reload_ja_ginza",
        r"(between copies: modelguard|slope over)",
        missed="decisions.md#a-guards-loads-run-in-one-kept-thread",
    ),
    Promise(
        "bursty ja_ginza: longest call while a copy loads over the steady p99",
        "at most 2",
        "reload_stall",
        r"bursty ja_ginza.*: modelguard",
    ),
    Promise(
        "MiniLM without gaps: the same",
        "at most 4",
        "reload_stall",
        r"gapless MiniLM.*: modelguard",
        missed="decisions.md#a-load-keeps-all-its-native-threads",
    ),
    Promise(
        "story 1, 6,000 texts: growth, and what it costs",
        "at most 40 MB and flat, at most 2 % of throughput",
        "spacy_growth",
        r"(largest growth|lowest in second half|CPU time): zoned",
    ),
    Promise(
        "story 2, ever new lengths: growth and CPU time over doing nothing",
        "at most 40 MB, at no more CPU time",
        "torch_dynamic_shapes",
        r"(growth|CPU time): bucketed$",
    ),
    Promise(
        "batched, a no-op model, 64 clients: the one-future floor over it, and Ray Serve's batcher over it",
        "at least 0.8 of the floor, at least 3 times Ray's: ratios of at most 1.25 and 0.33",
        "batching",
        r"no-op, (floor|Ray Serve's batcher.*) / modelguard",
        missed="decisions.md#half-of-the-floor-not-08",
    ),
    Promise("a lone request over asyncio.to_thread", "at most 1.1", "batching", r"lone, modelguard / to_thread"),
    Promise(
        "overload at twice the capacity: the capacity over answers inside the deadline",
        "0.97 of the capacity in time: a ratio of at most 1.03",
        "batching",
        r"2x overload, capacity / in time, modelguard",
    ),
    Promise(
        "a parent and 8 workers on 300 MB of objects, all of it read, CPython 3.12 or newer: copies",
        "at most 1.05",
        "sharing",
        r"300 MB of objects, every object read: prefork\.prepare",
        missed="decisions.md#106-copies-not-105",
        otherwise="not in this run: it takes CPython 3.12 or newer",
    ),
    Promise(
        "the same with 500 MB of tensors, forked, and under a server that spawns",
        "at most 1.1",
        "sharing",
        r"tensors(, uvicorn)?: (prefork\.prepare|sharing\.weights)",
    ),
    Promise(
        "a worker recycled by a fork, from the order to its first answer, over a reload of the model",
        "at most 1/20",
        "recycling",
        r"recycled by fork / reloaded",
        missed="decisions.md#a-fork-takes-a-twelfth-of-a-reload-not-a-twentieth",
    ),
    Promise("isolate, small arguments, over a bare Connection", "at most 2", None, otherwise=_LATER),
    Promise("isolate, 6 MB array, over the same Connection", "at most 0.3", None, otherwise=_LATER),
)

_HEAD = """\
# Figures

What the project set out to reach, and what was measured. Made by `make bench` (`python -m benchmarks --page`) of the
files that the benchmarks write; nothing on this page is written by hand. Only differences and ratios within one run
mean anything: absolute times drift with the machine. How to read the tables, and what each script counts:
`benchmarks/README.md`.
"""


def write(page: Path, out: Path, names: Iterable[str], *, quick: bool = False) -> list[str]:
    """Write the page, with the pictures in a folder beside it that has its name.

    Args:
        page: Where to.
        out: Where the benchmarks left their files. Those of other interpreters may lie in folders below it.
        names: The benchmarks, in the order of the page.
        quick: Whether quick runs will do; the page then says that it shows no figures.

    Returns:
        The benchmarks of which nothing was found.

    Raises:
        NoFigures: There are no files, or some are of a quick run, and ``quick`` was not asked for.
    """
    names = list(names)
    records = [(path, record) for path, record in found(out) if record["benchmark"] in names]
    records.sort(key=lambda item: (names.index(item[1]["benchmark"]), item[0].parent != out, item[0]))
    if not records:
        raise NoFigures(f"there are no files of a run below {out}: run python -m benchmarks first")
    hasty = sorted({record["benchmark"] for _, record in records if record["quick"]})
    if hasty and not quick:
        raise NoFigures(f"quick runs are not for figures: run {', '.join(hasty)} again without --quick")
    pictures = page.with_suffix("")
    parts = [_HEAD.rstrip()]
    if hasty:
        parts.append(f"**Of quick runs, and no figures: {', '.join(hasty)}.**")
    parts.append("## Promised, and measured")
    parts.append("\n".join(promised([record for _, record in records])))
    parts += [part for path, record in records for part in section(path, record, out, pictures)]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [name for name in names if name not in {record["benchmark"] for _, record in records}]


def found(out: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Give the records of a run, and of runs on other interpreters in folders below."""
    for path in sorted((*out.glob("*.json"), *out.glob("*/*.json"))):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict) and {"benchmark", "rows", "machine", "quick"} <= record.keys():
            yield path, record


def promised(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table of all that was promised."""
    yield "| figure | target | measured | quartiles | n | |"
    yield "|---|---|---|---|---|---|"
    for promise in PROMISES:
        hits = [(row, record) for record in records for row in judged(promise, record)]
        if not hits:
            yield f"| {promise.what} | {promise.target} | {promise.otherwise} | | | |"
        for row, record in hits:
            low, high = row["quartiles"]
            verdict = "met" if row["verdict"] == "reached" else "**missed**"
            if row["verdict"] != "reached" and promise.missed is not None:
                verdict += f": [why]({promise.missed})"
            name = cell(row["name"].strip())
            yield (
                f"| {promise.what} | {promise.target} | {shown(row['figure'], row)}: {name}, "
                f"{python_of(record)} | {shown(low, row)} to {shown(high, row)} | {row['n']} | {verdict} |"
            )


def judged(promise: Promise, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one record that tell whether a promise is kept."""
    if record["benchmark"] != promise.benchmark:
        return []
    return [row for row in record["rows"] if row["target"] is not None and re.match(promise.rows, row["name"].strip())]


def section(path: Path, record: dict[str, Any], out: Path, pictures: Path) -> Iterator[str]:
    """One benchmark: its machine, its table, its notes, its picture."""
    where = "" if path.parent == out else f" ({python_of(record)})"
    yield f"## {record['title']}{where}"
    if record["quick"]:
        yield "A quick run, not for figures."
    yield "  \n".join(_common.describe(record["machine"]).splitlines())
    lines = ["| figure | target | measured | quartiles | min .. max | n | |", "|---|---|---|---|---|---|---|"]
    for row in record["rows"]:
        low, high = row["quartiles"]
        target = "" if row["target"] is None else f"at most {shown(row['target'], row)}"
        verdict = {"reached": "met", "MISSED": "**missed**"}.get(row["verdict"], "")
        lines.append(
            f"| {cell(row['name'].strip())} | {target} | {shown(row['figure'], row)} | {shown(low, row)} to "
            f"{shown(high, row)} | {shown(row['min'], row)} .. {shown(row['max'], row)} | {row['n']} | {verdict} |"
        )
    yield "\n".join(lines)
    if any(note.strip() for note in record["notes"]):
        yield "\n".join(["```text", *(note.rstrip() for note in record["notes"] if note is not None), "```"])
    picture = path.with_suffix(".png")
    if picture.is_file():
        pictures.mkdir(parents=True, exist_ok=True)
        name = "-".join((*path.parent.relative_to(out).parts, picture.name))
        shutil.copyfile(picture, pictures / name)
        yield f"![{record['title']}]({pictures.name}/{name})"


def shown(value: float, row: dict[str, Any]) -> str:
    """A value with its unit."""
    return f"{_common.number(value)} {row['unit']}".rstrip()


def cell(text: str) -> str:
    """Text that does not end its cell, and is not taken for markup."""
    return re.sub(r"([|<_*\[\]])", r"\\\1", text)


def python_of(record: dict[str, Any]) -> str:
    """The interpreter of a record."""
    return str(record["machine"]["python"])
