from __future__ import annotations

import sys

import pytest

from modelguard.environment import allocator
from modelguard.environment.allocator import Serving
from modelguard.errors import NotSupported


class Library:
    """The file that serves malloc, with the functions that it exports."""

    path = "/lib/it.so"

    def __init__(self, *names: str, answer: int = 0) -> None:
        self.names = names
        self.answer = answer
        self.calls: list[tuple[object, ...]] = []

    def exports(self, name: str) -> bool:
        return name in self.names

    def call(self, name: str, *arguments: bytes | int | None) -> int:
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
    assert (kind, "/lib/it.so") == (allocator.serving(library).kind, allocator.serving(library).path)
    allocator.trim(library, private=lambda: 0)
    assert [call] == library.calls


@pytest.mark.parametrize("names", [[], ["malloc_trim"], ["gnu_get_libc_version"]])
def test_an_unknown_allocator_is_left_alone(names: list[str]) -> None:
    """Nothing is called on a guess, and the caller is told instead of getting a silent nothing."""
    library = Library(*names)
    assert Serving("unknown", "/lib/it.so") == allocator.serving(library)
    with pytest.raises(NotSupported, match=r"unknown allocator \(/lib/it\.so\)"):
        allocator.trim(library)
    assert [] == library.calls


@pytest.mark.parametrize(("before", "after", "expected"), [(500, 120, 380), (100, 130, 0)])
def test_what_was_given_back_is_measured(before: int, after: int, expected: int) -> None:
    """Bytes are private memory before less after, and never negative."""
    readings = [before, after]
    library = Library("mallctl")
    assert expected == allocator.trim(library, private=lambda: readings.pop(0))


def test_a_refusal_is_an_error() -> None:
    """A jemalloc older than 5.0 does not know the call; that is said."""
    with pytest.raises(NotSupported, match=r"jemalloc .* refused to purge its arenas: error 2"):
        allocator.trim(Library("mallctl", answer=2), private=lambda: 0)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_platforms_say_so(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Away from Linux, asking and trimming are both refused with the reason."""
    monkeypatch.setattr(sys, "platform", platform)
    for ask in (allocator.serving, allocator.trim):
        with pytest.raises(NotSupported, match=f"this is {platform}"):
            ask()
