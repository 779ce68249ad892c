"""A thread per request that waits for a cancellation which hardly ever comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count


def listen_for_cancel(request: str, cancelled: threading.Event) -> None:
    cancelled.wait()
    print(f"{request} cancelled")  # noqa: T201 - an app


def predict(request: str) -> int:
    cancelled = threading.Event()
    threading.Thread(target=listen_for_cancel, args=(request, cancelled), daemon=True).start()  # LEAK
    return len(request)


def inputs() -> Iterator[str]:
    return (f"request-{number}" for number in count())


EXPECTED = {"causes": ["threads"], "holders": ["listen_for_cancel"], "calls": 800}
