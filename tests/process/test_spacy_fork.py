"""Zones across ``os.fork``: a child finds its pipeline usable, whatever other threads were doing in it."""

from __future__ import annotations

import contextvars
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("spacy")

import spacy
from spacy.language import Language

from modelguard import guard, telemetry
from modelguard.adapters.spacy import Zoned, _zone_of, zoned

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
]

TIMEOUT = 30.0


class SlowToClose:
    """A component that stands still in the middle of the zone's end, where a fork may find another thread."""

    def __init__(self) -> None:
        self.slow = False
        self.closing = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, doc: Any) -> Any:
        return doc

    @contextmanager
    def memory_zone(self, mem: Any) -> Iterator[Any]:
        try:
            yield mem
        finally:
            if self.slow:
                self.slow = False
                self.closing.set()
                assert self.go_on.wait(TIMEOUT)


@Language.factory("slow_to_close")
def _slow_to_close(nlp: Language, name: str) -> SlowToClose:
    return SlowToClose()


@pytest.fixture
def zone() -> Iterator[Zoned[Any]]:
    """Guard a pipeline of its own, loaded before the fork."""
    telemetry.set_hooks([])

    def load() -> Language:
        nlp = spacy.blank("en")
        nlp.add_pipe("slow_to_close")
        return nlp

    made = guard(load, reload_on=None, name="en")
    with made:
        yield zoned(made, wait_timeout=TIMEOUT)
    telemetry.set_hooks(None)


def words(zone: Zoned[Any], text: str) -> list[str]:
    @zone
    def split(nlp: Language, text: str) -> list[str]:
        assert nlp.vocab.in_memory_zone
        return [token.text for token in nlp(text)]

    return split(text)


def child_succeeds(work: Callable[[], None]) -> bool:
    """Fork, do the work in the child, and return whether it succeeded."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing may get past here into the parent's tests
            traceback.print_exc()
            os._exit(1)
    return 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def thread_in(work: Callable[[], Any]) -> Iterator[None]:
    """Have another thread do something for as long as the block lasts."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_a_fork_while_another_thread_is_inside(zone: Zoned[Any]) -> None:
    """The child closes the zone that its parent's thread left open, and its calls do not wait for it."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with zone.lease() as nlp:
            nlp("qwzxv")
            inside.set()
            assert leave.wait(TIMEOUT)

    def in_child() -> None:
        with zone._guard.lease() as nlp:
            assert not nlp.vocab.in_memory_zone
            assert "qwzxv" not in nlp.vocab.strings
        assert ["plmokn", "uhbygv"] == words(zone, "plmokn uhbygv")

    with thread_in(stay):
        assert inside.wait(TIMEOUT)
        try:
            assert child_succeeds(in_child)
        finally:
            leave.set()
    assert ["plmokn"] == words(zone, "plmokn")


def test_a_fork_while_another_thread_closes_its_zone(zone: Zoned[Any]) -> None:
    """A zone that is half closed is closed in the child, though the thread that began it is not there."""
    with zone.lease() as nlp:
        slow: Any = nlp.get_pipe("slow_to_close")
    slow.slow = True

    def in_child() -> None:
        assert not nlp.vocab.in_memory_zone
        assert ["plmokn", "uhbygv"] == words(zone, "plmokn uhbygv")
        assert not nlp.vocab.in_memory_zone
        assert "qwzxv" not in nlp.vocab.strings

    with thread_in(lambda: words(zone, "qwzxv")):
        assert slow.closing.wait(TIMEOUT)
        try:
            assert child_succeeds(in_child)
        finally:
            slow.go_on.set()
    assert ["plmokn"] == words(zone, "plmokn")


def test_a_fork_inside_a_zone(zone: Zoned[Any]) -> None:
    """Parent and child are both inside, each in a zone of its own, and both close it."""

    def in_child() -> None:
        with zone.lease():
            assert ["plmokn"] == words(zone, "plmokn")
        assert ["qwzxv"] == [token.text for token in doc]
        assert nlp.vocab.in_memory_zone

    with zone.lease() as nlp:
        doc = nlp("qwzxv")
        child = os.fork()
        if child == 0:
            try:
                in_child()
            except BaseException:  # noqa: BLE001 - nothing may get past here into the parent's tests
                traceback.print_exc()
                os._exit(1)
    if child == 0:
        closed = not nlp.vocab.in_memory_zone and ["a", "b"] == words(zone, "a b")
        os._exit(0 if closed else 2)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert not nlp.vocab.in_memory_zone
    assert ["a", "b"] == words(zone, "a b")


def test_a_block_that_the_forking_code_is_not_inside_of(zone: Zoned[Any]) -> None:
    """The child has closed its zone already, so its end there takes nothing from calls that are inside by then."""
    stay = zone.lease()
    nlp = contextvars.copy_context().run(stay.__enter__)

    def in_child() -> None:
        assert not nlp.vocab.in_memory_zone
        with zone.lease():
            stay.__exit__(None, None, None)
            assert nlp.vocab.in_memory_zone
        assert not nlp.vocab.in_memory_zone

    assert child_succeeds(in_child)
    stay.__exit__(None, None, None)
    assert ["a", "b"] == words(zone, "a b")


def test_a_fork_while_others_wait_for_their_turn(zone: Zoned[Any]) -> None:
    """The queue is the parent's: the child's calls are not behind it, and the parent's have their turn afterwards."""
    found: list[list[str]] = []
    with zone.lease() as nlp:
        queue = _zone_of(nlp)._line
        waits = threading.Thread(target=lambda: found.append(words(zone, "qwzxv")))
        waits.start()
        while not queue:
            assert ["a"] == words(zone, "a")
        assert child_succeeds(lambda: in_child_alone(nlp))
    waits.join(TIMEOUT)
    assert [["qwzxv"]] == found


def in_child_alone(nlp: Language) -> None:
    """What is left in the child is the forking thread's own time in the zone."""
    zone = _zone_of(nlp)
    assert 1 == zone._inside
    assert not zone._line
