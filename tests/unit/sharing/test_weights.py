"""Published arrays, and the functions that publish and load."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelguard import weights
from modelguard.errors import InvalidOption, NotSupported, PublishFailed, WeightsMissing, WeightsRefused
from modelguard.sharing import _weights_formats
from modelguard.sharing._weights import WeightsStore, digest_of
from modelguard.sharing._weights_formats import Block

np = pytest.importorskip("numpy")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net"


def same(model: Any) -> Any:
    """A build that returns its argument."""
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
            np.zeros(3, {"names": ["whole", "half"], "formats": ["i4", "i2"], "offsets": [0, 2]}),
        ],
        ids=["objects", "objects in a mapping", "names that are not text", "masked", "overlapping fields"],
    )
    def test_that_a_file_cannot_hold_are_rejected(self, path: Path, source: Any) -> None:
        """Arrays that would need a pickle, or would lose something, are rejected before anything is written."""
        with pytest.raises(InvalidOption, match="source"):
            weights.publish(source, path)
        assert not path.exists()

    def test_of_a_type_that_a_file_does_not_keep_are_rejected(self, path: Path) -> None:
        """A bfloat16 would come back as two raw bytes; as integers it can be published, and viewed as itself again."""
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
        array = np.arange(3).astype(bfloat16)
        with pytest.raises(InvalidOption, match=r"a has bfloat16.*array\.view"):
            weights.publish({"a": array}, path)
        weights.publish({"a": array.view("u2")}, path)
        assert np.array_equal(array, weights.load(lambda arrays: arrays["a"].view(bfloat16), path))

    def test_of_hundreds_of_fields_come_back(self, path: Path) -> None:
        """However long the description of their type is."""
        table = np.ones(3, [(f"a feature with number {number}", "f4") for number in range(500)])
        weights.publish(table, path)
        assert np.array_equal(table, weights.load(same, path))


class TestPublish:
    @pytest.mark.parametrize(
        "source",
        [None, 3, "weights.pt", {}, [1, 2], {"a": 1}, {"a": np.ones(2), "b": 2}],
        ids=["None", "a number", "text", "an empty mapping", "a list", "numbers", "arrays and numbers"],
    )
    def test_refuses_what_cannot_be_mapped(self, path: Path, source: Any) -> None:
        """The error for an object that no format can map says what to give instead."""
        with pytest.raises(InvalidOption, match="allow_pickle=True"):
            weights.publish(source, path)
        with pytest.raises(InvalidOption, match="allow_pickle=True"):
            weights.publish(lambda: source, path, key="a")

    def test_describes_what_is_current(self, path: Path) -> None:
        """The result has version, size and hash, also later."""
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

    def test_makes_nothing_twice(self, path: Path) -> None:
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

    def test_makes_again_what_is_broken(self, path: Path) -> None:
        """A truncated version with the same key is made and published again."""
        make = Makes(np.ones(9))
        folder = next(weights.publish(make, path, key="a").path.with_name("net.d").glob("0*"))
        (folder / "0.npy").write_bytes(b"")
        assert (True, 2) == (weights.publish(make, path, key="a").fresh, make.calls)

    def test_needs_a_key_for_a_function(self, path: Path) -> None:
        """Without a key, old weights would be served for ever; the error says what to write."""
        with pytest.raises(InvalidOption, match="key='2026-11'"):
            weights.publish(lambda: np.ones(3), path)

    def test_passes_on_what_the_function_raises(self, path: Path) -> None:
        """The error of a failing function reaches the caller, and the next publisher can publish."""

        def fail() -> Any:
            raise OSError("no checkpoint")

        with pytest.raises(OSError, match=r"^no checkpoint$"):
            weights.publish(fail, path, key="a")
        assert weights.publish(Makes(np.ones(3)), path, key="a").fresh

    @pytest.mark.parametrize("key", ["", 3, b"a"])
    def test_rejects_an_invalid_key(self, path: Path, key: Any) -> None:
        """A key is text."""
        with pytest.raises(InvalidOption, match="key="):
            weights.publish(np.ones(3), path, key=key)

    @pytest.mark.parametrize("path", ["", "/", b"net", 3, None, "a\0b", "a\ud800b"])
    def test_rejects_an_invalid_path(self, path: Any) -> None:
        """Every function rejects a path that is not that of a file."""
        for call in (lambda: weights.publish(np.ones(3), path), lambda: weights.current(path)):
            with pytest.raises(InvalidOption, match="path="):
                call()
        with pytest.raises(InvalidOption, match="path="):
            weights.load(same, path)

    def test_rejects_a_folder(self, tmp_path: Path) -> None:
        """The path of a folder is rejected with the path of a file in it."""
        for use in (lambda: weights.publish(np.arange(3), tmp_path), lambda: weights.load(same, tmp_path)):
            with pytest.raises(InvalidOption, match=f"is a folder. Give a file in it, such as '{tmp_path}/weights'"):
                use()

    def test_says_which_values_are_no_arrays(self, path: Path) -> None:
        """A mapping with other values than arrays is rejected with the kinds that it holds."""
        with pytest.raises(InvalidOption, match=r"must all be arrays.*are of the types int and ndarray"):
            weights.publish({"table": np.arange(3), "size": 3}, path)
        with pytest.raises(InvalidOption, match="and there are none"):
            weights.publish({}, path)

    def test_takes_a_model_that_can_be_called_for_a_model(self, path: Path) -> None:
        """Without a key, only a function or a class can be meant to make the model."""
        with pytest.raises(InvalidOption, match="a Makes cannot be mapped safely"):
            weights.publish(Makes(3), path)

    def test_says_where_the_folder_is_missing(self, tmp_path: Path) -> None:
        """Missing folders are not created, so that a typo in the path is noticed."""
        with pytest.raises(PublishFailed, match="Create the folder"):
            weights.publish(np.ones(3), tmp_path / "missing" / "net")


class TestLoad:
    def test_needs_something_published(self, path: Path) -> None:
        """Without weights the error names the function to call."""
        with pytest.raises(WeightsMissing, match="publish"):
            weights.load(same, path)

    @pytest.mark.parametrize("build", [None, 3, "Net"])
    def test_rejects_a_build_that_is_not_callable(self, path: Path, build: Any) -> None:
        """Build is a function."""
        with pytest.raises(InvalidOption, match="build="):
            weights.load(build, path)

    def test_says_how_build_is_called(self, path: Path) -> None:
        """A ``build`` that does not accept the arrays is rejected before it is called."""
        weights.publish(np.arange(3), path)
        with pytest.raises(InvalidOption, match=r"build=.*is called with what was published: too many positional"):
            weights.load(lambda: None, path)

    def test_that_is_overtaken_by_publishers_takes_the_newest(self, path: Path) -> None:
        """A reader whose version was removed during the load starts again, with the newest."""
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

    def test_passes_on_that_build_does_not_find_a_file(self, path: Path) -> None:
        """A file that ``build`` itself does not find does not cause another attempt."""
        weights.publish(np.zeros(3), path)
        calls = []

        def build(_array: Any) -> None:
            calls.append(1)
            raise FileNotFoundError("labels.txt")

        with pytest.raises(FileNotFoundError, match=r"labels\.txt"):
            weights.load(build, path)
        assert [1] == calls

    def test_of_an_unknown_kind_is_refused(self, path: Path) -> None:
        """Weights of a newer modelguard are rejected, with their kind."""
        weights.publish(np.ones(3), path)
        manifest = WeightsStore(path).current()
        digest = digest_of("newer", manifest.details, manifest.files)
        path.write_text(replace(manifest, kind="newer", sha256=digest).to_json())
        with pytest.raises(WeightsRefused, match="'newer' is unknown"):
            weights.load(same, path)

    @pytest.mark.parametrize("names", [{}, {"names": "x"}, {"names": [1]}, {"names": []}])
    def test_without_the_names_of_its_arrays_is_refused(self, path: Path, names: dict[str, Any]) -> None:
        """A manifest that matches its hash but lacks what the format needs is rejected as any other."""
        weights.publish({"x": np.ones(3)}, path)
        manifest = WeightsStore(path).current()
        digest = digest_of("numpy", names, manifest.files)
        path.write_text(replace(manifest, details=names, sha256=digest).to_json())
        with pytest.raises(WeightsRefused, match="the names of its arrays are missing"):
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
        """A pickle runs code, so it is loaded only with allow_pickle."""
        weights.publish(lambda: model, path, key="a", allow_pickle=True)
        with pytest.raises(WeightsRefused, match="runs any code that it contains"):
            weights.load(same, path)

    def test_are_not_even_opened_when_they_were_changed(self, path: Path, model: Any) -> None:
        """The hash is checked before anything is unpickled."""
        weights.publish(model, path, allow_pickle=True)
        (file,) = path.with_name("net.d").glob("*/object.joblib")
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(WeightsRefused, match="content has changed"):
            weights.load(same, path, allow_pickle=True)

    def test_may_be_objects_that_can_be_called(self, path: Path) -> None:
        """Without a key such an object is the model itself, and no function that makes one."""
        model = Makes(np.arange(50_000.0))
        weights.publish(model, path, allow_pickle=True)
        assert np.array_equal(model.model, weights.load(same, path, allow_pickle=True).model)
        assert 0 == model.calls

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc shows what is mapped")
    def test_without_arrays_are_refused(self, path: Path) -> None:
        """An object that cannot be mapped would be one copy per process; load gives an error."""
        weights.publish({"words": ["one", "two"] * 999}, path, allow_pickle=True)
        with pytest.raises(WeightsRefused, match="are mapped") as caught:
            weights.load(same, path, allow_pickle=True)
        assert "forked workers" in caught.value.fix

    def test_need_joblib(self, path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without joblib the error says what to install, and nothing is published."""
        monkeypatch.setitem(sys.modules, "joblib", None)
        monkeypatch.delitem(sys.modules, "modelguard.adapters._joblib_weights", raising=False)
        with pytest.raises(NotSupported, match="joblib is not installed; pip install joblib"):
            weights.publish(model, path, allow_pickle=True)
        assert not path.exists()


