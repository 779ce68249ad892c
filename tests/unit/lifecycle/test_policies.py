from __future__ import annotations

import math
import operator
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from modelguard import TTL, Errors, MemoryGrowth, MemoryLimit, Modified, Policy, Snapshot, Uses
from modelguard.errors import InvalidOption
from modelguard.lifecycle.policies import FileChange, subset
from modelguard.telemetry import Reason

MB = 10**6
WEIGHTS = Path("/models/weights.bin")


class Tired(Policy):
    """A user-defined policy."""

    def due(self, now: Snapshot) -> bool:
        return now.gauges.get("strings", 0) > 2 * now.first_gauges.get("strings", 0)

    def __repr__(self) -> str:
        return "Tired()"


def grown(by: int, *, samples: int = 3, baseline: int | None = 100 * MB, limit: int | None = None) -> Snapshot:
    """A generation that settled at ``baseline`` and has been read so many times since, ``by`` bytes higher."""
    return Snapshot(memory=(100 * MB + by,) * samples, baseline=baseline, limit=limit)


def changed(*, quiet: float, is_changed: bool = True) -> Snapshot:
    """Weights whose last change was seen so many seconds ago."""
    return Snapshot(files={WEIGHTS: FileChange(is_changed, quiet)})


@pytest.mark.parametrize(
    ("policy", "before", "after"),
    [
        (TTL("1h", jitter=0), Snapshot(age=3599.9), Snapshot(age=3600)),
        (Uses(3), Snapshot(uses=2), Snapshot(uses=3)),
        (Errors(consecutive=5), Snapshot(consecutive_errors=4), Snapshot(consecutive_errors=5)),
        (MemoryGrowth("500 MB"), grown(499 * MB), grown(500 * MB)),
        (MemoryGrowth("50%"), grown(499 * MB, limit=1000 * MB), grown(500 * MB, limit=1000 * MB)),
        (MemoryLimit("800 MB"), grown(699 * MB), grown(700 * MB)),
        (MemoryLimit("80%"), grown(699 * MB, limit=1000 * MB), grown(700 * MB, limit=1000 * MB)),
        (Modified(WEIGHTS), changed(quiet=1.9), changed(quiet=2)),
        (Modified(WEIGHTS, quiet="1m"), changed(quiet=59), changed(quiet=60)),
        (Modified(WEIGHTS, atomic=True), changed(quiet=9, is_changed=False), changed(quiet=0)),
        (Tired(), Snapshot(gauges={"strings": 20}, first_gauges={"strings": 10}), Snapshot(gauges={"strings": 1})),
    ],
    ids=repr,
)
def test_each_policy_is_due_at_its_bound(policy: Policy, before: Snapshot, after: Snapshot) -> None:
    """A policy is due from its bound on and not before, and a due policy names itself as the reason."""
    assert (False, ()) == (policy.due(before), policy.reasons(before))
    assert (True, [repr(policy)]) == (policy.due(after), [str(reason) for reason in policy.reasons(after)])


@pytest.mark.parametrize("policy", [MemoryGrowth("10 MB"), MemoryLimit("150 MB")], ids=repr)
class TestMemory:
    def test_one_reading_is_no_verdict(self, policy: Policy) -> None:
        """A verdict on memory needs three readings in a row."""
        assert [False, False, False, True] == [policy.due(grown(90 * MB, samples=n)) for n in range(4)]

    @pytest.mark.parametrize("spike", [0, 1, 2])
    def test_a_spike_is_no_growth(self, policy: Policy, spike: int) -> None:
        """The lowest of three readings decides, so neither one nor two calls with large buffers are growth."""
        memory = [100 * MB] * 3
        memory[spike] = memory[spike - 1] = 10_000 * MB
        assert not policy.due(Snapshot(memory=tuple(memory), baseline=100 * MB))

    def test_memory_is_read_for_it(self, policy: Policy) -> None:
        """The guard reads memory for policies that ask about it, alone or joined."""
        assert (True, True) == (policy.reads_memory, (Uses(5) | policy).reads_memory)


def test_growth_counts_from_where_the_generation_settled() -> None:
    """Until a generation has settled there is no baseline for growth."""
    assert not MemoryGrowth("1 MB").due(grown(900 * MB, baseline=None))


@pytest.mark.parametrize("policy", [MemoryGrowth("50%"), MemoryLimit("50%")], ids=repr)
def test_a_share_without_a_limit_is_never_due(policy: Policy) -> None:
    """If the limit is removed while the process runs, a share of it is not due."""
    assert not policy.due(grown(10_000 * MB, limit=None))


def test_a_limit_below_the_fresh_model_is_ignored() -> None:
    """If a new model is above the bound already, no reload can help: the policy reports it and stays silent."""
    policy, now = MemoryLimit("90 MB"), grown(50 * MB)
    assert not policy.due(now)
    assert "the process holds 100 MB with a fresh model, and the bound is 90 MB" == policy.ignored_because(now)


