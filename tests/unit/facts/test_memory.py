from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from modelguard import memory
from modelguard.errors import InvalidOption, NotSupported
from modelguard.facts import _memory
from modelguard.memory import MemoryUsage, PrivateMeter

KB = 1024

ROLLUP = """\
560885866000-7ffd5521e000 ---p 00000000 00:00 0                          [rollup]
Rss:                1000 kB
Pss:                 700 kB
Pss_Dirty:           500 kB
Shared_Clean:        300 kB
Shared_Dirty:         40 kB
Private_Clean:        60 kB
Private_Dirty:       600 kB
Swap:                 20 kB
SwapPss:              10 kB
"""

SMAPS = """\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/Rss: 9 kB
Size:                328 kB
Rss:                 100 kB
Pss:                  50 kB
Shared_Clean:         60 kB
Shared_Dirty:          1 kB
Private_Clean:        30 kB
Private_Dirty:         9 kB
Swap:                  2 kB
VmFlags: rd ex mr mw me dw
7f1c0000-7f1d0000 rw-p 00000000 00:00 0
Rss:                  10 kB
Pss:                  10 kB
Shared_Clean:          0 kB
Shared_Dirty:          0 kB
Private_Clean:         3 kB
Private_Dirty:         7 kB
Swap:                  0 kB
VmFlags: rd wr mr mw me ac
"""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A ``/proc`` with this process in it, limited by nothing."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "self" / "smaps").write_text(SMAPS)
    (folder / "self" / "smaps_rollup").write_text(ROLLUP)
    (folder / "meminfo").write_text(
        "MemTotal: 8000 kB\nMemFree: 100 kB\nMemAvailable:    5000 kB\nHugePages_Total: 0\n"
    )
    return folder


