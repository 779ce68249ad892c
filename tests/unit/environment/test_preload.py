"""Which allocator a program gets, and the notes if it gets none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from modelguard.allocator import AllocatorFile, AllocatorInfo
from modelguard.environment import _launcher
from modelguard.errors import InvalidOption, NotSupported

LIBC = "/lib/x86_64-linux-gnu/libc.so.6"
JEMALLOC = AllocatorFile("jemalloc", "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2")
TCMALLOC = AllocatorFile("tcmalloc", "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
MIMALLOC = AllocatorFile("mimalloc", "/usr/lib/x86_64-linux-gnu/libmimalloc.so.2")

GLIBC = {"MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}


class Machine:
    """A machine with these libraries, on which this serves malloc."""

    def __init__(
        self,
        *installed: AllocatorFile,
        refused: tuple[str, ...] = (),
        preloaded: str | None = None,
        cannot_load: tuple[str, ...] = (),
    ) -> None:
        self.installed = installed
        self.refused = refused
        self.preloaded = preloaded
        self.cannot_load = cannot_load

    def detect(self) -> AllocatorInfo:
        how: Any = "preloaded" if self.preloaded else "linked"
        return AllocatorInfo("glibc", self.preloaded or LIBC, how, None, "pymalloc", None, ())

    def find(self, kind: str | None, *, environ: Any, program: Path | None = None) -> list[AllocatorFile]:
        if program is not None and program.name in self.cannot_load:
            return []
        return [found for found in self.installed if kind in (None, found.kind)]

    def check(self, path: str, *, argument: str, program: Path) -> None:
        if path in self.refused:
            raise InvalidOption(
                argument, path, why="is not safe: other users may write to it", fix="Take that right away."
            )

    def choose(
        self, wanted: Any, program: str = sys.executable, *arguments: str, **environ: str
    ) -> tuple[dict[str, str], list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("modelguard.environment._allocator.detect", self.detect)
            patch.setattr("modelguard.environment._allocator_files.find", self.find)
            patch.setattr("modelguard.environment._allocator_files.check_preload", self.check)
            return _launcher.choose_preload(wanted, program, environ, arguments=arguments)


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


def test_the_best_that_is_installed() -> None:
    """`auto` uses the first that was found, without a note."""
    assert ({"LD_PRELOAD": JEMALLOC.path}, []) == Machine(JEMALLOC, MIMALLOC).choose("auto")


def test_a_named_allocator() -> None:
    """The named allocator is used, whatever else is installed."""
    assert ({"LD_PRELOAD": TCMALLOC.path}, []) == Machine(JEMALLOC, TCMALLOC).choose("tcmalloc")


@pytest.mark.parametrize("wanted", ["auto", "mimalloc"])
def test_mimalloc_with_a_note(wanted: str) -> None:
    """It is used where nothing else is installed or it is named, and the user learns that it keeps freed memory."""
    variables, notes = Machine(MIMALLOC).choose(wanted)
    assert {"LD_PRELOAD": MIMALLOC.path} == variables
    assert 1 == len(notes)
    assert "MIMALLOC_RESET_DELAY=0" in notes[0]


@pytest.mark.parametrize("name", ["MIMALLOC_RESET_DELAY", "MIMALLOC_DECOMMIT_DELAY", "MIMALLOC_PURGE_DELAY"])
def test_mimalloc_that_is_set_already(name: str) -> None:
    """No note for a user who has decided when mimalloc returns memory."""
    assert ({"LD_PRELOAD": MIMALLOC.path}, []) == Machine(MIMALLOC).choose("mimalloc", **{name: "0"})


def test_nothing_but_glibc() -> None:
    """`auto` then configures glibc to return memory, and notes what would be better."""
    variables, notes = Machine().choose("auto")
    assert GLIBC == variables.keys()
    assert 1 == len(notes)
    assert "apt install libjemalloc2" in notes[0]


def test_glibc_by_name() -> None:
    """Nothing is preloaded, even if something could be, and the user's own settings win."""
    variables, notes = Machine(JEMALLOC).choose("glibc", MALLOC_ARENA_MAX="1")
    assert GLIBC - {"MALLOC_ARENA_MAX"} == variables.keys()
    assert [] == notes


