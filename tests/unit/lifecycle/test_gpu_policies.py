"""Policies on GPU memory, on a GPU that a test makes: no line here runs on a real one."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.lifecycle.gpus import GB, NoCudaHere, Tensor
from tests.unit.lifecycle.world import look

from modelguard import GpuMemoryGrowth, GpuMemoryLimit, ModelGuard, Policy, Snapshot, Uses, telemetry
from modelguard.errors import CudaAfterFork, InvalidOption, LoadFailed, NotSupported
from modelguard.lifecycle.policies import GpuMemory, Level
from modelguard.telemetry import GenerationReleased, GpuCacheEmptied, PolicyIgnored, ReloadDue, SwapChosen

if TYPE_CHECKING:
    from tests.unit.lifecycle.world import World


class GpuModel:
    """A model whose weights are on the GPU."""

    def __init__(self, world: World, size: int) -> None:
        self.weights = Tensor(world.gpu, size)


class Cyclic(GpuModel):
    """One whose weights only a garbage collection frees."""

    def __init__(self, world: World, size: int) -> None:
        super().__init__(world, size)
        layer = [self.weights]
        layer.append(layer)  # type: ignore[arg-type]
        del self.weights
        self.layer = layer


def settled(world: World, policy: Policy | None, size: int = GB, **options: Any) -> ModelGuard[Any]:
    """A guard whose model has so many bytes on the GPU, and has settled."""
    world.gpu.start()
    made = world.guard(lambda: GpuModel(world, size), reload_on=policy, **options)
    made.load()
    world.tick(5)
    assert not look(world, made, 3)
    return made


def on_gpu(*allocated: int, baseline: int = GB, reserved: int = 0, total: int = 80 * GB) -> Snapshot:
    """Readings of one GPU."""
    held = Level(tuple(reserved or one for one in allocated), baseline)
    return Snapshot(gpus=(GpuMemory(0, total, Level(allocated, baseline), held),))


@pytest.mark.parametrize(
    ("policy", "before", "after"),
    [
        (GpuMemoryGrowth("1 GB"), on_gpu(*3 * [2 * GB - 1]), on_gpu(*3 * [2 * GB])),
        (GpuMemoryGrowth("10%"), on_gpu(*3 * [9 * GB - 1]), on_gpu(*3 * [9 * GB])),
        (GpuMemoryGrowth("1 GB"), on_gpu(*2 * [9 * GB]), on_gpu(*3 * [9 * GB])),
        (GpuMemoryGrowth("1 GB"), on_gpu(9 * GB, GB, 9 * GB), on_gpu(*3 * [9 * GB])),
        (
            GpuMemoryGrowth("1 GB"),
            Snapshot(gpus=(), pinned=Level(3 * (GB - 1,), 0)),
            Snapshot(gpus=(), pinned=Level(3 * (GB,), 0)),
        ),
        (GpuMemoryLimit("20 GB"), on_gpu(*3 * [20 * GB - 1]), on_gpu(*3 * [20 * GB])),
        (GpuMemoryLimit("80%"), on_gpu(*3 * [64 * GB - 1]), on_gpu(*3 * [64 * GB])),
        (GpuMemoryLimit("80%"), on_gpu(*3 * [8 * GB - 1], total=10 * GB), on_gpu(*3 * [8 * GB], total=10 * GB)),
        (GpuMemoryLimit("20 GB"), on_gpu(*3 * [GB], reserved=70 * GB), on_gpu(*3 * [21 * GB], reserved=70 * GB)),
    ],
)
def test_each_policy_is_due_at_its_bound(policy: Policy, before: Snapshot, after: Snapshot) -> None:
    """Three readings of what is allocated decide; a percentage is of what this process may take of the device."""
    assert (False, True) == (policy.due(before), policy.due(after))


@pytest.mark.parametrize("policy", [GpuMemoryGrowth("1 GB"), GpuMemoryLimit("20 GB")])
@pytest.mark.parametrize("now", [Snapshot(), Snapshot(gpus=()), on_gpu(), on_gpu(*3 * [GB])])
def test_nothing_is_due_without_readings(policy: Policy, now: Snapshot) -> None:
    """A process that has not used CUDA, or has only begun, keeps its model."""
    assert not policy.due(now)


def test_policies_are_values() -> None:
    """They compare by what they say, show as they are written, and are joined as all others."""
    assert GpuMemoryGrowth("1 GB") == GpuMemoryGrowth(10**9)
    assert GpuMemoryGrowth("1 GB") != GpuMemoryLimit("1 GB")
    both = GpuMemoryGrowth("1 GB") | (GpuMemoryLimit("80%") & Uses(5))
    assert "GpuMemoryGrowth('1 GB') | GpuMemoryLimit('80%') & Uses(5)" == repr(both)
    assert (True, False) == (both.reads_gpu, both.reads_memory)


@pytest.mark.parametrize("policy", [GpuMemoryGrowth, GpuMemoryLimit])
@pytest.mark.parametrize("size", [0, -1, 500, "0%", "101%", "much", None, 1.5, True])
def test_a_size_is_checked_where_it_is_written(policy: type[GpuMemoryGrowth], size: Any) -> None:
    """As for MemoryGrowth: bytes of at least 1 MB, text with a unit, or a percentage."""
    with pytest.raises(InvalidOption):
        policy(size)


@given(
    sizes=st.lists(st.integers(0, 80 * GB), min_size=3, max_size=3),
    baseline=st.integers(0, 80 * GB),
    draw=st.floats(0, 1, exclude_max=True),
    bound=st.integers(10**6, 80 * GB),
)
def test_jitter_only_brings_forward(sizes: list[int], baseline: int, draw: float, bound: int) -> None:
    """Whatever chance says: due at the bound, never below half of the room, and a spike alone is never enough."""
    now = on_gpu(*sizes, baseline=baseline)
    drawn = Snapshot(gpus=now.gpus, jitter=draw, first=True)
    least = min(sizes)
    growth = GpuMemoryGrowth(bound)
    if least - baseline >= bound:
        assert growth.due(drawn)
    if least - baseline < bound // 2:
        assert not growth.due(drawn)
    limit = GpuMemoryLimit(bound)
    assert (baseline < bound <= least) <= limit.due(drawn)
    if limit.due(drawn):
        assert baseline < bound
        assert least >= baseline + (bound - baseline) // 2


class TestReload:
    def test_growth_on_the_gpu_replaces_the_model(self, world: World) -> None:
        """What stays allocated after calls leads to a reload, and private memory is not even read."""
        guard = settled(world, GpuMemoryGrowth("1 GB"))
        leak = Tensor(world.gpu, GB)
        assert [False, False, True] == [look(world, guard) for _ in range(3)]
        world.join()
        assert (2, ("GpuMemoryGrowth('1 GB')",)) == (guard.status().generation, world.reasons(ReloadDue))
        del leak

    def test_each_gpu_is_judged_by_itself(self, world: World) -> None:
        """Growth on two GPUs is not added up."""
        world.gpu.start(2)
        guard = world.guard(lambda: GpuModel(world, GB), reload_on=GpuMemoryGrowth("1 GB"))
        guard.load()
        world.tick(5)
        look(world, guard, 3)
        leaks = [Tensor(world.gpu, GB // 2, device) for device in (0, 1)]
        assert not look(world, guard, 3)
        leaks.append(Tensor(world.gpu, GB, 1))
        assert look(world, guard, 3)

    def test_pinned_memory_counts(self, world: World) -> None:
        """Pinned buffers that pile up on the host are growth, where torch reports them."""
        world.gpu.pinned_bytes = 0
        guard = settled(world, GpuMemoryGrowth("1 GB"))
        world.gpu.pinned_bytes = GB
        assert look(world, guard, 3)

    def test_other_processes_on_the_device_do_not_count(self, world: World) -> None:
        """A neighbour that fills the device replaces nobody's model here."""
        guard = settled(world, GpuMemoryGrowth("1 GB") | GpuMemoryLimit("50%"))
        world.gpu.elsewhere = 70 * GB
        assert not look(world, guard, 9)

    def test_a_gpu_without_room_for_two_has_one_at_a_time(self, world: World) -> None:
        """Where a second copy does not fit on the device, the old model goes first."""
        guard = settled(world, None, 50 * GB)
        guard.reload()
        world.join()
        assert "drain_first" == world.last(SwapChosen).swap
        assert "GPU 0" in world.last(SwapChosen).why
        assert 50 * GB == world.gpu.allocated[0]

    def test_a_gpu_with_room_loads_first(self, world: World) -> None:
        """A small model is replaced without an outage."""
        guard = settled(world, None)
        guard.reload()
        assert "load_first" == world.last(SwapChosen).swap


