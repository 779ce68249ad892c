"""A GPU for tests, on machines that have none."""

from __future__ import annotations

from modelguard.facts._gpu import DeviceMemory

GB = 10**9


class OutOfMemory(RuntimeError):
    """As torch raises it."""


class NoCudaHere(RuntimeError):
    """As torch raises it after a fork."""


class Tensor:
    """Memory on the GPU, as long as somebody refers to it."""

    def __init__(self, gpu: FakeGpu, size: int, device: int = 0) -> None:
        self._gpu, self._size, self._device = gpu, 0, device
        gpu.take(device, size)
        self._size = size

    def __del__(self) -> None:
        self._gpu.allocated[self._device] -= self._size


class FakeGpu:
    """Devices with an allocator that keeps what was freed, as torch's does.

    Attributes:
        allocated: Bytes in tensors, by device; empty while CUDA is not initialised.
        reserved: Bytes taken from each device.
        total: Bytes that each device has.
        stuck: Reserved bytes that emptying the cache does not return, as fragments do.
        elsewhere: Bytes of other processes on each device.
        pinned_bytes: Pinned host memory.
        why_missing: Why there is none, before and after the load; None if there is.
    """

    def __init__(self) -> None:
        self.allocated: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.total = 80 * GB
        self.stuck = 0
        self.elsewhere = 0
        self.pinned_bytes: int | None = None
        self.why_missing: dict[bool, str] = {}
        self.emptied = 0

    def start(self, devices: int = 1) -> None:
        """Initialise CUDA."""
        self.allocated = dict.fromkeys(range(devices), 0)
        self.reserved = dict.fromkeys(range(devices), 0)

    def take(self, device: int, size: int) -> None:
        """Allocate."""
        if self.allocated[device] + size > self.total - self.elsewhere:
            raise OutOfMemory(f"tried to allocate {size}")
        self.allocated[device] += size
        self.reserved[device] = max(self.reserved[device], self.allocated[device])

    def missing(self, *, loaded: bool) -> str | None:
        return self.why_missing.get(loaded)

    def devices(self) -> tuple[DeviceMemory, ...]:
        return tuple(
            DeviceMemory(device, used, self.reserved[device], self.total) for device, used in self.allocated.items()
        )

    def pinned(self) -> int | None:
        return self.pinned_bytes

    def room(self, device: int) -> int | None:
        return self.total - self.elsewhere - self.allocated[device]

    def empty_cache(self) -> None:
        self.emptied += 1
        for device, used in self.allocated.items():
            self.reserved[device] = min(self.reserved[device], used + self.stuck)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, OutOfMemory)

    def is_after_fork(self, error: BaseException) -> bool:
        return isinstance(error, NoCudaHere)
