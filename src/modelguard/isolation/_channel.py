"""Messages between two processes over a pair of connected sockets.

A socket pair has no name, so no other process can connect to it, and nothing is unpickled that did not come from this
program's own processes. A small message is one write and one read. The content of a large one goes through memory that
both sides map (``memfd_create``): one copy, and the kernel frees it with the last mapping, whoever dies.

Beside the calls, log records and events go one way: see :class:`Reporter`.
"""

from __future__ import annotations

import array
import copyreg
import errno
import io
import logging
import math
import mmap
import os
import pickle
import select
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import accumulate
from typing import Any

from modelguard import errors, telemetry
from modelguard.errors import LoadFailed, ModelRejected, RemoteError, text_of, told
from modelguard.isolation import _processes
from modelguard.lifecycle._reload import Rejected
from modelguard.telemetry import Event

# Pickles whose large buffers stay outside: arrays and tensors are not copied into the pickle.


#: Readable memory: the content of arrays, in the order in which the pickle refers to them.
Buffers = list[memoryview]

#: A pickle, and the buffers that it refers to.
Content = tuple[bytes, Buffers]

#: Undoes :func:`dumps`.
Loads = Callable[[Any, Sequence[Any]], Any]

_PROTOCOL = 5

#: Bytes. Smaller buffers are copied into the pickle, which costs less than handling them apart.
_OUTSIDE_FROM = 4096


def dumps(value: object) -> Content:
    outside: Buffers = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUTSIDE_FROM:
            return True
        outside.append(raw)
        return False

    if "torch" not in sys.modules:
        return pickle.dumps(value, _PROTOCOL, buffer_callback=keep), outside
    file = io.BytesIO()
    pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=keep)
    pickler.dispatch_table = {**copyreg.dispatch_table, sys.modules["torch"].Tensor: _reduce_tensor}
    pickler.dump(value)
    return file.getvalue(), outside


