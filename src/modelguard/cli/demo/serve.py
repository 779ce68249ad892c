"""A uvicorn server that reports to the demo: ``python -m modelguard.cli.demo.serve APP FOLDER``.

Its standard output carries one JSON object per line: first the port, then modelguard's events. It ends when its
standard input does, so that no server outlives the demo, however that ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from typing import Any

from modelguard import telemetry

#: Seconds that requests under way are given at the end.
GRACE = 3


def main(app: str, folder: str) -> None:
    """Serve ``app`` (written ``module:name``) from ``folder`` on a free port of the loopback interface."""
    import uvicorn

    threading.Thread(target=_end_with_parent, daemon=True).start()
    telemetry.add_hook(lambda event: _tell(type(event).__name__, dataclasses.asdict(event)))
    sys.path.insert(0, folder)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=GRACE)
    socket = config.bind_socket()
    _tell("Bound", {"port": socket.getsockname()[1]})
    uvicorn.Server(config).run(sockets=[socket])


def _tell(event: str, fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    # os.read, because a thread inside sys.stdin would hold its lock when the interpreter shuts down.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
