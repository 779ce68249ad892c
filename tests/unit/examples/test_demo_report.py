"""Tables, picture and figures of the demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples.demo import plot, report
from examples.demo.record import Record, Records, Sample
from examples.demo.traffic import Outcome

PNG = b"\x89PNG\r\n\x1a\n"


def records(*, reloads: int) -> Records:
    """Make a run of twenty seconds with so many reloads of the guarded server, and one worker less replaced."""
    guarded, isolated = Record("guarded", epoch=100.0), Record("isolated", epoch=100.0)
    for number in range(1, reloads + 1):
        release = {"event": "GenerationReleased", "generation": number, "bytes_before": 9_000_000, "bytes_after": 0}
        load = {"event": "LoadFinished", "generation": number + 1, "time": 100.0 + 2 * number, "swap": "drain_first"}
        guarded.events += [
            release,
            load | {"seconds": 0.5, "waited_seconds": 0.6, "reasons": [["memory_growth", "MemoryGrowth('5 MB')"]]},
        ]
    for number in range(1, reloads):
        isolated.events.append({"event": "WorkerEnded", "cause": "recycled", "time": 100.5 + 2 * number})
    isolated.events.append({"event": "WorkerEnded", "cause": "closed", "time": 120.0})
    every = Records(Record("unguarded"), guarded, isolated)
    for record in every:
        step = 1_000_000 if record is every.unguarded else 0
        record.samples = [Sample(float(second), 500_000_000 + second * step) for second in range(21)]
        record.outcomes = [Outcome(second + 0.5, 0.01, 1, None) for second in range(20)]
    return every


def cells(table: str) -> list[tuple[str, ...]]:
    """Take a table in Markdown apart, without the line below its heading."""
    heading, _, *lines = table.splitlines()
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in (heading, *lines)]


def test_one_column_per_server() -> None:
    """The table sets the servers side by side, figures in units that a reader knows."""
    rows = {row[0]: row[1:] for row in cells(report.comparison(records(reloads=2)))}
    assert ("unguarded", "guarded", "isolated") == rows[""]
    assert ("+16 MB", "+0 MB", "+0 MB") == rows["growth"]
    assert ("20", "20", "20") == rows["requests"]
    assert ("10.0 ms", "10.0 ms", "10.0 ms") == rows["latency, 99th percentile"]
    assert ("10.0 ms", "10.0 ms", "10.0 ms") == rows["latency, slowest"]
    assert ("0", "2", "0") == rows["reloads"]
    assert ("0", "0", "1") == rows["workers replaced"]


def test_one_row_per_reload() -> None:
    """Each reload has a line: when, how long, what it gave back, the slowest request meanwhile, and why it was."""
    heading, first, *_ = cells(report.reloads(records(reloads=2).guarded))
    assert len(heading) == len(first)
    assert ("1", "1.4 s", "0.60 s", "9 MB", "10.0 ms", "MemoryGrowth('5 MB')") == first


def test_no_reload_is_said_in_words() -> None:
    """A table without rows would leave the reader guessing."""
    assert "no reload" in report.reloads(records(reloads=0).guarded)


def test_replaced_workers_are_listed() -> None:
    """Each worker that a policy replaced is there with its time; one that ended with its server is not."""
    assert "Workers were replaced at 2.5 s, 4.5 s." == report.replaced(records(reloads=3).isolated)
    assert "No worker" in report.replaced(records(reloads=0).isolated)


def test_markdown_lines_up() -> None:
    """The table is read as plain text too: every line has the same length."""
    lines = report.comparison(records(reloads=1)).splitlines()
    assert 1 == len({len(line) for line in lines})
    assert lines[1].startswith("| ---")


@pytest.mark.parametrize("reloads", [0, 1, 9])
def test_picture(tmp_path: Path, reloads: int) -> None:
    """A picture is drawn whatever happened, without a display."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    plot.draw(records(reloads=reloads), tmp_path / "demo.png", growth="5 MB")
    assert PNG == (tmp_path / "demo.png").read_bytes()[:8]


@pytest.mark.parametrize(
    ("heights", "expected"),
    [([10, 50, 90], [10, 50, 90]), ([10, 12, 14], [10, 30, 50]), ([80, 82, 84], [50, 70, 90]), ([95], [90])],
)
def test_names_of_curves_do_not_meet(heights: list[float], expected: list[float]) -> None:
    """Names at the ends of curves stay apart, and below the top of the picture."""
    assert expected == plot.apart(heights, 20, 90)


def test_figures_survive_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written can be read again, a latency that does not exist included."""
    monkeypatch.setattr(report, "machine", lambda: {"python": "3"})
    seen = records(reloads=1)
    seen.unguarded.outcomes.clear()
    figures = json.loads(json.dumps(report.as_dict("5 MB", seen), allow_nan=False))
    assert {"unguarded", "guarded", "isolated"} == set(figures["servers"])
    assert [None] * 3 == [figures["servers"]["unguarded"][name] for name in ("p50", "p99", "slowest")]
    assert 9_000_000 == figures["servers"]["guarded"]["reloads"][0]["freed"]
