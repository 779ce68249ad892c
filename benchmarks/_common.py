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
from collections.abc import Callable, Sequence
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
        """What is held against the target."""
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


HEADER = ("figure", "target", "measured", "quartiles", "min .. max", "n", "")


class Benchmark:
    """One script: reads the command line, says where it runs, and at the end prints and writes what it found."""

    def __init__(self, name: str, title: str) -> None:
        parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py", description=title)
        parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs, not for figures")
        parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="default: %(default)s")
        options = parser.parse_args()
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


def bars(axes: Axes, rows: Sequence[Row], title: str) -> None:
    """One horizontal bar per row: its figure, a whisker over its quartiles, and a line at its target."""
    for place, row in enumerate(rows):
        low, high = row.quartiles
        axes.barh(place, row.figure, height=0.6, color=OURS if row.ours else PEER)
        axes.hlines(place, low, high, color="black", linewidth=1)
        right = max(row.figure, high, row.target or 0, 0)
        axes.annotate(f" {number(row.figure)} {row.unit}", (right, place), va="center", fontsize=9)
        if row.target is not None:
            axes.vlines(row.target, place - 0.42, place + 0.42, color="black", linestyle="--", linewidth=1.2)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", labelcolor="black")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)
    axes.set_xlabel(rows[0].unit)
    axes.set_title(title)


def number(value: float) -> str:
    """Three digits that count."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"  # noqa: PLR2004


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Align the cells of a table, whose first line is its header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = tuple("-" * width for width in widths)
    every = [lines[0], rule, *lines[1:]]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in every]


def machine() -> dict[str, Any]:
    """Where and with what this runs."""
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


# Fresh processes: memory once taken by one variant must not help or harm the next.


def job() -> list[str] | None:
    """What this process was started for by :func:`fresh`, None if it is the benchmark itself."""
    return sys.argv[2:] if sys.argv[1:2] == ["--job"] else None


def fresh(script: str, *words: str, **environment: str) -> Any:
    """Run ``script`` again in a process of its own, for the job that ``words`` name, and return its answer."""
    command = [sys.executable, script, "--job", *words]
    with tempfile.TemporaryDirectory() as folder:
        # A reload slot of its own: a service on the same machine must not make it wait.
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
    """The value below which ``share`` of all values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
