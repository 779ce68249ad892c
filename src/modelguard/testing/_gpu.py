"""A GPU whose use a test sets, for policies on machines that have none."""

from __future__ import annotations

from modelguard.environment._gpu import TORCH_CUDA, DeviceMemory

__all__ = ["OneGpu"]

#: Bytes that it has.
TOTAL = 80_000_000_000


class OneGpu:
    """One device, on which this process has what the test says.

    Attributes:
        allocated: Bytes in tensors; all that is reserved.
    """

    def __init__(self) -> None:
        self.allocated = 0

    def missing(self, *, loaded: bool) -> str | None:  # noqa: ARG002 - the protocol's word
        """Nothing is missing."""
        return None

    def devices(self) -> tuple[DeviceMemory, ...]:
        """The one device."""
        return (DeviceMemory(0, self.allocated, self.allocated, TOTAL),)

    def pinned(self) -> int | None:
        """No figure."""
        return None

    def room(self, device: int) -> int | None:  # noqa: ARG002 - there is one
        """Unknown."""
        return None

    def empty_cache(self) -> None:
        """There is no cache."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """As torch says: a test may raise its error."""
        return TORCH_CUDA.is_out_of_memory(error)

    def is_after_fork(self, error: BaseException) -> bool:
        """As torch says."""
        return TORCH_CUDA.is_after_fork(error)
