"""The report of a process tree, read from a `/proc` made of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from modelguard.errors import InvalidOption, NotSupported
from modelguard.facts import _proc
from modelguard.facts._proc import MemoryMapping
from modelguard.sharing._memory_report import TreeReport, TreeWatch, python_trees, report

KB = 1024
TICKS = os.sysconf("SC_CLK_TCK")
IMAGE = (0x560000001000, 0x7FFC00001000)
KERNEL = 0x00200000

SMAPS = """\
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
Rss: {rss} kB
Pss: {pss} kB
Private_Clean: 0 kB
Private_Dirty: {private} kB
SwapPss: {swap} kB
VmFlags: rd wr mr mw me ac
7f0000200000-7f0000300000 r-xp 00000000 08:01 9     /usr/bin/python3.12
Rss: 10 kB
Pss: 1 kB
Private_Clean: 1 kB
Private_Dirty: 0 kB
VmFlags: rd ex mr mw me
"""


class Machine:
    """A `/proc` to write processes into."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc" / "self").mkdir(parents=True)
        (root / "proc" / "self" / "smaps").touch()

    def start(
        self,
        pid: int,
        parent: int = 1,
        *,
        born: float = 100,
        image: tuple[int, int] = IMAGE,
        state: str = "S",
        flags: int = 0,
        threads: int = 1,
        environ: str = "",
    ) -> None:
        folder = self.root / "proc" / str(pid)
        folder.mkdir(exist_ok=True)
        numbers = ["0"] * 50
        for field, value in {
            4: parent,
            9: flags,
            20: threads,
            22: round(born * TICKS),
            26: image[0],
            28: image[1],
        }.items():
            numbers[field - 4] = str(value)
        (folder / "stat").write_text(f"{pid} (a) name) {state} {' '.join(numbers)}\n")
        (folder / "cmdline").write_bytes(b"gunicorn\0-w\x008\0")
        (folder / "environ").write_text(environ)
        (folder / "maps").write_text("7f00-7f01 r-xp 0 08:01 9    /usr/bin/python3.12\n")
        self.hold(pid, private=0)

    def hold(self, pid: int, *, private: int, pss: int = 0, rss: int = 0, swap: int = 0) -> None:
        text = SMAPS.format(private=private, pss=pss, rss=rss, swap=swap)
        (self.root / "proc" / str(pid) / "smaps").write_text(text)

    def end(self, pid: int) -> None:
        for file in (self.root / "proc" / str(pid)).iterdir():
            file.unlink()
        (self.root / "proc" / str(pid)).rmdir()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with a server of two workers and a stranger."""
    machine = Machine(tmp_path)
    machine.start(10)
    machine.start(11, 10, born=200)
    machine.start(12, 10, born=300, threads=3)
    machine.start(99)
    return machine


def test_a_process_is_read_whole(machine: Machine) -> None:
    """Each figure comes from smaps, in bytes."""
    machine.hold(12, private=50, pss=70, rss=400, swap=6)
    found = report(12, root=machine.root).processes[0]
    assert (12, 10, 3, ("gunicorn", "-w", "8")) == (found.pid, found.parent, found.threads, found.command)
    assert (71 * KB, 51 * KB, 56 * KB, 6 * KB, 410 * KB) == (
        found.pss,
        found.uss,
        found.private,
        found.swap,
        found.rss,
    )
    assert (50 * KB, 1 * KB) == (found.where.python, found.where.files)


def test_pythonmalloc_is_respected(machine: Machine) -> None:
    """A process that was started without Python's own allocator has no arenas."""
    machine.start(12, 10, environ="A=1\0PYTHONMALLOC=malloc\0")
    assert report(12, root=machine.root).processes[0].where.python is None


def test_secrets_do_not_get_into_a_repr(machine: Machine) -> None:
    """A command line may hold secrets, and reports are logged."""
    assert "gunicorn" not in repr(report(10, root=machine.root))


def test_a_tree_is_the_process_and_everything_that_it_started(machine: Machine) -> None:
    """Children of children belong to it, strangers do not, and parents come first."""
    machine.start(7, 12)
    assert [10, 11, 12, 7] == [process.pid for process in report(10, root=machine.root).processes]


def test_processes_can_be_named_one_by_one(machine: Machine) -> None:
    """Processes that do not form a tree, such as several servers, are reported as they are listed."""
    assert [99, 12] == [process.pid for process in report([99, 12], root=machine.root).processes]


def test_a_process_that_is_named_twice_counts_once(machine: Machine) -> None:
    """The totals of a list with a repeated process are those of the processes."""
    once = report([12], root=machine.root)
    assert once.pss == report([12, 12], root=machine.root).pss


