"""How two states of a watched path are distinguished."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modelguard.lifecycle import system
from modelguard.lifecycle.system import fingerprint, is_whole


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"old")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a folder inside."""
    folder = tmp_path / "ja_ginza"
    (folder / "vocab").mkdir(parents=True)
    (folder / "config.cfg").write_text("a")
    (folder / "vocab" / "strings.json").write_text("b")
    return folder


def test_an_untouched_file_stays_the_same(weights: Path) -> None:
    """Reading a file does not change it."""
    before = fingerprint(weights)
    assert b"old" == weights.read_bytes()
    assert before is not None
    assert before == fingerprint(weights)


def test_a_replaced_file_is_a_change(weights: Path) -> None:
    """A file that was renamed into place is another one, whatever its size and times."""
    before = fingerprint(weights)
    times = weights.stat()
    beside = weights.with_suffix(".new")
    beside.write_bytes(b"new")
    os.utime(beside, ns=(times.st_atime_ns, times.st_mtime_ns))
    beside.rename(weights)
    assert before != fingerprint(weights)


@pytest.mark.parametrize("content", [b"new", b"longer"])
def test_a_written_file_is_a_change(weights: Path, content: bytes) -> None:
    """A file that was written in place has another size or another time."""
    before, written = fingerprint(weights), weights.stat().st_mtime_ns
    weights.write_bytes(content)
    os.utime(weights, ns=(written, written + 1))
    assert before != fingerprint(weights)


@pytest.mark.parametrize("name", ["config.cfg", "vocab/strings.json", "vocab/new.json"])
def test_any_file_below_a_folder_counts(folder: Path, name: str) -> None:
    """A folder has changed when any file in it was written or has appeared."""
    before = fingerprint(folder)
    (folder / name).write_text("longer than before")
    assert before != fingerprint(folder)


def test_a_file_that_is_gone_from_a_folder_counts(folder: Path) -> None:
    """A folder has changed when a file was deleted or renamed."""
    before = fingerprint(folder)
    (folder / "config.cfg").rename(folder / "config.old")
    renamed = fingerprint(folder)
    (folder / "config.old").unlink()
    assert 3 == len({before, renamed, fingerprint(folder)})


def test_a_swapped_link_is_a_change(tmp_path: Path, folder: Path, weights: Path) -> None:
    """A link that points elsewhere is a change, as when Kubernetes swaps mounted configuration."""
    link = tmp_path / "current"
    seen = []
    for target in (weights, folder):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        seen.append(fingerprint(link))
    assert [fingerprint(weights), fingerprint(folder)] == seen
    assert seen[0] != seen[1]


@pytest.mark.parametrize("make", [lambda _path: None, lambda path: path.symlink_to(path)], ids=["missing", "loop"])
def test_what_cannot_be_read_has_no_identity(tmp_path: Path, make: object) -> None:
    """A path that is missing or leads nowhere has none."""
    path = tmp_path / "nowhere"
    make(path)  # type: ignore[operator]
    assert fingerprint(path) is None


def test_a_huge_folder_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with more entries than any model has is read only up to a bound."""
    monkeypatch.setattr(system, "MAX_ENTRIES", 5)
    for n in range(9):
        (tmp_path / str(n)).touch()
    found = fingerprint(tmp_path)
    assert found is not None
    assert (["0", "1", "2", "3", "4"], False) == ([name for name, *_ in found[:5]], is_whole(found))
    for n in range(5, 9):
        (tmp_path / str(n)).unlink()
    assert is_whole(fingerprint(tmp_path))


def test_a_written_file_with_its_time_set_back_is_a_change(weights: Path) -> None:
    """``rsync --times`` and ``cp -p`` set a file's time to that of the source; size and inode may be the same."""
    before, times = fingerprint(weights), weights.stat()
    weights.write_bytes(b"new")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert times.st_mtime_ns == weights.stat().st_mtime_ns
    assert before != fingerprint(weights)


def test_a_folder_with_a_link_to_nowhere_is_watched(folder: Path) -> None:
    """One dangling link hides no change of the other files, and its appearance is one."""
    before = fingerprint(folder)
    (folder / "latest").symlink_to("gone")
    dangling = fingerprint(folder)
    assert dangling is not None
    assert before != dangling
    (folder / "config.cfg").write_text("changed")
    assert dangling != fingerprint(folder)


@pytest.mark.parametrize("others", [True, False], ids=["beside its versions", "alone"])
def test_a_link_to_a_folder_inside_a_folder_is_followed(tmp_path: Path, others: bool) -> None:  # noqa: FBT001
    """``current -> v1`` is a change when it is swapped, and when a file behind it is written."""
    versions = tmp_path / "models"
    watched = versions if others else tmp_path / "watched"
    for name in ("v1", "v2"):
        (versions / name).mkdir(parents=True)
        (versions / name / "weights.bin").write_text(name)
    watched.mkdir(exist_ok=True)
    link = watched / "zz-current"  # behind the versions, which are read before
    seen = [fingerprint(watched)]
    for target in ("v1", "v2"):
        link.unlink(missing_ok=True)
        link.symlink_to(versions / target)
        seen.append(fingerprint(watched))
    (versions / "v2" / "weights.bin").write_text("written again")
    seen.append(fingerprint(watched))
    assert 4 == len({*seen})


def test_links_in_a_circle_are_followed_once(folder: Path) -> None:
    """A folder that contains itself is read to its end, and its files are watched."""
    (folder / "vocab" / "up").symlink_to(folder)
    (folder / "again").symlink_to(folder / "vocab")
    before = fingerprint(folder)
    assert before is not None
    assert len(before) <= 6
    (folder / "vocab" / "strings.json").write_text("changed")
    assert before != fingerprint(folder)
