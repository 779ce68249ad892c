"""The formats of published weights, one for each library. Each is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from modelguard import _extras, _units
from modelguard._units import format_bytes
from modelguard.errors import InvalidOption, WeightsRefused
from modelguard.facts import _proc
from modelguard.facts._proc import MemoryMapping

#: Opens a new file. The name consists of letters, digits and one dot.
Create: TypeAlias = Callable[[str], AbstractContextManager[IO[bytes]]]


#: How the weights of one library are written and mapped: a module with its ``kind``, a function ``write(source,
#: create)`` that returns as plain JSON what ``load(build, folder, details)`` needs in addition to the files.
WeightsFormat: TypeAlias = Any

# Kind -> the module that is its format, by name, so that nothing is imported here.
_MODULES = {
    "torch": "modelguard.adapters._torch_weights",
    "numpy": "modelguard.adapters._numpy_weights",
    "pickle": "modelguard.adapters._joblib_weights",
}
# Full name of a class -> the kind of the format that writes its objects, or mappings of names to its objects.
_MODELS = {"torch.nn.modules.module.Module": "torch", "numpy.ndarray": "numpy"}
_VALUES = {"torch.Tensor": "torch", "numpy.ndarray": "numpy"}

_SAFE = "a torch module, a state dict, a numpy array or a mapping of names to arrays"


def format_of(source: object, *, allow_pickle: bool) -> WeightsFormat:
    """The format that can publish ``source``; None if there is none."""
    kind = _kind(source) or ("pickle" if allow_pickle else None)
    return None if kind is None else _import(kind)


def format_named(kind: str, path: Path, *, allow_pickle: bool) -> WeightsFormat:
    """The format that a manifest names."""
    if kind not in _MODULES:
        fix = "Load them with the modelguard that published them."
        raise WeightsRefused(path, why=f"the kind {kind!r} is unknown", fix=fix)
    if kind == "pickle" and not allow_pickle:
        why = "they are a pickle, and loading a pickle runs any code that it contains"
        fix = f"Publish {_SAFE}; or, if you trust its author, give allow_pickle=True."
        raise WeightsRefused(path, why=why, fix=fix)
    return _import(kind)


def unknown_source(source: object) -> InvalidOption:
    why = f"{_units.kind_of(source)} cannot be mapped safely"
    if isinstance(source, Mapping):
        kinds = sorted({type(value).__name__ for value in source.values()})
        given = f"but are of the types {' and '.join(kinds)}" if kinds else "and there are none"
        why = f"its values must all be arrays or all be tensors, {given}"
    fix = f"Give {_SAFE}, or a function that makes one; or allow_pickle=True for an object that contains arrays."
    return InvalidOption("source", type(source).__name__, why=why, fix=fix)


def _kind(source: object) -> str | None:
    if isinstance(source, Mapping):
        kinds = {_find(value, _VALUES) for value in source.values()}
        return kinds.pop() if len(kinds) == 1 else None
    return _find(source, _MODELS)


def _find(value: object, table: Mapping[str, str]) -> str | None:
    names = map(_units.type_name, type(value).__mro__)
    return next((table[name] for name in names if name in table), None)


def _import(kind: str) -> WeightsFormat:
    return _extras.load(_MODULES[kind], f"publishing and loading weights of the kind {kind!r}")


# Check whether data is in a mapped file, so that all processes that map the file share the memory.


#: How many names a message lists.
_NAMED = 3


def few(words: Sequence[str], separator: str = "; ") -> str:
    return separator.join([*words[:_NAMED], *(["..."] if len(words) > _NAMED else ())])


class Block(NamedTuple):
    """Data of a model, by its name there."""

    name: str
    start: int
    size: int


def require(blocks: Iterable[Block], files: Iterable[Path], *, fix: str, root: Path = _proc.ROOT) -> None:
    """Reject data that is not in the mappings of files. Without ``/proc``, as on macOS, all data is accepted."""
    files = list(files)
    found = _mappings_of(files, root)
    if found is None:
        return
    outside = [block for block in blocks if block.size and not _inside(block, found)]
    if outside:
        names = few([block.name for block in outside], ", ")
        size = format_bytes(sum(block.size for block in outside))
        why = f"{size} of the model are not in the mapped file, so each process would have its own copy: {names}"
        raise WeightsRefused(files[0].parent, why=why, fix=fix)


def mapped_bytes(file: Path, *, root: Path = _proc.ROOT) -> int | None:
    """How many bytes of a file are mapped into this process; None without ``/proc``."""
    found = _mappings_of([file], root)
    return None if found is None else sum(mapping.end - mapping.start for mapping in found)


def _mappings_of(files: Iterable[Path], root: Path) -> list[MemoryMapping] | None:
    mappings = _proc.if_readable(_proc.maps, None, root)
    if mappings is None:
        return None
    # Compared by the end of the name, which contains the content's hash. Devices and inodes would not do: on layered
    # file systems they differ between maps and stat(). A version that was removed in the meantime is still mapped.
    ends = {f"/{file.parent.name}/{file.name}" for file in files}
    # With a shared and writable mapping a process could write into the file, so it must not be used for weights.
    return [mapping for mapping in mappings if _end(mapping.name) in ends and mapping.access != "rw-s"]


def _end(name: str) -> str:
    return "/" + "/".join(name.rsplit("/", 2)[1:])


def _inside(block: Block, found: Iterable[MemoryMapping]) -> bool:
    # Both ends are checked: the kernel splits a mapping if some of its pages have another protection.
    return all(
        any(mapping.start <= address < mapping.end for mapping in found)
        for address in (block.start, block.start + block.size - 1)
    )
