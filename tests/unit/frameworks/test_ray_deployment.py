"""``frameworks.ray`` without Ray: what cannot become a deployment, and replicas called as Serve calls them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from modelguard import Uses, batched, guard
from modelguard.errors import GuardClosed, InvalidOption, NotSupported, QueueFull
from modelguard.frameworks import ray
from modelguard.frameworks.ray import ReplacementLock

model = guard(dict, reload_on=Uses(2), name="of ray")


@batched(max_size=4, max_queue=8, deadline="30s")
@model
def count(model: dict[str, int], texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@batched(max_size=4)
def unguarded(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@model
def unbatched(model: dict[str, int], text: str) -> int:
    return len(text)


class Counter:
    @batched(max_size=4)
    @model
    def method(self, model: dict[str, int], texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


def inner() -> Any:
    @batched(max_size=4)
    @model
    def nested(model: dict[str, int], texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    return nested


@batched(max_size=4)
@model
def spelled(model: dict[str, int], texts: list[str]) -> Any:
    yield texts


hidden = inner()


def in_main() -> Any:
    nested = inner()
    nested.__module__, nested.__qualname__ = "__main__", "nested"
    return nested


def shadowed() -> Any:
    nested = inner()
    nested.__qualname__ = "count"
    return nested


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (len, "must be a batched function, not a builtin_function_or_method"),
        (unbatched, "Put @batched"),
        (spelled, "yields its results in parts"),
        (unguarded, "is not decorated by a guard"),
        (Counter().method, "at the top of a module"),
        (hidden, "at the top of a module"),
        (in_main(), "replicas cannot import"),
        (shadowed(), "is another object"),
    ],
    ids=[
        "a plain function",
        "not batched",
        "a stream",
        "not guarded",
        "a method",
        "a closure",
        "of __main__",
        "shadowed",
    ],
)
def test_what_cannot_become_a_deployment_is_rejected_where_it_is_written(function: Any, message: str) -> None:
    """Each error has its fix, and comes before Ray is imported."""
    with pytest.raises(InvalidOption, match=message) as caught:
        ray.deployment(function)
    assert ("function", True) == (caught.value.argument, bool(caught.value.fix))


@pytest.mark.parametrize(
    "options",
    [{"min_lifetime": -1}, {"replace_timeout": 0}, {"min_lifetime": "soon"}, {"max_ongoing_requests": 3}],
)
def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    """So are bounds with which no batch would ever be full."""
    (argument,) = options
    with pytest.raises(InvalidOption) as caught:
        ray.deployment(count, **options)
    assert argument == caught.value.argument


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module can be imported; only a deployment needs Ray."""
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(NotSupported, match=r"modelguard-lifecycle\[ray\]"):
        ray.deployment(count)


class Pressure(Exception):
    """Replaces Ray's."""


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make replicas as Serve does, with stubs in place of Ray."""
    kept: dict[tuple[str, str], bytes] = {}

    def put(key: str, value: str, *, overwrite: bool, namespace: str) -> bool:
        assert not overwrite
        there = (namespace, key) in kept
        kept.setdefault((namespace, key), value.encode())
        return there

    kv = SimpleNamespace(
        _internal_kv_put=put,
        _internal_kv_get=lambda key, *, namespace: kept.get((namespace, key)),
        _internal_kv_del=lambda key, *, namespace: kept.pop((namespace, key), None),
        _internal_kv_list=lambda prefix, *, namespace: [
            key.encode() for space, key in kept if space == namespace and key.startswith(prefix)
        ],
        kept=kept,
    )
    context = SimpleNamespace(replica_tag="r1", app_name="app", deployment="count")
    made = {
        "ray.serve": SimpleNamespace(get_replica_context=lambda: context),
        "ray.serve.exceptions": SimpleNamespace(BackPressureError=Pressure),
        "ray.experimental.internal_kv": kv,
    }
    for name, content in made.items():
        module = ModuleType(name)
        vars(module).update(vars(content))
        monkeypatch.setitem(sys.modules, name, module)
    module = ModuleType("ray_made_up")
    monkeypatch.setitem(sys.modules, "ray_made_up", module)

    def make(function: Any, *, tag: str = "r1", least: float = 0.0) -> Any:
        context.replica_tag = tag
        module.function = function  # type: ignore[attr-defined]
        body = {"reference": "ray_made_up:function", "min_lifetime": least, "replace_timeout": 300.0}
        return type("Made", (ray.Replica,), body)

    make.kept = kept  # type: ignore[attr-defined]
    return make


def batch_of(policy: Any = None, **options: Any) -> Any:
    """A batched function with its own guard."""

    @batched(**{"max_size": 1, **options})
    @guard(dict, reload_on=policy)
    def function(model: dict[str, int], items: list[Any]) -> list[Any]:
        if items == ["fail"]:
            raise KeyError("fail")
        return items

    return function


async def begun(kind: Any, *, checks: int = 2) -> Any:
    """Make a replica as Serve does: the constructor is awaited, its health checked once, and again when it serves."""
    made = kind.__new__(kind)
    await made.__init__()
    for _ in range(checks):
        await made.check_health()
    return made


def find_due(made: Any) -> None:
    """Check the policy, unless the background thread is checking it."""
    while not made.status()["due"]:
        made._model.check()


def test_a_due_policy_fails_the_health_check_and_loads_nothing(replica: Any) -> None:
    """The model still serves until Serve has replaced the replica."""

    async def live() -> None:
        made = await begun(replica(batch_of(Uses(2))))
        await made.check_health()
        assert ["a", "b", "c"] == [await made(text) for text in "abc"]
        find_due(made)
        with pytest.raises(RuntimeError, match=r"replica r1 must be replaced: Uses\(2\)"):
            await made.check_health()
        assert "d" == await made("d")
        assert (1, ("Uses(2)",)) == (made.status()["guard"]["generation"], made.status()["due"])

    asyncio.run(live())


def test_one_replica_at_a_time_fails_its_health_check(replica: Any) -> None:
    """The next one stays healthy until a successor serves, which Serve's second check of it shows."""

    async def live() -> None:
        first = await begun(replica(batch_of(Uses(1)), tag="first"))
        second = await begun(replica(batch_of(Uses(1)), tag="second"))
        for made in (first, second):
            assert [1, 1] == [await made(1), await made(1)]
            find_due(made)
        find_due(made)
        with pytest.raises(RuntimeError):
            await first.check_health()
        await second.check_health()
        third = await begun(replica(batch_of(), tag="third"), checks=1)
        await second.check_health()
        await third.check_health()
        with pytest.raises(RuntimeError):
            await second.check_health()
        assert [b"second"] == list(replica.kept.values())

    asyncio.run(live())


