"""Local variables of a loaded file: found by its symbol table, and read only once they have a value."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest

from modelguard.environment._linker import static_of

VARIABLE, GUARD = "_ZZ1fvE4room", "_ZGVZ1fvE4room"


def write(path: Path, places: dict[str, int], *, magic: bytes = b"\x7fELF\x02\x01", sections: int = 3) -> str:
    """Write the smallest ELF file that has a symbol table."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in places)
    starts = {name: names.index(b"\0" + name.encode() + b"\0") + 1 for name in places}
    symbols = bytes(24) + b"".join(struct.pack("<IBBHQQ", starts[name], 0, 0, 1, at, 4) for name, at in places.items())
    table = [
        bytes(64),
        struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, 64, len(symbols), 2, 0, 8, 24),
        struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64 + len(symbols), len(names), 0, 0, 1, 0),
    ]
    header = bytearray(64)
    header[: len(magic)] = magic
    struct.pack_into("<Q", header, 0x28, 64 + len(symbols) + len(names))
    struct.pack_into("<HH", header, 0x3A, 64, sections)
    path.write_bytes(bytes(header) + symbols + names + b"".join(table))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file whose variable lies 8 bytes in, and its guard at the very start."""
    return write(tmp_path / "lib.so", {"other": 99, GUARD: 0, VARIABLE: 8, "x" + VARIABLE: 77})


def test_a_variable_with_its_value(file: str) -> None:
    """Once its guard is set, the number is read."""
    memory = (ctypes.c_int32 * 4)(1, 0, 64, 0)
    assert 64 == static_of(file, VARIABLE, ctypes.addressof(memory))


def test_a_variable_without_its_value(file: str) -> None:
    """Until its guard is set, there is no value."""
    memory = (ctypes.c_int32 * 4)(0, 0, 64, 0)
    assert static_of(file, VARIABLE, ctypes.addressof(memory)) is None


def test_a_variable_of_a_thread_that_has_none(file: str) -> None:
    """A thread that has no variables of the file yet has no value."""
    assert static_of(file, VARIABLE, None) is None


@pytest.mark.parametrize("places", [{"other": 1}, {VARIABLE: 8}, {"x" + VARIABLE: 8, "x" + GUARD: 0}])
def test_a_file_without_the_name(tmp_path: Path, places: dict[str, int]) -> None:
    """Only the whole name matches, and a variable without its guard cannot be read."""
    memory = (ctypes.c_int32 * 4)(1, 0, 64, 0)
    with pytest.raises(LookupError):
        static_of(write(tmp_path / "lib.so", places), VARIABLE, ctypes.addressof(memory))


@pytest.mark.parametrize(
    ("magic", "sections"), [(b"\x7fELF\x01\x01", 3), (b"\x7fELF\x02\x02", 3), (b"\x7fELF\x02\x01", 0)]
)
def test_a_file_of_another_kind(tmp_path: Path, magic: bytes, sections: int) -> None:
    """In a file of 32 bits, of the other byte order, or without a symbol table, nothing is found."""
    path = write(tmp_path / "lib.so", {GUARD: 0, VARIABLE: 8}, magic=magic, sections=sections)
    with pytest.raises(LookupError):
        static_of(path, VARIABLE, None)


def test_a_table_that_was_cut_off(tmp_path: Path) -> None:
    """A file that is cut short gives an error that callers handle, and never a random number."""
    path = Path(write(tmp_path / "lib.so", {GUARD: 0, VARIABLE: 8}))
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(LookupError):
        static_of(str(path), VARIABLE, None)
