"""Renderings that only another program can read back: shells, and systemd's own check of a unit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelguard import presets
from modelguard.environment._knobs import Knob
from modelguard.presets import Preset

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform == "win32", reason="there is no shell of this kind on Windows"),
]

NASTY = [
    "plain",
    "two words",
    "it's",
    '"',
    "\\ \\n",
    "$HOME ${HOME} $(date) $$",
    "%h %%",
    "`date`",
    "a,b;c&d|e",
    "!1 ~ *",
    "ü",
    "",
]

MINE = Preset(
    "mine",
    "Mine.",
    tuple(Knob(f"V{i}", value, "any time", "it", "does", "costs", "source") for i, value in enumerate(NASTY)),
)


@pytest.mark.parametrize("shell", ["bash", "dash", "sh", "zsh"])
def test_a_shell_reads_it_back(shell: str, tmp_path: Path) -> None:
    """Sourced in a shell, every variable reaches the programs that it starts unchanged."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "preset.sh"
    script.write_text(MINE.render("shell"), encoding="utf-8")
    show = (
        "import os, sys; sys.stdout.buffer.write(b'\\0'.join(os.environb[b'V%d' % i] for i in range(int(sys.argv[1]))))"
    )
    command = f'. "$0" && exec "$1" -c "$2" {len(NASTY)}'
    done = subprocess.run(
        [shell, "-c", command, script, sys.executable, show], capture_output=True, timeout=50, check=True
    )
    assert NASTY == done.stdout.decode().split("\0")


@pytest.mark.parametrize("preset", [MINE, *(presets.get(name, cpus=2) for name in presets.names())], ids=str)
def test_systemd_finds_no_fault(preset: Preset, tmp_path: Path) -> None:
    """systemd-analyze reads the unit without a complaint, such as on an assignment that it would ignore."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "mine.service"
    unit.write_text(preset.render("systemd") + "ExecStart=/bin/true\n", encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", unit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert [] == [line for line in done.stderr.splitlines() if unit.name in line]
