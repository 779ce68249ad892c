"""Exceptions of signal handlers, and what other threads do, at each point of a piece of work where either may come."""

from __future__ import annotations

import opcode
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

import modelguard

T = TypeVar("T")

_OURS = (str(Path(modelguard.__file__).parent), "contextlib.py", "concurrent/futures/_base.py")

#: After these CPython looks for signals: the end of a call, the beginning of a function, a step back in a loop.
_LOOKS = {opcode.opmap.get(name) for name in ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")}

traces_instructions = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="its instructions are those of 3.11")


class Alarm(Exception):
    """What the handler raises."""


def _handler(*_: object) -> None:
    raise Alarm


class _Interrupt:
    def __init__(self, after: int, act: Callable[[], object]) -> None:
        self.left = after
        self._act = act
        self.where = ""
        self._last: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        if self.left < 0 or not any(part in frame.f_code.co_filename for part in _OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "exception":
            self._last.pop(frame, None)
        elif event == "return" or frame.f_code.co_name == "__del__":  # what a finalizer raises reaches nobody
            return None if event == "call" else self
        elif event == "opcode":
            self._look(frame)
        return self

    def _look(self, frame: FrameType) -> None:
        before = self._last.get(frame)
        self._last[frame] = frame.f_code.co_code[frame.f_lasti]
        self.left -= before in _LOOKS
        if self.left < 0:
            sys.settrace(None)
            self._last.clear()
            self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
            self._act()


def interrupted_everywhere(
    make: Callable[[], T], use: Callable[[T], object], *, step: int = 1
) -> Iterator[tuple[T, str]]:
    """Interrupt ``use`` at its first point, its second (or so many later), and so on.

    Yields:
        What was used so, and where it was.
    """
    handler = signal.signal(signal.SIGUSR1, _handler)
    yield from met_everywhere(make, use, _handler, step=step)
    signal.signal(signal.SIGUSR1, handler)


def met_everywhere(
    make: Callable[[], T], use: Callable[[T], object], act: Callable[[T], object], *, step: int = 1
) -> Iterator[tuple[T, str]]:
    """The same with any ``act``, which is told what is used, such as what another thread does in that moment."""
    before = sys.gettrace()
    for after in range(0, 10_000, step):
        made = make()
        interrupt = _Interrupt(after, partial(act, made))
        sys.settrace(interrupt)
        try:
            use(made)
        except Alarm:
            pass
        finally:
            sys.settrace(before)
        if interrupt.left >= 0:
            assert after > 5, "nothing was interrupted"
            return
        yield made, interrupt.where
