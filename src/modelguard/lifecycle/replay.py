"""``Replay``: which recorded calls a new model must answer, and how well."""

# Without `from __future__ import annotations`: this class is public under another module's name, where
# `typing.get_type_hints` would not find what its annotations refer to.

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from modelguard import _public, _units
from modelguard.errors import InvalidOption

__all__ = ["Replay"]


@dataclass(frozen=True, init=False, repr=False)
class Replay:
    """The rule by which a new model is compared with the current one, on recorded calls.

    The guard keeps copies of the arguments of recent calls. A reload runs these calls on both models, once the new one
    is loaded, validated and warm, and rejects it (``ModelRejected``) if too few answers agree, or if it is too slow::

        nlp = guard(load, reload_on=Changed(etag), replay=Replay(100, min_agreement=0.95, same=close_enough))

    Args:
        count: How many calls are kept, the latest ones. Default 100.
        min_agreement: The share of the answers that must agree, from 0 to 1. Default 0.9, which finds a wrong model:
            of 100 answers, a model that agrees on 95 % of all inputs passes in 99 of 100 reloads.
        max_slowdown: How many times as long as on the current model a call may take, at least 1; None: any time. It is
            compared with the median of all calls, if there are at least ten, or if time is up before. Default 2; for a
            model and itself, it was 0.95 to 1.07 in 437 reloads.
        same: Called with the new answer and the current model's: whether they agree. If it raises, they do not.
            Default: ``==``. Iterators and streams are compared as lists.
        max_memory: How much memory the arguments may take, pickled: bytes, or text such as ``"500 kB"``. The oldest go
            first, and a call that needs more alone is not kept. Default 16 MB.
        timeout: How long the calls on both models may take together; those that have ended by then count. A plain
            function is not interrupted: set the guard's ``load_timeout`` against one that hangs. Default ten seconds.

    Raises:
        InvalidOption: One of them is invalid.
    """

    count: int
    min_agreement: float
    max_slowdown: float | None
    same: Callable[[Any, Any], object]
    max_memory: int
    timeout: float

    def __init__(
        self,
        count: int = 100,
        *,
        min_agreement: float = 0.9,
        max_slowdown: float | None = 2.0,
        same: Callable[[Any, Any], object] = operator.eq,
        max_memory: int | str = "16 MB",
        timeout: _units.Duration = 10.0,
    ) -> None:
        object.__setattr__(self, "count", _units.whole_number(count, "count"))
        object.__setattr__(self, "min_agreement", _share(min_agreement))
        object.__setattr__(self, "max_slowdown", None if max_slowdown is None else _factor(max_slowdown))
        if not callable(same):
            why = f"must be a function of two answers, not {_units.kind_of(same)}"
            raise InvalidOption("same", same, why=why, fix="Write for example same=numpy.allclose.")
        object.__setattr__(self, "same", same)
        object.__setattr__(self, "max_memory", _units.size(max_memory, "max_memory"))
        object.__setattr__(self, "timeout", _units.seconds(timeout, "timeout"))

    def __repr__(self) -> str:
        """As it would be written: without what is the default."""
        usual, names = Replay(), [field.name for field in fields(self)]
        given = [f"{name}={getattr(self, name)!r}" for name in names[1:] if getattr(self, name) != getattr(usual, name)]
        return f"Replay({', '.join([str(self.count), *given])})"

    @classmethod
    def parse(cls, value: object) -> "Replay | None":
        """Read a guard's ``replay``: a rule, a number of calls, or None.

        Raises:
            InvalidOption: It is anything else.
        """
        if value is None or isinstance(value, Replay):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            why = "must be a number of calls of at least 1, a Replay or None"
            fix = "Write replay=100, or replay=Replay(100, min_agreement=0.95)."
            raise InvalidOption("replay", value, why=why, fix=fix)
        return cls(value)

    def disagreements_allowed(self, compared: int) -> int:
        """How many of so many answers may differ."""
        return math.floor((1 - self.min_agreement) * compared + 1e-9)  # 0.1 * 10 must not become 0.999...


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        percent = isinstance(value, int | float) and not isinstance(value, bool) and 1 < value <= 100  # noqa: PLR2004
        fix = f"Write min_agreement={value / 100:g}." if percent else "Write for example min_agreement=0.95."  # type: ignore[operator]
        raise InvalidOption("min_agreement", value, why="must be a share from 0 to 1", fix=fix)
    return float(value)


def _factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        why = "must be a factor of at least 1, or None"
        raise InvalidOption("max_slowdown", value, why=why, fix="Write max_slowdown=2 for twice as long.")
    return float(value)


_public.set_module(globals(), "modelguard")
