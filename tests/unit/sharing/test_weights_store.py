"""Published versions: private, complete, and rejected when they differ from what was published."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from modelguard.errors import NotSupported, PublishFailed, WeightsMissing, WeightsRefused
from modelguard.lifecycle.system import fingerprint
from modelguard.sharing import _weights
from modelguard.sharing._weights import Manifest, WeightsStore
from modelguard.sharing._weights_formats import Create


class Raw:
    """A format of plain bytes."""

    kind = "raw"

    def __init__(self, *failures: BaseException) -> None:
        self._failures = list(failures)

    def write(self, source: bytes, create: Create) -> Mapping[str, Any]:
        with create("data.bin") as file:
            file.write(source)
            if self._failures:
                raise self._failures.pop()
        return {}

    def load(self, build: Callable[..., Any], folder: Path, details: Mapping[str, Any]) -> Any:
        return build((folder / "data.bin").read_bytes())


class Named(Raw):
    """A format that needs details beside its file."""

    def write(self, source: bytes, create: Create) -> Mapping[str, Any]:
        return {**super().write(source, create), "names": ["one"]}


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "net")


def publish(
    store: WeightsStore, content: bytes, key: str | None = None, form: Raw | None = None
) -> tuple[Manifest, bool]:
    with store.locked(0):
        return store.write(form or Raw(), content, key=key)


def data_of(store: WeightsStore) -> Path:
    """The one file of the current version."""
    return store.data / store.current().folder / "data.bin"


def below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


class TestPublishing:
    def test_counts_versions(self, store: WeightsStore) -> None:
        """Each publication has a higher number, and the newest is current."""
        found = [publish(store, content)[0] for content in (b"one", b"two", b"three")]
        assert [1, 2, 3] == [manifest.version for manifest in found]
        assert (found[-1], b"three") == (store.current(), data_of(store).read_bytes())

    def test_is_for_its_user_alone(self, store: WeightsStore) -> None:
        """Others can neither read nor write what is published, whatever the umask."""
        before = os.umask(0)
        try:
            publish(store, b"one")
        finally:
            os.umask(before)
        paths = [store.path, *store.data.rglob("*"), store.data]
        modes = {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()}
        folders = {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()}
        assert ({0o600}, {0o700}) == (modes, folders)

    def test_the_same_content_is_not_written_twice(self, store: WeightsStore) -> None:
        """Publishing the current content again changes nothing, so no process reloads."""
        first, fresh = publish(store, b"one")
        before = fingerprint(store.path)
        again, freshly = publish(store, b"one")
        assert (True, False, first, before) == (fresh, freshly, again, fingerprint(store.path))

    def test_the_same_content_under_another_key_is_the_same_version(self, store: WeightsStore) -> None:
        """The new key of the same content is stored, and the data stays."""
        first, _ = publish(store, b"one", "a")
        again, fresh = publish(store, b"one", "b")
        assert (False, "b", "b", first.folder) == (fresh, again.key, store.current().key, store.current().folder)

    def test_keeps_the_version_before_and_no_older_one(self, store: WeightsStore) -> None:
        """A reader that has just read the old manifest still finds its files; the disk does not fill."""
        folders = [publish(store, content)[0].folder for content in (b"one", b"two", b"three", b"four")]
        assert [*folders[-2:], "reload.lock"] == sorted(entry.name for entry in store.data.iterdir())

    def test_leaves_other_files_alone(self, store: WeightsStore) -> None:
        """Other files in the data folder are not removed."""
        publish(store, b"one")
        (store.data / "notes").mkdir()
        publish(store, b"two")
        publish(store, b"three")
        assert (store.data / "notes").is_dir()

    def test_is_seen_by_modified_once(self, store: WeightsStore) -> None:
        """The path changes with each publication, and with nothing else in the data folder."""
        publish(store, b"one")
        seen = {fingerprint(store.path)}
        (store.data / "new").mkdir()
        seen.add(fingerprint(store.path))
        publish(store, b"two")
        seen.add(fingerprint(store.path))
        assert 2 == len(seen)

    def test_replaces_a_broken_version(self, store: WeightsStore) -> None:
        """A truncated version does not count as published; the same content is written again."""
        publish(store, b"one")
        data_of(store).write_bytes(b"o")
        manifest, fresh = publish(store, b"one")
        assert (True, 2, b"one") == (fresh, manifest.version, data_of(store).read_bytes())

    def test_cleans_up_after_a_publisher_that_was_killed(self, store: WeightsStore) -> None:
        """The next publisher removes what a killed one has left half written."""
        store.data.mkdir(mode=0o700)
        (store.data / "new").mkdir()
        (store.data / "new" / "data.bin").write_bytes(b"half")
        (store.data / "manifest.new").write_bytes(b"half")
        manifest, _ = publish(store, b"one")
        assert [manifest.folder, f"{manifest.folder}/data.bin", "reload.lock"] == below(store.data)

    def test_frees_what_a_killed_publisher_has_left_before_it_writes(self, store: WeightsStore) -> None:
        """Versions that no reader needs take no room from the next one, which may be all that the disk has."""
        kept = [publish(store, content)[0].folder for content in (b"one", b"two")]
        (store.data / f"000003-{'a' * 12}").mkdir()  # killed just before it became current
        (store.data / f"000000-{'a' * 12}").mkdir()  # killed just after, so that an older one stayed
        with pytest.raises(PublishFailed):
            publish(store, b"three", form=Raw(OSError(errno.ENOSPC, "No space left on device")))
        assert [*kept, "reload.lock"] == sorted(entry.name for entry in store.data.iterdir())


class TestPublishingThatFails:
    @pytest.fixture
    def before(self, store: WeightsStore) -> list[str]:
        publish(store, b"one")
        return below(store.path.parent)

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
    def test_in_the_middle_of_the_data_changes_nothing(self, store: WeightsStore, before: list[str], code: int) -> None:
        """On a full disk the old version stays current, nothing half written is left, and the error says why."""
        with pytest.raises(PublishFailed) as caught:
            publish(store, b"two", form=Raw(OSError(code, os.strerror(code))))
        assert (os.strerror(code), before, b"one") == (
            caught.value.why,
            below(store.path.parent),
            data_of(store).read_bytes(),
        )

    @pytest.mark.parametrize("step", ["rename", "replace"])
    def test_at_the_last_step_changes_nothing(
        self, store: WeightsStore, before: list[str], monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """The same if the finished version cannot be put into its place."""

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Path, step, refuse)
            with pytest.raises(PublishFailed, match="No space left"):
                publish(store, b"two")
        assert (before, b"one") == (below(store.path.parent), data_of(store).read_bytes())

    def test_by_an_interrupt_changes_nothing(self, store: WeightsStore, before: list[str]) -> None:
        """Ctrl-C leaves nothing behind either, and passes."""
        with pytest.raises(KeyboardInterrupt):
            publish(store, b"two", form=Raw(KeyboardInterrupt()))
        assert before == below(store.path.parent)

    def test_leaves_the_turn_to_the_next(self, store: WeightsStore) -> None:
        """After a failure the next publisher is not held up."""
        with pytest.raises(PublishFailed):
            publish(store, b"one", form=Raw(OSError(errno.ENOSPC, "full")))
        assert publish(store, b"one")[1]

    @pytest.mark.parametrize("kind", ["missing folder", "file in the way of the folder", "file in the way of the data"])
    def test_without_a_usable_folder_names_it(self, tmp_path: Path, kind: str) -> None:
        """The error names a folder that cannot be used, and a fix."""
        path = tmp_path / "folder" / "net"
        if kind == "file in the way of the folder":
            path.parent.touch()
        elif kind == "file in the way of the data":
            path.parent.mkdir()
            Path(f"{path}.d").touch()
        with pytest.raises((PublishFailed, WeightsRefused), match=str(tmp_path)) as caught:
            publish(WeightsStore(path), b"one")
        assert caught.value.fix

    def test_a_link_in_the_place_of_the_data_is_not_followed(self, store: WeightsStore, tmp_path: Path) -> None:
        """Nothing is written to the target of a link."""
        (tmp_path / "trap").mkdir(mode=0o700)
        store.data.symlink_to(tmp_path / "trap")
        with pytest.raises(WeightsRefused):
            publish(store, b"one")
        assert [] == below(tmp_path / "trap")

    @pytest.mark.parametrize("kind", ["file", "empty", "link"])
    def test_the_file_of_somebody_else_is_not_replaced(self, store: WeightsStore, kind: str) -> None:
        """A checkpoint at the path, or a link to one, stays as it is: only what was published gives way to the next."""
        checkpoint = store.path.with_name("checkpoint") if kind == "link" else store.path
        checkpoint.write_bytes(b"" if kind == "empty" else b"PK\3\4 weights")
        checkpoint.chmod(0o600)
        if kind == "link":
            store.path.symlink_to(checkpoint)
        before = checkpoint.read_bytes(), below(store.path.parent)
        with pytest.raises(WeightsRefused, match="another file is there, and would be lost"):
            publish(store, b"weights")
        assert before == (checkpoint.read_bytes(), below(store.path.parent))

    def test_what_was_published_gives_way_without_its_data_too(self, store: WeightsStore) -> None:
        """Where only the path was copied, or the data was removed, publishing again makes both."""
        publish(store, b"weights")
        shutil.rmtree(store.data)
        publish(store, b"weights")
        assert b"weights" == data_of(store).read_bytes()

    def test_another_users_folder_is_not_used(self, store: WeightsStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """A data folder that belongs to another user is rejected."""
        store.data.mkdir(mode=0o700)
        owner = os.geteuid() + 1000
        os.chown(store.data, owner, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: owner)
        with pytest.raises(WeightsRefused, match="belongs to user"):
            publish(store, b"one")

    def test_windows_is_not_supported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without file owners and record locks nothing is published or loaded."""
        monkeypatch.setattr(_weights.sys, "platform", "win32")
        with pytest.raises(NotSupported, match="published weights"):
            WeightsStore(tmp_path / "net")


