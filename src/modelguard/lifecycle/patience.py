"""How long one caller waits."""

from __future__ import annotations

import time

from modelguard import _units


class Patience:
    """How long one caller waits, over as many attempts as it takes. None: without a bound."""

    def __init__(self, timeout: _units.Duration | None) -> None:
        self._started = time.monotonic()
        self._timeout = None if timeout is None else _units.seconds(timeout, "timeout", zero=True)

    def waited(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._started

    def left(self) -> float | None:
        """Seconds that remain, None without a bound."""
        return None if self._timeout is None else max(0.0, self._timeout - self.waited())