def test_totals(machine: Machine) -> None:
    """The totals of PSS, USS and RSS are the sums over the processes."""
    for pid in (10, 11, 12):
        machine.hold(pid, private=4, pss=99, rss=290)
    tree = report(10, root=machine.root)
    assert (300 * KB, 15 * KB, 900 * KB) == (tree.pss, tree.uss, tree.rss)


def test_copies_are_counted_in_the_largest_process(machine: Machine) -> None:
    """A tree that shares everything is about one copy of its largest process."""
    for pid in (10, 11, 12):
        machine.hold(pid, private=4, pss=99, rss=290 if pid != 11 else 390)
    tree = report(10, root=machine.root)
    assert (11, 400 * KB, 0.75) == (tree.largest.pid, tree.one_copy, tree.copies)


def test_copies_are_counted_in_the_model(machine: Machine) -> None:
    """If the model's size is known, it is the unit."""
    for pid in (10, 11, 12):
        machine.hold(pid, private=4, pss=99, rss=290)
    tree = report(10, model_bytes="150 KiB", root=machine.root)
    assert (150 * KB, 2.0) == (tree.one_copy, tree.copies)


def test_a_fork_starts_with_no_private_memory(machine: Machine) -> None:
    """Everything that a forked worker holds alone has grown since its start, known at the first look."""
    machine.hold(11, private=40)
    found = {process.pid: process.since_birth for process in report(10, root=machine.root).processes}
    assert {10: None, 11: 40 * KB, 12: 0} == found


def test_a_fork_is_recognised_without_its_parent(machine: Machine) -> None:
    """The parent is also searched outside of the tree."""
    machine.hold(12, private=40)
    assert 40 * KB == report(12, root=machine.root).processes[0].since_birth


@pytest.mark.parametrize("image", [(1, 0), (0x550000000000, IMAGE[1]), (IMAGE[0], 0x7FFD00000000)])
def test_a_program_that_was_executed_is_not_a_fork(machine: Machine, image: tuple[int, int]) -> None:
    """A spawned worker has another memory layout; where that cannot be seen, nothing is claimed."""
    machine.start(10, image=image)
    machine.start(11, 10, born=200, image=IMAGE if image != (1, 0) else image)
    machine.end(12)
    machine.end(99)
    assert [None, None] == [process.since_birth for process in report(10, root=machine.root).processes]


def test_growth_since_the_first_look(machine: Machine) -> None:
    """The first look at each process is its baseline."""
    watch = TreeWatch(10, root=machine.root)
    machine.hold(11, private=40)
    assert [None, None, None] == [process.since_seen for process in watch.look().processes]
    machine.hold(11, private=90, swap=10)
    machine.start(13, 10, born=400)
    machine.hold(13, private=30)
    found = {process.pid: process.since_seen for process in watch.look().processes}
    assert {10: 0, 11: 60 * KB, 12: 0, 13: None} == found


@pytest.mark.parametrize("what", ["another process", "another program"])
def test_the_baseline_belongs_to_one_process(machine: Machine, what: str) -> None:
    """A process id that is used again, or another program in the process, gets a new baseline."""
    watch = TreeWatch(10, root=machine.root)
    machine.hold(11, private=40)
    watch.look()
    if what == "another process":
        machine.start(11, 10, born=500)
    else:
        machine.start(11, 10, born=200, image=(IMAGE[0] + 4096, IMAGE[1]))
    assert [0, None, 0] == [process.since_seen for process in watch.look().processes]


def test_a_process_id_that_is_used_again_between_two_looks(machine: Machine) -> None:
    """Another process with the server's id is never shown as the server."""
    watch = TreeWatch(10, root=machine.root)
    watch.look()
    machine.start(10, born=600)
    with pytest.raises(ProcessLookupError, match="process 10 has exited, and another process now has its id"):
        watch.look()


