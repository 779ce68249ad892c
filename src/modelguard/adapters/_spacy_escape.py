"""Find results that would outlive the memory that they point into."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from itertools import islice
from types import CoroutineType, SimpleNamespace
from typing import Any

from spacy.language import Language
from spacy.lexeme import Lexeme
from spacy.strings import StringStore
from spacy.tokens import Doc, MorphAnalysis, Span, SpanGroup, Token
from spacy.tokens._dict_proxies import SpanGroups
from spacy.tokens.underscore import Underscore
from spacy.training import Example
from spacy.vocab import Vocab

from modelguard.errors import EscapedResult
from modelguard.lifecycle._lazy_results import is_lazy

#: The limits of the search: the number of objects, and of items in each container; and the depth.
MAX_OBJECTS = 10_000
MAX_DEPTH = 20

_POINTING = (
    Doc,
    Span,
    SpanGroup,
    SpanGroups,
    Token,
    Lexeme,
    MorphAnalysis,
    Underscore,
    Example,
    Vocab,
    StringStore,
    Language,
)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})


def refuse_escaped(function: Any, result: Any) -> None:
    """Search a result for objects that must not leave the zone.

    The search covers lists, tuples, sets, deques, dicts and their views, dataclasses and namespaces: at most 10,000
    objects, 10,000 items of each, 20 levels deep; plain values are not counted.

    Raises:
        EscapedResult: An object in the result points into the zone, or would do its work later.
    """
    if type(result) in _PLAIN:
        return
    found = _find(result)
    if found is None:
        return
    path, escaped = found
    if isinstance(escaped, CoroutineType):
        escaped.close()  # the caller does not get it, so nothing can await it
    kind = type(escaped).__qualname__
    # The error's traceback holds this frame, which must not keep the escaped object alive.
    del result, found, escaped
    raise EscapedResult(getattr(function, "__qualname__", repr(function)), path=path, kind=kind)


def _find(result: Any) -> tuple[str, Any] | None:
    """The path and the value of the first object that must not leave the zone."""
    todo, seen = [("result", result, 0)], set()
    for _ in range(MAX_OBJECTS):
        if not todo:
            break
        path, value, depth = todo.pop()
        if _escapes(value):
            return path, value
        if depth < MAX_DEPTH and id(value) not in seen:
            seen.add(id(value))
            todo += reversed([(place, child, depth + 1) for place, child in _children(path, value)])
    return None


def _escapes(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, _POINTING) or is_lazy(kind) or hasattr(kind, "__await__")


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container that are not plain values, with their paths."""
    if isinstance(value, dict):
        yield from _items(f"list({path})", value)
        yield from (
            (f"{path}[{key!r}]", item) for key, item in islice(value.items(), MAX_OBJECTS) if _needs_check(item)
        )
    elif isinstance(value, list | tuple | deque) and not hasattr(value, "_fields"):
        yield from _items(path, value)
    elif isinstance(value, set | frozenset | KeysView | ValuesView | ItemsView):
        yield from _items(f"list({path})", value)
    else:
        yield from ((f"{path}.{name}", getattr(value, name, None)) for name in _fields(value))


def _items(path: str, items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    few = enumerate(islice(items, MAX_OBJECTS))
    return ((f"{path}[{place}]", item) for place, item in few if _needs_check(item))


def _needs_check(item: Any) -> bool:
    return type(item) not in _PLAIN


def _fields(value: Any) -> Iterable[str]:
    """The field names of a record; empty for any other object."""
    if isinstance(value, tuple):
        return getattr(value, "_fields", ())
    if isinstance(value, SimpleNamespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (field.name for field in dataclasses.fields(value))
    return ()
