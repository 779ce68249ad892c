"""Weights in a file that all processes map: one copy for servers that start workers without a fork (uvicorn, ...).

``publish`` writes the file once, and ``load`` maps it::

    weights.publish(make, "/var/lib/app/net", key="2026-11")  # the first worker makes the model, the others wait
    net = guard(lambda: weights.load(Net, "/var/lib/app/net"), reload_on=Modified("/var/lib/app/net", atomic=True))
"""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from modelguard import _units
from modelguard.errors import InvalidOption, WeightsRefused
from modelguard.sharing import _weights_formats
from modelguard.sharing._weights_manifest import Manifest
from modelguard.sharing._weights_store import WeightsStore

__all__ = ["Published", "current", "load", "publish"]

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Published:
    """A version of published weights.

    Attributes:
        path: Where it is published.
        version: Its number; the first is 1, and newer versions have higher numbers.
        sha256: The hash of its content.
        bytes: The size of its files.
        kind: ``"torch"``, ``"numpy"`` or ``"pickle"``.
        key: The publisher's name for it.
        fresh: Whether this call has written it; False if it was already published.
    """

    path: Path
    version: int
    sha256: str
    bytes: int
    kind: str
    key: str | None
    fresh: bool


def publish(
    source: Any,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    allow_pickle: bool = False,
    wait_timeout: _units.Duration = "10m",
) -> Published:
    """Write weights into a file that all processes may map.

    The new version replaces the current one with a single rename, so a reader always sees one complete version. The
    previous version stays for readers that are about to open it, and older versions are removed; processes that have
    mapped a version keep it. Content that is already current is not written again.

    Several processes may call this at the same time: one writes, and the others wait. With a function and a key, only
    the first process makes the model.

    Args:
        source: A torch module, a state dict, a numpy array, or a mapping of names to arrays. With a ``key`` also a
            function without arguments that makes one of these; it is called only if the current version has another
            key.
        path: A file, in a folder that exists. It becomes a small text file; the data goes into ``PATH.d`` next to it.
            Only this user can read them.
        key: A name for these weights, such as the name or hash of the checkpoint.
        allow_pickle: Write any other object with ``joblib.dump``. Only the arrays in it are mapped, and loading it runs
            any code that it contains, so prefer arrays.
        wait_timeout: How long to wait for another publisher. The wait ends if that publisher dies.

    Returns:
        The version that is now current.

    Raises:
        InvalidOption: ``source`` cannot be mapped, or is a function without a ``key``.
        PublishFailed: The disk is full, permission is missing, or another publisher took too long. The previous version
            is still current.
        WeightsRefused: ``PATH.d`` belongs to another user, or other users may write to it.
        NotSupported: This is Windows, or the library of the format (torch, numpy, joblib) is not installed.
    """
    store = WeightsStore(_path(path))
    timeout = _units.seconds(wait_timeout, "wait_timeout", zero=True)
    _check_key(key)
    form = _weights_formats.format_of(source, allow_pickle=allow_pickle and not callable(source))
    if form is None and not callable(source):
        raise _weights_formats.unknown_source(source)
    if form is None and key is None:
        if not (
            inspect.isroutine(source) or isinstance(source, type | functools.partial)
        ):  # a model that can be called
            raise _weights_formats.unknown_source(source)
        why = "without a key, it is unknown whether the published weights are those that this function makes"
        raise InvalidOption("key", key, why=why, fix="Name what it makes, such as key='2026-11' or the file's hash.")
    if form is None and (found := _with_key(store, key)):  # reading needs no write permission
        return _published(store, found, fresh=False)
    with store.locked(timeout):
        if form is None:
            if found := _with_key(store, key):
                return _published(store, found, fresh=False)
            source = source()
            form = _weights_formats.format_of(source, allow_pickle=allow_pickle)
            if form is None:
                raise _weights_formats.unknown_source(source)
        manifest, fresh = store.write(form, source, key=key)
    return _published(store, manifest, fresh=fresh)


