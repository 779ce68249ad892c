"""What is read of torch, from a module that a test makes: no line here runs on a real GPU."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
from tests.unit.environment.torches import GB, AcceleratorError, FakeTorch, OutOfMemoryError

from modelguard.environment._effect import ThisProcess
from modelguard.errors import NotSupported
from modelguard.facts._gpu import TORCH_CUDA, DeviceMemory, GpuUse, clear_frames, free_after, use_of


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a fake the module torch of this process."""

    def installed(torch: FakeTorch | None) -> FakeTorch | None:
        if torch is None:
            monkeypatch.delitem(sys.modules, "torch", raising=False)
        else:
            monkeypatch.setitem(sys.modules, "torch", torch)
        return torch

    return installed


def test_each_device_has_its_figures(install: Any) -> None:
    """Of this process alone: what torch has allocated and reserved, and what it may take."""
    install(FakeTorch(devices=2, fraction=0.5))
    expected = tuple(DeviceMemory(device, 3 * GB, 5 * GB, 40 * GB) for device in (0, 1))
    assert expected == TORCH_CUDA.devices()
    assert GpuUse(6 * GB, 10 * GB) == use_of(TORCH_CUDA)
    assert 7 == TORCH_CUDA.pinned()


@pytest.mark.parametrize("torch", [None, FakeTorch(built=False, initialized=False), FakeTorch(initialized=False)])
def test_cuda_is_never_initialised(install: Any, torch: FakeTorch | None) -> None:
    """Reading figures starts nothing, and imports nothing."""
    install(torch)
    assert ((), None, None) == (TORCH_CUDA.devices(), use_of(TORCH_CUDA), TORCH_CUDA.room(0))
    TORCH_CUDA.empty_cache()
    assert torch is None or [] == torch.used
    assert torch is not None or "torch" not in sys.modules


@pytest.mark.parametrize("stats", [{}, {"allocated_bytes": {}}])
def test_an_allocator_without_figures(install: Any, stats: dict[str, Any]) -> None:
    """A pluggable allocator reports nothing, which is no error in a running service."""
    torch = FakeTorch()
    torch.stats = torch.pinned = stats
    install(torch)
    assert ((), None) == (TORCH_CUDA.devices(), TORCH_CUDA.pinned())
    assert "the allocator that torch uses reports no figures" == TORCH_CUDA.missing(loaded=True)


def test_a_device_that_has_failed(install: Any) -> None:
    """After an error of the driver every call raises; a release goes on."""
    torch = FakeTorch()

    def fails(*_: object) -> Any:
        raise AcceleratorError("CUDA error: an illegal memory access was encountered")

    torch.cuda.empty_cache = torch.cuda.memory.memory_stats_as_nested_dict = torch.cuda.mem_get_info = fails
    install(torch)
    TORCH_CUDA.empty_cache()
    assert ((), None) == (TORCH_CUDA.devices(), TORCH_CUDA.room(0))


@pytest.mark.parametrize(
    ("torch", "room"),
    [
        (FakeTorch(free=50 * GB), 52 * GB),  # what is free, and what torch has cached
        (FakeTorch(free=50 * GB, fraction=0.25), 17 * GB),  # what is left of its part
        (FakeTorch(free=0), 2 * GB),
    ],
)
def test_room_for_a_second_model(install: Any, torch: FakeTorch, room: int) -> None:
    """Neighbours on the device leave less, and so does the process's own part."""
    install(torch)
    assert room == TORCH_CUDA.room(0)
    assert TORCH_CUDA.room(1) is None


@pytest.mark.parametrize(
    ("torch", "at_definition", "after_load"),
    [
        (FakeTorch(), None, None),
        (FakeTorch(initialized=False), None, None),
        (FakeTorch(initialized=False, devices=0), None, "torch finds no GPU"),
        (FakeTorch(built=False, initialized=False), "was built without CUDA", "was built without CUDA"),
        (FakeTorch(forked=True), "was forked after its parent", "was forked after its parent"),
    ],
)
def test_why_there_is_no_gpu(install: Any, torch: FakeTorch, at_definition: str | None, after_load: str | None) -> None:
    """What is known without asking the driver is said at once, the rest after the load."""
    install(torch)
    for loaded, expected in ((False, at_definition), (True, after_load)):
        why = TORCH_CUDA.missing(loaded=loaded)
        assert (expected is None) == (why is None)
        assert (expected or "") in (why or "")