def test_policies_that_can_help_are_not_ignored() -> None:
    """Nothing is ignored before the generation has settled, below the bound, or by other policies."""
    assert [None] * 3 == [
        MemoryLimit("90 MB").ignored_because(grown(0, baseline=None)),
        MemoryLimit("110 MB").ignored_because(grown(0)),
        Uses(1).ignored_because(Snapshot(uses=5)),
    ]


@pytest.mark.parametrize(("draw", "seconds"), [(0.0, 3600), (0.5, 3420), (0.999_999, 3240.001)])
def test_a_ttl_ends_earlier_by_chance(draw: float, seconds: float) -> None:
    """Each process shortens its TTL by up to a tenth, so that workers do not reload together."""
    policy = TTL("1h")
    due = [policy.due(Snapshot(age=age, jitter=draw)) for age in (seconds - 0.01, seconds + 0.01)]
    assert [False, True] == due


def test_a_missing_file_is_no_change() -> None:
    """Nothing is due while the watched path has not been seen."""
    assert not Modified(WEIGHTS).due(Snapshot())


class TestJoined:
    def test_either_of_two_suffices(self) -> None:
        """``|`` is due when one of its policies is, and gives each due one as a reason."""
        policy = TTL("1m", jitter=0) | Uses(5)
        snapshots = [Snapshot(age=age, uses=uses) for age, uses in [(1, 1), (60, 1), (1, 5), (60, 5)]]
        ttl, uses = Reason("ttl", "TTL('1m')"), Reason("uses", "Uses(5)")
        assert [(), (ttl,), (uses,), (ttl, uses)] == [policy.reasons(snapshot) for snapshot in snapshots]

    def test_both_of_two_are_needed(self) -> None:
        """``&`` is due when all of its policies are, and is one reason."""
        policy = TTL("1m", jitter=0) & Uses(5)
        snapshots = [Snapshot(age=age, uses=uses) for age, uses in [(60, 1), (1, 5), (60, 5)]]
        both = Reason("combination", "TTL('1m') & Uses(5)")
        assert [(), (), (both,)] == [policy.reasons(snapshot) for snapshot in snapshots]

    def test_they_nest(self) -> None:
        """Policies may be combined to any depth, are shown as they were combined, and know their parts."""
        policy = (TTL("1h") | Uses(5)) & Tired() | Errors()
        assert "(TTL('1h') | Uses(5)) & Tired() | Errors(consecutive=5)" == repr(policy)
        assert (TTL("1h"), Uses(5), Errors()) == (*policy.parts()[:2], policy.parts()[3])
        strings = {"gauges": {"strings": 9}, "first_gauges": {"strings": 1}}
        assert [False, False, True] == [
            policy.due(Snapshot(uses=uses, **figures)) for uses, figures in [(5, {}), (4, strings), (5, strings)]
        ]

    def test_they_are_asked_as_soon_as_one_of_them_wants(self) -> None:
        """A joined policy is asked again when the first of its members is of its members'."""
        now = Snapshot(age=10, uses=3)
        assert (2, 50) == (Uses(5) | TTL("1m", jitter=0)).next_check(now)
        assert (2, 50) == (Uses(5) & TTL("1m", jitter=0)).next_check(now)

    @pytest.mark.parametrize("join", [operator.or_, operator.and_])
    @pytest.mark.parametrize(
        ("other", "fix"),
        [
            ("1h", "Write TTL('1h')."),
            ("500 MB", "Write MemoryGrowth('500 MB')."),
            (3, "Write Uses(3) for a number of calls, or TTL(3) for seconds."),
            (TTL, "Write it with its argument: TTL(...)."),
            ([Uses(2)], "Join policies with |"),
            (len, "Write a subclass of Policy"),
            (None, "Write for example TTL('1h')"),
        ],
    )
    def test_only_policies_can_be_joined(self, join: Callable[[Any, Any], Policy], other: Any, fix: str) -> None:
        """Anything else is rejected where it is joined, on either side, with what probably was intended."""
        for left, right in ((Uses(1), other), (other, Uses(1))):
            with pytest.raises(InvalidOption, match="joins two policies") as rejected:
                join(left, right)
            assert rejected.value.fix.startswith(fix)

    def test_or_and_and_do_not_join(self) -> None:
        """``TTL(...) or Uses(...)`` would silently mean the first of the two, so it is an error."""
        with pytest.raises(InvalidOption, match=r"TTL\('1h'\).*neither true nor false.*with \| and &"):
            TTL("1h") or Uses(5)
        with pytest.raises(InvalidOption, match="not with `or` and `and`"):
            TTL("1h") and Uses(5)

    def test_three_policies_join_from_either_side(self) -> None:
        """The reflected operators leave two policies to the ordinary ones."""
        assert "TTL('1h') | Uses(2) | Uses(3)" == repr(TTL("1h") | Uses(2) | Uses(3))


