"""The page of figures: made from the JSON files that a run of the benchmarks writes.

:data:`PROMISES` lists the targets, one entry for each figure. Each is looked up among the rows that the benchmarks
wrote, and is marked as not measured if there is none: nothing on the page is written by hand.
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
    """There are no files to make a page from, or they must not be published."""


@dataclass(frozen=True)
class Promise:
    """One figure that the project set out to reach.

    Attributes:
        what: What is measured.
        target: The target.
        benchmark: Which benchmark measures it, None if none does.
        rows: Which of its rows, as a regular expression that matches from the beginning.
        missed: If the target is missed for a known reason, where that is explained: a link from the page.
        otherwise: What the page shows if there is no figure.
    """

    what: str
    target: str
    benchmark: str | None
    rows: str = ""
    missed: str | None = None
    otherwise: str = "not in this run"


PROMISES = (
    Promise(
        "extra time of a guarded call, compared with a bare wrapt decorator",
        "at most 400 ns",
        "call_overhead",
        r"guarded (function|method|async) over bare wrapt",
        missed="decisions.md#a-guarded-function-costs-350-ns-a-method-700-a-coroutine-1400",
    ),
    Promise(
        "extra time of `from modelguard import guard`, after its three dependencies",
        "at most 15 ms",
        "import_cost",
        r"from modelguard import guard, after its dependencies",
    ),
    Promise(
        "50 reloads of ja_ginza: private memory between two copies, above that of the bare process",
        "at most 50 MB, no trend",
        "reload_ja_ginza",
        r"(between copies: modelguard|slope over)",
        missed="decisions.md#a-guards-loads-run-in-one-kept-thread",
    ),
    Promise(
        "ja_ginza, calls in bursts: longest call during a load, relative to the p99 of all other calls",
        "at most 2",
        "reload_stall",
        r"bursty ja_ginza.*: modelguard",
    ),
    Promise(
        "the same for MiniLM, calls without gaps",
        "at most 4",
        "reload_stall",
        r"gapless MiniLM.*: modelguard",
        missed="decisions.md#a-load-keeps-all-its-native-threads",
    ),
    Promise(
        "story 1, 6,000 texts: growth of memory, and its price",
        "at most 40 MB and flat; at most 2 % of throughput",
        "spacy_growth",
        r"(largest growth|lowest in second half|CPU time): zoned",
    ),
    Promise(
        "story 2, many input lengths: growth of memory, and CPU time compared with doing nothing",
        "at most 40 MB and no extra CPU time",
        "torch_dynamic_shapes",
        r"(growth|CPU time): bucketed$",
    ),
    Promise(
        "story 3, a no-op model, 64 clients: rate of a bare hand-over, and of Ray Serve's batcher, over `batched`",
        "at least 0.75 of the hand-over's rate with a deadline, 0.8 without, 0.6 with weights, and 4 times Ray's: at "
        "most 1.33, 1.25, 1.67 and 0.25",
        "batching",
        r"no-op, (bare hand-over|Ray Serve's batcher.*) / modelguard",
        missed="decisions.md#three-quarters-of-a-bare-hand-over",
    ),
    Promise(
        "story 3, one request at a time: time relative to asyncio.to_thread",
        "at most 1.2 with a deadline, 1.05 without",
        "batching",
        r"lone, modelguard.* / to_thread",
    ),
    Promise(
        "story 3, load of twice the capacity: capacity relative to the rate of answers before the deadline",
        "answers in time at 0.97 of the capacity: a ratio of at most 1.03",
        "batching",
        r"2x overload, capacity / in time, modelguard",
    ),
    Promise(
        "story 4, a parent and 8 workers with 300 MB of objects, all read, CPython 3.12 or newer: copies",
        "at most 1.05",
        "sharing",
        r"300 MB of objects, every object read: prefork\.prepare",
        missed="decisions.md#a-worker-writes-three-megabytes-of-its-own",
        otherwise="not in this run: needs CPython 3.12 or newer",
    ),
    Promise(
        "the same with 500 MB of tensors: forked workers, and workers that uvicorn spawns",
        "at most 1.1",
        "sharing",
        r"tensors(, uvicorn)?: (prefork\.prepare|weights\.load)",
    ),
    Promise(
        "a worker replaced by a fork: time from the order to its first answer, relative to a reload in the worker",
        "at most 1/20",
        "recycling",
        r"recycled by fork / reloaded",
        missed="decisions.md#a-fork-takes-a-twelfth-of-a-reload-not-a-twentieth",
    ),
    Promise(
        "isolate, a short text: time relative to a bare Connection", "at most 2", "isolation", r"small call: isolate"
    ),
    Promise(
        "isolate, a 6 MB array: time relative to the same Connection",
        "at most 0.3",
        "isolation",
        r"6 MB array: isolate",
    ),
    Promise(
        "isolate: a worker replaced by a fork, from the order to its first answer, relative to a reload in the process",
        "at most 1/20",
        "isolation",
        r"fresh worker / reload",
        missed="decisions.md#a-spare-worker-instead-of-a-faster-fork",
    ),
    Promise(
        "isolate: private memory of a fresh worker, relative to the model",
        "at most 5 %",
        "isolation",
        r"private memory of a fresh worker",
    ),
    Promise(
        "isolate: longest request during a reload of ja_ginza under uvicorn, without gaps, relative to the p99",
        "at most 1.5",
        "isolation",
        r"longest request during a reload / p99: isolated",
        missed="decisions.md#a-mold-loads-beside-calls-with-less-priority",
    ),
    Promise(
        "isolate: longest call while ja_ginza is replaced under uvicorn, 8 threads without pauses, relative to the p99",
        "at most 1.5",
        "isolation_replacement",
        r"longest call during a replacement / p99: isolate",
        missed="decisions.md#a-mold-loads-beside-calls-with-less-priority",
    ),
    Promise(
        "the same, relative to the longest call of an equal time without a replacement",
        "at most 1.3",
        "isolation_replacement",
        r"longest call / of an equal time without: isolate",
        missed="decisions.md#a-mold-loads-beside-calls-with-less-priority",
    ),
    Promise(
        "isolate: MiniLM in batches, in two workers: rate in the process, relative to it",
        "at least 0.95 of the rate: a ratio of at most 1/0.95",
        "isolation_batching",
        r"rate in the process / isolated",
    ),
    Promise(
        "isolate: 50 replacements of workers and 20 of molds, slope of the memory of all processes",
        "no rise beyond twice its error",
        "isolation",
        r"PSS of the tree",
    ),
    Promise(
        "10,000 reloads and 1,000 molds of a small model: slopes of descriptors, threads, files and memory",
        "no rise beyond twice its error",
        "endurance",
        r".*, slope over",
    ),
    Promise(
        "isolate: a leaking model, 100,000 calls: rate of the same model without the leak, relative to it",
        "at most 1/0.95",
        "isolation",
        r"rate without a leak",
        missed="decisions.md#a-leak-costs-its-page-faults",
    ),
    Promise(
        "10,000 replicas that were started together: the largest share that cannot answer at one time",
        "at most 5 %",
        "fleet",
        r".*, 10,000: away",
        missed="decisions.md#what-a-replica-alone-cannot-keep",
    ),
    Promise(
        "the same: requests a second to the registry, over their mean",
        "at most 3",
        "fleet",
        r".*, 10,000: herd",
        missed="decisions.md#what-a-replica-alone-cannot-keep",
    ),
    Promise(
        "the same: from the end of an outage of the registry until all have new weights, in waits of the backoff",
        "at most 2",
        "fleet",
        r".*, 10,000: recovery",
    ),
)

_HEAD = """\
# Figures

