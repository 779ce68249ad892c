"""``trim_every`` in a real process under glibc, which keeps what is freed below something that is not."""

from __future__ import annotations

import platform

import pytest
from tests.process.harness import run_python

MB = 10**6

HOLES = """
    import json, time
    from modelguard import guard, memory

    kept = []
    model = guard(object, reload_on=None, trim_every={every!r})

    @model
    def holes(model):
        blocks = [bytearray(100_000) for _ in range(2_000)]  # each too small for a mapping of its own
        kept.append(bytearray(100_000))  # holds the heap's end where it is

    start, end = memory.private(fresh=True), time.monotonic() + {patience}
    holes()
    held = lambda: memory.private(fresh=True) - start
    while held() > 50_000_000 and time.monotonic() < end:
        time.sleep(0.1)
    print(json.dumps(held()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc keeps is judged here")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("every", ["300ms", "50 MB"])
def test_what_glibc_keeps_is_given_back_beside_the_calls(every: str) -> None:
    """200 MB are freed in the middle of the heap: the ticker's thread returns them within the interval."""
    assert run_python(HOLES.format(every=every, patience=30), 50) < 50 * MB


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc keeps is judged here")
@pytest.mark.timeout(60)
def test_without_the_option_glibc_keeps_it() -> None:
    """The same without ``trim_every``: else the test above would show nothing."""
    assert run_python(HOLES.format(every=None, patience=1), 50) > 150 * MB
