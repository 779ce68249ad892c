"""Functions that get padded tensors, and whose results are the same as without padding."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import pickle
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

from modelguard import ModelGuard, guard, guard_of  # noqa: E402 - torch comes first, or nothing does
from modelguard.adapters.torch import bucketed, pad_to_bucket  # noqa: E402
from modelguard.errors import InvalidOption  # noqa: E402
from modelguard.lifecycle.system import System  # noqa: E402

LENGTHS = (1, 7, 37, 64, 65, 100)
Sounds = namedtuple("Sounds", "wave score")  # noqa: PYI024 - a user's own, without types


class MaskedConvolutions(torch.nn.Module):
    """A stack of convolutions that keeps padding at zero between them, as VITS does."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        kernels = (3, 5, 7, 11)
        self.layers = torch.nn.ModuleList(
            torch.nn.Conv1d(channels, channels, kernel, padding=kernel // 2) for kernel in kernels
        )

    def forward(self, x: Any, mask: Any = None) -> Any:
        for layer in self.layers:
            x = layer(x) if mask is None else layer(x) * mask[:, None]
        return x


@pytest.fixture(scope="module")
def bert() -> Any:
    """Make a small encoder with random weights."""
    transformers = pytest.importorskip("transformers", reason="the encoder comes from transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return transformers.BertModel(transformers.BertConfig(vocab_size=100, **sizes)).eval()


# The same results


@pytest.mark.parametrize("length", LENGTHS)
@torch.inference_mode()
def test_masked_convolutions_give_the_same(length: int) -> None:
    """A stack that masks its padding gives what it gives without padding, to the rounding of floats."""
    network = MaskedConvolutions()
    x = torch.randn(2, 8, length)
    found = bucketed("x", mask="mask", multiple=64, cut=(-1, 1))(network.forward)(x)
    torch.testing.assert_close(found, network(x))


@torch.inference_mode()
def test_without_a_mask_the_end_differs() -> None:
    """What the documentation warns of: convolutions without a mask reach into the padding, and no further."""
    network = MaskedConvolutions()
    x = torch.randn(1, 8, 100)
    plain, found = network(x), bucketed("x", multiple=64, cut=(-1, 1))(network.forward)(x)
    reach = sum(layer.padding[0] for layer in network.layers)
    torch.testing.assert_close(found[..., :-reach], plain[..., :-reach])
    assert not torch.allclose(found[..., -reach:], plain[..., -reach:])


@pytest.mark.parametrize("length", LENGTHS)
@torch.inference_mode()
def test_an_encoder_gives_the_same(bert: Any, length: int) -> None:
    """A transformers encoder with its attention mask gives the same, and its output keeps its type."""
    embed = bucketed("input_ids", mask="attention_mask", multiple=64, cut={"last_hidden_state": (1, 1)})(bert.forward)
    tokens = torch.randint(1, 100, (2, length))
    plain, found = bert(tokens), embed(input_ids=tokens)
    torch.testing.assert_close(found.last_hidden_state, plain.last_hidden_state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.pooler_output, plain.pooler_output, rtol=1e-4, atol=1e-5)
    assert type(plain) is type(found)


@torch.inference_mode()
def test_a_batch_that_was_padded_already(bert: Any) -> None:
    """The caller's own mask stands, with the new padding beside it."""
    embed = bucketed("input_ids", mask="attention_mask", multiple=64, cut={"last_hidden_state": (1, 1)})(bert.forward)
    tokens = torch.randint(1, 100, (2, 37))
    mask = torch.ones(2, 37, dtype=torch.long)
    mask[1, 20:] = 0
    plain = bert(tokens, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(embed(tokens, mask).last_hidden_state, plain, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_bidirectional_lstm_gives_the_same() -> None:
    """A recurrent network that packs by the lengths gives the same."""
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(4, 8, bidirectional=True, batch_first=True)

    @bucketed("x", lengths="lengths", dim=1, multiple=64, cut=(1, 1))
    def run(x: Any, lengths: Any = None) -> Any:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return torch.nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=x.size(1))[0]

    x = torch.randn(2, 37, 4)
    torch.testing.assert_close(run(x), lstm(x)[0])


# What the function meets, and what comes back


def test_the_function_meets_few_lengths() -> None:
    """However many lengths come in, the function sees the buckets'."""
    seen: set[int] = set()

    @bucketed("x", multiple=64, cut=(-1, 1))
    def run(x: Any) -> Any:
        seen.add(x.size(-1))
        return x

    assert list(range(1, 129)) == [run(torch.zeros(2, length)).size(-1) for length in range(1, 129)]
    assert {64, 128} == seen


@pytest.mark.parametrize("length", [5, 8])
def test_inputs_mask_and_lengths_go_in(length: int) -> None:
    """Several inputs are padded alike; mask and lengths are made where a call has none; the rest is left alone."""

    @bucketed("x", "y", "z", mask="mask", lengths="lengths", multiple=8, value=9, cut=None)
    def run(x: Any, scale: float, y: Any = None, z: Any = None, mask: Any = None, *, lengths: Any = None) -> Any:
        return x, scale, y, z, mask, lengths

    x, scale, y, z, mask, lengths = run(torch.ones(2, 3, length), 0.5, y=torch.ones(2, length))
    padding = [9] * (8 - length)
    assert [1] * length + padding == x[0, 0].tolist()
    assert [1] * length + padding == y[1].tolist()
    assert (0.5, None) == (scale, z)
    assert [[1] * length + [0] * (8 - length)] * 2 == mask.tolist()
    assert [length, length] == lengths.tolist()


def test_given_lengths_stand() -> None:
    """The lengths that a call gives are those of its batch before padding."""
    run = bucketed("x", lengths="lengths", cut=None)(lambda x, lengths: lengths)
    given = torch.tensor([5, 3])
    assert given is run(torch.ones(2, 5), given)


def test_arguments_by_any_name() -> None:
    """A function that takes any keywords is padded by the names that calls use."""
    run = bucketed("input_ids", mask="attention_mask", multiple=8, cut=None)(lambda **batch: batch)
    batch = run(input_ids=torch.ones(1, 5), other="as it is")
    assert ({"input_ids", "attention_mask", "other"}, 8) == (set(batch), batch["input_ids"].size(1))


@pytest.mark.parametrize("given", [{}, {"x": None}], ids=["left out", "None"])
def test_nothing_to_pad(given: Any) -> None:
    """Without an input the call goes through as it is."""
    run = bucketed("x", mask="mask")(lambda x=None, mask=None: (x, mask))
    assert (None, None) == run(**given)


def test_an_empty_input_gets_its_mask_too() -> None:
    """What the model needs beside an input comes with one of length 0 as well."""
    run = bucketed("x", mask="mask", lengths="lengths", cut=None)(lambda x, mask, lengths: (x, mask, lengths))
    assert [[2, 3, 0], [2, 0], [2]] == shapes(run(torch.ones(2, 3, 0)))


def test_a_longer_result_is_cut_in_proportion() -> None:
    """A vocoder makes so many samples of each frame: they are cut to those of the frames that were there."""
    run = bucketed("x", multiple=8, cut=(-1, 3))(lambda x: x.repeat_interleave(3, dim=-1))
    assert torch.equal(torch.arange(5).repeat_interleave(3), run(torch.arange(5)))


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 5), (5,)], ids=["a batch", "one sequence", "no batch"])
def test_a_cut_result_is_as_the_model_makes_them(shape: tuple[int, ...]) -> None:
    """It is contiguous, and does not keep the padding in memory."""
    found = bucketed("x", multiple=64, cut=(-1, 1))(lambda x: x + 1)(torch.ones(shape))
    assert found.is_contiguous()
    assert math.prod(shape) * 4 == found.untyped_storage().nbytes()


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Have threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_threads_may_show_new_kinds_of_results_meanwhile() -> None:
    """What the first calls show is noted while other threads look it up."""
    done = threading.Event()

    @bucketed("x")
    def run(x: Any) -> list[Any]:
        if x.size(1) % 2:
            raise LookupError  # an odd length shows nothing, so that each such call looks at all that is known
        return [x] * len(x)

    def show() -> None:
        try:
            for number in range(1, 150):
                run(torch.ones(number, 16))
        finally:
            done.set()

    with ThreadPoolExecutor(1) as threads:
        shown = threads.submit(show)
        while not done.is_set():
            with pytest.raises(LookupError):
                run(torch.ones(1, 17))
    shown.result()