def test_none_leaves_everything_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the allocator of this process is examined."""
    monkeypatch.setattr("modelguard.environment._allocator.detect", lambda: pytest.fail("looked"))
    assert ({}, []) == _launcher.choose_preload("none", "/nowhere", {})


@pytest.mark.parametrize(
    ("kind", "package"),
    [("jemalloc", "libjemalloc2"), ("mimalloc", "libmimalloc2.0"), ("tcmalloc", "libtcmalloc-minimal4")],
)
def test_an_allocator_that_is_not_installed(kind: str, package: str) -> None:
    """The error names the package to install."""
    with pytest.raises(InvalidOption, match="is not installed") as refused:
        Machine().choose(kind)
    assert f"apt install {package})" in refused.value.fix


@pytest.mark.parametrize(
    ("wanted", "near"), [("jemaloc", "mean 'jemalloc'?"), ("Auto", "mean 'auto'?"), ("hoard", "Write one of 'auto'")]
)
def test_an_allocator_that_does_not_exist(wanted: str, near: str) -> None:
    """The fix names the nearest allocator, or all."""
    with pytest.raises(InvalidOption, match="is not a known allocator") as refused:
        Machine(JEMALLOC).choose(wanted)
    assert near in refused.value.fix


@pytest.mark.parametrize("entries", ["/lib/mine.so", "/lib/a.so:/lib/b.so", "/lib/a.so /lib/b.so", "libodd.so::"])
def test_the_callers_own_entries_stay_first(entries: str) -> None:
    """Entries are only ever added to LD_PRELOAD, however they are separated."""
    variables, notes = Machine(JEMALLOC).choose("auto", LD_PRELOAD=entries)
    assert ({"LD_PRELOAD": f"{entries}:{JEMALLOC.path}"}, []) == (variables, notes)


@pytest.mark.parametrize("wanted", ["auto", "jemalloc", "glibc"])
def test_no_second_allocator(wanted: str) -> None:
    """An allocator that the caller preloads stays the only one, with a note."""
    variables, notes = Machine(JEMALLOC, preloaded="/opt/libscudo.so").choose(wanted, LD_PRELOAD="/opt/libscudo.so")
    assert {} == variables
    assert 1 == len(notes)
    assert "/opt/libscudo.so" in notes[0]


def test_a_library_that_others_may_write_to() -> None:
    """If it was named, it is rejected; `auto` notes why, and uses the next one."""
    machine = Machine(JEMALLOC, TCMALLOC, refused=(JEMALLOC.path,))
    with pytest.raises(InvalidOption, match="other users may write") as refused:
        machine.choose("jemalloc")
    assert "allocator" == refused.value.argument
    variables, notes = machine.choose("auto")
    assert {"LD_PRELOAD": TCMALLOC.path} == variables
    assert [str(refused.value)] == notes


def test_the_next_file_of_a_named_allocator() -> None:
    """Of several files the first that may be preloaded is used."""
    own = AllocatorFile("jemalloc", "/app/.venv/lib/libjemalloc.so.2")
    variables, notes = Machine(own, JEMALLOC, refused=(own.path,)).choose("jemalloc")
    assert {"LD_PRELOAD": JEMALLOC.path} == variables
    assert own.path in notes[0]


def test_auto_with_nothing_that_may_be_preloaded() -> None:
    """It falls back to glibc, and notes every rejection."""
    variables, notes = Machine(JEMALLOC, refused=(JEMALLOC.path,)).choose("auto")
    assert GLIBC == variables.keys()
    assert ["other users may write" in note for note in notes] == [True, False]


def test_a_program_that_ignores_preloading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named allocator is rejected for it; otherwise nothing is set, and the reason is noted."""
    monkeypatch.setattr(_launcher, "ignores_preload", lambda program, **_: f"{program} is statically linked")
    machine = Machine(JEMALLOC)
    with pytest.raises(NotSupported, match="/bin/tool is statically linked"):
        machine.choose("jemalloc", "/bin/tool")
    for wanted in ("auto", "glibc"):
        variables, notes = machine.choose(wanted, "/bin/tool")
        assert {} == variables
        assert ["/bin/tool is statically linked" in note for note in notes] == [True]


def test_without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no LD_PRELOAD: a named allocator is rejected, `auto` sets nothing and notes it."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotSupported, match="this is darwin"):
        Machine(JEMALLOC).choose("jemalloc")
    variables, notes = Machine(JEMALLOC).choose("auto")
    assert {} == variables
    assert ["this is darwin" in note for note in notes] == [True]


@pytest.fixture
def static(tmp_path: Path) -> str:
    """A program without a dynamic linker: an ELF header and nothing else."""
    program = tmp_path / "gosu"
    program.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\x3e\0" + bytes(44))
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("wanted", ["auto", "jemalloc"])
def test_a_static_program_that_starts_another(static: str, wanted: str) -> None:
    """A launcher such as gosu passes the variable on, so it is set, and the note says where it has an effect."""
    variables, notes = Machine(JEMALLOC).choose(wanted, static, "user", "python", "app.py")
    assert {"LD_PRELOAD": JEMALLOC.path} == variables
    assert [f"{static} is statically linked, so the allocator changes only in the programs that it starts"] == notes


def test_a_static_program_that_starts_nothing(static: str) -> None:
    """Without arguments there is no other program that the preload could be meant for."""
    with pytest.raises(NotSupported, match="statically linked"):
        Machine(JEMALLOC).choose("jemalloc", static)
    assert {} == Machine(JEMALLOC).choose("auto", static)[0]


def test_a_program_that_cannot_load_what_is_installed() -> None:
    """Nothing is preloaded into a program for another C library, in which it would die."""
    machine = Machine(JEMALLOC, cannot_load=(Path(sys.executable).name,))
    with pytest.raises(NotSupported, match=r"cannot load .*another C library"):
        machine.choose("jemalloc")
    variables, notes = machine.choose("auto")
    assert {} == variables
    assert 1 == len(notes)
    assert JEMALLOC.path in notes[0]
