"""The page, as a browser shows it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from modelguard.diagnosis import Cause, GrowthReport, Measured, Spread, Trial, Trials, _growth_page

pytestmark = pytest.mark.timeout(120)

BROWSER = shutil.which("chromium")


def trial(name: str, growth: float, cpu: float) -> Trial:
    return Trial(name, ("use it",), 1, Spread(growth, growth, growth), Spread(cpu, cpu, cpu), Spread(1, 1, 1), 10**8)


REPORT = GrowthReport(
    "app:predict",
    "grows",
    (Cause("retention", 1.0, "a trim gave 50 MB back", "Use another allocator."),),
    measured=Measured(calls=tuple(range(25)), private=tuple(2_000_000 * number for number in range(25))),
    trials=Trials(300, trial("nothing", 3e8, 1.0), (trial("jemalloc", 1e6, 0.9), trial("low", 2e8, 1.2)), "jemalloc"),
)


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
def test_a_browser_shows_it_offline(tmp_path: Path) -> None:
    """The line of the readings, the dot of the recommended remedy, and no more than the one file."""
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(_growth_page.as_html(REPORT), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,1500"]
    offline = ["--proxy-server=127.0.0.1:1", f"--user-data-dir={tmp_path / 'profile'}"]
    subprocess.run(
        [*command, *offline, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=100
    )
    with image.open(picture) as shown:
        assert (1000, 1500) == shown.size
        colours = {colour for _, colour in shown.convert("RGB").getcolors(1 << 24)}
    assert {(0x25, 0x63, 0xA8), (0x1A, 0x7F, 0x37)} <= colours
