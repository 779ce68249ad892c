"""The memory mappings of a process, made of the text of ``maps`` and ``smaps``. This module reads no file."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["DELETED", "MODEL_LIBRARIES", "MemoryMapping", "mapped_files", "model_libraries", "parse_mappings"]

_LIBRARIES = """
ctranslate2 flair gensim jax keras lightgbm onnxruntime paddle sentence_transformers sklearn spacy stanza tensorflow
torch transformers vllm xgboost
"""
#: Packages that compute models, and take tens to hundreds of megabytes for their import alone.
MODEL_LIBRARIES = frozenset(_LIBRARIES.split())

#: The kernel appends this to the name of a file that was removed or replaced since it was mapped.
DELETED = " (deleted)"

# "7f12-7f34 r-xp 00001000 08:02 173521   /usr/lib/libc.so.6". Compiled on first use: importing stays cheap.
_MAPPING = r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)"


class MemoryMapping:
    """One mapping of a process, as ``maps`` and ``smaps`` show it.

    Attributes:
        start: Its first address.
        end: The first address after it.
        access: Its permissions, such as ``"rw-p"``.
        is_file: Whether it maps a file.
        name: The file, a name such as ``"[heap]"``, or empty.
        deleted: Whether the file was removed or replaced since it was mapped.
        sizes: The figures of ``smaps`` in bytes; empty from ``maps``.
        flags: The two-letter flags of ``smaps`` (proc_pid_smaps(5)); empty from ``maps``.
    """

    __slots__ = ("access", "deleted", "end", "flags", "is_file", "name", "sizes", "start")

    def __init__(self, start: int, end: int, access: str, *, is_file: bool, name: str) -> None:
        self.start = start
        self.end = end
        self.access = access
        self.is_file = is_file
        self.name = name.removesuffix(DELETED)
        self.deleted = name.endswith(DELETED)
        self.sizes: dict[str, int] = {}
        self.flags: frozenset[str] = frozenset()

    @property
    def private(self) -> int:
        """Bytes that no other process maps."""
        return self.sizes.get("Private_Clean", 0) + self.sizes.get("Private_Dirty", 0)


def parse_mappings(text: str) -> list[MemoryMapping]:
    """Read ``maps`` or ``smaps``: in the latter, lines with figures follow each mapping's own line."""
    pattern = re.compile(_MAPPING)
    found: list[MemoryMapping] = []
    for line in text.split("\n"):  # names may contain whatever else splitlines() splits at
        head = pattern.match(line)
        if head:
            start, end, access, inode, name = head.groups()
            found.append(MemoryMapping(int(start, 16), int(end, 16), access, is_file=inode != "0", name=name))
        elif found:
            _add_figure(found[-1], line)
    return found


def mapped_files(mappings: Iterable[MemoryMapping]) -> dict[str, int]:
    """The files among the mappings, each with its start address."""
    files: dict[str, int] = {}
    for mapping in mappings:
        if mapping.name.startswith("/"):
            files.setdefault(mapping.name, mapping.start)
    return files


def model_libraries(mappings: Iterable[MemoryMapping]) -> tuple[str, ...]:
    """The packages of :data:`MODEL_LIBRARIES` of which compiled parts are mapped."""
    folders = (name.split("/")[1:-1] for name in mapped_files(mappings) if ".so" in name)
    return tuple(sorted({word for words in folders for word in words} & MODEL_LIBRARIES))


def _add_figure(mapping: MemoryMapping, line: str) -> None:
    name, _, value = line.partition(":")
    words = value.split()
    if name == "VmFlags":
        mapping.flags = frozenset(words)
    elif words[1:] == ["kB"]:
        mapping.sizes[name] = int(words[0]) * 1024
