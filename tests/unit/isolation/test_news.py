"""Reports of molds and workers in their owner."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from modelguard.isolation import _channel
from modelguard.isolation._mold_owner import Mold

if TYPE_CHECKING:
    import pytest


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("of a worker", logging.WARNING, __file__, 1, text, None, None)


class Supervisor:
    """Remembers what is watched no more."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def forget(self, fd: int) -> None:
        self.forgotten.append(fd)


def test_a_report_that_was_read_already_does_not_block_the_supervisor(caplog: pytest.LogCaptureFixture) -> None:
    """The end of a call replays all reports; the same turn of the thread finds their socket empty, and goes on."""
    ours, theirs = _channel.report_pair()
    supervisor = Supervisor()
    mold: Any = SimpleNamespace(_supervisor=supervisor)
    _channel.Reporter(theirs).emit(record("one"))
    _channel.replay(ours)
    Mold._read_news(mold, ours)
    assert (["one"], []) == (caplog.messages, supervisor.forgotten)
    _channel.Reporter(theirs).emit(record("two"))
    Mold._read_news(mold, ours)
    assert (["one", "two"], []) == (caplog.messages, supervisor.forgotten)
    theirs.close()
    Mold._read_news(mold, ours)
    assert [ours.fileno()] == supervisor.forgotten
    ours.close()


def test_reports_without_an_end_hold_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that log in a loop, faster than their owner can hand it on, do not keep it from its other molds."""
    heard: list[bytes] = []

    def emit_here(report: bytes) -> None:
        heard.append(report)
        assert len(heard) < 100_000

    monkeypatch.setattr(_channel, "receive", lambda _: b"a report")
    monkeypatch.setattr(_channel, "emit_here", emit_here)
    ours, theirs = _channel.report_pair()
    assert _channel.replay(ours)
    assert heard
    ours.close()
    theirs.close()


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
    assert logging.INFO == _channel.levels()["loud"]
