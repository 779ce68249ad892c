"""Readings of a service that runs: kept few however long they go on, and judged. Without clock or thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from modelguard.diagnosis._census import Moment
from modelguard.diagnosis._growth import Measured, Unit
from modelguard.diagnosis._holders import Held
from modelguard.facts.growth import Verdict, judge

__all__ = ["Calls", "Look", "Observed"]

#: Readings for a verdict. When there are twice as many, every second one is dropped, so that they cover the whole time.
_READINGS = 24


@dataclass(frozen=True, slots=True)
class Look:
    """A closer look at a process, at one moment.

    Attributes:
        census: Numbers of objects, threads and so on.
        types: Numbers of objects by type.
        compiled: Written bytes of machine code that was compiled at run time.
        libraries: Which of the libraries with causes of their own are loaded.
        free: Bytes that the allocator holds and that are not in use; None if it does not say.
        moment: The lengths of containers; None where another process keeps them.
    """

    census: Mapping[str, int] = field(default_factory=dict)
    types: Mapping[str, int] = field(default_factory=dict)
    compiled: int = 0
    libraries: tuple[str, ...] = ()
    free: int | None = None
    moment: Moment | None = None


class Calls:
    """Counts the calls that have ended on guards, over all their generations.

    Attributes:
        known: Whether there has been a guard.
    """

    def __init__(self) -> None:
        self.known = False
        self._seen: dict[str, tuple[int, int, int]] = {}

    def total(self, uses: Iterable[tuple[str, int, int]]) -> int:
        """The number of calls so far.

        Args:
            uses: Of each guard its name, its generation, and the calls that have ended on that.
        """
        for name, number, count in uses:
            self.known = True
            generation, latest, before = self._seen.get(name, (number, 0, 0))
            if number != generation:
                before, latest = before + latest, 0
            self._seen[name] = (number, max(latest, count), before)
        return sum(latest + before for _, latest, before in self._seen.values())


class Observed:
    """The readings since a first look."""

    def __init__(self) -> None:
        self._readings: list[tuple[int, int]] = []
        self._every = 1
        self._skipped = 0

    def add(self, calls: int, private: int) -> bool:
        """Add a reading; returns whether it is kept.

        Args:
            calls: How many calls have ended so far.
            private: Private memory in bytes.
        """
        self._skipped += 1
        if self._readings and self._skipped < self._every:
            return False
        self._skipped = 0
        self._readings.append((calls, private))
        if len(self._readings) >= 2 * _READINGS:
            self._readings = self._readings[::2]
            self._every *= 2
        return True

    @property
    def first(self) -> int:
        """Private memory at the first reading."""
        return self._readings[0][1] if self._readings else 0

    @property
    def calls(self) -> int:
        """The calls between the first reading and the last."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0

    def verdict(self) -> Verdict:
        """Whether memory grows; undecided with few readings, and without calls."""
        if len(self._readings) < _READINGS or self._readings[-1][0] == self._readings[0][0]:
            return "undecided"
        return judge(*zip(*self._readings, strict=True)).verdict

    def measured(self, first: Look, last: Look, trimmed: int, per: Unit, held: tuple[Held, ...] = ()) -> Measured:
        """What was measured between two looks.

        Args:
            first: At the first reading.
            last: Now.
            trimmed: Bytes that a trim has just given back.
            per: What the calls of the readings count.
            held: The containers that have grown, and what holds them.
        """
        if first.free is not None and last.free is not None:
            trimmed = min(trimmed, max(0, last.free - first.free))  # some was free from the start
        begin = self._readings[0][0] if self._readings else 0
        grown = {name: number - first.types.get(name, 0) for name, number in last.types.items()}
        return Measured(
            calls=tuple(calls - begin for calls, _ in self._readings),
            private=tuple(private for _, private in self._readings),
            before=dict(first.census),
            after=dict(last.census),
            types={name: number for name, number in grown.items() if number > 0},
            compiled=last.compiled - first.compiled,
            libraries=last.libraries,
            trimmed=trimmed,
            held=held,
            live=True,
            per=per,
        )
