"""Whether data lies in a file that is mapped, so that all processes that map it share the memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from modelguard._units import format_bytes
from modelguard.errors import WeightsRefused
from modelguard.sharing._mappings import Mapping, mappings

__all__ = ["Block", "mapped_bytes", "require"]

#: How many names a message lists.
_NAMED = 3


class Block(NamedTuple):
    """Data of a model.

    Attributes:
        name: What the model calls it.
        start: Its address.
        size: Bytes.
    """

    name: str
    start: int
    size: int


def require(blocks: Iterable[Block], files: Iterable[Path], *, fix: str, maps: Path = Path("/proc/self/maps")) -> None:
    """Refuse data that does not lie in the mappings of files.

    Where there is no ``/proc``, as on macOS, this cannot be told, and nothing is refused.

    Raises:
        WeightsRefused: Some of it lies elsewhere, so each process has a copy of its own.
    """
    files = list(files)
    found = _of(files, maps)
    if found is None:
        return
    outside = [block for block in blocks if block.size and not _inside(block, found)]
    if outside:
        names = ", ".join(block.name for block in outside[:_NAMED]) + (", ..." if len(outside) > _NAMED else "")
        size = format_bytes(sum(block.size for block in outside))
        why = f"{size} of the model do not lie in the mapped file, so each process would hold its own copy: {names}"
        raise WeightsRefused(files[0].parent, why=why, fix=fix)


def mapped_bytes(file: Path, *, maps: Path = Path("/proc/self/maps")) -> int | None:
    """How much of a file is mapped into this process; None where that cannot be told."""
    found = _of([file], maps)
    return None if found is None else sum(mapping.end - mapping.start for mapping in found)


def _of(files: Iterable[Path], maps: Path) -> list[Mapping] | None:
    try:
        text = maps.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    # By the end of the name: it holds the content's hash, while devices and inodes of layered file systems differ
    # between here and stat(). A version that was removed in the meantime is still mapped.
    ends = {f"/{file.parent.name}/{file.name}" for file in files}
    # One that is shared and writable would let a process write into the file: that is no place for weights.
    return [one for one in mappings(text) if _tail(one.name) in ends and one.access != "rw-s"]


def _tail(name: str) -> str:
    parts = name.removesuffix(" (deleted)").rsplit("/", 2)
    return "/" + "/".join(parts[1:])


def _inside(block: Block, found: Iterable[Mapping]) -> bool:
    # The kernel splits a mapping where a page of it was protected otherwise, so the ends are looked at each.
    return all(
        any(mapping.start <= address < mapping.end for mapping in found)
        for address in (block.start, block.start + block.size - 1)
    )
