"""What can be seen of another process's allocator from outside. The process itself could find out more."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelguard import _units
from modelguard.environment import _proc
from modelguard.environment._allocator_kinds import AllocatorFile, Kind, Problem, kind_of
from modelguard.environment._allocator_problems import (
    ProcessView,
    background_threads,
    preload_entries,
    problems,
    system_preloads,
)
from modelguard.environment._mappings import mapped_files
from modelguard.errors import NotSupported

__all__ = ["Observed", "observe"]

#: The name of jemalloc's background threads, since 5.1.
_JEMALLOC_THREAD = "jemalloc_bg_thd"


@dataclass(frozen=True, slots=True)
class Observed:
    """What can be seen of a process's allocator from outside.

    Attributes:
        pid: The process.
        kind: What most probably serves ``malloc``: the first preloaded allocator that is actually loaded, otherwise the
            C library. An allocator that was linked into the program cannot be seen from outside.
        path: The file of that allocator; empty if none was found.
        preload: What should be preloaded: the entries of ``LD_PRELOAD`` when the process started, and those of
            ``/etc/ld.so.preload``. Setting the variable later, from inside, has no effect and cannot be seen.
        mapped: The allocators' libraries that are loaded, including the C library.
        problems: What is not as intended.
    """

    pid: int
    kind: Kind
    path: str
    preload: tuple[str, ...]
    mapped: tuple[AllocatorFile, ...]
    problems: tuple[Problem, ...]


def observe(pid: int, *, root: Path = _proc.ROOT) -> Observed:
    """Inspect the allocator of another process from outside, without disturbing the process.

    Args:
        pid: The process.
        root: The folder that holds ``proc``.

    Returns:
        What can be seen.

    Raises:
        InvalidOption: ``pid`` is not a process id.
        ProcessLookupError: There is no such process, or it has exited.
        PermissionError: The process belongs to another user.
        NotSupported: There is no ``/proc``, as on systems other than Linux.
    """
    _units.process_id(pid, "pid")
    process = _read(pid, root)
    mapped = tuple(_allocators(process))
    preload = (*preload_entries(process.environ), *process.system)
    served = _most_probable(process, preload, mapped)
    found = problems(process, process.environ, served.kind, served.path)
    names = _proc.if_readable(_proc.thread_names, pid, root) or {}
    threads = [background_threads()] if _JEMALLOC_THREAD in names.values() else []
    return Observed(pid, served.kind, served.path, preload, mapped, (*found, *threads))


def _read(pid: int, root: Path) -> ProcessView:
    if not _proc.is_mounted(root):
        raise NotSupported("inspecting another process", reason="there is no /proc")
    try:
        mappings, environ = _proc.maps(pid, root), _proc.environment(pid, root)
    except PermissionError:
        fix = "inspect it as its owner or as root"
        raise PermissionError(errno.EACCES, f"process {pid} belongs to another user; {fix}") from None
    except (FileNotFoundError, ProcessLookupError):
        mappings, environ = [], {}
    if not mappings:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} does not exist, or is a kernel thread")
    own_root = _proc.folder(pid, root) / "root"
    return ProcessView(mapped_files(mappings), environ, system_preloads(own_root), own_root)


def _allocators(process: ProcessView) -> Iterator[AllocatorFile]:
    for file in process.files:
        kind = kind_of(file)
        if kind is not None:
            yield AllocatorFile(kind, file)


def _most_probable(process: ProcessView, preload: tuple[str, ...], mapped: tuple[AllocatorFile, ...]) -> AllocatorFile:
    preloaded = [process.loaded(entry) for entry in preload]
    allocators = {found.path: found for found in mapped if found.kind != "glibc"}
    c_library = [found for found in mapped if found.kind == "glibc"]
    first = [allocators[file] for file in preloaded if file in allocators]
    return [*first, *c_library, AllocatorFile("unknown", "")][0]
