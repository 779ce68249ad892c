"""Libraries whose threads and connections users did not start themselves, and what to do about each at a fork.

Each row was tried with the real library (``tests/process/test_fork_owners.py``); ``docs/fork-safety.md`` shows them.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

__all__ = ["OWNERS", "Owner", "connected", "end", "origin", "owner_of", "restarts"]

#: Seconds that a thread may take to end: tqdm's waits for the lock of a progress bar.
_PATIENCE = 5.0


class Owner(NamedTuple):
    """One row.

    Attributes:
        name: The library, as users know it.
        has: What of it does not survive a fork.
        where: How it is recognised: the beginning of the name of what the thread runs, or, for connections, whose owner
            cannot be seen, a module that is loaded.
        remedy: What to do before the fork or in the workers.
        restarts: What starts the thread again in a forked child, as ``module:name``: a release without it does not.
            Empty if nothing does.
        stop: What ends the thread without loss, an attribute of it: the library starts it again when it needs it.
    """

    name: str
    has: Literal["thread", "connection"]
    where: str
    remedy: str
    restarts: str = ""
    stop: str = ""


OWNERS = (
    Owner(
        "tqdm",
        "thread",
        "tqdm._monitor.",
        "tqdm.tqdm.monitor_interval = 0, before the first progress bar.",
        stop="was_killed.set",  # what its exit() does, which waits without a limit
    ),
    Owner(
        "OpenTelemetry",
        "thread",
        "opentelemetry.sdk.",
        "Make its provider in each worker.",
        restarts="opentelemetry.sdk._shared_internal:BatchProcessor._at_fork_reinit",
    ),
    Owner(
        "Sentry",
        "thread",
        "sentry_sdk.",
        "Call sentry_sdk.init() in each worker.",
        restarts="sentry_sdk.worker:BackgroundWorker._ensure_thread",
    ),
    Owner(
        "PostHog",
        "thread",
        "posthog.",
        "Make its client in each worker.",
        restarts="posthog.client:Client._reinit_after_fork",
    ),
    Owner(
        "Langfuse",
        "thread",
        "langfuse.",
        "Make its client in each worker.",
        restarts="langfuse._client.resource_manager:LangfuseResourceManager._at_fork_reinit",
    ),
    Owner(
        "prometheus_client",
        "thread",
        "prometheus_client.",
        "Call start_http_server() in each worker, with a port of its own; the parent's shows only its own figures.",
    ),
    Owner(
        "gRPC",
        "thread",
        "grpc.",
        "Start the server in each worker; the parent's: server.stop(None).wait(), and shutdown() of its executor.",
    ),
    Owner(
        "a DataLoader or multiprocessing.Queue",
        "thread",
        "multiprocessing.queues.",
        "DataLoader: num_workers=0 in the parent; or end its loop, and drop it if it has persistent_workers=True. "
        "Queue: close() and join_thread().",
    ),
    Owner(
        "ThreadPoolExecutor",
        "thread",
        "concurrent.futures.thread.",
        "Make the executor in each worker; the parent's: shutdown().",
    ),
    Owner(
        "OpenTelemetry",
        "connection",
        "opentelemetry.exporter.otlp",
        "make its provider in each worker, or export nothing before",
    ),
    Owner("Sentry", "connection", "sentry_sdk", "call sentry_sdk.init() in each worker, or send nothing before"),
    Owner("SQLAlchemy", "connection", "sqlalchemy.pool", "engine.dispose()"),
    Owner("aiohttp", "connection", "aiohttp.client", "await session.close(), and close its event loop"),
    Owner("gRPC", "connection", "grpc", "channel.close()"),
)


def owner_of(where: str) -> Owner | None:
    """The library that has a thread which runs the function of this name."""
    return next((owner for owner in OWNERS if owner.has == "thread" and where.startswith(owner.where)), None)


def restarts(owner: Owner) -> bool:
    """Whether the installed release starts the thread again in a forked child."""
    module, _, name = owner.restarts.partition(":")
    return bool(name) and _attribute(sys.modules.get(module), name) is not None


def connected() -> Iterator[Owner]:
    """The loaded libraries that may have an open connection."""
    return (owner for owner in OWNERS if owner.has == "connection" and owner.where in sys.modules)


def end() -> Iterator[tuple[str, Owner]]:
    """End the threads that can be ended without loss; their names and owners."""
    for thread in threading.enumerate():
        owner = owner_of(origin(thread))
        stop = None if owner is None or not owner.stop else _attribute(thread, owner.stop)
        if owner is not None and stop is not None:
            stop()
            thread.join(_PATIENCE)
            if not thread.is_alive():
                yield thread.name, owner


def origin(thread: threading.Thread) -> str:
    """The name of what a thread runs: a function, a method with the class of its object, or the thread's own class."""
    target = getattr(thread, "_target", None)
    if target is None:
        return _class_of(thread)
    if isinstance(target, types.MethodType) and not isinstance(target.__self__, type):
        return f"{_class_of(target.__self__)}.{target.__name__}"
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _attribute(start: object, name: str) -> Any:
    return functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), start)
