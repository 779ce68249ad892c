"""``modelguard_loader``: a loader that counts calls, delays or fails as required, and knows which models are alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle import system
from modelguard.runtime.fork_hooks import WeakRegistry

#: Real seconds to wait for a load.
_TIMEOUT = 10.0

_loaders: WeakRegistry[Loader] = WeakRegistry()


class Strict:
    """A misspelt attribute of it is an error, and does not go unnoticed."""

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        super().__setattr__(name, value)


class OfTest(Strict):
    """What a fixture gives to one test, and is of no use after it."""

    def __init__(self, fixture: str, test: str) -> None:
        self._fixture = fixture
        self._test = test
        self._over = False

    def end(self) -> None:
        """End the test."""
        self._over = True

    def _require_test(self, use: str) -> None:
        if self._over:
            why = f"belongs to {self._test}, which has ended"
            fix = "Request the fixture in each test that uses it, and do not keep it."
            raise InvalidOption(self._fixture, use, why=why, fix=fix)


class Model:
    """The model that a :class:`Loader` makes by default.

    Attributes:
        number: 1 for the first model of its loader, and so on.
        key: The key with which a pool has called the loader; None in a guard.
    """

    def __init__(self, number: int, key: object = None) -> None:
        self.number = number
        self.key = key

    def __repr__(self) -> str:
        return f"<Model {self.number}>" if self.key is None else f"<Model {self.number} of {self.key!r}>"


class Loader(Strict):
    """Makes models for guards (called without arguments) and pools (called with a key).

    Args:
        make: A loader to call instead of making a :class:`Model`; its calls are counted, and its models are tracked.

    Attributes:
        calls: How often it was called, including failures.
    """

    calls = 0

    def __init__(self, make: Callable[..., Any] | None = None) -> None:
        if make is not None:
            _units.function(make, "make", "a pool's key, or of nothing", fix="Pass the function itself, uncalled.")
        self._make = make
        self._delay = 0.0
        self._models: list[weakref.ref[Any]] = []
        self._failures: float = 0
        self._error: BaseException = OSError("modelguard_loader fails because of fail()")
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self._held = 0
        _loaders.add(self)

    def of(self, make: Callable[..., Any]) -> Loader:
        """Make another loader, which calls ``make``.

        Raises:
            InvalidOption: ``make`` is not callable.
        """
        return Loader(make)

    def __call__(self, *key: Any) -> Any:
        """Make a model."""
        with self._lock:
            self.calls += 1
            number = self.calls
            fails = self._failures > 0
            self._failures -= fails
        self._wait_until_open()
        system.default().sleep(self._delay)
        if fails:
            raise self._error
        model = Model(number, *key) if self._make is None else self._make(*key)
        try:
            self._models.append(weakref.ref(model))
        except TypeError:
            why = f"returned {_units.kind_of(model)}, which has no weak references, so it cannot be tracked"
            fix = "Return an object of your own class that contains it."
            raise InvalidOption("make", self._make, why=why, fix=fix) from None
        return model

    @property
    def alive(self) -> int:
        """How many of its models still exist. Garbage is collected first."""
        if any(ref() is not None for ref in self._models):
            gc.collect()
        return sum(ref() is not None for ref in self._models)

    @property
    def delay(self) -> float:
        """Seconds that each load takes; of ``modelguard_clock`` if the test uses it, otherwise real. Default 0."""
        return self._delay

    @delay.setter
    def delay(self, value: _units.Duration) -> None:
        self._delay = _units.seconds(value, "delay", zero=True)

    def fail(self, times: int | None = 1, *, error: BaseException | None = None) -> None:
        """Make the next loads fail.

        Args:
            times: The number of loads; None for all loads. 0 makes loads succeed again.
            error: The error that they raise. Default: an ``OSError``.

        Raises:
            InvalidOption: ``times`` is not a number of loads, or ``error`` is not an exception object.
        """
        if times is not None:
            _units.whole_number(times, "times", at_least=0, fix="Write times=2, or times=None for all.")
        if error is not None and not isinstance(error, BaseException):
            given = error.__name__ if isinstance(error, type) else "OSError"
            raise InvalidOption("error", error, why="must be an exception object", fix=f"Write error={given}('...').")
        with self._lock:
            self._failures = float("inf") if times is None else times
            self._error = error or OSError("modelguard_loader fails because of fail()")

    def hold(self) -> None:
        """Make loads wait until :meth:`let_go` is called."""
        self._reached.clear()
        self._open.clear()

    def reached(self) -> None:
        """Wait until a load is being held.

        Raises:
            TimeoutError: No load began within ten real seconds.
        """
        if not self._reached.wait(_TIMEOUT):
            raise TimeoutError(f"modelguard_loader: no load began within {_TIMEOUT:g} real seconds")

    def let_go(self) -> None:
        """Let the held loads continue."""
        self._open.set()

    @property
    def held(self) -> bool:
        """Whether a load is waiting for :meth:`let_go`."""
        return self._held > 0 and not self._open.is_set()

    def _wait_until_open(self) -> None:
        with self._lock:
            self._held += 1
        self._reached.set()
        try:
            self._open.wait()
        finally:
            with self._lock:
                self._held -= 1


def any_held() -> bool:
    return any(loader.held for loader in tuple(_loaders))


def let_all_go() -> None:
    for loader in tuple(_loaders):
        loader.let_go()
