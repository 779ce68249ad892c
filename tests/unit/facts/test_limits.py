from __future__ import annotations

import os
from pathlib import Path

import pytest

from modelguard.facts import _memory
from modelguard.facts._memory import Limit, Strain

GB = 10**9
MB = 10**6
NOTHING = Limit(None, None, None, None)
UNLIMITED_V1 = 2**63 - 4096

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
OTHERS = (
    "22 27 0:21 / /proc rw,relatime - proc proc rw",
    "25 24 0:23 / /mnt/odd\\040name rw - tmpfs  rw,size=1k",  # a source may be empty
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu",
)


class Machine:
    """A tree of ``/proc`` and ``/sys`` below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def process(self, cgroup: str, *mounts: str, pid: str = "self") -> None:
        self.write(f"/proc/{pid}/cgroup", cgroup)
        self.write("/proc/self/mountinfo", "\n".join([*OTHERS, *mounts]))

    def write(self, path: str, text: object) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")

    def v2(self, path: str, limit: object, *, current: int = 0, inactive: int = 0, high: object = "max") -> None:
        self.write(f"{path}/memory.max", limit)
        self.write(f"{path}/memory.high", high)
        self.write(f"{path}/memory.current", current)
        self.write(f"{path}/memory.stat", f"anon 5\nfile 7\ninactive_file {inactive}\nactive_file 9")

    def v1(self, path: str, limit: int, *, usage: int = 0, inactive: int = 0, hierarchical: int | None = None) -> None:
        self.write(f"{path}/memory.limit_in_bytes", limit)
        self.write(f"{path}/memory.usage_in_bytes", usage)
        least = "" if hierarchical is None else f"hierarchical_memory_limit {hierarchical}\n"
        self.write(f"{path}/memory.stat", f"cache 5\n{least}inactive_file 1\ntotal_inactive_file {inactive}")

    def limit(self, pid: int | None = None) -> Limit:
        return _memory.memory_limit(pid, root=self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nothing_limits_where_there_is_no_proc(machine: Machine) -> None:
    """On a system without /proc every field is None."""
    assert NOTHING == machine.limit()


def test_nothing_limits_a_process_in_the_root_cgroup(machine: Machine) -> None:
    """The root cgroup of version 2 has no memory files at all."""
    machine.process("0::/", V2)
    machine.write("/sys/fs/cgroup/cgroup.procs", "1")
    assert NOTHING == machine.limit()


def test_max_means_no_limit(machine: Machine) -> None:
    """``max`` in every file of the path means no limit."""
    machine.process("0::/a/b", V2)
    machine.v2("/sys/fs/cgroup/a", "max", current=5 * GB)
    machine.v2("/sys/fs/cgroup/a/b", "max", current=1 * GB)
    assert NOTHING == machine.limit()


def test_the_limit_of_its_own_cgroup_with_its_working_set(machine: Machine) -> None:
    """File cache that the kernel drops first does not count as used."""
    machine.process("0::/app", V2)
    machine.v2("/sys/fs/cgroup/app", 2 * GB, current=900 * MB, inactive=300 * MB)
    expected = Limit(2 * GB, "/sys/fs/cgroup/app/memory.max", 600 * MB, None, headroom=1400 * MB)
    assert expected == machine.limit()


@pytest.mark.parametrize(
    ("outer", "middle", "inner", "source"),
    [
        (1 * GB, 2 * GB, 3 * GB, "/sys/fs/cgroup/a/memory.max"),
        (3 * GB, 1 * GB, 2 * GB, "/sys/fs/cgroup/a/b/memory.max"),
        (3 * GB, "max", 1 * GB, "/sys/fs/cgroup/a/b/c/memory.max"),
        (1 * GB, 1 * GB, 1 * GB, "/sys/fs/cgroup/a/b/c/memory.max"),
    ],
)
def test_the_smallest_limit_along_the_path_wins(
    machine: Machine, outer: object, middle: object, inner: object, source: str
) -> None:
    """The smallest limit on the path is in force; of equals, the one nearest to the process."""
    machine.process("0::/a/b/c", V2)
    machine.v2("/sys/fs/cgroup/a", outer)
    machine.v2("/sys/fs/cgroup/a/b", middle)
    machine.v2("/sys/fs/cgroup/a/b/c", inner)
    assert (1 * GB, source) == (machine.limit().bytes, machine.limit().source)


def test_a_wide_limit_full_of_neighbours_leaves_less_room_than_a_narrow_one(machine: Machine) -> None:
    """Headroom is the smallest along the path, not that of the smallest limit."""
    machine.process("0::/pod/app", V2)
    machine.v2("/sys/fs/cgroup/pod", 4 * GB, current=3900 * MB)
    machine.v2("/sys/fs/cgroup/pod/app", 2 * GB, current=1 * GB)
    assert (2 * GB, 100 * MB) == (machine.limit().bytes, machine.limit().headroom)


def test_headroom_is_never_negative(machine: Machine) -> None:
    """A limit that was lowered below what is used leaves no room."""
    machine.process("0::/app", V2)
    machine.v2("/sys/fs/cgroup/app", 1 * GB, current=2 * GB)
    assert 0 == machine.limit().headroom


def test_the_soft_limit_has_a_field_of_its_own(machine: Machine) -> None:
    """``memory.high`` slows a process down and does not kill it, so it is not the limit."""
    machine.process("0::/a/b", V2)
    machine.v2("/sys/fs/cgroup/a", "max", high=3 * GB)
    machine.v2("/sys/fs/cgroup/a/b", "max", high=2 * GB)
    assert Limit(None, None, None, 2 * GB) == machine.limit()


def test_the_smallest_swap_limit_along_the_path_wins(machine: Machine) -> None:
    """A ``memory.swap.max`` of 0 anywhere on the path means that nothing may be moved to swap."""
    machine.process("0::/a/b", V2)
    machine.v2("/sys/fs/cgroup/a", "max")
    machine.v2("/sys/fs/cgroup/a/b", 2 * GB)
    assert machine.limit().swap is None
    machine.write("/sys/fs/cgroup/a/memory.swap.max", 0)
    machine.write("/sys/fs/cgroup/a/b/memory.swap.max", 1 * GB)
    assert (2 * GB, 0) == (machine.limit().bytes, machine.limit().swap)
    machine.write("/sys/fs/cgroup/a/memory.swap.max", "max")
    assert 1 * GB == machine.limit().swap


def test_swap_is_limited_without_a_limit_of_memory(machine: Machine) -> None:
    """Version 2 limits them separately."""
    machine.process("0::/a", V2)
    machine.v2("/sys/fs/cgroup/a", "max")
    machine.write("/sys/fs/cgroup/a/memory.swap.max", 1 * GB)
    assert Limit(None, None, None, None, swap=1 * GB) == machine.limit()


@pytest.mark.parametrize(("with_swap", "swap"), [(3 * GB, 2 * GB), (1 * GB, 0), (UNLIMITED_V1, None)])
def test_version_1_limits_memory_and_swap_together(machine: Machine, with_swap: int, swap: int | None) -> None:
    """Swap may hold what the common limit allows beyond the limit of memory."""
    machine.process("4:memory:/a", V1)
    machine.v1("/sys/fs/cgroup/memory/a", 1 * GB)
    machine.write("/sys/fs/cgroup/memory/a/memory.memsw.limit_in_bytes", with_swap)
    assert (1 * GB, swap) == (machine.limit().bytes, machine.limit().swap)


def test_version_1_shows_swap_limits_above_the_container(machine: Machine) -> None:
    """The pod's limit of memory and swap shows in ``hierarchical_memsw_limit``."""
    machine.process("4:memory:/pod/1", V1.replace(" / ", " /pod/1 ", 1))
    machine.v1("/sys/fs/cgroup/memory", UNLIMITED_V1, hierarchical=1 * GB)
    stat = machine.root / "sys/fs/cgroup/memory/memory.stat"
    stat.write_text(stat.read_text() + f"hierarchical_memsw_limit {3 * GB}\n")
    assert 2 * GB == machine.limit().swap


