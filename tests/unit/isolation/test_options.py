"""What is refused where a function is isolated, and what each message says to do instead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from modelguard import TTL, Bounds, Changed, Host, Idle, Isolated, Swap, Uses, batched, guard, guard_of, isolate, pool
from modelguard.errors import InvalidOption, NotSupported
from modelguard.frameworks._web import Web
from modelguard.isolation import status
from modelguard.isolation._isolation_options import ScopeName
from modelguard.lifecycle.guard import guards

model = guard(dict, reload_on=None, name="model")
many = pool(dict, max_memory="1 GB")


@model
def predict(loaded: dict[str, int], text: str) -> str:
    """Use the model."""
    return text * len(loaded)


@guard(dict, reload_on=None, swap=Swap(keep_previous=True))
def kept(loaded: dict[str, int], text: str) -> str:
    """Use the model of a guard that keeps the previous one."""
    return text * len(loaded)


@guard(dict, reload_on=None, swap=Swap(replay=10))
def compared(loaded: dict[str, int], text: str) -> str:
    """Use the model of a guard that compares two."""
    return text * len(loaded)


def plain(texts: list[str]) -> list[str]:
    """Use none."""
    return texts


async def coroutine(text: str) -> str:
    """Use an event loop."""
    return text


async def parts(text: str) -> AsyncIterator[str]:
    """Stream."""
    yield text


@many(key="text")
def pooled(loaded: dict[str, int], text: str) -> str:
    """Use one of many."""
    return text * len(loaded)


class Service:
    """Has a method."""

    def method(self) -> None:
        """Do nothing."""

    @classmethod
    def of_class(cls, loaded: dict[str, int]) -> None:
        """Do nothing."""

    @staticmethod
    def static(loaded: dict[str, int], text: str) -> str:
        """Use the model."""
        return text * len(loaded)


def inner() -> Callable[[], None]:
    """Make a function that has no name of its own."""

    def hidden() -> None: ...

    return hidden


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda: 1, "is a lambda"),
        (inner(), "is defined inside another function"),
        (Service.method, r"is a method.*@staticmethod next to the def"),
        (Service.__dict__["of_class"], "is a method"),
        (model(Service.__dict__["of_class"]), "is a method, and a change"),
        (Service, "must be a function"),
        ("text", "must be a function"),
        (batched(max_size=2)(plain), "is batched or isolated already"),
    ],
)
def test_what_a_worker_could_not_import_is_refused(function: Any, why: str) -> None:
    """At the definition, with what to write instead, and not at the first call."""
    with pytest.raises(InvalidOption, match=why):
        isolate()(function)


@pytest.mark.parametrize(
    "function", [Service.__dict__["static"], model(Service.__dict__["static"])], ids=["plain", "guarded"]
)
def test_a_static_method_is_a_function(function: Any) -> None:
    """With a guard or without one, and with the name by which a worker finds it."""
    isolated = isolate()(function)
    assert "Service.static" == isolated.__qualname__  # type: ignore[attr-defined]
    assert f"{__name__}.Service.static" == isolated.name


def test_a_function_that_is_in_no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's, and that of a program by ``python -c`` or on standard input; the error names each of these."""
    import sys
    import types

    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))

    def cell() -> None: ...

    cell.__module__, cell.__qualname__ = "__main__", "cell"
    with pytest.raises(InvalidOption, match=r"notebook, python -c, standard input.*writefile"):
        isolate()(cell)


