"""Which items made their batch raise: found in the traceback, or remembered from the last time."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

__all__ = ["Known", "Suspects", "named_by"]

#: So many bad items are remembered. One that has failed repeatedly is tried again after ten seconds, and after twice as
#: long each time that it fails, up to ten minutes.
_REMEMBERED = 256
_SECONDS = 10.0
_LONGEST = 600.0
#: An item that has failed so often is not computed again for a while.
_CERTAIN = 2
#: Texts and byte strings that are longer are remembered by their hash, so that they do not stay in memory.
_LONG = 1000
#: Values of these types say nothing by their identity: all zeros are one object.
_SHARED = (int, float, bool, type(None))
#: How far the trust in tracebacks follows each batch, and below which trust they are not used.
_STEP = 0.25
_TRUSTED = 0.4


@dataclass(slots=True)
class Known:
    """What is known of a bad item.

    Attributes:
        error: A copy of what it failed with; None if that cannot be copied.
        text: What it failed with, in one line.
        times: How often it has failed.
        until: Up to when it is not computed again, in seconds on the batcher's clock.
    """

    error: Exception | None
    text: str
    times: int
    until: float

    def certain(self, now: float) -> bool:
        """Whether it has failed so often that it is not computed again now."""
        return self.times >= _CERTAIN and now < self.until


class Suspects:
    """What one batch function has learned about bad items. Thread-safe."""

    def __init__(self) -> None:
        self.renew_lock()
        self._known: OrderedDict[Hashable, Known] = OrderedDict()
        self._trust = 1.0

    def renew_lock(self) -> None:
        """In a forked child: a thread of the parent may have held the lock."""
        self._lock = threading.RLock()  # reentrant: items compare by code of their own

    def __bool__(self) -> bool:
        return bool(self._known)

    def find(self, item: Any, group: Hashable) -> Known | None:
        """What is known of an item, if it has failed with these keyword arguments."""
        try:
            return self._known.get(_key(item, group))
        except Exception:  # noqa: BLE001 - items need not be hashable, nor comparable
            return None

    def failed(self, item: Any, group: Hashable, error: Exception, text: str, now: float) -> None:
        """Remember that an item failed by itself."""
        try:
            key = _key(item, group)
            with self._lock:
                before = self._known.pop(key, None)
                times = 1 if before is None else before.times + 1
                pause = min(_SECONDS * 2.0 ** max(times - _CERTAIN, 0), _LONGEST)
                self._known[key] = Known(_copied(error), text, times, now + pause)
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        except Exception:  # noqa: BLE001 - as above
            return

    def succeeded(self, item: Any, group: Hashable) -> None:
        """Forget an item that did not fail."""
        try:
            with self._lock:
                self._known.pop(_key(item, group), None)
        except Exception:  # noqa: BLE001 - as above
            return

    @property
    def trusts_tracebacks(self) -> bool:
        """Whether the items that tracebacks named were mostly the bad ones."""
        return self._trust >= _TRUSTED

    def traceback_was(self, *, right: bool) -> None:
        """Note whether a batch succeeded without the items that tracebacks named."""
        self._trust += _STEP * (right - self._trust)


def named_by(error: BaseException, items: Sequence[Any]) -> list[int]:
    """Which of the items the innermost function in an error's traceback worked on; none if it says nothing.

    A function that works on one item at a time has it among its local variables.
    """
    places = {id(item): at for at, item in enumerate(items) if not isinstance(item, _SHARED)}
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    for frame in reversed(frames):
        found = {places[id(value)] for value in frame.tb_frame.f_locals.values() if id(value) in places}
        if found:
            return sorted(found) if len(found) < len(items) else []
    return []


def _key(item: Any, group: Hashable) -> Hashable:
    kind = type(item)
    if isinstance(item, str | bytes) and len(item) > _LONG:
        return kind, len(item), hash(item), group
    hash(item)
    return kind, item, group


def _copied(error: Exception) -> Exception | None:
    try:
        again = copy.copy(error)
    except Exception:  # noqa: BLE001 - an error whose class does not take its own arguments
        return None
    return again if type(again) is type(error) else None
