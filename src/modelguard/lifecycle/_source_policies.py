"""Policies that watch where the model comes from: ``Modified`` and ``Changed``."""

# Not `from __future__ import annotations`: these classes show modelguard as their module, where the names of their
# fields' types could not be resolved.
import inspect
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle._policy import Horizon, Snapshot, Value

__all__ = ["Changed", "Modified", "checked_jitter"]


def checked_jitter(jitter: object) -> float:
    """Check an argument ``jitter``.

    Raises:
        InvalidOption: It is not a number from 0 to 1.
    """
    if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
        why = "must be a number from 0 to 1"
        raise InvalidOption("jitter", jitter, why=why, fix="Write for example jitter=0.1.")
    return float(jitter)


def _check_path(path: object) -> None:
    """Check an argument ``path``.

    Raises:
        InvalidOption: It is not one path, or is empty.
    """
    why, fix = "", "Give the path that the loader reads."
    if isinstance(path, list | tuple | set | frozenset):
        why, fix = f"must be one path, not {_units.kind_of(path)}", 'Join policies: Modified("a") | Modified("b").'
    elif not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        why = f"must be text or a path, not {_units.kind_of(path)}"
    elif not os.fspath(path):
        why = "must be a path that is not empty"
    if why:
        raise InvalidOption("path", path, why=why, fix=fix)


class Modified(Value):
    """Due when a file or folder has changed since the generation's load began.

    A half-written file is never loaded: a change counts once the path has been unchanged for ``quiet``. If writers
    replace the path atomically (write beside it, then rename), set ``atomic=True``, and a change counts at once. While
    the path is missing, nothing is due. Name, inode, size and time of change are compared. Links are followed, also to
    folders inside a watched folder. Of a folder, the first 10,000 files are compared; ``PolicyNeverFires`` warns of one
    that has more.

    Args:
        path: The file or folder. A folder counts as changed when any file below it does.
        quiet: Seconds, ``timedelta`` or text. Default two seconds.
        atomic: Whether writers always replace the path by a rename.
        spread: Each process waits for a random part of this time on top, so that replicas which see the change at the
            same moment do not load in step. With forty times the length of a load, about one in forty loads at a time.
            Default zero.

    Raises:
        InvalidOption: ``path`` is not one path or is empty, ``quiet`` or ``spread`` is not a duration, or ``atomic`` is
            not a bool.
    """

    kind = "modified"
    renews = True
    watches_source = True
    path: Path
    quiet: float
    atomic: bool
    spread: float

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        quiet: _units.Duration = 2.0,
        atomic: bool = False,
        spread: _units.Duration = 0.0,
    ) -> None:
        _check_path(path)
        if not isinstance(atomic, bool):
            raise InvalidOption("atomic", atomic, why="must be True or False", fix="Write atomic=True.")
        self._set(
            path=Path(path).absolute(),
            quiet=_units.seconds(quiet, "quiet", zero=True),
            atomic=atomic,
            spread=_units.seconds(spread, "spread", zero=True),
        )

    def due(self, now: Snapshot) -> bool:
        seen = now.files.get(self.path)
        wait = (0.0 if self.atomic else self.quiet) + self.spread * now.jitter
        return seen is not None and seen.changed and seen.quiet >= wait

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - a file may change at any time
        return Horizon(uses=math.inf, seconds=1.0)

    def __repr__(self) -> str:
        return f"Modified({str(self.path)!r})"


class Changed(Value):
    """Due when ``probe`` returns another value than it did just before the generation's loader ran.

    The probe is a cheap function that returns a value which changes with the source of the model: an ETag, the version
    behind an alias of a registry, a revision, a row of a table. It is called in a thread of its own, never inside a
    call, with no lock held. A change counts when two polls in a row have returned the same new value; the second one
    comes after a tenth of ``every`` (at least a second).

    A probe that raises, returns None or takes longer than ``timeout`` is reported (``CallbackErrored``) once, until it
    has worked ten times in a row. It never causes a reload, and is asked again at the next poll. If a change that was
    loaded lasts for fewer than ten polls, the next one needs twice as many equal answers, up to 64. So a probe whose
    value keeps changing, or that asks servers which disagree, causes a few reloads and then none; ``PolicyFutile``
    reports that.

    Args:
        probe: A function without arguments, which may be ``async``. Of a pool: a function of the key. What it returns
            is compared by ``==``.
        every: How often it is asked: seconds, a ``timedelta``, or text such as ``"1m"``.
        jitter: Each pause is shortened by a random part of at most this much, so that replicas do not ask together.
            0 to 1.
        timeout: How long an answer may take. A load waits as long for the value that it starts from. A call that takes
            longer is left behind in its thread, at most three at a time.

    Raises:
        InvalidOption: ``probe`` is not a function, ``every`` or ``timeout`` is not a positive duration, or ``jitter``
            is not in 0 to 1.
    """

    kind = "changed"
    renews = True
    watches_source = True
    probe: Callable[..., object]
    every: float
    jitter: float
    timeout: float

    def __init__(
        self,
        probe: Callable[..., object],
        every: _units.Duration = "1m",
        *,
        jitter: float = 0.1,
        timeout: _units.Duration = "10s",
    ) -> None:
        self._set(
            probe=_checked_probe(probe),
            every=_units.seconds(every, "every"),
            jitter=checked_jitter(jitter),
            timeout=_units.seconds(timeout, "timeout"),
        )

    def due(self, now: Snapshot) -> bool:
        seen = now.probes.get(self.probe)
        return seen is not None and seen.changed

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - an answer may come at any time
        return Horizon(uses=math.inf, seconds=min(1.0, self.every))

    def futile(self, now: Snapshot) -> str | None:
        seen = now.probes.get(self.probe)
        if seen is None or not seen.unsteady:
            return None
        return "its probe does not return the same value often enough in a row, so no change can be told from noise"

    def __repr__(self) -> str:
        return f"Changed({_name(self.probe)})"


def _checked_probe(probe: Any) -> Any:
    if not callable(probe):
        why = f"must be a function, not {_units.kind_of(probe)}"
        raise InvalidOption("probe", probe, why=why, fix="Pass the function itself, without calling it: Changed(etag).")
    if inspect.isgeneratorfunction(probe) or inspect.isasyncgenfunction(probe):
        why = "is a generator function, which returns a new generator each time"
        raise InvalidOption("probe", probe, why=why, fix="Return the value instead of yielding it.")
    try:
        hash(probe)
    except TypeError:
        why = f"must be hashable, and {_units.kind_of(probe)} is not"
        raise InvalidOption("probe", probe, why=why, fix="Pass a function or a method of it.") from None
    return probe


def _name(probe: Any) -> str:
    while isinstance(probe, partial):
        probe = probe.func
    return str(getattr(probe, "__qualname__", type(probe).__qualname__))
