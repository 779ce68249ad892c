"""Where private memory is, according to the mappings of a process."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from modelguard.facts import _proc
from modelguard.facts._proc import MemoryMapping
from modelguard.sharing import _memory_report
from modelguard.sharing._memory_report import Places

KB = 1024
MIB = 1 << 20

BASE = 0x7F0000000000
PYTHON = "/usr/bin/python3.12"


def mapping(start: int, size: int, name: str = "", *, access: str = "rw-p", flags: str = "rd wr mr mw me ac") -> str:
    """Write one mapping as smaps shows it, with 5 kB that are private."""
    inode = "17" if name.startswith("/") else "0"
    return (
        f"{BASE + start:x}-{BASE + start + size:x} {access} 00000000 00:00 {inode}      {name}\n"
        f"Size: {size // KB} kB\nRss: 9 kB\nPss: 7 kB\nPss_Dirty: 7 kB\nShared_Clean: 2 kB\nShared_Dirty: 2 kB\n"
        f"Private_Clean: 1 kB\nPrivate_Dirty: 4 kB\nSwapPss: 0 kB\nTHPeligible: 0\nVmFlags: {flags}\n"
    )


def read(*lines: str) -> list[MemoryMapping]:
    """Read mappings as ``/proc`` shows them."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "proc", "7", "smaps")
        file.parent.mkdir(parents=True)
        file.write_text("".join(lines))
        return _proc.smaps(7, Path(folder))


def placed(*lines: str, arenas: bool = True) -> Places:
    return _memory_report.places(read(*lines), arenas=arenas)


def only(name: str) -> Places:
    return Places(**({"python": 0, "heap": 0, "mixed": 0, "stacks": 0, "files": 0} | {name: 5 * KB}))


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("python", mapping(0, MIB)),
        ("python", mapping(0x3000, 13 * MIB)),
        ("python", mapping(0, 3 * KB, "[anon:cpython:pymalloc]")),
        ("mixed", mapping(0, 13 * MIB + 4 * KB)),
        ("mixed", mapping(0, 256 * KB)),
        ("heap", mapping(0, 9 * MIB, "[heap]")),
        ("heap", mapping(0, MIB, flags="rd wr mr mw me nr")),
        ("heap", mapping(0, MIB, "[anon: glibc: malloc arena]")),
        ("heap", mapping(0, MIB, "[anon:jemalloc_pg]")),
        ("stacks", mapping(0, 132 * KB, "[stack]")),
        ("stacks", mapping(0, 8 * MIB, flags="rd wr mr mw me ac nh")),
        ("stacks", mapping(0, 8 * MIB, "[anon: glibc: pthread stack: 77]")),
        ("files", mapping(0, 8 * MIB, "/usr/lib/libtorch.so")),
        ("files", mapping(0, 8 * MIB, "/dev/shm/weights (deleted)", access="rw-s")),
    ],
)
def test_each_kind_of_memory_has_its_place(place: str, line: str) -> None:
    """Arenas, heaps, stacks and files are distinguished, and everything else is mixed."""
    assert only(place) == placed(line)


def test_a_stack_is_known_by_the_guard_below_it() -> None:
    """Kernels before 6.7 do not mark stacks, and a stack of 8 MiB must not count as eight arenas."""
    guard = mapping(0, 4 * KB, access="---p").replace("Private_Clean: 1 kB\nPrivate_Dirty: 4 kB\n", "")
    assert only("stacks") == placed(guard, mapping(4 * KB, 8 * MIB))
    assert only("python") == placed(guard, mapping(64 * KB, 8 * MIB))


def test_without_arenas_nothing_counts_as_one() -> None:
    """Under PYTHONMALLOC=malloc a block of a whole MiB is mixed, and Python's part is unknown."""
    assert Places(python=None, heap=0, mixed=5 * KB, stacks=0, files=0) == placed(mapping(0, MIB), arenas=False)


def test_the_places_add_up_to_private_memory() -> None:
    """No private page is counted twice or left out."""
    lines = (mapping(0, MIB), mapping(MIB, 4 * KB, PYTHON), mapping(2 * MIB, 8 * KB), mapping(3 * MIB, KB, "[heap]"))
    found = read(*lines)
    where = _memory_report.places(found, arenas=True)
    uss = _memory_report.total(found, "Private_Clean", "Private_Dirty")
    assert uss == (where.python or 0) + where.heap + where.mixed + where.stacks + where.files


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (PYTHON, True),
        ("/usr/bin/python3.12 (deleted)", True),
        ("/opt/venv/bin/python", False),  # a link: the kernel names the file behind it
        ("/usr/lib/x86_64-linux-gnu/libpython3.13.so.1.0", True),
        ("/usr/lib/python3.12/lib-dynload/_ssl.cpython-312-x86_64-linux-gnu.so", True),
        ("/usr/lib/python3.12/site-packages/torch/libtorch.so", False),
        ("/usr/bin/redis-server", False),
    ],
)
def test_a_python_is_recognised_by_its_files(file: str, expected: bool) -> None:  # noqa: FBT001
    """A program that loads Python, such as uWSGI, counts; one in a Python's folder does not."""
    assert expected == (_proc.interpreter_in(read(mapping(0, MIB, file))) is not None)


@pytest.mark.parametrize(
    ("file", "pythonmalloc", "expected"),
    [
        (PYTHON, "", True),
        (PYTHON, "pymalloc_debug", True),
        (PYTHON, "malloc", False),
        (PYTHON, "mimalloc", False),
        ("/usr/bin/python3.13t", "", False),
        ("/usr/bin/python3.13t (deleted)", "", False),
        ("/usr/lib/libpython3.14t.so.1.0", "", False),
        ("/usr/bin/redis-server", "", False),
    ],
)
def test_arenas_are_expected_where_python_has_them(file: str, pythonmalloc: str, expected: bool) -> None:  # noqa: FBT001
    """Python's own allocator can be switched off, and a free-threaded Python does not have it."""
    assert expected == _memory_report.has_arenas(read(mapping(0, MIB, file)), pythonmalloc)
