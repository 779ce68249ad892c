"""ELF files, written by hand and by the compiler."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from modelguard.environment import _allocator_files as elf
from modelguard.environment._allocator_files import NotElf

BASE = 0x10000
KINDS = [(64, "<"), (64, ">"), (32, "<"), (32, ">")]


class Builder:
    """Writes a small ELF file whose content is loaded at an address other than its place in the file."""

    def __init__(self, bits: int = 64, order: str = "<", kind: int = 3, machine: int = 62) -> None:
        self.bits, self.order, self.kind, self.machine = bits, order, kind, machine
        self.word = "Q" if bits == 64 else "I"
        self.content = bytearray(64 if bits == 64 else 52)
        self.segments: list[tuple[int, int, int]] = []
        self.sections: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]

    def add(self, data: bytes) -> int:
        """Append data; returns its place."""
        place = len(self.content)
        self.content += data
        return place

    def pack(self, code: str, *values: int) -> bytes:
        return struct.pack(self.order + code, *values)

    def symbol(self, name: int, value: int, section: int) -> bytes:
        if self.bits == 64:
            return self.pack("IBBHQQ", name, 0, 0, section, value, 4)
        return self.pack("IIIBBH", name, value, 4, 0, 0, section)

    def build(self, path: Path) -> Path:
        start = len(self.content)
        segments = [(1, 0, start), *self.segments]
        program_headers = b"".join(self._segment(*segment) for segment in segments)
        section_headers = b"".join(self._section(*section) for section in self.sections)
        wide = self.bits == 64
        ident = b"\x7fELF" + bytes([2 if wide else 1, 1 if self.order == "<" else 2, 1]) + bytes(9)
        header = self.pack(
            f"HHI{self.word * 3}IHHHHHH",
            self.kind,
            self.machine,
            1,
            0,
            start,
            start + len(program_headers),
            0,
            64 if wide else 52,
            56 if wide else 32,
            len(segments),
            64 if wide else 40,
            len(self.sections),
            0,
        )
        self.content[: len(ident) + len(header)] = ident + header
        path.write_bytes(bytes(self.content) + program_headers + section_headers)
        return path

    def _segment(self, kind: int, offset: int, size: int) -> bytes:
        address = BASE + offset
        if self.bits == 64:
            return self.pack("IIQQQQQQ", kind, 0, offset, address, 0, size, size, 1)
        return self.pack("IIIIIIII", kind, offset, address, 0, size, size, 0, 1)

    def _section(self, kind: int, offset: int, size: int, link: int) -> bytes:
        return self.pack(f"II{self.word * 4}II{self.word * 2}", 0, kind, 0, 0, offset, size, link, 0, 0, 0)


def whole(path: Path, bits: int, order: str) -> Path:
    """A program that needs libm and libc, and has a local ``_ZZ1fvE4room``."""
    made = Builder(bits, order, kind=2)
    interpreter = made.add(b"/lib/ld.so\0")
    names = b"\0malloc\0own\0libm.so\0libc.so\0mine\0"
    place = {name: names.index(b"\0" + name.encode() + b"\0") + 1 for name in names.decode().split("\0") if name}
    strings = made.add(names)
    symbols = made.symbol(0, 0, 0) + made.symbol(place["malloc"], 0x40, 0) + made.symbol(place["own"], 0x50, 1)
    table = made.add(symbols)
    local_names = made.add(b"\0x_ZZ1fvE4room\0_ZZ1fvE4room\0")
    locals_ = made.add(made.symbol(0, 0, 0) + made.symbol(1, 1, 1) + made.symbol(15, 0x88, 1))
    entry = len(made.symbol(0, 0, 0))
    entries = {
        1: [place["libm.so"], place["libc.so"]],
        14: [place["mine"]],
        5: [BASE + strings],
        6: [BASE + table],
        0: [0],
        99: [1],  # behind the end
    }
    pairs = b"".join(made.pack(made.word * 2, tag, value) for tag, values in entries.items() for value in values)
    dynamic = made.add(pairs)
    made.segments = [(3, interpreter, 11), (2, dynamic, len(pairs))]
    made.sections += [
        (11, table, len(symbols), 2),
        (3, strings, len(names), 0),
        (2, locals_, 3 * entry, 4),
        (3, local_names, 28, 0),
    ]
    return made.build(path)


@pytest.mark.parametrize(("bits", "order"), KINDS)
def test_every_part_of_a_program_is_read(tmp_path: Path, bits: int, order: str) -> None:
    """Type, interpreter, libraries and local variables are read in 32 and 64 bits and both byte orders."""
    with elf.opened(whole(tmp_path / "it", bits, order)) as file:
        assert ("program", (bits == 64, order, 62)) == (file.type, file.machine)
        assert ("/lib/ld.so", ("libm.so", "libc.so")) == (file.interpreter, file.needed)
        assert (0x88, None) == (file.address_of("_ZZ1fvE4room"), file.address_of("room"))


@pytest.mark.parametrize(("bits", "order"), KINDS)
def test_a_library_without_anything(tmp_path: Path, bits: int, order: str) -> None:
    """A file without dynamic section, sections and interpreter has none of these, without an error."""
    with elf.opened(Builder(bits, order).build(tmp_path / "it")) as file:
        assert ("library", None, (), None) == (file.type, file.interpreter, file.needed, file.address_of("x"))


def test_files_for_different_machines_do_not_fit(tmp_path: Path) -> None:
    """Word size, byte order and machine have to be the same; the type does not matter."""
    made = [Builder(64, "<", kind=2), Builder(64, "<"), Builder(32, "<"), Builder(64, ">"), Builder(64, "<", machine=3)]
    paths = [one.build(tmp_path / str(number)) for number, one in enumerate(made)]
    fits = []
    for path in paths:
        with elf.opened(paths[0]) as first, elf.opened(path) as other:
            fits.append(first.machine == other.machine)
    assert [True, True, False, False, False] == fits


@pytest.mark.parametrize("content", [b"", b"\x7fEL", b"#!/bin/sh\n" + bytes(99), b"\x7fELF\x03\x01" + bytes(99)])
def test_other_files_are_not_elf(tmp_path: Path, content: bytes) -> None:
    """A file of another kind is recognised by its first bytes."""
    (tmp_path / "it").write_bytes(content)
    with pytest.raises(NotElf), elf.opened(tmp_path / "it"):
        pass


@pytest.mark.parametrize("part", [0.1, 0.3, 0.6, 0.9])
def test_a_file_that_is_cut_short(tmp_path: Path, part: float) -> None:
    """Any missing value raises the one error that callers handle."""
    path = whole(tmp_path / "it", 64, "<")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(NotElf), elf.opened(path) as file:
        _ = file.interpreter, file.needed, file.address_of("_ZZ1fvE4room")


def test_the_running_program_is_read() -> None:
    """This Python, or the library with it, asks for the C library."""
    if not sys.platform.startswith("linux"):
        pytest.skip("ELF files are the programs of Linux")
    with elf.opened("/proc/self/exe") as file:
        assert file.interpreter is not None
        assert any(name.startswith(("libc.", "ld-", "libpython")) for name in file.needed)
