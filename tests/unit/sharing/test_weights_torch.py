"""Published weights of torch modules."""

from __future__ import annotations

import gc
import mmap
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelguard import weights
from modelguard.errors import InvalidOption, PublishFailed, WeightsMismatch, WeightsRefused

torch = pytest.importorskip("torch")
_torch_weights = pytest.importorskip("modelguard.adapters._torch_weights")
nn = torch.nn


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """Has one example of everything that makes mapping hard."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(10, width)
        self.rnn = nn.LSTM(width, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 10, bias=False)
        self.out.weight = self.words.weight  # tied
        self.small = nn.Parameter(torch.ones(width, dtype=torch.float16))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("positions", torch.arange(10), persistent=False)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.scale = torch.full((width,), 2.0)  # neither parameter nor buffer
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]

    def forward(self, index: Any) -> Any:
        x, _ = self.rnn(self.words(index + self.positions[:1]))
        x = self.normed(self.layer(x)) * self.scale * self.small * self.frozen
        return self.out(self.norm(x))


def made() -> Any:
    torch.manual_seed(7)
    return Net().eval()


INDEX = torch.tensor([1, 5, 9])


def scripted(module: Any) -> Any:
    """The module as TorchScript."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit itself
        return torch.jit.script(module)


def frozen(module: Any) -> Any:
    """The module as TorchScript, its weights in the code."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return torch.jit.freeze(scripted(module.eval()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net"


@pytest.fixture
def published(path: Path) -> Any:
    model = made()
    weights.publish(model, path)
    return model


class TestAMappedModule:
    def test_answers_as_the_unmapped_one(self, path: Path, published: Any) -> None:
        """The loaded model gives the same answers as the published one, bit for bit."""
        torch.manual_seed(1)  # so that nothing of it is right by chance
        mapped = weights.load(Net, path).eval()
        assert torch.equal(published(INDEX), mapped(INDEX))

    def test_is_whole(self, path: Path, published: Any) -> None:
        """Parameters, buffers and plain tensors have their types and their content."""
        mapped = weights.load(Net, path)
        theirs, ours = published.state_dict(), mapped.state_dict()
        assert list(theirs) == list(ours)
        assert [value.dtype for value in theirs.values()] == [value.dtype for value in ours.values()]
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
        assert torch.equal(published.positions, mapped.positions)
        assert [None] == list({tensor.grad for tensor in mapped.parameters()})
        assert published.frozen.requires_grad == mapped.frozen.requires_grad
        assert published.small.requires_grad == mapped.small.requires_grad

    def test_keeps_its_ties(self, path: Path, published: Any) -> None:
        """A parameter under two names is one parameter."""
        mapped = weights.load(Net, path)
        assert mapped.out.weight is mapped.words.weight

    def test_holds_no_weights_while_it_is_built(self, path: Path, published: Any) -> None:
        """Build runs with parameters that take no memory; other tensors are made as usual."""
        seen = []

        def build() -> Any:
            model = Net()
            seen.append((model.words.weight.is_meta, model.positions.is_meta))
            return model

        weights.load(build, path)
        assert [(True, False)] == seen

    def test_may_write_to_its_buffers(self, path: Path, published: Any) -> None:
        """What a forward pass in training mode writes stays in this process."""
        mapped, other = weights.load(Net, path), weights.load(Net, path)
        mapped.train()(INDEX)
        assert (1, 0) == (mapped.norm.num_batches_tracked.item(), other.norm.num_batches_tracked.item())
        assert 0 == weights.load(Net, path).norm.num_batches_tracked.item()

    def test_never_writes_to_the_file(self, path: Path, published: Any) -> None:
        """That holds even if the application maps its own checkpoints shared."""
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            mapped = weights.load(Net, path)
            assert mmap.MAP_SHARED == torch.serialization.get_default_mmap_options()
        with torch.no_grad():
            mapped.words.weight.zero_()
        assert torch.equal(published.words.weight, weights.load(Net, path).words.weight)

    def test_can_be_moved_on_to_another_type(self, path: Path) -> None:
        """A model that was published in half precision is built in half precision."""
        weights.publish(nn.Linear(4, 4).to(torch.bfloat16), path)
        mapped = weights.load(lambda: nn.Linear(4, 4).to(torch.bfloat16), path)
        assert torch.bfloat16 == mapped.weight.dtype

    def test_may_have_extra_state(self, path: Path) -> None:
        """What a module makes of its own state, for the file, need not be in the mapping."""

        class Counted(nn.Linear):
            calls = 0

            def get_extra_state(self) -> Any:
                return torch.tensor(self.calls)

            def set_extra_state(self, state: Any) -> None:
                self.calls = int(state)

        model = Counted(4, 4)
        model.calls = 7
        weights.publish(model, path)
        assert 7 == weights.load(lambda: Counted(4, 4), path).calls

    def test_of_a_state_dict_is_the_same(self, path: Path) -> None:
        """A state dict is as good as the module; the first of two tied names is enough."""
        model = made()
        state = dict(model.state_dict())
        del state["out.weight"]
        weights.publish(state, path)
        mapped = weights.load(Net, path).eval()
        assert torch.equal(model(INDEX), mapped(INDEX))
        assert mapped.out.weight is mapped.words.weight


def closed_over(weight: Any) -> Callable[[], Any]:
    return lambda: weight


def with_a_parameter(model: Any, name: str, other: str) -> None:
    parameter = nn.Parameter(torch.randn(3))
    setattr(model, name, parameter)
    setattr(model, other, [parameter])


def with_attribute(name: str, make: Callable[[Any], object]) -> Any:
    model = nn.Linear(4, 4)
    setattr(model, name, make(model))
    return model


class TestBuilding:
    def build(self, constructor: Callable[[Any], None]) -> Callable[[], Any]:
        """A linear layer with additional work in its constructor."""

        def build() -> Any:
            model = nn.Linear(4, 4)
            constructor(model)
            return model

        return build

    @pytest.mark.parametrize(
        "constructor",
        [
            lambda model: setattr(model, "largest", model.weight.max().item()),
            lambda model: setattr(model, "array", model.weight.detach().numpy()),
            lambda model: setattr(model, "copies", [model.weight.detach().clone()]),
            lambda model: model.register_buffer("copy", model.weight.detach().clone(), persistent=False),
        ],
        ids=["a number", "an array", "a list", "a buffer"],
    )
    def test_may_look_at_parameters(self, path: Path, constructor: Callable[[Any], None]) -> None:
        """A constructor that computes something from its parameters runs with real ones."""
        model = nn.Linear(4, 4)
        weights.publish(model, path)
        mapped = weights.load(self.build(constructor), path)
        assert torch.equal(model.weight, mapped.weight)
        assert not any(copied.is_meta for copied in getattr(mapped, "copies", [*mapped.buffers()]))

    def test_may_freeze_a_part_in_torchscript(self, path: Path) -> None:
        """The weights of a frozen part are in its code, and in no file: it keeps those that it was built with."""

        def build() -> Any:
            torch.manual_seed(3)
            return nn.Sequential(nn.Linear(4, 4), frozen(nn.Sequential(nn.LSTM(4, 4))))

        numbers, model = torch.ones(1, 4), build()
        weights.publish(model, path)
        assert torch.equal(model(numbers)[0], weights.load(build, path)(numbers)[0])

    def test_may_name_one_parameter_twice(self, path: Path) -> None:
        """Names that share a parameter from the beginning still do."""

        def twice(model: Any) -> None:
            model.a = model.b = nn.Parameter(torch.ones(3))

        build = self.build(twice)
        weights.publish(build(), path)
        mapped = weights.load(build, path)
        assert mapped.a is mapped.b

    @pytest.mark.parametrize("make", [Net, nn.LSTM, nn.MultiheadAttention], ids=lambda make: make.__name__)
    def test_is_called_once(self, path: Path, make: Callable[..., Any]) -> None:
        """Where nothing but the module has its parameters, these never take memory."""
        made = []

        def build() -> Any:
            made.append(1)
            return make(8) if make is Net else make(8, 2)

        weights.publish(build(), path)
        weights.load(build, path)
        assert [1, 1] == made

    def test_raises_what_the_constructor_raises(self, path: Path, published: Any) -> None:
        """The error of a failing build reaches the caller."""

        def build() -> Any:
            raise RuntimeError("no config")

        with pytest.raises(RuntimeError, match=r"^no config$"):
            weights.load(build, path)

    def test_leaves_other_threads_alone(self, path: Path, published: Any) -> None:
        """A module that another thread makes at the same time keeps its weights."""
        found = []

        def build() -> Any:
            other = threading.Thread(target=lambda: found.append(nn.Linear(2, 2).weight.is_meta))
            other.start()
            other.join()
            return Net()

        weights.load(build, path)
        assert [False] == found
        assert not nn.Linear(2, 2).weight.is_meta

    def test_has_to_make_a_module(self, path: Path, published: Any) -> None:
        """A build that returns something other than a module is rejected."""
        with pytest.raises(InvalidOption, match="build='dict'"):
            weights.load(dict, path)

    def test_on_the_meta_device_loses_what_is_in_no_file(self, path: Path) -> None:
        """A build that leaves tensors without content is rejected; the error names them and the fix."""

        def build() -> Any:
            with torch.device("meta"):
                model = nn.Linear(4, 4)
                model.register_buffer("positions", torch.arange(10), persistent=False)
            return model

        weights.publish(nn.Linear(4, 4), path)
        with pytest.raises(WeightsMismatch, match=r"not in the file: positions\. .*torch\.device\('meta'\)"):
            weights.load(build, path)

    @pytest.mark.parametrize(
        "keep",
        [
            lambda model: setattr(model, "center", model.mean),
            lambda model: setattr(model, "all", [model.weight]),
            lambda model: setattr(model, "all", {"w": model.weight, "sum": model.weight.sum().item()}),
            lambda model: setattr(model, "center", model.mean[:2]),
            lambda model: model.register_buffer("center", model.mean, persistent=False),
            lambda model: model.register_buffer("center", model.mean[None], persistent=False),
            lambda model: setattr(model, "center", model.mean.detach()),
            lambda model: with_a_parameter(model, "scale", "all"),
            lambda model: setattr(model, "all", {"a": {"w": model.weight}}),
            lambda model: setattr(model, "all", {"a": [{"mean": model.mean}]}),
            lambda model: setattr(model, "all", partial(torch.add, model.mean)),
            lambda model: setattr(model, "all", closed_over(model.weight)),
            lambda model: setattr(model, "all", SimpleNamespace(mean=model.mean)),
        ],
        ids=[
            "a buffer",
            "a parameter",
            "a parameter that was read",
            "a view",
            "as a buffer",
            "a view as a buffer",
            "detached",
            "a parameter from before it was registered",
            "a parameter in nested dicts",
            "a buffer in nested containers",
            "in a partial function",
            "in a closure",
            "in an object",
        ],
    )
    def test_that_keeps_its_own_weights_beside_the_published_ones_is_refused(
        self, path: Path, keep: Callable[[Any], None]
    ) -> None:
        """What an attribute, or a buffer that no file has, shows too would stay as it was built: an error."""

        def constructor(model: Any) -> None:
            model.register_buffer("mean", torch.zeros(3))
            keep(model)

        model = self.build(constructor)()
        model.mean += 5
        weights.publish(model, path)
        with pytest.raises(WeightsMismatch, match=r"would not get the file's content: (center|all)\. "):
            weights.load(self.build(constructor), path)

    def test_that_hides_a_module_in_a_container_gives_it_the_weights_that_it_was_built_with(self, path: Path) -> None:
        """As a teacher in a list, which state dicts are not to have: its parameters are in no file, and stay."""

        def build() -> Any:
            model, teacher = nn.Linear(4, 4), nn.Linear(4, 4)
            nn.init.ones_(teacher.weight)
            model.teacher = [teacher]
            return model

        weights.publish(build(), path)
        assert torch.equal(torch.ones(4, 4), weights.load(build, path).teacher[0].weight)

    @pytest.mark.parametrize(
        "build",
        [
            lambda: scripted(nn.Linear(4, 4)),
            lambda: with_attribute("optimizer", lambda model: torch.optim.SGD(model.parameters())),
            lambda: with_attribute("answer", lambda model: model.forward),
            lambda: with_attribute("answer", lambda model: lambda: model.weight),
            lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
        ],
        ids=["a script", "an optimizer", "a method", "a closure over the module", "normed"],
    )
    def test_may_lead_to_the_module_itself_and_to_what_no_call_reads(
        self, path: Path, build: Callable[[], Any]
    ) -> None:
        """Such a module answers as the published one does."""
        numbers, model = torch.ones(1, 4), build().eval()
        weights.publish(model, path)
        assert torch.equal(model(numbers), weights.load(build, path).eval()(numbers))

    def test_is_not_searched_to_the_end_of_the_program(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An attribute may lead to a large vocabulary, whose words are no weights."""
        vocabulary = [[number] for number in range(1000)]
        monkeypatch.setattr(_torch_weights, "_MOST_OBJECTS", 100)
        looked_at: list[object] = []

        def inside(value: object) -> list[Any]:
            looked_at.append(value)
            return gc.get_referents(value)

        monkeypatch.setattr(_torch_weights, "_inside", inside)
        weights.publish(nn.Linear(4, 4), path)
        weights.load(self.build(lambda model: setattr(model, "vocabulary", vocabulary)), path)
        assert 1 < len(looked_at) < len(vocabulary)

    def test_may_keep_a_buffer_that_is_in_the_file_as_it_was_built(self, path: Path) -> None:
        """A plain attribute with the same numbers as the file's is no mistake."""

        def constructor(model: Any) -> None:
            model.register_buffer("frequencies", torch.arange(3.0))
            model.original = model.frequencies

        weights.publish(self.build(constructor)(), path)
        assert [0, 1, 2] == weights.load(self.build(constructor), path).original.tolist()


