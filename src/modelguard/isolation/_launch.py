"""Start a fresh interpreter that becomes a mold."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path

from modelguard.isolation import _news
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._instructions import Instructions

__all__ = ["Launched", "launch"]

#: Where this package is imported from: the fresh interpreter finds it there before it knows the owner's path.
_PACKAGES = str(Path(__file__).parents[2])

_PROGRAM = (
    "import sys; sys.path.insert(0, {packages!r}); from modelguard.isolation._mold import main; main({control}, {news})"
)


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
        fds = its_control.fileno(), its_news.fileno()
        program = _PROGRAM.format(packages=_PACKAGES, control=fds[0], news=fds[1])
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing
        executable = os.fsdecode(spawn.get_executable() or sys.executable)
        command = [executable, *flags, "-c", program, "mold", ".".join(instructions["function"])]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, process_group=0)  # noqa: S603
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
