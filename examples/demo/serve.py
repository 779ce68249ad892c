"""A uvicorn server that reports to the demo: python -m examples.demo.serve APP FOLDER

It prints each of modelguard's events as a line of JSON. It ends when its standard input does, so that no server
outlives the demo, however that ended.
"""

import dataclasses
import json
import os
import signal
import sys
import threading

import uvicorn

from modelguard import telemetry

#: How the line of an event begins.
EVENT = '{"event": '
#: Seconds that requests under way are given at the end.
GRACE = 3


def main(app: str, folder: str) -> None:
    """Serve ``app`` (written ``module:name``) from ``folder`` on a free port of the loopback interface."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    telemetry.add_hook(_report)
    uvicorn.run(app, app_dir=folder, port=0, access_log=False, timeout_graceful_shutdown=GRACE)


def _report(event: telemetry.Event) -> None:
    sys.stdout.write(json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)}) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    # os.read, because a thread inside sys.stdin would hold its lock when the interpreter shuts down.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
