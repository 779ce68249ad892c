"""What ``import modelguard`` costs over importing its three core dependencies: cachetools, wrapt and psutil.

Each import happens in a fresh interpreter with warm bytecode and is timed inside it, so neither the interpreter's own
start nor compiling counts. The kinds of interpreters take turns. The figure is the stricter of two readings: what
modelguard adds in an interpreter that has imported the three already. (It imports psutil only where ``/proc`` does not
tell, so the other reading, ``import modelguard`` alone less the three alone, is smaller.)
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
THREE = "import cachetools, wrapt, psutil"
KINDS = {
    "the three dependencies": TIMED.format(THREE),
    "modelguard after them": f"{THREE}; " + TIMED.format("import modelguard"),
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
    """Own milliseconds of each module that ``import modelguard`` adds after the three, by ``-X importtime``."""
    best: dict[str, float] = {}
    for _ in range(5):
        report = run(f"{THREE}; import modelguard", "-X", "importtime").stderr.splitlines()
        names = [line.rpartition("|")[2].strip() for line in report]
        # A module is listed after what it imports, so everything past the last of the three is modelguard's.
        for line in report[names.index("psutil") + 1 :]:
            own, _, name = line.removeprefix("import time:").split("|")
            best[name.strip()] = min(best.get(name.strip(), float("inf")), float(own) / 1e3)
    return dict(sorted(best.items(), key=lambda item: -item[1]))


def rows(found: Mapping[str, list[float]]) -> list[_common.Row]:
    three, after, alone = (found[kind] for kind in KINDS)
    less = [one - other for one, other in zip(alone, three, strict=True)]
    return [
        _common.Row("import modelguard, after its dependencies", after, "ms", TARGET, ours=True),
        _common.Row("import modelguard alone, less the three alone", less, "ms", ours=True),
        _common.Row("import modelguard alone", alone, "ms", ours=True),
        _common.Row("import cachetools, wrapt, psutil", three, "ms"),
    ]


def main() -> None:
    benchmark = _common.Benchmark("import_cost", "import modelguard over importing its three core dependencies")
    found = measure(5 if benchmark.quick else 60)
    modules = by_module()
    lines = rows(found)
    dearest = dict(list(modules.items())[:MOST])

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _common.bars(left, lines, "Time to import (dashed: target)")
        _common.bars(
            right,
            [_common.Row(name, [cost], "ms", ours=name.startswith("modelguard")) for name, cost in dearest.items()],
            "The dearest modules, each without what it imports",
        )

    notes = ["", f"{len(modules)} modules come in after the three; own time of the dearest, ms:"]
    notes += [f"  {cost:5.2f}  {name}" for name, cost in dearest.items()]
    benchmark.finish(lines, draw, size=(14, 4.5), notes=notes, ms=found, modules=modules)


if __name__ == "__main__":
    main()
