"""What a type checker has to infer of the public API. Checked by mypy and pyright, never run."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, assert_type

import torch
from spacy.lang.ja import Japanese
from starlette.applications import Starlette

from modelguard import (
    TTL,
    AutoSize,
    Batched,
    Bounds,
    Breaker,
    Buffer,
    Changed,
    Cron,
    Execution,
    Fair,
    GpuMemoryGrowth,
    GpuMemoryLimit,
    Host,
    Idle,
    Loaded,
    MemoryGrowth,
    ModelGuard,
    ModelPool,
    ModelReplicas,
    Policy,
    Replay,
    Snapshot,
    Swap,
    Uses,
    Weight,
    batched,
    control,
    deadline,
    guard,
    guard_of,
    isolate,
    pool,
    prefork,
    presets,
    replicas,
    sharing,
    telemetry,
    weights,
)
from modelguard.adapters.spacy import IndexGrowth, Zoned, zoned
from modelguard.adapters.torch import bucketed, pad_to_bucket
from modelguard.frameworks.admin import Admin
from modelguard.frameworks.asgi import ModelGuardMiddleware
from modelguard.serving import BatchedStream, Stream, caller


class Model:
    """Stands for a pipeline."""

    def __init__(self, language: str = "ja") -> None:
        self.language = language

    def predict(self, text: str) -> list[str]:
        return text.split()


def load() -> Model:
    return Model()


def controlled() -> None:
    assert_type(control.listen(sighup=True), None)
    assert_type(control.stop(), None)
    assert_type(Admin("0123456789abcdef", path="/admin", timeout="1m"), Admin)
    starlette = Starlette()
    starlette.add_middleware(ModelGuardMiddleware, admin=Admin("0123456789abcdef"))


def at_three(model: ModelGuard[Model]) -> None:
    assert_type(Cron("0 3 * * *", tz="Europe/Berlin", jitter="5m") | TTL("1d"), Policy)
    assert_type(guard(load, reload_on=Cron("0 3 * * *")), ModelGuard[Model])


def pauses(model: ModelGuard[Model]) -> None:
    assert_type(model.pause(), None)
    assert_type(model.close(timeout="5s"), None)
    assert_type(model.resume(), None)
    assert_type(model.status().paused, bool)
    postponed = model.status().postponed
    if postponed is not None:
        assert_type(postponed.seconds, float | None)
        assert_type(postponed.reasons, tuple[telemetry.Reason, ...])
    assert_type(guard(load, reload_on=None, swap=Swap(min_lifetime="1m")), ModelGuard[Model])


def on_a_gpu(model: ModelGuard[Model], now: Snapshot) -> None:
    assert_type(GpuMemoryGrowth("1 GB") | GpuMemoryLimit("80%", jitter=0), Policy)
    assert_type(guard(load, reload_on=GpuMemoryGrowth("1 GB"), retry=True), ModelGuard[Model])
    assert_type(model.status().gpu_allocated, int | None)
    assert_type([gpu.allocated.settled for gpu in now.gpus or ()], list[int | None])


async def load_async() -> Model:
    return Model()


# Loaders: the guard knows its model, however the loader is written.

model = guard(load, reload_on=TTL("1h") | Uses(50_000) | MemoryGrowth("500 MB"))
assert_type(model, ModelGuard[Model])
assert_type(guard(Model, reload_on=None), ModelGuard[Model])
assert_type(guard(lambda: Model(), reload_on=TTL(60)), ModelGuard[Model])  # noqa: PLW0108 - the form that users write
assert_type(guard(load_async, reload_on=TTL("1h")), ModelGuard[Model])

guard(
    load,
    reload_on=TTL("1h"),
    warmup=lambda model: model.predict("warm"),
    validate=lambda model: model.predict("a b") == ["a", "b"],
    unload=lambda model: model.predict("bye"),
)

# A library without types: its models are `Any`, with which mypy cannot tell a function from a method. So the loader
# says what is used of them.


class Cutter(Protocol):
    def cut(self, text: str) -> Iterator[str]: ...


def load_untyped(module: Any = math) -> Cutter:
    cutter: Cutter = module.Cutter()
    return cutter


@guard(load_untyped, reload_on=None)
def cut(model: Cutter, text: str, more: Any = None) -> list[str]:
    return list(model.cut(text))


assert_type(cut("a"), list[str])

# A loader may give the version too; the guard's model is the one inside.


def load_version() -> Loaded[Model]:
    return Loaded(Model(), version="2026-11-20")


async def load_version_async() -> Loaded[Model]:
    return Loaded(Model(), version="2026-11-20")


def load_version_of(key: str) -> Loaded[Model]:
    return Loaded(Model(key), version=key)


assert_type(guard(load_version, reload_on=None), ModelGuard[Model])
assert_type(guard(load_version_async, reload_on=None), ModelGuard[Model])
assert_type(guard(lambda: Loaded(Model(), version="1"), reload_on=None), ModelGuard[Model])
assert_type(pool(load_version_of, max_memory="1 GB"), ModelPool[str, Model])
assert_type(guard(load_version, reload_on=None).status().version, str | None)

# A probe is any function; that of a pool takes the key.


def etag() -> str:
    return "33a64df5"


async def revision() -> tuple[int, str]:
    return 1, "a"


assert_type(Changed(etag) & TTL("1h"), Policy)
assert_type(guard(load, reload_on=Changed(revision, every=30, timeout="2s")), ModelGuard[Model])
assert_type(pool(load_version_of, max_memory="1 GB", reload_on=Changed(len)), ModelPool[str, Model])

# `validate` takes the new model, or the new one and the old one.


def compare(new: Model, old: Model | None) -> bool:
    return old is None or new.predict("a") == old.predict("a")


assert_type(guard(load, reload_on=None, validate=compare), ModelGuard[Model])
assert_type(guard(load_async, reload_on=None, validate=compare), ModelGuard[Model])

# `replay` takes a number of calls, or a rule.

assert_type(guard(load, reload_on=None, swap=Swap(replay=100)), ModelGuard[Model])
assert_type(
    guard(load_async, reload_on=None, swap=Swap(replay=Replay(same=math.isclose, max_slowdown=None))), ModelGuard[Model]
)

kept = guard(load_version, reload_on=Changed(etag), swap=Swap(keep_previous=True))
assert_type(kept, ModelGuard[Model])
assert_type(kept.rollback(), None)
assert_type(kept.status().previous, int)

# Functions: the caller's signature is the written one without the model.


@model
def words(model: Model, text: str, *, limit: int = 10) -> list[str]:
    return model.predict(text)[:limit]


@model
async def words_later(model: Model, text: str) -> list[str]:
    return model.predict(text)


@model
def each(model: Model, text: str) -> Iterator[str]:
    yield from model.predict(text)


@model
async def each_later(model: Model, text: str) -> AsyncIterator[str]:
    for word in model.predict(text):
        yield word


@model
def nothing_else(model: Model) -> int:
    return len(model.predict(""))


@guard(load, reload_on=Uses(1_000))
def in_one_line(model: Model, text: str) -> list[str]:
    return model.predict(text)


assert_type(words("a"), list[str])
assert_type(words(text="a", limit=2), list[str])
assert_type(each("a"), Iterator[str])
assert_type(each_later("a"), AsyncIterator[str])
assert_type(nothing_else(), int)
assert_type(in_one_line("a"), list[str])
as_callback: Callable[[str], list[str]] = words
as_task: Callable[[str], Coroutine[Any, Any, list[str]]] = words_later


async def awaits() -> None:
    assert_type(await words_later("a"), list[str])
    async for word in each_later(text="a"):
        assert_type(word, str)


# In a class the model stands second, after `self` or `cls`.


class Service:
    @model
    def words(self, model: Model, text: str, *, limit: int = 10) -> list[str]:
        return model.predict(text)[:limit]

    @model
    async def words_later(self, model: Model, text: str) -> list[str]:
        return model.predict(text)

    @model
    def each(self, model: Model, text: str) -> Iterator[str]:
        yield from model.predict(text)

    @model
    async def each_later(self, model: Model, text: str) -> AsyncIterator[str]:
        for word in model.predict(text):
            yield word

    @classmethod
    @model
    def under_classmethod(cls, model: Model, text: str) -> list[str]:
        return model.predict(text)

    @model
    @classmethod
    def over_classmethod(cls, model: Model, text: str) -> list[str]:
        return model.predict(text)

    @staticmethod
    @model
    def under_staticmethod(model: Model, text: str) -> list[str]:
        return model.predict(text)

    @model
    @staticmethod
    def over_staticmethod(model: Model, text: str) -> list[str]:
        return model.predict(text)


service = Service()
assert_type(service.words("a", limit=2), list[str])
assert_type(service.words(text="a"), list[str])
assert_type(service.each("a"), Iterator[str])
assert_type(service.each_later("a"), AsyncIterator[str])
assert_type(Service.under_classmethod("a"), list[str])
assert_type(Service.over_classmethod("a"), list[str])
assert_type(Service.under_staticmethod("a"), list[str])
assert_type(Service.over_staticmethod("a"), list[str])
assert_type(service.over_classmethod("a"), list[str])
assert_type(service.over_staticmethod("a"), list[str])


async def awaits_methods() -> None:
    assert_type(await service.words_later(text="a"), list[str])


# The handle.

with model.lease() as leased:
    assert_type(leased, Model)

with model as opened:
    assert_type(opened, ModelGuard[Model])


async def handle() -> None:
    async with model.lease() as leased:
        assert_type(leased, Model)
    async with model as opened:
        assert_type(opened, ModelGuard[Model])
    await model.aload()
    await model.areload()
    await model.aclose()


assert_type(model.ready, bool)
assert_type(model.status().generation, int)
assert_type(model.status().last_error, str | None)
assert_type(guard_of(words), ModelGuard[Any])

# Pools: the same, by key.


def load_voice(language: str) -> Model:
    return Model(language)


voices = pool(load_voice, max_memory="2 GB", max_models=5, reload_on=TTL("1h") | Idle("10m"))
assert_type(voices.unload("ja", timeout="5s"), None)
assert_type(voices.reload("ja", "en"), None)
assert_type(voices.status().idle, tuple[str, ...])
assert_type(Idle("10m", keep="mold"), Idle)
assert_type(voices, ModelPool[str, Model])

with voices.lease("ja") as voice:
    assert_type(voice, Model)


@voices(key=lambda text, language: language)
def speak(model: Model, text: str, language: str) -> list[str]:
    return model.predict(f"{language} {text}")


assert_type(speak("a", "ja"), list[str])
assert_type(speak(text="a", language="ja"), list[str])

# Policies: values, and the user's own with one method.


@dataclass(frozen=True)
class EveryOther(Policy):
    every: int

    def due(self, now: Snapshot) -> bool:
        return now.generation % self.every == 0


assert_type(guard(load, reload_on=EveryOther(2) & TTL("1h")), ModelGuard[Model])

# Hooks: any callable of one event.


def on_event(event: telemetry.Event) -> None:
    assert_type(event.guard, str)


assert_type(telemetry.add_hook(on_event), Callable[[], None])
telemetry.add_hook(lambda event: event.guard)  # what it returns is of no account

# spaCy pipelines in memory zones: the same, by `zoned`.

pipeline = guard(Japanese, reload_on=IndexGrowth("16 MB") | TTL("1h"))
entities = zoned(pipeline, wait_timeout="10s")
assert_type(entities, Zoned[Japanese])


@entities
def names(nlp: Japanese, text: str, *, limit: int = 10) -> list[str]:
    return [entity.text for entity in nlp(text).ents][:limit]


@entities
async def names_later(nlp: Japanese, text: str) -> list[str]:
    return [entity.text for entity in nlp(text).ents]


class Names:
    @entities
    def find(self, nlp: Japanese, text: str) -> list[str]:
        return [entity.text for entity in nlp(text).ents]

    @entities
    @staticmethod
    def find_static(nlp: Japanese, text: str) -> list[str]:
        return [entity.text for entity in nlp(text).ents]


assert_type(names("a", limit=2), list[str])
assert_type(Names().find(text="a"), list[str])
assert_type(Names.find_static("a"), list[str])

with entities.lease() as zoned_pipeline:
    assert_type(zoned_pipeline, Japanese)


async def zoned_later() -> None:
    assert_type(await names_later("a"), list[str])
    async with entities.lease(timeout="1s") as zoned_pipeline:
        assert_type(zoned_pipeline, Japanese)


# Batches: a function of a list becomes a function of one item.


@batched(max_size=32, deadline="2s", breaker=Breaker(failures=3, reload=model))
@model
def lengths(model: Model, texts: list[str]) -> list[int]:
    return [len(model.predict(text)) for text in texts]


# One without annotations is a plain one: `submit` is no error.


@batched(max_size=8)
def without_annotations(texts):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 - that is the point
    return texts


without_annotations.submit("a")


@batched(max_size=8)
def greet(names: list[str], *, language: str = "en") -> list[str]:
    return [f"{language} {name}" for name in names]


assert_type(lengths, Batched[str, int])
assert_type(lengths("a"), int)
assert_type(lengths("a", timeout="1s"), int)
assert_type(lengths.submit("a"), Future[int])
assert_type(lengths.map(["a"]), Iterator[int])
assert_type(greet("a", language="fr"), str)
assert_type(lengths.status().waiting, int)
assert_type(lengths.limits.deadline, float)
assert_type(lengths.status().max_size, int)
assert_type(lengths.status().slo_reachable, bool | None)
lengths.configure(max_size=8, deadline=None, max_wait="5ms", max_queue=64, execution=Execution(hang_after="1m"))
lengths.configure(max_size=AutoSize(slo="100ms"))
assert_type(lengths.status().run.p99, float)


async def batches_later() -> None:
    assert_type(await lengths.aio("a", timeout=0.5), int)
    assert_type(await lengths.amap(["a", "b"], timeout=0.5), list[int])
    async with lengths as open_until_the_end:
        assert_type(open_until_the_end, Batched[str, int])


@batched(max_size=AutoSize(slo="100ms"))
def chosen(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


assert_type(chosen, Batched[str, int])


class Scaling:
    @batched(max_size=8, weight=len)
    def scale(self, texts: list[str]) -> list[float]:
        return [float(len(text)) for text in texts]


assert_type(Scaling().scale, Batched[str, float])
assert_type(Scaling().scale("a"), float)

with deadline("1s"):
    assert_type(lengths("a"), int)


@batched(
    max_size=8,
    weight=Weight(of=len, padded=True),
    fair_by=Fair(by=lambda text: text[0], shares={"a": 2}, quota=4, ageing="5s"),
)
def sizes(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


assert_type(sizes("a", priority=1), int)
assert_type(sizes.submit("a", priority=1), Future[int])
assert_type(sizes.status().padding, float)
with caller(("tenant", 7), priority=1):
    assert_type(sizes("a"), int)


# Replicas: what a guard decorates, they decorate.

pair = replicas(guard(Model, reload_on=None), 2)


@pair
def predicted(model: Model, text: str) -> list[str]:
    return model.predict(text)


@pair
async def predicted_later(model: Model, text: str) -> list[str]:
    return model.predict(text)


assert_type(pair, ModelReplicas[Model])
assert_type(predicted("a"), list[str])
assert_type(pair.status()[0].generation, int)
with pair.lease() as one_of_them:
    assert_type(one_of_them, Model)


async def predictions_later() -> None:
    assert_type(await predicted_later("a"), list[str])


# Streams: a generator function yields the parts of each item's result. Async functions are called as others are.


@batched(max_size=8, buffer=Buffer(parts=16, slow_after="500ms"))
@model
def spell(model: Model, texts: list[str]) -> Iterator[list[str]]:
    yield texts


@batched(max_size=8)
def spell_some(texts: list[str]) -> Generator[list[str | type[StopIteration]], list[bool], None]:
    still_there = yield [text or StopIteration for text in texts]
    assert_type(still_there, list[bool])


@batched(max_size=8)
@model
async def spell_later(model: Model, texts: list[str]) -> AsyncIterator[list[str]]:
    yield texts


@batched(max_size=8, execution=Execution(loop="caller"))
@model
async def lengths_later(model: Model, texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


assert_type(spell, BatchedStream[str, str])
assert_type(spell.stream("a", timeout="1s"), Stream[str])
assert_type(spell_some, BatchedStream[str, str])
assert_type(spell_later, BatchedStream[str, str])
assert_type(lengths_later, Batched[str, int])
assert_type(lengths_later("a"), int)
assert_type([*spell.stream("a")], list[str])
assert_type(spell.status().running, int)


async def streams_later() -> None:
    assert_type([part async for part in spell.stream("a")], list[str])
    assert_type(await lengths_later.aio("a"), int)
    async with spell.stream("a") as parts:
        assert_type(parts, Stream[str])
    await parts.aclose()


class Spelling:
    @batched(max_size=8)
    def spell(self, texts: list[str]) -> Iterator[list[str]]:
        yield texts

    @batched(max_size=8)
    async def spell_later(self, texts: list[str]) -> AsyncIterator[list[str]]:
        yield texts

    @batched(max_size=8)
    async def lengths(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


assert_type(Spelling().spell, BatchedStream[str, str])
assert_type(Spelling().spell_later, BatchedStream[str, str])
assert_type(Spelling().lengths, Batched[str, int])

# Buckets: the function stays what it was.


@model
@bucketed("wave")
def synthesize(model: Model, wave: torch.Tensor) -> torch.Tensor:
    return wave


assert_type(synthesize(torch.zeros(1, 8)), torch.Tensor)
assert_type(pad_to_bucket(torch.zeros(1, 8)), torch.Tensor)
assert_type(pad_to_bucket(torch.zeros(1, 8), mask=True), tuple[torch.Tensor, torch.Tensor])

# Isolation: the function stays what it was.


@isolate(workers=2, timeout="10s")
@model
def isolated(model: Model, text: str) -> list[str]:
    return [text]


assert_type(isolated("a"), list[str])
assert_type(isolated.submit("a"), Future[list[str]])
assert_type(isolated.ready, bool)
assert_type(isolated.status().paused, bool)
assert_type(isolated.pause(), None)
assert_type(isolated.resume(), None)
assert_type(isolated.unload("5s"), None)


async def isolated_awaits() -> None:
    assert_type(await isolated.aio("a"), list[str])
    assert_type(await isolated_coroutine("a"), bytes)
    assert_type(await isolated_coroutine.aio("a"), bytes)
    assert_type(isolated_coroutine.submit("a"), Future[bytes])
    assert_type(await named("a", limit=3), list[str])
    assert_type(await named.aio("a"), list[str])
    assert_type(named.submit("a"), Future[list[str]])
    assert_type(await named_as_mypy_wants_it.aio("a"), list[str])


@isolate()
@model
async def isolated_coroutine(model: Model, text: str) -> bytes:
    return text.encode()


# A stub: its signature is what callers see.


@isolate(target="pipeline:entities", workers=2, timeout="10s")
async def named(text: str, limit: int = 10) -> list[str]: ...  # type: ignore[empty-body]


@isolate(target="pipeline:words")
def named_as_mypy_wants_it(text: str) -> list[str]:
    raise NotImplementedError


assert_type(named_as_mypy_wants_it("a"), list[str])
assert_type(named_as_mypy_wants_it.submit("a"), Future[list[str]])


class Isolating:
    @isolate(retry=True)
    @model
    @staticmethod
    def static(model: Model, text: str) -> list[str]:
        return [text]


@isolate(recycle_on=Uses(1_000))
@voices(key="voice")
def spoken(model: Model, voice: str) -> bytes:
    return voice.encode()


assert_type(Isolating.static("a"), list[str])
assert_type(Isolating().static("a"), list[str])
assert_type(spoken("anna"), bytes)


@isolate(scope=Host(version="2026-10"), bounds=Bounds(queue=8, transfer="1 MB"))
@guard(Model, reload_on=None)
def shared_by_the_host(model: Model, text: str) -> list[str]:
    return [text]


assert_type(shared_by_the_host("a"), list[str])
assert_type(shared_by_the_host.status().broker, int | None)
assert_type(shared_by_the_host.status().clients, tuple[int, ...])

# Presets and sharing.

assert_type(presets.get("torch-cpu-dynamic", workers=4) | presets.get("prefork"), presets.Preset)
assert_type(presets.get("low-memory").apply().ok, bool)
assert_type(prefork.prepare(model, freeze=True), prefork.ForkReport)
assert_type(sharing.report(), sharing.TreeReport)
assert_type(weights.load(torch.nn.Module, "weights"), torch.nn.Module)

# Middleware.

application = Starlette()
application.add_middleware(ModelGuardMiddleware, deadline="2s", readyz=None)
