"""Published arrays, and the doors to publishing and loading."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from modelguard.errors import InvalidOption, NotSupported, PublishFailed, WeightsMissing, WeightsRefused
from modelguard.sharing import _mapped, weights
from modelguard.sharing._mapped import Block

np = pytest.importorskip("numpy")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net"


def same(model: Any) -> Any:
    """A build that wants the arrays as they are."""
    return model


class Makes:
    """A loader that counts."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return self.model


class TestArrays:
    def test_one_array_comes_back(self, path: Path) -> None:
        """An array is mapped with its content, shape, type and order, for reading only."""
        array = np.asfortranarray(np.arange(12, dtype="float32").reshape(3, 4))
        weights.publish(array, path)
        found = weights.load(same, path)
        assert (array.dtype, True, False) == (found.dtype, found.flags.f_contiguous, found.flags.writeable)
        assert np.array_equal(array, found)

    def test_named_arrays_come_back(self, path: Path) -> None:
        """A mapping comes back in its order, whatever its names are; empty and scalar arrays are in it too."""
        arrays = {"b/../a": np.ones(5), "": np.zeros((0, 3)), "字": np.array(7), "r": np.ones(2, dtype="i4,f8")}
        published = weights.publish(arrays, path)
        found = weights.load(same, path)
        assert (list(arrays), "numpy") == (list(found), published.kind)
        assert all(np.array_equal(arrays[name], found[name]) for name in arrays)

    def test_lie_in_the_file(self, path: Path) -> None:
        """The arrays that build gets are in the mapped file, and nowhere else."""
        found = weights.load(same, weights.publish({"a": np.ones(100_000), "b": np.ones(9)}, path).path)
        assert all(isinstance(array, np.memmap) for array in found.values())

    def test_build_makes_the_model_of_them(self, path: Path) -> None:
        """What load gives is what build made."""
        weights.publish({"a": np.ones(4)}, path)
        assert 4 == weights.load(lambda arrays: arrays["a"].sum(), path)

    @pytest.mark.parametrize(
        "source",
        [
            np.array([object()]),
            {"a": np.ones(3), "b": np.array([None])},
            {1: np.ones(3)},
            np.ma.masked_array([1, 2], [True, False]),
        ],
        ids=["objects", "objects in a mapping", "names that are no text", "masked"],
    )
    def test_that_a_file_cannot_hold_whole_are_refused(self, path: Path, source: Any) -> None:
        """Arrays that would need a pickle, or would lose something, are refused before anything is written."""
        with pytest.raises(InvalidOption, match="source"):
            weights.publish(source, path)
        assert not path.exists()


