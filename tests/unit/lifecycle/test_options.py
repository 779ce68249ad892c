from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, World

import modelguard
from modelguard import TTL, Backoff, Loading, MemoryGrowth, MemoryLimit, ModelGuard, Modified, Uses, guard, pool
from modelguard.errors import InvalidOption, NoMemoryLimit, PolicyNeverFires
from modelguard.lifecycle import system
from modelguard.lifecycle.system import use


def load() -> object:
    return object()


class Fonts:
    """A loader that is a method."""

    def load(self) -> object:
        return object()


class CallableModel:
    """A model that is passed in place of its loader."""

    def __call__(self, text: str) -> str:
        return text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("swap", "load_frist"),
        ("swap", None),
        ("reload_on", "1h"),
        ("reload_on", TTL),
        ("warmup", "text"),
        ("warmup", lambda: None),
        ("validate", lambda _new, _old, _strict: None),
        ("keep_previous", 1),
        ("unload", 3),
        ("loading", "2m"),
        ("wait_timeout", "soon"),
        ("drain_timeout", -1),
        ("defer", "5 parsecs"),
        ("defer", None),
        ("name", ""),
        ("name", 7),
        ("name", " "),
    ],
)
def test_options_are_checked_where_they_are_written(world: World, option: str, value: object) -> None:
    """An invalid option is rejected by ``guard()`` itself, not at the first call, and named."""
    with pytest.raises(InvalidOption) as refusal:
        world.guard(**{option: value})
    assert option == refusal.value.argument


def test_a_misspelt_swap_is_answered_with_the_choices(world: World) -> None:
    """The error says what may be written instead."""
    with pytest.raises(InvalidOption, match="Write one of 'auto', 'load_first', 'drain_first'"):
        world.guard(swap="drain-first")


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (object(), "must be a function without arguments, not an object"),
        (None, "not None.*Pass the function that makes the model, without calling it"),
        (
            lambda path: path,
            r"missing a required argument: 'path'.*Bind its arguments: load=lambda: make_model\(path\)",
        ),
        (CallableModel(), "missing a required argument: 'text'.*Pass the function that makes the model"),
    ],
)
def test_loaders_are_checked(loader: Any, why: str) -> None:
    """What cannot be called as a loader is rejected, with what to write instead."""
    with pytest.raises(InvalidOption, match=why):
        guard(loader, reload_on=None)


@pytest.mark.parametrize("loader", [dict, functools.partial(int, "7"), Fonts().load, lambda _path="x": object()])
def test_whatever_can_be_called_is_a_loader(world: World, loader: Callable[[], object]) -> None:
    """Classes, built-ins, partials, bound methods and functions with defaults can all load."""
    made = world.guard(loader)
    made.load()
    assert made.ready


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (load, f"{__name__}.load"),
        (Fonts().load, f"{__name__}.Fonts.load"),
        (functools.partial(int, "7"), "functools.partial"),
    ],
)
def test_a_guard_is_named_after_its_loader(loader: Callable[[], object], name: str) -> None:
    """A guard without a name gets its loader's, and shows it."""
    made = guard(loader, reload_on=None)
    assert (name, f"<ModelGuard {name!r} new>") == (made.name, repr(made))


def test_a_lambda_is_named_by_its_place() -> None:
    """A loader without a name gives its module and line."""
    loader = lambda: object()  # noqa: E731, PLW0108 - the form that users write
    assert f"{__name__}:{loader.__code__.co_firstlineno}" == guard(loader, reload_on=None).name


def test_durations_are_read_as_people_write_them(world: World) -> None:
    """Durations are seconds, timedelta or text; no time at all is allowed where it makes sense."""
    settings = world.guard(loading=Loading("1m30s"), wait_timeout=0, drain_timeout="500ms", defer="0s").engine.options
    assert (90, 0, 0.5, 0) == (
        settings.loading.timeout,
        settings.wait_timeout,
        settings.swap.drain_timeout,
        settings.swap.defer,
    )


def test_the_defaults_are_bounded() -> None:
    """Waiting and draining end after 30 s, deferring after 5 s, and failures back off from a second to a minute."""
    settings = guard(load, reload_on=None).engine.options
    assert ("auto", None, 30, 30, 5, Backoff("1s", "1m")) == (
        settings.swap.mode,
        settings.loading.timeout,
        settings.wait_timeout,
        settings.swap.drain_timeout,
        settings.swap.defer,
        settings.loading.backoff,
    )


@pytest.mark.parametrize("policy", [MemoryLimit("80%"), TTL("1h") | MemoryGrowth("20%")], ids=repr)
def test_a_share_needs_a_limit(world: World, policy: modelguard.Policy) -> None:
    """``"80%"`` without any memory limit is rejected, with what to write instead."""
    world.limit = None
    with pytest.raises(NoMemoryLimit, match=r"no cgroup limits this process.*Give bytes") as refusal:
        world.guard(reload_on=policy)
    assert "size" == refusal.value.argument


def test_a_pool_s_share_needs_a_limit_too(world: World) -> None:
    """A pool accepts a share of the limit as its budget, and rejects it if there is no limit."""
    world.limit = 200 * MB
    assert 120 * MB == world.pool(max_memory="60%").status().max_memory
    world.limit = None
    with pytest.raises(NoMemoryLimit, match="max_memory"):
        world.pool(max_memory="60%")


