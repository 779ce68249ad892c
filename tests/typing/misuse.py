"""Mistakes that a type checker has to find: each line marked WRONG, and no other. Never run."""

from __future__ import annotations

from collections.abc import Iterator

from modelguard import TTL, Execution, Replay, Swap, Uses, batched, guard, pool


class Model:
    def __init__(self, language: str = "ja") -> None:
        self.language = language

    def predict(self, text: str) -> list[str]:
        return text.split()


def load() -> Model:
    return Model()


def load_voice(language: str) -> Model:
    return Model(language)


model = guard(load, reload_on=TTL("1h"))
voices = pool(load_voice, max_memory="2 GB")


@model
def words(model: Model, text: str) -> list[str]:
    return model.predict(text)


@model
async def words_later(model: Model, text: str) -> list[str]:
    return model.predict(text)


class Service:
    @model
    def words(self, model: Model, text: str) -> list[str]:
        return model.predict(text)


words(b"bytes")  # WRONG
words(Model(), "a")  # WRONG
words()  # WRONG
words("a", txet="b")  # WRONG
number: int = words("a")  # WRONG
words_later("a").append("b")  # WRONG
Service().words(1)  # WRONG
Service().words(Model(), "a")  # WRONG

guard(load, TTL("1h"))  # WRONG
guard(load, reload_on="1h")  # WRONG
guard(load, reload_on=TTL("1h"), swap="load_frist")  # WRONG
guard(load, reload_on=TTL("1h"), warmup=lambda model: model.perdict("a"))  # WRONG
guard(load, reload_on=TTL("1h") | 50_000)  # WRONG
guard(load, reload_on=None, swap=Swap(replay="100"))  # WRONG
Replay(100, same=len)  # WRONG
Uses("many")  # WRONG

with model.lease() as leased:
    leased.perdict("a")  # WRONG

voices.lease(5)  # WRONG
model.status().generation = 2  # WRONG


@batched(max_size=4)
def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


lengths(3)  # WRONG
lengths(["a"])  # WRONG
lengths()  # WRONG
lengths("a", "b")  # WRONG
lengths.submit("a", "b")  # WRONG
lengths.map(["a"], "b")  # WRONG
batched(max_size=4)(lengths)  # WRONG
text: str = lengths("a")  # WRONG
lengths("a", timeout=[1])  # WRONG
batched(4)  # WRONG
batched(max_size="4")  # WRONG
lengths.configure(8)  # WRONG
lengths.configure(threads=2)  # WRONG
lengths.configure(max_size="automatic")  # WRONG
batched(max_size=4, workers=2)  # WRONG
batched(max_size=4, on_error="ignore")  # WRONG
Execution(loop="mine")  # WRONG
lengths.stream("a")  # WRONG


@batched(max_size=4)
def spell(texts: list[str]) -> Iterator[list[str]]:
    yield texts


spell("a")  # WRONG
spell.aio("a")  # WRONG
spell.stream(3)  # WRONG
spell.stream("a", "b")  # WRONG
