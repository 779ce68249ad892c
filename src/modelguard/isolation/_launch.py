"""Start a fresh interpreter that becomes a mold."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path

from modelguard.isolation import _news
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._instructions import Instructions

if sys.platform != "win32":
    import fcntl

__all__ = ["Launched", "launch", "start_interpreter"]

#: Where this package is imported from: the fresh interpreter finds it there before it knows the owner's path.
_PACKAGES = str(Path(__file__).parents[2])

_PROGRAM = (
    "import sys; sys.path.insert(0, {packages!r}); from modelguard.isolation.{module} import main; main({numbers})"
)

#: The highest of the descriptors for input, output and errors.
_STANDARD = 2


@dataclass(frozen=True, slots=True)
class Launched:
    """A mold that has been started, and has not loaded yet.

    Attributes:
        process: Its process, the leader of a process group of its own.
        control: The channel to it.
        news: Receives records and events of it and of its workers.
    """

    process: subprocess.Popen[bytes]
    control: Channel
    news: socket.socket

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors. Takes no lock."""
        self.process.returncode = 0  # it is no child of this process, and must not warn when it is dropped
        self.control.close()
        self.news.close()


def launch(instructions: Instructions) -> Launched:
    """Start a mold. It dies with the calling thread, so that must be one that lives as long as this process.

    Raises:
        OSError: No process or no descriptor is left.
    """
    control, its_control = pair()
    try:
        news, its_news = _news.pair()
    except BaseException:
        control.close()
        its_control.close()
        raise
    try:
        words = "mold", ".".join(instructions["function"])
        process = start_interpreter("_mold", (its_control.fileno(), its_news.fileno()), *words, process_group=0)
    except BaseException:
        control.close()
        news.close()
        raise
    finally:
        its_control.close()
        its_news.close()
    channel = Channel(control)
    channel.send(instructions)
    return Launched(process, channel, news)


def start_interpreter(
    module: str,
    fds: Sequence[int],
    *words: str,
    prints: bool = True,
    process_group: int | None = None,
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter like this one, which runs the ``main`` of a module of this package.

    Where this process has closed its own input or output, or something else has the number, the new one gets
    ``/dev/null``: what it prints must not reach a descriptor of another purpose.

    Args:
        module: Its name.
        fds: Descriptors that are passed on; ``main`` gets their numbers.
        words: What lists of processes show.
        prints: Whether it may print to this process's output; without, it does not hold that open either.
        process_group: As for ``Popen``.
        start_new_session: As for ``Popen``.

    Raises:
        OSError: No process or no descriptor is left.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing
    executable = os.fsdecode(spawn.get_executable() or sys.executable)
    with ExitStack() as copies:
        passed = [_above_standard(fd, copies) for fd in fds]
        numbers = ", ".join(map(str, passed))
        program = _PROGRAM.format(packages=_PACKAGES, module=module, numbers=numbers)
        command = [executable, *flags, "-c", program, *words]
        return subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if prints and _is_inherited(1) else subprocess.DEVNULL,
            stderr=None if prints and _is_inherited(2) else subprocess.DEVNULL,
            pass_fds=passed,
            process_group=process_group,
            start_new_session=start_new_session,
        )


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # it is closed
        return False


def _above_standard(fd: int, copies: ExitStack) -> int:
    """The descriptor, or a copy that leaves room for input and output, where this process has closed its own."""
    if fd > _STANDARD:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STANDARD + 1)
    copies.callback(os.close, copy)
    return copy
