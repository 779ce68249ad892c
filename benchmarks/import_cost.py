"""How long ``from modelguard import guard`` takes, in addition to the core dependencies wrapt and psutil.

``import modelguard`` alone imports nothing: names are imported when they are first used. So the figure is the import of
what every program with a guard uses.

Each import runs in a fresh interpreter with compiled bytecode and is timed inside it, so neither the interpreter's
start nor compiling counts. The variants alternate. The target applies to the stricter of two readings: the time in an
interpreter that has imported the dependencies already. (modelguard imports psutil only where there is no
``/proc``, so the other reading, modelguard alone less these alone, is smaller.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import _common

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = 15.0
MOST = 12

TIMED = "import time; t = time.perf_counter(); {}; print((time.perf_counter() - t) * 1e3)"
BOTH = "import wrapt, psutil"
GUARD = "from modelguard import guard"
KINDS = {
    "the dependencies": TIMED.format(BOTH),
    "guard after them": f"{BOTH}; " + TIMED.format(GUARD),
    "guard alone": TIMED.format(GUARD),
    "modelguard alone": TIMED.format("import modelguard"),
}


def environment() -> dict[str, str]:
    """This process's, less what would keep bytecode from being written or make every module slower."""
    kept = dict(os.environ)
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPROFILEIMPORTTIME", "PYTHONTRACEMALLOC", "PYTHONDEVMODE"):
        kept.pop(name, None)
    return kept


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)


def measure(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every kind in every round; the first round only warms up."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds + 1):
        for kind, code in KINDS.items():
            found[kind].append(float(run(code).stdout))
    return {kind: values[1:] for kind, values in found.items()}


def by_module() -> dict[str, float]:
    """Own milliseconds of each module that importing ``guard`` adds after the dependencies, by ``-X importtime``."""
    best: dict[str, float] = {}
    for _ in range(5):
        report = run(f"{BOTH}; {GUARD}", "-X", "importtime").stderr.splitlines()
        names = [line.rpartition("|")[2].strip() for line in report]
        # A module is listed after what it imports, so everything past the last of them is modelguard's.
        for line in report[names.index("psutil") + 1 :]:
            own, _, name = line.removeprefix("import time:").split("|")
            best[name.strip()] = min(best.get(name.strip(), float("inf")), float(own) / 1e3)
    return dict(sorted(best.items(), key=lambda item: -item[1]))


def rows(found: Mapping[str, list[float]]) -> list[_common.Row]:
    both, after, alone, package = (found[kind] for kind in KINDS)
    less = [one - other for one, other in zip(alone, both, strict=True)]
    return [
        _common.Row(f"{GUARD}, after its dependencies", after, "ms", TARGET, ours=True),
        _common.Row(f"{GUARD}, less these alone", less, "ms", ours=True),
        _common.Row(GUARD, alone, "ms", ours=True),
        _common.Row("import modelguard", package, "ms", ours=True),
        _common.Row(BOTH, both, "ms"),
    ]


def main() -> None:
    benchmark = _common.Benchmark("import_cost", "Extra time of from modelguard import guard")
    found = measure(5 if benchmark.quick else 60)
    modules = by_module()
    lines = rows(found)
    slowest = dict(list(modules.items())[:MOST])

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _common.bars(left, lines, "Time to import", axis="milliseconds")
        _common.bars(
            right,
            [_common.Row(name, [cost], "ms", ours=name.startswith("modelguard")) for name, cost in slowest.items()],
            "The slowest modules, each without its own imports",
            axis="milliseconds",
        )

    notes = ["", f"{len(modules)} modules are imported after the dependencies; own time of the slowest, ms:"]
    notes += [f"  {cost:5.2f}  {name}" for name, cost in slowest.items()]
    benchmark.finish(lines, draw, size=(14, 4.5), notes=notes, ms=found, modules=modules)


if __name__ == "__main__":
    main()
