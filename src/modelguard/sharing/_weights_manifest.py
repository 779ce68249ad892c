"""What is published at a path, and whether its files are trustworthy and unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelguard.errors import WeightsMissing, WeightsRefused

__all__ = ["FileState", "Manifest", "check_trust", "digest_of", "parse", "read", "state_of"]

#: Increased when older versions of modelguard cannot read what newer ones write.
LAYOUT = 1

# These become parts of paths, so only names that modelguard itself writes are accepted.
_FOLDER = re.compile(r"[0-9]{6,}-[0-9a-f]{12}")
_FILE = re.compile(r"[a-z0-9]+\.[a-z]+")
_DIGEST = re.compile(r"[0-9a-f]{64}")

_REPUBLISH = "Publish the weights again."
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a file when it was published.

    Attributes:
        size: Bytes.
        sha256: The hash of its content.
        mtime_ns: Time of the last change of its content.
        ctime_ns: Time of the last change of the file in any way. No program can set it: while it stays the same, the
            file has not been written to, and its content does not have to be read again. A copy has another time.
    """

    size: int
    sha256: str
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is published at a path.

    Attributes:
        version: Its number, which increases with each publication.
        sha256: The hash of the whole content.
        kind: The format that reads it.
        key: The publisher's name for it.
        folder: The name of its folder below the path's data folder.
        details: The data that the format needs in addition to the files.
        files: The name and state of each file in the folder.
    """

    version: int
    sha256: str
    kind: str
    key: str | None
    folder: str
    details: Mapping[str, Any]
    files: Mapping[str, FileState]

    def to_json(self) -> str:
        """The content of its file."""
        return json.dumps({"modelguard": LAYOUT, **asdict(self)}, indent=1)

    def check(self, folder: Path) -> None:
        """Reject files that differ, or may differ, from what was published.

        Raises:
            WeightsRefused: A file is missing, truncated or changed, or other users could have written to it.
        """
        _check_folder(folder.parent)
        _check_folder(folder)
        for name, published in self.files.items():
            _check_file(folder / name, published)


def read(path: Path) -> Manifest:
    """Read what is published at ``path``.

    Raises:
        WeightsMissing: Nothing is published there.
        WeightsRefused: The file cannot be trusted, or was not written by modelguard.
    """
    try:
        # Do not follow a link, and do not block on a named pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        why, fix = "nothing has been published there", "Call weights.publish(model, path) first."
        raise WeightsMissing(path, why=why, fix=fix) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    with os.fdopen(descriptor, "rb") as file:
        check_trust(path, os.fstat(descriptor), stat.S_ISREG)
        text = file.read()
    try:
        return parse(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = "the file was not written by weights.publish(), or was written by a newer version of modelguard"
        raise WeightsRefused(path, why=why, fix="Give the path that was given to weights.publish().") from error


def parse(text: str | bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: It is not a manifest, or was changed since.
    """
    found = json.loads(text)
    if found.pop("modelguard") != LAYOUT:
        raise ValueError("another layout")
    found["files"] = {_as(_FILE, name): _file_state(state) for name, state in found["files"].items()}
    _as(_FOLDER, found["folder"])
    manifest = Manifest(**found)
    _number(manifest.version)
    if not isinstance(manifest.kind, str) or not isinstance(manifest.key, str | None):
        raise TypeError("a name that is not a string")
    # The hash of the content includes the details, which the format reads without further checks.
    if manifest.sha256 != digest_of(manifest.kind, manifest.details, manifest.files):
        raise ValueError("it was changed since it was written")
    return manifest


def check_trust(path: Path, found: os.stat_result, kind: Any) -> None:
    """Reject a file or folder that another user owns or can write to.

    Args:
        path: The file or folder, for the message.
        found: Its status.
        kind: Checks the file type in its mode, such as ``stat.S_ISREG``.

    Raises:
        WeightsRefused: It has another type, belongs to another user (root is trusted), or other users may write to it.
    """
    if not kind(found.st_mode):
        raise WeightsRefused(path, why="the path is a link, or has the wrong file type", fix=f"Remove it. {_REPUBLISH}")
    if found.st_uid not in (os.geteuid(), 0):
        why = f"the path belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
        raise WeightsRefused(path, why=why, fix="Publish the weights as the user who serves them.")
    if found.st_mode & _OTHERS:
        why = f"other users may write to the path (mode {stat.S_IMODE(found.st_mode):o})"
        raise WeightsRefused(path, why=why, fix=f"If you trust them: chmod go-w {str(path)!r}. Otherwise remove it.")


def state_of(path: Path) -> FileState:
    """Read the state of a finished file."""
    found = path.stat()
    return FileState(size=found.st_size, sha256=_hash(path), mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns)


def digest_of(kind: str, details: Mapping[str, Any], files: Mapping[str, FileState]) -> str:
    """Compute the hash of the whole content."""
    content = [kind, details, {name: state.sha256 for name, state in files.items()}]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_state(state: Any) -> FileState:
    made = FileState(**state)
    _as(_DIGEST, made.sha256)
    for number in (made.size, made.mtime_ns, made.ctime_ns):
        _number(number)
    return made


def _number(value: object) -> None:
    if type(value) is not int:
        raise TypeError("not a whole number")


def _as(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError("not a name that modelguard writes")
    return text


def _check_folder(folder: Path) -> None:
    try:
        check_trust(folder, folder.lstat(), stat.S_ISDIR)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _check_file(path: Path, published: FileState) -> None:
    try:
        found = path.lstat()
        check_trust(path, found, stat.S_ISREG)
        if found.st_size != published.size:
            kind = "truncated" if found.st_size < published.size else "changed"
            why = f"the file is {kind}: {published.size} bytes were published, and it has {found.st_size}"
            raise WeightsRefused(path, why=why, fix=_REPUBLISH)
        untouched = (found.st_mtime_ns, found.st_ctime_ns) == (published.mtime_ns, published.ctime_ns)
        if not untouched and _hash(path) != published.sha256:
            raise WeightsRefused(path, why="the content has changed since it was published", fix=_REPUBLISH)
    except OSError as error:
        raise _unreadable(path, error) from error


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unreadable(path: Path, error: OSError) -> WeightsRefused:
    if isinstance(error, PermissionError):
        return WeightsRefused(path, why="this user may not read it", fix="Publish it as the user who serves it.")
    return WeightsRefused(path, why=f"it cannot be read ({error.strerror})", fix=_REPUBLISH)
