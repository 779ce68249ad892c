"""The traffic: made-up words, sent to every server at the same moments.

Requests come at a steady pace without any pause, so that nothing can be done unseen. Every request carries words that
no server has seen before. That compresses days into minutes: real texts bring a new word now and then, these bring
nothing else.
"""

import itertools
import json
import math
import random
import threading
import time
import zlib
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

PATH = "/tokens"

#: Seconds from one request to the next.
SPACING = 0.04
#: Words in one text.
WORDS = 80
#: Connections to one server, each used by one request at a time.
CONNECTIONS = 3
#: Seconds after which a request counts as lost.
TIMEOUT = 30.0

OK = 200

# Katakana without the small letters, with which no word begins.
_LETTERS = (
    "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロ"
    "ガギグゲゴザジズゼゾダデドバビブベボパピプペポ"
)
_LENGTH = 6


def made_up_text(seed: int, index: int, words: int = WORDS) -> str:
    """A sentence of made-up names: the same for the same arguments, with other words for any other."""
    draw = random.Random(f"{seed} {index}")
    names = ("".join(draw.choices(_LETTERS, k=_LENGTH)) for _ in range(words))
    return "と".join(names) + "を買った。"


class Shot(NamedTuple):
    """One request to come: the seconds after the start at which it is sent, and what is sent."""

    due: float
    body: bytes


class Outcome(NamedTuple):
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


def shots(seed: int = 0, words: int = WORDS) -> Iterator[Shot]:
    """All requests to come, without end."""
    for index in itertools.count():
        yield Shot(index * SPACING, _body(made_up_text(seed, index, words)))


class Clients:
    """Send the requests to one server, each at its time, over a few connections, until they are told to stop.

    Args:
        port: Where the server listens.
        began: Reading of ``time.perf_counter`` at which the run starts.
        seed: Chooses the words.
    """

    def __init__(self, port: int, began: float, seed: int = 0) -> None:
        self.outcomes: list[Outcome] = []
        self._port = port
        self._began = began
        self._end = math.inf
        self._shots = shots(seed)
        self._taking = threading.Lock()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(CONNECTIONS)]
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        """Whether every request that was due has been answered or lost."""
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self, end: float) -> None:
        """Send nothing that is due later than ``end``, in seconds after the start."""
        self._end = end

    def _work(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT)
        while (shot := self._next()) is not None:
            digest, error = _ask(connection, shot.body)
            latency = time.perf_counter() - self._began - shot.due
            self.outcomes.append(Outcome(shot.due, latency, digest, error))
        connection.close()

    def _next(self) -> Shot | None:
        """Take the next request, at its time; None after the end."""
        with self._taking:  # the others wait here, for a request that is due still later
            shot = next(self._shots)
            if shot.due <= self._end:
                time.sleep(max(0.0, self._began + shot.due - time.perf_counter()))
            return shot if shot.due <= self._end else None


def warm_up(port: int, *, requests: int = 20) -> None:
    """Send a few requests that are not counted: the first ones pay for what a web framework builds on first use."""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
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
    if response.status != OK:
        return None, f"status {response.status}: {content[:200].decode(errors='replace')}"
    return zlib.crc32(content), None
