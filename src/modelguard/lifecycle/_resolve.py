"""Results of the author's callables, which may be ``async``."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any


def resolve(result: Any) -> Any:
    """The result itself; of a coroutine, what it returns when it is run to its end on an event loop of its own."""
    # Coroutines only: a model may have an __await__ of its own.
    return asyncio.run(result) if inspect.iscoroutine(result) else result
