"""What repeated reloads of ja_ginza leave behind: private memory above that of the bare process.

Three ways, each in its own process:

* modelguard with ``swap="drain_first"``;
* keep: load the new copy, then replace the old one (what a cache or a plain assignment does);
* drop: drop the old copy, then load (nothing else: no collection, no trim).

"Bare" is the process after it has imported spacy, ginza, sudachipy and the model's package, with nothing loaded.
"Between copies" is private memory when the loader of the next copy is called: with "drop" and modelguard there is no
copy then, with "keep" there is still one. "Serving" is read after a few calls on the new copy; "peak" is the highest
resident memory during a replacement. After each reload the same few sentences are analysed: spacy_growth.py measures
growth by new words.

Private memory here is its dirty part (``Private_Dirty``): what this process wrote, less what it returned. The clean
part is file pages, 121 MB of libraries and dictionary in this process. These change from private to shared and back
whenever another process that maps the same files starts or ends, so they say nothing about a reload.

Readings are stored in arrays that were made beforehand. An object that outlives the model beside which it was made
keeps a whole arena of pymalloc (1 MiB), so a benchmark that keeps objects would measure itself.
"""

from __future__ import annotations

import os
import time
from array import array
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common

from modelguard import guard, memory, telemetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from spacy.language import Language

MB = 1e6
TARGET = 50.0
#: MB for each reload, over the second half of the reloads: less than this is not a trend.
FLAT = 0.1
#: With fewer reloads than this there is no trend to see.
FEWEST = 10
TEXTS = (
    "銀座でランチをご一緒しましょう。",
    "東京から京都まで新幹線で二時間かかります。",
    "昨日、友人と新しい映画を見に行った。",
)

BARE = ("spacy", "ginza", "sudachipy", "ja_ginza")
WAYS = {"guard": "modelguard, drain_first", "keep": "naive: keep old until new is ready", "drop": "naive: drop first"}
COLOURS = {"guard": _common.OURS, "keep": _common.PEER, "drop": _common.THIRD}

QUANTITIES = ("serving", "between", "peak", "seconds")


class Samples:
    """Room for every figure of every reload."""

    def __init__(self, count: int) -> None:
        self._values = {quantity: array("d", bytes(8 * count)) for quantity in QUANTITIES}

    def note(self, place: int, **figures: float) -> None:
        """Put down figures of one reload."""
        for quantity, figure in figures.items():
            self._values[quantity][place] = figure

    def as_dicts(self) -> list[dict[str, float]]:
        """All of them, for the report."""
        columns = [self._values[quantity] for quantity in QUANTITIES]
        return [dict(zip(QUANTITIES, row, strict=True)) for row in zip(*columns, strict=True)]


def private() -> float:
    return (memory.usage().private_dirty or 0) / MB


def load() -> Language:
    import spacy

    return spacy.load("ja_ginza")


class Meter:
    """Reads memory above that of the bare process."""

    def __init__(self) -> None:
        for name in BARE:
            import_module(name)
        self.bare = private()
        self._bare_resident = self._status("VmRSS")

    def over_bare(self) -> float:
        """Private memory now."""
        return private() - self.bare

    def begin_peak(self) -> None:
        """Forget the peak so far."""
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew: proc_pid_clear_refs(5)

    def peak(self) -> float:
        """The highest resident memory since."""
        return self._status("VmHWM") - self._bare_resident

    @staticmethod
    def _status(key: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / MB for line in lines if line.startswith(key))


def naive(count: int, *, keep: bool) -> dict[str, Any]:
    meter = Meter()
    nlp: Language | None = load()
    samples = Samples(count)
    for place in range(count):
        for text in TEXTS:
            assert nlp is not None
            nlp(text)
        serving, started = meter.over_bare(), time.perf_counter()
        meter.begin_peak()
        if not keep:
            nlp = None
        between = meter.over_bare()
        nlp = load()
        seconds = time.perf_counter() - started
        samples.note(place, serving=serving, between=between, peak=meter.peak(), seconds=seconds)
    return {"bare": meter.bare, "samples": samples.as_dicts()}


