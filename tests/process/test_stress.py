"""Many threads and tasks through many reloads, with a loader that fails a third of the time."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from modelguard import Backoff, Uses, guard, pool, telemetry
from modelguard.errors import LoadFailed, Overloaded
from modelguard.lifecycle.runtime import Runtime
from modelguard.telemetry import Event, GenerationReleased

THREADS, TASKS, RELOADS = 16, 200, 500
_ALIVE: weakref.WeakSet[Model] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    """Let threads take turns fifty times as often as usual: more interleavings, and shorter waits for a turn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    telemetry.set_hooks([])
    yield
    telemetry.set_hooks(None)
    sys.setswitchinterval(before)


class Model:
    """Knows whether it may still be used."""

    def __init__(self) -> None:
        self.open = True
        _ALIVE.add(self)

    def close(self) -> None:
        self.open = False


class Loader:
    """Fails a third of the time, after the first load, and notices when two loads run at once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.busy = threading.Lock()
        self.loads = self.failures = 0

    def __call__(self) -> Model:
        assert self.busy.acquire(blocking=False), "two loads at a time"
        try:
            if self.loads and self.random.random() < 1 / 3:
                self.failures += 1
                raise OSError("weights are being copied")
            self.loads += 1
            return Model()
        finally:
            self.busy.release()


@pytest.mark.timeout(110)
@pytest.mark.parametrize("swap", ["load_first", "drain_first"])
def test_no_call_is_lost_and_nothing_left_alive_through_500_reloads(swap: str) -> None:
    """16 threads and 200 tasks call through 500 reloads: each call sees one open model from start to end."""
    load = Loader(seed=7)
    guarded = guard(
        load,
        reload_on=Uses(50),
        swap=swap,  # type: ignore[arg-type]
        unload=Model.close,
        defer=0,
        backoff=Backoff(0.001, 0.002),
        drain_timeout=20,
        wait_timeout=20,
        name="stress",
        runtime=Runtime(private=lambda: 0, headroom=lambda: None, trim=lambda: "none"),  # order is at stake, not memory
    )
    done = threading.Event()
    calls = refused = 0
    counting = threading.Lock()

    def count(answered: int, not_answered: int) -> None:
        nonlocal calls, refused
        with counting:
            calls, refused = calls + answered, refused + not_answered

    @guarded
    def predict(model: Model, value: int) -> int:
        assert model.open, "a call began on an unloaded model"
        time.sleep(0)
        assert model is inner(), "a nested call ran on another generation"
        assert model.open, "the model was unloaded under the call"
        return value + 1

    @guarded
    def inner(model: Model) -> Model:
        return model

    @guarded
    async def apredict(model: Model, value: int) -> int:
        assert model.open
        await asyncio.sleep(0)
        assert model.open
        return value + 1

    @guarded
    def stream(model: Model, value: int):  # type: ignore[no-untyped-def] # noqa: ANN202
        for step in range(3):
            assert model.open
            yield value + step

    def thread(number: int) -> None:
        answered = not_answered = 0
        while not done.is_set():
            try:
                assert number + 1 == predict(number)
                assert [number, number + 1, number + 2] == list(stream(number))
                next(stream(number))  # and dropped
                answered += 3
                done.wait(0.002)  # sixteen threads that never pause leave the loader no turn on two cores
            except LoadFailed:  # only where no generation serves: after a failed drain-first reload
                assert swap == "drain_first"
                not_answered += 1
        count(answered, not_answered)

    async def task(number: int) -> None:
        answered = not_answered = 0
        while not done.is_set():
            try:
                assert number + 1 == await apredict(number)
                answered += 1
            except LoadFailed:
                assert swap == "drain_first"
                not_answered += 1
            await asyncio.sleep(0.02)
        count(answered, not_answered)

    async def all_tasks() -> None:
        await asyncio.gather(*(task(number) for number in range(TASKS)))

    guarded.load()
    with ThreadPoolExecutor(THREADS + 1) as threads:
        futures = [threads.submit(thread, number) for number in range(THREADS)]
        futures.append(threads.submit(asyncio.run, all_tasks()))
        deadline = time.monotonic() + 80
        while load.loads + load.failures < RELOADS and time.monotonic() < deadline:
            try:
                guarded.reload(timeout=20)
            except LoadFailed:
                pass
            if any(future.done() for future in futures):
                break
        done.set()
        for future in futures:
            future.result(20)

    assert load.loads + load.failures >= RELOADS
    assert load.failures > RELOADS / 5
    assert calls > RELOADS
    assert 0 == guarded.status().in_flight
    guarded.close()
    gc.collect()
    assert [] == [model for model in _ALIVE if model.open], "every model was unloaded"
    gc.collect()
    assert 0 == len(_ALIVE), "no model is left alive"


@pytest.mark.timeout(100)
def test_a_pool_keeps_its_budget_and_its_leases_under_16_threads() -> None:
    """No model is evicted while leased, and the models that are loaded never take more than the budget."""
    in_use: dict[int, int] = {}
    counting = threading.Lock()

    class Voice:
        def __init__(self, key: int) -> None:
            self.key = key
            self.open = True
            self.weight = bytearray(1_000_000)

        def close(self) -> None:
            assert not in_use.get(id(self)), "evicted under a lease"
            self.open = False

    voices = pool(
        Voice, max_memory="1 GB", max_models=4, ttl="50ms", unload=Voice.close, wait_timeout=20, name="voices"
    )

    def thread(seed: int) -> int:
        draw = random.Random(seed)
        answered = 0
        for _ in range(150):
            key = draw.randrange(10)
            try:
                with voices.lease(key) as voice:
                    with counting:
                        in_use[id(voice)] = in_use.get(id(voice), 0) + 1
                    assert voice.open
                    assert voice.key == key
                    assert len(voices.status().models) <= 4
                    with counting:
                        in_use[id(voice)] -= 1
                answered += 1
            except Overloaded:
                pass
        return answered

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(thread, range(16)))
    assert [150] * 16 == answers
    assert 0 == voices.status().in_flight
    voices.close()


@pytest.mark.timeout(60)
def test_events_tell_of_every_generation_once() -> None:
    """Each generation that was replaced is reported released exactly once."""
    released: list[int] = []

    def hook(event: Event) -> None:
        if isinstance(event, GenerationReleased):
            released.append(event.generation)

    telemetry.set_hooks([hook])
    guarded = guard(Model, reload_on=Uses(10), defer=0, name="events")
    used = guarded(lambda model: model.open)
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda _: used(), range(500)))
    guarded.close()
    for _ in range(200):
        if not guarded._core.draining:
            break
        threading.Event().wait(0.05)
    assert sorted(set(released)) == sorted(released)
    assert list(range(1, guarded._core.generations + 1)) == sorted(released)
