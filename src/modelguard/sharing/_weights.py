"""Weights in a file that all processes map: one copy for servers that start workers without a fork (uvicorn, ...).

``publish`` writes the file once, and ``load`` maps it::

    weights.publish(make, "/var/lib/app/net", key="2026-11")  # the first worker makes the model, the others wait
    net = guard(lambda: weights.load(Net, "/var/lib/app/net"), reload_on=Modified("/var/lib/app/net", atomic=True))
"""

import errno
import functools
import hashlib
import inspect
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from modelguard import _units
from modelguard.errors import InvalidOption, NotSupported, PublishFailed, WeightsMissing, WeightsRefused
from modelguard.runtime import fork_hooks
from modelguard.runtime.host_lock import HostLock
from modelguard.sharing import _weights_formats

# What is published at a path, and whether its files are trustworthy and unchanged.


M = TypeVar("M")

#: Increased when older versions of modelguard cannot read what newer ones write.
LAYOUT = 1

# These become parts of paths, so only names that modelguard itself writes are accepted.
_FOLDER = re.compile(r"([0-9]{6,})-[0-9a-f]{12}")
_FILE = re.compile(r"[a-z0-9]+\.[a-z]+")

_REPUBLISH = "Publish the weights again."
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a file when it was published.

    No program can set ``ctime_ns``: while it stays the same, the file has not been written to, and its content does not
    have to be read again. A copy has another time.
    """

    size: int
    sha256: str
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is published at a path; :class:`Published` shows the most of it."""

    version: int
    sha256: str
    kind: str
    key: str | None
    folder: str  # its name below the path's data folder
    details: Mapping[str, Any]  # what the format needs in addition to the files
    files: Mapping[str, FileState]

    def to_json(self) -> str:
        content = asdict(self)
        return json.dumps({"modelguard": LAYOUT, "check": _digest(content), **content}, indent=1)

    def check(self, folder: Path) -> None:
        """Reject files that differ, or may differ, from what was published."""
        try:
            for each in (folder.parent, folder):
                check_trust(each, each.lstat(), stat.S_ISDIR)
            for name, published in self.files.items():
                _check_file(folder / name, published)
        except OSError as error:
            _refuse(Path(error.filename or folder), error)


