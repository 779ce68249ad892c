"""Published weights of torch modules: written as a state dict, and mapped into a module without its own weights.

State dicts are written by ``torch.save``, and always loaded with ``weights_only``.
"""

from __future__ import annotations

import gc
import logging
import mmap
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from modelguard import _units
from modelguard.errors import InvalidOption, WeightsMismatch
from modelguard.sharing import _weights_formats
from modelguard.sharing._weights_formats import few

if TYPE_CHECKING:
    from modelguard.sharing._weights_formats import Create

kind = "torch"

_FILE = "weights.pt"
#: Where modules keep what is registered.
_REGISTERED = ("_parameters", "_buffers", "_modules")
#: What leads out of a module, to the rest of the program, or to weights that no call reads: an optimizer's, and those
#: of the module that a method in TorchScript was made of.
_ELSEWHERE = (type, ModuleType, CodeType, logging.Logger, torch.optim.Optimizer, torch._C.ScriptMethod)  # noqa: SLF001
#: So many objects that attributes lead to are looked at, in some 30 ms.
_MOST_OBJECTS = 50_000
_FIX = "build() must make the same module as the one whose weights were published."


def write(source: Any, create: Create) -> Mapping[str, Any]:
    """Write the state dict of a module, or the given one."""
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    plain = OrderedDict((name, _checked(name, value)) for name, value in state.items())
    if not plain:
        why = "has neither parameters nor buffers; those of a frozen TorchScript module are in its code"
        fix = "Publish the module as it is before torch.jit.freeze(), or load its own file."
        raise InvalidOption("source", type(source).__name__, why=why, fix=fix)
    # The version of a state dict, which modules check; torch keeps it as an attribute.
    plain._metadata = getattr(state, "_metadata", {})  # type: ignore[attr-defined]  # noqa: SLF001
    try:
        with create(_FILE) as file:
            torch.save(plain, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # a full disk, for which torch raises its own error
            raise error.__context__ from None
        why = f"cannot be written by torch: {error}"
        raise InvalidOption("source", "state dict", why=why, fix="Publish tensors that torch.save() takes.") from error
    return {}


def load(build: Callable[..., Any], folder: Path, details: Mapping[str, Any]) -> Any:  # noqa: ARG001
    """Make a module whose parameters and buffers are in the mapped file."""
    file = folder / _FILE
    # Never MAP_SHARED, even if the application has chosen it: a forward pass must not write into the file.
    with torch.serialization.set_default_mmap_options(mmap.MAP_PRIVATE):
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    module = _built(build, state)
    ties = _ties(module)
    _fill_ties(state, ties)
    _check_types(folder, module, state)
    before = _registered(module)
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:  # names or shapes; torch lists them
        raise WeightsMismatch(folder, why=" ".join(str(error).split()), fix=_FIX) from error
    _tie(module, ties)
    if kept := _kept(module, before):
        why = f"attributes or buffers have registered tensors too, and would not get the file's content: {few(kept)}"
        raise WeightsMismatch(folder, why=why, fix="Use the parameter or buffer itself, or set them after load().")
    if left := sorted(_on_meta(module)):
        why = f"build() leaves tensors without content that are not in the file: {few(left)}"
        raise WeightsMismatch(folder, why=why, fix="Create them outside of torch.device('meta').")
    _weights_formats.require(_blocks(module), [file], fix=f"A hook of the module copies them. {_FIX}")
    return module


def _checked(name: object, value: object) -> torch.Tensor:
    if not isinstance(name, str):
        why = f"must have text as names, and {name!r} is {_units.kind_of(name)}"
        raise InvalidOption("source", "state dict", why=why, fix="Publish the state dict of a module.")
    what = f"is a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        if torch.nn.parameter.is_lazy(value):
            what = "has no shape yet (run the model once)"
        elif value.is_meta:
            what = "is on the meta device and has no content"
        elif value.layout is not torch.strided or value.is_quantized:
            what = f"is a tensor of the kind {value.layout if not value.is_quantized else value.qscheme()}"
        elif type(plain := value.detach()) is torch.Tensor:
            return plain
    why = f"must contain only plain tensors, and {name!r} {what}"
    raise InvalidOption("source", "state dict", why=why, fix="Publish a flat dict of names to plain tensors.")


def _built(build: Callable[[], Any], state: Mapping[str, Any]) -> torch.nn.Module:
    """Make the module, with its parameters on the meta device if possible."""
    try:
        made, is_whole = _PARAMETERS.on_meta(build)
    except (RuntimeError, TypeError, ValueError):
        made, is_whole = build(), True  # the constructor reads the values of its parameters, or fails anyway
    module = _module(made)
    named = (name for name, _ in module.named_parameters(remove_duplicate=False))
    if is_whole and _on_meta(module) <= {*state, *named}:
        return module
    # A tensor was computed from a parameter that had no content, or the constructor has kept one that was replaced.
    return _module(build())


def _module(made: object) -> torch.nn.Module:
    if not isinstance(made, torch.nn.Module):
        why = "must return a torch module: the published weights belong to one"
        raise InvalidOption("build", type(made).__name__, why=why, fix="Give a function that makes the module.")
    return made


class _Parameters(threading.local):
    """Makes modules whose parameters are on the meta device, where they take neither memory nor time.

    Unlike with ``torch.device("meta")``, everything else is made as usual: buffers that are not in state dicts, and
    values that constructors compute. Other threads are not affected.
    """

    #: Parameters of the module that this thread is making, and their replacements; None while it makes none.
    seen: dict[int, tuple[weakref.ref[Any], torch.nn.Parameter]] | None = None

    def on_meta(self, build: Callable[[], Any]) -> tuple[Any, bool]:
        """What ``build`` makes, and whether nothing has kept a parameter that was replaced."""
        seen = self.seen = {}
        try:
            made = build()
            return made, all(parameter() is None for parameter, _ in seen.values())
        finally:
            self.seen = None

    def registered(self, _module: object, _name: str, parameter: Any) -> Any:
        """Replace ``parameter``; None keeps it. Torch calls this for each parameter of each module."""
        if self.seen is None or type(parameter) is not torch.nn.Parameter or parameter.is_meta:
            return None
        known, on_meta = self.seen.get(id(parameter), (None, None))
        if known is None or known() is not parameter:  # otherwise a parameter with two names, which must stay the same
            on_meta = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(on_meta).update(vars(parameter))
            self.seen[id(parameter)] = weakref.ref(parameter), on_meta
        return on_meta


_PARAMETERS = _Parameters()
# Registered once and never removed: removing it could break another thread's loop over torch's hooks.
_register: Any = register_module_parameter_registration_hook  # its stub expects a hook that returns nothing
_register(_PARAMETERS.registered)


def _registered(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _kept(module: torch.nn.Module, before: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of tensors that share their content with registered ones of ``before`` that others took the place of."""
    now = dict(_registered(module))
    gone: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, old in before:
        if (new := now.get(name, old)) is not old:
            gone.setdefault(_content(old), []).append((old, new))
    stale = {key for key, pairs in gone.items() if any(old.is_meta or not torch.equal(old, new) for old, new in pairs)}
    found = ((name, tensor) for name, tensor in (*_attributes(module), *now.items()) if f"{name}_orig" not in now)
    return [name for name, tensor in found if _content(tensor) in stale]  # spectral_norm() computes from `weight_orig`


def _content(tensor: torch.Tensor) -> int:
    """The same number for tensors with the same memory. What has none is told by the tensor that it is a view of."""
    own = id(tensor if tensor._base is None else tensor._base)  # noqa: SLF001
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.layout is not torch.strided:
        return own  # others may have no memory of their own, and raise
    return tensor.untyped_storage().data_ptr() or own


def _on_meta(module: torch.nn.Module) -> set[str]:
    """Names of all tensors of a module that have no content, registered or not."""
    registered = _registered(module)
    known = {id(tensor) for _, tensor in registered}
    loose = [(name, tensor) for name, tensor in _attributes(module) if id(tensor) not in known]
    return {name for name, tensor in (*registered, *loose, *_constants(module)) if tensor.is_meta}


def _constants(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the code of TorchScript, where a frozen module has its weights."""
    for prefix, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):
            continue
        code = part._c  # noqa: SLF001 - torch has no public way to list the methods
        for method in code._method_names():  # noqa: SLF001
            for node in code._get_method(method).graph.findAllNodes("prim::Constant"):  # noqa: SLF001
                value = node.output().toIValue()
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        yield f"{prefix}.{method}".removeprefix("."), tensor


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are plain attributes, or that one leads to: in a container, an object, a function or a hook.

    The nearest ones first, and none behind ``_MOST_OBJECTS``: an attribute may lead to a vocabulary or to the program.
    """
    seen = {id(part) for part in module.modules()}
    waiting: deque[tuple[str, Sequence[object]]] = deque(
        (f"{prefix}.{name}".removeprefix("."), (value,))
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _REGISTERED
    )
    left = len(waiting) + _MOST_OBJECTS
    while waiting and left > 0:
        name, values = waiting.popleft()
        for value in values[:left]:
            if isinstance(value, torch.Tensor):
                yield name, value
            elif gc.is_tracked(value) and id(value) not in seen and not isinstance(value, _ELSEWHERE):
                seen.add(id(value))
                waiting.append((name, _inside(value)))
        left -= len(values)


def _inside(value: object) -> Sequence[object]:
    """What an object refers to; of a function what it was made with, and not the names of its module."""
    if isinstance(value, FunctionType):
        return value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)
    return gc.get_referents(value)


def _ties(module: torch.nn.Module) -> list[list[str]]:
    """The names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _fill_ties(state: dict[str, Any], ties: list[list[str]]) -> None:
    """Add missing names: some state dicts contain a tied parameter under only one of its names."""
    for tied in ties:
        present = next((name for name in tied if name in state), None)
        if present is not None:
            state.update({name: state[present] for name in tied if name not in state})


def _tie(module: torch.nn.Module, ties: list[list[str]]) -> None:
    """Tie parameters again: loading the state dict has made a separate parameter for each name."""
    for first, *others in ties:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)


def _check_types(folder: Path, module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    # With `assign` the module takes over the file's types, and would mix them with the types of its other tensors.
    own = module.state_dict()
    wrong = [
        f"{name} is {state[name].dtype} in the file and {own[name].dtype} in the module"
        for name in state
        if isinstance(own.get(name), torch.Tensor) and own[name].dtype != state[name].dtype
    ]
    if wrong:
        fix = (
            "Let build() make the module in the file's type, such as Net().to(torch.bfloat16), "
            "or publish the weights in the module's type."
        )
        raise WeightsMismatch(folder, why=few(wrong), fix=fix)


def _blocks(module: torch.nn.Module) -> Iterator[_weights_formats.Block]:
    for name, tensor in module.state_dict().items():
        # What a module makes of its extra state is no weight: a tensor that is new at each call.
        if isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state"):
            storage = tensor.untyped_storage()
            yield _weights_formats.Block(name, storage.data_ptr(), storage.nbytes())
