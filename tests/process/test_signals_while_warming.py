"""A server that is told to end while a worker warms up ends at once: the signal must not be lost."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.process.gunicorn_server import APP, Gunicorn
from tests.process.harness import wait_until
from tests.process.test_uwsgi import APP as UWSGI_APP
from tests.process.test_uwsgi import FIT, UWSGI, Uwsgi

pytest.importorskip("gunicorn")

#: The second and later warm-ups in a worker take 20 s and say so: the first one in a child is the trial.
SLOW = APP.replace(
    'if (HERE / "cold").exists() and os.getpid() != PARENT:',
    """if os.getpid() != PARENT and (HERE / "tried").exists():
            (HERE / f"warming-{os.getpid()}").touch()
            time.sleep(20)
        if os.getpid() != PARENT:
            (HERE / "tried").touch()
        if (HERE / "cold").exists():""",
)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_gunicorn_ends_at_once_while_a_worker_warms_up(number: signal.Signals, tmp_path: Path) -> None:
    """No worker serves yet, so shutting down takes no grace period: not the 30 s that a lost signal costs."""
    with Gunicorn(tmp_path, "-w", "2", app=SLOW) as server:
        wait_until(lambda: len(list(tmp_path.glob("warming-*"))) >= 1, what="a worker warms up")
        started = time.monotonic()
        server.process.send_signal(number)
        assert 0 == server.process.wait(25), server.log
        assert time.monotonic() - started < 10


UWSGI_SLOW = UWSGI_APP.replace(
    'if (HERE / "cold").exists() and os.getpid() != MASTER:',
    """if os.getpid() != MASTER and (HERE / "tried").exists():
            (HERE / f"warming-{os.getpid()}").touch()
            time.sleep(20)
        if os.getpid() != MASTER:
            (HERE / "tried").touch()
        if (HERE / "cold").exists():""",
)


@pytest.mark.skipif(UWSGI is None, reason="uWSGI is not installed beside this Python: pip install uwsgi")
@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_uwsgi_ends_at_once_while_a_worker_warms_up(number: signal.Signals, tmp_path: Path) -> None:
    """The master waits for its workers for ever, so one that does not hear the signal keeps the server."""
    with Uwsgi(tmp_path, *FIT, "--processes", "2", app=UWSGI_SLOW) as server:
        wait_until(lambda: len(list(tmp_path.glob("warming-*"))) >= 2, what="the workers warm up")
        started = time.monotonic()
        server.process.send_signal(number)
        server.process.wait(40)
        assert time.monotonic() - started < 10, server.log
