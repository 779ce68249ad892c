"""What the benchmarks share: arguments, the machine, medians with their spread, the table, JSON, the picture."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_OUT = Path("build/benchmarks")

# Scripts that start servers import examples._driver, from whatever folder they are run.
sys.path.append(str(Path(__file__).parents[1]))

OURS, PEER, THIRD, FOURTH, FIFTH, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#666666"

_STYLE: Any = {
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


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: What was measured.
        values: One per round, run or reload; the median is the figure, unless ``worst`` is asked for.
        unit: Of the values.
        target: What the figure may be at most, None for a peer or an aside.
        worst: Whether the figure is the largest value, not the median.
        ours: Whether it is modelguard's, for the picture.
    """

    name: str
    values: Sequence[float]
    unit: str
    target: float | None = None
    worst: bool = False
    ours: bool = False

    @property
    def figure(self) -> float:
        """What is compared with the target."""
        return max(self.values) if self.worst else statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The middle half of the values."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    @property
    def verdict(self) -> str:
        """Whether the target was reached."""
        return "" if self.target is None else "reached" if self.figure <= self.target else "MISSED"

    def as_json(self) -> dict[str, Any]:
        """All of it, for the JSON file."""
        return {
            "name": self.name,
            "unit": self.unit,
            "figure": self.figure,
            "quartiles": self.quartiles,
            "min": min(self.values),
            "max": max(self.values),
            "n": len(self.values),
            "target": self.target,
            "verdict": self.verdict,
            "values": list(self.values),
        }

    def cells(self) -> tuple[str, ...]:
        """The line, as the table shows it."""
        low, high = self.quartiles
        return (
            self.name,
            "" if self.target is None else f"<= {number(self.target)} {self.unit}",
            f"{number(self.figure)} {self.unit}" + (" (worst)" if self.worst else ""),
            f"{number(low)} .. {number(high)}",
            f"{number(min(self.values))} .. {number(max(self.values))}",
            str(len(self.values)),
            self.verdict,
        )


def shortfall(name: str, ratios: Sequence[float], least: float | None = None) -> Row:
    """How many times more another one answers, of what modelguard answers over that; the worst counts.

    Args:
        name: What was measured.
        ratios: What modelguard answers, over what the other one does.
        least: What each ratio is to be at least.
    """
    inverse = [1 / max(one, 1e-3) for one in ratios]
    return Row(name, inverse, "x", None if least is None else 1 / least, worst=True, ours=True)


HEADER = ("figure", "target", "measured", "quartiles", "min .. max", "n", "")


class Benchmark:
    """One script: reads the command line, shows the machine, and in the end prints and writes the results.

    Args:
        name: The script's.
        title: For people.
        counts: Numbers that the command line can change, such as how often, with their defaults.
    """

    def __init__(self, name: str, title: str, **counts: int) -> None:
        parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py", description=title)
        parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs, not for figures")
        parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="default: %(default)s")
        for count, default in counts.items():
            parser.add_argument(f"--{count}", type=int, default=default, metavar="N", help="default: %(default)s")
        options = parser.parse_args()
        self.counts: dict[str, int] = {count: getattr(options, count) for count in counts}
        self.name, self.title = name, title
        self.quick: bool = options.quick
        self.out: Path = options.out
        self.machine = machine()
        print(f"{title}\n{describe(self.machine)}\n", flush=True)

    def finish(
        self,
        rows: Sequence[Row],
        draw: Callable[[Figure], None],
        *,
        size: tuple[float, float],
        notes: Sequence[str] = (),
        **data: Any,
    ) -> None:
        """Print the table; write it with ``data``, all that was measured, as JSON; draw the picture."""
        lines = table([HEADER, *(row.cells() for row in rows)])
        print("\n".join(["", *lines, *notes]))
        self.out.mkdir(parents=True, exist_ok=True)
        record = {
            "benchmark": self.name,
            "title": self.title,
            "quick": self.quick,
            "machine": self.machine,
            "rows": [row.as_json() for row in rows],
            "notes": list(notes),
            "table": lines,
            "data": data,
        }
        path = self.out / f"{self.name}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        picture = path.with_suffix(".png")
        _paint(draw, picture, size)
        print(f"\n{path}\n{picture}")


def _paint(draw: Callable[[Figure], None], path: Path, size: tuple[float, float]) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(path)


