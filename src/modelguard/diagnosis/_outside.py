"""What a process shows of its memory from outside, Python or not."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from modelguard._units import format_bytes
from modelguard.diagnosis._compiled import compiled_in
from modelguard.environment import _proc, _remote
from modelguard.environment._mappings import MemoryMapping
from modelguard.errors import ModelGuardError

__all__ = ["allocator_of", "kinds_of", "moved"]

#: Kinds of memory with less growth are not shown.
_SMALL = 500_000
#: glibc gives each further arena an address range of this size, at a multiple of it.
_ARENA = 64 * 2**20
_PAGE = 4096
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")  # noqa: S108 - where the kernel shows shared memory


def kinds_of(pid: int, root: Path = _proc.ROOT) -> dict[str, int]:
    """The private memory of a process by what it is for, in bytes.

    Args:
        pid: The process.
        root: The folder that holds ``proc``.
    """
    mappings = _proc.if_readable(_proc.smaps, pid, root) or []
    found: Counter[str] = Counter()
    before: MemoryMapping | None = None
    for mapping, after in itertools.zip_longest(mappings, mappings[1:]):
        found[_kind(before, mapping, after)] += _held(mapping)
        before = mapping
    return dict(found)


def _held(mapping: MemoryMapping) -> int:
    """What the system would get back if the process ended, as private memory is counted."""
    dirty = mapping.sizes.get("Private_Dirty", 0)
    if not mapping.name.startswith(_SHARED):
        dirty = min(dirty, mapping.sizes.get("Anonymous", dirty))
    return dirty + mapping.sizes.get("SwapPss", mapping.sizes.get("Swap", 0))


def _kind(before: MemoryMapping | None, one: MemoryMapping, after: MemoryMapping | None) -> str:
    """What a mapping is for. Ranges without access, before and after it, tell stacks and arenas."""
    if one.name.startswith(_SHARED):
        return "shared memory"
    if compiled_in([one]):
        return "machine code compiled at run time"
    if one.is_file or one.name == "[heap]":
        return "changed pages of files" if one.is_file else "the heap of malloc"
    return _anonymous(before, one, after)


def _anonymous(before: MemoryMapping | None, one: MemoryMapping, after: MemoryMapping | None) -> str:
    if after is not None and _is_barred(after) and one.start % _ARENA == 0 and after.end % _ARENA == 0:
        return "malloc's arenas of threads"
    guarded = before is not None and _is_barred(before) and before.end - before.start == _PAGE
    if one.name.startswith("[stack") or (guarded and before is not None and before.end == one.start):
        return "stacks of threads"
    return "anonymous memory (Python's objects, large blocks, other allocators)"


def _is_barred(mapping: MemoryMapping) -> bool:
    return mapping.access.startswith("---") and not mapping.name


def moved(first: Mapping[str, int], last: Mapping[str, int]) -> str:
    """By how much each kind of memory has grown, in words; empty if none has."""
    more = {kind: size - first.get(kind, 0) for kind, size in last.items()}
    most = sorted(more.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} +{format_bytes(size)}" for kind, size in most if size >= _SMALL)


def allocator_of(pid: int) -> str:
    """What most probably serves ``malloc``; empty if that cannot be seen."""
    with suppress(ModelGuardError, OSError):
        return _remote.observe(pid).kind
    return ""
