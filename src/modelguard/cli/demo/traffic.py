"""The traffic: made-up words, sent to every server at the same moments.

Requests come in bursts with quiet gaps between them, as they do to a small service. Every request carries words that
no server has seen before. That compresses days into minutes: real texts bring a new word now and then, these bring
nothing else.
"""

from __future__ import annotations

import json
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException

PATH = "/tokens"

#: Seconds of one burst, and of the gap after it. A reload that waits for a quiet moment finds it in the gap.
BURST = 0.8
GAP = 1.7
#: Seconds from one request of a burst to the next.
SPACING = 0.04
#: Words in one text.
WORDS = 250
#: Connections to one server, each used by one request at a time.
CONNECTIONS = 3
#: Seconds after which a request counts as lost.
TIMEOUT = 30.0

# Katakana without the small letters, with which no word begins.
_LETTERS = (
    "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロ"
    "ガギグゲゴザジズゼゾダデドバビブベボパピプペポ"
)
_LENGTH = 6


def made_up_text(seed: int, index: int, words: int = WORDS) -> str:
    """A sentence of made-up names: the same for the same arguments, with other words for any other."""
    draw = random.Random(f"{seed} {index}")  # noqa: S311 - nothing here is secret
    names = ("".join(draw.choices(_LETTERS, k=_LENGTH)) for _ in range(words))
    return "と".join(names) + "を買った。"


@dataclass(frozen=True, slots=True)
class Shot:
    """One request to come.

    Attributes:
        due: Seconds after the start at which it is sent.
        body: What is sent.
    """

    due: float
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request.

    Attributes:
        due: Seconds after the start at which it was to be sent.
        latency: Seconds from that moment to the end of the answer, waiting for a free connection included. Timed from
            the moment the request was due, a stalled server cannot hide its stall by delaying the next request.
        digest: Checksum of the answer, None if there was none.
        error: What went wrong, None if nothing did.
    """

    due: float
    latency: float
    digest: int | None
    error: str | None


def plan(seconds: float, *, seed: int = 0, words: int = WORDS) -> list[Shot]:
    """The whole run, made before it begins, so that making it costs nothing while others are timed."""
    return [Shot(due, _body(made_up_text(seed, index, words))) for index, due in enumerate(_moments(seconds))]


def _moments(seconds: float) -> Iterator[float]:
    per_burst = round(BURST / SPACING)
    start = 0.0
    while start + BURST <= seconds:
        yield from (start + number * SPACING for number in range(per_burst))
        start += BURST + GAP


class Driver:
    """Sends the shots to one server, each at its time, over a few connections.

    Args:
        connect: Opens a connection.
        shots: What to send, in the order of time.
        began: Reading of ``time.perf_counter`` at which the run starts.
    """

    def __init__(self, connect: Callable[[float], HTTPConnection], shots: Sequence[Shot], began: float) -> None:
        self.answers: list[Answer] = []
        self._connect = connect
        self._shots = iter(shots)
        self._taking = threading.Lock()
        self._began = began
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(CONNECTIONS)]
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        """Whether every shot has been answered or lost."""
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Send nothing more."""
        self._stop.set()

    def _work(self) -> None:
        connection = self._connect(TIMEOUT)
        try:
            while (shot := self._next()) is not None:
                if self._stop.wait(max(0.0, self._began + shot.due - time.perf_counter())):
                    return
                digest, error = _ask(connection, shot.body)
                latency = time.perf_counter() - self._began - shot.due
                self.answers.append(Answer(shot.due, latency, digest, error))
        finally:
            connection.close()

    def _next(self) -> Shot | None:
        with self._taking:
            return next(self._shots, None)


def warm_up(connection: HTTPConnection, *, requests: int = 20) -> None:
    """Send a few requests that are not counted: the first ones pay for what a web framework builds on first use."""
    for index in range(requests):
        _ask(connection, _body(made_up_text(-1, index, words=2)))
    connection.close()


def _body(text: str) -> bytes:
    return json.dumps({"text": text}, ensure_ascii=False).encode()


def _ask(connection: HTTPConnection, body: bytes) -> tuple[int | None, str | None]:
    try:
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    except (OSError, HTTPException) as error:
        connection.close()  # the next request opens it again
        return None, f"{type(error).__name__}: {error}"
    if response.status != 200:  # noqa: PLR2004 - HTTP's OK
        return None, f"status {response.status}: {content[:200].decode(errors='replace')}"
    return zlib.crc32(content), None
