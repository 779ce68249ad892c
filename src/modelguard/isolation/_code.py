"""Which code a mold runs: the files of its modules, so that nobody is served by the code of another time."""

from __future__ import annotations

import os
import sys
import sysconfig

__all__ = ["Files", "changed", "check_unchanged", "files", "imported", "note_imported"]

#: Path to size in bytes and time of change in nanoseconds.
Files = dict[str, tuple[int, int]]

#: Files of this process's modules, as they were soon after their import.
imported: Files = {}


def files() -> Files:
    """The files of the modules of this process that were found on ``sys.path``, without Python's own.

    Others are generated while the program runs, and may change or disappear.
    """
    own = sysconfig.get_path("stdlib") + os.sep
    places = tuple(os.path.abspath(one) + os.sep for one in sys.path if one is not None)  # noqa: PTH100 - "" is here
    found: Files = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.startswith(places):
            continue
        if path.startswith(own) and not path.startswith((own + "site-packages", own + "dist-packages")):
            continue
        stamp = _stamp(path)
        if stamp is not None:
            found[path] = stamp
    return found


def note_imported() -> None:
    """Add the modules that have been imported since to :data:`imported`."""
    for path, stamp in files().items():
        imported.setdefault(path, stamp)


def changed(known: Files, now: Files | None = None) -> str | None:
    """The first of these files that is not as it was; None if there is none.

    Args:
        known: How they were.
        now: How they are, as far as that is not to be read from the disk.
    """
    now = now or {}
    return next((path for path, was in known.items() if (now.get(path) or _stamp(path)) != was), None)


def check_unchanged(known: Files | None) -> None:
    """Check that the files on the disk are these.

    Raises:
        RuntimeError: One has changed.
    """
    path = None if known is None else changed(known)
    if path is not None:
        raise RuntimeError(f"{path} has changed since this server imported it; restart the server")


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - thousands of them
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
