"""Guards, pools and replicas in coroutines that no event loop of asyncio runs, as under trio: driven by hand here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from modelguard import replicas
from modelguard.errors import GuardClosed, NotSupported

if TYPE_CHECKING:
    from tests.unit.lifecycle.world import World


def test_every_wait_says_what_to_do(world: World) -> None:
    """Guards, pools and replicas alike: none fails with an error from the inside of asyncio."""
    nlp, models, pair = world.guard(), world.pool(), replicas(world.guard(name="pair"), 2)
    waits: list[Callable[[], Any]] = [
        *(getattr(nlp, name) for name in ("aload", "areload", "aunload", "aclose")),
        nlp.lease().__aenter__,
        nlp.__aenter__,
        models.lease("a").__aenter__,
        models.aclose,
        *(getattr(pair, name) for name in ("aload", "areload", "aunload", "aclose")),
        pair.lease().__aenter__,
        pair.__aenter__,
    ]
    for wait in waits:
        with pytest.raises(NotSupported, match=r"no asyncio event loop runs here.*none of trio"):
            wait().send(None)
    assert 0 == world.loader.calls, "no load has begun"


def test_a_reload_that_cannot_be_awaited_does_not_begin(world: World) -> None:
    """The model that serves stays, and its policies are not disturbed."""
    nlp = world.guard()
    nlp.load()
    with pytest.raises(NotSupported):
        nlp.areload().send(None)
    nlp.reload()
    assert (2, 2) == (world.loader.calls, nlp.status().generation)


def test_a_closed_guard_says_that_it_is_closed(world: World) -> None:
    """The loop does not matter then."""
    nlp = world.guard()
    nlp.close()
    with pytest.raises(GuardClosed):
        nlp.lease().__aenter__().send(None)


def test_what_is_loaded_needs_no_loop(world: World) -> None:
    """A lease that need not wait works on any event loop."""
    nlp, models, pair = world.guard(), world.pool(), replicas(world.guard(name="pair"), 2)
    nlp.load()
    pair.load()
    with models.lease("a"):
        pass
    for lease in (nlp.lease(), models.lease("a"), pair.lease()):
        with pytest.raises(StopIteration):
            lease.__aenter__().send(None)
        lease.__exit__(None, None, None)
