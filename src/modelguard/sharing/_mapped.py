"""Check whether data is in a mapped file, so that all processes that map the file share the memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from modelguard._units import format_bytes
from modelguard.environment import _proc
from modelguard.environment._mappings import MemoryMapping
from modelguard.errors import WeightsRefused

__all__ = ["Block", "mapped_bytes", "require"]

#: How many names a message lists.
_NAMED = 3


class Block(NamedTuple):
    """Data of a model.

    Attributes:
        name: Its name in the model.
        start: Its address.
        size: Bytes.
    """

    name: str
    start: int
    size: int


def require(blocks: Iterable[Block], files: Iterable[Path], *, fix: str, root: Path = _proc.ROOT) -> None:
    """Reject data that is not in the mappings of files.

    Without ``/proc``, as on macOS, this cannot be checked, and all data is accepted.

    Args:
        blocks: The data of a model.
        files: The files that should contain it.
        fix: What to do about other data, for the error.
        root: The folder that holds ``proc``.

    Raises:
        WeightsRefused: Some of the data is elsewhere, so each process would have its own copy.
    """
    files = list(files)
    found = _mappings_of(files, root)
    if found is None:
        return
    outside = [block for block in blocks if block.size and not _inside(block, found)]
    if outside:
        names = ", ".join(block.name for block in outside[:_NAMED]) + (", ..." if len(outside) > _NAMED else "")
        size = format_bytes(sum(block.size for block in outside))
        why = f"{size} of the model are not in the mapped file, so each process would have its own copy: {names}"
        raise WeightsRefused(files[0].parent, why=why, fix=fix)


def mapped_bytes(file: Path, *, root: Path = _proc.ROOT) -> int | None:
    """How many bytes of a file are mapped into this process; None without ``/proc``."""
    found = _mappings_of([file], root)
    return None if found is None else sum(mapping.end - mapping.start for mapping in found)


def _mappings_of(files: Iterable[Path], root: Path) -> list[MemoryMapping] | None:
    mappings = _proc.if_readable(_proc.maps, None, root)
    if mappings is None:
        return None
    # Compared by the end of the name, which contains the content's hash. Devices and inodes would not do: on layered
    # file systems they differ between maps and stat(). A version that was removed in the meantime is still mapped.
    ends = {f"/{file.parent.name}/{file.name}" for file in files}
    # With a shared and writable mapping a process could write into the file, so it must not be used for weights.
    return [mapping for mapping in mappings if _end(mapping.name) in ends and mapping.access != "rw-s"]


def _end(name: str) -> str:
    return "/" + "/".join(name.rsplit("/", 2)[1:])


def _inside(block: Block, found: Iterable[MemoryMapping]) -> bool:
    # Both ends are checked: the kernel splits a mapping if some of its pages have another protection.
    return all(
        any(mapping.start <= address < mapping.end for mapping in found)
        for address in (block.start, block.start + block.size - 1)
    )
