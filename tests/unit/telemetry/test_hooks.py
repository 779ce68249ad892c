"""Who receives the events; an observer must not break what it observes."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.lifecycle.world import until
from tests.unit.telemetry.every_event import EVERY

from modelguard import guard, telemetry
from modelguard.errors import InvalidOption
from modelguard.telemetry import (
    BatchErrored,
    BatchFinished,
    Event,
    LoadDiscarded,
    LoadFinished,
    LoadStarted,
    ReloadDue,
    add_hook,
    emit,
    set_hooks,
)
from modelguard.telemetry._hooks import muted

EVENT = LoadDiscarded(guard="nlp", cause="late")


@pytest.fixture(autouse=True)
def _hooks_of_this_test() -> Iterator[None]:
    yield
    set_hooks(None)


def test_a_hook_gets_every_event_from_now_on() -> None:
    """A hook is any callable of one event, called until it is removed."""
    seen: list[Event] = []
    emit(EVENT)
    remove = add_hook(seen.append)
    emit(EVENT)
    remove()
    emit(EVENT)
    assert [EVENT] == seen


def test_hooks_stand_beside_each_other() -> None:
    """Adding one keeps those that are there, the logging hook included; removing one keeps the others."""
    first, second = list[Event](), list[Event]()
    remove = add_hook(first.append)
    add_hook(second.append)
    emit(EVENT)
    remove()
    emit(EVENT)
    assert ([EVENT], [EVENT] * 2) == (first, second)


def test_a_hook_that_a_silent_loader_adds_gets_the_events_after_it() -> None:
    """Under gunicorn the master reports the loads of a mold. What a loader adds there is for the mold's workers."""
    seen: list[Event] = []
    with muted():
        remove = add_hook(seen.append)
        emit(EVENT)
    emit(EVENT)
    remove()
    assert [EVENT] == seen


def test_removing_twice_is_removing_once() -> None:
    """A hook that is gone already may be removed again."""
    seen: list[Event] = []
    remove = add_hook(seen.append)
    remove()
    remove()
    emit(EVENT)
    assert [] == seen


def test_a_hook_added_twice_is_removed_once() -> None:
    """What was added in two places and removed in one is still there."""
    seen: list[Event] = []
    hook = seen.append
    add_hook(hook)
    add_hook(hook)()
    emit(EVENT)
    assert [EVENT] == seen


def test_a_hook_that_cannot_be_compared_can_be_removed() -> None:
    """And so can those that stand behind it."""

    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError("not comparable")

        __hash__ = None  # type: ignore[assignment]

        def __call__(self, event: Event) -> None: ...

    seen: list[Event] = []
    removes = [add_hook(Odd()), add_hook(seen.append)]
    for remove in reversed(removes):
        remove()
    emit(EVENT)
    assert [] == seen


def test_batches_are_told_to_those_who_ask_for_them() -> None:
    """Their events cost each batch something: nobody pays for a hook that has gone, or that leaves them out."""
    assert not telemetry.listening()
    add_hook(print)()
    add_hook(print, level="INFO")
    assert not telemetry.listening()
    add_hook(print)
    assert telemetry.listening()


def test_all_hooks_can_be_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """``set_hooks`` replaces all of them, ``[]`` silences modelguard, None brings the logging hook back."""
    seen: list[Event] = []
    with caplog.at_level(logging.INFO, "modelguard"):
        set_hooks([seen.append])
        emit(EVENT)
        set_hooks([])
        emit(EVENT)
        assert ([EVENT], []) == (seen, caplog.records)
        set_hooks(None)
        emit(EVENT)
    assert ([EVENT], 1) == (seen, len(caplog.records))


class TestAHookThatRaises:
    def test_harms_no_other_hook(self, caplog: pytest.LogCaptureFixture) -> None:
        """The others get the event, and the log names the hook and the event."""
        seen: list[Event] = []

        def broken(event: Event) -> None:
            raise OSError("no metrics server")

        set_hooks([broken, seen.append])
        with caplog.at_level(logging.ERROR, "modelguard"):
            emit(EVENT)
        assert [EVENT] == seen
        (record,) = caplog.records
        assert "broken" in record.getMessage()
        assert "failed on LoadDiscarded" in record.getMessage()
        assert record.exc_info is not None

    def test_a_record_factory_that_raises_harms_no_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A log that cannot be written is no reason to have no model."""

        def factory(*_: object, **__: object) -> logging.LogRecord:
            raise ValueError("factory")

        nlp = guard(dict, reload_on=None)
        monkeypatch.setattr(logging, "raiseExceptions", False)
        before, level = logging.getLogRecordFactory(), logging.getLogger("modelguard").level
        logging.setLogRecordFactory(factory)
        logging.getLogger("modelguard").setLevel(logging.INFO)
        try:
            nlp.load()
        finally:
            logging.setLogRecordFactory(before)
            logging.getLogger("modelguard").setLevel(level)
        assert "ready" == nlp.status().state

    def test_harms_no_call(self, caplog: pytest.LogCaptureFixture) -> None:
        """A guard loads, serves, reloads and closes whatever its observers do."""

        def broken(event: Event) -> None:
            raise OSError("no metrics server")

        set_hooks([broken])
        with guard(object, reload_on=None) as model:
            model.reload()
            assert 2 == model.status().generation
        assert "closed" == model.status().state
        assert {"ERROR"} == {record.levelname for record in caplog.records}


class TestEvents:
    def test_are_values(self) -> None:
        """An event cannot be changed by one hook under the feet of the next."""
        with pytest.raises(dataclasses.FrozenInstanceError):
            EVENT.why = "another"  # type: ignore[misc]

    def test_tell_guard_process_and_time(self) -> None:
        """Each event carries its guard's name, the process in which it happened, and when."""
        before = time.time()
        event = LoadDiscarded(guard="nlp", cause="late")
        assert ("nlp", os.getpid()) == (event.guard, event.pid)
        assert before <= event.time <= time.time()

    @pytest.mark.parametrize("name", sorted({type(event).__name__ for event in EVERY}))
    def test_are_frozen_dataclasses_with_keywords(self, name: str) -> None:
        """Every event is one frozen dataclass, made by keywords alone, so that a field may be added."""
        kind = getattr(telemetry, name)
        assert issubclass(kind, Event)
        assert kind.__dataclass_params__.frozen
        assert {True} == {field.kw_only for field in dataclasses.fields(kind)}
        assert name == kind.__name__

    def test_are_found_under_telemetry(self) -> None:
        """Each event is a public name of ``modelguard.telemetry``; other names are not found."""
        assert {kind.__name__ for kind in (Event, *Event.__subclasses__())} <= set(telemetry.__all__)
        assert [] == [name for name in telemetry.__all__ if not hasattr(telemetry, name)]
        with pytest.raises(AttributeError, match="has no attribute 'ReloadDeu'"):
            telemetry.ReloadDeu  # type: ignore[attr-defined]  # noqa: B018 - it is looked up

    def test_come_while_no_lock_is_held(self) -> None:
        """A hook may ask the guard for its status, or order a reload, from any thread."""
        states: list[str] = []

        def curious(event: Event) -> None:
            if isinstance(event, LoadStarted | LoadFinished | ReloadDue):
                states.append(model.status().state)

        set_hooks([curious])
        model = guard(object, reload_on=None)
        model.load()
        until(lambda: len(states) > 1)  # a load returns when the model takes calls, and is told afterwards
        model.close()
        assert ["loading", "ready"] == states


