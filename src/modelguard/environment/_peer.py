"""Who is at the other end of a Unix socket, as the kernel knows it."""

from __future__ import annotations

import socket
import struct

__all__ = ["peer"]

#: ``struct ucred`` of unix(7): process id, user, group.
_CREDENTIALS = struct.Struct("3i")


def peer(connected: socket.socket) -> tuple[int, int]:
    """The process id and the user at the other end (Linux only)."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _group = _CREDENTIALS.unpack(credentials)
    return pid, user