def read(path: Path) -> Manifest:
    try:
        # Do not follow a link, and do not block on a named pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        why, fix = "nothing has been published there", "Call weights.publish(model, path) first."
        raise WeightsMissing(path, why=why, fix=fix) from None
    except OSError as error:
        _refuse(path, error)
    with os.fdopen(descriptor, "rb") as file:
        check_trust(path, os.fstat(descriptor), stat.S_ISREG)
        text = file.read()
    try:
        found = json.loads(text)
        layout, check = found.pop("modelguard"), found.pop("check")
        whole = layout == LAYOUT and check == _digest(found)
        if not (whole and _FOLDER.fullmatch(found["folder"]) and all(map(_FILE.fullmatch, found["files"]))):
            raise ValueError("it has another layout, or was changed since it was written")  # noqa: TRY301 - as what json raises
        files = {name: FileState(**state) for name, state in found.pop("files").items()}
        return Manifest(**found, files=files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = "the file was not written by weights.publish(), or was written by a newer version of modelguard"
        raise WeightsRefused(path, why=why, fix="Give the path that was given to weights.publish().") from error


def check_trust(path: Path, found: os.stat_result, kind: Any) -> None:
    """Reject a file or folder of another kind, or that another user owns or can write to; root is trusted."""
    if not kind(found.st_mode):
        raise WeightsRefused(path, why="the path is a link, or has the wrong file type", fix=f"Remove it. {_REPUBLISH}")
    if found.st_uid not in (os.geteuid(), 0):
        why = f"the path belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
        raise WeightsRefused(path, why=why, fix="Publish the weights as the user who serves them.")
    if found.st_mode & _OTHERS:
        why = f"other users may write to the path (mode {stat.S_IMODE(found.st_mode):o})"
        raise WeightsRefused(path, why=why, fix=f"If you trust them: chmod go-w {str(path)!r}. Otherwise remove it.")


def state_of(path: Path) -> FileState:
    found = path.stat()
    return FileState(size=found.st_size, sha256=_hash(path), mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns)


def digest_of(kind: str, details: Mapping[str, Any], files: Mapping[str, FileState]) -> str:
    return _digest([kind, details, {name: state.sha256 for name, state in files.items()}])


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_file(path: Path, published: FileState) -> None:
    found = path.lstat()
    check_trust(path, found, stat.S_ISREG)
    if found.st_size != published.size:
        kind = "truncated" if found.st_size < published.size else "changed"
        why = f"the file is {kind}: {published.size} bytes were published, and it has {found.st_size}"
        raise WeightsRefused(path, why=why, fix=_REPUBLISH)
    untouched = (found.st_mtime_ns, found.st_ctime_ns) == (published.mtime_ns, published.ctime_ns)
    if not untouched and _hash(path) != published.sha256:
        raise WeightsRefused(path, why="the content has changed since it was published", fix=_REPUBLISH)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse(path: Path, error: OSError) -> NoReturn:
    if error.errno in _NO_DESCRIPTOR:  # that is no fault of the file's
        raise error
    why, fix = f"it cannot be read ({error.strerror})", _REPUBLISH
    if isinstance(error, PermissionError):
        why, fix = "this user may not read it", "Publish it as the user who serves it."
    raise WeightsRefused(path, why=why, fix=fix) from error


# The storage of a published path: one publisher at a time, several versions, and the switch to a new version.
#
#   net               0600  the manifest of the current version; only ever replaced by a rename
#   net.d/            0700
#     reload.lock           held while one process publishes; the kernel releases it if that process dies
#     000001-3f2a.../       a version; its files are 0600 and are never written again
#     000002-9bc0.../
#     new/                  a version that is being written, or left behind by a publisher that was killed

# Record locks belong to the process, so its threads must share one lock object, however they write the path.
_locks: dict[str, HostLock] = {}
fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=_locks.clear)


