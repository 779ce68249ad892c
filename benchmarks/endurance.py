"""What thousands of reloads and molds leave behind: descriptors, threads, files and memory, each with its slope.

A small model is loaded anew in this process, and by new molds of an isolated function, until so many are done or half
of the time is over. Read now and then: the open descriptors and the threads of this process, its files in the temporary
folder, what is in ``/dev/shm``, and the proportional memory (PSS) of the whole tree. A slope counts from the tenth part
on, for one reload or one mold; its interval is twice its standard error.
"""

from __future__ import annotations

import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common
import psutil

from modelguard import guard, memory, telemetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Readings of each series; fewer if the time ends before.
READINGS = 200
QUANTITIES = {"descriptors": "", "threads": "", "/dev/shm": "files", "TMPDIR": "files", "PSS of the tree": "kB"}
OPEN = ("/proc/self/fd", "/proc/self/task", "/dev/shm")


def read() -> list[float]:
    """A figure for each of the quantities."""
    here = psutil.Process()
    total = 0
    for pid in (here.pid, *(one.pid for one in here.children(recursive=True))):
        with suppress(ProcessLookupError):
            total += memory.usage(pid).pss or 0
    counts = [len(list(Path(place).iterdir())) for place in (*OPEN, tempfile.gettempdir())]
    return [*map(float, counts), total / 1e3]


def series(kind: str, count: int, seconds: float) -> dict[str, Any]:
    """Repeat, and read now and then."""
    telemetry.set_hooks([])
    repeat = reloads() if kind == "reloads" else molds()
    step = max(1, count // READINGS)
    # Objects that are made beside a model keep its memory: there is room for the readings before.
    readings = [array("d", bytes(8 * (count // step + 1))) for _ in QUANTITIES]
    until, taken = time.monotonic() + seconds, 0
    for number in range(1, count + 1):
        repeat()
        if number % step == 0:
            for room, value in zip(readings, read(), strict=True):
                room[taken] = value
            taken += 1
            if time.monotonic() > until:
                break
    found = {name: list(room[:taken]) for name, room in zip(QUANTITIES, readings, strict=True)}
    return {"done": number, "step": step, "readings": found}


def load() -> list[str]:
    return [f"word {number}" for number in range(20_000)]


def reloads() -> Callable[[], object]:
    """A reload in this process, and a call."""
    words = guard(load, reload_on=None)
    words.load()

    @words
    def call(model: list[str]) -> str:
        return model[-1]

    def repeat() -> None:
        words.reload()
        call()

    return repeat


def molds() -> Callable[[], object]:
    """A new mold, and a call of one of its workers."""
    import _isolated

    _isolated.words.load()

    def repeat() -> None:
        _isolated.words.reload()
        _isolated.words(-1)

    return repeat


def main() -> None:
    benchmark = _common.Benchmark(
        "endurance", "What thousands of reloads and molds leave behind", reloads=10_000, molds=1_000, minutes=15
    )
    rows, found = [], {}
    for kind in ("reloads", "molds"):
        count = 40 if benchmark.quick else benchmark.counts[kind]
        with tempfile.TemporaryDirectory() as folder:
            seconds = benchmark.counts["minutes"] * 30
            found[kind] = one = _common.fresh(__file__, kind, str(count), str(seconds), TMPDIR=folder)
        for name, unit in QUANTITIES.items():
            values = one["readings"][name]
            rise, error = (figure / one["step"] for figure in _common.slope(values[len(values) // 10 :]))
            title = f"{name}, slope over {one['done']:,} {kind} (+- {2 * error:.2g}), from {values[0]:,.0f}"
            target = None if benchmark.quick else 2 * error
            rows.append(_common.Row(title, [rise], f"{unit}/{kind.removesuffix('s')}", target, ours=True))

    def draw(figure: Figure) -> None:
        for axes, kind in zip(figure.subplots(1, 2), found, strict=True):
            one = found[kind]
            places = [one["step"] * number for number in range(1, 1 + len(one["readings"]["threads"]))]
            axes.plot(places, [value / 1e3 for value in one["readings"]["PSS of the tree"]], color=_common.OURS)
            axes.set_ylim(bottom=0)
            axes.set_xlabel(kind)
            axes.set_ylabel("MB")
            axes.set_title(f"PSS of all processes over {one['done']:,} {kind}")

    benchmark.finish(rows, draw, size=(11, 3.5), found=found)


if __name__ == "__main__":
    words = _common.job()
    if words is None:
        main()
    else:
        _common.answer(series(words[0], int(words[1]), float(words[2])))
