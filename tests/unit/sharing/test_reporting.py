"""The report of a process tree, read from a `/proc` made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modelguard.errors import InvalidOption, NotSupported
from modelguard.sharing import _processes
from modelguard.sharing import reporting as module
from modelguard.sharing.reporting import TreeReport, TreeWatch, pythons, report

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
        (root / "proc" / "uptime").write_text("1000.00 1.00\n")

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
    """Each figure comes from the mapping files, in bytes."""
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
    assert 700 == found.age


def test_pythonmalloc_is_heeded(machine: Machine) -> None:
    """A process that was started without Python's own allocator has no arenas."""
    machine.start(12, 10, environ="A=1\0PYTHONMALLOC=malloc\0")
    assert report(12, root=machine.root).processes[0].where.python is None


def test_secrets_do_not_get_into_a_repr(machine: Machine) -> None:
    """A command line may hold secrets, and a report is soon in some log."""
    assert "gunicorn" not in repr(report(10, root=machine.root))


def test_a_tree_is_the_process_and_all_that_it_started(machine: Machine) -> None:
    """Children of children belong to it, strangers do not, and parents come first."""
    machine.start(7, 12)
    assert [10, 11, 12, 7] == [process.pid for process in report(10, root=machine.root).processes]


def test_processes_can_be_named_one_by_one(machine: Machine) -> None:
    """What is no tree, such as servers beside each other, is reported as it is named."""
    assert [99, 12] == [process.pid for process in report([99, 12], root=machine.root).processes]


def test_totals(machine: Machine) -> None:
    """PSS and USS add up to what the tree holds; RSS adds up too, to something else."""
    for pid in (10, 11, 12):
        machine.hold(pid, private=4, pss=99, rss=290)
    tree = report(10, root=machine.root)
    assert (300 * KB, 15 * KB, 900 * KB) == (tree.pss, tree.uss, tree.rss)


def test_copies_are_counted_in_the_largest_process(machine: Machine) -> None:
    """What shares all is about one copy, by what the largest process would hold alone."""
    for pid in (10, 11, 12):
        machine.hold(pid, private=4, pss=99, rss=290 if pid != 11 else 390)
    tree = report(10, root=machine.root)
    assert (11, 400 * KB, 0.75) == (tree.largest.pid, tree.one_copy, tree.copies)


def test_copies_are_counted_in_the_model(machine: Machine) -> None:
    """With the model's size known, the tree is counted in that."""
    for pid in (10, 11, 12):
        machine.hold(pid, private=4, pss=99, rss=290)
    tree = report(10, model_bytes="150 KiB", root=machine.root)
    assert (150 * KB, 2.0) == (tree.one_copy, tree.copies)


def test_a_fork_was_born_with_nothing_of_its_own(machine: Machine) -> None:
    """All that a forked worker holds alone has grown since its birth, and that is known at the first look."""
    machine.hold(11, private=40)
    found = {process.pid: process.since_birth for process in report(10, root=machine.root).processes}
    assert {10: None, 11: 40 * KB, 12: 0} == found


def test_a_fork_is_known_when_only_it_is_asked_for(machine: Machine) -> None:
    """The parent is looked for outside of the tree, too."""
    machine.hold(12, private=40)
    assert 40 * KB == report(12, root=machine.root).processes[0].since_birth


@pytest.mark.parametrize("image", [(1, 0), (0x550000000000, IMAGE[1]), (IMAGE[0], 0x7FFD00000000)])
def test_a_program_that_was_executed_is_no_fork(machine: Machine, image: tuple[int, int]) -> None:
    """A spawned worker lies elsewhere than its parent; where that cannot be seen, nothing is claimed."""
    machine.start(10, image=image)
    machine.start(11, 10, born=200, image=IMAGE if image != (1, 0) else image)
    machine.end(12)
    machine.end(99)
    assert [None, None] == [process.since_birth for process in report(10, root=machine.root).processes]


def test_growth_since_the_first_look(machine: Machine) -> None:
    """The first look is the baseline, each process has its own, and the time is told with it."""
    now = [50.0]
    watch = TreeWatch(10, root=machine.root, clock=lambda: now[0])
    machine.hold(11, private=40)
    assert [None, None, None] == [process.since_seen for process in watch.look().processes]
    machine.hold(11, private=90, swap=10)
    machine.start(13, 10, born=400)
    machine.hold(13, private=30)
    now[0] = 60.0
    found = {process.pid: (process.since_seen, process.watched) for process in watch.look().processes}
    assert {10: (0, 10.0), 11: (60 * KB, 10.0), 12: (0, 10.0), 13: (None, 0.0)} == found


@pytest.mark.parametrize("what", ["another process", "another program"])
def test_the_baseline_belongs_to_one_process(machine: Machine, what: str) -> None:
    """A number that is used again, or a process that executes another program, starts from a baseline of its own."""
    watch = TreeWatch(10, root=machine.root)
    machine.hold(11, private=40)
    watch.look()
    if what == "another process":
        machine.start(11, 10, born=500)
    else:
        machine.start(11, 10, born=200, image=(IMAGE[0] + 4096, IMAGE[1]))
    assert [0, None, 0] == [process.since_seen for process in watch.look().processes]


def test_a_number_that_is_used_again_between_two_looks(machine: Machine) -> None:
    """What has the server's number by now is never shown as the server."""
    watch = TreeWatch(10, root=machine.root)
    watch.look()
    machine.start(10, born=600)
    with pytest.raises(ProcessLookupError, match="process 10 has ended, and another process has its number now"):
        watch.look()


