"""Whose turn it is to be replaced, among processes on many machines that have nothing but a key-value store in common.

The turn is a row of numbered entries, of which the last one counts: it names who leaves, or nobody. An entry is made by
writing a number that was not there before, which one of several succeeds in, so no lock is needed and no lock is left
behind by a process that dies. Clocks are never compared between machines: each process measures by its own how long the
last entry has been the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol
from urllib.parse import quote

__all__ = ["Store", "Turns"]


class Store(Protocol):
    """A key-value store that all processes reach."""

    def put_if_absent(self, key: str, value: str) -> bool:
        """Write, unless the key is there already; whether it was written."""
        ...

    def get(self, key: str) -> str | None:
        """What is written there; None for nothing."""
        ...

    def delete(self, key: str) -> object:
        """Forget a key, if it is there."""
        ...

    def keys(self, prefix: str) -> Iterable[str]:
        """All keys that begin so."""
        ...


class Turns:
    """The turn of one group of processes, as one of them sees it.

    Args:
        store: Where the entries lie.
        group: Who takes turns.
        me: This process.
        patience: Seconds after which whoever has left is no longer waited for: its successor has failed, or none comes.
        clock: Monotonic seconds.
    """

    def __init__(
        self, store: Store, group: str, me: str, *, patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._prefix = f"turn/{quote(group, safe='')}/"  # no group's keys begin like another's
        self._me = me
        self._patience = patience
        self._clock = clock
        self._seen = (0, clock())

    def take(self) -> bool:
        """Take the turn to leave, or keep it: true for one process at a time."""
        number, holder = self._last()
        if holder == self._me:
            return True
        if number != self._seen[0]:
            self._seen = (number, self._clock())
        if holder and self._clock() - self._seen[1] < self._patience:
            return False
        return self._write(number, self._me)

    def arrive(self) -> None:
        """Give the turn to the next: this process has come in the place of the one that left.

        If it has come for another reason, the one that wanted to leave finds that it has to take its turn again.
        """
        number, holder = self._last()
        if holder:
            self._write(number, "")

    def _last(self) -> tuple[int, str]:
        numbers = self._numbers()
        while numbers:
            number = max(numbers)
            value = self._store.get(self._key(number))
            if value is not None:
                return number, value
            numbers.remove(number)  # forgotten meanwhile, since there is a later one
        return 0, ""

    def _write(self, after: int, value: str) -> bool:
        number = after + 1
        if not self._store.put_if_absent(self._key(number), value):
            return False
        numbers = self._numbers()
        late = max(numbers, default=number) > number  # the number had been used, and was forgotten for a later one
        for one in numbers:
            if one < number or (late and one == number):
                self._store.delete(self._key(one))
        return not late

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number}"

    def _numbers(self) -> list[int]:
        return [int(key.removeprefix(self._prefix)) for key in self._store.keys(self._prefix)]
