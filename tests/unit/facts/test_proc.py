"""What is read from ``/proc``, made of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelguard.facts import _proc
from modelguard.facts._proc import MemoryLayout, Mount, ProcessStat

KB = 1024

SMAPS = """\
7f0000-7f1000 rw-p 00000000 00:00 0
Rss:                 10 kB
7f1000-7f2000 r--p 00000000 08:02 12    /usr/lib/Rss: 9 kB
Rss:                  5 kB
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., None]:
    """Writes a file of process 7 below ``/proc``, or of another folder."""

    def make(name: str, content: str | bytes, folder: str = "proc/7") -> None:
        file = tmp_path / folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def stat_line(pid: int, parent: int, *, state: str = "S", flags: int = 0, started: int = 5, layout: int = 99) -> str:
    numbers = ["0"] * 50
    for field, value in {4: parent, 9: flags, 20: 3, 22: started, 26: layout, 28: layout + 1}.items():
        numbers[field - 4] = str(value)
    return f"{pid} (a (strange) name) {state} {' '.join(numbers)}\n"


def test_stat_has_the_fields_of_the_manual(write: Any, tmp_path: Path) -> None:
    """The name of a program may have blanks and parentheses without shifting the fields."""
    write("stat", stat_line(7, 1))
    expected = ProcessStat(7, 1, 5, 3, MemoryLayout(99, 100), alive=True, kernel=False)
    assert expected == _proc.stat(7, tmp_path)
    assert None is _proc.stat(8, tmp_path)


def test_the_list_of_processes_has_those_that_run(write: Any, tmp_path: Path) -> None:
    """Zombies, kernel threads and other entries of /proc are left out."""
    for pid, options in {1: {}, 2: {"flags": 0x00200000}, 3: {"state": "Z"}, 4: {}}.items():
        write("stat", stat_line(pid, 0, **options), f"proc/{pid}")  # type: ignore[arg-type]
    assert [1, 4] == list(_proc.processes(tmp_path))


def test_descendants_come_after_their_parents() -> None:
    """A tree is walked to its leaves, and process ids that form a circle do not make it endless."""
    known = {
        pid: ProcessStat(pid, parent, pid, 1, MemoryLayout(0, 0), alive=True, kernel=False)
        for pid, parent in {1: 3, 2: 1, 3: 2, 9: 8}.items()
    }
    assert [1, 2, 3] == [process.pid for process in _proc.descendants(1, known)]
    assert [] == list(_proc.descendants(5, known))


def test_a_fork_has_the_layout_of_its_parent() -> None:
    """A process with the same layout that started earlier makes it a fork; an unknown layout proves nothing."""

    def process(pid: int, layout: int, started: int) -> ProcessStat:
        return ProcessStat(pid, 1, started, 1, MemoryLayout(layout, layout), alive=True, kernel=False)

    parent = process(1, 500, started=1)
    assert _proc.is_fork(process(2, 500, started=2), [parent])
    assert not _proc.is_fork(process(2, 600, started=2), [parent])
    assert not _proc.is_fork(parent, [process(2, 500, started=2)])
    assert not _proc.is_fork(process(2, 0, started=2), [process(1, 0, started=1)])


def test_memory_sums_prefer_the_rollup(write: Any, tmp_path: Path) -> None:
    """Without a rollup the mappings are added up; without either there are no figures."""
    assert {} == _proc.memory_sums(7, tmp_path)
    write("smaps", SMAPS)
    assert 15 * KB == _proc.memory_sums(7, tmp_path)["Rss"]
    write("smaps_rollup", "00-ff ---p 00000000 00:00 0   [rollup]\nRss: 20 kB\n")
    assert {"Rss": 20 * KB} == _proc.memory_sums(7, tmp_path)