class TestMappedData:
    FILE = Path("/srv/net.d/000001-aaaaaaaaaaaa/weights.pt")
    MAPS = """\
7f0000000000-7f0000001000 rw-p 00000000 fe:00 42      {file}
7f0000001000-7f0000004000 r--p 00001000 fe:00 42      {file}
7f0000008000-7f0000009000 rw-s 00000000 fe:00 42      {file}
7f000000a000-7f000000b000 rw-p 00000000 00:00 0
7f000000c000-7f000000d000 r--p 00000000 fe:00 43      /srv/net.d/000002-bbbbbbbbbbbb/weights.pt
"""

    @pytest.fixture(params=["", " (deleted)"], ids=["there", "removed"])
    def root(self, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
        maps = tmp_path / "proc" / "self" / "maps"
        maps.parent.mkdir(parents=True)
        maps.write_text(self.MAPS.format(file=f"{self.FILE}{request.param}"))
        return tmp_path

    @pytest.mark.parametrize(("start", "size"), [(0x0, 0x1000), (0xFF0, 0x2000), (0x3FFF, 1), (0x9000, 0)])
    def test_data_in_the_mapping_is_accepted(self, root: Path, start: int, size: int) -> None:
        """Data may span parts of the mapping, and the file may be gone by now; empty data may be anywhere."""
        _weights_formats.require([Block("w", 0x7F0000000000 + start, size)], [self.FILE], fix="Do.", root=root)

    @pytest.mark.parametrize(("start", "size"), [(0xA000, 8), (0x3FFF, 2), (0xC000, 8), (0x8000, 8)])
    def test_data_elsewhere_is_refused(self, root: Path, start: int, size: int) -> None:
        """Data in other memory, beyond the end, in another version, or where writes reach the file is rejected."""
        with pytest.raises(WeightsRefused, match=r"own copy: w\. Do\."):
            _weights_formats.require([Block("w", 0x7F0000000000 + start, size)], [self.FILE], fix="Do.", root=root)

    def test_without_proc_everything_is_accepted(self, tmp_path: Path) -> None:
        """Without /proc, as on macOS, load skips the check."""
        _weights_formats.require([Block("w", 1, 8)], [self.FILE], fix="Do.", root=tmp_path)
        assert _weights_formats.mapped_bytes(self.FILE, root=tmp_path) is None