class WeightsStore:
    """The weights that are published at one path."""

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        if sys.platform == "win32":
            reason = "Windows has neither the record locks nor the file owners of POSIX"
            raise NotSupported("published weights", reason=reason)
        self.path = path
        self.data = path.with_name(path.name + ".d")
        self._clock = clock
        self._sleep = sleep

    def current(self) -> Manifest:
        return read(self.path)

    def checked(self) -> tuple[Manifest, Path]:
        """The current manifest and the folder of its files, which are unchanged since they were published."""
        return self.apply(lambda manifest, folder: (manifest, folder))

    def apply(self, use: Callable[[Manifest, Path], M]) -> M:
        """Check the current version and use it; a newer one, if this one is replaced in the meantime."""
        manifest = self.current()
        while True:
            try:
                folder = self.data / manifest.folder
                manifest.check(folder)
                return use(manifest, folder)
            except (WeightsRefused, FileNotFoundError):  # publishers remove old versions
                seen, manifest = manifest, self.current()
                if seen == manifest:
                    raise

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Exclude all other publishers, in this process and in others, for the length of a ``with`` block."""
        self._make_data()
        lock = _locks.setdefault(os.path.realpath(self.data), HostLock(lambda: self.data))
        deadline = self._clock() + timeout
        while True:
            with lock.held(sleep=self._sleep, clock=self._clock, cancelled=lambda: self._clock() >= deadline) as how:
                if how == "host":
                    yield
                    return
                if how == "process":
                    why = f"a file in {str(self.data)!r} cannot be locked"
                    raise PublishFailed(self.path, why=why, fix="Publish to a file system that this user may write to.")
            if self._clock() >= deadline:
                why = f"another process has been publishing there for {timeout:.0f} s"
                fix = "Find out what that process waits for, or raise wait_timeout."
                raise PublishFailed(self.path, why=why, fix=fix)

    def write(self, form: _weights_formats.WeightsFormat, source: Any, *, key: str | None) -> tuple[Manifest, bool]:
        """Make ``source`` current, under the lock; whether its content is new: the same one is not written twice."""
        staging = self.data / "new"
        shutil.rmtree(staging, ignore_errors=True)  # left behind by a publisher that was killed
        before = self.intact()
        try:
            if before is not None:
                # A killed publisher may have left versions that nobody reads, and that take the room of this one.
                found = sorted((number, folder.name) for folder, number in self._versions().items())
                self._prune([name for number, name in found if number <= before.version][-2:])
            staging.mkdir(mode=0o700)
            manifest = self._write(form, source, staging, key, before)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        fresh = before is None or before.folder != manifest.folder
        if fresh:
            # The previous version stays for readers that have its manifest and are about to open its files.
            self._prune({manifest.folder, before.folder if before else ""})
        return manifest, fresh

    def _write(
        self, form: _weights_formats.WeightsFormat, source: Any, staging: Path, key: str | None, before: Manifest | None
    ) -> Manifest:
        details = form.write(source, lambda name: _created(staging / name))
        files = {file.name: state_of(file) for file in sorted(staging.iterdir())}
        digest = digest_of(form.kind, details, files)
        if before is not None and before.sha256 == digest:
            return before if key in (None, before.key) else self._make_current(replace(before, key=key))
        version = max(self._versions().values(), default=0) + 1
        folder = self.data / f"{version:06}-{digest[:12]}"
        staging.rename(folder)
        try:
            return self._make_current(Manifest(version, digest, form.kind, key, folder.name, details, files))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _make_current(self, manifest: Manifest) -> Manifest:
        """Make a version current, which is the only step that readers see."""
        temporary = self.data / "manifest.new"
        temporary.unlink(missing_ok=True)
        try:
            with _created(temporary) as file:
                file.write(manifest.to_json().encode())
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)
        return manifest

    def intact(self, key: str | None = None) -> Manifest | None:
        """The current manifest, if its files are intact, and it has this key, if one is given."""
        try:
            if key is None or self.current().key == key:
                return self.checked()[0]
        except WeightsRefused:
            pass
        except OSError as error:
            raise self._failed(error) from error
        return None

    def _versions(self) -> dict[Path, int]:
        """The folder of each existing version, and its number."""
        found = {folder: _FOLDER.fullmatch(folder.name) for folder in self.data.iterdir()}
        return {folder: int(match[1]) for folder, match in found.items() if match}

    def _prune(self, kept: Collection[str]) -> None:
        # A process that has mapped a file keeps it: its disk space is freed when the last mapping ends.
        with suppress(OSError):
            for folder in self._versions():
                if folder.name not in kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def _make_data(self) -> None:
        try:
            if not self.data.exists():
                self._check_free()
            self.data.mkdir(mode=0o700, exist_ok=True)
            check_trust(self.data, self.data.lstat(), stat.S_ISDIR)
            if self.data.stat().st_mode & 0o077:
                self.data.chmod(0o700)
            os.close(os.open(self.data, os.O_RDONLY))  # the lock does not say when no descriptor is left
        except OSError as error:
            raise self._failed(error) from error

    def _check_free(self) -> None:
        """Refuse to replace a file that is not ours, such as a checkpoint: ours have their data beside them."""
        try:
            self.current()
        except WeightsMissing:
            return
        except WeightsRefused as error:
            why = "another file is there, and would be lost"
            raise WeightsRefused(self.path, why=why, fix="Give the weights a path of their own.") from error

    def _failed(self, error: OSError) -> PublishFailed:
        fix = "Free some disk space, or publish elsewhere."
        if isinstance(error, PermissionError):
            fix = "Publish to a folder that this user may write to."
        elif isinstance(error, FileNotFoundError | NotADirectoryError | FileExistsError):
            fix = f"Create the folder {str(self.path.parent)!r}, and remove any other file at {str(self.data)!r}."
        elif error.errno in _NO_DESCRIPTOR:
            fix = "Close files that are not needed, or raise the limit (ulimit -n)."
        return PublishFailed(self.path, why=error.strerror or str(error), fix=fix)


@contextmanager
def _created(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that only its user may read and write; it is on disk when the block ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(descriptor)


@dataclass(frozen=True, slots=True)
class Published:
    """A version of published weights.

    Attributes:
        path: Where it is published.
        version: Its number; the first is 1, and newer versions have higher numbers.
        sha256: The hash of its content.
        bytes: The size of its files.
        kind: ``"torch"``, ``"numpy"`` or ``"pickle"``.
        key: The publisher's name for it.
        fresh: Whether this call has written it; False if it was already published.
    """

    path: Path
    version: int
    sha256: str
    bytes: int
    kind: str
    key: str | None
    fresh: bool


def publish(
    source: Any,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    allow_pickle: bool = False,
    wait_timeout: _units.Duration = "10m",
) -> Published:
    """Write weights into a file that all processes may map.

    The new version replaces the current one with a single rename, so a reader always sees one complete version. The
    previous version stays for readers that are about to open it, and older versions are removed; processes that have
    mapped a version keep it. Content that is already current is not written again.

    Several processes may call this at the same time: one writes, and the others wait. With a function and a key, only
    the first process makes the model.

    Args:
        source: A torch module, a state dict, a numpy array, or a mapping of names to arrays. With a ``key`` also a
            function without arguments that makes one of these; it is called only if the current version has another
            key.
        path: A file, in a folder that exists. It becomes a small text file; the data goes into ``PATH.d`` next to it.
            Only this user can read them.
        key: A name for these weights, such as the name or hash of the checkpoint.
        allow_pickle: Write any other object with ``joblib.dump``. Only the arrays in it are mapped, and loading it runs
            any code that it contains, so prefer arrays.
        wait_timeout: How long to wait for another publisher. The wait ends if that publisher dies.

    Returns:
        The version that is now current.

    Raises:
        InvalidOption: ``source`` cannot be mapped, or is a function without a ``key``.
        PublishFailed: The disk is full, permission is missing, or another publisher took too long. The previous version
            is still current.
        WeightsRefused: ``PATH.d`` belongs to another user, or other users may write to it; or ``PATH`` is another file.
        NotSupported: This is Windows, or the library of the format (torch, numpy, joblib) is not installed.
    """
    store = WeightsStore(_path(path))
    timeout = _units.seconds(wait_timeout, "wait_timeout", zero=True)
    if key is not None and (not isinstance(key, str) or not key):
        raise InvalidOption("key", key, why="must be a string and not empty", fix="Give a string such as '2026-11'.")
    _units.flag(allow_pickle, "allow_pickle")
    form = _weights_formats.format_of(source, allow_pickle=allow_pickle and not _may_make(source, key))
    if form is None:
        _check_function(source, key)
        if found := store.intact(key):  # reading needs no write permission
            return _published(store, found, fresh=False)
    with store.locked(timeout):
        if form is None:
            if found := store.intact(key):
                return _published(store, found, fresh=False)
            source = source()
            form = _weights_formats.format_of(source, allow_pickle=allow_pickle)
            if form is None:
                raise _weights_formats.unknown_source(source)
        manifest, fresh = store.write(form, source, key=key)
    return _published(store, manifest, fresh=fresh)


def load(build: Callable[..., M], path: str | os.PathLike[str], *, allow_pickle: bool = False) -> M:
    """Make a model whose weights are mapped from the published file; all processes that do this share one copy.

    Writing to a weight of a torch model, as a BatchNorm in training mode does to its buffers, copies the affected page
    for this process only; numpy arrays are read-only.

    Args:
        build: For torch: a function without arguments that makes the module; the content of its weights does not
            matter. It runs with parameters on the meta device, where they take no memory. For numpy and pickles: a
            function that takes the mapped array, the dict of arrays, or the object, and returns the model.
        path: The path that was given to :func:`publish`.
        allow_pickle: Whether the file may be a pickle, which runs any code that it contains.

    Returns:
        The result of ``build``.

    Raises:
        WeightsMissing: Nothing has been published there.
        WeightsRefused: The file is truncated, changed, another user's or writable by others; or a weight would not be
            in the mapping.
        WeightsMismatch: The weights do not fit the module: names, shapes or types differ, or it keeps tensors beside
            its parameters and buffers that would not get their content.
        InvalidOption: ``build`` is not a function, or does not make a torch module.
        NotSupported: This is Windows, or the library of the format (torch, numpy, joblib) is not installed.
    """
    fix = "Write weights.load(build, path): first the function that makes the model."
    _units.function(build, "build", "the published weights", fix=fix)
    store = WeightsStore(_path(path))
    _units.flag(allow_pickle, "allow_pickle")

    def use(manifest: Manifest, folder: Path) -> M:
        form = _weights_formats.format_named(manifest.kind, store.path, allow_pickle=allow_pickle)
        _check_build(build, manifest.kind)
        return form.load(build, folder, manifest.details)  # type: ignore[no-any-return]

    return store.apply(use)


def _may_make(source: Any, key: str | None) -> bool:
    """Whether it may be meant to make the weights. Without a key, an object that can be called is the model itself."""
    is_function = inspect.isroutine(source) or isinstance(source, type | functools.partial)
    return is_function or (callable(source) and key is not None)


def _check_function(source: Any, key: str | None) -> None:
    """Reject what cannot be published itself, and is no function with a key that makes it."""
    if not _may_make(source, key):
        raise _weights_formats.unknown_source(source)
    if key is None:
        why = "without a key, it is unknown whether the published weights are those that this function makes"
        raise InvalidOption("key", key, why=why, fix="Name what it makes, such as key='2026-11' or the file's hash.")
    fix = "Bind its arguments: publish(lambda: read(path), ...)."
    _units.called_as("a function without arguments", source, "source", 0, fix=fix)


def _check_build(build: Callable[..., Any], kind: str) -> None:
    how, arguments, fix = "with what was published", 1, "Write load(lambda arrays: Model(arrays), path)."
    if kind == "torch":
        how, arguments, fix = "without arguments", 0, "Write load(Net, path)."
    if (found := _units.misfit(build, arguments)) is not None:
        raise InvalidOption("build", build, why=f"is called {how}: {found}", fix=fix)


def current(path: str | os.PathLike[str]) -> Published:
    """Describe what is published at ``path``. This reads a small file; the weights themselves are not checked.

    Raises:
        WeightsMissing: Nothing has been published there.
        WeightsRefused: The file cannot be trusted or read.
        NotSupported: This is Windows.
    """
    store = WeightsStore(_path(path))
    return _published(store, store.current(), fresh=False)


def _path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not Path(path).name:
        raise InvalidOption("path", path, why="must be the path of a file", fix="Give a path such as 'weights/net'.")
    if why := _units.no_path(os.fspath(path)):
        raise InvalidOption("path", os.fspath(path), why=why, fix="Give a path such as 'weights/net'.")
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises PermissionError before Python 3.14
        fix = f"Give a file in it, such as {os.path.join(path, 'weights')!r}."  # noqa: PTH118 - as the caller wrote it
        raise InvalidOption("path", os.fspath(path), why="is a folder", fix=fix)
    return Path(path).absolute()


def _published(store: WeightsStore, manifest: Manifest, *, fresh: bool) -> Published:
    size = sum(file.size for file in manifest.files.values())
    return Published(store.path, manifest.version, manifest.sha256, size, manifest.kind, manifest.key, fresh)