def bars(axes: Axes, rows: Sequence[Row], title: str, *, axis: str, prefix: str = "") -> None:
    """One horizontal bar per row: its figure, a whisker over its quartiles, and a dashed line at its target.

    Args:
        axes: Where to draw.
        rows: All in the same unit.
        title: What the picture shows.
        axis: What the bars measure, and in which unit.
        prefix: The beginning that all names have in common, which the title says already.
    """
    for place, row in enumerate(rows):
        low, high = row.quartiles
        axes.barh(place, row.figure, height=0.6, color=OURS if row.ours else PEER)
        axes.hlines(place, low, high, color="black", linewidth=1)
        right = max(row.figure, high, row.target or 0, 0)
        axes.annotate(f" {number(row.figure)} {row.unit}", (right, place), va="center", fontsize=9)
        if row.target is not None:
            axes.vlines(row.target, place - 0.42, place + 0.42, color="black", linestyle="--", linewidth=1.2)
    axes.set_yticks(range(len(rows)), [row.name.strip().removeprefix(prefix) for row in rows])
    axes.tick_params(axis="y", labelcolor="black")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)
    axes.set_xlabel(f"{axis}; dashed: target" if any(row.target is not None for row in rows) else axis)
    axes.set_title(title)


def label(axes: Axes, points: Sequence[tuple[float, float, str]], *, size: int = 9) -> None:
    """Write a text beside each point, where it covers no other text or point and does not leave the axes.

    Args:
        axes: Where the points are, with its final limits.
        points: Each with its place in data and its text.
        size: Of the text, in points.
    """
    figure = axes.get_figure()
    assert figure is not None
    figure.draw_without_rendering()  # type: ignore[union-attr] # sizes are known only after the layout
    places = [axes.transData.transform((x, y)) for x, y, _ in points]
    pixel = 72 / figure.dpi  # offsets are in points, places in pixels
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for (x, y), (*place, text) in zip(places, points, strict=True):
        wide, high = len(text) * size * 0.62 / pixel, size * 1.2 / pixel
        for right, up in _around(wide, high):
            box = (x + right, y + up - high / 2, x + right + wide, y + up + high / 2)
            inside = axes.bbox.x0 < box[0] and box[2] < axes.bbox.x1
            if inside and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        axes.annotate(
            text,
            place,
            xytext=(right * pixel, up * pixel),
            textcoords="offset points",
            fontsize=size,
            va="center",
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.5} if abs(up) > high else None,
        )


Box = tuple[float, float, float, float]


def _around(wide: float, high: float) -> Iterator[tuple[float, float]]:
    """Where a text may begin, from a point: right of it, left of it, and then further and further above and below."""
    for rise in (0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0):
        yield 8, rise * high
        yield -8 - wide, rise * high


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def number(value: float) -> str:
    """Three significant digits, but no digits after the decimal point from 100 on."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"  # noqa: PLR2004


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Align the cells of a table, whose first line is its header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = tuple("-" * width for width in widths)
    every = [lines[0], rule, *lines[1:]]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in every]


def machine() -> dict[str, Any]:
    """The machine, the interpreter and the versions of this run."""
    packages = ("modelguard-lifecycle", "cachetools", "wrapt", "psutil", "spacy", "ja-ginza", "torch", "transformers")
    versions = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": versions,
    }


def describe(found: dict[str, Any]) -> str:
    """The machine in two lines."""
    load = "" if found["load"] is None else f", load {found['load']:.1f} at the start"
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    return f"{found['python']}, {found['system']}, {found['cores']} cores{load}\n{versions}"


# Fresh processes: memory that one variant has taken must not affect the next.


def job() -> list[str] | None:
    """The job for which :func:`fresh` started this process, None if it is the benchmark itself."""
    return sys.argv[2:] if sys.argv[1:2] == ["--job"] else None


def fresh(script: str, *words: str, **environment: str) -> Any:
    """Run ``script`` again in a process of its own, for the job that ``words`` name, and return its answer."""
    command = [sys.executable, script, "--job", *words]
    with tempfile.TemporaryDirectory() as folder:
        # A host lock of its own: a service on the same machine must not make it wait.
        variables = {**os.environ, "MODELGUARD_RUNTIME_DIR": folder, **environment}
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def answer(result: Any) -> None:
    """Hand the result of a job back to :func:`fresh`."""
    print(json.dumps(result))


# Arithmetic


def slope(values: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope of ``values`` over their index, and its standard error."""
    count = len(values)
    middle, mean = (count - 1) / 2, statistics.fmean(values)
    square = sum((index - middle) ** 2 for index in range(count))
    rise = sum((index - middle) * (value - mean) for index, value in enumerate(values)) / square
    rest = sum((value - mean - rise * (index - middle)) ** 2 for index, value in enumerate(values))
    return rise, (rest / (count - 2) / square) ** 0.5


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of all values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
