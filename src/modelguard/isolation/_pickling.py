"""Pickles whose large buffers stay outside: arrays and tensors are not copied into the pickle."""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Buffers", "Content", "Loads", "dumps", "loads", "loads_here", "loads_plain", "size"]

#: Readable memory: the content of arrays, in the order in which the pickle refers to them.
Buffers = list[memoryview]

#: A pickle, and the buffers that it refers to.
Content = tuple[bytes, Buffers]

#: Undoes :func:`dumps`.
Loads = Callable[[Any, Sequence[Any]], Any]

_PROTOCOL = 5

#: Bytes. Smaller buffers are copied into the pickle, which costs less than handling them apart.
_OUTSIDE_FROM = 4096


def dumps(value: object) -> Content:
    """Pickle ``value``.

    Returns:
        The pickle, and the buffers that it refers to.

    Raises:
        Exception: Something in it cannot be pickled. Which error that is depends on the object.
    """
    outside: Buffers = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUTSIDE_FROM:
            return True
        outside.append(raw)
        return False

    if "torch" not in sys.modules:
        return pickle.dumps(value, _PROTOCOL, buffer_callback=keep), outside
    file = io.BytesIO()
    pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=keep)
    pickler.dispatch_table = {**copyreg.dispatch_table, sys.modules["torch"].Tensor: _reduce_tensor}
    pickler.dump(value)
    return file.getvalue(), outside


def loads(body: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """Undo :func:`dumps`. Arrays refer to the memory of ``buffers``, which is not copied."""
    return pickle.loads(body, buffers=buffers)  # noqa: S301 - both ends are this program's own processes


def loads_plain(body: bytes, buffers: Sequence[Any]) -> Any:
    """:func:`loads` for what a process can rebuild that has no modules but Python's and modelguard's.

    Raises:
        UnpicklingError: It needs others.
    """
    return _Plain(io.BytesIO(body), buffers=buffers).load()


def loads_here(body: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """:func:`loads` for a process that is to import no libraries because of what it receives.

    Raises:
        UnpicklingError: It needs one that this process has not imported.
    """
    return _Here(io.BytesIO(body), buffers=buffers).load()


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = module.partition(".")[0] in {"modelguard", *sys.stdlib_module_names}
        if not known or module == __name__:  # which rebuilds tensors
            raise pickle.UnpicklingError(f"needs {module}")
        return super().find_class(module, name)


class _Here(_Plain):
    def find_class(self, module: str, name: str) -> Any:
        if ("torch" if module == __name__ else module) in sys.modules:
            return pickle.Unpickler.find_class(self, module, name)
        try:
            return super().find_class(module, name)
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(f"{error}, which is not imported here: return plain values") from None


def size(content: Content) -> int:
    """How many bytes are sent."""
    body, buffers = content
    return len(body) + sum(buffer.nbytes for buffer in buffers) if buffers else len(body)


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor in main memory to its bytes; torch itself would write an archive into the pickle."""
    torch = sys.modules["torch"]
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    if not plain or tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(_PROTOCOL)
    flat = (
        tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    )
    return _rebuild_tensor, (pickle.PickleBuffer(flat.numpy()), str(tensor.dtype).removeprefix("torch."), tensor.shape)


def _rebuild_tensor(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if not memoryview(buffer).nbytes:
        return torch.empty(tuple(shape), dtype=kind)
    writable = buffer if not memoryview(buffer).readonly else bytearray(buffer)
    return torch.frombuffer(writable, dtype=torch.uint8).view(kind).reshape(tuple(shape))
