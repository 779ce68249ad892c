"""A model with every fault: it leaks, it sometimes hangs or crashes, and no other thread runs while it loads."""

import ctypes
import os
import time

#: Bytes that each call leaves behind.
LEAK = 32_768
#: Seconds that a load takes, all of them with the GIL held.
LOAD = 1.5
#: What a text begins with, so that a driver can ask for the faults.
HANG, CRASH = "hang", "crash"


class Model:
    def __init__(self) -> None:
        end = time.monotonic() + LOAD
        while time.monotonic() < end:
            pass
        self.lengths = {number: len(str(number)) for number in range(300_000)}
        self.kept: list[bytes] = []

    def __call__(self, text: str) -> int:
        self.kept.append(os.urandom(LEAK))
        if text.startswith(HANG):
            time.sleep(3600)
        if text.startswith(CRASH):
            ctypes.string_at(0)
        return sum(self.lengths[ord(letter)] for letter in text)
