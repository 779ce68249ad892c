"""The functions of ``refork.py``, in a module that a mold can import: each model with refork and without."""

from __future__ import annotations

import os
from typing import Any

from modelguard import guard, isolate

WORKERS = 4
#: Calls of one worker, after which it takes the place of the mold.
AFTER = 150


def load_jieba() -> Any:
    import jieba

    tokenizer = jieba.Tokenizer()
    tokenizer.initialize()
    return tokenizer


def load_spacy() -> Any:
    import spacy

    return spacy.load("ja_ginza")


jieba_model = guard(load_jieba, reload_on=None, warmup=lambda tokenizer: tokenizer.lcut("东京"), name="jieba")
spacy_model = guard(load_spacy, reload_on=None, warmup=lambda nlp: nlp("東京"), name="ja_ginza")


@isolate(workers=WORKERS)
@jieba_model
def jieba_plain(tokenizer: Any, text: str) -> tuple[int, int]:
    return os.getpid(), len(tokenizer.lcut(text))


@isolate(workers=WORKERS, refork_after=AFTER)
@jieba_model
def jieba_reforked(tokenizer: Any, text: str) -> tuple[int, int]:
    return os.getpid(), len(tokenizer.lcut(text))


@isolate(workers=WORKERS)
@spacy_model
def spacy_plain(nlp: Any, text: str) -> tuple[int, int]:
    return os.getpid(), len(nlp(text).ents)


@isolate(workers=WORKERS, refork_after=AFTER)
@spacy_model
def spacy_reforked(nlp: Any, text: str) -> tuple[int, int]:
    return os.getpid(), len(nlp(text).ents)