def test_a_program_without_torch(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported to find out."""
    install(None)
    assert "the loader has not imported torch, whose figures are read" == TORCH_CUDA.missing(loaded=True)
    for found, expected in ((None, "torch is not installed"), (object(), None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name, found=found: found)
        assert expected == TORCH_CUDA.missing(loaded=False)
    assert "torch" not in sys.modules


def test_a_torch_that_is_being_imported(install: Any) -> None:
    """Another thread may be in the middle of the import."""
    install(types.ModuleType("torch"))
    assert () == TORCH_CUDA.devices()
    assert not TORCH_CUDA.is_out_of_memory(OutOfMemoryError())


def test_errors_are_known_by_their_type(install: Any) -> None:
    """No text is compared."""
    install(FakeTorch())
    assert TORCH_CUDA.is_out_of_memory(OutOfMemoryError())
    assert not TORCH_CUDA.is_out_of_memory(RuntimeError("CUDA out of memory"))
    install(None)
    assert not TORCH_CUDA.is_out_of_memory(OutOfMemoryError())


def raised_in(module: str, error: BaseException) -> BaseException:
    """An error that a function of this module has raised."""
    namespace: dict[str, Any] = {"__name__": module, "error": error}
    exec("def refuse(): raise error", namespace)
    with pytest.raises(type(error)) as caught:
        namespace["refuse"]()
    return caught.value


@pytest.mark.parametrize(
    ("forked", "error", "expected"),
    [
        (True, raised_in("torch.cuda", RuntimeError("Cannot re-initialize CUDA in forked subprocess")), True),
        (True, AcceleratorError("CUDA error: initialization error"), True),
        (True, raised_in("model", RuntimeError("of the model's own")), False),
        (True, ValueError("no"), False),
        (False, raised_in("torch.cuda", RuntimeError("no driver")), False),
    ],
)
def test_errors_of_a_late_fork(install: Any, forked: bool, error: BaseException, expected: bool) -> None:  # noqa: FBT001
    """Only torch's own errors, and only where torch says that the fork came too late."""
    install(FakeTorch(forked=forked))
    assert expected == TORCH_CUDA.is_after_fork(error)


def test_frames_lose_their_variables_and_keep_their_lines(install: Any) -> None:
    """Also those of the errors behind the one that was raised."""
    install(torch := FakeTorch())

    class Tensor:
        alive = 0

        def __init__(self) -> None:
            Tensor.alive += 1

        def __del__(self) -> None:
            Tensor.alive -= 1

    def fills() -> None:
        activations = [Tensor(), Tensor()]
        try:
            weights = Tensor()
            int(f"{weights} of {activations}")
        except ValueError as cause:
            raise OutOfMemoryError from cause

    with pytest.raises(OutOfMemoryError) as caught:
        fills()
    assert 3 == Tensor.alive
    assert free_after(TORCH_CUDA, caught.value)
    assert (0, ["empty_cache", "empty_host_cache"]) == (Tensor.alive, torch.used)
    assert not free_after(TORCH_CUDA, ValueError())


def test_a_cycle_of_causes_ends() -> None:
    """An error that is its own context is not followed for ever."""
    first, second = ValueError(), ValueError()
    first.__context__, second.__context__ = second, first
    clear_frames(first)


class TestHistory:
    @pytest.mark.parametrize(
        ("torch", "state"),
        [
            (None, "not imported"),
            (FakeTorch(built=False), "not built in"),
            (FakeTorch(initialized=False), "not initialised"),
            (FakeTorch(), "initialised"),
            (FakeTorch(forked=True), "initialised"),
        ],
    )
    def test_how_far_cuda_has_come(self, install: Any, torch: FakeTorch | None, state: str) -> None:
        """A preset's report stands on it."""
        install(torch)
        assert state == ThisProcess().cuda()

    def test_the_settings_of_the_allocator(self, install: Any) -> None:
        """As torch has parsed them; an older torch does not say."""
        torch = install(FakeTorch())
        torch.settings = "expandable_segments:True"
        assert "expandable_segments:True" == ThisProcess().cuda_allocator()
        del torch._C._accelerator_getAllocatorSettings
        with pytest.raises(NotSupported):
            ThisProcess().cuda_allocator()
