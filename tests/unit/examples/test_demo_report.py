"""Tables, picture and figures of the demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples.demo import plot, report
from examples.demo.__main__ import GUARDED, UNGUARDED
from examples.demo.record import Record, Sample
from examples.demo.traffic import Outcome

PNG = b"\x89PNG\r\n\x1a\n"


def records(*, reloads: int) -> dict[str, Record]:
    """Make a run of twenty seconds with so many reloads of the guarded server."""
    guarded = Record(GUARDED, epoch=100.0)
    for number in range(1, reloads + 1):
        release = {"event": "GenerationReleased", "generation": number, "bytes_before": 9_000_000, "bytes_after": 0}
        load = {"event": "LoadFinished", "generation": number + 1, "time": 100.0 + 2 * number, "swap": "drain_first"}
        guarded.events += [
            release,
            load | {"seconds": 0.5, "waited_seconds": 0.6, "reasons": [["memory_growth", "MemoryGrowth('5 MB')"]]},
        ]
    both = {GUARDED: guarded, UNGUARDED: Record(UNGUARDED)}
    for name, record in both.items():
        step = 0 if name == GUARDED else 1_000_000
        record.samples = [Sample(float(second), 500_000_000 + second * step) for second in range(21)]
        record.outcomes = [Outcome(second + 0.5, 0.01, 1, None) for second in range(20)]
    return both


def cells(table: str) -> list[tuple[str, ...]]:
    """Take a table in Markdown apart, without the line below its heading."""
    heading, _, *lines = table.splitlines()
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in (heading, *lines)]


def test_one_column_per_server() -> None:
    """The table sets the servers side by side, figures in units that a reader knows."""
    rows = {row[0]: row[1:] for row in cells(report.comparison(*records(reloads=2).values()))}
    assert (GUARDED, UNGUARDED) == rows[""]
    assert ("+0 MB", "+16 MB") == rows["growth"]
    assert ("20", "20") == rows["requests"]
    assert ("10.0 ms", "10.0 ms") == rows["latency, median"]
    assert ("2", "0") == rows["reloads"]


def test_one_row_per_reload() -> None:
    """Each reload has a line: when, how long, what it gave back, the slowest request meanwhile, and why it was."""
    heading, first, *_ = cells(report.reloads(records(reloads=2)[GUARDED]))
    assert len(heading) == len(first)
    assert ("1", "1.4 s", "0.60 s", "9 MB", "10.0 ms", "MemoryGrowth('5 MB')") == first


def test_no_reload_is_said_in_words() -> None:
    """A table without rows would leave the reader guessing."""
    assert "no reload" in report.reloads(records(reloads=0)[GUARDED])


def test_markdown_lines_up() -> None:
    """The table is read as plain text too: every line has the same length."""
    lines = report.comparison(*records(reloads=1).values()).splitlines()
    assert 1 == len({len(line) for line in lines})
    assert lines[1].startswith("| ---")


@pytest.mark.parametrize("reloads", [0, 1, 9])
def test_picture(tmp_path: Path, reloads: int) -> None:
    """A picture is drawn whatever happened, without a display."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    both = records(reloads=reloads)
    plot.draw(both[GUARDED], both[UNGUARDED], tmp_path / "demo.png", growth="5 MB")
    assert PNG == (tmp_path / "demo.png").read_bytes()[:8]


def test_figures_survive_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written can be read again, a latency that does not exist included."""
    monkeypatch.setattr(report, "machine", lambda: {"python": "3"})
    seen = records(reloads=1)
    seen[UNGUARDED].outcomes.clear()
    figures = json.loads(json.dumps(report.as_dict("5 MB", seen[GUARDED], seen[UNGUARDED]), allow_nan=False))
    assert {GUARDED, UNGUARDED} == set(figures["servers"])
    assert [None] * 3 == [figures["servers"][UNGUARDED][name] for name in ("p50", "p99", "slowest")]
    assert 9_000_000 == figures["servers"][GUARDED]["reloads"][0]["freed"]
