"""Tables, live lines, picture and report of `modelguard demo`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from modelguard.cli.demo import plot, report, table, view
from modelguard.cli.demo.compare import GUARDED, UNGUARDED, Settings
from modelguard.cli.demo.record import Record, Sample
from modelguard.cli.demo.traffic import Answer

PNG = b"\x89PNG\r\n\x1a\n"
SETTINGS = Settings(folder=Path("examples"), seconds=20.0, growth="5 MB")


def records(*, reloads: int) -> dict[str, Record]:
    """Make a run of twenty seconds with so many reloads of the guarded server."""
    guarded = Record(GUARDED, epoch=100.0)
    for number in range(1, reloads + 1):
        release = {"event": "GenerationReleased", "generation": number, "bytes_before": 9_000_000, "bytes_after": 0}
        load = {"event": "LoadFinished", "generation": number + 1, "time": 100.0 + 2 * number, "swap": "drain_first"}
        guarded.events += [release, load | {"seconds": 0.5, "waited_seconds": 0.6, "reasons": ["MemoryGrowth('5 MB')"]}]
    both = {GUARDED: guarded, UNGUARDED: Record(UNGUARDED)}
    for name, record in both.items():
        step = 0 if name == GUARDED else 1_000_000
        record.samples = [Sample(float(second), 500_000_000 + second * step) for second in range(21)]
        record.answers = [Answer(second + 0.5, 0.01, 1, None) for second in range(20)]
    return both


def test_one_column_per_server() -> None:
    """The table sets the servers side by side, figures in units that a reader knows."""
    rows = {row[0]: row[1:] for row in table.comparison(records(reloads=2))}
    assert (GUARDED, UNGUARDED) == rows[""]
    assert ("+0 MB", "+16 MB") == rows["growth"]
    assert ("20", "20") == rows["requests"]
    assert ("10.0 ms", "10.0 ms") == rows["latency, median"]
    assert ("2", "0") == rows["reloads"]


def test_one_row_per_reload() -> None:
    """Each reload tells when, how long, what it gave back, whom it kept waiting, and why it was."""
    heading, first, *_ = table.reloads(records(reloads=2)[GUARDED])
    assert len(heading) == len(first)
    assert ("1", "1.4 s", "0.60 s", "9 MB", "10.0 ms", "MemoryGrowth('5 MB')") == first


def test_no_reload_is_said_in_words() -> None:
    """A table without rows would leave the reader guessing."""
    assert "no reload" in table.markdown(table.reloads(records(reloads=0)[GUARDED]))


def test_markdown_lines_up() -> None:
    """The table is read as plain text too: every line has the same length."""
    lines = table.markdown(table.comparison(records(reloads=1))).splitlines()
    assert 1 == len({len(line) for line in lines})
    assert lines[1].startswith("| ---")


def test_sparkline_shows_the_whole_curve() -> None:
    """The first and the last reading are in it, whatever its width."""
    samples = [Sample(float(second), second) for second in range(100)]
    assert "▁▂▄▆" == view.sparkline(samples, 0, 99, width=4)
    assert "▁▁▁▁████" == view.sparkline([Sample(0.0, 3), Sample(1.0, 9)], 3, 9, width=8)


def test_sparkline_of_a_flat_curve() -> None:
    """Nothing is divided by a range of zero."""
    assert "▁▁▁" == view.sparkline([Sample(0.0, 5)], 5, 5, width=3)


def test_plain_lines_keep_a_pace() -> None:
    """Where there is no terminal a line is written when something new begins, and every ten seconds."""
    stream, now = io.StringIO(), [0.0]
    shown = list(records(reloads=1).values())
    with view.choose(stream, clock=lambda: now[0]) as show:
        for second in range(25):
            now[0] = float(second)
            show("words", second / 25, shown)
        show("picture", 1.0, shown)
    lines = stream.getvalue().splitlines()
    assert ["words", "words", "words", "picture"] == [line.split()[1].strip(";") for line in lines]
    assert "guarded: 500 MB, 20 requests" in lines[0]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def test_a_terminal_gets_the_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the display shows both servers and what is going on, even before the first reading."""
    pytest.importorskip("rich", reason="the live display needs rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with view.choose(stream) as show:
        show("starting", 0.0, [Record(GUARDED), Record(UNGUARDED)])
        show("sending words", 0.5, list(records(reloads=1).values()))
    for expected in ("sending words", GUARDED, UNGUARDED, "520 MB", "50%"):
        assert expected in stream.getvalue()


@pytest.mark.parametrize("reloads", [0, 1, 9])
def test_picture(tmp_path: Path, reloads: int) -> None:
    """A picture is drawn whatever happened, without a display."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    plot.draw(records(reloads=reloads), tmp_path / "demo.png", growth="5 MB")
    assert PNG == (tmp_path / "demo.png").read_bytes()[:8]


def test_figures_survive_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written can be read again, a latency that does not exist included."""
    monkeypatch.setattr(report, "machine", lambda: {"python": "3"})
    seen = records(reloads=1)
    seen[UNGUARDED].answers.clear()
    figures = json.loads(json.dumps(report.as_dict(SETTINGS, seen), allow_nan=False))
    assert {GUARDED, UNGUARDED} == set(figures["servers"])
    assert figures["servers"][UNGUARDED]["latency"] == {"p50": None, "p99": None, "slowest": None}
    assert 9_000_000 == figures["servers"][GUARDED]["reloads"][0]["freed"]
