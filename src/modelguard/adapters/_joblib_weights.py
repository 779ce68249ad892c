"""Published objects that contain numpy arrays: pickles written by joblib. Their arrays are mapped.

Loading a pickle runs any code that it contains. So both sides must pass ``allow_pickle=True``, and the file is opened
only after its owner and its hash have been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib  # type: ignore[import-untyped] # it has no stubs

from modelguard._units import format_bytes
from modelguard.errors import WeightsRefused
from modelguard.sharing import _weights_formats

if TYPE_CHECKING:
    from modelguard.sharing._weights_formats import Create

kind = "pickle"

_FILE = "object.joblib"

#: If a smaller part of the file is mapped, the object has copied its arrays, like scikit-learn's trees.
_MAPPED_PART = 0.5

_FORK = "Share it between forked workers instead, or publish only its arrays."


def write(source: Any, create: Create) -> Mapping[str, Any]:
    """Write any object that can be pickled and contains numpy arrays with ``joblib.dump``, uncompressed."""
    with create(_FILE) as file:
        joblib.dump(source, file, compress=0)
    return {}


def load(build: Callable[..., Any], folder: Path, details: Mapping[str, Any]) -> Any:  # noqa: ARG001
    file = folder / _FILE
    made = joblib.load(file, mmap_mode="r")
    _require(file)
    return build(made)


def _require(file: Path) -> None:
    # It is unknown which arrays an object contains, but the kernel knows how much of the file is mapped.
    mapped, size = _weights_formats.mapped_bytes(file), file.stat().st_size
    if mapped is not None and mapped < size * _MAPPED_PART:
        why = f"only {format_bytes(mapped)} of {format_bytes(size)} are mapped: the rest was copied, or is not an array"
        raise WeightsRefused(file, why=why, fix=_FORK)
