"""A lock for processes on many machines that share only a key-value store, to replace one process at a time.

The lock is a series of numbered entries. Only the last entry counts: it names the process that holds the lock, or is
empty. To make an entry, a process writes a number that does not exist yet; only one of several processes succeeds. So a
process that dies leaves nothing locked forever. Clocks are never compared between machines: each process measures with
its own clock how long the last entry has not changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol
from urllib.parse import quote

__all__ = ["ReplacementLock", "Store"]


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


class ReplacementLock:
    """The lock of one group of processes. Its holder may be replaced; its replacement releases the lock.

    Args:
        store: Contains the entries.
        group: The group of processes.
        me: This process.
        timeout: Seconds until another process may take the lock from its holder. By then the holder's replacement has
            failed, or there is none.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self, store: Store, group: str, me: str, *, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        # Quoted, so that no group's prefix is a prefix of another's.
        self._prefix = f"replacement/{quote(group, safe='')}/"
        self._me = me
        self._timeout = timeout
        self._clock = clock
        self._seen = (0, clock())  # the last entry, and when it was first seen

    def acquire(self) -> bool:
        """Acquire or keep the lock; True for one process at a time."""
        number, holder = self._last()
        if holder == self._me:
            return True
        if number != self._seen[0]:
            self._seen = (number, self._clock())
        if holder and self._clock() - self._seen[1] < self._timeout:
            return False
        return self._write(number, self._me)

    def release(self) -> None:
        """Release the lock, because this process has started in place of the holder.

        If this process was started for another reason, the holder has to acquire the lock again.
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
            numbers.remove(number)  # deleted in the meantime, because there is a later one
        return 0, ""

    def _write(self, after: int, value: str) -> bool:
        number = after + 1
        if not self._store.put_if_absent(self._key(number), value):
            return False
        numbers = self._numbers()
        outdated = max(numbers, default=number) > number  # the number was used before, and deleted after a later one
        for existing in numbers:
            if existing < number or (outdated and existing == number):
                self._store.delete(self._key(existing))
        return not outdated

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number}"

    def _numbers(self) -> list[int]:
        return [int(key.removeprefix(self._prefix)) for key in self._store.keys(self._prefix)]
