"""What is not as it was meant: a preload that is not in force, an allocator that serves nobody, a setting not read."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from modelguard.environment._cgroups import text
from modelguard.environment._known import How, Kind, Problem, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Process", "background_threads", "how", "preloads", "problems", "this_process"]

_SETTINGS = "MALLOC_CONF"

#: What the kernel puts behind the name of a file that was removed or replaced.
_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class Process:
    """What ``/proc`` tells of a process.

    Attributes:
        files: The files that are mapped into it, each with the address where it begins.
        environ: The variables that it was started with. A program that writes its title over them leaves none, and
            one that has given up rights may not read its own.
        system: The entries of ``/etc/ld.so.preload``, which are preloaded into every program.
        root: Where its files are found.
        executable: The program's own file, empty if that cannot be read.
    """

    files: Mapping[str, int]
    environ: Mapping[str, str]
    system: tuple[str, ...]
    root: Path
    executable: str

    @classmethod
    def of(cls, maps: str, environ: str, root: Path, executable: str = "") -> Process:
        """Make it of what its files in ``/proc`` say.

        Args:
            maps: What is mapped, empty if that cannot be read.
            environ: What it was started with, empty if that cannot be read.
            root: Where its files are found.
            executable: What ``exe`` links to.
        """
        return cls(_files(maps), _variables(environ), _system_wide(root), root, executable.removesuffix(_DELETED))

    def file_at(self, address: int | None) -> str | None:
        """The file that begins at an address."""
        return next((file for file, start in self.files.items() if start == address), None)

    def loaded(self, entry: str) -> str | None:
        """The mapped file that an entry of ``LD_PRELOAD`` means."""
        if entry in self.files:
            return entry
        return next((file for file in self.files if self._means(entry, file)), None)

    def has(self, path: str) -> bool:
        """Whether there is such a file."""
        with suppress(OSError):
            return (self.root / path.lstrip("/")).exists()
        return True  # in a folder that cannot be looked into

    def _means(self, entry: str, file: str) -> bool:
        if not entry.startswith("/") or "$" in entry:
            # A name that the dynamic linker has searched for: libjemalloc.so means libjemalloc.so.2, too.
            return PurePosixPath(file).name.startswith(PurePosixPath(entry).name)
        with suppress(OSError):
            return (self.root / entry.lstrip("/")).samefile(self.root / file.lstrip("/"))
        return False


def this_process(root: Path) -> Process:
    """Read what ``/proc`` tells of this process; what cannot be read is left empty.

    Args:
        root: Where ``/proc`` and ``/etc`` are found.
    """
    folder = root / "proc" / "self"
    executable = ""
    with suppress(OSError):
        executable = str((folder / "exe").readlink())
    return Process.of(text(folder / "maps"), text(folder / "environ"), root, executable)


def how(process: Process, environ: Mapping[str, str], path: str) -> How:
    """Tell how the file that serves ``malloc`` came into a process.

    Args:
        process: The process.
        environ: Its variables as they are now.
        path: The file, as it is mapped.
    """
    if any(process.loaded(entry) == path for entry in _wanted(process, environ)):
        return "preloaded"
    return "static" if path == process.executable else "linked"


def preloads(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Give the entries of ``LD_PRELOAD``, which blanks or colons separate."""
    return tuple(entry for entry in re.split(r"[\s:]+", environ.get("LD_PRELOAD", "")) if entry)


def problems(process: Process, environ: Mapping[str, str], kind: Kind, path: str) -> Iterator[Problem]:
    """Find what is not as it was meant.

    Args:
        process: The process.
        environ: Its variables as they are now, as far as they are known.
        kind: The allocator that serves ``malloc``.
        path: Its file, as it is mapped.

    Yields:
        Each problem, preloads first.
    """
    files = {entry: process.loaded(entry) for entry in _wanted(process, environ)}
    for entry, file in files.items():
        if file is None:
            yield _not_loaded(process, entry)
        elif file != path and kind_of(file) not in (None, "glibc"):
            yield _not_serving(entry, file, path, preloaded=path in files.values())
    for file in process.files:
        if file not in (path, *files.values()) and kind_of(file) not in (None, "glibc"):
            yield _private_copy(file, path)
    yield from _settings(process, environ, kind, path)