@pytest.mark.parametrize("name", ["__main__", "package.__main__"], ids=["archive or folder", "package"])
def test_a_function_of_a_main_module_that_runs_as_a_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A worker cannot import the ``__main__.py`` of a zipapp, a folder or a package without running it."""
    import sys
    import types
    from importlib.machinery import ModuleSpec

    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = __file__, ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, "__main__", main)

    def function() -> None: ...

    function.__module__, function.__qualname__ = "__main__", "function"
    with pytest.raises(InvalidOption, match=r"__main__\.py of an archive.*Move it to another module"):
        isolate()(function)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": 1.5},
        {"timeout": "soon"},
        {"timeout": 0},
        {"start": "thread"},
        {"bounds": 8},
        {"retry": 1},
        {"breaker": 5},
        {"name": " "},
        {"recycle_on": 5},
        {"scope": "cluster"},
        {"scope": None},
    ],
)
def test_invalid_options_are_named(options: dict[str, Any]) -> None:
    """The error says which option, and what to write."""
    with pytest.raises(InvalidOption, match=next(iter(options))):
        isolate(**options)(plain)


@pytest.mark.parametrize(
    ("make", "options"),
    [(Bounds, {"queue": 0}), (Bounds, {"transfer": "big"}), (Host, {"version": 2})],
)
def test_invalid_bounds_are_named_where_they_are_made(make: Any, options: dict[str, Any]) -> None:
    """The error says which option, and what to write."""
    with pytest.raises(InvalidOption, match=next(iter(options))):
        make(**options)


def test_a_broker_takes_no_policy_of_the_application() -> None:
    """It imports nothing of it, so such a policy could not be asked there."""

    class OnSundays(TTL):
        pass

    with pytest.raises(InvalidOption, match=r"scope.*OnSundays.*Use TTL or Modified"):
        isolate(scope="host", recycle_on=OnSundays("1h") | Uses(5))(plain)


def test_a_broker_asks_no_probe() -> None:
    """A probe is a function of the application."""
    with pytest.raises(InvalidOption, match=r"scope='host': cannot be used with Changed.*Use TTL or Modified"):
        isolate(scope="host", recycle_on=Changed(dict) & TTL("1h"))(plain)


def test_a_broker_keeps_no_previous_mold() -> None:
    """The message says which of the two to leave out."""
    with pytest.raises(InvalidOption, match=r"scope='host': cannot be used with keep_previous=True"):
        isolate(scope="host")(kept)


@pytest.mark.parametrize("scope", ["process", "host"])
def test_a_mold_compares_nothing(scope: ScopeName) -> None:
    """It has one model, and this process none; so ``replay`` would never reject anything."""
    with pytest.raises(InvalidOption, match=r"replay=.*under isolate each mold has one. Leave it out"):
        isolate(scope=scope)(compared)


def test_a_guards_own_policy_decides() -> None:
    """recycle_on beside a guard would be a second answer to one question."""
    with pytest.raises(InvalidOption, match="recycle_on"):
        isolate(recycle_on=TTL("1h"))(predict)


def test_a_pool_renews_its_own_models() -> None:
    """Workers of its keys may be recycled; what renews models is the pool's own policy."""
    assert isolate(recycle_on=Uses(5))(pooled)
    with pytest.raises(InvalidOption, match=r"recycle_on.*Give TTL, Changed or Idle to the pool"):
        isolate(recycle_on=TTL("1h") | Uses(5))(pooled)


def test_a_pools_molds_belong_to_their_process() -> None:
    """The budget of one process's pool cannot end molds that others use."""
    with pytest.raises(InvalidOption, match=r"scope='host'.*pool"):
        isolate(scope="host")(pooled)


def test_the_decorator_needs_its_parentheses() -> None:
    """@isolate without them gets a message that shows them."""
    with pytest.raises(InvalidOption, match=r"@isolate\(\)"):
        isolate(predict)  # type: ignore[arg-type]


def test_a_guard_above_is_refused() -> None:
    """The order of the decorators is told."""
    with pytest.raises(InvalidOption, match="above the guard's decorator"):
        model(isolate()(plain))


@pytest.mark.parametrize(
    "call",
    [
        lambda: isolate()(predict).aio("a"),
        lambda: isolate()(coroutine)("a"),
        lambda: isolate()(parts)("a").__anext__(),
    ],
    ids=["aio", "coroutine", "stream"],
)
def test_on_a_loop_that_is_not_asyncios_it_says_what_to_do(call: Callable[[], Any]) -> None:
    """Under trio, say: no call begins that its caller cannot wait for."""
    with pytest.raises(NotSupported, match=r"no asyncio event loop runs here.*trio"):
        call().send(None)


class TestReadiness:
    def test_its_guards_are_no_guards_of_this_process(self) -> None:
        """A readiness probe must not wait for a model that is never loaded here."""
        isolated: Isolated[Any, Any] = isolate()(predict)
        assert guard_of(predict) not in guards
        assert isolated in status.functions
        assert not isolated.ready

    def test_status_before_the_first_call(self) -> None:
        """Nothing has been started."""
        status = isolate(name="early")(predict).status()
        assert ("early", "new", None, ()) == (status.name, status.state, status.mold, status.workers)

    def test_the_probe_waits_for_it(self) -> None:
        """/readyz is false while no worker can answer, and names the function."""
        isolated = isolate(name="slow to load")(predict)
        probe = Web().probe("GET", "/readyz")
        assert probe is not None
        assert b"slow to load" in probe.body
        assert not isolated.ready

    def test_what_nobody_uses_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        """A function that is imported and never called keeps the service unready; the log names it and the remedy."""
        isolated, used = isolate(name="never called")(predict), guard(dict, reload_on=None, name="used")
        used.load()
        with caplog.at_level("WARNING", "modelguard"):
            for _ in range(3):
                assert Web(guards=[used, isolated]).probe("GET", "/readyz") is not None
        (told,) = (message for message in caplog.messages if "never called" in message)
        assert "nothing has called or loaded never called yet" in told
        assert "guards=[...] without it" in told


@pytest.mark.parametrize("guarded", [True, False])
def test_spawned_workers_have_no_mold_to_keep(guarded: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """The message says what to do instead."""
    policy = Idle("10m", keep="mold")
    function: Any = guard(dict, reload_on=policy)(predict.__wrapped__) if guarded else plain  # type: ignore[attr-defined]
    decorate: Any = isolate(start="spawn", recycle_on=None if guarded else policy)
    with pytest.raises(InvalidOption, match=r"keep='mold': needs workers that are forked.*Leave keep out"):
        decorate(function)
    assert isinstance(isolate()(function) if guarded else isolate(recycle_on=policy)(plain), Isolated)
