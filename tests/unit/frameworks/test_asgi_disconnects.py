"""``frameworks.asgi``: clients that disconnect, and which of their calls are cancelled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.frameworks.asgi_by_hand import (
    DISCONNECT,
    TIMEOUT,
    Client,
    a_turn,
    alone,
    behind,
    calling,
    disconnect,
    fine,
    piece,
    read,
    scope,
    seen,
    serve,
)

from modelguard import batched
from modelguard.errors import CallerGone
from modelguard.frameworks.asgi import ModelGuardMiddleware

if TYPE_CHECKING:
    from tests.unit.serving.gated import Gated


PIECES = [piece(b"a" * 10_000, more=True) for _ in range(20)]


@pytest.mark.parametrize(
    ("body", "pieces"),
    [
        ("read", [piece()]),
        ("read", [*PIECES, piece()]),
        ("unread", [piece()]),
        ("unread", [*PIECES, piece()]),
        ("unread", PIECES),
    ],
    ids=["read", "read in pieces", "unread", "unread in pieces", "unread and incomplete"],
)
def test_a_disconnect_cancels_what_waits(model: Gated, body: str, pieces: list[Any]) -> None:
    """The item is not computed, whether the application has read the body or not, and it can still read it."""
    f = batched(max_size=1)(model)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if body != "unread":
            await read(receive)
            await f.aio(1)
        try:
            await f.aio(1)
        except CallerGone:
            received = [await receive() for _ in range(len(pieces) + 2)]
            assert [*pieces, DISCONNECT, DISCONNECT] == received
            raise

    async def main() -> None:
        await behind(f, model)
        await disconnect(ModelGuardMiddleware(app), Client(*pieces), f)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_cancelled_application_cancels_what_waits_in_threads(model: Gated, kind: str) -> None:
    """A server that cancels it, or a limit of time around it, has no client that the answer could go to."""
    f = batched(max_size=1)(model)
    gone: list[BaseException | None] = []

    def blocking() -> None:
        gone.append(f.submit(1).exception(TIMEOUT))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.to_thread(blocking)

    async def main() -> None:
        await behind(f, model)
        client = Client()
        serving = ModelGuardMiddleware(app)(scope(type=kind), client.receive, client.send)
        task = asyncio.create_task(serving)  # type: ignore[arg-type] # a coroutine
        await seen(lambda: f.status().waiting == 1)
        task.cancel()
        await asyncio.wait([task], timeout=TIMEOUT)
        assert task.cancelled()
        await seen(lambda: len(gone) == 1)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [CallerGone] == list(map(type, gone))
    assert [["first"]] == model.batches


def test_a_disconnect_before_the_body_is_complete_cancels_what_waits(model: Gated) -> None:
    """The application streams the body, and calls the model on the way."""
    f = batched(max_size=1)(model)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await f.aio(1)

    async def main() -> None:
        await behind(f, model)
        await disconnect(ModelGuardMiddleware(app), Client(piece(b"a", more=True)), f)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


def test_each_call_on_the_way_through_a_body_can_be_cancelled(model: Gated) -> None:
    """Not only the first: watching goes on when the application has read what the watcher had received."""
    quick = batched(max_size=1)(lambda items: items)
    f = batched(max_size=1)(model)
    client = Client(piece(b"a", more=True), piece(b"b", more=True))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await quick.aio(1)
        await seen(lambda: len(client.received) == 2)
        await receive()
        await f.aio(2)

    async def main() -> None:
        await behind(f, model)
        await disconnect(ModelGuardMiddleware(app), client, f)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


@pytest.mark.parametrize("size", [1, 10_000, 1_000_000])
def test_a_body_is_read_ahead_of_the_application_within_bounds(model: Gated, size: int) -> None:
    """At most 256 KiB and one piece are kept that the application has not read: a slow one still slows its client."""
    f = batched(max_size=64)(model)
    pieces = max(2, 1_000_000 // size) if size > 1 else 2000
    client = Client(*(piece(b"x" * size, more=True) for _ in range(pieces)), piece())
    ahead: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for asked in range(pieces + 1):
            await f.aio(asked)
            await a_turn()
            ahead.append(len(client.received) - asked)
            assert (asked < pieces) == (await receive())["more_body"]
        await fine(scope, receive, send)

    model.gate.set()
    asyncio.run(serve(ModelGuardMiddleware(app), client))
    assert 200 == client.status
    assert 1 <= max(ahead) <= 1 + 256 * 1024 // (size + 512)


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_application_can_call_before_it_reads_the_body(model: Gated, pieces: int) -> None:
    """It gets what the watcher has received, in order, even if both were waiting for it."""
    f = batched(max_size=1)(model)
    model.gate.set()
    client = Client(piece(b"0", more=True))
    client.received.append(client._inbox.get_nowait())
    body: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await f.aio(1)
        body.append(await read(receive))
        await fine(scope, receive, send)

    async def main() -> None:
        served = asyncio.create_task(ModelGuardMiddleware(app)(scope("POST"), client.receive, client.send))
        await seen(lambda: f.status().answered == 1)
        for n in range(pieces):
            await a_turn()
            client.say(piece(b"%d" % n, more=n < pieces - 1))
        await asyncio.wait_for(served, 2)
        await alone()

    asyncio.run(main())
    assert ([b"012"[:pieces]], 200) == (body, client.status)


def test_the_application_receives_the_disconnect_too(model: Gated) -> None:
    """As often as it asks; and it may still answer, although no one reads that."""
    f = batched(max_size=1)(model)
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await f.aio(1)
        except CallerGone:
            heard.extend([(await receive())["type"] for _ in range(3)])
            raise

    async def main() -> None:
        await behind(f, model)
        await disconnect(ModelGuardMiddleware(app), Client(), f)

    asyncio.run(main())
    assert ["http.request", "http.disconnect", "http.disconnect"] == heard


def test_a_handler_can_go_on_without_its_client(model: Gated) -> None:
    """It gets the error where it waits; nothing else is cancelled, and its later calls raise."""
    f = batched(max_size=1)(model)
    other = batched(max_size=1)(lambda items: items)
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        beside = asyncio.create_task(asyncio.to_thread(model.gate.wait, TIMEOUT))
        with pytest.raises(CallerGone):
            await f.aio(1)
        with pytest.raises(CallerGone):
            await other.aio(2)
        model.gate.set()
        heard.append(await beside)

    async def main() -> None:
        await behind(f, model)
        await disconnect(ModelGuardMiddleware(app), Client(), f)

    asyncio.run(main())
    assert [True] == heard


def test_what_is_being_computed_is_not_waited_for(model: Gated) -> None:
    """The handler ends although the model is still computing."""
    f = batched(max_size=1)(model)
    client = Client()

    async def main() -> None:
        app = ModelGuardMiddleware(calling(lambda: f.aio(1)))
        served = asyncio.create_task(app(scope(), client.receive, client.send))
        await asyncio.to_thread(model.busy)
        client.disconnect()
        await asyncio.wait_for(served, TIMEOUT)
        await alone()

    asyncio.run(main())
    assert 1 == f.status().cancelled


def test_all_calls_of_a_request_are_cancelled(model: Gated) -> None:
    """Calls side by side, and of several functions."""
    f, g = batched(max_size=1)(model), batched(max_size=1)(model)

    async def both() -> None:
        with pytest.raises(CallerGone):
            await g.aio(1)
        with pytest.raises(CallerGone):
            await f.aio(2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.gather(f.aio(1), both(), return_exceptions=True)

    async def main() -> None:
        await behind(f, model)
        await behind(g, model)
        await disconnect(ModelGuardMiddleware(app), Client(), g)

    asyncio.run(main())
    assert [1, 1] == [f.status().cancelled, g.status().cancelled]  # the later call was not admitted at all
    model.gate.set()
    f.close()
    g.close()
    assert [["first"], ["first"]] == model.batches


def test_a_neighbour_is_not_cancelled(model: Gated) -> None:
    """One client disconnects, the others are answered."""
    f = batched(max_size=8)(model)
    app = ModelGuardMiddleware(calling(lambda: f.aio(1)))
    others = [Client() for _ in range(3)]

    async def main() -> None:
        await behind(f, model)
        gone = Client()
        served = [asyncio.create_task(app(scope(), one.receive, one.send)) for one in (*others, gone)]
        await seen(lambda: f.status().waiting == 4)
        gone.disconnect()
        await asyncio.wait_for(served[-1], TIMEOUT)
        model.gate.set()
        await asyncio.wait_for(asyncio.gather(*served), TIMEOUT)
        await alone()

    asyncio.run(main())
    assert [200, 200, 200] == [one.status for one in others]
    assert [["first"], [1, 1, 1]] == model.batches


def test_an_application_can_wait_for_the_disconnect_itself(model: Gated) -> None:
    """It reads while its call waits; when it receives the disconnect, the call is cancelled."""
    f = batched(max_size=1)(model)
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listening = asyncio.create_task(receive())
        with pytest.raises(CallerGone):
            await f.aio(1)
        heard.append(await listening)

    async def main() -> None:
        await behind(f, model)
        client = Client()
        await disconnect(ModelGuardMiddleware(app), client, f)
        assert [piece(), DISCONNECT] == client.received

    asyncio.run(main())
    assert [DISCONNECT] == heard


def test_watching_begins_when_an_application_stops_receiving(model: Gated) -> None:
    """If its receiving task is cancelled, as Starlette does it, the client is watched."""
    f = batched(max_size=1)(model)
    client = Client()
    stopped = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listening = asyncio.create_task(receive())
        await a_turn()
        waiting = asyncio.create_task(f.aio(1))
        await seen(lambda: f.status().waiting == 1)
        await a_turn()
        listening.cancel()
        await asyncio.wait([listening])
        stopped.set()
        await waiting

    async def main() -> None:
        await behind(f, model)
        served = asyncio.create_task(ModelGuardMiddleware(app)(scope(), client.receive, client.send))
        await stopped.wait()
        await a_turn()
        client.disconnect()
        await asyncio.wait([served], timeout=2)
        model.gate.set()
        await served
        await alone()

    asyncio.run(main())
    assert 1 == f.status().cancelled
