"""Published objects that hold numpy arrays: a pickle by joblib, whose arrays are mapped.

A pickle runs whatever code it holds when it is loaded. So both sides have to say ``allow_pickle=True``, and the file is
opened only after its owner and its hash were checked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelguard._units import format_bytes
from modelguard.errors import NotSupported, WeightsRefused
from modelguard.sharing import _mapped

if TYPE_CHECKING:
    from modelguard.sharing.formats import Create

__all__ = ["FORMAT"]

_FILE = "object.joblib"

#: Less than this share of the file mapped means that the object has copied its arrays, as scikit-learn's trees do.
_SHARE = 0.5

_FORK = "Share it between forked workers instead, or publish its arrays alone."


class JoblibFormat:
    """Any object that can be pickled and holds numpy arrays."""

    kind = "pickle"

    def write(self, source: Any, create: Create) -> Mapping[str, Any]:
        """Write the object by ``joblib.dump``, uncompressed."""
        with create(_FILE) as file:
            _joblib().dump(source, file, compress=0)
        return {}

    def load(self, build: Callable[..., Any], folder: Path, details: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Call ``build`` with the object."""
        file = folder / _FILE
        made = _joblib().load(file, mmap_mode="r")
        _require(file)
        return build(made)


FORMAT = JoblibFormat()


def _require(file: Path) -> None:
    # Which arrays an object holds, nobody can tell; how much of the file it has mapped, the kernel can.
    mapped, size = _mapped.mapped_bytes(file), file.stat().st_size
    if mapped is not None and mapped < size * _SHARE:
        why = f"only {format_bytes(mapped)} of {format_bytes(size)} are mapped: the rest is not numpy arrays, or copied"
        raise WeightsRefused(file, why=why, fix=_FORK)


def _joblib() -> Any:
    try:
        return importlib.import_module("joblib")
    except ModuleNotFoundError:
        raise NotSupported("publishing pickled objects", reason="joblib is not installed") from None
