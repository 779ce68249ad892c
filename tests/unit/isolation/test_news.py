"""Reports of molds and workers in their owner."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from modelguard.isolation import _supervisor
from modelguard.isolation._molds import Mold, SpawnedWorkers


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("of a worker", logging.WARNING, __file__, 1, text, None, None)


class Supervisor:
    """Remembers what is watched no more."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def forget(self, fd: int) -> None:
        self.forgotten.append(fd)


def read_by(kind: str, news: Any, supervisor: Any) -> None:
    """Do what a supervisor's thread does when the socket could be read a moment ago."""
    if kind == "mold":
        mold: Any = SimpleNamespace(_launched=SimpleNamespace(news=news), _supervisor=supervisor)
        Mold._read_news(mold)
    else:
        workers: Any = SimpleNamespace(_supervisor=supervisor)
        SpawnedWorkers._read_worker(workers, SimpleNamespace(news=news))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mold", "spawned"])
def test_a_report_that_was_read_already_does_not_block_the_supervisor(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a call replays all reports; the same turn of the thread finds their socket empty, and goes on."""
    ours, theirs = _supervisor.report_pair()
    supervisor = Supervisor()
    _supervisor.Reporter(theirs).emit(record("one"))
    _supervisor.replay_all(ours)
    read_by(kind, ours, supervisor)
    assert (["one"], []) == (caplog.messages, supervisor.forgotten)
    _supervisor.Reporter(theirs).emit(record("two"))
    read_by(kind, ours, supervisor)
    assert (["one", "two"], []) == (caplog.messages, supervisor.forgotten)
    theirs.close()
    read_by(kind, ours, supervisor)
    assert [ours.fileno()] == supervisor.forgotten
    ours.close()


def test_levels_are_read_while_other_threads_make_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mold is loaded in a thread of its own, beside imports and libraries that make their loggers."""
    every: dict[str, Any] = {}

    class Passing:
        """What is looked at while another thread makes a logger."""

        @property
        def __class__(self) -> type:  # type: ignore[override]
            every["another"] = logging.root
            return object

    loud = logging.getLogger("modelguard.loud")
    monkeypatch.setattr(loud, "level", logging.INFO)
    every |= {"passing": Passing(), "loud": loud}
    monkeypatch.setattr(logging.root.manager, "loggerDict", every)
    assert logging.INFO == _supervisor.levels()["loud"]