def limited(proc: Path, limit: int, current: int, pid: str = "self") -> None:
    (proc / pid / "cgroup").write_text("0::/app\n")
    (proc / "self" / "mountinfo").write_text("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    cgroup = proc.parent / "sys" / "fs" / "cgroup" / "app"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "memory.current").write_text(f"{current}\n")


def test_every_figure_comes_from_the_rollup(proc: Path) -> None:
    """The kernel's kilobytes become bytes, and private memory is what this process alone maps."""
    expected = MemoryUsage(
        rss=1000 * KB,
        pss=700 * KB,
        uss=660 * KB,
        shared_clean=300 * KB,
        shared_dirty=40 * KB,
        private_clean=60 * KB,
        private_dirty=600 * KB,
        swap=20 * KB,
        limit=None,
        limit_source=None,
        headroom=5000 * KB,
    )
    assert expected == memory.usage(root=proc.parent)


def test_without_a_rollup_the_mappings_are_added_up(proc: Path) -> None:
    """Kernels before 4.14 and some sandboxes give only the single mappings."""
    (proc / "self" / "smaps_rollup").unlink()
    found = memory.usage(root=proc.parent)
    assert (110 * KB, 60 * KB, 49 * KB, 2 * KB) == (found.rss, found.pss, found.uss, found.swap)


def test_fields_that_a_kernel_does_not_give_are_none(proc: Path) -> None:
    """A missing figure is None, not zero."""
    (proc / "self" / "smaps_rollup").write_text("Rss: 10 kB\n")
    found = memory.usage(root=proc.parent)
    assert (10 * KB, None, None, None) == (found.rss, found.pss, found.uss, found.swap)


def test_headroom_is_what_the_limit_leaves(proc: Path) -> None:
    """A cgroup limit below what the machine has available decides."""
    limited(proc, limit=3000 * KB, current=1000 * KB)
    found = memory.usage(root=proc.parent)
    expected = (3000 * KB, "/sys/fs/cgroup/app/memory.max", 2000 * KB)
    assert expected == (found.limit, found.limit_source, found.headroom)


def test_headroom_is_no_more_than_the_machine_has(proc: Path) -> None:
    """A limit wider than what the machine has available leaves only that."""
    limited(proc, limit=10**12, current=0)
    assert 5000 * KB == memory.usage(root=proc.parent).headroom


def test_headroom_is_unknown_where_nothing_shows_it(proc: Path) -> None:
    """Without a limit and a figure of available memory it is None, not a guess."""
    (proc / "meminfo").unlink()
    assert memory.usage(root=proc.parent).headroom is None


def test_another_process_is_read_by_its_id(proc: Path) -> None:
    """Its figures and its limit are its own."""
    (proc / "77").mkdir()
    (proc / "77" / "smaps_rollup").write_text(ROLLUP.replace("1000 kB", "2000 kB"))
    limited(proc, limit=3000 * KB, current=0, pid="77")
    found = memory.usage(77, root=proc.parent)
    assert (2000 * KB, 3000 * KB) == (found.rss, found.limit)
    assert memory.usage(root=proc.parent).limit is None


@pytest.mark.parametrize("left", ["nothing", "a zombie"])
def test_a_process_that_is_gone_is_said_to_be_gone(proc: Path, left: str) -> None:
    """A process that does not exist and a zombie give the same error."""
    if left == "a zombie":
        (proc / "77").mkdir()
        (proc / "77" / "smaps").write_text("")
    with pytest.raises(ProcessLookupError, match="process 77 does not exist, or is a kernel thread") as caught:
        memory.usage(77, root=proc.parent)
    assert errno.ESRCH == caught.value.errno


@pytest.mark.parametrize(
    ("answer", "expected", "says"),
    [
        (
            PermissionError(errno.EACCES, "no"),
            PermissionError,
            "process 77 belongs to another user; inspect it as its owner or as root",
        ),
        (ProcessLookupError(errno.ESRCH, "no"), ProcessLookupError, "process 77 does not exist"),
    ],
)
def test_what_the_kernel_refuses_has_a_clear_message(
    proc: Path, monkeypatch: pytest.MonkeyPatch, answer: OSError, expected: type[OSError], says: str
) -> None:
    """The kernel's error keeps its type and gets a message that names the process."""

    def refuse(_: Path) -> bytes:
        raise answer

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(expected, match=says):
        memory.usage(77, root=proc.parent)


@pytest.mark.parametrize("pid", [0, -1, True, 1.5, "1"])
def test_an_invalid_process_id_is_rejected(pid: Any) -> None:
    """A process id is a positive whole number."""
    with pytest.raises(InvalidOption, match=r"must be a process id.*os.getpid"):
        memory.usage(pid)


def test_this_process_is_read_for_real() -> None:
    """The real figures satisfy uss <= pss <= rss."""
    found = memory.usage()
    assert found.pss is not None
    assert found.uss is not None
    assert 0 < found.uss <= found.pss <= found.rss
    assert found.headroom is not None
    assert 0 < found.headroom


class GoneError(Exception):
    pass


class DeniedError(Exception):
    pass


class Psutil(ModuleType):
    """The part of psutil that is used on a machine without /proc."""

    NoSuchProcess = GoneError
    AccessDenied = DeniedError

    def __init__(self, process: object) -> None:
        super().__init__("psutil")
        self.asked: list[int | None] = []
        self.process = process

    def Process(self, pid: int | None) -> object:  # noqa: N802 - psutil's name
        self.asked.append(pid)
        if isinstance(self.process, Exception):
            raise self.process
        return self.process

    def virtual_memory(self) -> object:
        return SimpleNamespace(available=5000)


def process(**methods: object) -> SimpleNamespace:
    return SimpleNamespace(
        memory_info=lambda: SimpleNamespace(rss=100), **{name: lambda got=got: got for name, got in methods.items()}
    )


@pytest.mark.parametrize("method", ["memory_full_info", "memory_footprint"])
def test_without_proc_psutil_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Psutil has two names for the figure, and both work; what it does not give is None."""
    psutil = Psutil(process(**{method: SimpleNamespace(uss=60, swap=3)}))
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    expected = MemoryUsage(100, None, 60, None, None, None, None, 3, None, None, 5000)
    assert expected == memory.usage(77, root=tmp_path)
    assert [77] == psutil.asked


@pytest.mark.parametrize(
    ("answer", "pid", "expected"),
    [
        (GoneError(), 77, ProcessLookupError),
        (DeniedError(), 77, PermissionError),
        (GoneError(), None, NotSupported),
        (DeniedError(), None, NotSupported),
    ],
)
def test_psutils_errors_become_the_builtin_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Exception, pid: int | None, expected: type[Exception]
) -> None:
    """The caller does not need psutil to catch them, and this process is never reported as gone."""
    monkeypatch.setitem(sys.modules, "psutil", Psutil(answer))
    with pytest.raises(expected):
        memory.usage(pid, root=tmp_path)


def test_private_memory_is_what_this_process_has_written() -> None:
    """The cheap reading is the full one's dirty private pages: clean pages of files come and go with neighbours."""
    assert memory.usage().private_dirty == pytest.approx(memory.private(fresh=True), abs=10**7)


MB = 1024  # in kB, as the kernel counts

#: What the rollup of Linux 5.4 or later says of a process in MB, and its private memory. What is left out is 0.
ROLLUPS = {
    "on its own": ({"Private_Dirty": 50, "Anonymous": 50, "Pss_Anon": 50}, 50),
    "that read a new file": ({"Private_Dirty": 200, "Anonymous": 50, "Pss_Anon": 50, "Pss_File": 150}, 50),
    "with shared memory of its own": ({"Private_Dirty": 70, "Anonymous": 50, "Pss_Anon": 50, "Pss_Shmem": 20}, 70),
    "that gave pages back lazily": ({"Private_Dirty": 150, "Anonymous": 100, "Pss_Anon": 100, "LazyFree": 50}, 50),
    "that was forked": ({"Private_Dirty": 20, "Anonymous": 100, "Pss_Anon": 60, "Shared_Dirty": 80}, 20),
    "with pages in swap": ({"Private_Dirty": 50, "Anonymous": 50, "Pss_Anon": 50, "Swap": 9, "SwapPss": 8}, 58),
}


def rollup(megabytes: dict[str, int]) -> str:
    return "".join(f"{name}: {size * MB} kB\n" for name, size in megabytes.items())


@pytest.mark.parametrize(("sums", "expected"), ROLLUPS.values(), ids=ROLLUPS)
def test_private_memory_leaves_out_files_that_are_not_on_the_disk_yet(
    proc: Path, sums: dict[str, int], expected: int
) -> None:
    """The kernel calls their pages dirty although nobody here has written to them, and takes them back."""
    (proc / "7").mkdir()
    (proc / "7" / "smaps_rollup").write_text(rollup({"Pss_Shmem": 0, **sums}))
    (proc / "7" / "smaps").write_text("1000-2000 rw-p 00000000 00:00 0 \nAnonymous: 0 kB\n")
    assert expected * MB * KB == _memory.private_of(7, proc.parent)


@pytest.mark.parametrize("sums", [{"Anonymous": 50}, {}], ids=["Linux 4.14 to 5.3", "a sandbox that says less"])
def test_shared_memory_is_private_memory_where_the_rollup_does_not_show_it(proc: Path, sums: dict[str, int]) -> None:
    """50 MB of the heap and 500 MB of a memfd: a missing figure is not 0, and all that is dirty counts."""
    (proc / "7").mkdir()
    (proc / "7" / "smaps_rollup").write_text(rollup({"Private_Dirty": 550, "SwapPss": 8, **sums}))
    assert 558 * MB * KB == _memory.private_of(7, proc.parent)


def test_what_the_rollup_leaves_open_is_read_from_the_mappings(proc: Path) -> None:
    """A forked process with a new file beside pages that it shares: the sums alone allow for 19 to 34 MB."""
    (proc / "7").mkdir()
    sums = {"Private_Dirty": 69, "Anonymous": 50, "Pss_Anon": 34, "Shared_Dirty": 31, "Pss_File": 50, "Pss_Shmem": 0}
    (proc / "7" / "smaps_rollup").write_text(rollup(sums))
    heap = f"1000-2000 rw-p 00000000 00:00 0 \nPrivate_Dirty: {16 * MB} kB\nAnonymous: {50 * MB} kB\n"
    file = f"3000-4000 r--s 00000000 08:02 5 /new\nPrivate_Dirty: {53 * MB} kB\nAnonymous: 0 kB\n"
    (proc / "7" / "smaps").write_text(heap + file)
    assert 16 * MB * KB == _memory.private_of(7, proc.parent)


def test_a_process_that_is_gone_holds_nothing(proc: Path) -> None:
    """Its figures are added up with those of others."""
    assert 0 == _memory.private_of(4711, proc.parent)


@pytest.mark.parametrize(("full", "expected"), [(SimpleNamespace(uss=60), 60), (SimpleNamespace(), None)])
def test_without_proc_private_memory_comes_from_psutil(
    monkeypatch: pytest.MonkeyPatch, full: object, expected: int | None
) -> None:
    """Where psutil does not separate it from shared memory, it is not supported."""
    monkeypatch.setitem(sys.modules, "psutil", Psutil(process(memory_full_info=full)))
    monkeypatch.setattr(Path, "exists", lambda _: False)
    if expected is None:
        with pytest.raises(NotSupported, match="private memory"):
            memory.private(fresh=True)
    else:
        assert expected == memory.private(fresh=True)


class Readings:
    """A memory reader with numbered readings, each of which takes some time on the same clock."""

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.now = 0.0
        self.count = 0

    def read(self) -> int:
        self.now += self.cost
        self.count += 1
        return self.count

    def clock(self) -> float:
        return self.now


def test_a_reading_is_kept_for_a_hundred_times_its_cost() -> None:
    """Readings take at most 1 % of the time, whatever each of them costs."""
    readings = Readings(cost=2.0)
    meter = PrivateMeter(readings.read, readings.clock, readings.clock)
    assert 1 == meter()
    readings.now = 2.0 + 199.9
    assert 1 == meter()
    readings.now = 2.0 + 200.0
    assert 2 == meter()


def test_waiting_for_a_processor_is_no_cost() -> None:
    """On a machine without one to spare, readings are as frequent as on any other."""
    readings = Readings(cost=2.0)
    meter = PrivateMeter(readings.read, readings.clock, cpu=lambda: 0.0)
    assert [1, 2, 3] == [meter() for _ in range(3)]


def test_a_fresh_reading_is_always_possible() -> None:
    """``fresh=True`` always reads, and its reading is kept."""
    readings = Readings(cost=2.0)
    meter = PrivateMeter(readings.read, readings.clock, readings.clock)
    assert [1, 2, 3] == [meter(fresh=True) for _ in range(3)]
    assert 3 == meter()


def test_a_child_takes_its_own_reading() -> None:
    """After ``forget`` nothing of the parent is left: no reading, no time, no held lock."""
    readings = Readings(cost=2.0)
    meter = PrivateMeter(readings.read, readings.clock, readings.clock)
    meter()
    meter.forget()
    assert 2 == meter()


def test_a_reading_that_fails_is_tried_again() -> None:
    """An error reaches the caller, and the next call reads again."""
    answers: list[int | Exception] = [OSError("no"), 7]

    def read() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    meter = PrivateMeter(read, lambda: 0.0, lambda: 0.0)
    with pytest.raises(OSError, match="no"):
        meter()
    assert 7 == meter()


def test_while_one_thread_reads_the_others_get_the_last_reading() -> None:
    """No thread waits for another one's reading."""
    entered, leave = threading.Event(), threading.Event()
    seen: list[int] = []

    def read() -> int:
        seen.append(len(seen) + 1)
        if len(seen) == 2:
            entered.set()
            assert leave.wait(30)
        return seen[-1]

    meter = PrivateMeter(read, lambda: 0.0, lambda: 0.0)
    assert 1 == meter()
    reader = threading.Thread(target=meter)
    reader.start()
    assert entered.wait(30)
    assert 1 == meter()
    leave.set()
    reader.join()
    assert [1, 2] == seen


def test_after_a_failed_reading_others_still_read() -> None:
    """The lock around a reading is released however the reading ends; meanwhile the last one counts."""
    readings = Readings(cost=0.0)
    fail = False

    def read() -> int:
        if fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return readings.read()

    meter = PrivateMeter(read, readings.clock, readings.clock)
    meter()
    fail = True
    assert 1 == meter()
    with pytest.raises(OSError, match="error"):
        meter(fresh=True)
    fail = False
    assert 2 == meter()
