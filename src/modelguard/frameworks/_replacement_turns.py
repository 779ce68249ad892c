"""Taking turns: processes on many machines are replaced one at a time, with nothing in common but a key-value store.

The turn is a series of numbered entries. The last entry counts: it names the process that leaves, or nobody. A process
makes an entry by writing a number that is not there yet, and only one of several processes succeeds in that. So no lock
is needed, and a process that dies leaves no lock behind. Clocks are never compared between machines: each process
measures with its own clock how long the last entry has been the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol
from urllib.parse import quote

__all__ = ["Store", "Turns"]


class Store(Protocol):
    """A key-value store that all processes can reach."""

    def put_if_absent(self, key: str, value: str) -> bool:
        """Write a value, unless the key exists; returns whether it was written."""
        ...

    def get(self, key: str) -> str | None:
        """The value of a key; None if it does not exist."""
        ...

    def delete(self, key: str) -> object:
        """Delete a key, if it exists."""
        ...

    def keys(self, prefix: str) -> Iterable[str]:
        """All keys with a prefix."""
        ...


class Turns:
    """The turns of one group of processes, as one of the processes sees them.

    Args:
        store: Holds the entries.
        group: The group of processes that take turns.
        me: This process.
        patience: Seconds to wait for the successor of a process that has left. After that the next one may leave, since
            the successor has failed or none comes.
        clock: Monotonic seconds.
    """

    def __init__(
        self, store: Store, group: str, me: str, *, patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._prefix = f"turn/{quote(group, safe='')}/"  # quoted, so that no group's prefix is a prefix of another's
        self._me = me
        self._patience = patience
        self._clock = clock
        self._seen = (0, clock())  # the last entry, and since when

    def take(self) -> bool:
        """Take the turn to leave, or keep it. True for one process at a time."""
        number, holder = self._last()
        if holder == self._me:
            return True
        if number != self._seen[0]:
            self._seen = (number, self._clock())
        if holder and self._clock() - self._seen[1] < self._patience:
            return False
        return self._write(number, self._me)

    def arrive(self) -> None:
        """Pass the turn on: this process has come in place of the one that left.

        If this process has come for another reason, the one that wants to leave has to take its turn again.
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
            numbers.remove(number)  # deleted meanwhile, since there is a later one
        return 0, ""

    def _write(self, after: int, value: str) -> bool:
        number = after + 1
        if not self._store.put_if_absent(self._key(number), value):
            return False
        numbers = self._numbers()
        outdated = max(numbers, default=number) > number  # the number was used before, and deleted for a later one
        for one in numbers:
            if one < number or (outdated and one == number):
                self._store.delete(self._key(one))
        return not outdated

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number}"

    def _numbers(self) -> list[int]:
        return [int(key.removeprefix(self._prefix)) for key in self._store.keys(self._prefix)]
