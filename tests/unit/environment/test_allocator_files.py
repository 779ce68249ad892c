from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelguard import allocator
from modelguard.allocator import AllocatorFile, check_preload
from modelguard.environment._allocator_files import opened
from modelguard.errors import InvalidOption

LIBRARY, PROGRAM = 3, 2
X86_64, AARCH64 = 62, 183
DEBIAN = "/usr/lib/x86_64-linux-gnu"


def elf(kind: int = LIBRARY, machine: int = X86_64, bits: int = 2, order: int = 1) -> bytes:
    """The start of an ELF file: 64 bits and little-endian unless asked for otherwise."""
    name = "little" if order == 1 else "big"
    start = b"\x7fELF" + bytes([bits, order, 1]) + bytes(9)
    return start + kind.to_bytes(2, name) + machine.to_bytes(2, name) + bytes(44)  # type: ignore[arg-type]


class Machine:
    """A tree of folders with libraries in them, and the program that runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.program = self.write("/python", elf())

    def write(self, path: str, content: bytes) -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o644)
        return file

    def find(self, kind: Any = None, **environ: str) -> list[str]:
        return [found.path for found in allocator.find(kind, root=self.root, environ=environ, program=self.program)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(sys, "platform", "linux")
    return Machine(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        f"{DEBIAN}/libjemalloc.so.2",
        "/lib/x86_64-linux-gnu/libjemalloc.so.2",
        "/usr/lib/libjemalloc.so.2",
        "/usr/lib64/libjemalloc.so.2",
        "/usr/local/lib/libjemalloc.so",
        "/opt/conda/envs/app/lib/libjemalloc.so.2",
        "/app/.venv/lib/libjemalloc.so.2",
        "/home/linuxbrew/.linuxbrew/lib/libjemalloc.so.2",
        "/opt/brew/lib/libjemalloc.so.2",
    ],
)
def test_a_library_is_found_where_systems_put_it(machine: Machine, path: str) -> None:
    """Debian, Fedora, Alpine, custom builds, conda, virtual environments and Homebrew are covered."""
    machine.write(path, elf())
    where = {"CONDA_PREFIX": "/opt/conda/envs/app", "VIRTUAL_ENV": "/app/.venv", "HOMEBREW_PREFIX": "/opt/brew"}
    assert [path] == machine.find(**where)


def test_the_best_comes_first(machine: Machine) -> None:
    """mimalloc, which keeps what reloads free, comes last; the environment's own files come before the system's."""
    files = [
        "/env/lib/libtcmalloc.so.4",
        f"{DEBIAN}/libmimalloc.so.2",
        f"{DEBIAN}/libjemalloc.so.2",
        f"{DEBIAN}/libtcmalloc_minimal.so.4",
    ]
    for file in files:
        machine.write(file, elf())
    assert [files[2], files[0], files[3], files[1]] == machine.find(CONDA_PREFIX="/env")
    assert [files[1]] == machine.find("mimalloc", CONDA_PREFIX="/env")
    found = allocator.find("mimalloc", root=machine.root, program=machine.program)
    assert (AllocatorFile("mimalloc", files[1]),) == found


def test_each_file_is_listed_once_by_the_name_that_lasts(machine: Machine) -> None:
    """Links to one file are one library, named with the number that programs are linked to."""
    file = machine.write(f"{DEBIAN}/libmimalloc.so.2.0", elf())
    for link in ("libmimalloc.so", "libmimalloc.so.2"):
        (file.parent / link).symlink_to(file.name)
    (machine.root / "lib").symlink_to("usr/lib")
    assert [f"{DEBIAN}/libmimalloc.so.2"] == machine.find()


def test_of_two_versions_the_newer_comes_first(machine: Machine) -> None:
    """Versions are compared as numbers."""
    for version in ("9", "10"):
        machine.write(f"{DEBIAN}/libmimalloc.so.{version}", elf())
    assert [f"{DEBIAN}/libmimalloc.so.10", f"{DEBIAN}/libmimalloc.so.9"] == machine.find()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("libjemalloc.so.2", elf(machine=AARCH64)),
        ("libjemalloc.so.2", elf(bits=1)),
        ("libjemalloc.so.2", b"INPUT(libjemalloc.so.2)"),
        ("libjemalloc.so.2.debug", elf()),
        ("libjemalloc.a", elf()),
        ("libtcmalloc_minimal_debug.so.4", elf()),
        ("libmimalloc-secure.so.2", elf()),
    ],
)
def test_files_that_are_not_for_preloading_are_left_out(machine: Machine, name: str, content: bytes) -> None:
    """Files for another machine, linker scripts and debugging builds are not listed."""
    machine.write(f"{DEBIAN}/{name}", content)
    assert [] == machine.find()


def test_a_copy_that_a_wheel_bundles_is_left_out(machine: Machine) -> None:
    """It belongs to its package, and disappears with it."""
    machine.write("/env/lib/python3.11/site-packages/pyarrow.libs/libjemalloc-1a2b3c4d.so.2", elf())
    assert [] == machine.find(VIRTUAL_ENV="/env")


def test_nothing_can_be_preloaded_without_linux(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems do not have the variable."""
    machine.write(f"{DEBIAN}/libjemalloc.so.2", elf())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert [] == machine.find()


