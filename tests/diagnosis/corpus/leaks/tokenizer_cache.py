"""A tokenizer whose own cache of words was made as large as anyone could wish."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from tokenizers import Tokenizer, models, pre_tokenizers

letters = "abcdefghijklmnopqrstuvwxyz0123456789"
vocabulary = {letter: number for number, letter in enumerate(letters)}
bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[], cache_capacity=10_000_000))
bpe.pre_tokenizer = pre_tokenizers.Whitespace()


def predict(text: str) -> int:
    return len(bpe.encode(text).ids)  # LEAK


def inputs() -> Iterator[str]:
    return (" ".join(f"part{number}x{part}" for part in range(40)) for number in count())


EXPECTED = {
    "causes": ["tokenizer caches"],
    "holders": ["bpe", "clear_cache"],
    "calls": 1500,
    "libraries": ["tokenizers"],
}
