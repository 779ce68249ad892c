"""``Breaker``: stop calling a model that fails again and again, and try it from time to time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.serving.status import Verdict

__all__ = ["Breaker", "Circuit", "Reloadable"]

CircuitState = Literal["closed", "open", "half-open"]
CircuitChange: TypeAlias = Literal["opened", "closed"] | None

#: ``retry_after`` in seconds while the probe is under way: nobody knows how long it takes.
_RETRY_DURING_PROBE = 1.0


class Reloadable(Protocol):
    """What a breaker can ask for a fresh model, such as :class:`modelguard.ModelGuard`."""

    def reload(self, *, wait: bool = ...) -> object:
        """Start a reload; return at once if ``wait`` is false."""


# Without `from __future__ import annotations`: this class is public under another module's name, where
# typing.get_type_hints() could not resolve text.
@dataclass(frozen=True)
class Breaker:
    """When to stop calling a model that fails, and when to try again.

    It opens after ``failures`` batches in a row have failed, and refuses items with ``CircuitOpen`` for ``cooldown``.
    Then it lets one item through. If that succeeds it closes, else it stays open for twice as long, up to
    ``max_cooldown``.

    Failures that bisecting pins on single items do not count; nor do ``Overloaded``, ``ItemRefused`` and errors of the
    types in ``ignore``. The failure of an item that was alone in its batch counts, because it cannot be known whether
    the item or the model is at fault.

    Args:
        failures: Failed batches in a row that open it, at least 1.
        cooldown: How long it stays open.
        max_cooldown: The longest it stays open: each failed probe doubles the cooldown.
        ignore: Types of errors that are the input's fault, such as ``UnicodeDecodeError``.
        reload: A guard that is asked for a fresh model when the breaker opens, and after each failed probe.

    Raises:
        InvalidOption: One of these is invalid.
    """

    failures: int = 5
    cooldown: _units.Duration = 10.0
    max_cooldown: _units.Duration = 60.0
    ignore: tuple[type[BaseException], ...] = ()
    reload: Reloadable | None = None

    def __post_init__(self) -> None:
        _units.whole_number(self.failures, "failures")
        shortest = _units.seconds(self.cooldown, "cooldown")
        if _units.seconds(self.max_cooldown, "max_cooldown") < shortest:
            why, fix = f"must not be shorter than cooldown={self.cooldown!r}", f"Give at least {self.cooldown!r}."
            raise InvalidOption("max_cooldown", self.max_cooldown, why=why, fix=fix)
        kinds = self.ignore
        if not isinstance(kinds, tuple) or not all(isinstance(k, type) and issubclass(k, BaseException) for k in kinds):
            why = "must be a tuple of exception types"
            raise InvalidOption("ignore", kinds, why=why, fix="Write for example (ValueError,).")
        given = self.reload
        if given is not None and (isinstance(given, type) or not callable(getattr(given, "reload", None))):
            why = f"must be an object with a reload(), not {_units.kind_of(given)}"
            raise InvalidOption("reload", given, why=why, fix="Pass the guard itself: reload=nlp.")


class Circuit:
    """The state of one breaker. Not thread-safe by itself.

    Attributes:
        state: ``"closed"``, ``"open"``, or ``"half-open"`` while one item, the probe, is tried.
        failures: Batches that have failed in a row.
        cooldown: Seconds that it stays open this time.
    """

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        self._shortest = _units.seconds(breaker.cooldown, "cooldown")
        self._longest = _units.seconds(breaker.max_cooldown, "max_cooldown")
        self.cooldown = self._shortest
        self._open_until = -math.inf
        self._probe: object = None  # which tries whether it can be closed
        self.state: CircuitState = "closed"
        self.failures = 0

    def retry_after(self, now: float) -> float | None:
        """Seconds after which to try again, if nothing may pass now; else None."""
        if self.state == "closed" or (self.state == "open" and now >= self._open_until):
            return None
        left = self._open_until - now
        return left if self.state == "open" else max(left, _RETRY_DURING_PROBE)

    def admitted(self, one: object) -> None:
        """Note what was admitted. It is the probe if the circuit is not closed."""
        if self.state != "closed":
            self._probe = one  # first: an exception may interrupt this at any point, and forget() has to know it
            self.state = "half-open"

    def forget(self, one: object) -> None:
        """Note that something gives no verdict. If it was the probe, the next one is."""
        if one is self._probe:
            self._probe = None
            if self.state == "half-open":
                self.state = "open"

    def ended(self, those: Sequence[object], verdict: Verdict, now: float) -> CircuitChange:
        """Note how what was admitted has ended. Returns whether that opens or closes the circuit."""
        probe, closed = self._probe is not None and self._probe in those, self.state == "closed"
        if verdict == "inconclusive":
            for one in those:
                self.forget(one)
            return None
        if probe:
            self._probe = None
        self.failures += verdict == "failed"
        if not (closed or probe):
            return None  # it started before the circuit opened, and says nothing about the model now
        if verdict == "succeeded":
            self.state, self.failures, self.cooldown = "closed", 0, self._shortest
            return None if closed else "closed"
        if closed and self.failures < self._breaker.failures:
            return None
        if not closed:
            self.cooldown = min(2 * self.cooldown, self._longest)
        self._open(now)
        return "opened"

    def trip(self, now: float) -> None:
        """Open at once: a batch hangs."""
        self.failures += 1
        self._open(now)

    def _open(self, now: float) -> None:
        self.state = "open"
        self._open_until = now + self.cooldown
