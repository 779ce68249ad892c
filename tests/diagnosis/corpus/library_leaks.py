"""Functions that leak through libraries; each imports its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

kept: list[object] = []


def words() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield " ".join(f"word{number}x{part}" for part in range(40))


@functools.lru_cache(maxsize=1)
def nlp() -> Any:
    import spacy

    return spacy.blank("en")


def strings(text: str) -> None:
    nlp()(text)


@functools.lru_cache(maxsize=1)
def counter() -> Any:
    from prometheus_client import Counter

    return Counter("requests", "Requests", ["text"])


def labels(text: str) -> None:
    counter().labels(text).inc()


def clients(text: str) -> None:
    import httpx

    kept.append(httpx.Client())


@functools.lru_cache(maxsize=1)
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], cache_capacity=10_000_000))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def tokens(text: str) -> None:
    tokenizer().encode(text)
