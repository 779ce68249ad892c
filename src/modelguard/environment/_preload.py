"""Choose the allocator of a program that is about to be started, and the variables that select it."""

from __future__ import annotations

import difflib
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from modelguard.environment import _allocator, _allocator_files, _knobs
from modelguard.environment._allocator_files import RUNNING
from modelguard.environment._program import binary, ignores_preload, is_static
from modelguard.errors import InvalidOption, NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from modelguard.environment._allocator import AllocatorInfo
    from modelguard.environment._allocator_kinds import AllocatorFile

__all__ = ["PRELOAD", "Allocator", "choose"]

#: ``"auto"``: the best one that is installed, otherwise the same as ``"glibc"``. ``"glibc"``: nothing is preloaded, and
#: glibc is set to return freed memory. ``"none"``: nothing is changed.
Allocator = Literal["auto", "jemalloc", "mimalloc", "tcmalloc", "glibc", "none"]

PRELOAD = "LD_PRELOAD"

_ARGUMENT = "allocator"

#: The allocators' packages in Debian and Ubuntu.
_PACKAGES: dict[Allocator, str] = {
    "jemalloc": "libjemalloc2",
    "mimalloc": "libmimalloc2.0",
    "tcmalloc": "libtcmalloc-minimal4",
}

#: For reloads and CPU time see ``docs/environment.md``, "The allocator".
_KEEPS = (
    "mimalloc keeps most of the memory that reloads free; MIMALLOC_RESET_DELAY=0 (from 2.1 on MIMALLOC_PURGE_DELAY=0) "
    "makes it return this memory, at up to 1.6 times the CPU time; jemalloc returns it without that: "
    f"apt install {_PACKAGES['jemalloc']}"
)

#: The settings that make mimalloc return freed pages immediately: of 2.0 and earlier, and of 2.1 and later.
_RETURNING = ("MIMALLOC_RESET_DELAY", "MIMALLOC_DECOMMIT_DELAY", "MIMALLOC_PURGE_DELAY")

_NONE_USABLE = (
    "no other allocator can be preloaded, so glibc stays and is set to return freed memory, at some cost of CPU time; "
    f"to use jemalloc instead: apt install {_PACKAGES['jemalloc']}"
)


def choose(
    wanted: Allocator,
    program: str,
    environ: Mapping[str, str],
    *,
    arguments: Sequence[str] = (),
    detect: Callable[[], AllocatorInfo] = _allocator.detect,
    find: Callable[..., Sequence[AllocatorFile]] = _allocator_files.find,
    check: Callable[..., None] = _allocator_files.check_preload,
) -> tuple[dict[str, str], list[str]]:
    """Choose the variables that give a program its allocator.

    Args:
        wanted: The allocator.
        program: The file that will be executed.
        environ: The variables that the program would get otherwise.
        arguments: Its arguments. A static program with arguments, such as gosu, may start another program, which the
            preload is then meant for.
        detect: Describes the allocator of this process, where the caller's ``LD_PRELOAD`` is already in force.
        find: Lists the libraries that are installed and that a program can load, best first.
        check: Rejects a library that must not be preloaded into a program.

    Returns:
        The variables to set, and what the user should know, one sentence each.

    Raises:
        InvalidOption: The allocator is unknown, is not installed, or must not be preloaded.
        NotSupported: An allocator was named, but nothing can be preloaded into this program or on this system.
    """
    _require_known(wanted)
    if wanted == "none":
        return {}, []
    if obstacle := _obstacle(program, starts_others=bool(arguments)):
        return _without(wanted, obstacle)
    current = detect()
    if current.how == "preloaded":
        return {}, [f"{current.path} is preloaded already and serves malloc; it stays, and nothing is added"]
    file = binary(program)
    passed_on = [_passed_on(file)] if is_static(file) else []
    if wanted == "glibc":
        return _glibc(environ), passed_on
    kind = None if wanted == "auto" else wanted
    # Which program a static one starts is unknown; most probably it is one like this.
    target = RUNNING if passed_on else Path(file)
    suitable = find(kind, environ=environ, program=target)
    if not suitable and (unsuitable := find(kind, environ=environ)):
        return _without(wanted, f"{file} cannot load {unsuitable[0].path}, which is for another C library or machine")
    variables, notes = _preload(wanted, environ, suitable, functools.partial(check, program=target))
    return variables, [*passed_on, *notes]


def _require_known(wanted: str) -> None:
    known = get_args(Allocator)
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=1)
        fix = f'Did you mean "{near[0]}"?' if near else f"Write one of {', '.join(known)}."
        raise InvalidOption(_ARGUMENT, wanted, why="is not a known allocator", fix=fix)


def _obstacle(program: str, *, starts_others: bool) -> str | None:
    if not sys.platform.startswith("linux"):
        return f"LD_PRELOAD requires Linux, and this is {sys.platform}"
    return ignores_preload(program, starts_others=starts_others)


def _passed_on(file: str) -> str:
    return f"{file} is statically linked, so the allocator changes only in the programs that it starts"


def _without(wanted: Allocator, reason: str) -> tuple[dict[str, str], list[str]]:
    """Continue without a preload, unless the user has named a library."""
    if wanted in _PACKAGES:
        raise NotSupported(f"preloading {wanted}", reason=reason)
    return {}, [f"the allocator is not changed: {reason}"]


def _preload(
    wanted: Allocator, environ: Mapping[str, str], candidates: Sequence[AllocatorFile], check: Callable[..., None]
) -> tuple[dict[str, str], list[str]]:
    library, rejections = _usable(candidates, check)
    notes = [str(rejection) for rejection in rejections]
    if library is not None:
        if library.kind == "mimalloc" and not any(name in environ for name in _RETURNING):
            notes.append(_KEEPS)
        return {PRELOAD: _joined(environ.get(PRELOAD, ""), library.path)}, notes
    if wanted == "auto":
        return _glibc(environ), [*notes, _NONE_USABLE]
    raise rejections[0] if rejections else _not_installed(wanted)


def _glibc(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make glibc return freed memory; the user's own values take precedence."""
    return {knob.name: knob.value for knob in _knobs.glibc_memory() if knob.name not in environ}


def _usable(
    candidates: Sequence[AllocatorFile], check: Callable[..., None]
) -> tuple[AllocatorFile | None, list[InvalidOption]]:
    """The first library that may be preloaded, and the reasons against those before it."""
    rejections: list[InvalidOption] = []
    for candidate in candidates:
        try:
            check(candidate.path, argument=_ARGUMENT)
        except InvalidOption as rejection:
            rejections.append(rejection)
        else:
            return candidate, rejections
    return None, rejections


def _joined(entries: str, path: str) -> str:
    """Add a library after the caller's own entries."""
    return f"{entries}:{path}" if entries else path


def _not_installed(wanted: Allocator) -> InvalidOption:
    fix = f'Install it (Debian, Ubuntu: apt install {_PACKAGES[wanted]}), or write "auto".'
    return InvalidOption(_ARGUMENT, wanted, why="is not installed", fix=fix)
