"""What guards, pools and decorated functions are as context managers."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from modelguard.errors import GuardClosed

__all__ = ["Entered"]


class Entered:
    """A context manager that is reopened on entry and closed on exit.

    It may be entered again before its end, as in a mounted sub-application with a lifespan of its own. Then the last
    exit closes it.

    Where attributes are copied from another one, as by ``functools.update_wrapper``, ``__init__`` comes after that.
    """

    def __init__(self) -> None:
        # Of a list, threads may append and pop without a lock, which a fork could leave locked.
        self._entries: list[None] = []
        self._closing: list[None] = []

    def _reopen(self) -> None:
        """Take calls again after :meth:`close`. Waits for nothing."""
        raise NotImplementedError

    def _open(self) -> None:
        """Reopen it, and load what it loads on entry."""
        self._reopen()

    async def _aopen(self) -> None:
        """:meth:`_open` without blocking the event loop."""
        self._reopen()

    def close(self) -> None:
        """Close it."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """:meth:`close` without blocking the event loop."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._entries.append(None)
        try:
            self._open()
        except BaseException as error:
            if not self._is_reopened_after(error):
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entries.pop()
        if not self._entries:
            self._closing.append(None)
            try:
                self.close()
            finally:
                self._closed()

    async def __aenter__(self) -> Self:
        self._entries.append(None)
        try:
            await self._aopen()
        except BaseException as error:
            if not self._is_reopened_after(error):
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entries.pop()
        if not self._entries:
            self._closing.append(None)
            try:
                await self.aclose()
            finally:
                self._closed()

    # An entry while an exit closes it: the exit reopens it at its end.

    def _is_reopened_after(self, error: BaseException) -> bool:
        if self._closing and isinstance(error, GuardClosed):
            return True
        self._entries.pop()
        return False

    def _closed(self) -> None:
        self._closing.pop()
        if self._entries and not self._closing:
            self._reopen()
