"""Functions that hold what libraries allocate, with libraries loaded that have nothing to do with it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import tokenizers  # noqa: F401 - loaded, and not used
import torch
import transformers  # noqa: F401

torch.set_num_threads(1)
by_text: dict[str, torch.Tensor] = {}
sessions: dict[str, tuple[tuple[torch.Tensor, torch.Tensor], ...]] = {}
outputs: list[torch.Tensor] = []
errors: list[ValueError] = []
layer = torch.nn.Linear(64, 2048)
layer.register_forward_hook(lambda _, __, output: outputs.append(output))
seen: set[str] = set()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


def texts() -> Iterator[str]:
    """Texts that are never repeated, of many lengths."""
    number = 0
    while True:
        number += 1
        yield f"{number:012d}" + "x" * (number % 37)


def embeddings(text: str) -> None:
    by_text[text] = torch.ones(2000)


def past_keys(text: str) -> None:
    """As ``past_key_values`` are kept for each session."""
    sessions[text] = tuple((torch.ones(1, 2, len(text), 16), torch.ones(1, 2, len(text), 16)) for _ in range(2))


def hooked(text: str) -> None:
    with torch.inference_mode():
        layer(torch.ones(1, 64))


def failing(text: str) -> int:
    """Half of the inputs fail, and the frames of their exceptions hold tensors."""
    scores = torch.ones(4000)
    try:
        if int(text[:12]) % 2:
            raise ValueError(text)  # noqa: TRY301 - what an app does
    except ValueError as error:
        errors.append(error)
        raise
    return len(scores)


def native_by_text(text: str) -> None:
    """A library of C that keeps something for each text; it is not the one of tokenizers."""
    if text not in seen:
        seen.add(text)
        libc.memset(libc.malloc(8000), 1, 8000)
