"""Find problems with the allocator of a process.

Such as a preload that is not in force, an allocator that is loaded but not used, or a setting that nothing reads.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from modelguard import _units
from modelguard.environment._allocator_files import AllocatorFile, How, Kind, Problem, SmallObjects, kind_of
from modelguard.errors import NotSupported
from modelguard.facts import _memory, _proc
from modelguard.facts._proc import mapped_files

_SETTINGS = "MALLOC_CONF"


@dataclass(frozen=True, slots=True)
class ProcessView:
    """What ``/proc`` shows about the allocator of a process."""

    files: Mapping[str, int]  # that are mapped into it, each with its start address
    #: What it was started with; empty if its title has overwritten it, or it has dropped the right to read its own.
    environ: Mapping[str, str]
    system: tuple[str, ...]  # the entries of ``/etc/ld.so.preload``
    root: Path
    executable: str = ""

    def file_at(self, address: int | None) -> str | None:
        return next((file for file, start in self.files.items() if start == address), None)

    def loaded(self, entry: str) -> str | None:
        """The mapped file for an entry of ``LD_PRELOAD``; None if it is not loaded."""
        if entry in self.files:
            return entry
        return next((file for file in self.files if self._is_entry(entry, file)), None)

    def exists(self, path: str) -> bool:
        with suppress(OSError):
            return (self.root / path.lstrip("/")).exists()
        return True  # in a folder that this user may not read

    def _is_entry(self, entry: str, file: str) -> bool:
        if not entry.startswith("/") or "$" in entry:
            # A name that the dynamic linker has searched for: libjemalloc.so also matches libjemalloc.so.2.
            return PurePosixPath(file).name.startswith(PurePosixPath(entry).name)
        with suppress(OSError):
            return (self.root / entry.lstrip("/")).samefile(self.root / file.lstrip("/"))
        return False


def this_process(root: Path = _proc.ROOT) -> ProcessView:
    """Read what ``/proc`` shows about this process; what cannot be read is left empty."""
    return ProcessView(
        files=mapped_files(_proc.if_readable(_proc.maps, None, root) or ()),
        environ=_proc.if_readable(_proc.environment, None, root) or {},
        system=system_preloads(root),
        root=root,
        executable=_proc.if_readable(_proc.executable, None, root) or "",
    )


def system_preloads(root: Path) -> tuple[str, ...]:
    """The entries of ``/etc/ld.so.preload``, without comments."""
    lines = _memory.text(root / "etc" / "ld.so.preload").splitlines()
    return tuple(entry for line in lines for entry in entries(line.partition("#")[0]))


def preload_entries(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(entries(environ.get("LD_PRELOAD", "")))


def how(process: ProcessView, environ: Mapping[str, str], path: str) -> How:
    if any(process.loaded(entry) == path for entry in _wanted(process, environ)):
        return "preloaded"
    return "static" if path == process.executable else "linked"


def problems(process: ProcessView, environ: Mapping[str, str], kind: Kind, path: str) -> Iterator[Problem]:
    """Find what is not as intended."""
    files = {entry: process.loaded(entry) for entry in _wanted(process, environ)}
    for entry, file in files.items():
        if file is None:
            yield _not_loaded(process, entry)
        elif file != path and kind_of(file) not in (None, "glibc"):
            yield _not_in_use(entry, file, path, preloaded=path in files.values())
    for file in process.files:
        if file not in (path, *files.values()) and kind_of(file) not in (None, "glibc"):
            yield _private_copy(file, path)
    yield from _settings(process, environ, kind, path)


def background_threads() -> Problem:
    return Problem(
        "background threads",
        "jemalloc runs background threads (background_thread:true), which no forked child gets: in a child, and with "
        "preload_app in every worker, freed memory is returned only when the process itself allocates",
        "If workers are forked, remove background_thread:true from MALLOC_CONF.",
    )


def entries(text: str) -> list[str]:
    """The files that a value of ``LD_PRELOAD`` names."""
    return [entry for entry in re.split(r"[\s:]+", text) if entry]


def _wanted(process: ProcessView, environ: Mapping[str, str]) -> dict[str, None]:
    """The entries that should be preloaded. A process may have changed its variable, or overwritten the old one."""
    return dict.fromkeys((*preload_entries(process.environ), *preload_entries(environ), *process.system))


def _not_loaded(process: ProcessView, entry: str) -> Problem:
    if entry.startswith("/") and "$" not in entry and not process.exists(entry):
        return Problem(
            "missing",
            f"LD_PRELOAD names {entry}, which does not exist",
            "Correct the path, or use 'modelguard run --allocator auto -- COMMAND', which finds an installed one.",
        )
    if entry in (*preload_entries(process.environ), *process.system):
        return Problem(
            "placebo",
            f"LD_PRELOAD named {entry} when the process started, but the dynamic linker could not load it",
            "Install the library for this machine and its C library; the first lines on stderr say more.",
        )
    return Problem("placebo", f"LD_PRELOAD names {entry}, but it is not loaded", _set_earlier(kind_of(entry)))


def _not_in_use(entry: str, file: str, path: str, *, preloaded: bool) -> Problem:
    if preloaded:
        return Problem(
            "two allocators",
            f"{entry} is preloaded, and so is {path}, which serves malloc",
            f"Preload only one of them: the first is used, and {file} only takes memory and time.",
        )
    return Problem("placebo", f"LD_PRELOAD names {entry}, but malloc is served by {path}", _set_earlier(kind_of(file)))


def _set_earlier(kind: Kind | None) -> str:
    allocator = "" if kind is None else f", or start it with 'modelguard run --allocator {kind} -- COMMAND'"
    return (
        "The variable is read when a program starts, so setting it from inside, as with gunicorn's raw_env, has no "
        f"effect. Set it in the shell, the unit file or the image{allocator}."
    )


def _private_copy(file: str, path: str) -> Problem:
    return Problem(
        "private copy",
        f"{file} is loaded, but malloc is served by {path}: only the package that bundles it uses it",
        f"If this is intended, do nothing. To make {kind_of(file)} serve the process, preload the system's copy: "
        f"'modelguard run --allocator {kind_of(file)} -- COMMAND'.",
    )


def _settings(process: ProcessView, environ: Mapping[str, str], kind: Kind, path: str) -> Iterator[Problem]:
    before = process.environ.get(_SETTINGS)
    if kind != "jemalloc" and (environ.get(_SETTINGS) or before):
        yield Problem(
            "unused setting",
            f"{_SETTINGS} is set, but malloc is served by {path}, which does not read it",
            f"Preload jemalloc ('modelguard run --allocator jemalloc -- COMMAND'), or remove {_SETTINGS}.",
        )
    # Compare only if the variables at the start are known. They are if some of them are still set.
    elif process.environ.keys() & environ.keys() and environ.get(_SETTINGS, before) != before:
        yield Problem(
            "unused setting",
            f"{_SETTINGS} was set or changed after the process had started, but jemalloc reads it only at the start",
            f"Set {_SETTINGS} before the process starts.",
        )


# What can be seen of another process's allocator from outside. The process itself could find out more.

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
    mapped = tuple(AllocatorFile(kind, file) for file in process.files if (kind := kind_of(file)) is not None)
    preload = (*preload_entries(process.environ), *process.system)
    known = {one.path: one for one in mapped if one.kind != "glibc"}
    first = [known[file] for entry in preload if (file := process.loaded(entry)) in known]
    c_library = [one for one in mapped if one.kind == "glibc"]
    served = [*first, *c_library, AllocatorFile("unknown", "")][0]
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
        raise _proc.not_permitted(pid) from None
    except (FileNotFoundError, ProcessLookupError):
        mappings, environ = [], {}
    if not mappings:
        raise _proc.not_found(pid)
    own_root = _proc.folder(pid, root) / "root"
    return ProcessView(mapped_files(mappings), environ, system_preloads(own_root), own_root)


# Which allocator serves Python's own small objects, in front of ``malloc``.

_NAMES: dict[str, SmallObjects] = {"pymalloc": "pymalloc", "mimalloc": "mimalloc", "malloc": "malloc"}


def small_objects(name: str | None = None, environ: Mapping[str, str] = os.environ) -> SmallObjects:
    known = _NAMES.get((name or _reported() or "").removesuffix("_debug"))
    if known is not None:
        return known
    # A profiler such as tracemalloc hides the allocator behind it. Only pymalloc counts its blocks.
    if sys.getallocatedblocks():
        return "pymalloc"
    return "mimalloc" if environ.get("PYTHONMALLOC", "").startswith("mimalloc") else "malloc"


def _reported() -> str | None:
    """The allocator that CPython reports; None if it reports none."""
    import ctypes

    name = getattr(ctypes.pythonapi, "_PyMem_GetCurrentAllocatorName", None)
    if name is None:
        return None
    name.restype = ctypes.c_char_p
    found = name()
    return None if found is None else str(found.decode())
