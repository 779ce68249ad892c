"""``frameworks.grpc`` on real servers of this process; ``test_grpc.py`` runs these tests in a process of its own.

gRPC's threads do not survive a fork, and other tests fork.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from tests.unit.frameworks.refusals import ERRORS, IDS, NAME
from tests.unit.serving.gated import Gated, until

from modelguard import Fair, batched, deadline
from modelguard.errors import DeadlineExceeded, InvalidOption, Overloaded
from modelguard.frameworks import grpc as frameworks_grpc
from modelguard.serving.deadlines import left

TIMEOUT = 60
CODES = {
    503: grpc.StatusCode.UNAVAILABLE,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    499: grpc.StatusCode.CANCELLED,
}


def encode(text: str | bytes) -> bytes:
    """Write a message; asynchronous servers encode text themselves before."""
    return text.encode() if isinstance(text, str) else text


def handlers(function: Any, kind: str = "unary_unary") -> Any:
    """A servicer of one method, ``/s/m``, whose messages are text."""
    method = getattr(grpc, f"{kind}_rpc_method_handler")(function, bytes.decode, encode)
    return grpc.method_handlers_generic_handler("s", {"m": method})


@contextmanager
def serving(function: Any, kind: str = "unary_unary", **options: Any) -> Iterator[Callable[..., Any]]:
    """A server with threads, and the method as its client calls it."""
    interceptors = [frameworks_grpc.interceptor(**options)]
    server = grpc.server(ThreadPoolExecutor(4), [handlers(function, kind)], interceptors)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield getattr(channel, kind)("/s/m", encode, bytes.decode)
    server.stop(None).wait()


def aio(function: Any, ask: Callable[[Any], Any], kind: str = "unary_unary", **options: Any) -> Any:
    """What a client of an asynchronous server gets; ``ask`` is a coroutine function of the method."""

    async def main() -> Any:
        server = grpc.aio.server(
            ThreadPoolExecutor(4), [handlers(function, kind)], [frameworks_grpc.aio_interceptor(**options)]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                return await ask(getattr(channel, kind)("/s/m", encode, bytes.decode))
        finally:
            await server.stop(None)

    return asyncio.run(main())


def raising(error: Exception, kind: str) -> Any:
    """A method that raises an error."""

    def unary(request: Any, context: Any) -> str:
        raise error

    def stream(request: Any, context: Any) -> Iterator[str]:
        yield "a part"
        raise error

    async def async_unary(request: Any, context: Any) -> str:
        raise error

    async def async_stream(request: Any, context: Any) -> AsyncIterator[str]:
        yield "a part"
        raise error

    async def writing(request: Any, context: Any) -> None:
        await context.write("a part")
        raise error

    return {
        "unary": unary,
        "stream": stream,
        "async unary": async_unary,
        "async stream": async_stream,
        "writing": writing,
    }[kind]


async def call(method: Any) -> Any:
    """The error of a call of an asynchronous client."""
    with pytest.raises(grpc.RpcError) as failed:
        await method("x", timeout=TIMEOUT)
    return failed.value


async def read(method: Any) -> Any:
    """The error of a stream of an asynchronous client, after its first part."""
    parts = method("x", timeout=TIMEOUT)
    assert "a part" == await parts.read()
    with pytest.raises(grpc.RpcError) as failed:
        await parts.read()
    return failed.value


def check(failed: Any, status: int, retry: float | None) -> None:
    """The code is right, and nothing internal is revealed."""
    assert CODES[status] == failed.code()
    assert NAME not in failed.details()
    pushback = dict(failed.trailing_metadata()).get("grpc-retry-pushback-ms")
    assert (retry is None) == (pushback is None)
    if retry is not None:
        assert 1000 * retry <= int(pushback) <= 1500 * retry + 2000


@pytest.mark.parametrize("server", ["threads", "aio", "aio in threads"])
def test_a_deadline_of_a_stream_holds_from_part_to_part(server: str) -> None:
    """The block is the servicer's own; the server does other things in the middle of it."""

    def bounded(request: Any, context: Any) -> Iterator[str]:
        with deadline("1h"):
            for _ in range(3):
                yield str((left() or 0) > 3500)

    async def async_bounded(request: Any, context: Any) -> AsyncIterator[str]:
        with deadline("1h"):
            for _ in range(3):
                yield str((left() or 0) > 3500)

    async def read_all(method: Any) -> list[str]:
        return [part async for part in method("x")]

    if server == "threads":
        with serving(bounded, "unary_stream") as method:
            found = list(method("x"))
    else:
        found = aio(async_bounded if server == "aio" else bounded, read_all, "unary_stream")
    assert ["True"] * 3 == found


