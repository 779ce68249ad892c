"""``pause()`` and ``unload()`` with ``scope="host"``, without processes: what a broker hears."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from modelguard import TTL, Isolated, guard, isolate, telemetry
from modelguard.errors import LoadFailed, Reloading
from modelguard.isolation import _host_scope
from modelguard.isolation._host_scope import BrokerGone
from modelguard.telemetry import GuardPaused, GuardResumed


@guard(dict, reload_on=TTL("1h"), name="model")
def guarded(_: object, text: str) -> str:
    """A function to isolate."""
    return text


class Membership:
    """A broker that answers, hangs or is gone."""

    def __init__(self, behaviour: str = "answers") -> None:
        self.behaviour = behaviour
        self.heard: list[tuple[Any, ...]] = []
        self.pid, self.gone, self.ready, self.version = 1, False, False, None

    def ask(self, what: str, *details: Any, limit: float | None = None) -> None:
        assert limit or what != "pause"
        if self.behaviour == "hangs":
            raise BlockingIOError
        if self.behaviour == "is gone":
            self.gone = True
            raise BrokerGone
        self.heard.append((what, *details))

    def leave(self, _patience: float) -> None:
        self.gone = True

    def abandon(self) -> None:
        self.gone = True


class Host:
    """Where brokers are found; None: there is none."""

    def __init__(self) -> None:
        self.broker: Membership | None = None
        self.started: list[bool] = []
        self.on_pause: Any = None

    def election(self, *_: Any, elect: bool, paused: bool) -> Any:
        return SimpleNamespace(join=lambda _give_up: self.join(elect=elect, paused=paused))

    def membership(self, broker: Membership, on_pause: Any, _on_loss: Any) -> Membership:
        self.on_pause = on_pause
        return broker

    def join(self, *, elect: bool, paused: bool) -> Membership | None:
        if self.broker is None and elect:
            self.started.append(paused)
            self.broker = Membership()
        return self.broker

    def says(self, *, paused: bool) -> None:
        """The broker reports its state."""
        self.on_pause(paused)


class TestHost:
    @pytest.fixture
    def host(self, monkeypatch: pytest.MonkeyPatch) -> Host:
        """A host without a broker."""
        host = Host()
        monkeypatch.setattr(_host_scope, "Election", host.election)
        monkeypatch.setattr(_host_scope, "Membership", host.membership)
        return host

    @pytest.fixture
    def isolated(self, host: Host) -> Isolated[Any, Any]:
        """A function of that host."""
        del host
        return isolate(scope="host")(guarded)

    def test_the_broker_is_asked(self, host: Host, isolated: Isolated[Any, Any], seen: list[telemetry.Event]) -> None:
        """It decides for all processes; each reports a change once, whoever has asked."""
        host.broker = Membership()
        isolated.pause()
        host.says(paused=True)
        assert [("pause", True)] == host.broker.heard
        host.says(paused=False)  # another process has resumed
        isolated.resume()
        assert [("pause", True), ("pause", False)] == host.broker.heard
        told = [type(event) for event in seen if isinstance(event, GuardPaused | GuardResumed)]
        assert [GuardPaused, GuardResumed] == told

    def test_without_a_broker_none_is_started(self, host: Host, isolated: Isolated[Any, Any]) -> None:
        """The next one begins paused; one that another process has started hears it when this one finds it."""
        isolated.pause()
        assert ([], True) == (host.started, isolated.status().paused)
        isolated.load()
        assert [True] == host.started
        assert host.broker is not None
        assert [("pause", True), ("load",)] == [host.broker.heard[0], host.broker.heard[-1]]

    def test_one_that_was_found_later_hears_it_once(self, host: Host, isolated: Isolated[Any, Any]) -> None:
        """What it says of itself meanwhile does not undo what was asked for."""
        isolated.pause()
        found = host.broker = Membership()
        assert not isolated.ready
        host.says(paused=False)
        assert [("pause", True)] == found.heard
        assert not isolated.ready
        assert [("pause", True)] == found.heard

    def test_the_next_broker_is_paused_as_the_last_one_was(self, host: Host, isolated: Isolated[Any, Any]) -> None:
        """A broker that crashes must not end a pause; nor does it begin one that somebody has ended."""
        for paused in (True, False):
            host.broker = Membership()
            isolated.ready  # noqa: B018 - it finds the broker
            host.says(paused=paused)
            host.broker.gone, host.broker = True, None
            isolated.load()
            assert paused is host.started[-1]
            assert host.broker is not None
            host.broker.gone = True

    def test_a_broker_that_ends_in_this_moment(self, host: Host, isolated: Isolated[Any, Any]) -> None:
        """The next one hears it."""
        host.broker = Membership("is gone")
        isolated.pause()
        host.broker = Membership()
        isolated.load()
        assert ("pause", True) == host.broker.heard[0]

    def test_a_broker_that_hangs(self, host: Host, isolated: Isolated[Any, Any]) -> None:
        """It is an error, and nothing is pending: an operator asks again."""
        host.broker = Membership("hangs")
        with pytest.raises(LoadFailed, match="its broker has not answered within 5 s"):
            isolated.pause()
        assert not isolated.status().paused
        with pytest.raises(Reloading):
            isolated.unload(timeout="1ms")

    def test_unload_starts_no_broker(self, host: Host, isolated: Isolated[Any, Any]) -> None:
        """Without one there is no mold."""
        isolated.unload()
        assert [] == host.started
        host.broker = Membership("is gone")
        isolated.unload()

    def test_a_forked_child_of_a_process_without_a_broker(self, host: Host, isolated: Isolated[Any, Any]) -> None:
        """It is paused too; with a broker, a child asks that one."""
        isolated.pause()
        isolated.renew_in_child()
        assert isolated.status().paused
        host.broker = Membership()
        isolated.resume()
        host.broker.gone, host.broker = True, None
        isolated.renew_in_child()
        assert not isolated.status().paused
