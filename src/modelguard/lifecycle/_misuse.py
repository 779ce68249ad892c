"""Likely mistakes in the use of a decorated function, found and explained."""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

from modelguard import _units
from modelguard.errors import InvalidOption

#: A method's first parameter.
_RECEIVERS = frozenset({"self", "cls", "mcs"})
#: Objects of web frameworks that hold the functions which they call: the module and name of each class.
_HOLDERS = (("starlette.routing", "Route"), ("flask", "Flask"), ("flask", "Blueprint"))


class _Required:
    def __repr__(self) -> str:
        return "<required>"

    def __reduce__(self) -> str:  # one object, also for those that copy defaults, such as FastAPI
        return "REQUIRED"


#: The default of a required option: without one, Python's own message would come before that of :func:`check_keyword`.
REQUIRED: Any = _Required()


def wrong_arguments(
    error: TypeError, function: Callable[..., Any], args: Any, kwargs: Any, *, callers: int = 1
) -> TypeError | None:
    """Explain a call that does not fit a decorated function's signature.

    Args:
        error: What the call raised.
        function: The function itself, whose first parameter takes the model.
        args: What the caller gave, without the model.
        kwargs: The same.
        callers: How many frames lie between the one that asks, which counts, and the function.

    Returns:
        The error to raise instead, or None if the function accepted its arguments and raised ``error`` itself.
    """
    traceback = error.__traceback__
    for _ in range(callers):
        if traceback is None:
            return None
        traceback = traceback.tb_next
    if traceback is not None:  # a frame of the function was entered
        return None
    if (signature := _units.signature_of(function)) is None:
        return None
    name = getattr(function, "__qualname__", repr(function))
    first = next(iter(signature.parameters), None)
    if first in kwargs and first in _RECEIVERS:  # a method that is called through its class: wrapt does not bind it
        return TypeError(
            f"{name}() got its instance by name. Pass it by position: {name}(instance), not {first}=instance."
        )
    seen_by_callers = without_model(function, at=0)
    try:
        seen_by_callers.bind(*args, **kwargs)
    except TypeError as misfit:
        why = _unknown(seen_by_callers, kwargs) or misfit
        return TypeError(
            f"{name}{seen_by_callers}: {why}. The guard passes the model as the first argument: leave the model out "
            f"of the call, and give the function a parameter for it."
        )
    return None


class Misused(Exception):
    """A call did not fit the function's signature, as ``error`` explains: that says nothing about the model."""

    def __init__(self, error: TypeError) -> None:
        super().__init__(error)
        self.error = error


