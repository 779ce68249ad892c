"""What guards, pools and decorated functions are as context managers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from modelguard.errors import GuardClosed

__all__ = ["Entered"]


class Entered:
    """A context manager that is reopened on entry and closed on exit.

    It may be entered again before its end, as in a mounted sub-application with a lifespan of its own. Then the last
    exit closes it.

    A function makes it: ``_made_by`` says how to write that. ``_status`` is the class of what its ``status()`` shows.

    Where attributes are copied from another one, as by ``functools.update_wrapper``, ``__init__`` comes after that.
    """

    _made_by: ClassVar[str]
    _status: ClassVar[str]

    if not TYPE_CHECKING:

        def __new__(cls, *args: object, **kwargs: object) -> Self:
            if kwargs or not args or callable(args[0]):  # its function passes no keywords, and no function first
                raise TypeError(f"{cls.__name__} is not called directly. Write: {cls._made_by}")
            return super().__new__(cls)

        def __getattr__(self, name: str) -> Any:  # checkers are to complain about unknown attributes
            said = f"{type(self).__name__!r} object has no attribute {name!r}{self._hint(name)}"
            raise AttributeError(said, name=name, obj=self)

    def _hint(self, name: str) -> str:
        """What to write in place of an attribute that is not there."""
        from pkgutil import resolve_name  # here, because only errors need it

        if name.startswith("_") or name not in resolve_name(self._status).__dataclass_fields__:
            return ""
        return ", its status() has"

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
        with self._entering():
            self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entries.pop()
        if not self._entries:
            with self._leaving():
                self.close()

    async def __aenter__(self) -> Self:
        with self._entering():
            await self._aopen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entries.pop()
        if not self._entries:
            with self._leaving():
                await self.aclose()

    # An entry while an exit closes it: the exit reopens it at its end.

    @contextmanager
    def _entering(self) -> Iterator[None]:
        self._entries.append(None)
        try:
            yield
        except BaseException as error:
            if not (self._closing and isinstance(error, GuardClosed)):
                self._entries.pop()
                raise

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        self._closing.append(None)
        try:
            yield
        finally:
            self._closing.pop()
            if self._entries and not self._closing:
                self._reopen()