@pytest.mark.parametrize(
    ("policy", "uses", "seconds"),
    [
        (TTL("1m", jitter=0), math.inf, 40),
        (Uses(50), 43, math.inf),
        (Uses(2), 1, math.inf),
        (Errors(), math.inf, math.inf),
        (MemoryGrowth("1 MB"), math.inf, 1),
        (Modified(WEIGHTS), math.inf, 1),
        (Tired(), 1, 1),
    ],
    ids=repr,
)
def test_a_policy_tells_how_long_its_answer_holds(policy: Policy, uses: float, seconds: float) -> None:
    """Calls do not ask a policy until its answer may have changed; a user-defined one is asked after every call."""
    assert (uses, seconds) == policy.next_check(Snapshot(age=20, uses=7))


def test_policies_are_values() -> None:
    """Policies with the same meaning are equal and have the same hash, whatever their units."""
    assert TTL("1h30m") == TTL(timedelta(minutes=90)) == TTL(5400)
    assert MemoryGrowth("0.5 GB") == MemoryGrowth(500 * MB)
    assert {Uses(5) | TTL("1m")} == {Uses(5) | TTL(60)}
    assert (Uses(5) | Errors()) != (Uses(5) & Errors())


@pytest.mark.parametrize(
    ("policy", "written"),
    [
        (TTL(5400), "TTL('1h30m')"),
        (MemoryGrowth(500_000_000), "MemoryGrowth('500 MB')"),
        (MemoryLimit(" 80 %"), "MemoryLimit('80%')"),
        (Modified("/models/x"), "Modified('/models/x')"),
    ],
)
def test_policies_are_written_for_people(policy: Policy, written: str) -> None:
    """Events name a policy as in source code."""
    assert written == repr(policy)


def test_a_policy_cannot_be_made_without_a_verdict() -> None:
    """A policy of your own needs exactly one method, ``due``."""

    class Nothing(Policy):
        pass

    with pytest.raises(TypeError, match="due"):
        Nothing()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("make", "options", "argument"),
    [
        (TTL, {"age": "-1h"}, "age"),
        (TTL, {"age": 0}, "age"),
        (TTL, {"age": "an hour"}, "age"),
        (TTL, {"age": "1h", "jitter": -0.1}, "jitter"),
        (TTL, {"age": "1h", "jitter": 1.1}, "jitter"),
        (TTL, {"age": "1h", "jitter": True}, "jitter"),
        (TTL, {"age": "1h", "jitter": "10%"}, "jitter"),
        (Uses, {"count": 0}, "count"),
        (Uses, {"count": 1.5}, "count"),
        (Uses, {"count": True}, "count"),
        (Uses, {"count": "50_000"}, "count"),
        (Errors, {"consecutive": 0}, "consecutive"),
        (MemoryGrowth, {"size": "-500 MB"}, "size"),
        (MemoryGrowth, {"size": "a lot"}, "size"),
        (MemoryGrowth, {"size": 0.8}, "size"),
        (MemoryLimit, {"size": "0%"}, "size"),
        (MemoryLimit, {"size": "120%"}, "size"),
        (Modified, {"path": ""}, "path"),
        (Modified, {"path": 3}, "path"),
        (Modified, {"path": "x", "quiet": "-2s"}, "quiet"),
    ],
)
def test_policies_that_cannot_be_meant_are_refused(make: Any, options: dict[str, Any], argument: str) -> None:
    """Negative or unparsable sizes, durations and counts are rejected where they are given, by name."""
    with pytest.raises(InvalidOption) as refusal:
        make(**options)
    assert argument == refusal.value.argument


@pytest.mark.parametrize(
    ("policy", "weights", "rest"),
    [
        (None, None, None),
        (TTL("1h"), TTL("1h"), None),
        (Uses(5), None, Uses(5)),
        (Tired(), None, "Tired()"),
        (TTL("1h") | Uses(5) | Modified(WEIGHTS), TTL("1h") | Modified(WEIGHTS), Uses(5)),
        (TTL("1h") & Modified(WEIGHTS), TTL("1h") & Modified(WEIGHTS), None),
        (TTL("1h") & Uses(5), None, TTL("1h") & Uses(5)),
        ((TTL("1h") | Uses(5)) & Errors(3), None, TTL("1h") & Errors(3) | Uses(5) & Errors(3)),
        ((TTL("1h") | Uses(5)) & Modified(WEIGHTS), TTL("1h") & Modified(WEIGHTS), Uses(5) & Modified(WEIGHTS)),
    ],
)
def test_a_policy_parts_into_new_weights_and_the_rest(policy: Policy | None, weights: object, rest: object) -> None:
    """Policies for age and changed files are separated from policies for the state of the process, ``&`` kept whole."""

    def text(part: object) -> str:
        return part if isinstance(part, str) else repr(part)

    parts = subset(policy, renews=True), subset(policy, renews=False)
    assert (text(weights), text(rest)) == (text(parts[0]), text(parts[1]))
