"""The page of figures is made of what the benchmarks wrote, and says of each promise whether it was kept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

MACHINE = {
    "python": "CPython 3.11.7",
    "system": "Linux x86_64",
    "cores": 2,
    "load": 0.5,
    "versions": {"modelguard-lifecycle": "0.1.0"},
}


def row(name: str, figure: float, unit: str, target: float | None) -> dict[str, Any]:
    """Make a row as benchmarks/_common.py writes it."""
    verdict = "" if target is None else "reached" if figure <= target else "MISSED"
    spread = {"quartiles": [figure - 1, figure + 1], "min": figure - 2, "max": figure + 2, "n": 7}
    return {"name": name, "unit": unit, "figure": figure, "target": target, "verdict": verdict, **spread}


def record(name: str, *rows: dict[str, Any], quick: bool = False) -> dict[str, Any]:
    """Make a benchmark's file, with the rows that count."""
    title = f"The title of {name}"
    found = {"benchmark": name, "title": title, "quick": quick, "machine": MACHINE, "rows": rows}
    return {**found, "notes": ["", "A note."], "table": [], "data": {}}


RUN = [
    record("call_overhead", row("guarded function over bare wrapt", 359.0, "ns", 400), row("a peer", 620, "ns", None)),
    record("batching", row("no-op, bare hand-over / modelguard", 1.63, "x", 1.33)),
]


def make(folder: Path, run: list[dict[str, Any]], *more: str) -> subprocess.CompletedProcess[str]:
    """Write the files of a run, and have the page made of them."""
    for one in run:
        (folder / f"{one['benchmark']}.json").write_text(json.dumps(one))
        (folder / f"{one['benchmark']}.png").write_bytes(b"a picture")
    command = [sys.executable, "-m", "benchmarks", "--page", str(folder / "docs" / "figures.md"), "--out", str(folder)]
    return subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.timeout(60)
def test_each_promise_is_met_missed_or_not_measured(tmp_path: Path) -> None:
    """A reader sees what was reached, what was not and why, and what was not measured."""
    done = make(tmp_path, RUN)
    assert (0, "") == (done.returncode, done.stderr)
    page = (tmp_path / "docs" / "figures.md").read_text()
    promises = [line for line in page.splitlines() if re.match(r"\| .* \|", line)][1:16]
    assert "359 ns: guarded function over bare wrapt" in promises[0]
    assert promises[0].endswith("| 358 ns to 360 ns | 7 | met |")
    (missed,) = [line for line in promises if "**missed**" in line]
    assert missed.startswith("| story 3, a no-op model, 64 clients: rate of a bare hand-over")
    assert 15 == len(promises)
    assert 13 == sum("not in this run" in line or "not measured" in line for line in promises)
    assert "without sharing: it has left no file" in done.stdout


@pytest.mark.timeout(60)
def test_the_page_shows_tables_machine_notes_and_pictures(tmp_path: Path) -> None:
    """Each benchmark has its rows there with their spread, its machine, its notes and its picture."""
    make(tmp_path, RUN)
    page = (tmp_path / "docs" / "figures.md").read_text()
    assert "| a peer |  | 620 ns | 619 ns to 621 ns | 618 ns .. 622 ns | 7 |  |" in page
    assert "CPython 3.11.7, Linux x86_64, 2 cores, load 0.5 at the start" in page
    assert "A note." in page
    assert "![The title of batching](figures/batching.png)" in page
    assert b"a picture" == (tmp_path / "docs" / "figures" / "batching.png").read_bytes()


@pytest.mark.timeout(60)
def test_quick_runs_make_no_page(tmp_path: Path) -> None:
    """The figures of a quick run, which only shows that the benchmarks run, are not published."""
    done = make(tmp_path, [*RUN, record("import_cost", row("x", 1.0, "ms", 15), quick=True)])
    assert 2 == done.returncode
    assert "run import_cost again without --quick" in done.stderr
    assert not (tmp_path / "docs").exists()


@pytest.mark.timeout(60)
def test_without_a_run_there_is_no_page(tmp_path: Path) -> None:
    """An empty folder is not taken for figures."""
    done = make(tmp_path, [])
    assert 2 == done.returncode
    assert "run python -m benchmarks first" in done.stderr


def test_why_a_figure_is_missed_can_be_read() -> None:
    """Each reason that the page gives for a missed figure is a heading of the documentation."""
    links = re.findall(r'missed="(.+?)#(.+?)"', (ROOT / "benchmarks" / "_figures.py").read_text(encoding="utf-8"))
    assert len(links) >= 2
    for page, place in links:
        headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "design" / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert place in {re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-") for words in headings}