class TestIgnored:
    def details(self, world: World) -> list[str]:
        return [event.detail for event in world.seen(PolicyIgnored)]

    def test_a_model_above_the_bound(self, world: World) -> None:
        """A reload that could not help is reported instead of repeated for ever."""
        guard = settled(world, GpuMemoryLimit("10 GB"), 20 * GB)
        assert not look(world, guard, 9)
        assert ["a fresh model has 20 GB on GPU 0, and the bound is 10 GB"] == self.details(world)

    def test_a_bound_that_no_gpu_reaches(self, world: World) -> None:
        """A bound above the device's memory, as after a move to a MIG slice, is never silent."""
        world.gpu.total = 10 * GB
        settled(world, GpuMemoryLimit("20 GB") | GpuMemoryGrowth("15 GB"))
        assert 2 * ["no GPU has more than 10 GB for this process"] == self.details(world)

    def test_a_process_without_cuda(self, world: World) -> None:
        """A model that stays on the CPU makes the policy idle, which the event says."""
        guard = world.guard(reload_on=GpuMemoryGrowth("1 GB"))
        guard.load()
        world.tick(5)
        look(world, guard, 2)
        assert ["this process has not used CUDA so far"] == self.details(world)


class TestNoCuda:
    def test_what_is_known_at_once_is_said_at_once(self, world: World) -> None:
        """Without torch no guard is made that watches nothing."""
        world.gpu.why_missing = {False: "torch is not installed"}
        with pytest.raises(NotSupported) as caught:
            world.guard(reload_on=Uses(5) | GpuMemoryLimit("80%"))
        assert "GpuMemoryLimit('80%') is not supported here: torch is not installed" == str(caught.value)

    def test_what_only_the_load_shows_fails_the_load(self, world: World) -> None:
        """On a machine without GPU the first call says why."""
        world.gpu.why_missing = {True: "torch finds no GPU"}
        guard = world.guard(reload_on=GpuMemoryGrowth("1 GB"))
        with pytest.raises(LoadFailed, match="torch finds no GPU") as caught:
            guard.load()
        assert isinstance(caught.value.__cause__, NotSupported)

    def test_other_guards_need_no_gpu(self, world: World) -> None:
        """Nobody else notices that there is none."""
        world.gpu.why_missing = {False: "torch is not installed", True: "torch is not installed"}
        guard = world.guard(reload_on=Uses(5))
        guard.load()
        assert (None, None) == (guard.status().gpu_allocated, guard.status().gpu_reserved)

    def test_a_load_after_a_late_fork_has_a_named_error(self, world: World) -> None:
        """A loader that meets CUDA of its parent fails with what is wrong, and torch's error behind it."""
        guard = world.guard(refuses, reload_on=None)
        with pytest.raises(LoadFailed, match="forked after its parent had initialised CUDA") as caught:
            guard.load()
        assert isinstance(caught.value.__cause__, CudaAfterFork)
        assert isinstance(caught.value.__cause__.__cause__, NoCudaHere)

    def test_a_call_after_a_late_fork_has_a_named_error(self, world: World) -> None:
        """So does a call on a model that came with the fork."""
        guard = world.guard(reload_on=None)
        with pytest.raises(CudaAfterFork, match="isolate\\(start='spawn'\\)"):
            guard(lambda _model: refuses())()
        with pytest.raises(CudaAfterFork), guard.lease():
            refuses()
        assert 0 == guard.status().in_flight