class TestTurns:
    def test_a_second_publisher_waits_as_long_as_wait_timeout(self, store: WeightsStore) -> None:
        """A publisher that takes too long gives an error, and not a hang, also beyond five minutes."""
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        second = WeightsStore(store.path, clock=lambda: now[0], sleep=sleep)
        for patience in (7, 700):
            now[0] = 0.0
            with store.locked(0), pytest.raises(PublishFailed, match=f"for {patience} s"), second.locked(patience):
                pass
            assert patience == pytest.approx(now[0], abs=0.1)

    def test_a_second_publisher_has_its_turn_when_the_first_is_done(self, store: WeightsStore) -> None:
        """A waiting publisher continues as soon as the other has finished."""
        first = store.locked(0)
        first.__enter__()
        second = WeightsStore(store.path, clock=lambda: 0.0, sleep=lambda _: first.__exit__(None, None, None))
        with second.locked(1):
            second.write(Raw(), b"two", key=None)
        assert b"two" == data_of(store).read_bytes()

    def test_one_place_has_one_turn_however_its_path_is_written(self, store: WeightsStore, tmp_path: Path) -> None:
        """Publishers that come by a link to the folder, or through it and back, wait for each other too."""
        (tmp_path / "link").symlink_to(tmp_path)
        for path in (tmp_path / "link" / "net", tmp_path / "link" / ".." / tmp_path.name / "net"):
            second = WeightsStore(path)
            with store.locked(0), pytest.raises(PublishFailed, match="another process"), second.locked(0):
                pass

    def test_other_paths_do_not_wait(self, store: WeightsStore, tmp_path: Path) -> None:
        """Each path has its own lock."""
        with store.locked(0), WeightsStore(tmp_path / "other").locked(0):
            pass