def test_a_limit_is_known_even_if_usage_is_not(machine: Machine) -> None:
    """A cgroup that hides its usage still has a limit."""
    machine.process("0::/app", V2)
    machine.write("/sys/fs/cgroup/app/memory.max", 1 * GB)
    assert Limit(1 * GB, "/sys/fs/cgroup/app/memory.max", None, None) == machine.limit()


def test_version_1_walks_the_path_too(machine: Machine) -> None:
    """The smallest ``memory.limit_in_bytes`` along the path is the limit, named by its own file."""
    machine.process("4:memory:/a/b\n1:cpu:/x", V1)
    machine.v1("/sys/fs/cgroup/memory", UNLIMITED_V1)
    machine.v1("/sys/fs/cgroup/memory/a", 1 * GB, usage=700 * MB, inactive=200 * MB)
    machine.v1("/sys/fs/cgroup/memory/a/b", UNLIMITED_V1, hierarchical=1 * GB)
    expected = Limit(1 * GB, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes", 500 * MB, None, headroom=500 * MB)
    assert expected == machine.limit()


@pytest.mark.parametrize("unlimited", [2**63 - 4096, 2**63 - 65536, 2**63 - 1])
def test_version_1_writes_no_limit_as_a_huge_number(machine: Machine, unlimited: int) -> None:
    """The largest whole number of pages, whatever their size, means no limit."""
    machine.process("4:memory:/a", V1)
    machine.v1("/sys/fs/cgroup/memory/a", unlimited, hierarchical=unlimited)
    assert NOTHING == machine.limit()


def test_version_1_shows_limits_above_the_container(machine: Machine) -> None:
    """The pod's limit shows in ``hierarchical_memory_limit`` where only the container's cgroup is mounted."""
    machine.process("4:memory:/pod/1", V1.replace(" / ", " /pod/1 ", 1))
    machine.v1("/sys/fs/cgroup/memory", UNLIMITED_V1, usage=400 * MB, hierarchical=1 * GB)
    expected = Limit(1 * GB, "/sys/fs/cgroup/memory/memory.stat", 400 * MB, None, headroom=600 * MB)
    assert expected == machine.limit()


def test_a_hybrid_host_keeps_its_limits_in_version_1(machine: Machine) -> None:
    """An unused cgroup2 mount beside the version 1 controllers does not hide them."""
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
    machine.process("4:memory:/app\n0::/app", unified, V1)
    machine.write("/sys/fs/cgroup/unified/app/cgroup.procs", "1")
    machine.v1("/sys/fs/cgroup/memory/app", 1 * GB)
    assert "/sys/fs/cgroup/memory/app/memory.limit_in_bytes" == machine.limit().source


def test_version_1_without_the_memory_controller_leaves_it_to_version_2(machine: Machine) -> None:
    """Named hierarchies such as systemd's own may be mounted beside a version 2 that has the memory controller."""
    machine.process("1:name=systemd:/x\n0::/app", V2)
    machine.v2("/sys/fs/cgroup/app", 1 * GB)
    assert "/sys/fs/cgroup/app/memory.max" == machine.limit().source


def test_memory_shares_a_hierarchy_with_other_controllers(machine: Machine) -> None:
    """Version 1 may mount several controllers together."""
    machine.process("4:cpuset,memory:/app", V1.replace("rw,memory", "rw,cpuset,memory"))
    machine.v1("/sys/fs/cgroup/memory/app", 1 * GB)
    assert 1 * GB == machine.limit().bytes


def test_the_mount_shows_a_part_of_the_tree(machine: Machine) -> None:
    """A path below the mount's root is found relative to it."""
    machine.process("4:memory:/docker/123/sub", V1.replace(" / ", " /docker/123 ", 1))
    machine.v1("/sys/fs/cgroup/memory/sub", 1 * GB)
    assert "/sys/fs/cgroup/memory/sub/memory.limit_in_bytes" == machine.limit().source


@pytest.mark.parametrize("cgroup", ["/", "/docker/123", "/../123", "/kubepods/pod1/123"])
def test_in_a_container_the_mount_is_its_own_cgroup(machine: Machine, cgroup: str) -> None:
    """Where the path is the host's, the mount's root is the container's cgroup."""
    machine.process(f"0::{cgroup}", V2)
    machine.v2("/sys/fs/cgroup", 1 * GB, current=100 * MB)
    assert Limit(1 * GB, "/sys/fs/cgroup/memory.max", 100 * MB, None, headroom=900 * MB) == machine.limit()


def test_a_mount_from_outside_the_namespace_is_still_read(machine: Machine) -> None:
    """A mount whose root lies above the cgroup namespace shows at least its own limit."""
    machine.process("0::/", V2.replace(" / ", " /../.. ", 1))
    machine.v2("/sys/fs/cgroup", 1 * GB)
    assert 1 * GB == machine.limit().bytes


def test_of_two_mounts_the_one_that_shows_the_cgroup_counts(machine: Machine) -> None:
    """A second mount, of another part of the same hierarchy, is ignored."""
    elsewhere = V2.replace(" / /sys/fs/cgroup ", " /other /mnt/odd\\040place ", 1)
    machine.process("0::/app", elsewhere, V2)
    machine.v2("/mnt/odd place", 1 * MB)
    machine.v2("/sys/fs/cgroup/app", 1 * GB)
    assert 1 * GB == machine.limit().bytes


def test_mount_points_may_have_blanks(machine: Machine) -> None:
    """The kernel's octal escapes in mountinfo are undone."""
    machine.process("0::/my app", V2.replace("/sys/fs/cgroup", "/mnt/odd\\040place"))
    machine.v2("/mnt/odd place/my app", 1 * GB)
    assert "/mnt/odd place/my app/memory.max" == machine.limit().source


def test_a_path_may_have_colons(machine: Machine) -> None:
    """Container runtimes name cgroups such as ``cri-containerd:1``."""
    machine.process("0::/kubepods:burstable:1", V2)
    machine.v2("/sys/fs/cgroup/kubepods:burstable:1", 1 * GB)
    assert 1 * GB == machine.limit().bytes


def test_nothing_limits_where_no_cgroup_is_mounted(machine: Machine) -> None:
    """A sandbox may hide the cgroup file system."""
    machine.process("0::/app")
    assert NOTHING == machine.limit()


def test_another_process_has_its_own_limit(machine: Machine) -> None:
    """With ``pid`` the cgroup of that process is read."""
    machine.process("0::/one", V2)
    machine.process("0::/two", V2, pid="77")
    machine.v2("/sys/fs/cgroup/one", 1 * GB)
    machine.v2("/sys/fs/cgroup/two", 2 * GB)
    assert (1 * GB, 2 * GB) == (machine.limit().bytes, machine.limit(pid=77).bytes)


def test_another_process_out_of_sight_has_no_known_limit(machine: Machine) -> None:
    """The limit of this container is never reported for a process in another one."""
    machine.process("0::/", V2)
    machine.process("0::/../456", V2, pid="77")
    machine.v2("/sys/fs/cgroup", 1 * GB)
    assert NOTHING == machine.limit(pid=77)


def test_this_process_may_be_named_by_its_id(machine: Machine) -> None:
    """Its own pid and no pid at all mean the same."""
    machine.process("0::/docker/123", V2)
    machine.v2("/sys/fs/cgroup", 1 * GB)
    assert machine.limit() == machine.limit(pid=os.getpid())


def test_the_real_machine_is_read() -> None:
    """Whatever this machine is, the answer is a limit with its file, or none at all."""
    limit = _memory.memory_limit()
    assert (limit.bytes is None) == (limit.source is None)
    assert limit.source is None or Path(limit.source).is_file()


def test_strain_in_version_2(machine: Machine) -> None:
    """The kills of the process's own cgroup, and what the limited one holds without file cache."""
    machine.process("0::/a/b", V2)
    machine.v2("/sys/fs/cgroup/a", 500 * MB, current=490 * MB, inactive=300 * MB)
    machine.write("/sys/fs/cgroup/a/memory.peak", 500 * MB)
    machine.v2("/sys/fs/cgroup/a/b", "max", current=490 * MB)
    machine.write("/sys/fs/cgroup/a/b/memory.events", "low 0\nhigh 0\nmax 812\noom 41\noom_kill 33\noom_group_kill 0")
    assert Strain(33, 190 * MB - 9, 500 * MB) == _memory.strain(machine.limit(), root=machine.root)


def test_strain_in_version_1(machine: Machine) -> None:
    """The same from the files of version 1."""
    machine.process("4:memory:/a", V1)
    machine.v1("/sys/fs/cgroup/memory/a", 450 * MB, usage=449 * MB, inactive=9 * MB)
    machine.write("/sys/fs/cgroup/memory/a/memory.max_usage_in_bytes", 450 * MB)
    machine.write("/sys/fs/cgroup/memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 67")
    machine.v1("/sys/fs/cgroup/memory", UNLIMITED_V1)
    assert Strain(67, 440 * MB, 450 * MB) == _memory.strain(machine.limit(), root=machine.root)


def test_strain_that_cannot_be_seen(machine: Machine) -> None:
    """Nothing is claimed of a machine without cgroups."""
    assert Strain() == _memory.strain(NOTHING, root=machine.root)
