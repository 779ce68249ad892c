"""A module torch for tests, of a torch with CUDA, on machines that have none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

GB = 10**9


class OutOfMemoryError(RuntimeError):
    """As torch raises it."""


class AcceleratorError(RuntimeError):
    """As torch raises it for errors of the driver."""


class FakeTorch:
    """What modelguard uses of torch 2.13.

    Attributes:
        used: Which of its functions were called that need CUDA.
    """

    def __init__(
        self,
        *,
        built: bool = True,
        initialized: bool = True,
        forked: bool = False,
        devices: int = 1,
        fraction: float = 1.0,
        free: int = 50 * GB,
    ) -> None:
        self.used: list[str] = []
        self.__version__ = "2.13.0"
        self.AcceleratorError = AcceleratorError
        self.version = SimpleNamespace(cuda="13.0" if built else None, hip=None)
        self.stats: dict[str, Any] = {
            "allocated_bytes": {"all": {"current": 3 * GB}},
            "reserved_bytes": {"all": {"current": 5 * GB}},
        }
        self.pinned: dict[str, Any] = {"active_bytes": {"current": 7}}
        self.settings = ""
        self._C = SimpleNamespace(_accelerator_getAllocatorSettings=lambda: self.settings)
        self.accelerator = SimpleNamespace(empty_host_cache=lambda: self.used.append("empty_host_cache"))
        memory = SimpleNamespace(
            memory_stats_as_nested_dict=lambda _device: self.read(),
            host_memory_stats_as_nested_dict=lambda: self.pinned,
            get_per_process_memory_fraction=lambda _device: fraction,
        )
        self.cuda = SimpleNamespace(
            OutOfMemoryError=OutOfMemoryError,
            is_initialized=lambda: initialized and not forked,
            _is_in_bad_fork=lambda: forked,
            device_count=lambda: devices,
            get_device_properties=lambda _device: SimpleNamespace(total_memory=80 * GB),
            mem_get_info=lambda _device: (free, 80 * GB),
            empty_cache=lambda: self.used.append("empty_cache"),
            memory=memory,
        )

    def read(self) -> dict[str, Any]:
        """The figures of a device."""
        return self.stats
