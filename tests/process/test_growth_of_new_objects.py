"""``assert_no_growth`` in a process of its own: which objects the collector looks at meanwhile."""

from __future__ import annotations

import pytest
from tests.process.harness import run_python

pytestmark = pytest.mark.timeout(120)

START = """
    import gc, json, threading
    from collections import deque
    from contextlib import suppress
    from modelguard import guard, telemetry
    from modelguard.testing import assert_no_growth

    class Cycle:  # only the collector frees it
        def __init__(self):
            self.itself = self
"""


def test_what_was_there_is_collected_afterwards_as_before() -> None:
    """It looks at new objects alone, and thaws the older ones; what somebody else has frozen stays frozen."""
    program = """
    assert_no_growth(bytearray, [10])
    thawed = not gc.get_freeze_count()
    gc.freeze()
    assert_no_growth(bytearray, [10])
    print(json.dumps([thawed, gc.get_freeze_count() > 0]))
    """
    assert [True, True] == run_python(START + program, 60)


def test_a_model_that_is_dropped_meanwhile_is_gone() -> None:
    """Its generation is from before the calls, and the first reload of them collects it all the same."""
    program = """
    alive, released = set(), threading.Semaphore(0)

    def note(event):
        if isinstance(event, telemetry.GenerationReleased):
            alive.add(event.alive)
            released.release()

    def reload(_):
        nlp.reload()
        released.acquire(timeout=20)  # a release comes after it, and a reading beside it holds all objects for a moment

    telemetry.add_hook(note)
    nlp = guard(Cycle, reload_on=None)
    nlp.load()
    with suppress(AssertionError):  # the first reloads import modules, which is growth
        assert_no_growth(reload, [1], calls=1)
    nlp.close()
    print(json.dumps([*alive, gc.get_freeze_count()]))
    """
    assert [False, 0] == run_python(START + program, 60)


def test_new_objects_in_place_of_old_ones_pass() -> None:
    """What a window of the last results lets go is no growth, though only the collector frees it."""
    program = """
    window = deque((Cycle() for _ in range(5000)), maxlen=5000)
    assert_no_growth(lambda _: window.append(Cycle()), [1])
    print(json.dumps(len(window)))
    """
    assert 5000 == run_python(START + program, 60)
