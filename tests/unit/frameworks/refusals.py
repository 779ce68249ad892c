"""Every error that has an answer, and the answer; the errors contain what an answer must not reveal."""

from __future__ import annotations

from modelguard.errors import (
    CallerGone,
    CircuitOpen,
    DeadlineExceeded,
    DeadlineUnreachable,
    GuardClosed,
    ItemTooHeavy,
    LoadFailed,
    LoadTimeout,
    ModelRejected,
    Overloaded,
    QueueFull,
    QuotaExceeded,
    Reloading,
)

#: What no answer may contain: the function's name, and a figure.
NAME, FIGURE = "secret.function", 777

BUSY = {"type": "about:blank", "title": "Service Unavailable", "status": 503}
MANY = {"type": "about:blank", "title": "Too Many Requests", "status": 429}
LATE = {"type": "about:blank", "title": "Gateway Timeout", "status": 504}
HEAVY = {"type": "about:blank", "status": 413}  # its title depends on the version of Python
GONE = {"type": "about:blank", "title": "Client Closed Request", "status": 499}

#: Each error with its answer, and after how many seconds a client may come back.
ERRORS = [
    (Overloaded(f"{NAME} {FIGURE}", retry_after=3.0), BUSY, 3.0),
    (QueueFull(NAME, queued=FIGURE, retry_after=2.5), BUSY, 2.5),
    (QueueFull(NAME, queued=FIGURE, retry_after=0.001), BUSY, 0.001),
    (QuotaExceeded(NAME, NAME, queued=FIGURE, quota=FIGURE, retry_after=2.5), MANY, 2.5),
    (DeadlineUnreachable(NAME, estimate=FIGURE, left=FIGURE, retry_after=40.0), BUSY, 40.0),
    (CircuitOpen(NAME, failures=FIGURE, retry_after=10.0), BUSY, 10.0),
    (Reloading(NAME, waited=FIGURE), BUSY, 1.0),
    (LoadFailed(NAME, f"{FIGURE}", retry_after=5.0), BUSY, 5.0),
    (LoadFailed(NAME, f"{FIGURE}"), BUSY, 0.0),
    (LoadTimeout(NAME, f"{FIGURE}", retry_after=5.0), BUSY, 5.0),
    (ModelRejected(NAME, f"{FIGURE}", retry_after=5.0), BUSY, 5.0),
    (GuardClosed(NAME), BUSY, 1.0),
    (DeadlineExceeded(NAME, waited=FIGURE), LATE, None),
    (ItemTooHeavy(NAME, weight=FIGURE, max_weight=7), HEAVY, None),
    (CallerGone(NAME), GONE, None),
]
IDS = [f"{type(error).__name__} {retry}" for error, _, retry in ERRORS]