class TestPublish:
    @pytest.mark.parametrize(
        "source",
        [None, 3, "weights.pt", {}, [1, 2], {"a": 1}, {"a": np.ones(2), "b": 2}],
        ids=["None", "a number", "text", "an empty mapping", "a list", "numbers", "arrays and numbers"],
    )
    def test_refuses_what_cannot_be_mapped(self, path: Path, source: Any) -> None:
        """What no format can map is refused with what can be given instead."""
        with pytest.raises(InvalidOption, match="allow_pickle=True"):
            weights.publish(source, path)
        with pytest.raises(InvalidOption, match="allow_pickle=True"):
            weights.publish(lambda: source, path, key="a")

    def test_tells_what_is_current(self, path: Path) -> None:
        """The answer has version, size and hash, and can be asked for later."""
        published = weights.publish(np.ones(1000), path, key="2026-11")
        assert (1, "numpy", "2026-11", True, path) == (
            published.version,
            published.kind,
            published.key,
            published.fresh,
            published.path,
        )
        assert published.bytes > 8000
        later = weights.current(path)
        assert (published.sha256, published.bytes, False) == (later.sha256, later.bytes, later.fresh)

    def test_makes_nothing_that_is_there(self, path: Path) -> None:
        """A function is called only if what is published has another key."""
        make = Makes(np.ones(9))
        found = [weights.publish(make, path, key=key) for key in ("a", "a", "b")]
        make.model = np.zeros(9)
        found.append(weights.publish(make, path, key="c"))
        assert ([True, False, False, True], [1, 1, 1, 2]) == (
            [one.fresh for one in found],
            [one.version for one in found],
        )
        assert 3 == make.calls

    def test_makes_anew_what_is_broken(self, path: Path) -> None:
        """What is there under the key but truncated is made and published again."""
        make = Makes(np.ones(9))
        folder = next(weights.publish(make, path, key="a").path.with_name("net.d").glob("0*"))
        (folder / "0.npy").write_bytes(b"")
        assert (True, 2) == (weights.publish(make, path, key="a").fresh, make.calls)

    def test_wants_a_key_for_a_function(self, path: Path) -> None:
        """Without a key, old weights would be served for ever: that is refused, with what to write."""
        with pytest.raises(InvalidOption, match="key='2026-11'"):
            weights.publish(lambda: np.ones(3), path)

    def test_passes_on_what_the_function_raises(self, path: Path) -> None:
        """A failing checkpoint is the caller's own error, and the next publisher has its turn."""

        def fail() -> Any:
            raise OSError("no checkpoint")

        with pytest.raises(OSError, match=r"^no checkpoint$"):
            weights.publish(fail, path, key="a")
        assert weights.publish(Makes(np.ones(3)), path, key="a").fresh

    @pytest.mark.parametrize("key", ["", 3, b"a"])
    def test_refuses_a_key_that_is_no_name(self, path: Path, key: Any) -> None:
        """A key is text."""
        with pytest.raises(InvalidOption, match="key="):
            weights.publish(np.ones(3), path, key=key)

    @pytest.mark.parametrize("path", ["", "/", b"net", 3, None])
    def test_refuses_a_path_that_is_none(self, path: Any) -> None:
        """All doors refuse a path that names no file."""
        for door in (lambda: weights.publish(np.ones(3), path), lambda: weights.current(path)):
            with pytest.raises(InvalidOption, match="path="):
                door()
        with pytest.raises(InvalidOption, match="path="):
            weights.load(same, path)

    def test_says_where_the_folder_is_missing(self, tmp_path: Path) -> None:
        """Folders are not made on the way: a slip in the path is found out."""
        with pytest.raises(PublishFailed, match="Make the folder"):
            weights.publish(np.ones(3), tmp_path / "missing" / "net")


class TestLoad:
    def test_needs_something_published(self, path: Path) -> None:
        """Without weights there is an error that says what to call."""
        with pytest.raises(WeightsMissing, match="publish"):
            weights.load(same, path)

    @pytest.mark.parametrize("build", [None, 3, "Net"])
    def test_refuses_a_build_that_cannot_be_called(self, path: Path, build: Any) -> None:
        """Build is a function."""
        with pytest.raises(InvalidOption, match="build="):
            weights.load(build, path)

    def test_that_is_overtaken_by_publishers_takes_the_newest(self, path: Path) -> None:
        """A reader whose version was removed while it was loading begins again, with the newest."""
        weights.publish(np.zeros(3), path)
        calls: list[float] = []

        def build(array: Any) -> float:
            calls.append(array[0])
            if len(calls) == 1:
                for value in (1, 2):
                    weights.publish(np.full(3, value), path)
                raise FileNotFoundError
            return calls[-1]

        assert (2, [0, 2]) == (weights.load(build, path), calls)

    def test_passes_on_that_build_misses_a_file(self, path: Path) -> None:
        """A file of its own that build does not find is not a reason to begin again."""
        weights.publish(np.zeros(3), path)
        calls = []

        def build(_array: Any) -> None:
            calls.append(1)
            raise FileNotFoundError("labels.txt")

        with pytest.raises(FileNotFoundError, match=r"labels\.txt"):
            weights.load(build, path)
        assert [1] == calls

    def test_of_an_unknown_kind_is_refused(self, path: Path) -> None:
        """What a newer modelguard has published is refused by name."""
        weights.publish(np.ones(3), path)
        path.write_text(path.read_text().replace('"numpy"', '"newer"'))
        with pytest.raises(WeightsRefused, match="'newer' is unknown"):
            weights.load(same, path)