@pytest.mark.parametrize(("error", "status", "retry"), ERRORS, ids=IDS)
def test_each_error_has_its_code(error: Exception, status: Any, retry: float | None) -> None:
    """GRPC's own code would be UNKNOWN; a client also learns when to try again."""
    with serving(raising(error, "unary")) as method, pytest.raises(grpc.RpcError) as failed:
        method("x", timeout=TIMEOUT)
    check(failed.value, status["status"], retry)
    check(aio(raising(error, "async unary"), call), status["status"], retry)


@pytest.mark.parametrize("kind", ["stream", "async stream", "writing"])
def test_a_stream_ends_with_the_same_code(kind: str) -> None:
    """After the parts that were sent before."""
    error = Overloaded(NAME, retry_after=2)
    check(aio(raising(error, kind), read, "unary_stream"), 503, 2)
    if kind == "stream":
        with serving(raising(error, kind), "unary_stream") as method:
            parts = method("x", timeout=TIMEOUT)
            assert "a part" == next(parts)
            with pytest.raises(grpc.RpcError):
                next(parts)
        check(parts, 503, 2)


def test_a_method_in_a_thread_of_an_asynchronous_server() -> None:
    """It is answered for as well."""
    check(aio(raising(DeadlineExceeded(NAME, waited=1), "unary"), call), 504, None)


def test_its_own_errors_stay_its_own() -> None:
    """UNKNOWN, the code of ``abort()``, and UNIMPLEMENTED where there is no such method."""

    def aborting(request: Any, context: Any) -> str:
        context.abort(grpc.StatusCode.NOT_FOUND, "no such text")
        return ""

    for function, code in (
        (raising(ValueError("mine"), "unary"), grpc.StatusCode.UNKNOWN),
        (aborting, grpc.StatusCode.NOT_FOUND),
    ):
        with serving(function) as method, pytest.raises(grpc.RpcError) as failed:
            method("x", timeout=TIMEOUT)
        assert code == failed.value.code()
    assert grpc.StatusCode.UNKNOWN == aio(raising(ValueError("mine"), "async unary"), call).code()
    with serving(str, "stream_stream") as method, pytest.raises(grpc.RpcError) as failed:
        next(method(iter(["x"]), timeout=TIMEOUT))
    assert grpc.StatusCode.UNKNOWN == failed.value.code()


def test_every_kind_of_method_works() -> None:
    """With one message or a stream of them, to and from the server."""

    def one(texts: Any, context: Any) -> str:
        return "".join(texts)

    def many(texts: Any, context: Any) -> Iterator[str]:
        yield from texts

    async def async_one(texts: Any, context: Any) -> str:
        return "".join([text async for text in texts])

    async def async_many(texts: Any, context: Any) -> AsyncIterator[str]:
        async for text in texts:
            yield text

    with serving(one) as method:
        assert "ab" == method("ab", timeout=TIMEOUT)
    with serving(many, "unary_stream") as method:
        assert ["a", "b"] == list(method("ab", timeout=TIMEOUT))
    with serving(one, "stream_unary") as method:
        assert "ab" == method(iter("ab"), timeout=TIMEOUT)
    with serving(many, "stream_stream") as method:
        assert ["a", "b"] == list(method(iter("ab"), timeout=TIMEOUT))

    async def ask(method: Any) -> str:
        return str(await method(iter("ab"), timeout=TIMEOUT))

    async def ask_for_many(method: Any) -> list[str]:
        return [text async for text in method(iter("ab"), timeout=TIMEOUT)]

    assert "ab" == aio(async_one, ask, "stream_unary")
    assert ["a", "b"] == aio(async_many, ask_for_many, "stream_stream")


def test_trailing_metadata_of_the_method_are_kept() -> None:
    """The time to try again is added."""

    def function(request: Any, context: Any) -> str:
        context.set_trailing_metadata((("own", "kept"),))
        raise Overloaded("full", retry_after=1)

    with serving(function) as method, pytest.raises(grpc.RpcError) as failed:
        method("x", timeout=TIMEOUT)
    assert {"own", "grpc-retry-pushback-ms"} == set(dict(failed.value.trailing_metadata()))