@pytest.mark.parametrize(("kind", "fix"), [("jemaloc", "Did you mean 'jemalloc'"), ("x", "Write one of"), (3, "Write")])
def test_an_unknown_allocator_is_refused(kind: Any, fix: str) -> None:
    """The error suggests the nearest name, if one is near."""
    with pytest.raises(InvalidOption, match=fix):
        allocator.find(kind)
    assert () == allocator.find("glibc")


def check(machine: Machine, path: Path | str) -> None:
    allocator.check_preload(path, argument="allocator", program=machine.program)


def test_a_good_library_is_accepted(machine: Machine) -> None:
    """It may be named by its own name or a link, as text or as a path."""
    file = machine.write("/lib/libjemalloc.so.2", elf())
    link = file.with_name("libjemalloc.so")
    link.symlink_to(file.name)
    check(machine, file)
    check(machine, str(link))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (elf(machine=AARCH64), "built for another kind of machine"),
        (elf(bits=1), "built for another kind of machine"),
        (elf(order=2), "built for another kind of machine"),
        (elf(kind=PROGRAM), "not a shared library"),
        (elf()[:10], "not an ELF file"),
        (b"", "not an ELF file"),
        (b"#!/bin/sh\n" + bytes(100), "not an ELF file"),
    ],
)
def test_what_could_not_be_loaded_is_refused(machine: Machine, content: bytes, why: str) -> None:
    """The dynamic linker would skip it with no more than a line on stderr."""
    with pytest.raises(InvalidOption, match=why) as caught:
        check(machine, machine.write("/lib/it.so", content))
    assert "allocator" == caught.value.argument


def test_without_a_program_to_compare_with_any_library_is_accepted(machine: Machine) -> None:
    """Where /proc is hidden, the dynamic linker decides."""
    file = machine.write("/lib/it.so", elf(machine=AARCH64))
    allocator.check_preload(file, program=machine.root / "nowhere")
    with pytest.raises(InvalidOption, match="not an ELF file"):
        allocator.check_preload(machine.write("/lib/it.so", b"no"), program=machine.root / "nowhere")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("libjemalloc.so.2", "must be a full path"),
        ("./libjemalloc.so.2", "must be a full path"),
        ("", "must be a full path"),
        ("/lib/my allocator.so", "must not contain spaces or colons"),
        ("/lib/a:b.so", "must not contain spaces or colons"),
        ("/nowhere/it.so", r"cannot be found \(No such file or directory\)"),
        ("/", "not a regular file"),
    ],
)
def test_a_name_that_cannot_be_preloaded_is_refused(machine: Machine, path: str, why: str) -> None:
    """Such a name is rejected, whatever the file is."""
    with pytest.raises(InvalidOption, match=why):
        check(machine, path)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_to_is_refused(machine: Machine, mode: int) -> None:
    """Others could run their code as this user."""
    file = machine.write("/lib/it.so", elf())
    file.chmod(mode)
    with pytest.raises(InvalidOption, match=r"is not safe: other users may write to .*it\.so"):
        check(machine, file)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_file_in_a_folder_that_others_may_write_to_is_refused(machine: Machine, mode: int) -> None:
    """Others could replace the file, and in a sticky folder such as /tmp create it first."""
    file = machine.write("/lib/it.so", elf())
    file.parent.chmod(mode)
    with pytest.raises(InvalidOption, match=f"is not safe: other users may write to {file.parent}"):
        check(machine, file)