def test_a_number_that_is_used_again_during_a_look(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures that may be another process's are left out."""
    read = module._text

    def reused(root: Path, pid: int, name: str) -> str:
        text = read(root, pid, name)
        if pid == 11:
            machine.start(11, 1, born=700)
        return text

    monkeypatch.setattr(module, "_text", reused)
    assert [10, 12] == [process.pid for process in report(10, root=machine.root).processes]


@pytest.mark.parametrize("how", ["gone", "exited"])
def test_a_worker_that_ends_during_a_look_is_left_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Workers come and go, and that is no reason to report nothing."""
    read = module._text

    def ending(root: Path, pid: int, name: str) -> str:
        if pid == 11 and how == "gone":
            machine.end(11)
        return "" if pid == 11 and how == "exited" else read(root, pid, name)

    monkeypatch.setattr(module, "_text", ending)
    assert [10, 12] == [process.pid for process in report(10, root=machine.root).processes]


def test_a_server_that_ends_during_a_look(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers alone are not passed off as the tree that was asked for."""
    read = module._text
    monkeypatch.setattr(module, "_text", lambda root, pid, name: "" if pid == 10 else read(root, pid, name))
    with pytest.raises(ProcessLookupError, match="process 10 has ended, or become another program, while it was read"):
        report(10, root=machine.root)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Processes whose mappings may not be read."""
    pids: set[int] = set()
    read = module._text

    def refuse(root: Path, pid: int, name: str) -> str:
        if pid in pids:
            raise PermissionError
        return read(root, pid, name)

    monkeypatch.setattr(module, "_text", refuse)
    return pids


def test_another_users_process_is_refused(machine: Machine, locked: set[int]) -> None:
    """The error says whose it is and who may look."""
    locked.add(10)
    with pytest.raises(PermissionError, match="process 10 belongs to someone else; look at it as its own user or as"):
        report(10, root=machine.root)


def test_another_users_child_is_named(machine: Machine, locked: set[int]) -> None:
    """One worker that may not be read does not hide the others, and is not passed over in silence."""
    locked.add(12)
    tree = report(10, root=machine.root)
    assert ([10, 11], (12,)) == ([process.pid for process in tree.processes], tree.unread)


def test_a_process_that_is_not_there(machine: Machine) -> None:
    """The error names the number and what to give instead."""
    with pytest.raises(ProcessLookupError, match="process 404 is gone; give the number of a process that runs"):
        report(404, root=machine.root)


def test_a_process_that_has_exited(machine: Machine) -> None:
    """A zombie holds nothing: it is refused by itself, and left out of a tree."""
    machine.start(11, 10, state="Z")
    with pytest.raises(ProcessLookupError, match="process 11 has exited"):
        report(11, root=machine.root)
    assert [10, 12] == [process.pid for process in report(10, root=machine.root).processes]


def test_a_part_of_the_kernel(machine: Machine) -> None:
    """A kernel thread is told from a process that is gone."""
    machine.start(2, 0, flags=KERNEL)
    with pytest.raises(ProcessLookupError, match="process 2 is a part of the kernel"):
        report(2, root=machine.root)


@pytest.mark.parametrize("tree", [0, -1, True, 1.5, "10", [], [10, "11"]])
def test_what_is_no_process(machine: Machine, tree: object) -> None:
    """Only numbers of processes are looked up."""
    with pytest.raises(InvalidOption, match=r"tree=.*not the number of a process"):
        report(tree, root=machine.root)  # type: ignore[arg-type]


def test_what_is_no_size(machine: Machine) -> None:
    """A size that cannot be read is refused before anything is looked at."""
    with pytest.raises(InvalidOption, match="model_bytes"):
        TreeWatch(10, model_bytes="big", root=machine.root)


def test_without_proc(tmp_path: Path) -> None:
    """Elsewhere than on Linux nothing tells PSS, and the error says so."""
    with pytest.raises(NotSupported, match="there is no /proc"):
        report(root=tmp_path)


def test_circles_of_parents_end(machine: Machine) -> None:
    """Numbers that are used again while the list is read could name each other as parents."""
    machine.start(10, 12)
    assert {10, 11, 12} == {process.pid for process in report(10, root=machine.root).processes}


def test_pythons_are_found(machine: Machine) -> None:
    """Without a number, each tree of Python processes of this user is found by its top."""
    (machine.root / "proc" / "99" / "maps").write_text("7f00-7f01 r-xp 0 08:01 9    /usr/bin/redis-server\n")
    machine.start(50, 99)
    assert [10, 50] == pythons(root=machine.root)
    assert [50] == pythons(root=machine.root, without=(10, 11, 12))
    assert [] == pythons(root=machine.root, user=os.geteuid() + 1)


def test_what_cannot_be_read_is_empty(tmp_path: Path) -> None:
    """A process that hides its command line or its variables is reported without them."""
    assert () == _processes.command(5, tmp_path)
    assert "" == _processes.variable("PYTHONMALLOC", 5, tmp_path)


def test_one_process_is_a_tree(machine: Machine) -> None:
    """A report of a process without children counts itself."""
    machine.hold(99, private=89, pss=89, rss=90)
    tree = report(99, root=machine.root)
    assert isinstance(tree, TreeReport)
    assert (99, 0.9) == (tree.largest.pid, tree.copies)
