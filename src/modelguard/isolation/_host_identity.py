"""What processes must have in common to share the molds of an isolated function, and under which name they meet."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Never

from modelguard.errors import InvalidOption
from modelguard.isolation import _code, _news, _target
from modelguard.isolation._host_messages import BrokerOrders, Identity
from modelguard.isolation._instructions import Origin
from modelguard.isolation._options import IsolationOptions
from modelguard.lifecycle._options import GuardOptions
from modelguard.lifecycle._policy import subset
from modelguard.lifecycle.policies import Changed

__all__ = ["NAME", "check_shareable", "for_broker", "identity_of", "orders_for", "prefix_of"]

#: Characters of the digest in a name.
_DIGEST = 24

#: The names of sockets: a digest of the identity, and a number.
NAME = re.compile(rf"[0-9a-f]{{{_DIGEST}}}\.[0-9]+")

#: Where each function was decorated: working directory and ``sys.path``.
_places: dict[_target.Reference, tuple[str, str]] = {}


def check_shareable(source: GuardOptions[Any], option: str = "scope", value: str = "host") -> None:
    """Check that a broker, or an owner, that does not import the application can decide when a mold is replaced.

    Args:
        source: Of the guard.
        option: Of ``isolate``, because of which it is not imported.
        value: Of that option.

    Raises:
        InvalidOption: A policy that asks for new weights is a class of the application's own, or has a function of its
            own; or the guard keeps its previous model.
    """
    if source.keep_previous and option == "scope":
        why = "cannot be used with keep_previous=True: the broker keeps no previous mold"
        raise InvalidOption("scope", "host", why=why, fix="Leave keep_previous out, or write scope='process'.")
    renewing = subset(source.reload_on, renews=True, unloads=True)
    for part in () if renewing is None else renewing.parts():
        if isinstance(part, Changed):
            why = "cannot be used with Changed, whose probe is a function of your own"
            fix = "Use TTL or Modified, or call reload() when it is time."
            raise InvalidOption(option, value, why=why, fix=fix)
        if type(part).__module__.partition(".")[0] != "modelguard":
            why = f"cannot be used with {type(part).__qualname__}, which asks for new models and is a class of your own"
            fix = "Use TTL or Modified, or call reload() when it is time."
            raise InvalidOption(option, value, why=why, fix=fix)


def identity_of(options: IsolationOptions, source: GuardOptions[Any]) -> Identity:
    """What must be equal. Not the environment and not the files of the code: these are compared one by one.

    Arguments count only where the function stands in the main script: those of a server are its own. Paths are those of
    the first call of this, when the function is decorated: later on, processes may change theirs.
    """
    module, name = options.function
    if options.function not in _places:
        _places[options.function] = os.getcwd(), repr(sys.path)  # noqa: PTH109 - as text
        _code.note_imported()
    folder, path = _places[options.function]
    return {
        "function": f"{module}.{name}",
        "file": str(getattr(sys.modules.get(module), "__file__", None)),
        "version": str(options.version),
        "options": repr(_without_code(options)),
        "guard": repr(replace(for_broker(source), load=str)),  # whose repr is the same in each process
        "arguments": repr(sys.argv) if module == "__main__" else "",
        "working directory": folder,
        "sys.path": path,
        "interpreter": f"{sys.executable} {sys.version}",
        "modelguard": _version(),
        # A folder that containers share must not make them share processes.
        "container": f"{os.stat('/proc/self/ns/mnt').st_ino} {os.stat('/proc/self/ns/pid').st_ino}",  # noqa: PTH116
    }


def prefix_of(identity: Identity) -> str:
    """How the names of the sockets start under which processes of this identity meet."""
    return f"{hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:_DIGEST]}."


def orders_for(
    folder: Path,
    socket: str,
    identity: Identity,
    options: IsolationOptions,
    source: GuardOptions[Any],
    *,
    paused: bool,
) -> BrokerOrders:
    """Make the orders of a broker that this process starts."""
    return BrokerOrders(
        starter=os.getpid(),
        folder=str(folder.absolute()),
        socket=socket,
        identity=identity,
        code=_code.imported,
        options=_without_code(options),
        source=for_broker(source),
        origin=Origin(_target.preparation(), _news.levels()),
        paused=paused,
    )


@functools.cache  # a call must not need a descriptor for it
def _version() -> str:
    try:
        return metadata.version("modelguard-lifecycle")
    except metadata.PackageNotFoundError:  # it runs from its sources
        return ""


def _without_code(options: IsolationOptions) -> IsolationOptions:
    """The options without what would need the application's modules, and does not apply to workers."""
    return replace(options, breaker=replace(options.breaker, ignore=(), reload=None))


def for_broker(source: GuardOptions[Any]) -> GuardOptions[Any]:
    """The options of a guard without what would need the application's modules."""
    return replace(
        source,
        family=None,
        load=_never_called,
        reload_on=subset(source.reload_on, renews=True, unloads=True),
        warmup=None,
        validate=None,
        unload=None,
        trim_schedule=None,
    )


def _never_called() -> Never:
    raise AssertionError("it has no model")