def test_the_deadline_is_the_clients_or_the_servers() -> None:
    """Whichever comes first; without either there is none."""

    def rest(request: Any, context: Any) -> str:
        return str(left())

    async def async_rest(request: Any, context: Any) -> str:
        return str(left())

    async def ask(method: Any) -> list[str]:
        return [await method("x"), await method("x", timeout=TIMEOUT)]

    def check(unbounded: str, bounded: str, server: float | None) -> None:
        if server is None:
            assert "None" == unbounded
        else:
            assert server - 10 < float(unbounded) <= server
        assert 40 < float(bounded) < TIMEOUT + 1  # gRPC rounds

    for server in (None, 300):
        options = {} if server is None else {"deadline": server}
        with serving(rest, **options) as method:
            check(method("x"), method("x", timeout=TIMEOUT), server)
        check(*aio(async_rest, ask, **options), server)


def test_the_servers_deadline_is_a_status(model: Gated) -> None:
    """DEADLINE_EXCEEDED by the server, though the client has time."""
    f = batched(max_size=1)(model)
    f.submit("first")
    model.busy()
    with serving(lambda request, context: str(f(request)), deadline="50ms") as method:
        with pytest.raises(grpc.RpcError) as failed:
            method("x", timeout=TIMEOUT)
        assert "The answer was not ready in time." == failed.value.details()


def test_a_cancelled_call_is_not_computed(model: Gated) -> None:
    """By a client of a server with threads, and of an asynchronous one."""
    f = batched(max_size=1)(model)
    f.submit("first")
    model.busy()
    with serving(lambda request, context: str(f(request))) as method:
        asked = method.future("x", timeout=TIMEOUT)
        until(lambda: f.status().waiting == 1)
        asked.cancel()
        until(lambda: f.status().waiting == 0)

    async def function(request: Any, context: Any) -> str:
        return str(await f.aio(request))

    async def ask(method: Any) -> None:
        asked = method("x", timeout=TIMEOUT)
        waiting = asyncio.ensure_future(asyncio.to_thread(until, lambda: f.status().waiting == 1))
        await waiting
        asked.cancel()
        await asyncio.to_thread(until, lambda: f.status().waiting == 0)

    aio(function, ask)
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
def test_a_plain_method_of_an_asynchronous_server_is_computed(kind: str) -> None:
    """Its thread is told nothing of its client, which is no sign that the client has gone."""

    @batched(max_size=4)
    def f(items: list[str]) -> list[str]:
        return items

    def one(request: Any, context: Any) -> str:
        return str(f(request))

    def many(request: Any, context: Any) -> Iterator[str]:
        yield str(f(request))

    async def ask(method: Any) -> str:
        asked = method("x", timeout=TIMEOUT)
        if kind == "unary_unary":
            return str(await asked)
        # To the end: the server's thread tells the loop of it, and would wait for ever for one that ends meanwhile.
        return "".join([part async for part in asked])

    assert "x" == aio(one if kind == "unary_unary" else many, ask, kind)
    f.close()


@pytest.mark.parametrize("fair_by", ["X-Tenant", "tenant_id", lambda context: context.peer()])
def test_callers_share_by_metadata_or_a_function(model: Gated, fair_by: Any) -> None:
    """A caller above its quota gets RESOURCE_EXHAUSTED."""
    f = batched(max_size=1, fair_by=Fair(quota=1))(model)
    f.submit("first")
    model.busy()

    def function(request: Any, context: Any) -> str:
        f.submit("waits")
        return str(f.submit("is too many"))

    with serving(function, fair_by=fair_by) as method, pytest.raises(grpc.RpcError) as failed:
        method("x", timeout=TIMEOUT, metadata=(("x-tenant", "seven"), ("tenant_id", "seven")))
    assert grpc.StatusCode.RESOURCE_EXHAUSTED == failed.value.code()


@pytest.mark.parametrize("make", [frameworks_grpc.interceptor, frameworks_grpc.aio_interceptor])
def test_an_invalid_option_is_rejected(make: Any) -> None:
    """Where the interceptor is made."""
    with pytest.raises(InvalidOption, match="deadline"):
        make(deadline="soon")


@pytest.mark.parametrize("make", [frameworks_grpc.interceptor, frameworks_grpc.aio_interceptor])
@pytest.mark.parametrize("option", ["livez", "guards", "admin", "timeout_header"])
def test_an_option_of_the_middlewares_is_rejected(make: Any, option: str) -> None:
    """There are no probes and no headers, so it would do nothing; the error lists those that there are."""
    with pytest.raises(InvalidOption, match=rf"^{option}=.* Its options are deadline, detail, fair_by, priority\."):
        make(**{option: None})


@pytest.fixture
def model() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()
