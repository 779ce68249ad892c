"""The models of both services, and what a request asks of them; MODEL says which: jieba (default) or ja_ginza."""

import os
from typing import Any

MODEL = os.environ.get("MODEL", "jieba")


def load_jieba() -> Any:
    import jieba

    tokenizer = jieba.Tokenizer()  # 500,000 words in a dict
    tokenizer.initialize()
    return tokenizer


def load_ginza() -> Any:
    import spacy

    return spacy.load("ja_ginza")


load = {"jieba": load_jieba, "ja_ginza": load_ginza}[MODEL]


def words(model: Any, text: str) -> list[str]:
    """Cut a text into words, by either model."""
    return model.lcut(text) if MODEL == "jieba" else [token.text for token in model(text)]