class TestReading:
    @pytest.fixture
    def data(self, store: WeightsStore) -> Path:
        publish(store, b"before")
        publish(store, b"weights")
        return data_of(store)

    def refused(self, store: WeightsStore) -> WeightsRefused:
        with pytest.raises(WeightsRefused) as caught:
            store.checked()
        assert caught.value.fix
        return caught.value

    def test_gives_what_was_published(self, store: WeightsStore, data: Path) -> None:
        """An unchanged version is current, with its files."""
        manifest, folder = store.checked()
        assert (2, data.parent) == (manifest.version, folder)

    def test_nothing_was_published(self, store: WeightsStore) -> None:
        """A path without weights gives a FileNotFoundError that names the function to call."""
        with pytest.raises(FileNotFoundError, match=r"weights.publish\(") as caught:
            store.checked()
        assert isinstance(caught.value, WeightsMissing)

    def test_a_truncated_file_is_refused(self, store: WeightsStore, data: Path) -> None:
        """A truncated file is not mapped: reading beyond its end would kill the process."""
        os.truncate(data, 3)
        assert "the file is truncated: 7 bytes were published, and it has 3" in str(self.refused(store))

    def test_a_longer_file_is_refused(self, store: WeightsStore, data: Path) -> None:
        """A file that has grown is not mapped either."""
        data.write_bytes(b"weights and more")
        assert "changed" in str(self.refused(store))

    @pytest.mark.parametrize("hidden", [False, True])
    def test_a_changed_file_is_refused(self, store: WeightsStore, data: Path, hidden: bool) -> None:  # noqa: FBT001
        """Other content of the same size is detected, also when the file's time was set back."""
        times = data.stat()
        data.write_bytes(b"wEights")
        if hidden:
            os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert "content has changed" in str(self.refused(store))

    def test_a_replaced_file_is_refused(self, store: WeightsStore, data: Path) -> None:
        """Another file under the same name is detected."""
        beside = data.with_suffix(".new")
        beside.write_bytes(b"wEights")
        beside.replace(data)
        assert "content has changed" in str(self.refused(store))

    @pytest.mark.parametrize("what", ["path", "data", "folder", "file"])
    def test_what_others_may_write_to_is_refused(self, store: WeightsStore, data: Path, what: str) -> None:
        """No file or folder of the weights may be writable by others."""
        path = {"path": store.path, "data": store.data, "folder": data.parent, "file": data}[what]
        path.chmod(path.stat().st_mode | 0o020)
        error = self.refused(store)
        assert (str(path), "chmod go-w" in error.fix) == (error.path, True)

    @pytest.mark.parametrize("what", ["path", "data", "folder", "file"])
    @pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can give files away")
    def test_what_belongs_to_another_user_is_refused(self, store: WeightsStore, data: Path, what: str) -> None:
        """No file or folder of the weights may belong to another user; root is trusted."""
        path = {"path": store.path, "data": store.data, "folder": data.parent, "file": data}[what]
        os.chown(path, 12345, -1)
        error = self.refused(store)
        assert (str(path), "the path belongs to user 12345") == (error.path, error.why.partition(",")[0])

    @pytest.mark.parametrize("what", ["path", "folder", "file"])
    def test_links_are_refused(self, store: WeightsStore, data: Path, what: str) -> None:
        """A link could lead anywhere, and another user could change it."""
        path = {"path": store.path, "folder": data.parent, "file": data}[what]
        elsewhere = store.path.parent / "elsewhere"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        self.refused(store)

    def test_a_pipe_is_not_waited_for(self, store: WeightsStore) -> None:
        """A pipe instead of the weights is rejected at once."""
        os.mkfifo(store.path)
        assert "wrong file type" in str(self.refused(store))

    @pytest.mark.parametrize("what", ["folder", "file"])
    def test_missing_data_is_refused(self, store: WeightsStore, data: Path, what: str) -> None:
        """A manifest without its data, as after copying the path alone, is rejected."""
        data.unlink() if what == "file" else shutil.rmtree(store.data)
        assert "No such file" in str(self.refused(store))

    @pytest.mark.parametrize("touch", ["chmod", "utime"])
    def test_the_same_content_is_accepted_whatever_happened_to_its_times(
        self, store: WeightsStore, data: Path, touch: str
    ) -> None:
        """A file with new times is read again, and accepted if its content is unchanged."""
        data.chmod(0o400) if touch == "chmod" else os.utime(data)
        assert 2 == store.checked()[0].version

    def test_a_copy_is_accepted(self, store: WeightsStore, data: Path, tmp_path: Path) -> None:
        """Path and data may be copied together to another folder or machine."""
        other = WeightsStore(tmp_path / "other")
        shutil.copy(store.path, other.path)
        shutil.copytree(store.data, other.data)
        assert store.current() == other.checked()[0]

    @pytest.mark.parametrize(
        "text",
        ["", "weights", "[]", "{}", '{"modelguard": 99}', '{"modelguard": 1, "version": 1}', "\0" * 99, '{"modelguard'],
    )
    def test_a_path_that_is_something_else_is_refused(self, store: WeightsStore, text: str) -> None:
        """A file that modelguard did not write is rejected, whatever it holds."""
        store.path.write_text(text)
        store.path.chmod(0o600)
        assert "the file was not written by weights.publish(), or was written by a newer" in str(self.refused(store))

    @pytest.mark.parametrize(
        ("entry", "value"),
        [
            ("details", {}),
            ("details", None),
            ("details", {"names": ["other"]}),
            ("kind", "torch"),
            ("kind", 3),
            ("key", ["a"]),
            ("version", "1"),
            ("version", None),
            ("sha256", "0" * 64),
            ("files", {}),
            ("files", {"data.bin": {"size": 3}}),
            ("files", {"data.bin": None}),
            ("files", None),
        ],
    )
    def test_a_manifest_that_was_changed_is_refused(
        self, tmp_path: Path, store: WeightsStore, entry: str, value: object
    ) -> None:
        """Whatever somebody has changed in it, the answer is one error that says what to do."""
        with store.locked(0):
            store.write(Named(), b"one", key="a")
        store.path.write_text(json.dumps(json.loads(store.path.read_text()) | {entry: value}))
        assert "was not written by weights.publish()" in str(self.refused(store))

    def test_a_manifest_that_nests_without_end_is_refused(self, store: WeightsStore) -> None:
        """A text that cannot be parsed is not a manifest."""
        store.path.write_text("[" * 100_000)
        store.path.chmod(0o600)
        assert "was not written by weights.publish()" in str(self.refused(store))

    @pytest.mark.parametrize(
        ("entry", "value"),
        [("folder", "../elsewhere"), ("folder", "/etc"), ("files", {"../x": {}}), ("files", []), ("surplus", 1)],
    )
    def test_a_manifest_never_leads_elsewhere(self, store: WeightsStore, data: Path, entry: str, value: object) -> None:
        """Names in the manifest that could leave the data folder are rejected."""
        store.path.write_text(json.dumps(json.loads(store.path.read_text()) | {entry: value}))
        self.refused(store)

    def test_a_version_that_became_old_while_it_was_checked_gives_way(
        self, store: WeightsStore, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reader that is overtaken by publishers uses the newest version instead of failing."""
        overtaken = [store.current()]
        publish(store, b"three")
        publish(store, b"four")
        read = _weights.read
        monkeypatch.setattr(_weights, "read", lambda path: overtaken.pop() if overtaken else read(path))
        assert 4 == store.checked()[0].version