class TestNeverFires:
    """A policy that cannot fire causes a warning at the caller's line."""

    @staticmethod
    def warned(make: Callable[[], object], match: str) -> None:
        with pytest.warns(PolicyNeverFires, match=match) as warned:
            make()
        assert [__file__] == [warning.filename for warning in warned]

    @pytest.mark.parametrize("policy", [MemoryLimit("2 GB"), MemoryGrowth("2 GB")], ids=repr)
    def test_above_the_limit(self, world: World, policy: modelguard.Policy) -> None:
        """A bound at the process's own limit is never reached: the kernel kills the process first."""
        world.limit = 2000 * MB
        with use(lambda: world.system):
            self.warned(
                lambda: guard(load, reload_on=policy | Uses(5)),
                r"\('2 GB'\) never fires: the process is killed before that, at its limit of 2 GB",
            )

    def test_a_path_that_is_not_there(self, tmp_path: Path) -> None:
        """A watched path that does not exist is most likely misspelt."""
        missing = tmp_path / "wieghts.bin"
        self.warned(lambda: guard(load, reload_on=Modified(missing)), "wieghts.bin does not exist yet")

    def test_a_path_that_cannot_be_looked_at(self) -> None:
        """Such as one in another user's folder, or with a name that is too long for the system."""
        self.warned(lambda: guard(load, reload_on=Modified("a" * 5000)), "or cannot be read, so no change can be seen")

    @pytest.mark.parametrize(("path", "why"), [("a\0b", "a NUL"), (Path("a\0b"), "a NUL"), ("a\ud800", "a character")])
    def test_a_path_that_no_file_can_have(self, path: Any, why: str) -> None:
        """It is refused where it is written."""
        with pytest.raises(InvalidOption, match=rf"^path=.*: has {why}"):
            Modified(path)

    def test_a_folder_with_more_files_than_are_watched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No change of the others would be seen."""
        monkeypatch.setattr(system, "MAX_ENTRIES", 2)
        for name in "abc":
            (tmp_path / name).touch()
        self.warned(lambda: guard(load, reload_on=Modified(tmp_path)), "only the first 2 files of .* are watched")

    def test_in_the_one_line_form(self, tmp_path: Path) -> None:
        """The warning points at the caller's line in the decorator form as well."""

        def decorate() -> None:
            @guard(load, reload_on=Modified(tmp_path / "missing"))
            def use(model: object) -> object:
                return model

        self.warned(decorate, "missing")

    def test_a_neighbour_s_file_is_not_modelguard_s_own(self, tmp_path: Path) -> None:
        """The caller's line is found even where the caller's package has a name that begins like modelguard's."""
        neighbour = Path(modelguard.__file__).parent.with_name("modelguard_service") / "app.py"
        scope = {"guard": guard, "load": load, "policy": Modified(tmp_path / "missing")}
        with pytest.warns(PolicyNeverFires) as warned:
            exec(compile("guard(load, reload_on=policy)", neighbour, "exec"), scope)
        assert [str(neighbour)] == [warning.filename for warning in warned]

    def test_what_can_fire_is_not_warned_of(self, world: World, tmp_path: Path) -> None:
        """Bounds below the limit, without any limit, and paths that exist are taken as they are."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            world.guard(reload_on=MemoryLimit("2 GB") | Modified(tmp_path))
            world.limit = 3000 * MB
            made: ModelGuard[Any] = world.guard(reload_on=MemoryLimit("2 GB") | MemoryGrowth("50%"))
        assert "new" == made.status().state


class CallableModel:
    """A model that is passed in place of its loader."""

    def __call__(self, text: str) -> str:
        return text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("load", load),
        ("load", None),
        ("max_memory", -1),
        ("max_memory", "much"),
        ("max_memory", 1.5),
        ("max_models", 0),
        ("max_models", True),
        ("max_models", 2.5),
        ("reload_on", Uses(5)),
        ("reload_on", TTL("1h") & TTL("2h")),
        ("wait_timeout", "-1s"),
        ("warmup", 3),
        ("validate", lambda: True),
        ("unload", "x"),
        ("loading", "1s"),
    ],
)
def test_a_pool_s_options_are_checked_where_they_are_written(option: str, value: Any) -> None:
    """``pool()`` rejects invalid options at once, not at the first lease."""
    with pytest.raises(InvalidOption) as refusal:
        pool(**{"load": lambda key: key, "max_memory": "1 GB", option: value})
    assert option == refusal.value.argument


def test_a_pool_is_named_after_its_loader() -> None:
    """A pool without a name gets its loader's, and shows what it holds."""

    def voices(key: str) -> str:
        return key

    made = pool(voices, max_memory="1 GB")
    assert f"{__name__}.{voices.__qualname__}" == made.name
    assert f"<ModelPool {made.name!r}: 0 models, 0 B>" == repr(made)


def test_options_are_the_same_text_in_each_process() -> None:
    """Processes of one host share molds only where their options are equal, and compare these as text."""
    assert " at 0x" not in repr(guard(dict, reload_on=None).engine.options)
