"""What the programs of this folder have in common: a model, and a wait for what the guard does in the background."""

import time
from collections.abc import Callable


class Model:
    """Stands for a real model, made of the bytes of its file."""

    def __init__(self, weights: bytes) -> None:
        self.weights = weights

    def __call__(self, text: str) -> str:
        return f"{text}, said {self.weights.decode()}"


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what the guard does in the background."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
