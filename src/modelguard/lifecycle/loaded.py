"""``Loaded``: a model together with its version, as a loader may return it."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from modelguard import _public, _units
from modelguard.errors import InvalidOption

__all__ = ["Loaded"]

M = TypeVar("M")

#: Characters. A version becomes a label of a metric and a part of log lines; a SHA-512 digest in hexadecimal has 128.
LONGEST = 128


class Loaded(Generic[M]):
    """What a loader may return instead of the model alone: the model and its version.

    Calls, ``validate``, ``warmup`` and ``unload`` get the model. The version shows in ``status()``, events, metrics,
    log lines, ``/readyz`` and ``modelguard top``::

        def load() -> Loaded[Model]:
            return Loaded(read_model("model/"), version="2026-11-20")

    Args:
        model: The model.
        version: Text of 1 to 128 printable characters, such as a date, a revision or the version of a registry.

    Raises:
        InvalidOption: ``version`` is not such a text, or ``model`` is a ``Loaded`` itself.
    """

    __slots__ = ("model", "version")

    def __init__(self, model: M, *, version: str) -> None:
        if isinstance(model, Loaded):
            why = "is a Loaded itself, with a version of its own"
            raise InvalidOption("model", model, why=why, fix="Return it as it is, or pass its attribute model.")
        self.model = model
        self.version = _checked(version)

    def __repr__(self) -> str:
        return f"Loaded({type(self.model).__name__}, version={self.version!r})"


def _checked(version: object) -> str:
    if not isinstance(version, str):
        why = f"must be text, not {_units.kind_of(version)}"
        fix = "Leave Loaded out if there is no version." if version is None else f"Write version={str(version)!r}."
        raise InvalidOption("version", version, why=why, fix=fix)
    if not version.strip():
        why = "must be text that is not empty"
        raise InvalidOption("version", version, why=why, fix="Return the model alone if it has no version.")
    if len(version) > LONGEST or not version.isprintable():
        why = f"must have at most {LONGEST} characters, all of them printable"
        raise InvalidOption("version", version, why=why, fix="Give a short name, such as a date or a revision.")
    return version


class Unpacked(NamedTuple):
    """What a loader returned: the model, and its version if it has one."""

    model: Any
    version: str | None


def unpacked(returned: object) -> Unpacked:
    """Take apart what a loader returned."""
    if isinstance(returned, Loaded):
        return Unpacked(returned.model, returned.version)
    return Unpacked(returned, None)


_public.set_module(globals(), "modelguard")
