from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from modelguard import allocator
from modelguard.allocator import AllocatorInfo, AllocatorInForce, Figures, Problem
from modelguard.environment._allocator import Thresholds
from modelguard.errors import NotSupported


class Library:
    """The file that serves malloc, with the functions that it exports."""

    path = "/lib/it.so"
    base = 0x7F0000

    def __init__(self, *names: str, answer: int = 0) -> None:
        self.names = names
        self.answer = answer
        self.calls: list[tuple[object, ...]] = []

    def exports(self, name: str) -> bool:
        return name in self.names

    def call(self, name: str, *arguments: Any, returns: Any = None) -> Any:
        assert name in self.names
        self.calls.append((name, *arguments))
        return self.answer


KNOWN = [
    ("glibc", ["gnu_get_libc_version", "malloc_trim"], ("malloc_trim", 0)),
    ("jemalloc", ["mallctl"], ("mallctl", b"arena.4096.purge", None, None, None, 0)),
    ("jemalloc", ["je_mallctl"], ("je_mallctl", b"arena.4096.purge", None, None, None, 0)),
    ("jemalloc", ["_rjem_mallctl"], ("_rjem_mallctl", b"arena.4096.purge", None, None, None, 0)),
    ("mimalloc", ["mi_collect"], ("mi_collect", True)),
    ("tcmalloc", ["MallocExtension_ReleaseFreeMemory"], ("MallocExtension_ReleaseFreeMemory",)),
]


@pytest.mark.parametrize(("kind", "names", "call"), KNOWN)
def test_an_allocator_is_known_by_what_it_exports(kind: str, names: list[str], call: tuple[object, ...]) -> None:
    """The functions decide, whatever the file is called, and the right one of them is called, once."""
    library = Library(*names)
    assert (kind, "/lib/it.so") == (allocator.in_force(library).kind, allocator.in_force(library).path)
    allocator.trim(library, private=lambda: 0)
    assert [call] == library.calls


@pytest.mark.parametrize("names", [[], ["malloc_trim"], ["gnu_get_libc_version"]])
def test_an_unknown_allocator_is_left_alone(names: list[str]) -> None:
    """Nothing is called on a guess, and the caller gets an error."""
    library = Library(*names)
    assert AllocatorInForce("unknown", "/lib/it.so") == allocator.in_force(library)
    with pytest.raises(NotSupported, match=r"unknown allocator \(/lib/it\.so\)"):
        allocator.trim(library)
    assert [] == library.calls


@pytest.mark.parametrize(("before", "after", "expected"), [(500, 120, 380), (100, 130, 0)])
def test_what_was_given_back_is_measured(before: int, after: int, expected: int) -> None:
    """The result is private memory before less after, and never negative."""
    readings = [before, after]
    library = Library("mallctl")
    assert expected == allocator.trim(library, private=lambda: readings.pop(0))


