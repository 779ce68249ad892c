"""Every error keeps its fields, is what its callers expect, and says what to do."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from modelguard import errors
from modelguard.errors import (
    BatchFailed,
    CallerGone,
    CannotRun,
    CircuitOpen,
    ConsumerTooSlow,
    CudaAfterFork,
    DeadlineExceeded,
    DeadlineUnreachable,
    EscapedResult,
    ForkOrder,
    ForkUnsafe,
    GuardClosed,
    InvalidOption,
    ItemRefused,
    ItemTooHeavy,
    LoadFailed,
    LoadTimeout,
    ModelGuardError,
    ModelGuardWarning,
    ModelRejected,
    ModelTooLarge,
    NoMemoryLimit,
    NoPreviousModel,
    NotSupported,
    Overloaded,
    PublishFailed,
    QueueFull,
    QuotaExceeded,
    Reloading,
    RemoteError,
    TransferRefused,
    UnhashableKey,
    WeightsMismatch,
    WeightsMissing,
    WeightsRefused,
    WorkerCrashed,
    WouldDeadlock,
    WrongResults,
)

EXAMPLES: list[ModelGuardError] = [
    InvalidOption("swap", "load_frist", why="is not a known way", fix="Choose another."),
    NoMemoryLimit("size", "80%", why="nothing limits this process", fix="Give bytes."),
    NotSupported("memory.private", reason="there is no /proc"),
    GuardClosed("nlp"),
    WouldDeadlock("nlp", why="it would wait for itself", fix="Do not."),
    LoadFailed("nlp", "OSError: no weights", attempt=3, retry_after=4.5),
    LoadTimeout("nlp", "too slow", attempt=2, retry_after=1.5),
    ModelRejected("nlp", "validate returned False", attempt=1, retry_after=0.5),
    Overloaded("no room", retry_after=2.0),
    Reloading("nlp", waited=30.0, retry_after=3.0),
    ModelTooLarge("anna", model_bytes=9_000_000, max_memory=5_000_000),
    UnhashableKey(["anna"]),
    EscapedResult("entities", path="result[0]", kind="Span"),
    WeightsRefused("/srv/net", why="the file is truncated", fix="Publish the weights again."),
    WeightsMissing("/srv/net", why="nothing has been published there", fix="Publish."),
    WeightsMismatch("/srv/net", why="size mismatch", fix="Build another."),
    PublishFailed("/srv/net", why="No space left on device", fix="Make room."),
    CannotRun("gunicron", why="was not found", fix="Correct the name.", status=127),
    ForkUnsafe(["fatal: cuda of torch: it runs. Do not."]),
    WorkerCrashed("embed", pid=4711, cause="SIGSEGV"),
    TransferRefused("embed", what="result", why="it is a lock"),
    RemoteError("embed", kind="app.Oops", text="no"),
    CudaAfterFork("nlp"),
    ForkOrder("in_child", why="nothing was prepared", fix="Prepare."),
    QueueFull("embed", queued=256, retry_after=1.2),
    QuotaExceeded("embed", "gold", queued=8, quota=8, retry_after=1.2),
    DeadlineUnreachable("embed", estimate=1.5, left=0.25, retry_after=1.25),
    CircuitOpen("embed", failures=5, retry_after=10.0),
    DeadlineExceeded("embed", waited=2.0),
    CallerGone("embed"),
    ConsumerTooSlow("embed"),
    ItemRefused("embed", why="the item cannot be weighed"),
    ItemTooHeavy("embed", weight=16, max_weight=10),
    BatchFailed("embed", "OSError: no weights", size=32),
    WrongResults("embed", "it returned None", size=32),
    NoPreviousModel("nlp", why="the guard keeps none", fix="Keep one."),
]

CLASSES = {name: found for name, found in vars(errors).items() if inspect.isclass(found) and name in errors.__all__}


def of(error: BaseException) -> str:
    return type(error).__name__


def test_every_error_is_tried_here() -> None:
    """No error class is missing below."""
    raised = {name for name, found in CLASSES.items() if issubclass(found, ModelGuardError)} - {"ModelGuardError"}
    assert raised == {of(error) for error in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=of)
class TestEveryError:
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_pickles_and_keeps_its_fields(self, error: ModelGuardError, protocol: int) -> None:
        """An error crosses process borders whole: its class, its message, its fields, its notes."""
        noted = copy.copy(error)
        noted.add_note("in worker 3")
        found = pickle.loads(pickle.dumps(noted, protocol))
        assert (type(error), str(error), error.args) == (type(found), str(found), found.args)
        assert {**vars(error), "__notes__": ["in worker 3"]} == vars(found)

    def test_copies(self, error: ModelGuardError) -> None:
        """A copy for another thread is another object with the same fields, and no traceback."""
        copied = copy.copy(error)
        assert copied is not error
        assert (str(error), vars(error), None) == (str(copied), vars(copied), copied.__traceback__)

    def test_is_caught_as_one_of_ours(self, error: ModelGuardError) -> None:
        """``except ModelGuardError`` catches every error that modelguard itself raises."""
        with pytest.raises(ModelGuardError):
            raise error

    def test_says_something(self, error: ModelGuardError) -> None:
        """The message begins with a line that says what it is about."""
        assert re.fullmatch(r"\S.{5,200}", str(error).splitlines()[0])


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (InvalidOption, ValueError),
        (CannotRun, ValueError),
        (NotSupported, RuntimeError),
        (ForkUnsafe, RuntimeError),
        (WorkerCrashed, RuntimeError),
        (TransferRefused, TypeError),
        (RemoteError, RuntimeError),
        (ForkOrder, RuntimeError),
        (QueueFull, RuntimeError),
        (QuotaExceeded, RuntimeError),
        (DeadlineUnreachable, RuntimeError),
        (CircuitOpen, RuntimeError),
        (DeadlineExceeded, TimeoutError),
        (CallerGone, RuntimeError),
        (ConsumerTooSlow, RuntimeError),
        (ItemRefused, ValueError),
        (ItemTooHeavy, ValueError),
        (BatchFailed, RuntimeError),
        (WrongResults, TypeError),
        (GuardClosed, RuntimeError),
        (WouldDeadlock, RuntimeError),
        (LoadFailed, RuntimeError),
        (LoadTimeout, TimeoutError),
        (Overloaded, RuntimeError),
        (Reloading, TimeoutError),
        (ModelTooLarge, RuntimeError),
        (UnhashableKey, TypeError),
        (EscapedResult, RuntimeError),
        (WeightsRefused, RuntimeError),
        (WeightsMissing, FileNotFoundError),
        (WeightsMismatch, ValueError),
        (PublishFailed, OSError),
        (ModelGuardWarning, UserWarning),
    ],
)
def test_each_is_the_builtin_that_its_callers_expect(kind: type[Exception], builtin: type[Exception]) -> None:
    """Who does not know modelguard catches its errors by the builtin that fits."""
    assert issubclass(kind, builtin)


def test_the_tree_is_as_drawn() -> None:
    """The tree in the module's docstring shows each class below its parent, with its builtin."""
    drawn: dict[str, str | None] = {}
    above: list[str] = []
    for indent, name in re.findall(r"^    ([│├└─ ]*)(\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(indent) // 4
        above[depth:] = [name]
        drawn[name] = above[depth - 1] if depth else None
    ours = {
        name: next((base.__name__ for base in found.__bases__ if base.__name__ in CLASSES), None)
        for name, found in CLASSES.items()
    }
    assert ours == drawn


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EXAMPLES[0], "swap='load_frist': is not a known way. Choose another."),
        (EXAMPLES[2], "memory.private is not supported here: there is no /proc"),
        (EXAMPLES[3], "'nlp' is closed; make a new one, or close it after its last call"),
        (EXAMPLES[4], "'nlp': it would wait for itself. Do not."),
        (EXAMPLES[5], "guard 'nlp' has no model: OSError: no weights (attempt 3, next in 4.5 s)"),
        (EXAMPLES[9], "guard 'nlp' had no model to serve after 30.0 s of waiting"),
        (EXAMPLES[10], "model 'anna' takes 9 MB and the pool's budget is 5 MB; raise max_memory or serve this model"),
        (EXAMPLES[11], "pool key ['anna'] of type list cannot be hashed; use a string, a number or a tuple"),
        (EXAMPLES[12], "entities() returned a Span at result[0], which points into a memory zone"),
        (EXAMPLES[13], "weights '/srv/net' are refused: the file is truncated. Publish the weights again."),
        (EXAMPLES[16], "weights cannot be published at '/srv/net': No space left on device. Make room."),
    ],
    ids=of,
)
def test_messages_say_what_is_wrong_and_what_to_do(error: ModelGuardError, message: str) -> None:
    """The message names the thing, the reason and the fix."""
    assert str(error).startswith(message)


