"""The threads of torch's compiler, which a forked child does not have."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the compiler is torch's")

from torch._dynamo import convert_frame  # noqa: E402 - torch comes first, or nothing does
from torch._inductor import config  # noqa: E402
from torch._inductor.async_compile import AsyncCompile  # noqa: E402

from modelguard.adapters import _torch_compile  # noqa: E402
from modelguard.sharing._hazards import ThisProcess, find_hazards  # noqa: E402


@pytest.fixture
def pool() -> Iterator[list[str]]:
    """The names of the threads of a pool that has compiled."""
    with config.patch(compile_threads=2):
        AsyncCompile.pool.cache_clear()
        executor = AsyncCompile.pool()
        executor.submit(int).result()
        yield [thread.name for thread in executor._threads]
        AsyncCompile.pool.cache_clear()
        executor.shutdown()


def test_its_threads_are_named_with_how_to_do_without(pool: list[str]) -> None:
    """The hazard says whose threads they are, and which variable compiles without them."""
    (hazard,) = [hazard for hazard in find_hazards() if hazard.owner == "torch.compile"]
    assert ("compiler threads", "fixed") == (hazard.kind, hazard.severity)
    assert all(name in hazard.seen for name in pool)
    assert "TORCHINDUCTOR_COMPILE_THREADS=1" in hazard.fix
    assert not set(pool) & {name for name, _ in ThisProcess().python_threads()}, "and not as unknown threads too"


def test_a_child_gets_a_pool_of_its_own(pool: list[str]) -> None:
    """What a child compiles goes to threads that it has itself."""
    inherited = AsyncCompile.pool()
    assert pool == [thread.name for thread in inherited._threads]
    _torch_compile.renew_in_child()
    own = AsyncCompile.pool()
    assert inherited is not own


def test_a_child_can_compile_although_its_parent_was_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock that a thread of the parent held is free in the child; one that the forking thread holds stays."""
    lock = threading.RLock()
    monkeypatch.setattr(convert_frame, "compile_lock", lock)
    thread = threading.Thread(target=lock.acquire)  # ends without releasing it, as a thread that is not in the child
    thread.start()
    thread.join()
    assert not lock.acquire(blocking=False)
    _torch_compile.renew_in_child()
    assert lock.acquire(blocking=False)
    _torch_compile.renew_in_child()
    lock.release()
