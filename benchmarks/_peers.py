"""The batchers that modelguard is compared with, each as a coroutine function of one item. Missing ones are left out.

Each library runs the model where it normally does: ``batched`` on its own thread, async-batcher on one of asyncio's
threads, Ray on the event loop (its batch functions are coroutines, and its documentation recommends that).
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

Model = Callable[[list[Any]], list[Any]]
Call = Callable[[Any], Awaitable[Any]]

#: What the story waits for company after each item, in seconds.
STORY_WAIT = 0.001


@asynccontextmanager
async def floor(_model: Model, _size: int) -> AsyncIterator[Call]:
    """One asyncio future a request."""
    loop = asyncio.get_running_loop()

    async def call(item: int) -> int:
        future: asyncio.Future[int] = loop.create_future()
        loop.call_soon(future.set_result, item + 1)
        return await future

    yield call


@asynccontextmanager
async def to_thread(model: Model, _size: int) -> AsyncIterator[Call]:
    """A thread for each request."""

    async def call(item: int) -> Any:
        return (await asyncio.to_thread(model, [item]))[0]

    yield call


@asynccontextmanager
async def bare(model: Model, size: int) -> AsyncIterator[Call]:
    """A deque, a thread, one wake-up a batch; no bound, no deadline, no care for errors."""
    loop = asyncio.get_running_loop()
    queue: deque[tuple[int, asyncio.Future[int]] | None] = deque()
    bell, idle = threading.Semaphore(0), [False]

    def settle(futures: list[asyncio.Future[int]], results: list[int]) -> None:
        for future, result in zip(futures, results, strict=True):
            future.set_result(result)

    def work() -> None:
        while True:
            batch = [queue.popleft() for _ in range(min(len(queue), size))]
            if not batch:
                idle[0] = True
                if not queue:
                    bell.acquire()
                idle[0] = False
                continue
            if batch[-1] is None:
                return
            pairs = [pair for pair in batch if pair is not None]
            results = model([item for item, _ in pairs])
            loop.call_soon_threadsafe(settle, [future for _, future in pairs], results)

    async def call(item: int) -> int:
        future: asyncio.Future[int] = loop.create_future()
        queue.append((item, future))
        if idle[0]:
            idle[0] = False
            bell.release()
        return await future

    thread = threading.Thread(target=work)
    thread.start()
    yield call
    queue.append(None)
    bell.release()
    await asyncio.to_thread(thread.join)


@asynccontextmanager
async def story(model: Model, size: int) -> AsyncIterator[Call]:  # noqa: ARG001 - it has no limit on a batch
    """Story 3's loop, with batches: a wait after every item, no limits, the model on the loop."""
    queue: asyncio.Queue[tuple[Any, asyncio.Queue[Any]]] = asyncio.Queue()

    async def serve() -> None:
        while True:
            taken = [await queue.get()]
            with suppress(asyncio.TimeoutError):
                while True:
                    taken.append(await asyncio.wait_for(queue.get(), timeout=STORY_WAIT))
            for (_, answer), result in zip(taken, model([item for item, _ in taken]), strict=True):
                await answer.put(result)

    async def call(item: Any) -> Any:
        answer: asyncio.Queue[Any] = asyncio.Queue()
        await queue.put((item, answer))
        return await answer.get()

    task = asyncio.create_task(serve())
    yield call
    task.cancel()


@asynccontextmanager
async def batched(model: Model, size: int) -> AsyncIterator[Call]:
    """``batched`` by Mixedbread, with its shortest window."""
    import batched as library

    function: Any = library.aio.dynamically(batch_size=size, timeout_ms=1.0)(model)
    yield function


@asynccontextmanager
async def async_batcher(model: Model, size: int) -> AsyncIterator[Call]:
    """``async-batcher``, with a window of a millisecond."""
    from async_batcher.batcher import AsyncBatcher

    class Batcher(AsyncBatcher):  # type: ignore[misc, type-arg]
        def process_batch(self, batch: list[Any]) -> list[Any]:
            return model(batch)

    made = Batcher(max_batch_size=size, max_queue_time=STORY_WAIT)

    def call(item: Any) -> Awaitable[Any]:
        found: Awaitable[Any] = made.process(item=item)
        return found

    yield call
    await made.stop()


@asynccontextmanager
async def ray(model: Model, size: int, *, off_loop: bool = False) -> AsyncIterator[Call]:
    """Ray Serve's batcher, without a window; ``off_loop`` for models that must not stop the loop."""
    from ray import serve
    from ray.serve import batching

    batching._BatchQueue._warn_if_max_batch_size_exceeds_max_ongoing_requests = lambda _self: None  # noqa: SLF001

    async def compute(items: list[Any]) -> list[Any]:
        return await asyncio.to_thread(model, items) if off_loop else model(items)

    function: Any = serve.batch(max_batch_size=size, batch_wait_timeout_s=0.0)(compute)
    yield function


@asynccontextmanager
async def ray_off_loop(model: Model, size: int) -> AsyncIterator[Call]:
    """The same, with the model on a thread."""
    async with ray(model, size, off_loop=True) as call:
        yield call


Peer = Callable[[Model, int], Any]


def installed(*, slow: bool = False) -> dict[str, Peer]:
    """The peers that are here, by name; with ``slow``, those that do not stop the loop with a model that takes time."""
    logging.disable(logging.WARNING)  # they tell about every batch
    found: dict[str, Peer] = {} if slow else {"story 3's loop, 1 ms": story}
    for module, name, peer in (
        ("ray.serve", "Ray Serve's batcher, 0 ms", ray_off_loop if slow else ray),
        ("batched", "batched.aio, 1 ms", batched),
        ("async_batcher", "async-batcher, 1 ms", async_batcher),
    ):
        with suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module) is not None:
                found[name] = peer
    return found