def test_folders_above_count_unless_they_are_sticky(machine: Machine) -> None:
    """A user who may rename a folder may replace its content; in a sticky folder only its owner may."""
    file = machine.write("/a/b/it.so", elf())
    (machine.root / "a").chmod(0o1777)
    check(machine, file)
    (machine.root / "a").chmod(0o777)
    with pytest.raises(InvalidOption, match=r"is not safe: other users may write to .*/a"):
        check(machine, file)


def test_a_link_in_a_folder_that_others_may_write_to_is_refused(machine: Machine) -> None:
    """A user who can change the link chooses the file."""
    file = machine.write("/lib/it.so", elf())
    (machine.root / "open").mkdir()
    (machine.root / "open").chmod(0o777)
    link = machine.root / "open" / "it.so"
    link.symlink_to(file)
    check(machine, file)
    with pytest.raises(InvalidOption, match=r"is not safe: other users may write to .*/open"):
        check(machine, link)


def test_a_link_to_a_file_in_such_a_folder_is_refused(machine: Machine) -> None:
    """The folder of the file counts as well as that of the link."""
    file = machine.write("/open/it.so", elf())
    file.parent.chmod(0o777)
    link = machine.write("/lib/x", b"").with_name("it.so")
    link.symlink_to(file)
    with pytest.raises(InvalidOption, match=r"is not safe: other users may write to .*/open"):
        check(machine, link)


def test_a_file_of_another_user_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root's and this user's files are trusted."""
    file = machine.write("/lib/it.so", elf())
    check(machine, file)
    owner = file.stat().st_uid
    if owner == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(InvalidOption, match="belongs to another user"):
        check(machine, file)


@pytest.mark.parametrize(("compiler", "expected"), [("cc", "glibc"), ("musl-gcc", "musl")])
def test_the_c_library_of_a_program(tmp_path: Path, compiler: str, expected: str) -> None:
    """Programs and libraries show which C library they need, and only one of the same is found or accepted."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    source, library, program = tmp_path / "one.c", tmp_path / "libjemalloc.so.2", tmp_path / "program"
    source.write_text('#include <stdio.h>\nint main(void) { return puts(""); }\n')
    subprocess.run([compiler, source, "-o", program], check=True, timeout=50)
    subprocess.run([compiler, source, "-shared", "-fPIC", "-o", library], check=True, timeout=50)
    foreign = "glibc" if expected == "musl" else "musl"
    for path in (library, program):
        with opened(path) as file:
            assert expected == file.c_library
    check_preload(library, program=program)
    other = elf_of(foreign, tmp_path)
    if other is not None:
        with pytest.raises(InvalidOption, match=f"it needs {expected}, and the program runs on {foreign}"):
            check_preload(library, program=other)


def elf_of(c_library: str, folder: Path) -> Path | None:
    """A program for a C library; None where there is no compiler for it."""
    compiler = {"glibc": "cc", "musl": "musl-gcc"}[c_library]
    if shutil.which(compiler) is None:
        return None
    source, program = folder / "other.c", folder / "other"
    source.write_text("int main(void) { return 0; }\n")
    subprocess.run([compiler, source, "-o", program], check=True, timeout=50)
    return program