def refuses() -> None:
    raise NoCudaHere("Cannot re-initialize CUDA in forked subprocess")


class TestCache:
    def fill(self, world: World, size: int) -> None:
        Tensor(world.gpu, size)  # freed at once; the allocator keeps its memory

    def test_a_cache_that_grows_is_emptied(self, world: World) -> None:
        """Memory that torch holds without using it is returned, and no model is replaced for it."""
        guard = settled(world, GpuMemoryGrowth("1 GB"))
        self.fill(world, 9 * GB)
        assert not look(world, guard, 9)
        (event,) = world.seen(GpuCacheEmptied)
        assert (10 * GB, GB, GB, None) == (event.reserved_before, event.reserved_after, event.allocated, event.advice)
        assert "GpuMemoryGrowth('1 GB')" == event.policy

    def test_the_cache_of_usual_calls_is_left_alone(self, world: World) -> None:
        """What calls needed before the generation settled is torch's to keep."""
        world.gpu.start()
        guard = world.guard(lambda: GpuModel(world, GB), reload_on=GpuMemoryGrowth("1 GB"))
        guard.load()
        self.fill(world, 9 * GB)
        world.tick(5)
        assert not look(world, guard, 9)
        assert [] == world.seen(GpuCacheEmptied)

    def test_reserved_above_the_limit_is_returned(self, world: World) -> None:
        """GpuMemoryLimit bounds the cache too, but only by emptying it."""
        guard = settled(world, GpuMemoryLimit("20 GB"))
        self.fill(world, 30 * GB)
        assert not look(world, guard, 9)
        assert GB == world.last(GpuCacheEmptied).reserved_after

    def test_fragments_bring_advice(self, world: World) -> None:
        """Where emptying returns nothing, the event says what would."""
        guard = settled(world, GpuMemoryGrowth("1 GB"))
        self.fill(world, 9 * GB)
        world.gpu.stuck = 9 * GB
        look(world, guard, 3)
        assert "torch-cuda-dynamic" in (world.last(GpuCacheEmptied).advice or "")

    def test_a_cache_that_grows_back_is_emptied_less_and_less_often(self, world: World) -> None:
        """Emptying makes the next calls slow, so it is no cure to repeat every second."""
        guard = settled(world, GpuMemoryGrowth("1 GB"))
        for _ in range(3600):
            self.fill(world, 9 * GB)
            look(world, guard)
        events = world.seen(GpuCacheEmptied)
        assert 4 <= len(events) <= 8
        assert [False, True] == [event.advice is not None for event in events[:2]]


