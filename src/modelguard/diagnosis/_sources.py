"""What the source of an app or of a configuration says, read without running it.

Modules are followed in the order in which Python would import them, as far as they lie beside the app: that order
decides whether a variable is set before or after the library that reads it. What is computed, or done inside a
function, cannot be told from the source, and is not guessed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from modelguard.diagnosis._facts import Moment, Source, Variable
from modelguard.environment import _presets
from modelguard.errors import InvalidOption

__all__ = ["KNOWN", "THREAD_VARIABLES", "find_module", "read_source"]

#: What is kept of any environment, and of any source. No other variable's value is ever looked at or shown.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
KNOWN = frozenset(
    {
        *THREAD_VARIABLES,
        "CUDA_VISIBLE_DEVICES",
        "DNNL_PRIMITIVE_CACHE_CAPACITY",
        "LD_PRELOAD",
        "LRU_CACHE_CAPACITY",
        "MALLOC_ARENA_MAX",
        "MALLOC_CONF",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        "PYTHONMALLOC",
    }
)

#: Importing one of these loads a library that reads the thread variables.
_NATIVE = frozenset({"jax", "numpy", "scipy", "sklearn", "spacy", "tensorflow", "torch", "transformers"})

#: More files than any app has beside its models; a cycle of imports ends earlier, at the first file seen twice.
_MOST_FILES = 200


def find_module(name: str, folders: Iterable[Path]) -> list[Path]:
    """Find the files that importing a module reads: the packages above it, then itself.

    Args:
        name: With dots, such as ``"shop.api"``.
        folders: Where to look, in order.

    Returns:
        The files, empty if it is in none of the folders.
    """
    parts = name.split(".")
    for folder in folders:
        base = folder.joinpath(*parts)
        own = next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)
        if own is not None:
            above = (folder.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts)))
            return [*(file for file in above if file.is_file()), own]
    return []


def read_source(
    files: Sequence[Path],
    folders: Sequence[Path],
    *,
    moment: Moment = "app",
    hooks: Mapping[str, Moment] = MappingProxyType({}),
) -> Source:
    """Read files, and the modules beside them that they import.

    Args:
        files: The app's own, in the order in which they run.
        folders: Where modules of the same project are; others are not read.
        moment: When what stands at the top of the files runs: ``"app"`` or, for a configuration, ``"server"``.
        hooks: When functions run, by their names, where that is known.
    """
    reader = _Reader(folders, moment, hooks)
    for file in files:
        reader.read(file)
    return reader.source


class _Reader:
    """Collects what files say, in the order in which they would run."""

    def __init__(self, folders: Sequence[Path], moment: Moment, hooks: Mapping[str, Moment]) -> None:
        self.folders = folders
        self._moment: Moment = moment
        self._hooks = hooks
        self._seen: set[Path] = set()
        self._native_loaded = False
        self.source = Source()

    def read(self, file: Path) -> None:
        """Read a file once."""
        path = file.resolve()
        if path in self._seen or len(self._seen) >= _MOST_FILES:
            return
        self._seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            self._add(unknown=(*self.source.unknown, f"{file.name} could not be read: {type(error).__name__}"))
            return
        self._add(files=(*self.source.files, str(file)))
        _File(self, file, tree).read()

    def imports(self, name: str, where: str, function: str | None) -> None:
        """Take note of an import, and follow it if it stays within the project."""
        if name.startswith("modelguard.frameworks"):  # whose hooks prepare the models
            self.first("freezes", where)
        package = name.partition(".")[0]
        if package not in dict(self.source.imports):
            self._add(imports=(*self.source.imports, (package, where)))
        if function is None:
            self._native_loaded |= package in _NATIVE
        for file in find_module(name, self.folders):
            self.read(file)

    def sets(self, name: str, value: str | None, where: str, function: str | None) -> None:
        """Take note of a variable that is set."""
        if name in KNOWN:
            variable = Variable(name, value, self._when(function), where)
            self._add(variables=(*self.source.variables, variable))

    def applies(self, preset: str | None, where: str, function: str | None) -> None:
        """Take note of a preset that is applied, as the variables that it sets."""
        try:
            knobs = _presets.get(preset).knobs if preset else ()
        except InvalidOption:
            knobs = ()
        if not knobs:
            sentence = f"which preset {where} applies, and so which variables are set, cannot be told from the source"
            self._add(unknown=(*self.source.unknown, sentence))
            self.first("applies", where)
        for knob in knobs:
            self.sets(knob.name, knob.value, where, function)

    def first(self, field: str, where: str) -> None:
        """Take note of where something stands for the first time."""
        if getattr(self.source, field) is None:
            self._add(**{field: where})

    def threads(self, count: int, where: str) -> None:
        """Take note of ``torch.set_num_threads``."""
        self._add(threads=count, threads_by=where)

    def _when(self, function: str | None) -> Moment:
        if function is not None:
            moment = self._hooks.get(function)
            return "later" if moment is None else moment
        return "after import" if self._native_loaded else self._moment

    def _add(self, **fields: object) -> None:
        self.source = replace(self.source, **fields)  # type: ignore[arg-type] # each caller names its own field


class _File:
    """One file, walked statement by statement."""

    def __init__(self, reader: _Reader, file: Path, tree: ast.Module) -> None:
        self._reader = reader
        self._file = file
        self._tree = tree
        #: What local names stand for: ``{"mg": "modelguard", "freeze": "gc.freeze"}``.
        self._names: dict[str, str] = {}

    def read(self) -> None:
        later: list[ast.AST] = []
        for node in _in_order(self._tree, later):
            self._look(node, None)
        for function in later:
            for node in ast.walk(function):
                self._look(node, getattr(function, "name", ""))

    def _look(self, node: ast.AST, function: str | None) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node, function)
            case ast.Assign(targets=[ast.Subscript(value=target, slice=key)], value=value):
                if self._meaning(target) == "os.environ":
                    self._set(_text(key), _text(value), node, function)
            case ast.AugAssign(target=target, value=ast.Dict() as pairs):
                if self._meaning(target) == "os.environ":
                    self._set_all(pairs, node, function)
            case ast.Call():
                self._call(node, function)
            case _:
                pass

    def _import(self, node: ast.Import | ast.ImportFrom, function: str | None) -> None:
        where = self._where(node)
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                self._names[alias.asname or name] = name
                self._reader.imports(alias.name, where, function)
            return
        module = "." * node.level + (node.module or "")
        if node.level:
            self._follow_relative(node)
            return
        self._reader.imports(module, where, function)
        for alias in node.names:
            self._names[alias.asname or alias.name] = f"{module}.{alias.name}"
            for file in find_module(f"{module}.{alias.name}", self._reader.folders):
                self._reader.read(file)

    def _follow_relative(self, node: ast.ImportFrom) -> None:
        folder = self._file.resolve().parents[node.level - 1]
        names = [node.module] if node.module else [alias.name for alias in node.names]
        for name in names:
            for file in find_module(name, [folder]):
                self._reader.read(file)

    def _call(self, node: ast.Call, function: str | None) -> None:
        where = self._where(node)
        name = self._meaning(node.func)
        handler = _CALLS.get(name)
        if handler is not None:
            handler(self._reader, node, where)
        elif name in ("os.environ.setdefault", "os.putenv"):
            self._set_pair(node, function)
        elif name == "os.environ.update":
            for argument in node.args:
                self._set_all(argument, node, function)
            for keyword in node.keywords:
                self._set(keyword.arg, _text(keyword.value), node, function)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "apply":
            self._apply(node.func.value, where, function)
        self._look_for_cuda(node, where)

    def _apply(self, preset: ast.expr, where: str, function: str | None) -> None:
        """``presets.get("torch-cpu").apply()``, and several of them joined by ``|``."""
        if isinstance(preset, ast.BinOp) and isinstance(preset.op, ast.BitOr):
            self._apply(preset.left, where, function)
            self._apply(preset.right, where, function)
        elif isinstance(preset, ast.Call) and self._meaning(preset.func) in _PRESETS_GET:
            name = _text(preset.args[0]) if preset.args else None
            self._reader.applies(name, where, function)

    def _look_for_cuda(self, call: ast.Call, where: str) -> None:
        moved = isinstance(call.func, ast.Attribute) and call.func.attr == "cuda"
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if moved or any(re.fullmatch(r"cuda(:\d+)?", _text(argument) or "") for argument in given):
            self._reader.first("cuda", where)

    def _set(self, name: str | None, value: str | None, node: ast.AST, function: str | None) -> None:
        if name is not None:
            self._reader.sets(name, value, self._where(node), function)

    def _set_pair(self, call: ast.Call, function: str | None) -> None:
        match call.args:
            case [name, value]:
                self._set(_text(name), _text(value), call, function)
            case _:
                pass

    def _set_all(self, pairs: ast.expr, node: ast.AST, function: str | None) -> None:
        if isinstance(pairs, ast.Dict):
            for key, value in zip(pairs.keys, pairs.values, strict=True):
                self._set(_text(key), _text(value), node, function)

    def _meaning(self, node: ast.expr) -> str:
        """The full name that an expression stands for, such as ``"os.environ"``; empty if it is none."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self._meaning(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def _where(self, node: ast.AST) -> str:
        return f"{self._file.name} line {getattr(node, 'lineno', 1)}"


