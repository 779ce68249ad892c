"""Published numpy arrays: one ``.npy`` file each, without pickle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from modelguard import _units
from modelguard.errors import InvalidOption, WeightsRefused
from modelguard.sharing import _weights_formats

if TYPE_CHECKING:
    from modelguard.sharing._weights_formats import Create


kind = "numpy"


def write(source: Any, create: Create) -> Mapping[str, Any]:
    """Write one array, or each of a mapping into a numbered file: the names of arrays may not be valid file names."""
    named = {None: source} if isinstance(source, np.ndarray) else source
    for name, array in named.items():
        _check(name, array)
    for number, array in enumerate(named.values()):
        with create(_file(number)) as file:
            # Not to the file itself: there numpy uses its own code, which hides why a write failed.
            sink: Any = SimpleNamespace(write=file.write)
            np.save(sink, array, allow_pickle=False)
    return {"names": None if named is not source else list(named)}


def load(build: Callable[..., Any], folder: Path, details: Mapping[str, Any]) -> Any:
    names = _names(folder, details)
    files = [folder / _file(number) for number in range(1 if names is None else len(names))]
    # However long a header is: its hash was checked.
    arrays = [np.load(file, mmap_mode="r", allow_pickle=False, max_header_size=sys.maxsize) for file in files]
    labels = ["the array"] if names is None else names
    starts = [array.__array_interface__["data"][0] for array in arrays]
    blocks = map(_weights_formats.Block, labels, starts, (array.nbytes for array in arrays))
    _weights_formats.require(blocks, files, fix="Publish the arrays again.")
    return build(arrays[0] if names is None else dict(zip(names, arrays, strict=True)))


def _file(number: int) -> str:
    return f"{number}.npy"


def _names(folder: Path, details: Mapping[str, Any]) -> list[str] | None:
    names = details.get("names", ())
    if names is None or (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        return names
    raise WeightsRefused(folder, why="the names of its arrays are missing", fix="Publish the arrays again.")


def _check(name: object, array: Any) -> None:
    why, fix = None, "Give plain arrays of numbers or of fixed-length text."
    if name is not None and not isinstance(name, str):
        why = f"must have strings as names, and {name!r} is {_units.kind_of(name)}"
    elif array.dtype.hasobject:
        why = f"must not contain Python objects, which cannot be mapped: see {name or 'the array'}"
    elif type(array) not in (np.ndarray, np.memmap):
        why = f"must be plain arrays, and {name or 'the array'} is a {type(array).__name__}"
    elif not _is_kept(array.dtype):
        why = f"must have types that a file of numpy's keeps, and {name or 'the array'} has {array.dtype}"
        fix = "Publish the bytes, as array.view('u1') or 'u2', and view them as that type again in build()."
    if why is not None:
        raise InvalidOption("source", "arrays", why=why, fix=fix)


def _is_kept(dtype: np.dtype[Any]) -> bool:
    """Whether a file has a name for the type. It has none for bfloat16, for one, which would come back as raw bytes."""
    try:
        return bool(np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) == dtype)
    except ValueError:  # fields that overlap
        return False
