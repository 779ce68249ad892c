"""What the tests of ``Changed`` and of rollbacks share."""

from __future__ import annotations

import threading
from typing import Any

from tests.unit.lifecycle.world import TIMEOUT, World

from modelguard import ModelGuard, telemetry


class Source:
    """Where models come from: has a value, can fail, and can be made to hang."""

    def __init__(self) -> None:
        self.value: object = "a"
        self.error: BaseException | None = None
        self.asked = 0
        self.threads: list[str] = []
        self.open = threading.Event()
        self.open.set()

    def __call__(self) -> object:
        self.asked += 1
        self.threads.append(threading.current_thread().name)
        value, error = self.value, self.error
        assert self.open.wait(TIMEOUT)
        if error is not None:
            raise error
        return value


def polls(world: World, guard: ModelGuard[Any], count: int = 1, every: float = 60.0) -> int:
    """Let so many polls come and be evaluated; returns the number of the generation."""
    for _ in range(count):
        world.tick(every)
        guard.check()
        world.join()
        guard.check()
        world.join()
    return guard.status().generation


def errors(world: World) -> list[str]:
    """What was reported of probes."""
    return [event.error for event in world.seen(telemetry.CallbackErrored) if event.callback == "probe"]


def kept(world: World, reloads: int = 1, **options: Any) -> ModelGuard[Any]:
    """A guard that keeps its previous model, after some reloads; it unloads what it releases."""
    guard = world.guard(
        **{"keep_previous": True, "defer": 0, "unload": lambda model: model.unload(), "reload_on": None, **options}
    )
    guard.load()
    for _ in range(reloads):
        guard.reload()
        world.join()
    return guard


def released(world: World) -> list[int]:
    """The generations that were released, in their order."""
    return [event.generation for event in world.seen(telemetry.GenerationReleased)]