def _in_order(tree: ast.AST, later: list[ast.AST]) -> Iterator[ast.AST]:
    """What runs when a module is imported, in order. Bodies of functions are put aside."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            later.append(node)
            continue
        yield node
        yield from _in_order(node, later)


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _freezes(reader: _Reader, _node: ast.Call, where: str) -> None:
    reader.first("freezes", where)


def _guards(reader: _Reader, node: ast.Call, where: str) -> None:
    given = {keyword.arg: keyword.value for keyword in node.keywords}.get("reload_on")
    if given is not None and not (isinstance(given, ast.Constant) and given.value is None):
        reader.first("reloads", where)


def _limits_threads(reader: _Reader, node: ast.Call, where: str) -> None:
    match node.args:
        case [ast.Constant(value=int(count))]:
            reader.threads(count, where)
        case _:
            pass


_PRESETS_GET = ("modelguard.presets.get", "modelguard.environment._presets.get")
_CALLS: Mapping[str, Callable[[_Reader, ast.Call, str], None]] = {
    "gc.freeze": _freezes,
    "modelguard.prefork.prepare": _freezes,
    "modelguard.sharing._prefork.prepare": _freezes,
    "modelguard.ModelGuard": _guards,
    "modelguard.guard": _guards,
    "torch.set_num_threads": _limits_threads,
}
