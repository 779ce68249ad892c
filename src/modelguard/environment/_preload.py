"""Which allocator a program gets that is about to be started, and by which variables."""

from __future__ import annotations

import difflib
import sys
from typing import TYPE_CHECKING, Literal, get_args

from modelguard.environment import _allocator, _allocator_files, _knobs
from modelguard.environment._program import ignores_preload
from modelguard.errors import InvalidOption, NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from modelguard.environment._allocator import AllocatorInfo
    from modelguard.environment._allocator_kinds import AllocatorFile

__all__ = ["PRELOAD", "Allocator", "choose"]

#: ``"auto"``: the best one that is installed, otherwise the same as ``"glibc"``. ``"glibc"``: nothing is preloaded, and
#: glibc is set to give memory back. ``"none"``: allocators are left alone.
Allocator = Literal["auto", "jemalloc", "mimalloc", "tcmalloc", "glibc", "none"]

PRELOAD = "LD_PRELOAD"

_ARGUMENT = "allocator"

#: Their packages in Debian and Ubuntu.
_PACKAGES: dict[Allocator, str] = {
    "jemalloc": "libjemalloc2",
    "mimalloc": "libmimalloc2.0",
    "tcmalloc": "libtcmalloc-minimal4",
}

_NONE_USABLE = (
    "no other allocator can be preloaded, so glibc stays and is set to give memory back, at some CPU time; "
    f"to have jemalloc instead: apt install {_PACKAGES['jemalloc']}"
)


def choose(
    wanted: Allocator,
    program: str,
    environ: Mapping[str, str],
    *,
    detect: Callable[[], AllocatorInfo] = _allocator.detect,
    find: Callable[..., Sequence[AllocatorFile]] = _allocator_files.find,
    check: Callable[..., None] = _allocator_files.check_preload,
) -> tuple[dict[str, str], list[str]]:
    """Choose the variables that give a program its allocator.

    Args:
        wanted: The allocator.
        program: The file that will be executed.
        environ: The variables that the program would get otherwise.
        detect: Describes the allocator of this process, where the caller's ``LD_PRELOAD`` is in force already.
        find: Lists the libraries that are installed, best first.
        check: Rejects a library that must not be preloaded.

    Returns:
        The variables to set, and what the user should know, a sentence each.

    Raises:
        InvalidOption: There is no such allocator, it is not installed, must not be preloaded, or would not be in force.
        NotSupported: An allocator was named, and nothing can be preloaded into this program or on this system.
    """
    _require_known(wanted)
    if wanted == "none":
        return {}, []
    if obstacle := _obstacle(program):
        return _without(wanted, obstacle)
    current = detect()
    if current.how == "preloaded":
        return {}, [f"malloc is served by {current.path}, which is preloaded already; it stays, and nothing is added"]
    if wanted == "glibc":
        return _glibc(environ), []
    return _preload(wanted, environ, find(None if wanted == "auto" else wanted, environ=environ), check)


def _require_known(wanted: str) -> None:
    known = get_args(Allocator)
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=1)
        fix = f'Did you mean "{near[0]}"?' if near else f"Write one of {', '.join(known)}."
        raise InvalidOption(_ARGUMENT, wanted, why="there is no such allocator", fix=fix)


def _obstacle(program: str) -> str | None:
    if not sys.platform.startswith("linux"):
        return f"LD_PRELOAD needs Linux, and this is {sys.platform}"
    return ignores_preload(program)


def _without(wanted: Allocator, reason: str) -> tuple[dict[str, str], list[str]]:
    """Do without a preload if no library was named; fail if one was."""
    if wanted in _PACKAGES:
        raise NotSupported(f"preloading {wanted}", reason=reason)
    return {}, [f"the allocator is left as it is: {reason}"]


def _preload(
    wanted: Allocator, environ: Mapping[str, str], candidates: Sequence[AllocatorFile], check: Callable[..., None]
) -> tuple[dict[str, str], list[str]]:
    path, refusals = _usable(candidates, check)
    notes = [str(refusal) for refusal in refusals]
    if path is not None:
        return {PRELOAD: _joined(environ.get(PRELOAD, ""), path)}, notes
    if wanted == "auto":
        return _glibc(environ), [*notes, _NONE_USABLE]
    raise refusals[0] if refusals else _not_installed(wanted)


def _glibc(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make glibc give memory back; the user's own values win."""
    return {knob.name: knob.value for knob in _knobs.glibc_memory() if knob.name not in environ}


def _usable(candidates: Sequence[AllocatorFile], check: Callable[..., None]) -> tuple[str | None, list[InvalidOption]]:
    """The first library that may be preloaded, and why the ones before it may not."""
    refusals: list[InvalidOption] = []
    for candidate in candidates:
        try:
            check(candidate.path, argument=_ARGUMENT)
        except InvalidOption as refusal:
            refusals.append(refusal)
        else:
            return candidate.path, refusals
    return None, refusals


def _joined(entries: str, path: str) -> str:
    """The caller's entries unchanged and first; ours last."""
    return f"{entries}:{path}" if entries else path


def _not_installed(wanted: Allocator) -> InvalidOption:
    fix = f'Install it (Debian, Ubuntu: apt install {_PACKAGES[wanted]}), or write "auto".'
    return InvalidOption(_ARGUMENT, wanted, why="it is not installed", fix=fix)
