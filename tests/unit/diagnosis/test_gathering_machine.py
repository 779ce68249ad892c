"""This machine and this environment, from files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelguard.diagnosis import examine
from modelguard.diagnosis.facts import Interpreter, Machine
from modelguard.diagnosis.gathering_machine import gather_here, machine, this_interpreter


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "status").write_text("Name:\tpython\nCpus_allowed:\tff,0000000f\n")
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nSwapTotal: 100000 kB\nSwapFree: 40000 kB\n")
    return tmp_path


def test_what_the_machine_offers(root: Path) -> None:
    """CPUs by the affinity, swap by what is not free, and no limit where no cgroup shows one."""
    found = machine(root)
    assert (12, 60_000 * 1024, False) == (found.affinity, found.swapped, found.cuda)
    assert found.limit is not None
    assert None is found.limit.bytes


def test_an_nvidia_device(root: Path) -> None:
    """Its control node alone is none."""
    (root / "dev").mkdir()
    (root / "dev" / "nvidiactl").touch()
    assert not machine(root).cuda
    (root / "dev" / "nvidia0").touch()
    assert machine(root).cuda


def test_a_proc_that_tells_nothing(tmp_path: Path) -> None:
    """What cannot be read is not known, and nothing is raised."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    found = machine(tmp_path)
    assert (None, None) == (found.affinity, found.swapped)


def test_no_proc_at_all(tmp_path: Path) -> None:
    """On other systems a limit would not show, so nothing is said about it."""
    assert Machine(None, None, None) == Machine(limit=machine(tmp_path).limit)


def test_this_environment(root: Path) -> None:
    """Its variables are judged, and only those that modelguard knows are kept."""
    facts = gather_here({"LRU_CACHE_CAPACITY": "8", "API_KEY": "hunter2"}, root=root)
    assert "hunter2" not in repr(facts)
    assert {"MG201", "MG301", "MG302"} <= {finding.number for finding in examine(facts).findings}


def test_the_real_environment() -> None:
    """Whatever this machine is, it can be judged."""
    report = examine(gather_here())
    assert report.asked >= 18
    assert isinstance(this_interpreter(), Interpreter)
