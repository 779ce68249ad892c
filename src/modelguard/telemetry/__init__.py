"""Events that modelguard reports, and hooks that receive them: frozen dataclasses and plain callables."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from modelguard.telemetry import _hooks
from modelguard.telemetry._hooks import *
from modelguard.telemetry.reasons import Reason as Reason
from modelguard.telemetry.reasons import ReasonKind as ReasonKind

if TYPE_CHECKING:
    from modelguard.telemetry._events import *


def __getattr__(name: str) -> Any:
    # Making a dozen dataclasses takes 7 ms, too long for an import of modelguard: the first event imports them.
    if name == "__all__" or not name.startswith("_"):
        events = importlib.import_module("modelguard.telemetry._events")
        offered = sorted([*events.NAMES, *_hooks.__all__, "Reason", "ReasonKind"])
        if name == "__all__":
            return offered
        if name in offered:
            # All of them: a finalizer at the exit imports nothing any more.
            globals().update({one: getattr(events, one) for one in events.NAMES})
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
