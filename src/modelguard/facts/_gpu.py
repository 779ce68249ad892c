"""GPU memory of this process, as torch's allocator counts it. Nothing here imports torch or starts CUDA.

Only what this process has allocated is read. The use of the whole device, as ``nvidia-smi`` shows it, includes other
processes.
"""

import sys
import traceback
from contextlib import suppress
from typing import Any, NamedTuple


class DeviceMemory(NamedTuple):
    """What this process has on one device, in bytes."""

    device: int  # its index in torch
    allocated: int  # in tensors
    reserved: int  # taken from the device: in tensors, or free in the allocator's cache
    #: What torch may take there: the memory of the device, or of the MIG slice, times the fraction that
    #: ``torch.cuda.set_per_process_memory_fraction`` has set.
    total: int


class GpuUse(NamedTuple):
    """What this process has on all devices together, in bytes: in tensors, and reserved by the allocator."""

    allocated: int
    reserved: int


class Gpu:
    def missing(self, *, loaded: bool) -> str | None:
        """Why this process has no GPU memory to read; None if it has, or may have later."""
        torch = imported_torch()
        if torch is None:
            return _not_imported(loaded=loaded)
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} was built without CUDA"
        if is_bad_fork(torch):
            return "this process was forked after its parent had initialised CUDA"
        if torch.cuda.is_initialized():
            return None if self.devices() else "the allocator that torch uses reports no figures"
        # It asks NVML first, which does not initialise CUDA.
        if loaded and torch.cuda.device_count() == 0:
            return "torch finds no GPU: there is no driver, or CUDA_VISIBLE_DEVICES hides it"
        return None

    def devices(self) -> tuple[DeviceMemory, ...]:
        """Each device; none as long as the program has not initialised CUDA. Does not wait for the device."""
        torch = imported_torch()
        if torch is None or not torch.cuda.is_initialized():
            return ()
        try:
            return tuple(_memory(torch, device) for device in range(torch.cuda.device_count()))
        except (RuntimeError, KeyError):  # a pluggable allocator, or a device that has failed
            return ()

    def pinned(self) -> int | None:
        """Bytes of pinned host memory in use; None if this torch does not report them."""
        torch = imported_torch()
        read: Any = None if torch is None else getattr(torch.cuda.memory, "host_memory_stats_as_nested_dict", None)
        if read is None:
            return None
        try:
            return int(read()["active_bytes"]["current"])
        except (RuntimeError, KeyError):  # an empty answer before CUDA is initialised
            return None

    def room(self, device: int) -> int | None:
        """Bytes that this process may still allocate on a device: free there or in the cache, within its fraction."""
        torch = imported_torch()
        mine = next((one for one in self.devices() if one.device == device), None)
        if torch is None or mine is None:
            return None
        try:
            free = int(torch.cuda.mem_get_info(device)[0])
        except RuntimeError:
            return None
        return max(0, min(mine.total - mine.allocated, free + mine.reserved - mine.allocated))

    def empty_cache(self) -> None:
        """Return cached memory to the device, and pinned memory where torch can. Never raises."""
        torch = imported_torch()
        if torch is None or not torch.cuda.is_initialized():
            return
        with suppress(RuntimeError):  # a device that has failed
            torch.cuda.empty_cache()
            getattr(torch.accelerator, "empty_host_cache", lambda: None)()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the memory of a device was not enough."""
        torch = imported_torch()
        return torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)

    def is_after_fork(self, error: BaseException) -> bool:
        torch = imported_torch()
        if torch is None or not isinstance(error, RuntimeError) or not is_bad_fork(torch):
            return False
        return isinstance(error, getattr(torch, "AcceleratorError", ())) or _raised_in(error) == "torch.cuda"


TORCH_CUDA = Gpu()


def use_of(gpu: Gpu) -> GpuUse | None:
    """What this process has on all devices; None if it does not use any."""
    devices = gpu.devices()
    if not devices:
        return None
    return GpuUse(sum(one.allocated for one in devices), sum(one.reserved for one in devices))


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of the calls that have ended with an error, and with what caused it.

    Its traceback keeps them alive, and so the tensors that filled the device.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]


def free_after(gpu: Gpu, error: BaseException) -> bool:
    """Free what a call that ran out of GPU memory has left there; whether it was such an error."""
    if not gpu.is_out_of_memory(error):
        return False
    clear_frames(error)
    gpu.empty_cache()
    return True


def imported_torch() -> Any:
    """The module torch; None if the program has not imported it, or not yet to the end."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "cuda") and hasattr(torch, "version") else None


def _not_imported(*, loaded: bool) -> str | None:
    import importlib.util

    if loaded:
        return "the loader has not imported torch, whose figures are read"
    return "torch is not installed" if importlib.util.find_spec("torch") is None else None


def is_bad_fork(torch: Any) -> bool:
    return bool(torch.cuda._is_in_bad_fork())  # noqa: SLF001 - torch has no public name for it


def _memory(torch: Any, device: int) -> DeviceMemory:
    # Not memory_allocated(): it makes a flat dictionary of all figures each time.
    figures = torch.cuda.memory.memory_stats_as_nested_dict(device)
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = getattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    allocated, reserved = (int(figures[name]["all"]["current"]) for name in ("allocated_bytes", "reserved_bytes"))
    return DeviceMemory(device, allocated, reserved, int(total * fraction))


def _raised_in(error: BaseException) -> object:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__") if frames else None
