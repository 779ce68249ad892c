"""A helper process for each job, which waits for more work and is never told that there is none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import count

HELPERS: list[subprocess.Popen[bytes]] = []


def predict(job: str) -> int:
    helper = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)  # LEAK
    assert helper.stdin is not None
    helper.stdin.write(job.encode())
    helper.stdin.flush()
    HELPERS.append(helper)
    return helper.pid


def inputs() -> Iterator[str]:
    return (f"convert page {number}\n" for number in count())


EXPECTED = {"causes": ["child processes"], "holders": ["HELPERS", "/bin/cat"], "calls": 150}
