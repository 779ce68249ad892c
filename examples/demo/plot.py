"""The picture: private memory of both servers, and what requests felt around each reload."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples._driver import COLOURS, megabytes
from examples.demo.record import Record, Reload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

ORANGE, BLUE, *_ = COLOURS
GREY = "#666666"

#: Seconds shown before and after a reload, and beside them, so that no point is cut.
AROUND, MARGIN = 4.0, 0.3
#: Reloads shown in detail.
MOST = 5

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


def draw(guarded: Record, unguarded: Record, path: Path, *, growth: str) -> None:
    """Write the picture of a run; ``growth`` is the guard's bound, as it was given."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    reloads = guarded.reloads()
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 8 if reloads else 4.5), dpi=130, layout="constrained")
        upper: FigureBase = figure
        if reloads:
            upper, lower = figure.subfigures(2, 1, height_ratios=[3, 2], hspace=0.05)
            _latencies(lower, guarded, unguarded, reloads)
        axes = upper.subplots()
        _memory(axes, guarded, unguarded)
        for reload in reloads:
            _mark(axes, reload)
        axes.set_title(
            "Two servers with the same app, the same model and the same ever-new words\n"
            f"guarded: reload_on=MemoryGrowth({growth!r})"
        )
        figure.savefig(path)


def _memory(axes: "Axes", guarded: Record, unguarded: Record) -> None:
    ends = []
    for record, colour in ((unguarded, ORANGE), (guarded, BLUE)):  # what is drawn last lies on top
        last = record.samples[-1]
        axes.plot([s.time for s in record.samples], [s.private / 1e6 for s in record.samples], color=colour, lw=2)
        ends.append((last.private / 1e6, f" {record.name}\n {megabytes(last.private)}", colour))
    axes.set(xlabel="time, s", ylabel="private memory, MB", ylim=(0, None))
    axes.set_xlim(0, unguarded.samples[-1].time)
    # Each curve's name at its end, apart even where the curves end together.
    apart, lowest = axes.get_ylim()[1] * 0.13, 0.0
    for height, text, colour in sorted(ends):
        place = max(height, lowest)
        axes.annotate(text, (guarded.samples[-1].time, place), color=colour, va="center", annotation_clip=False)
        lowest = place + apart


def _mark(axes: "Axes", reload: Reload) -> None:
    axes.axvspan(reload.began, reload.ended, color=BLUE, alpha=0.15, linewidth=0)
    text = "reload" if reload.freed is None else f"reload: {megabytes(reload.freed)} back"
    # Upright beside the band, so that the texts of close reloads do not meet.
    where = axes.get_xaxis_transform()
    axes.text(reload.began, 0.03, f"{text} ", transform=where, ha="right", rotation=90, fontsize=8, color=BLUE)


def _latencies(figure: "FigureBase", guarded: Record, unguarded: Record, reloads: Sequence[Reload]) -> None:
    from matplotlib.ticker import LogLocator, MultipleLocator, NullLocator

    shown = reloads[:MOST]
    every = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for number, (axes, reload) in enumerate(zip(every, shown, strict=True), start=1):
        for record, colour in ((unguarded, ORANGE), (guarded, BLUE)):
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
    figure.legend(*every[0].get_legend_handles_labels(), loc="upper right", ncols=2, frameon=False, markerscale=2)
    which = "each reload" if len(shown) == len(reloads) else f"the first {MOST} of {len(reloads)} reloads"
    figure.suptitle(f"Every request around {which}, to either server", x=0.01, ha="left", fontsize=11)
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