def test_a_process_that_has_exited_has_no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel lets the files of a zombie be opened, and refuses to read them."""

    def read(_: Path) -> bytes:
        raise ProcessLookupError

    monkeypatch.setattr(Path, "read_bytes", read)
    assert {} == _proc.memory_sums(7, tmp_path)


def test_meminfo_in_bytes(write: Any, tmp_path: Path) -> None:
    """Counts of huge pages are not sizes."""
    write("meminfo", "MemTotal:  8 kB\nHugePages_Total: 3\n", "proc")
    assert {"MemTotal": 8 * KB} == _proc.meminfo(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"gunicorn\0-w\x004\0", ("gunicorn", "-w", "4")),
        (b"gunicorn: master [app]\0\0\0", ("gunicorn: master [app]",)),
        (b"", ()),
    ],
)
def test_a_command_line(write: Any, tmp_path: Path, content: bytes, expected: tuple[str, ...]) -> None:
    """A title that a program has written over its command line is one word; a zombie has none."""
    write("cmdline", content)
    assert expected == _proc.command_line(7, tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"A=1\0B=x=y\0C=\0", {"A": "1", "B": "x=y", "C": ""}),
        (b"D=\xff\0", {"D": os.fsdecode(b"\xff")}),
        (b"E=1\r\n2\r\0", {"E": "1\r\n2\r"}),
        (b"orker [app]\0\0\0PATH=/bin\0", {}),
        (b"", {}),
    ],
)
def test_an_environment(write: Any, tmp_path: Path, content: bytes, expected: dict[str, str]) -> None:
    """Variables are read in any encoding; memory that a title was written over holds none."""
    write("environ", content)
    assert expected == _proc.environment(7, tmp_path)


def test_names_of_threads(write: Any, tmp_path: Path) -> None:
    """Each thread has its name; one that has just ended is left out."""
    write("comm", "python\n", "proc/7/task/7")
    write("comm", "jemalloc_bg_thd\n", "proc/7/task/8")
    (tmp_path / "proc/7/task/9").mkdir()
    assert {7: "python", 8: "jemalloc_bg_thd"} == _proc.thread_names(7, tmp_path)


def test_links_of_a_process(tmp_path: Path) -> None:
    """Its program is known, also if it was replaced on disk."""
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/exe").symlink_to("/usr/bin/python3.12 (deleted)")
    assert "/usr/bin/python3.12" == _proc.executable(7, tmp_path)


def test_cgroups_and_mounts(write: Any, tmp_path: Path) -> None:
    """Paths may have colons, mount points escaped blanks, and a mount's source may be empty."""
    write("cgroup", "4:cpu,cpuacct:/a:b\n0::/c\n")
    write("mountinfo", "25 24 0:23 /x /mnt/odd\\040name rw - cgroup  rw,memory\n", "proc/self")
    assert [("4", ("cpu", "cpuacct"), "/a:b"), ("0", ("",), "/c")] == _proc.cgroups(7, tmp_path)
    assert [Mount("/x", "/mnt/odd name", "cgroup", ("rw", "memory"))] == _proc.mounts(tmp_path)


@pytest.mark.parametrize("odd", ["\r", "\x0b", "\x85", "\u2028"])
def test_names_may_contain_line_breaks_that_the_kernel_does_not_escape(write: Any, tmp_path: Path, odd: str) -> None:
    """One odd mount point or program neither hides what follows it nor makes the memory limit unreadable."""
    write(
        "mountinfo", f"25 24 0:23 / /mnt/{odd} rw - cgroup2 none rw\n26 24 0:24 / /b rw - proc none rw\n", "proc/self"
    )
    write("status", f"Name:\ta{odd}CapEff: 1\nThreads:\t4\n")
    write("smaps", f"7f0000-7f1000 r--p 00000000 08:02 12    /a{odd}Rss: 9 kB\nRss: 5 kB\n")
    assert [f"/mnt/{odd}", "/b"] == [mount.point for mount in _proc.mounts(tmp_path)]
    assert {"Name": f"a{odd}CapEff: 1", "Threads": "4"} == _proc.status(7, tmp_path)
    assert ({"Rss": 5 * KB}, [f"/a{odd}Rss: 9 kB"]) == (
        _proc.memory_sums(7, tmp_path),
        [mapping.name for mapping in _proc.smaps(7, tmp_path)],
    )


@pytest.mark.parametrize("read", [_proc.maps, _proc.environment, _proc.status, _proc.thread_names, _proc.executable])
def test_what_cannot_be_read_raises_or_is_none(tmp_path: Path, read: Callable[..., object]) -> None:
    """A reader raises what the kernel raises, and `if_readable` turns that into None."""
    with pytest.raises(FileNotFoundError):
        read(7, tmp_path)
    assert None is _proc.if_readable(read, 7, tmp_path)


def test_this_process_for_real() -> None:
    """The real /proc has the parent, the threads and the memory of this process."""
    own = _proc.stat(os.getpid())
    assert own is not None
    assert (os.getppid(), True, False) == (own.parent, own.alive, own.kernel)
    assert os.getpid() in _proc.processes()
    assert os.getpid() in _proc.thread_names()
    assert 0 < _proc.memory_sums()["Rss"]
    assert os.geteuid() == _proc.owner(os.getpid())


def test_what_cannot_be_seen_is_not_said_to_be_gone(tmp_path: Path) -> None:
    """Without /proc no process is seen, so whoever asks for one is told that, and not that it does not exist."""
    assert "cannot be seen, as there is no /proc" == _proc.absence(1, tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    assert "does not exist" == _proc.absence(1, tmp_path)
