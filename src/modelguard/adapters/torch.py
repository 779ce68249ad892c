"""Support for torch models."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, cast, overload

from modelguard import _extras, _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle._lease import BoundByReference, ByReference
from modelguard.lifecycle._misuse import plain_function
from modelguard.lifecycle._models import Adapter

try:
    import torch
except ModuleNotFoundError as error:
    raise _extras.not_installed(error, "modelguard.adapters.torch") from error

__all__ = ["ADAPTER", "bucketed", "pad_to_bucket"]


# Pad varying lengths to a few: for each new shape oneDNN makes a new kernel, and needs memory to keep it.


#: From a length to the length of its bucket.
RoundUp: TypeAlias = Callable[[int], int]

#: Each bucket is an eighth longer than the one before: there are about six from one length to its double, and 6 % of
#: padding on average, for short and long lengths alike (benchmarks/torch_dynamic_shapes.py).
_GROWTH = 1.125
#: Buckets that grow by a factor begin here, and are multiples of ``_STEP``, which suits the kernels.
_SHORTEST, _STEP = 16, 8


class _Buckets(TypedDict, total=False):
    multiple: int | None
    sizes: Sequence[int] | None
    growth: float | None
    dim: int
    value: float


@overload
def pad_to_bucket(
    tensor: torch.Tensor, *, mask: Literal[False] = False, **buckets: Unpack[_Buckets]
) -> torch.Tensor: ...
@overload
def pad_to_bucket(
    tensor: torch.Tensor, *, mask: Literal[True] | torch.Tensor, **buckets: Unpack[_Buckets]
) -> tuple[torch.Tensor, torch.Tensor]: ...
def pad_to_bucket(
    tensor: torch.Tensor,
    *,
    multiple: int | None = None,
    sizes: Sequence[int] | None = None,
    growth: float | None = None,
    dim: int = -1,
    value: float = 0,
    mask: bool | torch.Tensor = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Pad one dimension at its end, to the length of its bucket.

    ``multiple``, ``sizes`` and ``growth`` each define the buckets; at most one of them may be given.

    Args:
        tensor: A tensor with a varying length.
        multiple: Buckets are the multiples of this many positions, such as 256. Gives few buckets if the longest length
            is known.
        sizes: Buckets are these lengths, in rising order; beyond the last one, its multiples.
        growth: Each bucket is this many times as long as the one before, rounded up to a multiple of 8; the first is
            16. Default: 1.125, so that padding is at most about an eighth of any length.
        dim: The dimension to pad.
        value: The value of the padding.
        mask: True to return a mask too: integers that are 1 for data and 0 for padding. Its shape is (batch, length),
            or (length,) if ``dim`` is the first dimension. A given mask, with its length in its last dimension, is
            padded with 0 instead.

    Returns:
        The padded tensor, and with ``mask`` also the mask. A tensor that already has the length of a bucket is returned
        unchanged.

    Raises:
        InvalidOption: The buckets are invalid, the tensor has no dimension ``dim``, or the lengths of ``mask`` and the
            tensor differ.
    """
    up = rounding(multiple, sizes, growth)
    length = length_of(tensor, dim)
    padded = pad(tensor, up(length), dim, value)
    if mask is False:
        return padded
    return padded, masked(tensor, dim, up(length), None if mask is True else mask)


# Buckets


