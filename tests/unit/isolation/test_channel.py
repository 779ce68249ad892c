"""Messages between two ends of a socket pair, both in this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelguard.isolation import _channel
from modelguard.isolation._channel import _HEADER, SHARED_FROM, Channel, Unreadable, pair
from modelguard.isolation._host import Folder


class Bomb:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


class Exit:
    """Ends the program that unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return sys.exit, ()


class Shade:
    """Becomes a member of an enumeration that has none such."""

    def __reduce__(self) -> tuple[object, ...]:
        return signal.Signals, ("none",)


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


class Stop:
    def __init__(self) -> None:
        self.func = print  # as a partial has, and this is none

    def __call__(self, status: int, _frame: object) -> None:
        sys.exit(status)


def leave(reason: str, status: int, _frame: object) -> None:
    """Exit, as an application does that wants to say why."""
    del reason
    sys.exit(status)


class Signal:
    """A signal comes while it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return signal.raise_signal, (signal.SIGUSR1,)


@pytest.mark.parametrize(
    "handler", [lambda *_: sys.exit(), partial(leave, "usual"), Stop()], ids=["f", "partial", "object"]
)
def test_what_a_handler_of_a_signal_raises_reaches_its_program(ends: Ends, handler: Callable[..., None]) -> None:
    """Also while a message is rebuilt, and whatever kind of callable the handler is."""
    ends.one.send(Signal())
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(SystemExit):
            ends.other.receive()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("content", [Exit(), Shade()], ids=["exit", "enum"])
def test_what_an_object_raises_as_it_is_rebuilt_is_no_signal(ends: Ends, content: object) -> None:
    """Its message is lost, and the program goes on."""
    ends.one.send(content)
    with pytest.raises(Unreadable):
        ends.other.receive()


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
    """With an error that names it."""
    ends.other.set_timeout(0.01)
    with pytest.raises(BlockingIOError):
        ends.other.receive()


class Interrupted:
    """Signals to the main thread, until the block ends, and for 10 seconds at most."""

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR1, lambda *_: None)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._interrupt)
        self._thread.start()
        return self

    def _interrupt(self) -> None:
        for _ in range(1000):
            if self._over.wait(0.01):
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        self.lasted = False

    lasted = True

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._before)


def begin(ends: Ends) -> None:
    """Wait for the rest of a message that has begun."""
    ends.one._socket.send(_HEADER.pack(1000, 0, 0, 0))
    ends.other.receive()


def fill(ends: Ends) -> None:
    """Write more than anybody reads."""
    while True:
        ends.other.send(b"x" * 10_000)


@pytest.mark.parametrize("wait", [lambda ends: ends.other.receive(), begin, fill], ids=["message", "rest", "room"])
def test_signals_do_not_make_a_wait_longer(ends: Ends, wait: Callable[[Ends], object]) -> None:
    """The limit is a point in time, which no interruption moves."""
    ends.other.set_timeout(0.05)
    with Interrupted() as interrupted, pytest.raises(BlockingIOError):
        wait(ends)
    assert interrupted.lasted


def test_a_report_that_finds_no_room_is_dropped_in_time() -> None:
    """Also in a worker whose model has a timer: an owner that is too busy to read holds up no call."""
    ours, theirs = _channel.report_pair()
    reporter = _channel.Reporter(theirs)
    with ours, theirs, Interrupted() as interrupted:
        while reporter._send("x" * 10_000):
            pass
    assert interrupted.lasted


def accept_and_close(listening: socket.socket) -> None:
    connected, _ = listening.accept()
    connected.close()


def test_a_connection_waits_for_room_in_time(tmp_path: Path) -> None:
    """Between signals too, and it has a peer then."""
    tmp_path.chmod(0o700)
    with closing(Folder(tmp_path)) as folder, folder.listen("name") as listening, Interrupted() as interrupted:
        listening.listen(0)
        first = folder.connect("name", 0.05)
        with pytest.raises(BlockingIOError):
            folder.connect("name", 0.05)
        accepting = threading.Timer(0.05, accept_and_close, [listening])
        accepting.start()
        second = folder.connect("name", 10)
        accepting.join()
        for connected in (first, second):
            assert connected is not None
            connected.close()
    assert interrupted.lasted


def test_nothing_is_received_on_a_closed_channel(ends: Ends) -> None:
    """An error of the system, with a limit and without one."""
    ends.other.close()
    for seconds in (None, 1.0):
        ends.other.set_timeout(seconds)
        with pytest.raises(OSError, match="Bad file descriptor"):
            ends.other.receive()


@pytest.mark.parametrize("count", [10, 5000, 100_000])
def test_arrays_are_as_writable_as_they_were(ends: Ends, count: int) -> None:
    """Of any size: what the sender may write to, the receiver may write to."""
    numpy = pytest.importorskip("numpy")
    array, constant = numpy.zeros(count), numpy.zeros(count)
    constant.flags.writeable = False
    (received,) = ends.across([array, constant])
    assert isinstance(received, list)
    assert [True, False] == [one.flags.writeable for one in received]


def test_an_error_keeps_its_text_where_only_pythons_own_modules_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the owner of a function that a ``target=`` names. A bare pickle would make a text of the text."""

    class MakesATextError(Exception):
        def __init__(self, of: object) -> None:
            super().__init__(f"cannot read {of}")

    MakesATextError.__module__, MakesATextError.__qualname__ = "json", "MakesATextError"
    monkeypatch.setattr(json, "MakesATextError", MakesATextError, raising=False)
    sent = _channel.portable(MakesATextError(5), "f", plain=True)
    again = _channel.loads_plain(*_channel.dumps(sent))
    assert (MakesATextError, "cannot read 5") == (type(again), str(again))
