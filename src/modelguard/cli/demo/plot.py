"""The picture: private memory of both servers, and what requests felt around each reload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelguard.cli.demo.compare import GUARDED, UNGUARDED
from modelguard.cli.demo.record import Record, Reload
from modelguard.cli.demo.table import megabytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase
    from matplotlib.typing import RcKeyType

COLOURS = {GUARDED: "#0072b2", UNGUARDED: "#d55e00"}
_GREY = "#666666"

#: Seconds shown before and after a reload.
AROUND = 4.0
#: Reloads shown in detail.
MOST = 5

_STYLE: dict[RcKeyType, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "xtick.color": _GREY,
    "ytick.color": _GREY,
}


def draw(records: Mapping[str, Record], path: Path, *, growth: str) -> None:
    """Write the picture of a run.

    Args:
        records: Both records, by the server's name.
        path: The PNG.
        growth: The guard's bound, as it was given.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    reloads = records[GUARDED].reloads()
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 7.5 if reloads else 4.5), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        upper: FigureBase = figure
        if reloads:
            grid = figure.add_gridspec(2, 1, height_ratios=[3, 2])
            upper = figure.add_subfigure(grid[0])
            _latencies(figure.add_subfigure(grid[1]), records, reloads)
        _memory(upper.subplots(), records, reloads, growth)
        figure.savefig(path)


def _memory(axes: Axes, records: Mapping[str, Record], reloads: Sequence[Reload], growth: str) -> None:
    for name, record in _unguarded_first(records):
        times = [sample.time for sample in record.samples]
        axes.plot(times, [sample.private / 1e6 for sample in record.samples], color=COLOURS[name], linewidth=2)
    for reload in reloads:
        _shade(axes, reload.began, reload.ended)
        freed = "reload" if reload.freed is None else f"reload: {megabytes(reload.freed)} back"
        # Upright beside the band, so that the texts of close reloads do not meet.
        where = axes.get_xaxis_transform()
        text = axes.text(reload.began, 0.03, f"{freed} ", transform=where, ha="right", rotation=90)
        text.set(fontsize=8, color=COLOURS[GUARDED])
    axes.set_title(
        "Private memory of two servers with the same app, the same model and the same ever-new words\n"
        f"guarded: reload_on=MemoryGrowth({growth!r})"
    )
    axes.set_ylabel("MB")
    axes.set_xlabel("seconds")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    _name_curves(axes, records)


def _unguarded_first(records: Mapping[str, Record]) -> list[tuple[str, Record]]:
    # What is drawn last lies on top.
    return [(name, records[name]) for name in (UNGUARDED, GUARDED)]


def _name_curves(axes: Axes, records: Mapping[str, Record]) -> None:
    """Write each curve's name at its end, apart even where the curves end together."""
    bottom, top = axes.get_ylim()
    lowest = bottom
    for name, record in sorted(records.items(), key=lambda item: item[1].samples[-1].private):
        last = record.samples[-1]
        height = max(last.private / 1e6, lowest)
        lowest = height + (top - bottom) * 0.13
        text = f" {name}\n {megabytes(last.private)}"
        axes.annotate(text, (last.time, height), color=COLOURS[name], va="center", annotation_clip=False)


def _latencies(figure: FigureBase, records: Mapping[str, Record], reloads: Sequence[Reload]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    shown = reloads[:MOST]
    which = "each reload" if shown == reloads else f"the first {MOST} of {len(reloads)} reloads"
    every: Sequence[Axes] = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for number, (axes, reload) in enumerate(zip(every, shown, strict=True), start=1):
        for name, record in _unguarded_first(records):
            _scatter(axes, record, reload, COLOURS[name])
        _shade(axes, 0, reload.seconds)
        axes.set_title(f"reload {number}, at {reload.began:.0f} s", fontsize=9)
    every[0].set_yscale("log")
    every[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    every[0].yaxis.set_major_formatter("{x:g}")
    every[0].yaxis.set_minor_locator(NullLocator())
    every[0].set_ylabel("ms")
    figure.suptitle(f"Latency of every request around {which}", x=0.01, ha="left", fontsize=11)
    figure.supxlabel("seconds from the reload's beginning", fontsize=10)


def _scatter(axes: Axes, record: Record, reload: Reload, colour: str) -> None:
    low, high = reload.began - AROUND, reload.ended + AROUND
    near = [answer for answer in record.answers if low <= answer.due <= high and answer.error is None]
    axes.scatter(
        [answer.due - reload.began for answer in near],
        [answer.latency * 1e3 for answer in near],
        s=10,
        color=colour,
        alpha=0.7,
        linewidth=0,
    )
    axes.set_xlim(-AROUND, reload.seconds + AROUND)


def _shade(axes: Axes, began: float, ended: float) -> None:
    axes.axvspan(began, ended, color=COLOURS[GUARDED], alpha=0.15, linewidth=0)