@pytest.mark.parametrize("error", [error for error in EXAMPLES if isinstance(error, LoadFailed)], ids=of)
def test_each_caller_gets_its_own_failure(error: LoadFailed) -> None:
    """The same failure for another caller is another object, with the time that is left."""
    again = error.again(0.25)
    assert again is not error
    assert (type(error), error.reason, error.attempt, 0.25) == (
        type(again),
        again.reason,
        again.attempt,
        again.retry_after,
    )


class Huge:
    """A value whose repr is megabytes."""

    def __repr__(self) -> str:
        return "x" * 6_000_000


class Broken:
    """A value whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    "value",
    [
        "x" * 6_000_000,
        b"x" * 6_000_000,
        Huge(),
        Broken(),
        [["x" * 999] * 99] * 99,
        {"x" * 999: [1] * 999},
        10**4000,
        10**5000,
    ],
    ids=["text", "bytes", "object", "broken", "lists", "dict", "number", "huge number"],
)
def test_a_message_stays_short_whatever_the_value(value: object) -> None:
    """A model or a file given by mistake does not fill the log: message and fields have a few hundred characters."""
    found = [
        InvalidOption("source", value, why="it cannot be used", fix="Give another one."),
        CannotRun(value, why="is not a command", fix="Give one.", status=127),
        ModelTooLarge(value, model_bytes=2, max_memory=1),
        UnhashableKey(value),
    ]
    for error in found:
        assert len(str(error)) <= 400
        assert all(len(str(field)) <= 200 for field in vars(error).values())


@pytest.mark.parametrize(
    "value", ["load_frist", "/a/path/that/is/quite/long/but/still/useful/in/a/message.conf", 0.5, None]
)
def test_a_short_value_is_shown_whole(value: object) -> None:
    """What a person has typed can be read in the message."""
    error = InvalidOption("swap", value, why="is not a known way", fix="Choose another.")
    assert repr(value) == error.value
    assert f"swap={value!r}: " in str(error)