def background_threads() -> Problem:
    """Make the problem that jemalloc runs threads of its own."""
    return Problem(
        "background threads",
        "jemalloc runs background threads (background_thread:true), which no forked child gets: there, and with "
        "preload_app in every worker, freed memory goes back only when the worker itself allocates",
        "Where workers are forked, take background_thread:true out of MALLOC_CONF.",
    )


def _wanted(process: Process, environ: Mapping[str, str]) -> dict[str, None]:
    """What is to be preloaded. A process may have changed its variable since, or written a title over the old one."""
    return dict.fromkeys((*preloads(process.environ), *preloads(environ), *process.system))


def _not_loaded(process: Process, entry: str) -> Problem:
    if entry.startswith("/") and "$" not in entry and not process.has(entry):
        return Problem(
            "missing",
            f"LD_PRELOAD names {entry}, and there is no such file",
            "Correct the path, or let 'modelguard run --allocator auto -- COMMAND' find one that is installed.",
        )
    if entry in (*preloads(process.environ), *process.system):
        return Problem(
            "placebo",
            f"LD_PRELOAD named {entry} when the process started, and the dynamic linker could not load it",
            "Install the library for this machine and this system's C library; the first lines on stderr say more.",
        )
    return Problem("placebo", f"LD_PRELOAD names {entry}, and it is not loaded", _set_earlier(kind_of(entry)))


def _not_serving(entry: str, file: str, path: str, *, preloaded: bool) -> Problem:
    if preloaded:
        return Problem(
            "two allocators",
            f"{entry} is preloaded, and so is {path}, which serves malloc",
            f"Preload one of them: the first wins, and {file} only takes memory and time.",
        )
    return Problem("placebo", f"LD_PRELOAD names {entry}, and malloc is served by {path}", _set_earlier(kind_of(file)))


def _set_earlier(kind: Kind | None) -> str:
    allocator = "" if kind is None else f", or start it by 'modelguard run --allocator {kind} -- COMMAND'"
    return (
        "The variable is read when a program starts, so setting it from inside, as in gunicorn's raw_env, does "
        f"nothing. Set it in the shell, the unit file or the image{allocator}."
    )


def _private_copy(file: str, path: str) -> Problem:
    return Problem(
        "private copy",
        f"{file} is loaded, and malloc is served by {path}: only the package that brought it uses it",
        f"Nothing, if that is meant. To have {kind_of(file)} serve the process, preload the system's: "
        f"'modelguard run --allocator {kind_of(file)} -- COMMAND'.",
    )


def _settings(process: Process, environ: Mapping[str, str], kind: Kind, path: str) -> Iterator[Problem]:
    if kind != "jemalloc" and (environ.get(_SETTINGS) or process.environ.get(_SETTINGS)):
        yield Problem(
            "unused setting",
            f"{_SETTINGS} is set, and malloc is served by {path}, which does not read it",
            f"Preload jemalloc ('modelguard run --allocator jemalloc -- COMMAND'), or take {_SETTINGS} away.",
        )
    # Only where the variables at the start are known, which some of the present ones then prove.
    elif process.environ.keys() & environ.keys() and _too_late(process.environ, environ):
        yield Problem(
            "unused setting",
            f"{_SETTINGS} was set or changed after the process had started, and jemalloc reads it only then",
            f"Set {_SETTINGS} before the process starts.",
        )


def _too_late(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return _SETTINGS in now and now[_SETTINGS] != before.get(_SETTINGS)


def _files(maps: str) -> dict[str, int]:
    """The mapped files of ``/proc/PID/maps`` and where each begins."""
    files: dict[str, int] = {}
    for line in maps.splitlines():
        # "7f12-7f34 r-xp 00001000 08:02 173521   /usr/lib/libc.so.6"; what is no file has no name or "[heap]".
        address, _, rest = line.partition("-")
        path = rest[rest.find("/") :].removesuffix(_DELETED) if "/" in rest else ""
        if path:
            files.setdefault(path, int(address, 16))
    return files


def _variables(environ: str) -> dict[str, str]:
    pairs = (variable.partition("=") for variable in environ.split("\0"))
    return {name: value for name, is_one, value in pairs if is_one}


def _system_wide(root: Path) -> tuple[str, ...]:
    lines = text(root / "etc" / "ld.so.preload").splitlines()
    return tuple(entry for line in lines for entry in re.split(r"[\s:]+", line.partition("#")[0]) if entry)
