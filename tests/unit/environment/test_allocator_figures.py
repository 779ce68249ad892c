from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from modelguard.environment import _linker
from modelguard.environment._allocator_files import Figures, Kind
from modelguard.environment._allocator_problems import small_objects

MB = 10**6


class Library:
    """The file that serves malloc, with functions written in Python."""

    path = "/lib/it.so"
    base = None

    def __init__(self, **functions: Any) -> None:
        self.functions = functions

    def exports(self, name: str) -> bool:
        return name in self.functions

    def call(self, name: str, *arguments: Any, returns: Any = None) -> Any:
        return self.functions[name](*arguments)


def jemalloc(**values: Any) -> Library:
    def mallctl(name: bytes, old: Any, old_size: Any, new: Any, new_size: int) -> int:
        key = name.decode().replace(".", "_")
        if key not in values:
            return 2
        if old is not None:
            old._obj.value = values[key]
        return 0

    return Library(mallctl=mallctl)


def tcmalloc(**values: int) -> Library:
    def get(name: bytes, value: Any) -> int:
        key = name.decode().partition(".")[2]
        value._obj.value = values.get(key, 0)
        return int(key in values)

    def version(major: Any, minor: Any, patch: Any) -> bytes:
        major._obj.value, minor._obj.value, patch._obj.value = 2, 9, b".1"
        return b"gperftools 2.9.1"

    return Library(MallocExtension_GetNumericProperty=get, tc_version=version)


def mimalloc(committed: int, version: int) -> Library:
    def info(*values: Any) -> None:
        values[5]._obj.value = committed

    return Library(mi_process_info=info, mi_stats_merge=lambda: None, mi_version=lambda: version)


#: By these functions each is recognised.
OWN = {
    "glibc": ("gnu_get_libc_version", "malloc_trim"),
    "jemalloc": ("mallctl",),
    "mimalloc": ("mi_collect",),
    "tcmalloc": ("MallocExtension_ReleaseFreeMemory",),
}


def allocator(kind: Kind, library: Library) -> _linker.Allocator:
    """The allocator of a file that exports its own functions too."""
    library.functions |= {name: None for name in OWN.get(kind, ()) if name not in library.functions}
    found = _linker.recognise(library)
    assert kind == found.kind
    return found


GLIBC = Library(
    mallinfo2=lambda: SimpleNamespace(arena=8 * MB, hblkhd=90 * MB, uordblks=5 * MB, fordblks=3 * MB),
    gnu_get_libc_version=lambda: b"2.36",
)
JEMALLOC = jemalloc(
    epoch=1, version=b"5.3.0-0-g54eaed1d", stats_allocated=7 * MB, stats_active=8 * MB, stats_resident=10 * MB
)
TCMALLOC = tcmalloc(
    current_allocated_bytes=7 * MB, heap_size=20 * MB, pageheap_free_bytes=4 * MB, pageheap_unmapped_bytes=6 * MB
)


@pytest.mark.parametrize(
    ("kind", "library", "version", "figures"),
    [
        ("glibc", GLIBC, "2.36", Figures(95 * MB, None, 98 * MB, 3 * MB)),
        ("jemalloc", JEMALLOC, "5.3.0", Figures(7 * MB, 8 * MB, 10 * MB, 3 * MB)),
        ("tcmalloc", TCMALLOC, "2.9.1", Figures(7 * MB, 10 * MB, 14 * MB, 7 * MB)),
        ("mimalloc", mimalloc(12 * MB, 209), "2.0.9", Figures(None, None, 12 * MB, None)),
        ("mimalloc", mimalloc(0, 20206), "2.2.6", Figures(None, None, 0, None)),
        ("unknown", Library(), None, None),
    ],
)
def test_each_allocator_reports_by_its_own_functions(
    kind: Kind, library: Library, version: str | None, figures: Figures | None
) -> None:
    """Version and figures come in bytes; what an allocator does not report is None."""
    assert version == allocator(kind, library).version()
    assert figures == allocator(kind, library).figures()


@pytest.mark.parametrize(
    ("kind", "library"),
    [
        ("glibc", Library(gnu_get_libc_version=lambda: b"2.31")),  # before mallinfo2
        ("jemalloc", jemalloc(version=b"5.3.0", epoch=1)),  # built without statistics
        ("jemalloc", jemalloc()),
        ("mimalloc", Library(mi_collect=lambda: None)),
        ("mimalloc", mimalloc(2**64 - 4096, 209)),  # threads' counters that add up to less than nothing
        ("tcmalloc", Library(MallocExtension_ReleaseFreeMemory=lambda: None)),
        ("tcmalloc", tcmalloc(current_allocated_bytes=1)),
    ],
)
def test_what_an_old_or_small_build_does_not_report_is_none(kind: Kind, library: Library) -> None:
    """A function that its file does not export is not called, and an impossible figure is dropped."""
    assert allocator(kind, library).figures() is None


@pytest.mark.parametrize(
    ("kind", "library"), [("mimalloc", Library()), ("tcmalloc", Library()), ("jemalloc", jemalloc())]
)
def test_a_version_that_is_not_reported_is_none(kind: Kind, library: Library) -> None:
    """Old builds do not report a version."""
    assert allocator(kind, library).version() is None


def test_no_figure_is_negative() -> None:
    """Other threads may take memory between two figures."""
    library = jemalloc(epoch=1, stats_allocated=9, stats_active=9, stats_resident=8)
    figures = allocator("jemalloc", library).figures()
    assert Figures(9, 9, 8, 0) == figures


@pytest.mark.parametrize(
    ("library", "expected"),
    [(jemalloc(background_thread=True), True), (jemalloc(background_thread=False), False), (jemalloc(), False)],
)
def test_jemallocs_threads_are_reported(library: Library, expected: object) -> None:
    """A jemalloc without support for threads has none."""
    assert expected is allocator("jemalloc", library).has_threads()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("pymalloc", "pymalloc"), ("pymalloc_debug", "pymalloc"), ("malloc", "malloc"), ("mimalloc_debug", "mimalloc")],
)
def test_what_cpython_reports_of_its_small_objects_counts(name: str, expected: str) -> None:
    """A debug mode does not change the allocator."""
    assert expected == small_objects(name, {"PYTHONMALLOC": "wrong"})


@pytest.mark.parametrize(
    ("blocks", "variable", "expected"),
    [(5, "mimalloc", "pymalloc"), (0, "mimalloc_debug", "mimalloc"), (0, "malloc", "malloc"), (0, "", "malloc")],
)
def test_where_cpython_reports_nothing_its_count_of_blocks_decides(
    monkeypatch: pytest.MonkeyPatch, blocks: int, variable: str, expected: str
) -> None:
    """Only pymalloc counts blocks then; the variable is the last resort."""
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: blocks)
    assert expected == small_objects("a profiler's", {"PYTHONMALLOC": variable})
