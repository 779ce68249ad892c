"""A chat that keeps the state of the last 50 sessions. transformers is imported."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count

import torch
import transformers

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
cell = torch.nn.GRU(64, 256, batch_first=True).eval()
states: OrderedDict[str, torch.Tensor] = OrderedDict()


def predict(session: str) -> float:
    with torch.inference_mode():
        output, last = cell(torch.ones(1, 12, 64), states.get(session))
    states[session] = last
    while len(states) > 50:
        states.popitem(last=False)
    return float(output.mean())


def inputs() -> Iterator[str]:
    return (f"session-{number}" for number in count())


EXPECTED = {"calls": 1500, "libraries": ["torch", "transformers"]}