def test_a_young_replica_stays(replica: Any) -> None:
    """A policy that is due at once does not make Ray start replicas again and again."""

    async def live() -> None:
        made = await begun(replica(batch_of(Uses(1)), least=3600.0))
        assert [1, 1] == [await made(1), await made(1)]
        find_due(made)
        await made.check_health()

    asyncio.run(live())


def test_after_an_explicit_reload_the_replica_stays(replica: Any) -> None:
    """It has a new model already."""

    async def live() -> None:
        function = batch_of(Uses(1))
        made = await begun(replica(function))
        assert [1, 1] == [await made(1), await made(1)]
        find_due(made)
        await made._model.areload()
        await made.check_health()

    asyncio.run(live())


def test_a_store_that_cannot_be_reached_ends_no_replica(replica: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica still starts, and one that serves still serves."""

    def fail(*_: object) -> bool:
        raise ConnectionError("the head node is away")

    async def live() -> None:
        monkeypatch.setattr(ReplacementLock, "release", fail)
        monkeypatch.setattr(ReplacementLock, "acquire", fail)
        made = await begun(replica(batch_of(Uses(1))))
        assert [1, 1] == [await made(1), await made(1)]
        find_due(made)
        await made.check_health()

    asyncio.run(live())


def test_refusals_are_rays_own(replica: Any) -> None:
    """``Overloaded`` becomes Ray's back-pressure error with the same ``retry_after``; other errors are unchanged."""

    async def live() -> None:
        function = batch_of(max_queue=1)
        made = await begun(replica(function))

        def full(*_: object) -> None:
            raise QueueFull("function", queued=1, retry_after=7.5)

        with pytest.raises(KeyError):
            await made("fail")
        function._batcher.put = function._batcher.put_plain = full
        with pytest.raises(Pressure) as caught:
            await made("x")
        assert (0, 1, 503, 7.5) == caught.value.args
        assert isinstance(caught.value.__cause__, QueueFull)
        assert ["function(): the queue is full, with 1 requests"] == caught.value.__notes__

    asyncio.run(live())


def test_a_closed_function_raises_its_own_error(replica: Any) -> None:
    """Errors that are not ``Overloaded`` pass through."""

    async def live() -> None:
        function = batch_of()
        made = await begun(replica(function))
        await function.aclose()
        with pytest.raises(GuardClosed):
            await made(1)

    asyncio.run(live())


@pytest.mark.parametrize("body", [b"", b"no json", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_is_the_clients_fault(replica: Any, body: bytes) -> None:
    """It gets 400, also where Python's reader gives up because of its depth."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def live() -> int:
        made = await begun(replica(batch_of()))
        answer = await made(Request({"type": "http", "method": "POST", "headers": []}, receive))
        return int(answer.status_code)

    assert 400 == asyncio.run(live())
