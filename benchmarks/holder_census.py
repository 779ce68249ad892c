"""What it costs to find the holder in a process with five million objects: seconds and memory.

The process has instances, lists and dicts in equal parts. A dict gets an entry and a linked list a node per call,
before the first moment and after it. Three steps are timed: the first moment, all that has grown by the second one, and
the way to it. They run between calls or in a thread of their own, never in a call. Memory is the peak of the process
above what it had; the garbage collector is off, or it would be what is measured.

Each round runs in a fresh process. What is judged is CPU time: the steps have one thread and wait for nothing, so on a
quiet machine it is the time on the clock, which stands beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common

from modelguard.diagnosis import _census
from modelguard.facts import _holders

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MILLIONS, QUICK = 5.0, 0.5
CALLS = 700
SECONDS, MEGABYTES = 10.0, 200.0


class Instance:
    """One of very many."""

    def __init__(self, number: int) -> None:
        self.listed = [number]
        self.named = {"listed": self.listed}


class Link:
    """Holds the one before."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.data = [0] * 20


class App:
    """What leaks."""

    sessions: dict[int, Any] = {}  # noqa: RUF012 - the leak
    last: Any = None


def call(number: int) -> None:
    App.sessions[number] = [str(number)]
    App.last = Link(App.last)


def status(name: str) -> float:
    """Megabytes, of a line of the process's status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def child(millions: float) -> None:
    gc.disable()
    kept = [Instance(number) for number in range(round(millions * 1e6 / 3))]
    for number in range(CALLS // 4):
        call(number)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts here
    found: dict[str, float] = {"objects": len(gc.get_objects())}
    before = status("VmRSS")

    def timed(name: str, act: Callable[[], Any]) -> Any:
        began, cpu = time.perf_counter(), time.process_time()
        result = act()
        found[name] = time.perf_counter() - began
        found[f"{name}, CPU time"] = time.process_time() - cpu
        return result

    moment = timed("the first moment", _census.moment)
    found["kept between the moments"] = status("VmRSS") - before
    for number in range(CALLS, 2 * CALLS):
        call(number)
    grown = timed("what has grown", lambda: _census.grown(moment, CALLS))
    held = timed("the way to it", lambda: _holders.of_growth(grown))
    found["peak"] = status("VmHWM") - before
    found["named"] = sum(one.path.startswith("__main__.App.") for one in held)
    assert len(kept) > 0
    _common.answer(found)


STEPS = ("the first moment", "what has grown", "the way to it")


def total(one: dict[str, float]) -> float:
    return sum(one[f"{step}, CPU time"] for step in STEPS)


def main() -> None:
    work = _common.job()
    if work is not None:
        child(float(work[0]))
        return
    bench = _common.Benchmark("holder_census", "What finding the holder costs in a process with 5 million objects")
    rounds = 1 if bench.quick else 3
    found = [_common.fresh(__file__, str(QUICK if bench.quick else MILLIONS)) for _ in range(rounds)]
    rows = [
        _common.Row("CPU time, all three steps", [total(one) for one in found], "s", SECONDS),
        _common.Row("memory at the peak", [one["peak"] for one in found], "MB", MEGABYTES),
        *(_common.Row(step, [one[step] for one in found], "s") for step in STEPS),
        *(_common.Row(f"{step}, CPU time", [one[f"{step}, CPU time"] for one in found], "s") for step in STEPS),
        _common.Row("kept between the moments", [one["kept between the moments"] for one in found], "MB"),
        _common.Row("holders named, of 2", [one["named"] for one in found], ""),
    ]

    def draw(figure: Figure) -> None:
        _common.bars(figure.subplots(), rows[2:5], bench.title, axis="seconds")

    bench.finish(rows, draw, size=(8, 3), notes=["", f"objects: {found[0]['objects']:,.0f}"])


if __name__ == "__main__":
    main()
