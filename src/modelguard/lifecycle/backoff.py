"""How long to wait after a failed load."""

from __future__ import annotations

from dataclasses import dataclass

from modelguard import _public, _units
from modelguard.errors import InvalidOption

__all__ = ["Backoff"]

_STEEPEST = 100


@dataclass(frozen=True, init=False)
class Backoff:
    """Exponential and jittered waits: ``first``, then ``factor`` times as long after each failure, up to ``longest``.

    Each wait is drawn between half of that and all of it, so that workers whose loads failed together do not retry
    together.

    Args:
        first: Wait after the first failure. Default one second.
        longest: The longest wait. Default one minute.
        factor: Growth from one failure to the next, 1 to 100. Default 2.

    Raises:
        InvalidOption: A duration is not positive, ``longest`` is shorter than ``first``, ``factor`` not in 1 to 100.
    """

    first: float
    longest: float
    factor: float

    def __init__(self, first: _units.Duration = 1.0, longest: _units.Duration = 60.0, *, factor: float = 2.0) -> None:
        object.__setattr__(self, "first", _units.seconds(first, "first"))
        object.__setattr__(self, "longest", _units.seconds(longest, "longest"))
        if self.longest < self.first:
            raise InvalidOption(
                "longest", longest, why="must not be shorter than first", fix=f"Give at least {first!r}."
            )
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= _STEEPEST:
            raise InvalidOption("factor", factor, why="must be between 1 and 100", fix="Write for example factor=2.")
        object.__setattr__(self, "factor", float(factor))

    def seconds(self, failures: int, draw: float) -> float:
        """Wait after so many failures in a row; ``draw`` is a random number in [0, 1)."""
        exponent = min(failures - 1, 64)  # far beyond any `longest`, and safe from overflow
        whole = min(self.longest, self.first * self.factor**exponent)
        return whole * (0.5 + draw / 2)


_public.set_module(globals(), "modelguard")