def rounding(multiple: int | None, sizes: Sequence[int] | None, growth: float | None) -> RoundUp:
    """Make the buckets that one of the arguments defines; see :func:`pad_to_bucket`."""
    given = {"multiple": multiple, "sizes": sizes, "growth": growth}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        why = f"must not be given together with {chosen[0]}: each of them defines the buckets"
        raise InvalidOption(chosen[1], given[chosen[1]], why=why, fix="Give one of them.")
    if sizes is not None:
        return _up_to_sizes(sizes)
    if multiple is not None:
        least = _units.whole_number(multiple, "multiple")
        return lambda length: -(-length // least) * least
    return _up_by_growth(_GROWTH if growth is None else growth)


def _up_to_sizes(sizes: Sequence[int]) -> RoundUp:
    try:
        buckets = tuple(sizes)
    except TypeError:
        buckets = ()
    numbers = all(_is_number(size, int) and size > 0 for size in buckets)
    if not buckets or not numbers or list(buckets) != sorted(set(buckets)):
        why = "must be a rising sequence of lengths"
        raise InvalidOption("sizes", sizes, why=why, fix="Give positive whole numbers, rising: (128, 256, 512).")
    last = buckets[-1]

    def up(length: int) -> int:
        if length > last:
            return -(-length // last) * last
        return buckets[bisect_left(buckets, length)] if length else 0

    return up


def _up_by_growth(growth: float) -> RoundUp:
    _units.number(growth, "growth", above=1, most=2, fix="Give a number above 1 and up to 2, such as 1.25.")

    def up(length: int) -> int:
        bucket = _SHORTEST if length else 0
        while bucket < length:
            bucket = max(bucket + _STEP, math.ceil(bucket * growth / _STEP) * _STEP)
        return bucket

    return up


# Padding


def length_of(tensor: torch.Tensor, dim: int) -> int:
    """The number of positions along ``dim``."""
    if not -tensor.dim() <= dim < tensor.dim():
        why = f"is not a dimension of a tensor of shape {tuple(tensor.shape)}"
        raise InvalidOption("dim", dim, why=why, fix="Give the dimension that has the length.")
    return tensor.size(dim)


def pad(tensor: torch.Tensor, padded: int, dim: int, value: float) -> torch.Tensor:
    """Pad one dimension at its end, to the length ``padded``."""
    missing = padded - tensor.size(dim)
    if not missing:
        return tensor
    after = tensor.dim() - 1 - dim % tensor.dim()  # pad() counts from the last dimension, with two numbers for each
    return torch.nn.functional.pad(tensor, (0, 0) * after + (0, missing), value=value)


def masked(tensor: torch.Tensor, dim: int, padded: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Make or pad the mask of a tensor that is padded along ``dim``."""
    length = tensor.size(dim)
    if mask is None:
        mask = torch.ones((*batch(tensor, dim), length), dtype=torch.long, device=tensor.device)
    elif (given := mask.size(-1) if mask.dim() else 0) != length:
        why = f"has length {given}, and the tensor has length {length}"
        fix = "Give a mask with the length in its last dimension."
        raise InvalidOption("mask", tuple(mask.shape), why=why, fix=fix)
    return pad(mask, padded, -1, 0)


def batch(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    """The shape of a value per sequence: (batch,), or () if ``dim``, the dimension of the length, is the first one."""
    return tuple(tensor.shape[:1]) if dim % tensor.dim() else ()


# A decorator for functions of tensors with varying length: they get few lengths, and return unpadded results.


F = TypeVar("F")

#: A dimension, and how many positions the result has along it: times the input's length, or computed from that.
_Ratio: TypeAlias = int | Callable[[int], int]
_Where: TypeAlias = int | tuple[int, _Ratio]


def bucketed(
    *inputs: str,
    multiple: int | None = None,
    sizes: Sequence[int] | None = None,
    growth: float | None = None,
    dim: int = -1,
    value: float = 0,
    mask: str | None = None,
    lengths: str | None = None,
    cut: _Where | Mapping[str | int, _Where] | Literal["same"] | None = "same",
) -> Callable[[F], F]:
    """Decorate a function so that its inputs are padded to the length of a bucket, and its result is cut back.

    It works for functions, methods and coroutines, above or below a guard's decorator. The function's signature does
    not change.

    It depends on the model whether results are the same as without padding. Except for the rounding of floats, they
    are the same if the model uses the mask wherever it combines positions (attention, convolutions, pooling), and if no
    position depends on later ones, as in causal models. They are not the same if convolutions without a mask reach into
    the padding: then the end of the result differs, over the combined reach of the convolutions.

    Args:
        inputs: The names of the parameters to pad. All that are given in a call must have the same length; None is not
            changed.
        multiple: As for :func:`pad_to_bucket`.
        sizes: As for :func:`pad_to_bucket`.
        growth: As for :func:`pad_to_bucket`.
        dim: The dimension of each input to pad.
        value: As for :func:`pad_to_bucket`.
        mask: The name of the parameter that takes the mask. If a call leaves it out or gives None, a mask is made. A
            mask that marks data with 1 or True is padded with 0.
        lengths: The name of the parameter that takes the lengths before padding. If a call leaves it out or gives
            None, it gets a tensor with one integer for each row of the batch; a given value is not changed.
        cut: The dimension of the result that has the length, by default ``dim``. The first calls are not padded until
            two of them have shown how long the result is: as long as the input, or a whole number of times, like the
            samples of a vocoder. Nor are inputs that are shorter than all that have shown it. To say it instead, give
            the number too: ``cut=(-1, 256)``, or a function from the input's length to the result's:
            ``cut=(1, lambda length: (length + 1) // 2)``. In a tuple or list each tensor is cut. To cut only some
            entries of a tuple, a mapping or a transformers output, give each by index or name:
            ``cut={"last_hidden_state": 1}``. None for a result without a length, such as a score for each class.

    Raises:
        InvalidOption: On decoration: the buckets are invalid, there is no parameter of a given name, or the decorated
            object is not a function, or is a generator function, whose pieces have no known length. In a call: an input
            is not a tensor or has no dimension ``dim``, inputs differ in length, or the result cannot be cut as ``cut``
            requires.
    """
    if not inputs or not all(isinstance(name, str) for name in inputs):
        why = "must be the names of the parameters to pad"
        raise InvalidOption("inputs", inputs, why=why, fix='Write @bucketed("x").')
    up = rounding(multiple, sizes, growth)
    where = dim if cut == "same" else cut
    _check_options(dim, value, where)
    bucketing = _Bucketing(inputs, up, dim, value, mask, lengths, _Cutter(where))

    def decorate(function: F) -> F:
        _check(function, bucketing)
        asynchronous = inspect.iscoroutinefunction(plain_function(function))
        call = bucketing.acall if asynchronous else bucketing.call
        return cast("F", _Bucketed(cast("Callable[..., Any]", function), call))

    return decorate


# Cutting back

_FIX_CUT = (
    "Give cut=None for a result without a length, or the dimension and how its length follows from the input's: "
    "cut=(-1, 256), or cut=(1, lambda length: (length + 1) // 2)."
)

#: Where a tensor is in a result: indices and names, outermost first.
_Place: TypeAlias = tuple[str | int, ...]


class _Unproved(Exception):
    """Only a call without padding can tell how a result is cut."""


@dataclass(slots=True)
class _Cutter:
    """Cuts results from their padded lengths to their original lengths: a pair, with the original one first.

    A result whose size is a multiple of the padded length need not have a length: an embedding may be as wide by
    chance. So only a ratio that was seen in calls without padding counts, at two lengths: what is constant has another
    ratio at each.
    """

    where: _Where | Mapping[str | int, _Where] | None
    #: For each place in the results, the lengths of the input and of the result in calls without padding.
    seen: dict[_Place, frozenset[tuple[int, int]]] = field(default_factory=dict)

    def may_pad(self, length: int) -> bool:
        """Whether a result for an input that is padded from this length can be cut."""
        if not any(isinstance(each, int) for each in _each(self.where)):
            return True
        # A copy: other threads may note what their calls have shown.
        known = ((place, size // long) for place, pairs in self.seen.copy().items() for long, size in pairs)
        return any(self._proved(place, ratio, length) for place, ratio in known)

    def __call__(self, result: Any, lengths: tuple[int, int]) -> Any:
        if isinstance(self.where, Mapping):
            return self._entries(result, self.where, lengths)
        return result if self.where is None else self._along(result, self.where, (), lengths)

    def _ratio(self, place: _Place, dim: int, size: int, lengths: tuple[int, int]) -> int:
        """How many times as long as the input the result is."""
        length, padded = lengths
        ratio, rest = divmod(size, padded)
        if ratio and not rest and self._proved(place, ratio, length):
            return ratio
        if length != padded:
            raise _Unproved
        pairs = self.seen.get(place, frozenset())
        other = next((long for long, same in pairs if same == size and long != length), None)
        if rest or not ratio or other is not None:
            seen = f"length {length}" if other is None else f"lengths {other} and {length}"
            why = "is not a dimension that is a whole number of times as long as the input"
            why += f": for {seen} the result has {size} positions there"
            raise InvalidOption("cut", dim, why=why, fix=_FIX_CUT)
        self.seen[place] = pairs | {(length, size)}
        return ratio

    def _proved(self, place: _Place, ratio: int, length: int) -> bool:
        # A model that rounds lengths up, to even ones for example, has the same ratio at their multiples only; one that
        # brings short ones to a least length, from that on.
        lengths = [long for long, size in self.seen.get(place, ()) if size == ratio * long]
        return len(lengths) > 1 and length >= min(lengths) and length % math.gcd(*lengths) == 0

    def _along(self, result: Any, where: _Where, place: _Place, lengths: tuple[int, int]) -> Any:
        if isinstance(result, torch.Tensor):
            return self._tensor(result, where, place, lengths)
        if isinstance(result, tuple | list):
            items = [self._along(item, where, (*place, number), lengths) for number, item in enumerate(result)]
            return _like(result, items)
        why = f"cannot be applied: the result has a {type(result).__name__}, which has no dimensions"
        fix = 'Give cut=None for a result without a length, or name what to cut: cut={"last_hidden_state": 1}.'
        raise InvalidOption("cut", where, why=why, fix=fix)

    def _tensor(self, result: torch.Tensor, where: _Where, place: _Place, lengths: tuple[int, int]) -> torch.Tensor:
        dim, ratio = (where, None) if isinstance(where, int) else where
        if not -result.dim() <= dim < result.dim():
            why = f"is not a dimension of a result of shape {tuple(result.shape)}"
            raise InvalidOption("cut", dim, why=why, fix="Give cut=None for a result without a length.")
        size = result.size(dim)
        if ratio is None:
            ratio = self._ratio(place, dim, size, lengths)
        kept, expected = (ratio * length if isinstance(ratio, int) else ratio(length) for length in lengths)
        if size != expected or not 0 <= kept <= size:
            why = f"does not fit: padded to {lengths[1]}, an input of length {lengths[0]} gave {size} positions"
            fix = f"By it they are {expected}, cut to {kept}. Give how the result's length follows from the input's."
            raise InvalidOption("cut", where, why=why, fix=fix)
        # Contiguous, like the model's own result, and without keeping the padding in memory.
        part = result.narrow(dim, 0, kept)
        return part.contiguous() if kept == size else part.clone(memory_format=torch.contiguous_format)

    def _entries(self, result: Any, where: Mapping[str | int, _Where], lengths: tuple[int, int]) -> Any:
        if isinstance(result, torch.Tensor) or not hasattr(result, "__getitem__"):
            why = f"names entries, and the result is a {type(result).__name__}"
            raise InvalidOption("cut", where, why=why, fix="Give the dimension with the length: cut=-1.")
        entries: Any = list(result) if isinstance(result, tuple) else copy(result)
        for key, each in where.items():
            try:
                entry = entries[key]
            except (LookupError, TypeError):
                why = f"names no entry of the result, a {type(result).__name__}"
                raise InvalidOption("cut", key, why=why, fix="Give the index or name of an entry.") from None
            entries[key] = self._along(entry, each, (key,), lengths)
        return _like(result, entries) if isinstance(result, tuple) else entries


def _each(where: _Where | Mapping[str | int, _Where] | None) -> Iterable[_Where]:
    return where.values() if isinstance(where, Mapping) else () if where is None else (where,)


def _like(result: Any, items: list[Any]) -> Any:
    """Put the items into a tuple, named tuple or list of the result's type."""
    return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)


# The decorator


class _BoundBucketed(BoundByReference):
    @property
    def __func__(self) -> Any:  # for inspect.signature(), and defined by a guard's decorator
        method: Any = self.__wrapped__
        return method.__func__


class _Bucketed(ByReference):
    """The decorated function."""

    __bound_function_wrapper__ = _BoundBucketed

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # If a module's forward() is decorated, the copy of the module needs its own forward().
        return type(self)(deepcopy(self.__wrapped__, memo), self._self_wrapper)


@dataclass(frozen=True, slots=True)
class _Bucketing:
    """The options of :func:`bucketed`, and how a call is padded with them."""

    inputs: tuple[str, ...]
    up: RoundUp
    dim: int
    value: float
    mask: str | None
    lengths: str | None
    cut: _Cutter

    def call(self, wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for padding in (True, False):
            given, lengths = self._pad(wrapped, args, kwargs, padding=padding)
            result = wrapped(*given.args, **given.kwargs)
            with suppress(_Unproved):
                return self.cut(result, lengths) if lengths[0] else result
        raise AssertionError  # a call without padding proves or raises

    async def acall(self, wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for padding in (True, False):
            given, lengths = self._pad(wrapped, args, kwargs, padding=padding)
            result = await wrapped(*given.args, **given.kwargs)
            with suppress(_Unproved):
                return self.cut(result, lengths) if lengths[0] else result
        raise AssertionError  # a call without padding proves or raises

    def _pad(
        self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, padding: bool
    ) -> tuple[_Arguments, tuple[int, int]]:
        """The arguments of one call with its inputs, mask and lengths replaced, its length, and that of its bucket.

        The length is 0 if there is nothing to pad.
        """
        given = _Arguments(wrapped, args, kwargs)
        tensors = {name: given.get(name) for name in self.inputs if given.get(name) is not None}
        if not tensors:
            return given, (0, 0)
        length = self._length(tensors)
        padded = self.up(length) if padding and self.cut.may_pad(length) else length
        first = next(iter(tensors.values()))
        for name, tensor in tensors.items():
            given.put(name, pad(tensor, padded, self.dim, self.value))
        if self.mask is not None:
            given.put(self.mask, masked(first, self.dim, padded, given.get(self.mask)))
        if self.lengths is not None and given.get(self.lengths) is None:
            given.put(self.lengths, torch.full(batch(first, self.dim), length, device=first.device))
        return given, (length, padded)

    def _length(self, tensors: Mapping[str, Any]) -> int:
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                why = "must be a tensor: nothing else can be padded"
                raise InvalidOption(name, type(tensor), why=why, fix="Give a tensor, or leave it out of bucketed().")
        lengths = {name: length_of(tensor, self.dim) for name, tensor in tensors.items()}
        if len(set(lengths.values())) > 1:
            why = "must have the same length in one call"
            fix = "Pad inputs of other lengths with pad_to_bucket() inside the function."
            raise InvalidOption("inputs", lengths, why=why, fix=fix)
        return next(iter(lengths.values()))


class _Arguments:
    """The arguments of one call, by name."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = list(args)
        self.kwargs = dict(kwargs)
        self._places = {name: place for place, name in enumerate(_positional(function)) if place < len(args)}

    def get(self, name: str) -> Any:
        place = self._places.get(name)
        return self.kwargs.get(name) if place is None else self.args[place]

    def put(self, name: str, value: Any) -> None:
        place = self._places.get(name)
        if place is None:
            self.kwargs[name] = value
        else:
            self.args[place] = value


def _positional(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind in kinds]


def _check_options(dim: object, value: object, cut: Any) -> None:
    if not _is_number(dim, int):
        raise InvalidOption("dim", dim, why="must be the number of a dimension", fix="Give a number such as -1.")
    if not _is_number(value, int | float):
        raise InvalidOption("value", value, why="must be a number", fix="Give a number such as 0.")
    if not all(map(_is_where, _each(cut))):
        fix = 'Give a number such as -1, with a ratio (-1, 256), several by name {"last_hidden_state": 1}, or None.'
        why = "must be the number of a dimension, alone or with how long it is, or several by name"
        raise InvalidOption("cut", cut, why=why, fix=fix)


def _is_where(each: object) -> bool:
    dim, ratio = each if isinstance(each, tuple) and len(each) == 2 else (each, 1)  # noqa: PLR2004 - a pair
    return _is_number(dim, int) and (callable(ratio) or (_is_number(ratio, int) and ratio > 0))


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check(function: Any, bucketing: _Bucketing) -> None:
    plain = plain_function(function)
    if isinstance(plain, type | torch.nn.Module) or not callable(plain):
        fix = "Decorate a function that calls it, or its method: model.forward = bucketed(...)(model.forward)."
        raise InvalidOption("function", type(plain), why="must be a function or a method", fix=fix)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        why = "is a generator function, and the length of each piece is not known"
        raise InvalidOption("function", plain, why=why, fix="Use pad_to_bucket() inside, and cut each piece.")
    # A guard's decorator defines a signature without the model.
    signature = getattr(function, "__signature__", None) or inspect.signature(plain)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return
    parameters = [name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_POSITIONAL]
    named = [("inputs", name) for name in bucketing.inputs] + [("mask", bucketing.mask), ("lengths", bucketing.lengths)]
    for option, name in named:
        if name and name not in parameters:
            why = f"is not a parameter of {getattr(plain, '__name__', type(plain).__name__)}()"
            raise InvalidOption(option, name, why=why, fix=f"It has: {', '.join(parameters) or 'none'}.")


class TorchAdapter(Adapter):
    """Measures a model by its parameters and buffers."""

    def size(self, model: Any) -> int | None:
        """Bytes of all parameters and buffers; storage that tied weights share is counted once.

        What has no storage does not count: sparse tensors, those of oneDNN, lazy ones.
        """
        if not isinstance(model, torch.nn.Module):
            return None
        storages = {}
        for tensor in (*model.parameters(), *model.buffers()):
            with suppress(RuntimeError, ValueError):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = 0 if tensor.is_meta else storage.nbytes()
        return sum(storages.values())


ADAPTER = TorchAdapter()