def load(build: Callable[..., M], path: str | os.PathLike[str], *, allow_pickle: bool = False) -> M:
    """Make a model whose weights are mapped from the published file; all processes that do this share one copy.

    Writing to a weight of a torch model, as a BatchNorm in training mode does to its buffers, copies the affected page
    for this process only; numpy arrays are read-only.

    Args:
        build: For torch: a function without arguments that makes the module; the content of its weights does not
            matter. It runs with parameters on the meta device, where they take no memory. For numpy and pickles: a
            function that takes the mapped array, the dict of arrays, or the object, and returns the model.
        path: The path that was given to :func:`publish`.
        allow_pickle: Whether the file may be a pickle, which runs any code that it contains.

    Returns:
        The result of ``build``.

    Raises:
        WeightsMissing: Nothing has been published there.
        WeightsRefused: The file is truncated, changed, another user's or writable by others; or a weight would not be
            in the mapping.
        WeightsMismatch: The weights do not fit the module: names, shapes or types differ.
        InvalidOption: ``build`` is not a function, or does not make a torch module.
        NotSupported: This is Windows, or the library of the format (torch, numpy, joblib) is not installed.
    """
    if not callable(build):
        fix = "Write weights.load(build, path): first the function that makes the model."
        raise InvalidOption("build", build, why="must be a function", fix=fix)
    store = WeightsStore(_path(path))
    while True:
        manifest, folder = store.checked()
        form = _weights_formats.format_named(manifest.kind, store.path, allow_pickle=allow_pickle)
        _check_build(build, manifest.kind)
        try:
            model: M = form.load(build, folder, manifest.details)
        except FileNotFoundError:
            # If there is a newer version, publishers have removed this one in the meantime.
            if store.current() == manifest:
                raise
        else:
            return model


def _check_build(build: Callable[..., Any], kind: str) -> None:
    how, given = ("without arguments", ()) if kind == "torch" else ("with what was published", (object(),))
    try:
        signature = inspect.signature(build)
    except (ValueError, TypeError):  # many built-in functions have none
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        fix = "Write load(Net, path)." if kind == "torch" else "Write load(lambda arrays: Model(arrays), path)."
        raise InvalidOption("build", build, why=f"is called {how}: {error}", fix=fix) from None


def current(path: str | os.PathLike[str]) -> Published:
    """Describe what is published at ``path``. This reads a small file; the weights themselves are not checked.

    Raises:
        WeightsMissing: Nothing has been published there.
        WeightsRefused: The file cannot be trusted or read.
        NotSupported: This is Windows.
    """
    store = WeightsStore(_path(path))
    return _published(store, store.current(), fresh=False)


def _path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not Path(path).name:
        raise InvalidOption("path", path, why="must be the path of a file", fix="Give a path such as 'weights/net'.")
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises PermissionError before Python 3.14
        fix = f"Give a file in it, such as {os.path.join(path, 'weights')!r}."  # noqa: PTH118 - as the caller wrote it
        raise InvalidOption("path", os.fspath(path), why="is a folder", fix=fix)
    return Path(path).absolute()


def _check_key(key: object) -> None:
    if key is not None and (not isinstance(key, str) or not key):
        raise InvalidOption("key", key, why="must be a string and not empty", fix="Give a string such as '2026-11'.")


def _with_key(store: WeightsStore, key: str | None) -> Manifest | None:
    """The current version, if it has this key and is intact."""
    try:
        manifest = store.current()
        return store.checked()[0] if manifest.key == key else None
    except WeightsRefused:
        return None


def _published(store: WeightsStore, manifest: Manifest, *, fresh: bool) -> Published:
    return Published(
        path=store.path,
        version=manifest.version,
        sha256=manifest.sha256,
        bytes=sum(file.size for file in manifest.files.values()),
        kind=manifest.kind,
        key=manifest.key,
        fresh=fresh,
    )
