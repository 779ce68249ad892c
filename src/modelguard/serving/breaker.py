"""``Breaker``: leave a model alone that fails again and again, and try it now and then."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from modelguard import _units
from modelguard.errors import InvalidOption

__all__ = ["Breaker", "Circuit", "Reloadable"]

State = Literal["closed", "open", "half-open"]

#: Seconds that a caller is told to wait while the probe is under way: nobody knows how long that takes.
_SOON = 1.0


class Reloadable(Protocol):
    """What a breaker may ask for a fresh model, as :class:`modelguard.ModelGuard` is."""

    def reload(self, *, wait: bool = ...) -> object:
        """Begin a reload; return at once if ``wait`` is false."""


@dataclass(frozen=True)
class Breaker:
    """When to stop calling a model that fails, and when to try again.

    It opens after ``failures`` batches in a row have failed, refuses with ``CircuitOpen`` for ``cooldown``, then lets
    one item through: if that succeeds it closes, else it stays open for twice as long, up to ``max_cooldown``.

    What bisecting pins on single items does not count; nor do ``Overloaded`` and ``ItemRefused``, nor errors of the
    types in ``ignore``. Of an item that was alone in its batch nobody can tell whether it or the model is at fault: it
    counts.

    Args:
        failures: So many in a row open it, at least 1.
        cooldown: How long it stays open.
        max_cooldown: How long at most, as failed probes double the cooldown.
        ignore: Types of errors that are the input's fault, such as ``UnicodeDecodeError``.
        reload: A guard to ask for a fresh model when the breaker opens, and after each failed probe.

    Raises:
        InvalidOption: One of these cannot be meant.
    """

    failures: int = 5
    cooldown: _units.Duration = 10.0
    max_cooldown: _units.Duration = 60.0
    ignore: tuple[type[BaseException], ...] = ()
    reload: Reloadable | None = None

    def __post_init__(self) -> None:
        if isinstance(self.failures, bool) or not isinstance(self.failures, int) or self.failures < 1:
            raise InvalidOption("failures", self.failures, why="a whole number of 1 or more is needed", fix="Write 5.")
        shortest = _units.seconds(self.cooldown, "cooldown")
        if _units.seconds(self.max_cooldown, "max_cooldown") < shortest:
            why = f"it is shorter than cooldown={self.cooldown!r}"
            raise InvalidOption("max_cooldown", self.max_cooldown, why=why, fix="Give the same or more.")
        kinds = self.ignore
        if not isinstance(kinds, tuple) or not all(isinstance(k, type) and issubclass(k, BaseException) for k in kinds):
            raise InvalidOption(
                "ignore", kinds, why="a tuple of exception types is needed", fix="Write for example (ValueError,)."
            )
        if self.reload is not None and not callable(getattr(self.reload, "reload", None)):
            why = "it has no reload()"
            raise InvalidOption("reload", self.reload, why=why, fix="Give the guard itself: reload=nlp.")


class Circuit:
    """The state of one breaker. Not safe under threads by itself.

    Attributes:
        state: ``"closed"``, ``"open"``, or ``"half-open"`` while one item is tried.
        failures: Batches that have failed in a row.
        cooldown: Seconds that it stays open this time.
    """

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        self._shortest = _units.seconds(breaker.cooldown, "cooldown")
        self._longest = _units.seconds(breaker.max_cooldown, "max_cooldown")
        self.cooldown = self._shortest
        self._until = -math.inf
        self.state: State = "closed"
        self.failures = 0

    def refuses(self, now: float) -> float | None:
        """Seconds until the next try makes sense if nothing may pass now, else None."""
        if self.state == "closed" or (self.state == "open" and now >= self._until):
            return None
        return max(self._until - now, _SOON)

    def passed(self) -> bool:
        """An item has been let in; whether it is the probe."""
        if self.state == "closed":
            return False
        self.state = "half-open"
        return True

    def unproven(self) -> None:
        """The probe has come to no verdict: the next item may be the probe."""
        if self.state == "half-open":
            self.state = "open"

    def succeeded(self, *, probe: bool) -> bool:
        """A batch has gone well; whether that closes the circuit."""
        if self.state != "closed" and not probe:
            return False  # it began before the circuit opened, and says nothing of the time after
        closes = self.state != "closed"
        self.state = "closed"
        self.failures = 0
        self.cooldown = self._shortest
        return closes

    def failed(self, now: float, *, probe: bool) -> bool:
        """A batch has failed; whether that opens the circuit."""
        self.failures += 1
        if (self.state != "closed" and not probe) or (
            self.state == "closed" and self.failures < self._breaker.failures
        ):
            return False
        if self.state != "closed":
            self.cooldown = min(2 * self.cooldown, self._longest)
        self.state = "open"
        self._until = now + self.cooldown
        return True
