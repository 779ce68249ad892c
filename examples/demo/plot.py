"""The picture: private memory of the servers, and what requests felt around each reload."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples._driver import COLOURS, megabytes
from examples.demo.record import Record, Records, Reload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

ORANGE, BLUE, GREEN, *_ = COLOURS
GREY = "#666666"

#: Seconds shown before and after a reload, and beside them, so that no point is cut.
AROUND, MARGIN = 4.0, 0.3
#: Reloads shown in detail.
MOST = 5
#: Height of the picture above the highest curve, for the legend.
ROOM = 1.25

_STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def draw(records: Records, path: Path, *, growth: str) -> None:
    """Write the picture of a run; ``growth`` is the guards' bound, as it was given."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    reloads = records.guarded.reloads()
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 8.5 if reloads else 5), dpi=130, layout="constrained")
        upper: FigureBase = figure
        if reloads:
            upper, lower = figure.subfigures(2, 1, height_ratios=[3, 2], hspace=0.05)
            _latencies(lower, records, reloads)
        axes = upper.subplots()
        _memory(axes, records)
        for number, reload in enumerate(reloads):
            _mark(axes, reload, first=number == 0)
        for number, time in enumerate(records.isolated.replaced()):
            label = "_" if number else "isolated: a worker is replaced"
            axes.axvline(time, ymin=0.36, color=GREEN, linestyle=":", linewidth=1.2, label=label)  # above the texts
        axes.legend(loc="upper left", ncols=2, frameon=True, framealpha=1, edgecolor="none", fontsize=9)
        axes.set_title(
            "Three servers with the same app, the same model and the same ever-new words, without a pause\n"
            f"guarded: reload_on=MemoryGrowth({growth!r}); isolated: the same, under @isolate"
        )
        figure.savefig(path)


def _coloured(records: Records) -> list[tuple[Record, str]]:
    """What is drawn last lies on top."""
    return list(zip(records, (ORANGE, BLUE, GREEN), strict=True))


def _memory(axes: "Axes", records: Records) -> None:
    ends = []
    for record, colour in _coloured(records):
        last, figures = record.samples[-1], record.figures()
        times, sizes = [s.time for s in record.samples], [s.private / 1e6 for s in record.samples]
        latencies = f"p99 {_short(figures['p99'])}, longest {_short(figures['slowest'])}"
        axes.plot(times, sizes, color=colour, lw=2, label=f"{record.name}: {latencies}")
        ends.append((last.private / 1e6, f" {record.name}\n {megabytes(last.private)}", colour))
    highest = max(record.figures()["private_highest"] for record in records) / 1e6
    axes.set(xlabel="time, s", ylabel="private memory, MB", ylim=(0, highest * ROOM))
    end = records.unguarded.samples[-1].time
    axes.set_xlim(0, end)
    # Each curve's name at its end, apart even where the curves end together.
    top = axes.get_ylim()[1]
    places = apart([height for height, *_ in sorted(ends)], top * 0.13, top * 0.9)
    for place, (_, text, colour) in zip(places, sorted(ends), strict=True):
        axes.annotate(text, (end, place), color=colour, va="center", annotation_clip=False)


def apart(heights: Sequence[float], distance: float, top: float) -> list[float]:
    """Move ascending heights up until they are so far apart, and down again where they would leave the top."""
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + distance) if places else height)
    for index, place in reversed(list(enumerate(places))):
        ceiling = top if index + 1 == len(places) else places[index + 1] - distance
        places[index] = min(place, ceiling)
    return places


def _short(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.0f} ms"


def _mark(axes: "Axes", reload: Reload, *, first: bool) -> None:
    label = "guarded: the model is reloaded" if first else "_"
    axes.axvspan(reload.began, reload.ended, color=BLUE, alpha=0.15, linewidth=0, label=label)
    text = "reload" if reload.freed is None else f"reload: {megabytes(reload.freed)} back"
    # Upright beside the band, so that the texts of close reloads do not meet.
    where = axes.get_xaxis_transform()
    axes.text(reload.began, 0.03, f"{text} ", transform=where, ha="right", rotation=90, fontsize=8, color=BLUE)


def _latencies(figure: "FigureBase", records: Records, reloads: Sequence[Reload]) -> None:
    from matplotlib.ticker import LogLocator, MultipleLocator, NullLocator

    shown = reloads[:MOST]
    every = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for number, (axes, reload) in enumerate(zip(every, shown, strict=True), start=1):
        for record, colour in _coloured(records):
            _scatter(axes, record, reload, colour)
        axes.axvspan(0, (reload.ended - reload.began), color=BLUE, alpha=0.15, linewidth=0)
        axes.set_title(f"reload {number}, at {reload.began:.0f} s", fontsize=9)
        axes.set_xlim(-AROUND - MARGIN, (reload.ended - reload.began) + AROUND + MARGIN)
        axes.xaxis.set_major_locator(MultipleLocator(2))
    every[0].set_yscale("log")
    every[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    every[0].yaxis.set_major_formatter("{x:g}")
    every[0].yaxis.set_minor_locator(NullLocator())
    every[0].set_ylabel("latency, ms")
    figure.legend(
        *every[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False, markerscale=2
    )
    which = "each reload" if len(shown) == len(reloads) else f"the first {MOST} of {len(reloads)} reloads"
    figure.suptitle(f"Every request around {which} of the guarded model", x=0.01, ha="left", fontsize=11)
    figure.supxlabel("time since the reload began, s", fontsize=10)


def _scatter(axes: "Axes", record: Record, reload: Reload, colour: str) -> None:
    near = [
        (one.due - reload.began, one.latency * 1e3)
        for one in record.outcomes
        if reload.began - AROUND <= one.due <= reload.ended + AROUND and one.error is None
    ]
    axes.scatter(
        [x for x, _ in near], [y for _, y in near], s=10, color=colour, alpha=0.7, linewidth=0, label=record.name
    )
