"""The functions of ``isolation.py``, in a module that a mold can import, and the server of its stall."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from modelguard import Errors, MemoryGrowth, Swap, guard, isolate

TEXT = "銀座でランチをご一緒しましょう。"
SENTENCES = [f"The quick brown fox number {number} jumps over the lazy dog." for number in range(16)]
#: Bytes that each call of the leaking model leaves behind.
LEAK = 4096


def load_spacy() -> Any:
    import spacy

    return spacy.load("ja_ginza")


spacy_model = guard(load_spacy, reload_on=Errors(1), warmup=lambda nlp: nlp(TEXT), name="ja_ginza")
in_process = guard(load_spacy, reload_on=None, swap=Swap("load_first", defer=0), warmup=lambda nlp: nlp(TEXT))


def find_entities(nlp: Any, text: str) -> tuple[int, list[str]]:
    if text == "fail":
        raise ValueError("asked for")
    return os.getpid(), [entity.text for entity in nlp(text).ents]


@isolate(workers=2, timeout="60s")
@spacy_model
def entities(nlp: Any, text: str) -> tuple[int, list[str]]:
    return find_entities(nlp, text)


@isolate(workers=1, timeout="60s")
@spacy_model
def one_worker(nlp: Any, text: str) -> tuple[int, list[str]]:
    return find_entities(nlp, text)


@isolate(workers=1, timeout="60s", start="spawn")
@spacy_model
def one_spawned(nlp: Any, text: str) -> tuple[int, list[str]]:
    return find_entities(nlp, text)


@isolate(workers=2, timeout="60s", start="spawn")
@spacy_model
def spawned(nlp: Any, text: str) -> tuple[int, list[str]]:
    return find_entities(nlp, text)


_one_at_a_time = threading.Lock()


@in_process
def entities_here(nlp: Any, text: str) -> tuple[int, list[str]]:
    with _one_at_a_time:  # SudachiPy's tokenizer refuses a second thread
        return find_entities(nlp, text)


@isolate(workers=1)
def echo(value: Any) -> Any:
    return value


@isolate(workers=1)
@guard(lambda: [f"word {number}" for number in range(20_000)], reload_on=None, name="words")
def words(model: list[str], place: int) -> str:
    return model[place]


class Leaking:
    """Keeps a few kilobytes of each call."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []


@isolate(workers=1)
@guard(Leaking, reload_on=MemoryGrowth("50 MB"))
def leaking(model: Leaking, number: int) -> int:
    model.kept.append(os.urandom(LEAK))
    return number


@isolate(workers=1)
@guard(Leaking, reload_on=None)
def leaking_on(model: Leaking, number: int) -> int:
    model.kept.append(os.urandom(LEAK))
    return number


@isolate(workers=1)
@guard(Leaking, reload_on=MemoryGrowth("50 MB"))
def sound(model: Leaking, number: int) -> int:
    model.kept[:] = [os.urandom(LEAK)]
    return number


SIDES: dict[str, Any] = {"isolated": entities, "spawned": spawned, "here": in_process}


async def app(scope: Any, _receive: Any, send: Any) -> None:
    """``/isolated``, ``/spawned`` and ``/here`` analyse a text, with ``/reload`` behind them they order a reload."""
    if scope["type"] != "http":
        return
    _, side, *reload = scope["path"].split("/")
    body = b"ok"
    if reload:
        SIDES[side].reload(wait=False)
    elif side == "here":
        await asyncio.to_thread(entities_here, TEXT)
    elif side in SIDES:
        await SIDES[side].aio(TEXT)
    else:
        body = f"{SIDES[scope['query_string'].decode()].status().generation}".encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
