"""PreforkOptions by environment variables, and whose models are shared."""

from __future__ import annotations

from typing import Any

import pytest

from modelguard import TTL, batched, guard, isolate, pool
from modelguard.errors import InvalidOption
from modelguard.frameworks import _workers
from modelguard.frameworks._workers import PreforkOptions, log_report
from modelguard.prefork import ForkReport, Hazard, prepare
from modelguard.sharing._prefork import PrepareOptions


def test_nothing_set_means_the_defaults_of_prepare() -> None:
    """Without variables it is as if ``prepare`` was called without options."""
    assert PreforkOptions() == PreforkOptions.read({})


def test_each_variable_is_read() -> None:
    """Words in any case, and durations with or without a unit."""
    assert PreforkOptions(
        freeze=False, immortalize=True, on_hazard="refuse", warm_timeout=120.0
    ) == PreforkOptions.read(
        {
            "MODELGUARD_FREEZE": "No",
            "MODELGUARD_IMMORTALIZE": " yes ",
            "MODELGUARD_ON_HAZARD": "REFUSE",
            "MODELGUARD_WARM_TIMEOUT": "2m",
        }
    )
    assert 90.0 == PreforkOptions.read({"MODELGUARD_WARM_TIMEOUT": "90"}).warm_timeout


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MODELGUARD_FREEZE", "auto"),
        ("MODELGUARD_IMMORTALIZE", "maybe"),
        ("MODELGUARD_ON_HAZARD", ""),
        ("MODELGUARD_WARM_TIMEOUT", "soon"),
        ("MODELGUARD_WARM_TIMEOUT", "0"),
        ("MODELGUARD_WARM_TIMEOUT", "nan"),
        ("MODELGUARD_WARM_TIMEOUT", ""),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_variables_name(name: str, text: str) -> None:
    """The error names the variable and what to write instead."""
    with pytest.raises(InvalidOption, match=name):
        PreforkOptions.read({name: text})


def test_marked_guards_are_shared_or_else_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked guards are shared; without a mark all guards are; without anything of modelguard's there is an error."""
    first, second = (guard(dict, reload_on=None, name=name) for name in ("b", "a"))
    marked = guard(dict, reload_on=None, name="c", prefork=True)
    for alive, expected in (((first, second), (second, first)), ((first, marked), (marked,))):
        monkeypatch.setattr(_workers, "all_guards", alive)
        assert expected == _workers.guards_to_share()
    monkeypatch.setattr(_workers, "all_guards", ())
    monkeypatch.setattr(_workers._batcher, "batchers", ())
    monkeypatch.setattr(_workers._isolated, "functions", ())
    monkeypatch.setattr(_workers, "all_pools", ())
    with pytest.raises(InvalidOption, match="made no guard"):
        _workers.guards_to_share()
    monkeypatch.undo()


@pytest.mark.parametrize("kind", ["batched", "isolated", "pool"])
def test_an_application_without_guards_shares_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server starts it all the same."""
    monkeypatch.setattr(_workers, "all_guards", ())
    made = {
        "batched": lambda: batched(max_size=2)(sorted),
        "isolated": lambda: isolate(workers=1)(len),
        "pool": lambda: pool(str, max_memory="1 GB"),
    }[kind]()
    assert () == _workers.guards_to_share()
    del made


@pytest.mark.parametrize("option", ["auto", True, False])
def test_servers_prepare_as_prepare_does(option: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option is passed on as it is: what ``auto`` means is decided in one place."""
    seen: list[object] = []
    monkeypatch.setattr(PrepareOptions, "prepare", lambda options, _guards: seen.append(options.immortalize))
    one = guard(dict, reload_on=TTL("1h"))
    PreforkOptions(immortalize=option).prepare([one])
    prepare(one, immortalize=option)
    assert [option, option] == seen


class Log:
    """As gunicorn's: levels and texts."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, message: str, *arguments: object) -> None:
        self.lines.append(f"info {message % arguments}")

    def warning(self, message: str, *arguments: object) -> None:
        self.lines.append(f"warning {message % arguments}")


@pytest.mark.parametrize(
    ("severity", "on_hazard", "level"),
    [
        ("warning", "fix", "warning"),
        ("fixed", "fix", "info"),
        ("fixed", "warn", "warning"),
        ("fatal", "warn", "warning"),
    ],
)
def test_a_hazard_that_no_child_repairs_is_logged_as_a_warning(severity: Any, on_hazard: str, level: str) -> None:
    """Logs are filtered by level: what may break a worker must not look like information."""
    hazard = Hazard("connection", "db:5432", "a connection is open", "Open it later.", severity)
    report = ForkReport(("nlp",), (hazard,), {}, 0, None, "not asked for", 0, 1.0)
    log = Log()
    log_report(log, report, on_hazard)
    assert ["info", "info", level] == [line.split()[0] for line in log.lines]
    assert str(hazard) in log.lines[-1]
