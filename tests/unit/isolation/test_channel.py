"""Messages between two ends of a socket pair, both in this process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelguard.isolation._channel import SHARED_FROM, Channel, Unreadable, pair


class Bomb:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


class Ends:
    """Both ends, and a thread that sends: a large message does not fit into the socket."""

    def __init__(self) -> None:
        self.one, self.other = (Channel(end) for end in pair())

    def across(self, *messages: object, fds: tuple[int, ...] = ()) -> list[object]:
        def send() -> None:
            for message in messages:
                self.one.send(message, fds)

        sender = threading.Thread(target=send)
        sender.start()
        received = [self.other.receive() for _ in messages]
        sender.join()
        return received


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.one.close()
    made.other.close()


JSON = st.recursive(st.none() | st.integers() | st.text() | st.binary(), lambda part: st.lists(part, max_size=4))


@given(st.lists(JSON, max_size=5))
def test_messages_arrive_as_they_were_sent(messages: list[object]) -> None:
    """In their order, however they are cut into reads."""
    ends = Ends()
    assert messages == ends.across(*messages)
    ends.one.close()
    ends.other.close()


@pytest.mark.parametrize("size", [0, 4095, 4096, 65_536, SHARED_FROM - 1, SHARED_FROM, 3 * SHARED_FROM])
def test_content_of_any_size(ends: Ends, size: int) -> None:
    """Inside the pickle, beside it, and in shared memory, with small messages around it."""
    content = os.urandom(size)
    assert ["a", content, bytearray(content), "b"] == ends.across("a", content, bytearray(content), "b")


def test_arrays_are_not_copied_into_the_pickle(ends: Ends) -> None:
    """Several arrays in one message arrive intact, and can be written to."""
    numpy = pytest.importorskip("numpy")
    arrays = [numpy.arange(count) for count in (3, 1000, 5000, 100_000)]
    (received,) = ends.across(arrays)
    assert isinstance(received, list)
    for sent, got in zip(arrays, received, strict=True):
        assert (sent == got).all()
        got[0] = 1


def test_without_shared_memory_the_socket_does(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or missing memory file system costs time, and no call."""

    def none(*_: object) -> int:
        raise OSError("none left")

    monkeypatch.setattr(os, "memfd_create", none)
    content = os.urandom(2 * SHARED_FROM)
    assert [content] == ends.across(content)


def test_descriptors_travel(ends: Ends) -> None:
    """The receiver gets its own copy, which its children do not inherit."""
    reader, writer = os.pipe()
    assert ["x"] == ends.across("x", fds=(writer,))
    copy = ends.other.take_fd()
    os.write(copy, b"!")
    assert b"!" == os.read(reader, 1)
    assert not os.get_inheritable(copy)
    for fd in (reader, writer, copy):
        os.close(fd)


def test_a_message_that_cannot_be_rebuilt_is_skipped(ends: Ends) -> None:
    """The next one is read as if nothing had been."""
    ends.one.send(Bomb())
    ends.one.send("next")
    with pytest.raises(Unreadable, match="no number"):
        ends.other.receive()
    assert "next" == ends.other.receive()


def test_nothing_is_sent_of_what_cannot_be_pickled(ends: Ends) -> None:
    """The other side does not see half a message."""
    with pytest.raises(TypeError):
        ends.one.send(threading.Lock())
    ends.one.send("next")
    assert "next" == ends.other.receive()


def test_the_end_of_the_other_side_is_seen(ends: Ends) -> None:
    """A process that dies closes its end."""
    ends.one.close()
    with pytest.raises(EOFError):
        ends.other.receive()


def test_an_end_with_something_unread_is_told_apart(ends: Ends) -> None:
    """Whoever has sent it knows that nothing of it was begun."""
    ends.one.send("never read")
    ends.other.close()
    with pytest.raises(ConnectionResetError):
        ends.one.receive()


def test_an_answer_that_has_arrived_outlives_a_hang_up(ends: Ends) -> None:
    """A worker that dies after its answer has answered."""
    ends.other.send("the answer")
    ends.other.close()
    ends.one.hang_up()
    assert "the answer" == ends.one.receive()
    with pytest.raises(EOFError):
        ends.one.receive()
    ends.one.close()
    ends.one.hang_up()


class Hasty(socket.socket):
    """Its other side answers what it has got, and closes, before the sender goes on."""

    other: Channel

    def sendmsg(self, *arguments: Any) -> int:
        sent = super().sendmsg(*arguments)
        self.other.receive()
        self.other.send("refused")
        self.other.close()
        return sent


def test_an_answer_that_comes_while_descriptors_are_sent_is_read() -> None:
    """A broker that refuses a client closes the connection at once; the client must see why."""
    near, far = pair()
    hasty = Hasty(fileno=near.detach())
    hasty.other = Channel(far)
    with closing(Channel(hasty)) as channel:
        channel.send("join", [0])
        assert "refused" == channel.receive()


def test_a_hang_up_wakes_who_waits(ends: Ends) -> None:
    """Though another process holds the other end open."""
    waiting = threading.Timer(0.01, ends.one.hang_up)
    waiting.start()
    with pytest.raises(EOFError):
        ends.one.receive()
    waiting.join()


def test_a_wait_ends_in_time(ends: Ends) -> None:
    """The kernel counts the time."""
    ends.other.set_timeout(0.01)
    with pytest.raises(BlockingIOError):
        ends.other.receive()
