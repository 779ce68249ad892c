"""What a process shows from outside, Python or not: where its memory is, and its files, threads and children."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from modelguard._units import format_bytes
from modelguard.diagnosis._compiled import compiled_in
from modelguard.environment import _proc, _remote
from modelguard.environment._mappings import MemoryMapping
from modelguard.errors import ModelGuardError
from modelguard.facts.growth import judge

__all__ = ["allocator_of", "counts_of", "grown_counts", "kinds_of", "moved"]

#: So many more of something, in the whole time, are growth.
_FEW = 10
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


def counts_of(pid: int, root: Path = _proc.ROOT) -> dict[str, int]:
    """How many threads, children and open files of each kind a process has.

    Args:
        pid: The process.
        root: The folder that holds ``proc``.
    """
    found = Counter({"threads": int((_proc.if_readable(_proc.status, pid, root) or {}).get("Threads", "0"))})
    found["child processes"] = sum(each.parent == pid for each in _proc.processes(root).values())
    found.update(map(_kind_of_file, (_proc.if_readable(_proc.open_files, pid, root) or {}).values()))
    return dict(found)


def _kind_of_file(name: str) -> str:
    """``socket:[4711]`` and ``anon_inode:[eventpoll]`` are kinds of their own; of files only that they are files."""
    if name.startswith("anon_inode:"):
        return f"open {re.sub('[^a-z]', '', name.removeprefix('anon_inode:'))} descriptors"
    kind = re.match("(socket|pipe):", name)
    return f"open {kind[1]}s" if kind else "open files"


def grown_counts(times: Sequence[float], counts: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """What has become more and more, each in a sentence.

    Args:
        times: The milliseconds of the readings.
        counts: What :func:`counts_of` has found at each of them.
    """
    for kind in dict.fromkeys(itertools.chain.from_iterable(counts)):
        numbers = [each.get(kind, 0) for each in counts]
        if judge(times, numbers, least=_FEW).verdict == "grows":
            seconds = (times[-1] - times[0]) / 1000
            yield f"{kind} grow: from {numbers[0]:,} to {numbers[-1]:,} in {seconds:.0f} seconds"


def allocator_of(pid: int) -> str:
    """What most probably serves ``malloc``; empty if that cannot be seen."""
    with suppress(ModelGuardError, OSError):
        return _remote.observe(pid).kind
    return ""
