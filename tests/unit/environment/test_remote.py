from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelguard import allocator
from modelguard.allocator import AllocatorFile
from modelguard.errors import InvalidOption, NotSupported

LIBC = "/usr/lib/x86_64-linux-gnu/libc.so.6"
JEMALLOC = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"

MAPS = f"""\
400000-401000 r--p 00000000 08:02 11    /usr/bin/python3.11
7f0000-7f1000 r--p 00000000 08:02 12    {JEMALLOC}
7f1000-7f2000 r-xp 00001000 08:02 12    {JEMALLOC}
7f2000-7f3000 rw-p 00000000 00:00 0
7f3000-7f4000 r-xp 00000000 08:02 13    {LIBC}
7ff000-800000 rw-p 00000000 00:00 0     [stack]
"""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A ``/proc`` with a process 77 that preloads jemalloc."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    folder = tmp_path / "proc" / "77"
    (folder / "task" / "77").mkdir(parents=True)
    (folder / "task" / "77" / "comm").write_text("python\n")
    (folder / "maps").write_text(MAPS)
    (folder / "environ").write_text(f"PATH=/bin\0LD_PRELOAD={JEMALLOC}\0")
    return tmp_path / "proc"


def test_what_is_preloaded_and_loaded_is_reported(proc: Path) -> None:
    """The report has the allocator, and each library once."""
    seen = allocator.observe(77, root=proc.parent)
    assert (77, "jemalloc", JEMALLOC, (JEMALLOC,), ()) == (seen.pid, seen.kind, seen.path, seen.preload, seen.problems)
    assert (AllocatorFile("jemalloc", JEMALLOC), AllocatorFile("glibc", LIBC)) == seen.mapped


def test_without_a_preload_the_c_library_serves(proc: Path) -> None:
    """A jemalloc that is loaded besides is a private copy."""
    (proc / "77" / "environ").write_text("PATH=/bin\0")
    seen = allocator.observe(77, root=proc.parent)
    assert ("glibc", LIBC, ["private copy"]) == (seen.kind, seen.path, [problem.kind for problem in seen.problems])


def test_the_systems_preload_counts_too(proc: Path) -> None:
    """``/etc/ld.so.preload`` as the process sees it, in its own container."""
    (proc / "77" / "environ").write_text("")
    (proc / "77" / "root" / "etc").mkdir(parents=True)
    (proc / "77" / "root" / "etc" / "ld.so.preload").write_text(JEMALLOC)
    seen = allocator.observe(77, root=proc.parent)
    assert ("jemalloc", (JEMALLOC,), ()) == (seen.kind, seen.preload, seen.problems)


def test_a_missing_file_is_searched_where_the_process_would_look(proc: Path) -> None:
    """A process in a container has other files than the process that looks at it."""
    (proc / "77" / "maps").write_text(MAPS.replace(JEMALLOC, "/usr/lib/libm.so.6"))
    seen = allocator.observe(77, root=proc.parent)
    assert ("glibc", ["missing"]) == (seen.kind, [problem.kind for problem in seen.problems])


def test_jemallocs_threads_are_seen_by_their_names(proc: Path) -> None:
    """The kernel shows each thread's name."""
    (proc / "77" / "task" / "78").mkdir()
    (proc / "77" / "task" / "78" / "comm").write_text("jemalloc_bg_thd\n")
    assert ["background threads"] == [problem.kind for problem in allocator.observe(77, root=proc.parent).problems]


def test_a_process_without_a_known_library_is_unknown(proc: Path) -> None:
    """A static program, or one on musl, has no known allocator."""
    (proc / "77" / "maps").write_text("400000-401000 r-xp 00000000 08:02 11 /bin/it\n")
    (proc / "77" / "environ").write_text("")
    seen = allocator.observe(77, root=proc.parent)
    assert ("unknown", "", ()) == (seen.kind, seen.path, seen.mapped)


@pytest.mark.parametrize("left", ["nothing", "a zombie"])
def test_a_process_that_is_gone_is_said_to_be_gone(proc: Path, left: str) -> None:
    """A process that does not exist and a zombie give the same error."""
    if left == "a zombie":
        (proc / "78").mkdir()
        (proc / "78" / "maps").touch()
        (proc / "78" / "environ").touch()
    with pytest.raises(ProcessLookupError, match="process 78 does not exist, or is a kernel thread"):
        allocator.observe(78, root=proc.parent)


def test_a_process_of_someone_else(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to do about it."""

    def refuse(*_: object, **__: object) -> bytes:
        raise PermissionError

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PermissionError, match="process 77 belongs to another user; inspect it as its owner or as root"):
        allocator.observe(77, root=proc.parent)


@pytest.mark.parametrize("pid", [0, -1, True, "1", None])
def test_an_invalid_process_id_is_rejected(pid: Any) -> None:
    """A process id is a positive whole number."""
    with pytest.raises(InvalidOption, match=r"must be a process id.*os.getpid"):
        allocator.observe(pid)


def test_without_proc_nothing_can_be_seen(tmp_path: Path) -> None:
    """Systems other than Linux give NotSupported."""
    with pytest.raises(NotSupported, match="there is no /proc"):
        allocator.observe(77, root=tmp_path)