The targets of the project, met or missed, and what was measured. `make bench` (`python -m benchmarks --page`) makes
this page from the files that the benchmarks write; nothing here is written by hand. Compare figures within one run
only: absolute times vary with the machine. `benchmarks/README.md` explains the tables and what each script counts.

The stories are four services from practice: (1) spaCy and texts full of new words, (2) torch on CPUs and inputs of many
lengths, (3) many clients and one model, (4) many workers, each with a copy of the model.
"""


def write(page: Path, out: Path, names: Iterable[str], *, quick: bool = False) -> list[str]:
    """Write the page, with the pictures in a folder beside it that has its name.

    Args:
        page: The page to write.
        out: The folder with the benchmarks' files. Those of other interpreters may be in folders below it.
        names: The benchmarks, in the order of the page.
        quick: Whether to accept quick runs; the page then says that its figures do not count.

    Returns:
        The benchmarks without a file.

    Raises:
        NoFigures: There are no files, or some are from quick runs and ``quick`` is false.
    """
    names = list(names)
    records = [(path, record) for path, record in found(out) if record["benchmark"] in names]
    records.sort(key=lambda item: (names.index(item[1]["benchmark"]), item[0].parent != out, item[0]))
    if not records:
        raise NoFigures(f"{out} has no files of a run: run python -m benchmarks first")
    hasty = sorted({record["benchmark"] for _, record in records if record["quick"]})
    if hasty and not quick:
        raise NoFigures(f"quick runs are not for figures: run {', '.join(hasty)} again without --quick")
    pictures = page.with_suffix("")
    parts = [_HEAD.rstrip()]
    if hasty:
        parts.append(f"**Quick runs, not valid as figures: {', '.join(hasty)}.**")
    parts.append("## Targets and results")
    parts.append("\n".join(promised([record for _, record in records])))
    parts += [part for path, record in records for part in section(path, record, out, pictures)]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [name for name in names if name not in {record["benchmark"] for _, record in records}]


def found(out: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The records of a run, and those of other interpreters in folders below."""
    for path in sorted((*out.glob("*.json"), *out.glob("*/*.json"))):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict) and {"benchmark", "rows", "machine", "quick"} <= record.keys():
            yield path, record


def promised(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table of all targets."""
    yield "| figure | target | measured | quartiles | n | result |"
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
    """The rows of one record that show whether a promise is kept."""
    if record["benchmark"] != promise.benchmark:
        return []
    return [row for row in record["rows"] if row["target"] is not None and re.match(promise.rows, row["name"].strip())]


def section(path: Path, record: dict[str, Any], out: Path, pictures: Path) -> Iterator[str]:
    """One benchmark: its machine, its table, its notes, its picture."""
    title = record["title"] if path.parent == out else f"{record['title']} ({python_of(record)})"
    yield f"## {title}"
    if record["quick"]:
        yield "A quick run, not valid as figures."
    yield "  \n".join(_common.describe(record["machine"]).splitlines())
    lines = ["| figure | target | measured | quartiles | min .. max | n | result |", "|---|---|---|---|---|---|---|"]
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
        yield f"![{title}]({pictures.name}/{name})"


def shown(value: float, row: dict[str, Any]) -> str:
    """A value with its unit."""
    return f"{_common.number(value)} {row['unit']}".rstrip()


def cell(text: str) -> str:
    """Text without anything that Markdown would take for the end of a cell, or for markup."""
    return re.sub(r"([|<_*\[\]])", r"\\\1", text)


def python_of(record: dict[str, Any]) -> str:
    """The interpreter of a record."""
    return str(record["machine"]["python"])
