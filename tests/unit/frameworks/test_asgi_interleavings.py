"""``frameworks.asgi``: the watcher and the application share a client's messages, in any order of events."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.frameworks.asgi_by_hand import DISCONNECT, Client, piece
from tests.unit.serving.gated import next_turn

from modelguard.frameworks import asgi

SIZES = st.sampled_from([0, 1, 100_000, 300_000])
STEPS = st.one_of(
    st.tuples(st.just("say"), SIZES),
    st.tuples(st.sampled_from(["receive", "give up", "call", "turn"]), st.just(0)),
)


class Call:
    """A batched call that waits."""

    state = "waiting"
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


async def turns() -> None:
    """Let every other task and callback run until nothing happens any more."""
    for _ in range(8):
        await next_turn()


async def live(steps: list[tuple[str, int]]) -> None:
    client = Client(piece(b"first", more=True))
    watched = asgi.Client(client.receive, None)
    said: list[Any] = [piece(b"first", more=True)]
    heard: list[Any] = []
    calls: list[Call] = []
    for step, size in steps:
        if step == "say":
            said.append(piece(b"x" * size, more=True))
            client.say(said[-1])
        elif step == "call":
            calls.append(Call())
            watched.request.add(calls[-1], calls[-1].cancel)  # type: ignore[arg-type]
        elif step == "turn":
            await turns()
        else:
            receiving = asyncio.create_task(watched.receive())
            await turns()
            if step == "give up" or not receiving.done():
                receiving.cancel()
            await asyncio.wait([receiving])
            if not receiving.cancelled():
                heard.append(receiving.result())
        ahead = sum(len(message["body"]) for message in client.received[len(heard) :])
        assert ahead < 256 * 1024 + 300_000
    client.disconnect()
    await turns()
    small = sum(len(message["body"]) + 512 for message in said[len(heard) :]) < 256 * 1024
    if small:
        assert all(call.cancelled for call in calls)
    while len(heard) < len(said):
        heard.append(await asyncio.wait_for(watched.receive(), 5))
    assert said == heard, "nothing is lost, and nothing comes twice or out of order"
    assert [DISCONNECT, DISCONNECT] == [await asyncio.wait_for(watched.receive(), 5) for _ in range(2)]
    assert all(call.cancelled for call in calls)
    watched.answered()
    await turns()
    assert 1 == len(asyncio.all_tasks())


@given(st.lists(STEPS, max_size=25))
def test_no_message_is_lost_whoever_receives_it(steps: list[tuple[str, int]]) -> None:
    """Nor doubled, nor out of order; receiving may be given up at any time, and calls made at any time."""
    asyncio.run(live(steps))
