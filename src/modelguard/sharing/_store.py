"""The folder behind a published path: one publisher at a time, versions beside each other, and what makes one current.

::

    net              0600  the manifest of the current version; replaced by a rename, and by nothing else
    net.d/           0700
        reload.lock        held while one process publishes; the kernel gives it back if that process dies
        000001-3f2a.../    a version; its files are 0600 and are never written again
        000002-9bc0.../
        new/               a version in the making, or the rest of a publisher that was killed
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
from modelguard.sharing import _manifest
from modelguard.sharing._manifest import Manifest

if TYPE_CHECKING:
    from modelguard.sharing.formats import Format

__all__ = ["Store"]

_VERSION = re.compile(r"([0-9]{6,})-[0-9a-f]{12}")

# Record locks belong to the process, so its threads have to meet in one slot.
_slots: dict[Path, HostLock] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_slots.clear)


class Store:
    """What is published at one path.

    Args:
        path: The path.
        clock: Seconds from any start, never going back.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if sys.platform == "win32":
            raise NotSupported("published weights", reason="Windows has no record locks and no owners as POSIX has")
        self.path = path
        self.data = path.with_name(path.name + ".d")
        self._clock = clock
        self._sleep = sleep

    def current(self) -> Manifest:
        """Read what is current.

        Raises:
            WeightsMissing: Nothing has been published.
            WeightsRefused: What is there cannot be trusted.
        """
        return _manifest.read(self.path)

    def checked(self) -> tuple[Manifest, Path]:
        """Give what is current, and the folder of its files, which are what was published.

        Raises:
            WeightsMissing: Nothing has been published.
            WeightsRefused: What is there cannot be trusted.
        """
        manifest = self.current()
        while True:
            try:
                folder = self.data / manifest.folder
                manifest.check(folder)
            except WeightsRefused:
                # Publishers remove old versions: perhaps this one has become old in the meantime.
                seen, manifest = manifest, self.current()
                if seen == manifest:
                    raise
            else:
                return manifest, folder

    @contextmanager
    def turn(self, patience: float) -> Iterator[None]:
        """Be the only one who publishes, among all processes and threads.

        Args:
            patience: Seconds to wait for another publisher.

        Raises:
            PublishFailed: There is no place to publish in, or the other publisher took too long.
        """
        self._make_data()
        slot = _slots.setdefault(self.data, HostLock(lambda: self.data))
        deadline = self._clock() + patience
        while True:
            with slot.held(sleep=self._sleep, clock=self._clock, cancelled=lambda: self._clock() >= deadline) as how:
                if how == "host":
                    yield
                    return
                if how == "process":
                    why = f"no lock can be had in {str(self.data)!r}"
                    raise PublishFailed(self.path, why=why, fix="Publish to a file system that this user may write to.")
            if self._clock() >= deadline:
                why = f"another process has been publishing there for {patience:.0f} s"
                raise PublishFailed(self.path, why=why, fix="Find out what it waits for, or raise wait_timeout.")

    def write(self, form: Format, source: Any, *, key: str | None) -> tuple[Manifest, bool]:
        """Make ``source`` current; to be called in one's :meth:`turn`.

        Returns:
            What is current now, and whether its content is new: the same content is not written twice.

        Raises:
            PublishFailed: The disk is full, or there is no permission. What was current still is.
        """
        making = self.data / "new"
        shutil.rmtree(making, ignore_errors=True)  # of a publisher that was killed
        before = self._sound()
        try:
            making.mkdir(mode=0o700)
            manifest = self._write(form, source, making, key, before)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            shutil.rmtree(making, ignore_errors=True)
        fresh = before is None or before.folder != manifest.folder
        if fresh:
            # The version before stays for those who have read its manifest and are about to open its files.
            self._prune({manifest.folder, before.folder if before else ""})
        return manifest, fresh

    def _write(self, form: Format, source: Any, making: Path, key: str | None, before: Manifest | None) -> Manifest:
        details = form.write(source, lambda name: _created(making / name))
        files = {file.name: _manifest.seal(file) for file in sorted(making.iterdir())}
        digest = _manifest.digest_of(form.kind, details, files)
        if before is not None and before.sha256 == digest:
            return before if key in (None, before.key) else self._point(replace(before, key=key))
        version = max(self._versions().values(), default=0) + 1
        folder = self.data / f"{version:06}-{digest[:12]}"
        making.rename(folder)
        try:
            return self._point(Manifest(version, digest, form.kind, key, folder.name, details, files))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _point(self, manifest: Manifest) -> Manifest:
        """Make a version the current one: the one step that others see."""
        beside = self.data / "manifest.new"
        beside.unlink(missing_ok=True)
        try:
            with _created(beside) as file:
                file.write(manifest.to_json().encode())
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)
        return manifest

    def _sound(self) -> Manifest | None:
        try:
            return self.checked()[0]
        except WeightsRefused:
            return None

    def _versions(self) -> dict[Path, int]:
        """The folder of each version that is there, and its number."""
        found = {folder: _VERSION.fullmatch(folder.name) for folder in self.data.iterdir()}
        return {folder: int(match[1]) for folder, match in found.items() if match}

    def _prune(self, kept: Collection[str]) -> None:
        # Who has mapped a file keeps it: its disk space comes back when the last mapping goes.
        with suppress(OSError):
            for folder in self._versions():
                if folder.name not in kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def _make_data(self) -> None:
        try:
            self.data.mkdir(mode=0o700, exist_ok=True)
            _manifest.check_trust(self.data, self.data.lstat(), stat.S_ISDIR)
            if self.data.stat().st_mode & 0o077:
                self.data.chmod(0o700)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> PublishFailed:
        fix = "Make room, or publish elsewhere."
        if isinstance(error, PermissionError):
            fix = "Publish to a folder that this user may write to."
        elif isinstance(error, FileNotFoundError | NotADirectoryError | FileExistsError):
            fix = f"Make the folder {str(self.path.parent)!r}, and nothing else at {str(self.data)!r}."
        return PublishFailed(self.path, why=error.strerror or str(error), fix=fix)


@contextmanager
def _created(path: Path) -> Iterator[IO[bytes]]:
    """A new file for its user alone, on the disk when the block ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(descriptor)