@pytest.mark.parametrize(
    ("cut", "result", "expected"),
    [
        ((-1, 1), lambda x: (x, [x]), [[5], [[5]]]),
        ((-1, 1), lambda x: Sounds(x, x), [[5], [5]]),
        ((-1, lambda length: length // 2), lambda x: x[::2], [2]),
        ({"wave": (-1, 1)}, lambda x: {"wave": x, "score": x}, {"wave": [5], "score": [8]}),
        ({0: (-1, 1)}, lambda x: (x, x), [[5], [8]]),
        ({0: (-1, 1)}, lambda x: Sounds(x, x), [[5], [8]]),
        ({0: (0, 1)}, lambda x: [(x, x), x], [[[5], [5]], [8]]),
        (None, lambda x: x, [8]),
        (None, lambda x: "text", "text"),
    ],
    ids=["tuple", "namedtuple", "divided", "dict", "by index", "namedtuple by index", "nested", "none", "no tensor"],
)
def test_what_is_cut(cut: Any, result: Callable[[Any], Any], expected: Any) -> None:
    """All tensors of a tuple or list, or those that are named; containers keep their types."""
    found = bucketed("x", multiple=8, cut=cut)(result)(torch.ones(5))
    assert type(result(torch.ones(5))) is type(found)
    assert expected == shapes(found)


def shapes(found: Any) -> Any:
    """The shape of each tensor, in the same containers as lists."""
    if isinstance(found, torch.Tensor):
        return list(found.shape)
    if isinstance(found, dict):
        return {name: shapes(value) for name, value in found.items()}
    return found if isinstance(found, str) else [shapes(value) for value in found]


def test_a_result_is_not_changed_in_place() -> None:
    """What the function returned may be its own to keep."""
    kept = {"wave": torch.ones(8)}
    assert {"wave": [5]} == shapes(bucketed("x", multiple=8, cut={"wave": (0, 1)})(lambda x: kept)(torch.ones(5)))
    assert {"wave": [8]} == shapes(kept)


@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize(
    "result",
    [lambda x: "text", lambda x: x[:3], lambda x: x.sum(), lambda x: {"wave": x}],
    ids=["text", "another length", "no dimension", "dict"],
)
def test_a_result_that_cannot_be_cut(result: Callable[[Any], Any], length: int) -> None:
    """It is rejected in every call, also in calls without padding, so that it shows in the first."""
    run = bucketed("x", multiple=8)(result)
    with pytest.raises(InvalidOption, match=r"^cut=-1: .*cut=None"):
        run(torch.ones(length))


# How long the result is, shown by the first calls


def masked_mean(x: Any, mask: Any) -> Any:
    """Pool what the mask marks."""
    return (x * mask[:, None]).sum(-1) / mask.sum(-1, keepdim=True)


def rounded_up(x: Any, mask: Any) -> Any:
    """Make the result's length even, as a network does that halves and doubles it."""
    return torch.nn.functional.pad(x * mask[:, None], (0, x.size(-1) % 2))


#: Kinds of models, and which of their lengths are refused: none, all, or all but the first and others that fit.
KINDS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "same length": (lambda x, mask: x * mask[:, None], "none"),
    "multiplied length": (lambda x, mask: (x * mask[:, None]).repeat_interleave(4, -1), "none"),
    "tuple with lengths": (lambda x, mask: (x * mask[:, None], x.repeat_interleave(2, -1)), "none"),
    "divided length": (lambda x, mask: (x * mask[:, None])[..., ::2], "all"),
    "embedding": (lambda x, mask: masked_mean(x, mask).repeat(1, 96), "all but one"),
    "classes": (lambda x, mask: masked_mean(x, mask).repeat(1, 32), "all but one"),
    "tuple with an embedding": (lambda x, mask: (x * mask[:, None], masked_mean(x, mask).repeat(1, 96)), "all but one"),
    "no dimension": (lambda x, mask: masked_mean(x, mask).sum(), "all"),
    "rounded up": (rounded_up, "some"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "buckets", [{}, {"sizes": (32, 64, 128)}, {"multiple": 64}], ids=["growth", "sizes", "multiple"]
)
def test_no_result_is_cut_that_has_no_length(kind: str, buckets: Any) -> None:
    """Each length gives what it gives without padding, or an error that names `cut`."""
    function, refusals = KINDS[kind]
    lengths = [32, *range(5, 129)]
    refused = 0
    run = bucketed("x", mask="mask", **buckets)(function)
    for length in lengths:
        x = torch.randn(2, 4, length)
        try:
            found = run(x, None)
        except InvalidOption as error:
            assert "cut" == error.argument  # noqa: PT017 - only some lengths are refused
            refused += 1
        else:
            torch.testing.assert_close(found, function(x, torch.ones(2, length)), rtol=1e-4, atol=1e-5)
    expected = {"none": 0, "all": len(lengths), "all but one": len(lengths) - 2, "some": 62}[refusals]
    assert expected == refused, "32 comes twice"


def test_two_lengths_show_how_long_results_are() -> None:
    """The first two lengths go in as they are, and what comes later is padded."""
    seen: list[int] = []

    @bucketed("x", multiple=8)
    def run(x: Any) -> Any:
        seen.append(x.size(-1))
        return x.repeat_interleave(3, -1)

    assert [15, 15, 18, 39, 30] == [run(torch.ones(length)).size(0) for length in (5, 5, 6, 13, 10)]
    assert [5, 5, 6, 16, 16] == seen


def test_what_multiples_show_counts_for_multiples() -> None:
    """A result that rounds its length up has the input's length at even ones only."""
    run = bucketed("x", multiple=8)(lambda x: torch.nn.functional.pad(x, (0, x.size(-1) % 2)))
    assert [4, 8, 12] == [run(torch.ones(length)).size(0) for length in (4, 8, 12)]
    with pytest.raises(InvalidOption, match=r"^cut=-1: .*for length 5 the result has 6 positions"):
        run(torch.ones(5))


def test_what_long_inputs_show_does_not_count_for_shorter_ones() -> None:
    """A result that has at least 32 positions has the input's length from 32 on; shorter inputs go in as they are."""
    seen: list[int] = []

    @bucketed("x", multiple=16)
    def run(x: Any) -> Any:
        seen.append(x.size(-1))
        return torch.nn.functional.pad(x, (0, max(0, 32 - x.size(-1))))

    assert [50, 40, 41, 35, 36] == [run(torch.ones(length)).size(0) for length in (50, 40, 41, 35, 36)]
    with pytest.raises(InvalidOption, match=r"^cut=-1: .*for length 30 the result has 32 positions"):
        run(torch.ones(30))
    assert [50, 40, 41, 35, 48, 30] == seen


def test_models_with_different_ratios() -> None:
    """The voices of a pool may make different numbers of samples: each is shown by calls of its own."""
    run = bucketed("x", multiple=8)(lambda x, ratio: x.repeat_interleave(ratio, -1))
    for ratio in (2, 3, 2):
        assert [ratio * length for length in (5, 7, 9, 11)] == [
            run(torch.ones(length), ratio).size(0) for length in (5, 7, 9, 11)
        ]


def test_a_coroutine_s_first_calls_show_it_too() -> None:
    """Two awaited calls show how long results are, and a result without a length is refused."""

    @bucketed("x", multiple=8)
    async def run(x: Any, *, pooled: bool = False) -> Any:
        return torch.ones(32) if pooled else x + 0

    async def all_of_them() -> list[int]:
        return [(await run(torch.ones(length))).size(0) for length in (5, 6, 7)]

    assert [5, 6, 7] == asyncio.run(all_of_them())
    assert 32 == asyncio.run(run(torch.ones(4), pooled=True)).size(0)
    with pytest.raises(InvalidOption, match=r"for lengths 4 and 8 the result has 32 positions"):
        asyncio.run(run(torch.ones(8), pooled=True))


@pytest.mark.parametrize(
    ("cut", "result", "says"),
    [
        ((-1, 2), lambda x: x, "does not fit: padded to 8, an input of length 5 gave 8 positions"),
        ((-1, lambda length: length + 9), lambda x: x, "By it they are 17, cut to 14"),
        ((-1, lambda length: 8 if length == 8 else 9), lambda x: x, "By it they are 8, cut to 9"),
        ({"wave": -1}, lambda x: x, "names entries, and the result is a Tensor"),
        ({0: -1}, lambda x: x.sum(), "names entries, and the result is a Tensor"),
        ({"wave": -1}, lambda x: {"sound": x}, "names no entry of the result, a dict"),
        ({"wave": -1}, lambda x: (x,), "names no entry of the result, a tuple"),
        ({2: -1}, lambda x: (x, x), "names no entry of the result, a tuple"),
        ({"wave": -1}, lambda x: 5, "names entries, and the result is a int"),
    ],
)
def test_a_result_that_is_not_as_said(cut: Any, result: Callable[[Any], Any], says: str) -> None:
    """The error says what the result is instead."""
    with pytest.raises(InvalidOption, match=says) as caught:
        bucketed("x", multiple=8, cut=cut)(result)(torch.ones(5))
    assert "cut" == caught.value.argument


@pytest.mark.parametrize("given", [torch.tensor(1.0), torch.ones(5)], ids=["no dimension", "too few"])
def test_an_input_without_that_dimension(given: Any) -> None:
    """A tensor without the dimension to pad is refused by name, by the decorator and by hand."""
    for pad in (bucketed("x", dim=1)(lambda x: x), partial(pad_to_bucket, dim=1)):
        with pytest.raises(InvalidOption, match=r"^dim=1: is not a dimension of a tensor of shape"):
            pad(given)


# Every kind of function, with guards


def double(x: Any) -> Any:
    """A model that says what it met."""
    return torch.cat([x, torch.full_like(x, x.size(-1))], dim=-1)


@pytest.fixture
def model(system: System) -> ModelGuard[Any]:
    """A guarded model."""
    return guard(lambda: double, reload_on=None, name="double")


@pytest.mark.parametrize("over", [True, False], ids=["over the guard", "under the guard"])
def test_with_a_guard(model: ModelGuard[Any], over: bool) -> None:  # noqa: FBT001
    """In either order the model goes in, the caller's tensor is padded, and the result is cut."""
    padded = bucketed("x", multiple=8, cut=(-1, 2))
    decorators = (model, padded) if over else (padded, model)

    def apply(function: Any) -> Any:
        for decorator in decorators:
            function = decorator(function)
        return function

    @apply
    def run(model: Any, x: Any) -> Any:
        return model(x)

    class Service:
        @apply
        def method(self, model: Any, x: Any) -> Any:
            return model(x)

        @apply
        @staticmethod
        def static(model: Any, x: Any) -> Any:
            return model(x)

        @apply
        @classmethod
        def by_class(cls, model: Any, x: Any) -> Any:
            return model(x)

        @apply
        async def later(self, model: Any, x: Any) -> Any:
            return model(x)

    service = Service()
    expected = [1, 1, 1, 1, 1, 0, 0, 0, 8, 8]
    x = torch.ones(5)
    for call in (run, service.method, Service.static, service.static, Service.by_class, service.by_class):
        assert expected == call(x).tolist()
        assert expected == call(x=x).tolist()
        assert ["x"] == list(inspect.signature(call).parameters)
        assert model is guard_of(call)
    assert inspect.iscoroutinefunction(service.later)
    assert expected == asyncio.run(service.later(x)).tolist()


class Plain:
    """Every way of writing a method, without a guard."""

    @bucketed("x", multiple=8)
    def method(self, x: Any) -> Any:
        return x.clone()

    @classmethod
    @bucketed("x", multiple=8)
    def by_class(cls, x: Any) -> Any:
        return x.clone()

    @staticmethod
    @bucketed("x", multiple=8)
    def static(x: Any) -> Any:
        return x.clone()

    @bucketed("x", multiple=8)
    @staticmethod
    def over_static(x: Any) -> Any:
        return x.clone()


@bucketed("x", multiple=8)
def plain(x: Any, *, scale: float = 1.0) -> Any:
    """Return what came, scaled."""
    return x * scale


@pytest.mark.parametrize(
    "call",
    [plain, Plain().method, Plain.by_class, Plain().by_class, Plain.static, Plain.over_static],
    ids=["function", "method", "classmethod", "classmethod of an instance", "staticmethod", "over a staticmethod"],
)
def test_every_kind_of_function(call: Any) -> None:
    """Functions, methods, class and static methods come back cut, and are pickled by reference."""
    assert 5 == call(torch.ones(5)).size(0)
    assert 5 == pickle.loads(pickle.dumps(call))(torch.ones(5)).size(0)


def test_a_copied_module_uses_its_own_weights() -> None:
    """A method that was decorated in place belongs to the copy after a copy."""
    layer = torch.nn.Linear(8, 8)
    layer.forward = bucketed("input", multiple=8, cut=None)(layer.forward)
    other = copy.deepcopy(layer)
    torch.nn.init.zeros_(other.weight)
    torch.nn.init.zeros_(other.bias)
    assert not other(torch.ones(5)).any()
    assert layer(torch.ones(5)).any()
    assert plain is copy.copy(plain)


def test_the_function_looks_the_same() -> None:
    """Name, documentation and signature stay."""
    assert ("plain", "Return what came, scaled.") == (plain.__name__, plain.__doc__)
    assert ["x", "scale"] == list(inspect.signature(plain).parameters)


def test_parts_of_functions_are_padded_too() -> None:
    """What is callable is decorated, a name or not."""
    assert 5 == bucketed("x")(partial(plain, scale=2.0))(torch.ones(5)).size(0)


# Mistakes


def generator(x: Any) -> Iterator[Any]:
    """Pieces of a result."""
    yield x


@pytest.mark.parametrize(
    ("options", "function", "argument"),
    [
        ({"inputs": ()}, plain, "inputs"),
        ({"inputs": (plain,)}, plain, "inputs"),
        ({"inputs": ("y",)}, plain, "inputs"),
        ({"multiple": 0}, plain, "multiple"),
        ({"sizes": (2, 1)}, plain, "sizes"),
        ({"growth": 1.0}, plain, "growth"),
        ({"dim": "last"}, plain, "dim"),
        ({"value": None}, plain, "value"),
        ({"cut": "wave"}, plain, "cut"),
        ({"cut": {"wave": "last"}}, plain, "cut"),
        ({"cut": True}, plain, "cut"),
        ({"cut": (-1,)}, plain, "cut"),
        ({"cut": (-1, 0)}, plain, "cut"),
        ({"cut": (-1, 0.5)}, plain, "cut"),
        ({"cut": {"wave": ("last", 1)}}, plain, "cut"),
        ({"mask": "y"}, plain, "mask"),
        ({"lengths": "y"}, plain, "lengths"),
        ({"inputs": ("xs",)}, lambda *xs: xs, "inputs"),
        ({"inputs": ("y",)}, partial(plain), "inputs"),
        ({}, generator, "function"),
        ({}, torch.nn.Linear(3, 3), "function"),
        ({}, torch.nn.Linear, "function"),
        ({}, "predict", "function"),
    ],
)
def test_mistakes_show_where_they_are_written(options: Any, function: Any, argument: str) -> None:
    """Invalid arguments are rejected before any call, with what to write instead."""
    inputs = options.pop("inputs", ("x",))
    with pytest.raises(InvalidOption) as caught:
        bucketed(*inputs, **options)(function)
    assert argument == caught.value.argument
    assert caught.value.fix


def test_a_name_beside_a_guard_s_model(model: ModelGuard[Any]) -> None:
    """The model is not a parameter of a guarded function, so it cannot be padded."""

    @model
    def run(model: Any, x: Any) -> Any:
        return model(x)

    with pytest.raises(InvalidOption, match="It has: x"):
        bucketed("model")(run)


def test_only_tensors_are_padded() -> None:
    """A list of numbers is rejected by the name of its parameter."""
    with pytest.raises(InvalidOption, match=r"^x=.*must be a tensor: nothing else can be padded"):
        plain([1.0, 2.0])


def test_inputs_of_different_lengths() -> None:
    """It would not be known to what length the result is cut."""
    run = bucketed("x", "y")(lambda x, y: x)
    with pytest.raises(InvalidOption, match=r"'x': 3, 'y': 4"):
        run(torch.ones(3), torch.ones(4))


def test_the_mistakes_of_a_call_stay_its_own() -> None:
    """An argument that the function does not have raises Python's own error."""
    with pytest.raises(TypeError, match="unexpected keyword"):
        plain(torch.ones(3), txet=1)
    with pytest.raises(TypeError, match="missing"):
        plain()


def test_padding_by_hand_is_the_same() -> None:
    """The decorator does what one would write with `pad_to_bucket`."""
    network = MaskedConvolutions()
    x = torch.randn(1, 8, 37)
    with torch.inference_mode():
        padded, mask = pad_to_bucket(x, multiple=64, mask=True)
        by_hand = network(padded, mask)[..., :37]
        assert torch.equal(by_hand, bucketed("x", mask="mask", multiple=64, cut=(-1, 1))(network.forward)(x))
