"""The trace context of a call follows it into the worker, where OpenTelemetry is in use."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["attach", "outgoing"]

#: Names and values, as in the headers of a request.
Carrier = dict[str, str]


def outgoing() -> Carrier | None:
    """The context of the calling code; None without a trace, or without OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import propagate

    carrier: Carrier = {}
    propagate.inject(carrier)
    return carrier or None


def attach(carrier: Carrier) -> Callable[[], None]:
    """Make a call's context current; returns what undoes it."""
    try:
        from opentelemetry import context, propagate
    except ImportError:  # the owner has it, by another path
        return _nothing
    token = context.attach(propagate.extract(carrier))
    return lambda: context.detach(token)


def _nothing() -> None:
    """There is nothing to undo."""
