"""What can be told of another process's allocator from outside: less than it could tell itself."""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelguard.environment._known import Found, Kind, Problem, kind_of
from modelguard.environment._problems import Process, background_threads, preloads, problems
from modelguard.errors import InvalidOption, NotSupported

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Observed", "observe"]

#: How jemalloc names its threads, from 5.1 on.
_JEMALLOC_THREAD = "jemalloc_bg_thd"


@dataclass(frozen=True, slots=True)
class Observed:
    """What can be told of a process's allocator from outside.

    Attributes:
        pid: The process.
        kind: What most probably serves ``malloc``: the first allocator that it was started to preload and that is
            loaded, or else its C library. An allocator that was linked into it cannot be seen from outside.
        path: The file of that, empty if none was found.
        preload: What was to be preloaded: the entries of ``LD_PRELOAD`` as the process was started, and those of
            ``/etc/ld.so.preload``. Setting the variable later, from inside, does nothing and cannot be seen.
        mapped: The allocators' libraries that are loaded, the C library among them.
        problems: What is not as it was meant.
    """

    pid: int
    kind: Kind
    path: str
    preload: tuple[str, ...]
    mapped: tuple[Found, ...]
    problems: tuple[Problem, ...]


def observe(pid: int, root: Path = Path("/")) -> Observed:
    """Look at the allocator of another process, from outside and without disturbing it.

    Args:
        pid: The process.
        root: Where ``/proc`` is found.

    Returns:
        What can be told.

    Raises:
        InvalidOption: ``pid`` is not the number of a process.
        ProcessLookupError: There is no such process, or it has exited.
        PermissionError: The process belongs to someone else.
        NotSupported: There is no ``/proc``, as on systems other than Linux.
    """
    if type(pid) is not int or pid < 1:
        why = "it is not the number of a process"
        raise InvalidOption("pid", pid, why=why, fix="Give a positive whole number.")
    folder = root / "proc" / str(pid)
    process = _read(pid, folder, root)
    mapped = tuple(_allocators(process))
    preload = (*preloads(process.environ), *process.system)
    served = _most_probable(process, preload, mapped)
    found = problems(process, process.environ, served.kind, served.path)
    threads = [background_threads()] if _JEMALLOC_THREAD in _threads(folder) else []
    return Observed(pid, served.kind, served.path, preload, mapped, (*found, *threads))


def _read(pid: int, folder: Path, root: Path) -> Process:
    if not (root / "proc" / "self").exists():
        raise NotSupported("looking at another process", reason="there is no /proc")
    try:
        maps, environ = (
            (folder / name).read_text(encoding="utf-8", errors="surrogateescape") for name in ("maps", "environ")
        )
    except PermissionError:
        fix = "look at it as its own user or as root"
        raise PermissionError(errno.EACCES, f"process {pid} belongs to someone else; {fix}") from None
    except (FileNotFoundError, ProcessLookupError):
        maps = environ = ""
    if not maps:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone, or is a part of the kernel")
    return Process.of(maps, environ, folder / "root")


def _allocators(process: Process) -> Iterator[Found]:
    for file in process.files:
        kind = kind_of(file)
        if kind is not None:
            yield Found(kind, file)


def _most_probable(process: Process, preload: tuple[str, ...], mapped: tuple[Found, ...]) -> Found:
    preloaded = [process.loaded(entry) for entry in preload]
    allocators = {found.path: found for found in mapped if found.kind != "glibc"}
    c_library = [found for found in mapped if found.kind == "glibc"]
    first = [allocators[file] for file in preloaded if file in allocators]
    return [*first, *c_library, Found("unknown", "")][0]


def _threads(folder: Path) -> set[str]:
    names = set()
    for task in folder.glob("task/*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            names.add(task.read_text(encoding="utf-8", errors="replace").strip())
    return names