class TestWhatDoesNotFit:
    @pytest.mark.parametrize(
        ("build", "why"),
        [
            (lambda: Net(width=4), "size mismatch"),
            (lambda: nn.Linear(4, 4), "Unexpected key"),
            (lambda: nn.Sequential(Net(), nn.Linear(2, 2)), "Missing key"),
            (lambda: Net().to(torch.float64), "float32 in the file and torch.float64 in the module"),
        ],
        ids=["shapes", "surplus", "missing", "types"],
    )
    def test_is_refused(self, path: Path, published: Any, build: Callable[[], Any], why: str) -> None:
        """Weights of another model are rejected; the error has the names that do not fit."""
        with pytest.raises(WeightsMismatch, match=why) as caught:
            weights.load(build, path)
        assert isinstance(caught.value, ValueError)
        assert caught.value.fix

    def test_what_lies_in_no_file_is_refused(self, path: Path) -> None:
        """A module that copies its weights when they are loaded would be one copy per process."""

        def build() -> Any:
            model = nn.Linear(4, 4)
            model.register_load_state_dict_pre_hook(
                lambda _module, state, prefix, *_: state.update({prefix + "bias": state[prefix + "bias"].clone()})
            )
            return model

        weights.publish(nn.Linear(4, 4), path)
        if sys.platform.startswith("linux"):
            with pytest.raises(WeightsRefused, match="own copy: bias"):
                weights.load(build, path)

    @pytest.mark.parametrize(
        "source",
        [
            {"a": torch.ones(2), "b": {"c": torch.ones(2)}},
            {"a": torch.empty(2, device="meta")},
            {"a": torch.eye(3).to_sparse()},
            {"a": nn.UninitializedParameter()},
            {"a": torch.ones(2), "version": 3},
            {1: torch.ones(2)},
            {"a": (numbers := torch.ones(2)), "b": numbers.view(torch.int32)},
            frozen(nn.Linear(2, 2)),
        ],
        ids=[
            "nested",
            "meta",
            "sparse",
            "lazy",
            "numbers",
            "names that are no text",
            "two types of one memory",
            "frozen",
        ],
    )
    def test_what_cannot_be_mapped_is_not_published(self, path: Path, source: Any) -> None:
        """A state dict without tensors, or with anything but plain ones, is rejected before anything is written."""
        with pytest.raises(InvalidOption, match="source="):
            weights.publish(source, path)
        assert not path.exists()

    def test_a_pickle_in_the_place_of_weights_is_never_run(self, path: Path, published: Any) -> None:
        """Torch files are read as plain tensors only: after a check of the hash, with weights_only."""
        (file,) = path.with_name("net.d").glob("*/weights.pt")
        torch.save({"run": print}, file)
        with pytest.raises(WeightsRefused):
            weights.load(Net, path)


def test_a_full_disk_is_told_as_such(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a full disk comes from the system, not from torch."""

    def full(_state: object, file: Any) -> None:
        try:
            Path("/").write_bytes(b"")  # any OSError
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos")  # noqa: B904

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(PublishFailed, match="Is a directory"):
        weights.publish(nn.Linear(4, 4), path)
    assert not path.exists()