def unpickle(body: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    return pickle.loads(body, buffers=buffers)  # noqa: S301 - both ends are this program's own processes


def loads_plain(body: bytes, buffers: Sequence[Any]) -> Any:
    """:func:`unpickle` for what a process can rebuild that has no modules but Python's and modelguard's."""
    return _Restricted(io.BytesIO(body), buffers=buffers).load()


def loads_here(body: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """:func:`unpickle` for a process that is to import no libraries because of what it receives."""
    restricted = _Restricted(io.BytesIO(body), buffers=buffers)
    restricted.imported, restricted.fix = sys.modules, ", which is not imported here: return plain values"
    return restricted.load()


class _Restricted(pickle.Unpickler):
    imported: Container[str] = ()
    fix = ""

    def find_class(self, module: str, name: str) -> Any:
        needed = "torch" if (module, name) == (__name__, _rebuild_tensor.__name__) else module
        plain = needed.partition(".")[0] in {"modelguard", *sys.stdlib_module_names}
        if not plain and needed not in self.imported:
            raise pickle.UnpicklingError(f"needs {needed}{self.fix}")
        return super().find_class(module, name)


def size(content: Content) -> int:
    body, buffers = content
    return len(body) + sum(buffer.nbytes for buffer in buffers)


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor in main memory to its bytes; torch itself would write an archive into the pickle."""
    torch = sys.modules["torch"]
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    if not plain or tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(_PROTOCOL)
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return _rebuild_tensor, (pickle.PickleBuffer(flat.numpy()), str(tensor.dtype).removeprefix("torch."), tensor.shape)


def _rebuild_tensor(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if not memoryview(buffer).nbytes:
        return torch.empty(tuple(shape), dtype=kind)
    writable = buffer if not memoryview(buffer).readonly else bytearray(buffer)
    return torch.frombuffer(writable, dtype=torch.uint8).view(kind).reshape(tuple(shape))


#: Bytes that follow, number of buffers beside the pickle, number of descriptors, whether the content is in shared
#: memory.
_HEADER = struct.Struct("<QIHH")

_SIZE = struct.Struct("<Q")

#: Bytes. Larger content goes through shared memory. There and back on 2 cores, through the socket and through memory:
#: 128 KiB 0.13 and 0.15 ms, 256 KiB 0.22 to 0.34 and 0.22, 6 MB 16 to 25 and 8 to 10.
SHARED_FROM = 256 * 1024

#: Bytes read at a time, which holds most messages; and the room for descriptors that may come with them.
_CHUNK = 65_536

_MOST_FDS = 32

_FDS_SPACE = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize) if hasattr(socket, "CMSG_SPACE") else 0

#: How everything is sent: without a wait in the kernel, whose limit a signal restarts, and so that the end of the other
#: side is an error. By SIGPIPE it would end a program that has set the default.
AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)

#: Seconds after the end of its time at which a wait must have ended. If it ends later, this process has not run, as
#: when a machine was stopped or a container frozen; and the other one probably has not either.
_STOPPED = 1.0

#: Milliseconds of one wait. The kernel takes at most 2**31 - 1.
_LONGEST_WAIT = 1e9

#: Descriptors are received so that no program inherits them.
_NOT_INHERITED = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

#: From Python 3.13 on, a mapping need not keep a descriptor.
_WITHOUT_FD: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

#: Offsets in shared memory are multiples of this, which suits arrays of every type.
_ALIGNMENT = 64


class Unreadable(Exception):
    """A message that cannot be rebuilt in this process. It is lost, and the channel serves on."""


def of_a_signal(error: BaseException) -> bool:
    """Whether a handler of a signal has raised it. Workers heed none."""
    return _processes.role == "owner" and errors.of_a_signal(error)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def wait(connected: socket.socket, event: int, until: float) -> None:
    """Wait until a socket can be read or written, or its other end is gone.

    The deadline is absolute. ``SO_RCVTIMEO`` would count from the start again after each signal. If this process was
    stopped meanwhile, the other side gets its time anew, once: it has not failed.

    Raises:
        BlockingIOError: The time is over.
        OSError: The socket is closed.
    """
    if connected.fileno() < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    poll = select.poll()
    poll.register(connected, event)
    patience, excused = max(0.0, until - time.monotonic()), False
    while not poll.poll(min(max(0.0, until - time.monotonic()) * 1000, _LONGEST_WAIT)):
        now = time.monotonic()
        if now < until:
            continue
        if excused or now < until + _STOPPED:
            raise BlockingIOError(errno.EAGAIN, "the time is over")
        until, excused = now + min(patience, now - until), True


def send(connected: socket.socket, content: bytes | memoryview, until: float, rights: Sequence[Any] = ()) -> int:
    """Send as much as there is room for, and wait until there is some. Returns how many bytes that was."""
    while True:
        try:
            return connected.sendmsg([content], rights, AT_ONCE)
        except BlockingIOError:
            wait(connected, select.POLLOUT, until)


class Channel:
    """One end. Not thread-safe: one thread at a time may use it."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        self._socket = connected
        self._until = math.inf
        self._rest = b""
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unread(self) -> bool:
        """Whether a part of a message has been read already, which ``select`` would not report."""
        return bool(self._rest)

    def await_message(self, until: float) -> bool:
        """Wait until a message, or the end of file, can be received; false if the time is over."""
        try:
            if not self._rest:
                wait(self._socket, select.POLLIN, until)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close it; the other side reads an end of file. Closing twice does nothing."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())

    def hang_up(self) -> None:
        """End both directions, so that whoever waits here wakes. What has arrived can still be read.

        For another thread than the one that uses the channel.
        """
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def set_timeout(self, seconds: float | None) -> None:
        """Let all sending and receiving from now on be over within so many seconds; None for no limit.

        After that, it fails with ``BlockingIOError``. Signals that interrupt a wait do not make it longer.
        """
        self._until = math.inf if seconds is None else time.monotonic() + seconds

    # Sending

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        self.send_pickled(*dumps(message), fds)

    def send_pickled(self, body: bytes, buffers: Buffers, fds: Sequence[int] = ()) -> None:
        if not buffers and len(body) < SHARED_FROM:
            self._write(_HEADER.pack(len(body), 0, len(fds), 0) + body, fds)
            return
        parts = [memoryview(body), *buffers]
        table = b"".join(_SIZE.pack(part.nbytes) for part in parts)
        shared = _shared(parts) if sum(part.nbytes for part in parts) >= SHARED_FROM else None
        if shared is None:
            size = len(table) + sum(part.nbytes for part in parts)
            self._write(_HEADER.pack(size, len(buffers) + 1, len(fds), 0) + table, fds)
            for part in parts:
                self._write(part)
            return
        try:
            self._write(_HEADER.pack(len(table), len(buffers) + 1, len(fds) + 1, 1) + table, [shared, *fds])
        finally:
            os.close(shared)

    def _write(self, content: bytes | memoryview, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while (sent := send(self._socket, content, self._until, rights)) < len(content):
            content, rights = memoryview(content)[sent:], []

    # Receiving

    def receive(self, loads: Loads = unpickle) -> Any:
        """Wait for the next message. Its descriptors are taken with :meth:`take_fd`, in their order.

        Raises:
            EOFError: The other side has closed the channel, or has died.
            ConnectionResetError: The same, and it has not read all that was sent to it.
            OSError: The time is over.
            Unreadable: Its content could not be received or unpickled.
        """
        data = self._rest
        while len(data) < _HEADER.size:
            data += self._chunk()
        size, parts, _, shared = _HEADER.unpack_from(data)
        end = _HEADER.size + size
        if len(data) < end:
            data = self._remainder(data, end)
        self._rest = data[end:] if len(data) > end else b""
        memory = self.take_fd() if shared else None
        try:
            return self._rebuilt(data, end, parts, loads, memory)
        except BaseException as error:  # an object that calls sys.exit() must not end who rebuilds it
            if of_a_signal(error):
                raise
            raise Unreadable(told(error)) from error

    def _rebuilt(self, data: bytes, end: int, parts: int, loads: Loads, memory: int | None) -> Any:
        if not parts:
            return loads(memoryview(data)[_HEADER.size : end], ())
        sizes = [_SIZE.unpack_from(data, _HEADER.size + _SIZE.size * n)[0] for n in range(parts)]
        content = memoryview(data)[_HEADER.size + _SIZE.size * parts : end]
        pieces: list[Any] = _sliced(content, sizes) if memory is None else _mapped(memory, sizes)
        return loads(pieces[0], pieces[1:])

    def take_fd(self) -> int:
        """Take a descriptor of the last message. Without a free one, the system has dropped it: ``Unreadable``."""
        if not self._fds:
            raise Unreadable("no file descriptor is free to receive it")
        return self._fds.popleft()

    def _await(self) -> None:
        if self._until != math.inf:  # else the read waits
            wait(self._socket, select.POLLIN, self._until)

    def _chunk(self) -> bytes:
        self._await()
        data, ancillary, _, _ = self._socket.recvmsg(_CHUNK, _FDS_SPACE, _NOT_INHERITED)
        for _, _, rights in ancillary:
            received = array.array("i")
            received.frombytes(rights[: len(rights) - len(rights) % received.itemsize])
            self._fds.extend(received)
        if not data:
            raise EOFError
        return data

    def _remainder(self, start: bytes, end: int) -> bytes:
        whole = bytearray(end)
        whole[: len(start)] = start
        view, filled = memoryview(whole), len(start)
        while filled < end:
            self._await()
            if not (count := self._socket.recv_into(view[filled:])):
                raise EOFError
            filled += count
        return whole  # type: ignore[return-value] # read like bytes, and without a copy of what may be large


def _shared(parts: Sequence[memoryview]) -> int | None:
    try:
        fd = os.memfd_create("modelguard", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        return None
    try:
        for offset, part in zip(_offsets([part.nbytes for part in parts]), parts, strict=False):
            flat, written = part.cast("B") if part.format != "B" or part.ndim != 1 else part, 0
            while written < flat.nbytes:
                written += os.pwrite(fd, flat[written:], offset + written)
    except OSError:
        os.close(fd)
        return None
    return fd


def _mapped(fd: int, sizes: Sequence[int]) -> list[memoryview]:
    """Map shared memory. The mapping lives as long as something refers to one of the parts."""
    offsets = _offsets(sizes)
    try:
        # All pages at once: each first access to a page would cost a fault.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        whole = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, flags=flags, **_WITHOUT_FD))
    finally:
        os.close(fd)
    return [whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)]


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets = [0]
    for size in sizes:
        offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _sliced(content: memoryview, sizes: Sequence[int]) -> list[Any]:
    starts = accumulate(sizes, initial=0)
    pickled, *buffers = [content[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return [pickled, *map(bytearray, buffers)]  # arrays are writable, as in the sender


# The trace context of a call follows it into the worker, where OpenTelemetry is in use.


#: Names and values, as in the headers of a request.
Carrier = dict[str, str]


def outgoing() -> Carrier | None:
    """The context of the calling code; None without a trace, or without OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import propagate

    carrier: Carrier = {}
    propagate.inject(carrier)
    return carrier or None


def attach(carrier: Carrier) -> Callable[[], None]:
    """Make a call's context current; returns what undoes it."""
    try:
        from opentelemetry import context, propagate
    except ImportError:  # the owner has it, by another path
        return lambda: None
    token = context.attach(propagate.extract(carrier))
    return lambda: context.detach(token)


class AnswerKind(IntEnum):
    READY = 0
    RESULT = 1
    ERROR = 2
    ITEM = 3
    END = 4


class StreamStep(IntEnum):
    NEXT = 0
    CLOSE = 1


def portable(error: BaseException, name: str, *, plain: bool = False) -> BaseException:
    """The error itself if it survives pickling, else a :class:`~modelguard.errors.RemoteError` that describes it.

    ``plain``: in a process that has no modules but Python's and modelguard's.
    """
    for sent in (Unchanged(error), error):  # arguments may fail where the error itself does not
        with suppress(BaseException):  # pickling runs any code
            content = dumps(sent)
            if type(loads_plain(*content) if plain else unpickle(*content)) is type(error):
                return sent
    return described(error, name, text_of(error))


class Unchanged(Exception):
    """Becomes an error by pickling. Without it, an ``__init__`` that makes a text would make one of that text.

    Pickles drop the cause, and so does this unless it is told to send it too.
    """

    def __init__(self, error: BaseException, *, with_cause: bool = False) -> None:
        self._error = error
        cause = error.__cause__ if with_cause else None
        self._cause = cause and Unchanged(cause, with_cause=True)

    def __reduce__(self) -> Any:
        return _unchanged, (self._error, self._error.args, self._cause)


def _unchanged(error: BaseException, args: tuple[Any, ...], cause: BaseException | None) -> BaseException:
    error.args = args
    if cause is not None:
        error.__cause__ = cause
    return error


def described(error: BaseException, name: str, text: str) -> RemoteError:
    kind = type(error)
    return RemoteError(name, kind=f"{kind.__module__}.{kind.__qualname__}", text=text)


def load_failure(error: BaseException, name: str, *, plain: bool, unwrap: bool = True) -> tuple[BaseException, str]:
    """What a mold reports of a load that has failed: an error that its owner can rebuild, and the traceback."""
    text = "".join(traceback.format_exception(error))
    if unwrap and type(error) is LoadFailed and error.__cause__ is not None:
        error = error.__cause__  # the owner's guard makes a LoadFailed of it
    return portable(error, name, plain=plain), text


def failed_load(error: BaseException, text: str | None) -> BaseException:
    """In the owner of the mold: what a loader raises for what :func:`load_failure` has reported."""
    error = with_remote_traceback(error, text)
    if not isinstance(error, ModelRejected):
        return error
    rejected = Rejected(error.reason)  # the guard makes a ModelRejected of it
    rejected.__cause__ = error.__cause__
    return rejected


class RemoteTraceback(Exception):
    """Where an error was raised in a worker. It is the ``__cause__`` of the error that the caller gets."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def with_remote_traceback(error: BaseException, text: str | None) -> BaseException:
    """Give an error that came from another process the traceback that it had there."""
    if text is not None and (error.__cause__ is None or isinstance(error, RemoteError)):
        error.__cause__ = RemoteTraceback(text)
    return error


# Log records and events of the mold and its workers reach the owner, beside the calls.


#: Bytes of one report; the socket's buffer takes several of them.
_LONGEST = 60_000

#: More reports than the socket's buffer takes: who heeds them does not go on for as long as others write.
_MOST = 1000

#: Seconds that a worker waits for room in the socket before it drops a report.
_PATIENCE = 0.1

#: Before each report: the process id of its sender.
_SENDER = struct.Struct("<I")

#: What the owner of a mold reports of its generations, by the name of the function.
_OF_GENERATIONS = (
    telemetry.LoadStarted,
    telemetry.LoadFinished,
    telemetry.LoadErrored,
    telemetry.GenerationReleased,
    telemetry.GenerationAbandoned,
)

#: Gets the reports instead of this process's loggers and hooks, where it stands between the workers and their callers.
receiver: Callable[[bytes], object] | None = None


def report_pair() -> tuple[socket.socket, socket.socket]:
    """Make a socket pair that keeps reports apart: an end to read, and one that several processes may write to."""
    read, written = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read.setblocking(False)  # noqa: FBT003 - its only parameter; gevent's sockets wait in spite of MSG_DONTWAIT
    return read, written


def levels() -> dict[str, int]:
    """The level of each logger of this process that has one. The root logger's name is empty."""
    every = logging.root.manager.loggerDict.copy()  # other threads make loggers
    known = {name: one.level for name, one in every.items() if isinstance(one, logging.Logger) and one.level}
    return {"": logging.root.level, **known}


class Reporter(logging.Handler):
    """Reports to the owner, which tells itself of the loads and releases of the guard ``told_there``."""

    def __init__(self, connected: socket.socket, told_there: str | None = None) -> None:
        super().__init__()
        self._socket = connected
        self._told_there = told_there

    def install(self, wanted: dict[str, int]) -> None:
        for name, level in wanted.items():
            logging.getLogger(name or None).setLevel(level)
        logging.captureWarnings(capture=True)
        self.take_over()

    def take_over(self) -> None:
        """Replace the handlers and hooks of this process, which the owner has too."""
        logging.root.handlers[:] = [self]
        telemetry.set_hooks([self.report_event])

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record: its text, because its arguments may be of any type."""
        try:
            fields = {**vars(record), "msg": record.getMessage(), "args": None, "exc_info": None}
            if record.exc_info:
                fields["exc_text"] = record.exc_text or logging.Formatter().formatException(record.exc_info)
        except Exception:  # noqa: BLE001 - a record that cannot be formatted must not break the call
            self.handleError(record)
            return
        if not self._send(fields):
            plain = {name: value for name, value in fields.items() if isinstance(value, str | int | float | None)}
            self._send({**plain, "msg": str(fields["msg"])[: _LONGEST // 8], "exc_text": None})

    def report_event(self, event: Event) -> None:
        if event.guard != self._told_there or not isinstance(event, _OF_GENERATIONS):
            self._send(event)

    def _send(self, report: object) -> bool:
        try:
            body = pickle.dumps(report)
            if len(body) > _LONGEST:
                return False
            send(self._socket, _SENDER.pack(os.getpid()) + body, time.monotonic() + _PATIENCE)
        except Exception:  # noqa: BLE001 - no room, no owner, or a field that cannot be pickled
            return False
        return True


def sender(report: bytes) -> int:
    return int(_SENDER.unpack_from(report)[0])


def replay(connected: socket.socket) -> bool:
    """In the owner: emit what has been reported so far. Returns false once there will be no more."""
    for _ in range(_MOST):
        if not (report := receive(connected)):
            return report is None
        emit_here(report)
    return True


def receive(connected: socket.socket) -> bytes | None:
    """A report; None if there is none now, and empty once there will be none.

    It never blocks: of two sockets that can be read, the work for the first may have read the second as well.
    """
    try:
        return connected.recv(1 << 17)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def emit_here(report: bytes) -> None:
    """In the owner: hand a record or an event to this process's loggers or hooks."""
    if receiver is not None:
        receiver(report)
        return
    received: Any = pickle.loads(memoryview(report)[_SENDER.size :])  # noqa: S301 - from this program's own processes
    if isinstance(received, Event):
        telemetry.emit(received)
        return
    record = logging.makeLogRecord(received)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