def guarded(count: int) -> dict[str, Any]:
    meter = Meter()
    nlp = guard(load, reload_on=None, swap="drain_first", name="ja_ginza")
    samples = Samples(count)
    place, alive = 0, False

    def note(event: telemetry.Event) -> None:  # called right after the release, and before the next load
        nonlocal alive
        if isinstance(event, telemetry.GenerationReleased) and place < count:
            samples.note(place, between=meter.over_bare())
            alive = alive or bool(event.alive)

    telemetry.set_hooks([note])

    @nlp
    def analyse(model: Language, text: str) -> object:
        return model(text)

    for place in range(count):
        for text in TEXTS:
            analyse(text)
        serving, started = meter.over_bare(), time.perf_counter()
        meter.begin_peak()
        nlp.reload()
        seconds = time.perf_counter() - started
        samples.note(place, serving=serving, peak=meter.peak(), seconds=seconds)
    place = count
    nlp.close()
    return {"bare": meter.bare, "samples": samples.as_dicts(), "alive": alive}


def work(way: str, count: int) -> dict[str, Any]:
    return guarded(count) if way == "guard" else naive(count, keep=way == "keep")


def rows(found: dict[str, dict[str, Any]], betweens: dict[str, list[float]]) -> list[_common.Row]:
    last = betweens["guard"][len(betweens["guard"]) // 2 :]
    rise, error = _common.slope(last)
    result = []
    for way, name in WAYS.items():
        ours = way == "guard"
        target = TARGET if ours else None
        result.append(_common.Row(f"between copies: {name}", betweens[way], "MB", target, worst=True, ours=ours))
    trend = f"slope over the last {len(last)} (standard error {error:.2f}): modelguard"
    result.append(_common.Row(trend, [rise], "MB/reload", FLAT if len(last) >= FEWEST else None, ours=True))
    for quantity, unit in (("serving", "MB"), ("peak", "MB"), ("seconds", "s")):
        for way, name in WAYS.items():
            values = [sample[quantity] for sample in found[way]["samples"]]
            result.append(_common.Row(f"  {quantity}: {name}", values, unit))
    return result


def main() -> None:
    benchmark = _common.Benchmark(
        "reload_ja_ginza", "Reloading ja_ginza: private memory above that of the bare process"
    )
    counts = {"guard": 5, "keep": 2, "drop": 2} if benchmark.quick else {"guard": 50, "keep": 20, "drop": 20}
    found = {way: _common.fresh(__file__, way, str(counts[way])) for way in WAYS}
    betweens = {way: [sample["between"] for sample in found[way]["samples"]] for way in WAYS}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for way, name in WAYS.items():
            places = range(1, len(betweens[way]) + 1)
            axes.plot(places, betweens[way], color=COLOURS[way], marker="o", markersize=3, label=name)
        axes.axhline(TARGET, color="black", linestyle="--", linewidth=1.2, label=f"target: {TARGET:.0f} MB")
        axes.set_ylim(bottom=min(0, *betweens["guard"]))
        axes.set_xlabel("reload")
        axes.set_ylabel("MB above the bare process")
        axes.set_title("ja_ginza: private memory when the next copy begins to load")
        axes.legend(frameon=False, loc="center right")

    notes = ["", "Bare: " + ", ".join(f"{way} {found[way]['bare']:.0f} MB" for way in WAYS)]
    if found["guard"]["alive"]:
        notes.append("A released model was still alive.")
    benchmark.finish(rows(found, betweens), draw, size=(9, 4.5), notes=notes, ways=found)


if __name__ == "__main__":
    words = _common.job()
    if words is None:
        main()
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _common.answer(work(words[0], int(words[1])))