def test_a_process_id_that_is_used_again_during_a_look(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures that may be another process's are left out."""
    read = _proc.smaps

    def reused(pid: int, root: Path) -> list[MemoryMapping]:
        mappings = read(pid, root)
        if pid == 11:
            machine.start(11, 1, born=700)
        return mappings

    monkeypatch.setattr(_proc, "smaps", reused)
    assert [10, 12] == [process.pid for process in report(10, root=machine.root).processes]


@pytest.mark.parametrize("how", ["gone", "exited"])
def test_a_worker_that_ends_during_a_look_is_left_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Workers come and go; the others are reported."""
    read = _proc.smaps

    def ending(pid: int, root: Path) -> list[MemoryMapping]:
        if pid == 11 and how == "gone":
            machine.end(11)
        return [] if pid == 11 and how == "exited" else read(pid, root)

    monkeypatch.setattr(_proc, "smaps", ending)
    assert [10, 12] == [process.pid for process in report(10, root=machine.root).processes]


def test_a_server_that_ends_during_a_look(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers alone are never reported as the tree that was asked for."""
    read = _proc.smaps
    monkeypatch.setattr(_proc, "smaps", lambda pid, root: [] if pid == 10 else read(pid, root))
    with pytest.raises(
        ProcessLookupError, match="process 10 has exited, or executed another program, while it was being read"
    ):
        report(10, root=machine.root)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Processes whose mappings may not be read."""
    pids: set[int] = set()
    read = _proc.smaps

    def refuse(pid: int, root: Path) -> list[MemoryMapping]:
        if pid in pids:
            raise PermissionError
        return read(pid, root)

    monkeypatch.setattr(_proc, "smaps", refuse)
    return pids


def test_another_users_process_is_refused(machine: Machine, locked: set[int]) -> None:
    """The error names the process's user, and who may read it."""
    locked.add(10)
    with pytest.raises(PermissionError, match="process 10 belongs to another user; inspect it as its owner or as root"):
        report(10, root=machine.root)


def test_another_users_child_is_named(machine: Machine, locked: set[int]) -> None:
    """A worker that may not be read does not hide the others, and is listed."""
    locked.add(12)
    tree = report(10, root=machine.root)
    assert ([10, 11], (12,)) == ([process.pid for process in tree.processes], tree.unread)


def test_a_process_that_is_not_there(machine: Machine) -> None:
    """The error names the process id and what to give instead."""
    with pytest.raises(ProcessLookupError, match="process 404 does not exist; give the id of a running process"):
        report(404, root=machine.root)


def test_a_process_that_has_exited(machine: Machine) -> None:
    """A zombie holds nothing: alone it is an error, in a tree it is left out."""
    machine.start(11, 10, state="Z")
    with pytest.raises(ProcessLookupError, match="process 11 has ended"):
        report(11, root=machine.root)
    assert [10, 12] == [process.pid for process in report(10, root=machine.root).processes]


def test_a_kernel_thread(machine: Machine) -> None:
    """The error distinguishes it from a process that is gone."""
    machine.start(2, 0, flags=KERNEL)
    with pytest.raises(ProcessLookupError, match="process 2 is a kernel thread"):
        report(2, root=machine.root)


@pytest.mark.parametrize("tree", [0, -1, True, 1.5, "10", [], [10, "11"]])
def test_an_invalid_process_id(machine: Machine, tree: object) -> None:
    """Only whole numbers of at least 1 are accepted."""
    with pytest.raises(InvalidOption, match=r"tree=.*(must be a process id|must not be empty)"):
        report(tree, root=machine.root)  # type: ignore[arg-type]


def test_an_invalid_size(machine: Machine) -> None:
    """A size that cannot be parsed is rejected before any process is read."""
    with pytest.raises(InvalidOption, match="model_bytes"):
        TreeWatch(10, model_bytes="big", root=machine.root)


@pytest.mark.parametrize("look", [report, python_trees])
def test_without_proc(look: Callable[..., object], tmp_path: Path) -> None:
    """Systems other than Linux do not show PSS, and the error says so; no process is said not to be there."""
    with pytest.raises(NotSupported, match="there is no /proc"):
        look(root=tmp_path)


def test_circles_of_parents_end(machine: Machine) -> None:
    """Process ids that are used again during the listing could name each other as parents."""
    machine.start(10, 12)
    assert {10, 11, 12} == {process.pid for process in report(10, root=machine.root).processes}


def test_pythons_are_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tree of Python processes of this user is found by its top."""
    (machine.root / "proc" / "99" / "maps").write_text("7f00-7f01 r-xp 0 08:01 9    /usr/bin/redis-server\n")
    machine.start(50, 99)
    assert [10, 50] == python_trees(root=machine.root)
    assert [50] == python_trees(root=machine.root, without=(10, 11, 12))
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert [] == python_trees(root=machine.root)


def test_what_cannot_be_read_is_left_out(machine: Machine) -> None:
    """A process that hides its command line is reported without it."""
    (machine.root / "proc" / "99" / "cmdline").unlink()
    assert () == report(99, root=machine.root).processes[0].command


def test_one_process_is_a_tree(machine: Machine) -> None:
    """A report of a process without children counts itself."""
    machine.hold(99, private=89, pss=89, rss=90)
    tree = report(99, root=machine.root)
    assert isinstance(tree, TreeReport)
    assert (99, 0.9) == (tree.largest.pid, tree.copies)