def called(function: Callable[..., Any], model: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a decorated function.

    Raises:
        Misused: The call does not fit its signature. :meth:`Lease.end_with` raises the error for the caller.
        Exception: What it raised itself.
    """
    try:
        return function(model, *args, **kwargs)
    except TypeError as error:
        if (misuse := wrong_arguments(error, function, args, kwargs)) is not None:
            raise Misused(misuse) from None
        raise


def _unknown(signature: inspect.Signature, kwargs: dict[str, Any]) -> str:
    """A misspelt keyword, which Python names before what is missing because of it."""
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values()):
        return ""
    return next(
        (f"got an unexpected keyword argument {name!r}" for name in kwargs if name not in signature.parameters), ""
    )


def check_keyword(argument: str, value: object, others: tuple[object, ...], *, fix: str) -> None:
    """Check that a required option is there, and passed by keyword.

    Args:
        argument: Its name.
        value: What was given; :data:`REQUIRED` if nothing was.
        others: What was passed by position instead.
        fix: What to write.
    """
    if others:
        raise InvalidOption(argument, others[0], why="is passed by position", fix=fix)
    if value is REQUIRED:
        raise TypeError(f"{argument}= is missing. {fix}")


def check_ask(ask: object) -> None:
    _units.function(ask, "ask", "the reasons", fix="Give a function that takes the reasons.", arguments=1)


def check_not_routed(function: Any) -> None:
    """Check that no web framework calls ``function`` without the decorator that is about to be put on it.

    ``@nlp`` above ``@app.get(...)`` decorates too late: the framework has registered the plain function, takes the
    model for a parameter of the request, and answers 422. The search takes milliseconds, so it is made only for
    functions that are :func:`in_use`.
    """
    kinds = tuple(vars(sys.modules[module])[name] for module, name in _HOLDERS if module in sys.modules)
    if not kinds or not isinstance(function, FunctionType):
        return
    # By their types and not by isinstance(): objects that pose as others may run code of their own.
    everything = gc.get_objects()
    matching = {kind for kind in set(map(type, everything)) if issubclass(kind, kinds)}
    holders = (one for one in everything if type(one) in matching)
    holder = next((one for one in holders if _calls(one, function)), None)
    if holder is not None:
        framework = type(holder).__module__.partition(".")[0]
        why = f"is already registered with {framework}, which would call it without the model"
        fix = "Put the guard's decorator below the route's, next to the def."
        raise InvalidOption("function", function, why=why, fix=fix)


def in_use(references: int) -> bool:
    """Whether somebody else may refer to a function that a decorator's ``__call__`` got, by ``sys.getrefcount`` there.

    Without the GIL the count does not tell: references on the interpreter's stack are not in it.
    """
    return references > _FRESH or "t" in sys.abiflags


class _CountReferences:
    """A decorator that is called like a guard."""

    def __call__(self, function: Any, /) -> int:
        return sys.getrefcount(function)


@_CountReferences()
def _FRESH() -> None: ...  # noqa: N802 - the count that this interpreter gives for a function that nobody else knows


def _calls(holder: Any, function: FunctionType) -> bool:
    handlers = vars(holder).get("view_functions", {}).values()  # Flask's, by name
    return vars(holder).get("endpoint") is function or any(handler is function for handler in handlers)


# Signatures of functions before and after they are decorated.


_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def plain_function(function: Any) -> Any:
    return function.__func__ if isinstance(function, classmethod | staticmethod) else function


def takes_positional(function: Any) -> bool:
    """Whether it takes a positional argument, as far as its signature is known."""
    signature = _units.signature_of(function)
    return signature is None or any(one.kind not in _BY_NAME for one in signature.parameters.values())


def first_name(function: Any) -> str | None:
    """The name of its first parameter, None if it has none or no signature."""
    signature = _units.signature_of(function)
    return None if signature is None else next(iter(signature.parameters), None)


def receivers(function: Any) -> int:
    """How many parameters come before the model: 1 in what is written as a method, else 0.

    A method is decorated while its class is being defined, and its first parameter is called ``self``, ``cls`` or
    ``mcs``. Afterwards, as in ``guard(Model.predict)``, ``self`` is the model itself.
    """
    if isinstance(function, classmethod):
        return 1
    if isinstance(function, staticmethod) or first_name(function) not in _RECEIVERS:
        return 0
    return int(_is_being_defined(getattr(function, "__qualname__", "").rpartition(".")[0]))


def without_model(function: Any, *, at: int) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if len(parameters) > at and parameters[at].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[at]
    return signature.replace(parameters=parameters)


def call_parameters(function: Any) -> inspect.Signature:
    """The signature that callers of a decorated function see, without ``self``."""
    before = receivers(function)
    signature = without_model(plain_function(function), at=before)
    return signature.replace(parameters=list(signature.parameters.values())[before:])


def _is_being_defined(name: str) -> bool:
    """Whether the body of the class of this qualified name is running further up on the stack."""
    # Only bodies of classes and modules have no optimized locals, and only a class has its name among them.
    return any(
        not frame.f_code.co_flags & inspect.CO_OPTIMIZED and frame.f_locals.get("__qualname__") == name
        for frame, _ in traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 - inspect.stack() reads every source file
    )