class TestRelease:
    def test_the_event_proves_that_the_gpu_got_it_back(self, world: World) -> None:
        """Reserved memory before and after stands in the event, the gauges and the status."""
        guard = settled(world, None, 3 * GB)
        assert (3 * GB, 3 * GB) == (guard.status().gpu_allocated, guard.status().gpu_reserved)
        guard.unload()
        event = world.last(GenerationReleased)
        assert (3 * GB, 0, 0, 3 * GB) == (
            event.gpu_reserved_before,
            event.gpu_reserved_after,
            event.gpu_allocated,
            event.gpu_freed,
        )

    def test_the_cache_is_emptied_once(self, world: World) -> None:
        """A release waits for the device no more than it must."""
        guard = settled(world, None)
        before = world.gpu.emptied
        guard.unload()
        assert 1 == world.gpu.emptied - before

    def test_weights_in_a_cycle_are_collected(self, world: World) -> None:
        """A model that dies but leaves its tensors on the GPU is worth a garbage collection."""
        world.gpu.start()
        guard = world.guard(lambda: Cyclic(world, 3 * GB))
        guard.load()
        gc.disable()
        try:
            guard.unload()
        finally:
            gc.enable()
        event = world.last(GenerationReleased)
        assert (True, 0) == (event.collected, event.gpu_allocated)

    def test_a_process_without_cuda_has_no_figures(self, world: World) -> None:
        """No zero stands where nothing was read."""
        guard = world.guard()
        guard.load()
        guard.unload()
        event = world.last(GenerationReleased)
        assert 3 * (None,) == (event.gpu_reserved_before, event.gpu_reserved_after, event.gpu_freed)

    def test_a_load_says_what_it_took(self, world: World) -> None:
        """The gauges are set as soon as a model takes calls."""
        settled(world, None, 3 * GB)
        event = world.last(telemetry.LoadFinished)
        assert (3 * GB, 3 * GB) == (event.gpu_allocated, event.gpu_reserved)