def test_a_refusal_is_an_error() -> None:
    """A jemalloc older than 5.0 does not know the call, which gives an error."""
    with pytest.raises(NotSupported, match=r"jemalloc .* refused to purge its arenas: error 2"):
        allocator.trim(Library("mallctl", answer=2), private=lambda: 0)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_platforms_are_not_supported(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """On systems other than Linux each call gives an error with the reason."""
    monkeypatch.setattr(sys, "platform", platform)
    for ask in (allocator.in_force, allocator.trim, allocator.detect, allocator.stats):
        with pytest.raises(NotSupported, match=f"this is {platform}"):
            ask()


PRELOADED = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4.5.10"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A ``/proc`` with this process in it, and the file that serves malloc at the library's address."""
    folder = tmp_path / "proc" / "self"
    folder.mkdir(parents=True)
    (folder / "maps").write_text(f"7f0000-7f1000 r-xp 00000000 08:02 17   {PRELOADED}\n")
    (folder / "environ").write_text("HOME=/root\0")
    (folder / "exe").symlink_to("/usr/bin/python3.11")
    return tmp_path


def test_the_file_is_named_as_it_is_mapped(root: Path) -> None:
    """The dynamic linker may know it by a link or a bare command; the mapping has the file."""
    info = allocator.detect(Library(), root=root, environ={})
    assert ("unknown", PRELOADED, "linked", None, None) == (info.kind, info.path, info.how, info.version, info.figures)


def test_without_proc_the_linkers_name_is_used(tmp_path: Path) -> None:
    """A sandbox may hide /proc; then the report has what is left."""
    info = allocator.detect(Library("mi_collect"), root=tmp_path, environ={})
    assert ("mimalloc", "/lib/it.so", "linked", ()) == (info.kind, info.path, info.how, info.problems)


@pytest.mark.parametrize("variable", ["start", "now", "system"])
def test_a_preload_is_recognised_in_all_three_places(root: Path, variable: str) -> None:
    """It may come from the variable at the start, from the variable now, or from the system's file."""
    environ = {}
    if variable == "start":
        (root / "proc" / "self" / "environ").write_text("LD_PRELOAD=libtcmalloc_minimal.so.4\0")
    elif variable == "now":  # a title may have been written over the variables of the start
        environ["LD_PRELOAD"] = "libtcmalloc_minimal.so.4"
    else:
        (root / "etc").mkdir()
        (root / "etc" / "ld.so.preload").write_text("# the whole machine\nlibtcmalloc_minimal.so.4\n")
    assert "preloaded" == allocator.detect(Library(), root=root, environ=environ).how


def test_an_allocator_in_the_program_itself_is_static(root: Path) -> None:
    """The program's own file serves malloc, even if it was replaced on disk meanwhile."""
    executable = root / "proc" / "self" / "exe"
    executable.unlink()
    executable.symlink_to(f"{PRELOADED} (deleted)")
    assert "static" == allocator.detect(Library(), root=root, environ={}).how


def test_an_allocator_that_reports_nothing_has_no_figures() -> None:
    """That is an error that names the file, and not a row of zeros."""
    with pytest.raises(NotSupported, match=r"unknown \(/lib/it\.so\) serves malloc and reports no figures"):
        allocator.stats(Library())


def test_the_report_as_text() -> None:
    """It has one line for each fact, and one for each problem with its fix."""
    problem = Problem("missing", "LD_PRELOAD names /x.so, but that file does not exist", "Correct the path.")
    figures = Figures(allocated=3_000_000, active=None, resident=5_000_000, retained=2_000_000)
    info = AllocatorInfo("glibc", "/lib/libc.so.6", "linked", "2.36", "pymalloc", figures, (problem,))
    expected = """\
malloc: glibc 2.36, linked (/lib/libc.so.6)
Python's small objects: pymalloc
figures: allocated 3 MB, resident 5 MB, retained 2 MB
missing: LD_PRELOAD names /x.so, but that file does not exist. Correct the path."""
    assert expected == str(info)


GLIBC = ("gnu_get_libc_version", "malloc_trim", "mallopt")
#: Trim threshold and mmap threshold, as mallopt(3) numbers them.
LOW, USUAL = [(-1, 2**17), (-3, 2**17)], [(-1, 2**24), (-3, 2**25)]


class TestThresholds:
    """Of a model that was loaded with low thresholds, glibc keeps nothing once it is freed."""

    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The variables of the process are those that a test names."""
        self.environ: dict[str, str] = {}
        monkeypatch.setattr(os, "environ", self.environ)

    def made(self, *names: str, **environ: str) -> tuple[Thresholds, Library]:
        library = Library(*(names or GLIBC))
        self.environ |= environ
        return Thresholds(lambda: library), library

    def changes(self, library: Library) -> list[tuple[object, ...]]:
        assert {"mallopt"}.issuperset(name for name, *_ in library.calls)
        return [tuple(arguments) for _, *arguments in library.calls]

    def test_are_low_while_a_block_runs(self) -> None:
        """Calls between loads pay nothing: the thresholds are high again, after an error too."""
        thresholds, library = self.made()
        with suppress(ValueError), thresholds.low():
            assert LOW == self.changes(library)
            raise ValueError
        assert LOW + USUAL == self.changes(library)

    def test_stay_low_until_the_last_block_ends(self) -> None:
        """Loads of several guards overlap, and a release may run inside of a load."""
        thresholds, library = self.made()
        with thresholds.low():
            with thresholds.low():
                pass
            assert LOW == self.changes(library)
        assert LOW + USUAL == self.changes(library)

    @pytest.mark.parametrize(
        "environ",
        [
            {"MALLOC_TRIM_THRESHOLD_": "131072"},
            {"MALLOC_MMAP_THRESHOLD_": "131072"},
            {"MALLOC_TOP_PAD_": "0"},
            {"GLIBC_TUNABLES": "glibc.rtld.nns=4:glibc.malloc.mmap_threshold=131072"},
        ],
        ids=["trim", "mmap", "top-pad", "tunables"],
    )
    def test_of_the_user_stay(self, environ: dict[str, str]) -> None:
        """Who has set them, as the preset low-memory does, keeps them."""
        thresholds, library = self.made(**environ)
        with thresholds.low():
            pass
        assert [] == library.calls

    @pytest.mark.parametrize("names", [("mallctl", "mallopt"), ("malloc",), ("gnu_get_libc_version", "malloc_trim")])
    def test_of_others_are_left_alone(self, names: tuple[str, ...]) -> None:
        """jemalloc, an unknown allocator and a library without mallopt are not called."""
        thresholds, library = self.made(*names)
        with thresholds.low():
            pass
        assert [] == library.calls

    def test_are_high_in_a_child_that_is_forked_beside_a_load(self) -> None:
        """The load is in a thread of the parent, and never ends in the child; nor does its lock matter there."""
        thresholds, library = self.made()
        with thresholds.low():
            thresholds.after_fork_in_child()
            assert LOW + USUAL == self.changes(library)
            with thresholds.low():
                assert LOW == self.changes(library)[4:]
            assert USUAL == self.changes(library)[6:]

    def test_are_high_in_a_child_that_is_forked_during_the_first_look(self) -> None:
        """A thread of the parent looks which library serves malloc; in the child nobody waits for it."""
        found, looking, go_on = Library(*GLIBC), Event(), Event()

        def library() -> Library:
            if not looking.is_set():
                looking.set()
                go_on.wait(60)
            return found

        thresholds = Thresholds(library)
        with ThreadPoolExecutor() as pool:
            pool.submit(thresholds.low().__enter__)
            looking.wait(60)
            child = pool.submit(thresholds.after_fork_in_child)
            try:
                child.result(20)
                assert USUAL == self.changes(found)
            finally:
                go_on.set()
