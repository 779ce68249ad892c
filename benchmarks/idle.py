"""A model that sleeps while nobody uses it: memory over time, and what the call that wakes it takes.

``ja_ginza`` with ``Idle("2s")``, in the process that calls it, isolated in a worker process of its own, and
isolated with ``keep="mold"``, whose mold stays. Each side is woken by a call, takes a few calls more, and is left
alone until its model or its workers have gone and a second more. The first call of all loads the model on each side,
so it is not one of those that wake a mold's workers. Memory is the proportional part (PSS, which counts shared pages
once) of the process and all that it has started, read ten times a second, above that before the first load. spaCy and
its parts are imported before that: in the process they stay, and a mold imports them for itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import _common
import psutil
from _isolated import TEXT, load_spacy

from modelguard import Idle, guard, isolate, memory, telemetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MB = 1e6
SLEEPS_AFTER = "2s"
#: Seconds between two readings, and from the model's end to the next call.
PAUSE, REST = 0.1, 1.0
#: Calls on a model that is awake.
CALLS = 5
KEPT = 'isolated, keep="mold"'
SIDES = {"in process": _common.PEER, "isolated": _common.OURS, KEPT: _common.THIRD}

_here = guard(load_spacy, reload_on=Idle(SLEEPS_AFTER), name="ja_ginza")
_lent = guard(load_spacy, reload_on=Idle(SLEEPS_AFTER), name="ja_ginza")
_lent_by_mold = guard(load_spacy, reload_on=Idle(SLEEPS_AFTER, keep="mold"), name="ja_ginza")


@_here
def in_process(nlp: Any, text: str) -> int:
    return len(nlp(text))


@isolate(workers=1, timeout="60s")
@_lent
def isolated(nlp: Any, text: str) -> int:
    return len(nlp(text))


@isolate(workers=1, timeout="60s")
@_lent_by_mold
def from_mold(nlp: Any, text: str) -> int:
    return len(nlp(text))


CALLED: dict[str, Callable[[str], int]] = {"in process": in_process, "isolated": isolated, KEPT: from_mold}


def held() -> float:
    """MB of this process and of all that it has started."""
    while True:
        total, pids = 0, family()
        for pid in pids:
            try:
                total += memory.usage(pid).pss or 0
            except ProcessLookupError:  # it has just ended
                continue
        if pids == family():  # else a process that was forked meanwhile has a share that was not counted
            return total / MB


def family() -> list[int]:
    """This process and all that it has started."""
    own = psutil.Process()
    return [own.pid, *(child.pid for child in own.children(recursive=True))]


def asleep(side: str) -> bool:
    if side == "in process":
        return _here.status().state == "idle"
    left = 1 if side == KEPT else 0
    return len(family()) == 1 + left


def measured(side: str, cycles: int) -> dict[str, Any]:
    """One side: the readings as pairs of seconds and MB, the moments of the calls, and the seconds that they took."""
    import ginza  # noqa: F401 - what is imported before the first load is not a part of the model
    import ja_ginza  # noqa: F401
    import spacy  # noqa: F401
    import sudachipy  # noqa: F401

    telemetry.set_hooks([])
    call = CALLED[side]
    before, began, over = held(), time.monotonic(), threading.Event()
    readings: list[tuple[float, float]] = []
    found: dict[str, Any] = {"readings": readings, "wakes": [], "awake": [], "at": []}

    def read() -> None:
        while not over.wait(PAUSE):
            readings.append((time.monotonic() - began, held() - before))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    for _ in range(cycles):
        time.sleep(REST)
        for number in range(1 + CALLS):
            start = time.monotonic()
            call(TEXT)
            found["wakes" if number == 0 else "awake"].append(time.monotonic() - start)
            found["at"].append(start - began)
        while not asleep(side):
            time.sleep(PAUSE)
    time.sleep(REST)
    over.set()
    thread.join()
    return found


def main() -> None:
    benchmark = _common.Benchmark("idle", "Idle: a model that sleeps, wakes, and sleeps again")
    cycles = 2 if benchmark.quick else 6
    found = {side: _common.fresh(__file__, side, str(cycles)) for side in SIDES}
    rows = []
    for side, one in found.items():
        ours = side != "in process"
        ends = [last_before(one["readings"], at) for at in one["at"][:: 1 + CALLS]][1:]
        most = max(megabytes for _, megabytes in one["readings"])
        rows += [
            _common.Row(
                f"{side}: the call that wakes it", one["wakes"][1:] if side == KEPT else one["wakes"], "s", ours=ours
            ),
            _common.Row("  a call on a model that is awake", [1e3 * each for each in one["awake"]], "ms", ours=ours),
            _common.Row("  memory asleep, after the first time", ends, "MB", ours=ours),
            _common.Row("  most memory", [most], "MB", ours=ours),
        ]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for side, colour in SIDES.items():
            seconds, megabytes = zip(*found[side]["readings"], strict=True)
            axes.plot(seconds, megabytes, color=colour, label=side)
            wakes = found[side]["at"][:: 1 + CALLS]
            axes.plot(wakes, [0] * len(wakes), color=colour, marker="^", linestyle="none", clip_on=False)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds; triangles: calls that wake it")
        axes.set_ylabel("MB above the process before the first load")
        axes.set_title(f"ja_ginza with Idle({SLEEPS_AFTER!r})")
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)

    benchmark.finish(rows, draw, size=(10, 4), found=found)


def last_before(readings: list[tuple[float, float]], moment: float) -> float:
    """The last reading that had ended before a moment."""
    return [megabytes for seconds, megabytes in readings if seconds < moment - PAUSE][-1]


if __name__ == "__main__":
    words = _common.job()
    if words is None:
        main()
    else:
        _common.answer(measured(words[0], int(words[1])))