class TestWrongHooks:
    @pytest.mark.parametrize("hook", ["print", None, 3])
    def test_what_cannot_be_called_is_rejected(self, hook: Any) -> None:
        """A hook that is not a function is rejected where it is added, and not logged at every event."""
        with pytest.raises(InvalidOption, match=r"hook=.*must be a function of one event"):
            add_hook(hook)
        with pytest.raises(InvalidOption, match=r"hook=.*must be a function of one event"):
            set_hooks([hook])

    def test_what_would_fail_at_every_event_is_rejected(self) -> None:
        """A coroutine function would do nothing, and one of two arguments would raise."""

        async def awaited(event: Event) -> None: ...

        for hook in (awaited, lambda: None, lambda event, more: None):
            with pytest.raises(InvalidOption, match=r"^hook=.* Pass the function itself"):
                add_hook(hook)  # type: ignore[arg-type]
            with pytest.raises(InvalidOption, match=r"^hook=.* Pass the function itself"):
                set_hooks([hook])  # type: ignore[list-item]

    @pytest.mark.parametrize("module", ["prometheus", "opentelemetry"])
    def test_a_function_that_makes_a_hook_has_to_be_called(self, module: str) -> None:
        """``add_hook(prometheus)`` without the parentheses is rejected with what to write."""
        makes = getattr(importlib.import_module(f"modelguard.telemetry.{module}"), module)
        with pytest.raises(InvalidOption, match=rf"Call it: add_hook\({module}\(\)\)"):
            add_hook(makes)

    @pytest.mark.parametrize("hooks", [len, "print", 3])
    def test_all_hooks_are_a_list(self, hooks: Any) -> None:
        """``set_hooks`` takes a list of hooks, or None; the hooks stay as they were after a mistake."""
        seen: list[Event] = []
        set_hooks([seen.append])
        with pytest.raises(InvalidOption, match=r"hooks=.*must be a list of hooks or None"):
            set_hooks(hooks)
        emit(EVENT)
        assert [EVENT] == seen


BATCH = BatchFinished(guard="f", size=8, waiting=0, wait_seconds=0.0, run_seconds=0.01, failed=0, reruns=0)
FAILED = next(event for event in EVERY if isinstance(event, BatchErrored))


def test_a_hook_may_have_a_level() -> None:
    """A hook at INFO is not called for every batch; one at WARNING gets what needs attention; removing works."""
    info, warning, everything = list[Event](), list[Event](), list[Event]()
    remove = add_hook(info.append, level="INFO")
    add_hook(warning.append, level=logging.WARNING)
    add_hook(everything.append)
    for event in (BATCH, EVENT, FAILED):
        emit(event)
    remove()
    emit(EVENT)
    assert ([EVENT, FAILED], [FAILED], [BATCH, EVENT, FAILED, EVENT]) == (info, warning, everything)


def test_an_event_says_its_level() -> None:
    """A hook can log each event at the level that the log of modelguard gives it."""
    assert [logging.DEBUG, logging.INFO, logging.WARNING] == [telemetry.level_of(one) for one in (BATCH, EVENT, FAILED)]


@pytest.mark.parametrize("level", ["info", "LOUD", None, 2.5, True])
def test_a_level_must_be_one_of_logging(level: Any) -> None:
    """What is no level of ``logging`` is refused where the hook is added."""
    with pytest.raises(InvalidOption, match="is not a level of logging"):
        add_hook(print, level=level)


def test_a_hook_with_a_level_that_fails_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The log names the function that was added, with and without a level."""

    def broken_hook(event: Event) -> None:
        raise OSError("broken")

    set_hooks([])
    add_hook(broken_hook, level="INFO")
    emit(EVENT)
    assert "broken_hook" in caplog.text
