"""The storage of a published path: one publisher at a time, several versions, and the switch to a new version.

::

    net              0600  the manifest of the current version; only ever replaced by a rename
    net.d/           0700
        reload.lock        held while one process publishes; the kernel releases it if that process dies
        000001-3f2a.../    a version; its files are 0600 and are never written again
        000002-9bc0.../
        new/               a version that is being written, or left behind by a publisher that was killed
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from modelguard.errors import NotSupported, PublishFailed, WeightsRefused
from modelguard.lifecycle._host_lock import HostLock
from modelguard.sharing import _weights_manifest
from modelguard.sharing._weights_manifest import Manifest

if TYPE_CHECKING:
    from modelguard.sharing._weights_formats import WeightsFormat

__all__ = ["WeightsStore"]

_VERSION = re.compile(r"([0-9]{6,})-[0-9a-f]{12}")

# Record locks belong to the process, so its threads must share one lock object.
_locks: dict[Path, HostLock] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)


class WeightsStore:
    """The weights that are published at one path.

    Args:
        path: The path.
        clock: A monotonic clock, in seconds.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if sys.platform == "win32":
            raise NotSupported(
                "published weights", reason="Windows has neither the record locks nor the file owners of POSIX"
            )
        self.path = path
        self.data = path.with_name(path.name + ".d")
        self._clock = clock
        self._sleep = sleep

    def current(self) -> Manifest:
        """Read the current manifest.

        Raises:
            WeightsMissing: Nothing has been published.
            WeightsRefused: The file cannot be trusted.
        """
        return _weights_manifest.read(self.path)

    def checked(self) -> tuple[Manifest, Path]:
        """Read the current manifest and check its files.

        Returns:
            The manifest, and the folder of the files, which are unchanged since they were published.

        Raises:
            WeightsMissing: Nothing has been published.
            WeightsRefused: A file cannot be trusted.
        """
        manifest = self.current()
        while True:
            try:
                folder = self.data / manifest.folder
                manifest.check(folder)
            except WeightsRefused:
                # Publishers remove old versions, and this one may have been replaced in the meantime.
                seen, manifest = manifest, self.current()
                if seen == manifest:
                    raise
            else:
                return manifest, folder

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Exclude all other publishers, in this process and in others, for the length of a ``with`` block.

        Args:
            timeout: Seconds to wait for another publisher.

        Raises:
            PublishFailed: The data folder cannot be used, or the other publisher took too long.
        """
        self._make_data()
        lock = _locks.setdefault(self.data, HostLock(lambda: self.data))
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
                raise PublishFailed(
                    self.path, why=why, fix="Find out what that process waits for, or raise wait_timeout."
                )

    def write(self, form: WeightsFormat, source: Any, *, key: str | None) -> tuple[Manifest, bool]:
        """Make ``source`` current; call it within :meth:`locked`.

        Returns:
            The manifest that is now current, and whether its content is new: the same content is not written twice.

        Raises:
            PublishFailed: The disk is full, or there is no permission. The previous version is still current.
        """
        staging = self.data / "new"
        shutil.rmtree(staging, ignore_errors=True)  # left behind by a publisher that was killed
        before = self._intact()
        try:
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
        self, form: WeightsFormat, source: Any, staging: Path, key: str | None, before: Manifest | None
    ) -> Manifest:
        details = form.write(source, lambda name: _created(staging / name))
        files = {file.name: _weights_manifest.state_of(file) for file in sorted(staging.iterdir())}
        digest = _weights_manifest.digest_of(form.kind, details, files)
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

    def _intact(self) -> Manifest | None:
        """The current manifest, if its files are intact."""
        try:
            return self.checked()[0]
        except WeightsRefused:
            return None

    def _versions(self) -> dict[Path, int]:
        """The folder of each existing version, and its number."""
        found = {folder: _VERSION.fullmatch(folder.name) for folder in self.data.iterdir()}
        return {folder: int(match[1]) for folder, match in found.items() if match}

    def _prune(self, kept: Collection[str]) -> None:
        # A process that has mapped a file keeps it: its disk space is freed when the last mapping ends.
        with suppress(OSError):
            for folder in self._versions():
                if folder.name not in kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def _make_data(self) -> None:
        try:
            self.data.mkdir(mode=0o700, exist_ok=True)
            _weights_manifest.check_trust(self.data, self.data.lstat(), stat.S_ISDIR)
            if self.data.stat().st_mode & 0o077:
                self.data.chmod(0o700)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> PublishFailed:
        fix = "Free some disk space, or publish elsewhere."
        if isinstance(error, PermissionError):
            fix = "Publish to a folder that this user may write to."
        elif isinstance(error, FileNotFoundError | NotADirectoryError | FileExistsError):
            fix = f"Create the folder {str(self.path.parent)!r}, and remove any other file at {str(self.data)!r}."
        return PublishFailed(self.path, why=error.strerror or str(error), fix=fix)


@contextmanager
def _created(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that only its user may read and write; it is on disk when the block ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(descriptor)
