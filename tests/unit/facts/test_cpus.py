from __future__ import annotations

import os
from pathlib import Path

import pytest

from modelguard.facts import _memory
from modelguard.facts._memory import Cpus

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"


class Machine:
    """A tree of ``/proc`` and ``/sys`` below a folder, with eight CPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process("0::/", V2)

    def process(self, cgroup: str, mount: str, *, allowed: str = "0-7", pid: str = "self") -> None:
        self.write(f"/proc/{pid}/cgroup", cgroup)
        self.write(f"/proc/{pid}/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}")
        self.write("/proc/self/mountinfo", mount)

    def write(self, path: str, text: object) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")

    def quota_v1(self, path: str, quota: int) -> None:
        self.write(f"/sys/fs/cgroup/cpu,cpuacct{path}/cpu.cfs_quota_us", quota)
        self.write(f"/sys/fs/cgroup/cpu,cpuacct{path}/cpu.cfs_period_us", 100_000)

    def cpus(self, pid: int | None = None) -> Cpus:
        return _memory.available_cpus(pid, root=self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(("allowed", "count"), [("0-7", 8), ("3", 1), ("0-1,4,6-7", 5), ("0", 1)])
def test_without_a_quota_the_affinity_counts(machine: Machine, allowed: str, count: int) -> None:
    """Its affinity, which a cpuset narrows too."""
    machine.process("0::/", V2, allowed=allowed)
    assert Cpus(count, "/proc/self/status") == machine.cpus()


@pytest.mark.parametrize(("quota", "count"), [("200000 100000", 2.0), ("150000 100000", 1.5), ("25000 50000", 0.5)])
def test_a_smaller_quota_counts(machine: Machine, quota: str, count: float) -> None:
    """Version 2 writes microseconds of work per microseconds of time."""
    machine.process("0::/app", V2)
    machine.write("/sys/fs/cgroup/app/cpu.max", quota)
    assert Cpus(count, "/sys/fs/cgroup/app/cpu.max") == machine.cpus()


@pytest.mark.parametrize("quota", ["max 100000", "1600000 100000"])
def test_no_quota_or_a_larger_one_changes_nothing(machine: Machine, quota: str) -> None:
    """A process never runs on more CPUs than there are."""
    machine.process("0::/app", V2)
    machine.write("/sys/fs/cgroup/app/cpu.max", quota)
    assert Cpus(8, "/proc/self/status") == machine.cpus()


def test_the_smallest_quota_along_the_path_wins(machine: Machine) -> None:
    """The pod above a container may have the smaller one."""
    machine.process("0::/pod/app", V2)
    machine.write("/sys/fs/cgroup/pod/cpu.max", "100000 100000")
    machine.write("/sys/fs/cgroup/pod/app/cpu.max", "400000 100000")
    assert Cpus(1.0, "/sys/fs/cgroup/pod/cpu.max") == machine.cpus()


def test_in_a_container_the_mount_is_its_own_cgroup(machine: Machine) -> None:
    """Where the path is the host's, the mount's root is the container's cgroup."""
    machine.process("0::/docker/123", V2)
    machine.write("/sys/fs/cgroup/cpu.max", "300000 100000")
    assert Cpus(3.0, "/sys/fs/cgroup/cpu.max") == machine.cpus()


def test_version_1_walks_the_path_too(machine: Machine) -> None:
    """Its quota and period are in two files, and -1 means no quota."""
    machine.process("4:cpu,cpuacct:/pod/app\n3:memory:/elsewhere", V1)
    machine.quota_v1("", -1)
    machine.quota_v1("/pod", 250_000)
    machine.quota_v1("/pod/app", -1)
    assert Cpus(2.5, "/sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us") == machine.cpus()


def test_another_process_has_its_own(machine: Machine) -> None:
    """Its affinity and its quota."""
    machine.process("0::/two", V2, allowed="0-3", pid="77")
    assert Cpus(4, "/proc/77/status") == machine.cpus(77)
    machine.write("/sys/fs/cgroup/two/cpu.max", "200000 100000")
    assert Cpus(2.0, "/sys/fs/cgroup/two/cpu.max") == machine.cpus(77)


def test_a_process_that_is_gone_has_none(machine: Machine) -> None:
    """No figure of another process is given for it."""
    with pytest.raises(ProcessLookupError, match="process 78 does not exist"):
        machine.cpus(78)


def test_without_proc_the_machines_cpus_count(tmp_path: Path) -> None:
    """As on systems other than Linux."""
    assert Cpus(os.cpu_count() or 1, "os.cpu_count()") == _memory.available_cpus(root=tmp_path)


def test_the_real_machine_is_read() -> None:
    """Whatever this machine is, there is at least a part of one CPU, and no more than it has."""
    assert 0 < _memory.available_cpus().count <= (os.cpu_count() or 1)
