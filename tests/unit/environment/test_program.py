"""The program that a command starts: where it is, and whether LD_PRELOAD is in force in it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelguard.environment._launcher import ignores_preload, locate
from modelguard.errors import CannotRun

LOAD, INTERPRETER = 1, 3
ME = os.getuid(), os.getgid()


def elf(*headers: int, bits: int = 64, order: str = "little") -> bytes:
    """An ELF file of nothing but program headers of these types."""

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, order)  # type: ignore[arg-type]

    word, size, entry = (8, 64, 56) if bits == 64 else (4, 52, 32)
    start = b"\x7fELF" + bytes([bits // 32, 1 if order == "little" else 2, 1]) + bytes(9)
    start += number(3, 2) + number(62, 2) + number(1, 4)
    start += number(0, word) + number(size, word) + number(0, word) + number(0, 4)
    start += number(size, 2) + number(entry, 2) + number(len(headers), 2) + bytes(6)
    return start + b"".join(number(header, 4) + bytes(entry - 4) for header in headers)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Makes a file below the test's folder, executable unless ``mode`` says otherwise."""

    def make(name: str, content: bytes = elf(LOAD, INTERPRETER), mode: int = 0o755) -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
        return str(file)

    return make


# Where the command is


def test_a_name_is_searched_on_the_path(write: Any, tmp_path: Path) -> None:
    """The first executable file of that name is used; folders and other files are skipped."""
    (tmp_path / "one" / "tool").mkdir(parents=True)
    write("two/tool", mode=0o644)
    expected = write("three/tool")
    write("four/tool")
    path = os.pathsep.join(str(tmp_path / name) for name in ("none", "one", "two", "three", "four"))
    assert expected == locate("tool", {"PATH": path})


def test_a_path_is_taken_as_it_is(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slash in it means a file, whatever PATH is, and the name stays as it was typed."""
    file = write("my tools/tool")
    assert file == locate(file, {"PATH": "/nowhere"})
    monkeypatch.chdir(tmp_path)
    assert "./my tools/tool" == locate("./my tools/tool", {})


def test_an_empty_entry_of_the_path_is_the_working_directory(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """POSIX requires this, and shells do it."""
    write("tool")
    monkeypatch.chdir(tmp_path)
    assert "./tool" == locate("tool", {"PATH": "/nowhere:"})


@pytest.mark.parametrize("command", ["gunicron", "", "./gunicron", "/nowhere/gunicorn"])
def test_a_command_that_does_not_exist(command: str) -> None:
    """The status is that of a shell: 127."""
    with pytest.raises(CannotRun, match="Correct the name") as refused:
        locate(command, {"PATH": "/nowhere"})
    assert 127 == refused.value.status
    assert repr(command) == refused.value.value


def test_a_whole_command_in_quotes() -> None:
    """Quotes around a whole command are a likely mistake, and the fix says so."""
    with pytest.raises(CannotRun) as refused:
        locate("gunicorn app:app", {"PATH": "/nowhere"})
    assert refused.value.fix.endswith("-- gunicorn app:app")


def test_a_command_that_is_not_executable(write: Any, tmp_path: Path) -> None:
    """The status is that of a shell: 126, for a file without permission and for a folder."""
    file = write("app.py", mode=0o644)
    for command in (file, str(tmp_path)):
        with pytest.raises(CannotRun) as refused:
            locate(command, {})
        assert 126 == refused.value.status
    with pytest.raises(CannotRun, match=r"chmod \+x"):
        locate("app.py", {"PATH": str(tmp_path)})


def test_the_error_crosses_processes() -> None:
    """Pickled and unpickled it keeps its status and its text."""
    error = CannotRun("tool", why="it does not exist", fix="Install it.", status=127)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(error), 127, "command") == (str(copy), copy.status, copy.argument)


# Whether LD_PRELOAD is in force in it


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("order", ["little", "big"])
def test_a_static_program_is_recognised_by_its_headers(write: Any, bits: int, order: str) -> None:
    """A program without a dynamic linker cannot preload anything."""
    static = write("static", elf(LOAD, bits=bits, order=order))
    dynamic = write("dynamic", elf(LOAD, INTERPRETER, bits=bits, order=order))
    assert f"{static} is statically linked, so nothing reads LD_PRELOAD" == ignores_preload(static)
    assert None is ignores_preload(dynamic)


def test_a_scripts_interpreter_counts(write: Any) -> None:
    """A script is run by the program in its first line, through several scripts if necessary."""
    static, dynamic = write("static", elf(LOAD)), write("dynamic")
    inner = write("inner", f"#! {static} -x\n".encode())
    assert f"{static} is statically" in str(ignores_preload(write("outer", f"#!{inner}\nexit\n".encode())))
    assert None is ignores_preload(write("script", f"#!{dynamic}\n".encode()))


@pytest.mark.parametrize("line", [b"#!/nowhere/python\n", b"#!/bin/sh\r\n", b"#!\n", b"#!/nowhere"])
def test_a_script_without_its_interpreter(write: Any, line: bytes) -> None:
    """It cannot be started, and the error names the interpreter, including a stray carriage return."""
    with pytest.raises(CannotRun, match="names an interpreter that does not exist") as refused:
        ignores_preload(write("script", line))
    assert 126 == refused.value.status


@pytest.mark.parametrize("content", [b"", b"echo hello", b"\x7fELF", elf(LOAD)[:66], b"MZ\x90"])
def test_other_files_are_left_to_the_system(write: Any, content: bytes) -> None:
    """For a file of another kind, or one that is cut short, there is no verdict."""
    assert None is ignores_preload(write("odd", content))


def test_unreadable_files_are_left_to_the_system(tmp_path: Path) -> None:
    """A program may be executable without being readable."""
    assert None is ignores_preload(str(tmp_path))


def test_endless_scripts(write: Any, tmp_path: Path) -> None:
    """A script that names itself is left to the system, which rejects it."""
    assert None is ignores_preload(write("loop", f"#!{tmp_path / 'loop'}\n".encode()))


@pytest.mark.parametrize(
    ("mode", "user", "group", "expected"),
    [
        (0o4755, *ME, False),
        (0o4755, ME[0] + 1, ME[1], True),
        (0o2755, *ME, False),
        (0o2755, ME[0], ME[1] + 1, True),
        (0o2745, ME[0], ME[1] + 1, False),
        (0o755, ME[0] + 1, ME[1] + 1, False),
    ],
)
def test_a_program_with_more_rights(
    write: Any, monkeypatch: pytest.MonkeyPatch, mode: int, user: int, group: int, *, expected: bool
) -> None:
    """Where the program runs as another user than its caller, the dynamic linker ignores the variable."""
    file = write("tool", mode=mode)
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(os, "getgid", lambda: group)
    why = ignores_preload(file)
    assert expected == ("more privileges than its caller" in str(why))


@pytest.mark.parametrize(("user", "expected"), [(0, False), (1000, True)])
def test_a_program_with_capabilities(write: Any, monkeypatch: pytest.MonkeyPatch, user: int, *, expected: bool) -> None:
    """The same holds for file capabilities, unless root starts it."""
    monkeypatch.setattr(
        os, "getxattr", lambda file, name: b"\x01" if name == "security.capability" else b"", raising=False
    )
    monkeypatch.setattr(os, "getuid", lambda: user)
    assert expected == ("more privileges than its caller" in str(ignores_preload(write("tool"))))