class TestPickles:
    @pytest.fixture(autouse=True)
    def _joblib(self) -> None:
        pytest.importorskip("joblib")

    @pytest.fixture
    def model(self) -> Any:
        return {"trees": [np.arange(50_000.0), np.ones(9)], "depth": 3}

    def test_come_back_with_their_arrays_mapped(self, path: Path, model: Any) -> None:
        """Arrays inside an object are mapped, and read-only."""
        weights.publish(model, path, allow_pickle=True)
        found = weights.load(same, path, allow_pickle=True)
        assert (3, True, False) == (
            found["depth"],
            np.array_equal(model["trees"][0], found["trees"][0]),
            found["trees"][0].flags.writeable,
        )
        assert isinstance(found["trees"][0], np.memmap)

    def test_are_loaded_only_when_allowed(self, path: Path, model: Any) -> None:
        """A pickle runs code, so nobody gets one who has not asked for it."""
        weights.publish(lambda: model, path, key="a", allow_pickle=True)
        with pytest.raises(WeightsRefused, match="runs whatever code it holds"):
            weights.load(same, path)

    def test_are_not_even_opened_when_they_were_changed(self, path: Path, model: Any) -> None:
        """The hash is checked before anything is unpickled."""
        weights.publish(model, path, allow_pickle=True)
        (file,) = path.with_name("net.d").glob("*/object.joblib")
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(WeightsRefused, match="content has changed"):
            weights.load(same, path, allow_pickle=True)

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is mapped is told by /proc")
    def test_without_arrays_are_refused(self, path: Path) -> None:
        """An object of which nothing can be mapped would be one copy per process: load says so."""
        weights.publish({"words": ["one", "two"] * 999}, path, allow_pickle=True)
        with pytest.raises(WeightsRefused, match="are mapped") as caught:
            weights.load(same, path, allow_pickle=True)
        assert "forked workers" in caught.value.fix

    def test_need_joblib(self, path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without joblib the error says what is missing, and nothing is published."""
        monkeypatch.setitem(sys.modules, "joblib", None)
        with pytest.raises(NotSupported, match="joblib is not installed"):
            weights.publish(model, path, allow_pickle=True)
        assert not path.exists()


class TestTheProof:
    FILE = Path("/srv/net.d/000001-aaaaaaaaaaaa/weights.pt")
    MAPS = """\
7f0000000000-7f0000001000 rw-p 00000000 fe:00 42      {file}
7f0000001000-7f0000004000 r--p 00001000 fe:00 42      {file}
7f0000008000-7f0000009000 rw-s 00000000 fe:00 42      {file}
7f000000a000-7f000000b000 rw-p 00000000 00:00 0
7f000000c000-7f000000d000 r--p 00000000 fe:00 43      /srv/net.d/000002-bbbbbbbbbbbb/weights.pt
"""

    @pytest.fixture(params=["", " (deleted)"], ids=["there", "removed"])
    def maps(self, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
        maps = tmp_path / "maps"
        maps.write_text(self.MAPS.format(file=f"{self.FILE}{request.param}"))
        return maps

    @pytest.mark.parametrize(("start", "size"), [(0x0, 0x1000), (0xFF0, 0x2000), (0x3FFF, 1), (0x9000, 0)])
    def test_data_in_the_mapping_is_accepted(self, maps: Path, start: int, size: int) -> None:
        """Data may span parts of the mapping, and the file may be gone by now; what is empty lies anywhere."""
        _mapped.require([Block("w", 0x7F0000000000 + start, size)], [self.FILE], fix="Do.", maps=maps)

    @pytest.mark.parametrize(("start", "size"), [(0xA000, 8), (0x3FFF, 2), (0xC000, 8), (0x8000, 8)])
    def test_data_elsewhere_is_refused(self, maps: Path, start: int, size: int) -> None:
        """Data in other memory, beyond the end, in another version, or where writes reach the file is refused."""
        with pytest.raises(WeightsRefused, match=r"own copy: w\. Do\."):
            _mapped.require([Block("w", 0x7F0000000000 + start, size)], [self.FILE], fix="Do.", maps=maps)

    def test_where_nothing_tells_nothing_is_refused(self, tmp_path: Path) -> None:
        """Without /proc, as on macOS, load does without the proof."""
        _mapped.require([Block("w", 1, 8)], [self.FILE], fix="Do.", maps=tmp_path / "missing")
        assert _mapped.mapped_bytes(self.FILE, maps=tmp_path / "missing") is None
